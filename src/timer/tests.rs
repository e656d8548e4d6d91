use std::{
    future::{pending, poll_fn},
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

/// How its times were noticed.
#[derive(Default)]
struct Target {
    noticed: Mutex<Vec<Timeliness>>,
}

/// Says that it was dropped unfinished, by way of the other half.
struct Unfinished(oneshot::Sender<()>);

// === impl Target ===

impl Target {
    fn set(self: &Arc<Self>, timer: &Arc<Timer>, at: Instant) -> TimerHandle {
        let weak: Weak<Self> = Arc::downgrade(self);
        timer.set(at, weak)
    }

    fn noticed(&self) -> Vec<Timeliness> {
        self.noticed.lock().expect("no panic").clone()
    }
}

impl OnDeadline for Target {
    fn on_deadline(&self, _watch: &LatenessTracker, noticed: Timeliness) -> Option<Rearm> {
        self.noticed.lock().expect("no panic").push(noticed);
        None
    }
}

fn paused() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    builder.build().expect("a runtime")
}

/// Has a runtime keep time, and its keeper look for the first time.
fn meet(runtime: &Runtime, timer: &Arc<Timer>) {
    runtime.block_on(async {
        timer.ensure_on_current_runtime();
        yield_now().await;
    });
}

/// The same. Counts how often the keeper wakes.
fn meet_and_count(runtime: &Runtime, timer: &Arc<Timer>) -> Arc<AtomicUsize> {
    let polls = Arc::new(AtomicUsize::new(0));
    let keeper = TimerTask {
        shared: timer.shared.clone(),
        runtime: runtime.handle().id(),
        backlog: None,
    };
    assert!(timer.shared.state().register(keeper.runtime));
    let mut run = Box::pin(keeper.run(Arc::downgrade(timer)));
    let counted = polls.clone();
    let counting = poll_fn(move |cx| {
        counted.fetch_add(1, Ordering::Relaxed);
        run.as_mut().poll(cx)
    });
    runtime.block_on(async {
        drop(Handle::current().spawn(counting));
        yield_now().await;
    });
    polls
}

/// Drives a runtime for so long.
fn wait(runtime: &Runtime, time: Duration) {
    runtime.block_on(async { sleep(time).await });
}

fn keepers(timer: &Timer) -> usize {
    timer.shared.state().entries.len()
}

fn waiting(timer: &Timer) -> usize {
    timer.shared.state().pending.waiting.len()
}

#[test]
fn each_runtime_has_one_keeper_whatever_thread_asks() {
    let timer = Arc::new(Timer::new());
    let (first, second) = (paused(), paused());
    for _ in 0..3 {
        meet(&first, &timer);
        meet(&second, &timer);
    }
    assert_eq!(keepers(&timer), 2);
    timer.ensure_on_current_runtime();
    assert_eq!(keepers(&timer), 2, "here is no runtime");
    drop(first);
    assert_eq!(keepers(&timer), 1);
    let several = Builder::new_multi_thread().worker_threads(2).build();
    let several = several.expect("a runtime");
    for _ in 0..3 {
        several.block_on(async { timer.ensure_on_current_runtime() });
    }
    assert_eq!(keepers(&timer), 2);
}

#[test]
fn keepers_end_with_their_timer() {
    let timer = Arc::new(Timer::new());
    let (first, second) = (paused(), paused());
    meet(&first, &timer);
    meet(&second, &timer);
    let shared = Arc::downgrade(&timer.shared);
    drop(timer);
    first.block_on(yield_now());
    second.block_on(yield_now());
    assert!(shared.upgrade().is_none());
}

#[test]
fn a_keeper_wakes_once_when_it_is_told_and_once_when_it_is_time() {
    let (timer, target) = (Arc::new(Timer::new()), Arc::<Target>::default());
    let (first, second) = (paused(), paused());
    meet(&first, &timer);
    let polls = meet_and_count(&second, &timer);
    let wakes = || polls.load(Ordering::Relaxed) - 1;
    assert_eq!(wakes(), 0);
    let ticket = first.block_on(async {
        let ticket = target.set(&timer, Instant::now() + HOUR);
        yield_now().await;
        ticket
    });
    wait(&second, HOUR / 2);
    assert_eq!(wakes(), 1);
    wait(&first, 2 * HOUR);
    assert_eq!(target.noticed(), [Timeliness::OnTime]);
    wait(&second, 10 * HOUR);
    assert_eq!(wakes(), 2);
    assert_eq!(target.noticed().len(), 1);
    drop(ticket);
}

#[test]
fn who_takes_over_is_the_one_that_looks_from_then_on() {
    let (timer, target) = (Arc::new(Timer::new()), Arc::<Target>::default());
    let (first, second) = (paused(), paused());
    meet(&first, &timer);
    meet(&second, &timer);
    let ticket = first.block_on(async {
        let ticket = target.set(&timer, Instant::now() + HOUR);
        yield_now().await;
        ticket
    });
    second.block_on(async {
        sleep(HOUR + 2 * FAILOVER_DELAY).await;
        assert_eq!(target.noticed(), [Timeliness::Late]);
        // Told of it from where no runtime is.
        let at = Instant::now() + HOUR;
        let tell = || ticket.reset_earlier(at);
        std::thread::scope(|scope| scope.spawn(tell).join()).expect("no panic");
        sleep(HOUR + FAILOVER_DELAY / 2).await;
        assert_eq!(target.noticed(), [Timeliness::Late, Timeliness::OnTime]);
    });
}

#[test]
fn a_runtime_without_a_clock_leaves_times_to_the_others() {
    let (timer, target) = (Arc::new(Timer::new()), Arc::<Target>::default());
    let without = Builder::new_current_thread().build().expect("a runtime");
    let _ticket = target.set(&timer, Instant::now() + HOUR);
    meet(&without, &timer);
    let with = paused();
    with.block_on(async {
        timer.ensure_on_current_runtime();
        sleep(HOUR + FAILOVER_DELAY / 2).await;
        assert_eq!(target.noticed(), [Timeliness::OnTime]);
    });
    assert_eq!(keepers(&timer), 2);
}

#[test]
fn a_task_that_another_runtime_took_does_not_run_twice() {
    let timer = Arc::new(Timer::new());
    let (first, second) = (paused(), paused());
    meet(&second, &timer);
    let runs = Arc::new(AtomicUsize::new(0));
    let task = {
        let runs = runs.clone();
        async move {
            runs.fetch_add(1, Ordering::Relaxed);
        }
    };
    first.block_on(async { timer.spawn(Migration::Always, task) });
    assert_eq!(runs.load(Ordering::Relaxed), 0);
    wait(&second, 2 * FAILOVER_DELAY);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    first.block_on(yield_now());
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(waiting(&timer), 0);
}

#[test]
fn a_task_that_has_begun_goes_on_where_it_may() {
    for moves in [Migration::Always, Migration::BeforeStart] {
        let timer = Arc::new(Timer::new());
        let (first, second) = (paused(), paused());
        meet(&first, &timer);
        meet(&second, &timer);
        let (go_on, goes_on) = oneshot::channel::<()>();
        let (ended, mut end) = oneshot::channel();
        let task = async move {
            let ended = Unfinished(ended);
            // The time of the first runtime ends with it.
            migrating_timeout(HOUR, goes_on)
                .await
                .expect("in time")
                .expect("told");
            ended.0.send(()).expect("the test listens");
        };
        first.block_on(async {
            timer.spawn(moves, task);
            yield_now().await;
        });
        drop(first);
        let told = go_on.send(());
        assert_eq!(told.is_ok(), moves == Migration::Always);
        wait(&second, FAILOVER_DELAY);
        assert_eq!(end.try_recv().is_ok(), moves == Migration::Always);
        assert_eq!(waiting(&timer), 0);
    }
}

#[test]
fn a_task_that_panics_is_not_handed_on() {
    let timer = Arc::new(Timer::new());
    let (first, second) = (paused(), paused());
    meet(&first, &timer);
    meet(&second, &timer);
    let runs = Arc::new(AtomicUsize::new(0));
    let task = {
        let runs = runs.clone();
        async move {
            runs.fetch_add(1, Ordering::Relaxed);
            panic_any("on purpose");
        }
    };
    first.block_on(async {
        timer.spawn(Migration::Always, task);
        yield_now().await;
    });
    drop(first);
    wait(&second, FAILOVER_DELAY);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(waiting(&timer), 0);
}

#[test]
fn a_task_goes_on_from_runtime_to_runtime_and_not_for_ever() {
    let timer = Arc::new(Timer::new());
    let (unfinished, mut end) = oneshot::channel();
    let mut runtime = paused();
    meet(&runtime, &timer);
    runtime.block_on(async {
        let unfinished = Unfinished(unfinished);
        timer.spawn(Migration::Always, async move {
            let _unfinished = unfinished;
            pending::<()>().await;
        });
        yield_now().await;
    });
    let mut moved = 0;
    while end.try_recv() == Err(oneshot::error::TryRecvError::Empty) {
        let next = paused();
        meet(&next, &timer);
        drop(std::mem::replace(&mut runtime, next));
        wait(&runtime, FAILOVER_DELAY);
        moved += 1;
        assert!(moved < 100, "it never ends");
    }
    assert!(moved > 2);
    assert_eq!(waiting(&timer), 0);
}

#[test]
fn nothing_waits_where_nobody_comes() {
    let timer = Arc::new(Timer::new());
    let (unfinished, mut end) = oneshot::channel();
    let task = |unfinished| async move {
        let _unfinished = Unfinished(unfinished);
        pending::<()>().await;
    };
    timer.spawn(Migration::Always, task(unfinished));
    assert!(
        end.try_recv()
            .is_err_and(|error| error == oneshot::error::TryRecvError::Closed)
    );
    let (unfinished, mut end) = oneshot::channel();
    let only = paused();
    meet(&only, &timer);
    // Its keeper may come to it later.
    timer.spawn(Migration::Always, task(unfinished));
    assert_eq!(end.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    drop(only);
    assert_eq!(end.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    assert_eq!(waiting(&timer), 0);
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
    let timer = Arc::new(Timer::new());
    let mut builder = Builder::new_multi_thread();
    let stays = builder.worker_threads(1).enable_all().build();
    let stays = stays.expect("a runtime");
    stays.block_on(async { timer.ensure_on_current_runtime() });
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (timer, fates) = (&timer, &fates);
            scope.spawn(move || {
                for runtime in 0..RUNTIMES {
                    let goes = Builder::new_current_thread().enable_all().build();
                    goes.expect("a runtime").block_on(async {
                        timer.ensure_on_current_runtime();
                        for number in 0..TASKS {
                            let number = (thread * RUNTIMES + runtime) * TASKS + number;
                            timer.spawn(Migration::Always, task(fates, number));
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
                sleep(FAILOVER_DELAY).await;
            }
        }
    });
    assert_eq!(dropped(), all);
    assert_eq!(waiting(&timer), 0);
    assert_eq!(keepers(&timer), 1);
    let begun = |fate: &AtomicUsize| fate.load(Ordering::Relaxed);
    assert!(fates.begun.iter().all(|fate| begun(fate) <= 1));
    // From one that goes to the next that goes, a few may come to their end.
    let ended = fates.ended.load(Ordering::Relaxed);
    assert!(ended > all - all / 20, "{ended} of {all}");
}

#[tokio::test(start_paused = true)]
async fn others_have_a_turn_while_much_is_due() {
    const ALL: usize = 20 * MAX_PER_POLL;
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let targets: Vec<_> = (0..ALL).map(|_| Arc::<Target>::default()).collect();
    let set = |target: &Arc<Target>| target.set(&timer, start + HOUR);
    let _tickets: Vec<_> = targets.iter().map(set).collect();
    sleep(HOUR).await;
    let looked_at = || targets.iter().filter(|it| !it.noticed().is_empty()).count();
    let (mut before, mut turns) = (0, 0);
    while before < ALL {
        yield_now().await;
        let now = looked_at();
        assert!(now - before <= 2 * MAX_PER_POLL, "{before} to {now}");
        before = now;
        turns += 1;
        assert!(turns < 10 * ALL, "it does not end");
    }
    for target in targets {
        assert_eq!(target.noticed(), [Timeliness::OnTime]);
    }
}

/// A keeper that has much to do is at it: no other takes over and finds all of it late.
#[test]
fn who_is_behind_and_at_it_stays_in_charge() {
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let target = Arc::<Target>::default();
    let _ticket = target.set(&timer, start);
    let behind = LatenessTracker::new(start + HOUR, Timeliness::OnTime);
    timer.entries().end_turn(behind.now());
    let other = paused();
    let mut keeper = TimerTask {
        shared: timer.shared.clone(),
        runtime: other.handle().id(),
        backlog: None,
    };
    assert!(timer.shared.state().register(keeper.runtime));
    let next = keeper.run_as_standby(&timer, start + HOUR + FAILOVER_DELAY / 2);
    assert_eq!(next, Some(start + HOUR + FAILOVER_DELAY));
    assert_eq!(target.noticed(), []);
    keeper.run_as_standby(&timer, start + HOUR + FAILOVER_DELAY);
    assert_eq!(target.noticed(), [Timeliness::Late], "it stopped");
}

#[test]
fn who_comes_back_from_a_look_that_lasted_does_not_hide_that_another_is_at_it() {
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let target = Arc::<Target>::default();
    let _ticket = target.set(&timer, start + HOUR);
    let at_it = start + 2 * HOUR;
    timer.entries().end_turn(at_it);
    timer.entries().end_turn(start + HOUR / 2);
    assert_eq!(timer.entries().turn_due_at(), Some(at_it));
}

/// What was not looked at yet is not forgotten with the keeper that was at it.
#[test]
fn a_runtime_that_ends_between_two_turns_leaves_the_rest_to_another() {
    const ALL: usize = 10 * MAX_PER_POLL;
    let timer = Arc::new(Timer::new());
    let other = Builder::new_current_thread().enable_time().build();
    let other = other.expect("a runtime");
    other.block_on(async {
        timer.ensure_on_current_runtime();
        yield_now().await;
    });
    let first = Builder::new_current_thread().enable_time().build();
    let first = first.expect("a runtime");
    let targets: Vec<_> = (0..ALL).map(|_| Arc::<Target>::default()).collect();
    let looked_at = || targets.iter().filter(|it| !it.noticed().is_empty()).count();
    let tickets: Vec<_> = first.block_on(async {
        timer.ensure_on_current_runtime();
        yield_now().await;
        let now = Instant::now();
        let set = |target: &Arc<Target>| target.set(&timer, now);
        let tickets = targets.iter().map(set).collect();
        yield_now().await;
        tickets
    });
    let done = looked_at();
    assert!(0 < done && done < ALL, "{done}");
    drop(first);
    other.block_on(async {
        let all = async {
            while looked_at() < ALL {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, all).await.expect("it goes on");
    });
    drop(tickets);
}

/// Two keepers at once, of which each is told of earlier times by the other's looks.
#[test]
fn whoever_is_at_it_everything_is_looked_at_in_the_end() {
    const ALL: usize = 6 * MAX_PER_POLL;
    for _again in 0..20 {
        let timer = Arc::new(Timer::new());
        let targets: Vec<_> = (0..ALL).map(|_| Arc::<Target>::default()).collect();
        let looked_at = || targets.iter().filter(|it| !it.noticed().is_empty()).count();
        let tickets = Mutex::new(Vec::new());
        let runtimes = [0, 1].map(|_| Builder::new_current_thread().enable_time().build());
        std::thread::scope(|scope| {
            for (which, runtime) in runtimes.into_iter().enumerate() {
                let (timer, targets, tickets) = (&timer, &targets, &tickets);
                scope.spawn(move || {
                    let runtime = runtime.expect("a runtime");
                    runtime.block_on(async {
                        timer.ensure_on_current_runtime();
                        yield_now().await;
                        for (n, target) in targets.iter().enumerate() {
                            if n % 2 == which {
                                let soon = Duration::from_micros((n as u64 * 7_919) % 5_000);
                                let ticket = target.set(timer, Instant::now() + soon);
                                tickets.lock().expect("no panic").push(ticket);
                            }
                            if n % 32 == 0 {
                                yield_now().await;
                            }
                        }
                        let all = async {
                            while which == 0 && looked_at() < ALL {
                                sleep(Duration::from_millis(1)).await;
                            }
                        };
                        let limit = Duration::from_secs(60);
                        tokio::time::timeout(limit, all).await.expect("it goes on");
                    });
                });
            }
        });
    }
}
