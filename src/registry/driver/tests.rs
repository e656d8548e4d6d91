use std::{
    future::pending,
    panic::panic_any,
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    runtime::{Builder, Runtime},
    sync::oneshot,
    task::yield_now,
    time::sleep,
};

use super::*;

const HOUR: Duration = Duration::from_secs(60 * 60);

/// A deadline, and how often somebody looked at it.
#[derive(Default)]
struct Target {
    due: Mutex<Option<Instant>>,
    looks: AtomicUsize,
    expired: Mutex<Vec<Noticed>>,
}

/// Says that it was dropped unfinished, by way of the other half.
struct Unfinished(oneshot::Sender<()>);

// === impl Target ===

impl Target {
    fn set(&self, due: Instant) {
        *self.due.lock().expect("no panic") = Some(due);
    }

    fn looks(&self) -> usize {
        self.looks.load(Ordering::Relaxed)
    }

    fn expired(&self) -> Vec<Noticed> {
        self.expired.lock().expect("no panic").clone()
    }
}

impl Expire for Target {
    fn due(&self) -> Option<Instant> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        *self.due.lock().expect("no panic")
    }

    fn expire(self: Arc<Self>, now: Instant, noticed: Noticed) -> Option<Instant> {
        let mut due = self.due.lock().expect("no panic");
        if due.take_if(|at| *at <= now).is_some() {
            self.expired.lock().expect("no panic").push(noticed);
        }
        *due
    }
}

fn paused() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    builder.build().expect("a runtime")
}

/// Has a runtime keep deadlines, and its timer look for the first time.
fn meet(runtime: &Runtime, driver: &Driver, target: &Arc<Target>) {
    runtime.block_on(async {
        start(driver, target);
        yield_now().await;
    });
}

/// Drives a runtime for so long.
fn wait(runtime: &Runtime, time: Duration) {
    runtime.block_on(async { sleep(time).await });
}

fn start(driver: &Driver, target: &Arc<Target>) {
    driver.start(|| {
        let weak: Weak<Target> = Arc::downgrade(target);
        weak
    });
}

fn timers(driver: &Driver) -> usize {
    driver.shared.state().timers.len()
}

fn waiting(driver: &Driver) -> usize {
    driver.shared.state().errands.len()
}

#[test]
fn each_runtime_has_one_timer_whatever_thread_asks() {
    let (driver, target) = (Driver::new(), Arc::default());
    let (first, second) = (paused(), paused());
    for _ in 0..3 {
        meet(&first, &driver, &target);
        meet(&second, &driver, &target);
    }
    assert_eq!(timers(&driver), 2);
    start(&driver, &target);
    assert_eq!(timers(&driver), 2, "here is no runtime");
    drop(first);
    assert_eq!(timers(&driver), 1);
    let several = Builder::new_multi_thread().worker_threads(2).build();
    let several = several.expect("a runtime");
    for _ in 0..3 {
        several.block_on(async { start(&driver, &target) });
    }
    assert_eq!(timers(&driver), 2);
}

#[test]
fn timers_end_with_what_they_are_for() {
    let (driver, target) = (Driver::new(), Arc::default());
    let (first, second) = (paused(), paused());
    meet(&first, &driver, &target);
    meet(&second, &driver, &target);
    let shared = Arc::downgrade(&driver.shared);
    drop((target, driver));
    first.block_on(yield_now());
    second.block_on(yield_now());
    assert!(shared.upgrade().is_none());
}

#[test]
fn a_timer_wakes_once_when_it_is_told_and_once_when_it_is_time() {
    let (driver, target) = (Driver::new(), Arc::<Target>::default());
    let (first, second) = (paused(), paused());
    meet(&first, &driver, &target);
    meet(&second, &driver, &target);
    let before = target.looks();
    first.block_on(async {
        target.set(Instant::now() + HOUR);
        driver.wake();
        yield_now().await;
    });
    wait(&second, HOUR / 2);
    assert_eq!(target.looks() - before, 1);
    wait(&first, 2 * HOUR);
    assert_eq!(target.expired(), [Noticed::InTime]);
    wait(&second, 10 * HOUR);
    assert_eq!(target.looks() - before, 2);
    assert_eq!(target.expired().len(), 1);
}

#[test]
fn who_takes_over_is_the_one_that_looks_from_then_on() {
    let (driver, target) = (Driver::new(), Arc::<Target>::default());
    let (first, second) = (paused(), paused());
    meet(&first, &driver, &target);
    meet(&second, &driver, &target);
    first.block_on(async {
        target.set(Instant::now() + HOUR);
        driver.wake();
        yield_now().await;
    });
    second.block_on(async {
        sleep(HOUR + 2 * SLACK).await;
        assert_eq!(target.expired(), [Noticed::Late]);
        // Told of it from where no runtime is.
        let at = Instant::now() + HOUR;
        let tell = || {
            target.set(at);
            driver.wake();
        };
        std::thread::scope(|scope| scope.spawn(tell).join()).expect("no panic");
        sleep(HOUR + SLACK / 2).await;
        assert_eq!(target.expired(), [Noticed::Late, Noticed::InTime]);
    });
}

#[test]
fn a_runtime_without_a_clock_leaves_deadlines_to_the_others() {
    let (driver, target) = (Driver::new(), Arc::<Target>::default());
    let without = Builder::new_current_thread().build().expect("a runtime");
    target.set(Instant::now() + HOUR);
    meet(&without, &driver, &target);
    let with = paused();
    with.block_on(async {
        start(&driver, &target);
        sleep(HOUR + SLACK / 2).await;
        assert_eq!(target.expired(), [Noticed::InTime]);
    });
    assert_eq!(timers(&driver), 2);
}

#[test]
fn a_task_that_another_runtime_took_does_not_run_twice() {
    let (driver, target) = (Driver::new(), Arc::default());
    let (first, second) = (paused(), paused());
    meet(&second, &driver, &target);
    let runs = Arc::new(AtomicUsize::new(0));
    let task = {
        let runs = runs.clone();
        async move {
            runs.fetch_add(1, Ordering::Relaxed);
        }
    };
    first.block_on(async { driver.spawn(Moves::Always, task) });
    assert_eq!(runs.load(Ordering::Relaxed), 0);
    wait(&second, 2 * SLACK);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    first.block_on(yield_now());
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(waiting(&driver), 0);
}

#[test]
fn a_task_that_has_begun_goes_on_where_it_may() {
    for moves in [Moves::Always, Moves::BeforeItBegins] {
        let (driver, target) = (Driver::new(), Arc::default());
        let (first, second) = (paused(), paused());
        meet(&first, &driver, &target);
        meet(&second, &driver, &target);
        let (go_on, goes_on) = oneshot::channel::<()>();
        let (ended, mut end) = oneshot::channel();
        let task = async move {
            let ended = Unfinished(ended);
            // The time of the first runtime ends with it.
            in_time(HOUR, goes_on)
                .await
                .expect("in time")
                .expect("told");
            ended.0.send(()).expect("the test listens");
        };
        first.block_on(async {
            driver.spawn(moves, task);
            yield_now().await;
        });
        drop(first);
        let told = go_on.send(());
        assert_eq!(told.is_ok(), moves == Moves::Always);
        wait(&second, SLACK);
        assert_eq!(end.try_recv().is_ok(), moves == Moves::Always);
        assert_eq!(waiting(&driver), 0);
    }
}

#[test]
fn a_task_that_panics_is_not_handed_on() {
    let (driver, target) = (Driver::new(), Arc::default());
    let (first, second) = (paused(), paused());
    meet(&first, &driver, &target);
    meet(&second, &driver, &target);
    let runs = Arc::new(AtomicUsize::new(0));
    let task = {
        let runs = runs.clone();
        async move {
            runs.fetch_add(1, Ordering::Relaxed);
            panic_any("on purpose");
        }
    };
    first.block_on(async {
        driver.spawn(Moves::Always, task);
        yield_now().await;
    });
    drop(first);
    wait(&second, SLACK);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(waiting(&driver), 0);
}

#[test]
fn a_task_goes_on_from_runtime_to_runtime_and_not_for_ever() {
    let (driver, target) = (Driver::new(), Arc::default());
    let (unfinished, mut end) = oneshot::channel();
    let mut runtime = paused();
    meet(&runtime, &driver, &target);
    runtime.block_on(async {
        let unfinished = Unfinished(unfinished);
        driver.spawn(Moves::Always, async move {
            let _unfinished = unfinished;
            pending::<()>().await;
        });
        yield_now().await;
    });
    let mut moved = 0;
    while end.try_recv() == Err(oneshot::error::TryRecvError::Empty) {
        let next = paused();
        meet(&next, &driver, &target);
        drop(std::mem::replace(&mut runtime, next));
        wait(&runtime, SLACK);
        moved += 1;
        assert!(moved < 100, "it never ends");
    }
    assert!(moved > 2);
    assert_eq!(waiting(&driver), 0);
}

#[test]
fn nothing_waits_where_nobody_comes() {
    let (driver, target) = (Driver::new(), Arc::default());
    let (unfinished, mut end) = oneshot::channel();
    let task = |unfinished| async move {
        let _unfinished = Unfinished(unfinished);
        pending::<()>().await;
    };
    driver.spawn(Moves::Always, task(unfinished));
    assert!(
        end.try_recv()
            .is_err_and(|error| error == oneshot::error::TryRecvError::Closed)
    );
    let (unfinished, mut end) = oneshot::channel();
    let only = paused();
    meet(&only, &driver, &target);
    // Its timer may come to it later.
    driver.spawn(Moves::Always, task(unfinished));
    assert_eq!(end.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    drop(only);
    assert_eq!(end.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    assert_eq!(waiting(&driver), 0);
}

/// Whatever comes in between, a task begins once at most, and is run to its end or dropped.
#[test]
fn no_task_is_lost_or_runs_twice_while_runtimes_come_and_go() {
    const THREADS: usize = 3;
    const RUNTIMES: usize = 50;
    const TASKS: usize = 20;
    /// How often each thing happened to a task.
    #[derive(Default)]
    struct Fates {
        begun: Vec<AtomicUsize>,
        ended: AtomicUsize,
        dropped: AtomicUsize,
    }
    struct Fate(Arc<Fates>);
    impl Drop for Fate {
        fn drop(&mut self) {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
    let task = |fates: &Arc<Fates>, number: usize| {
        let fate = Fate(fates.clone());
        async move {
            fate.0.begun[number].fetch_add(1, Ordering::Relaxed);
            yield_now().await;
            fate.0.ended.fetch_add(1, Ordering::Relaxed);
        }
    };
    let all = THREADS * RUNTIMES * TASKS;
    let fates = Arc::new(Fates {
        begun: (0..all).map(|_| AtomicUsize::new(0)).collect(),
        ..Fates::default()
    });
    let (driver, target) = (Driver::new(), Arc::default());
    let mut builder = Builder::new_multi_thread();
    let stays = builder.worker_threads(1).enable_all().build();
    let stays = stays.expect("a runtime");
    stays.block_on(async { start(&driver, &target) });
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (driver, target, fates) = (&driver, &target, &fates);
            scope.spawn(move || {
                for runtime in 0..RUNTIMES {
                    let goes = Builder::new_current_thread().enable_all().build();
                    goes.expect("a runtime").block_on(async {
                        start(driver, target);
                        for number in 0..TASKS {
                            let number = (thread * RUNTIMES + runtime) * TASKS + number;
                            driver.spawn(Moves::Always, task(fates, number));
                            if number.is_multiple_of(7) {
                                yield_now().await;
                            }
                        }
                    });
                }
            });
        }
    });
    let dropped = || fates.dropped.load(Ordering::Relaxed);
    let limit = 100;
    stays.block_on(async {
        for _ in 0..limit {
            if dropped() < all {
                sleep(SLACK).await;
            }
        }
    });
    assert_eq!(dropped(), all);
    assert_eq!(waiting(&driver), 0);
    assert_eq!(timers(&driver), 1);
    let begun = |fate: &AtomicUsize| fate.load(Ordering::Relaxed);
    assert!(fates.begun.iter().all(|fate| begun(fate) <= 1));
    // From one that goes to the next that goes, a few may come to their end.
    let ended = fates.ended.load(Ordering::Relaxed);
    assert!(ended > all - all / 20, "{ended} of {all}");
}
