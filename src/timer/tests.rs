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

/// Records the timeliness of each expired deadline.
#[derive(Default)]
struct Target {
    observed: Mutex<Vec<Timeliness>>,
}

/// Closes its channel if it is dropped before the task has ended.
struct Unfinished(oneshot::Sender<()>);

// === impl Target ===

impl Target {
    fn set(self: &Arc<Self>, timer: &Arc<Timer>, at: Instant) -> TimerHandle {
        let weak: Weak<Self> = Arc::downgrade(self);
        timer.set(at, weak)
    }

    fn observed(&self) -> Vec<Timeliness> {
        self.observed.lock().expect("no panic").clone()
    }
}

impl OnDeadline for Target {
    fn on_deadline(&self, _lateness: &LatenessTracker, timeliness: Timeliness) -> Option<Rearm> {
        self.observed.lock().expect("no panic").push(timeliness);
        None
    }
}

fn paused_runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    builder.build().expect("a runtime")
}

/// Registers a runtime and runs its timer task once.
fn register(runtime: &Runtime, timer: &Arc<Timer>) {
    runtime.block_on(async {
        timer.ensure_on_current_runtime();
        yield_now().await;
    });
}

fn two_runtimes() -> (Arc<Timer>, Runtime, Runtime) {
    let timer = Arc::new(Timer::new());
    let (first, second) = (paused_runtime(), paused_runtime());
    register(&first, &timer);
    register(&second, &timer);
    (timer, first, second)
}

/// Registers a runtime and runs its timer task once. Returns how often the task has been polled.
fn register_and_count(runtime: &Runtime, timer: &Arc<Timer>) -> Arc<AtomicUsize> {
    let polls = Arc::new(AtomicUsize::new(0));
    let task = TimerTask {
        shared: timer.shared.clone(),
        runtime: runtime.handle().id(),
        backlog: None,
    };
    assert!(timer.shared.state().register(task.runtime));
    let mut run = Box::pin(task.run(Arc::downgrade(timer)));
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

/// Drives a runtime for `time`.
fn drive(runtime: &Runtime, time: Duration) {
    runtime.block_on(async { sleep(time).await });
}

fn timer_tasks(timer: &Timer) -> usize {
    timer.shared.state().entries.len()
}

fn waiting_tasks(timer: &Timer) -> usize {
    timer.shared.state().pending.waiting.len()
}

#[test]
fn each_runtime_has_one_timer_task_whatever_thread_registers_it() {
    let timer = Arc::new(Timer::new());
    let (first, second) = (paused_runtime(), paused_runtime());
    for _ in 0..3 {
        register(&first, &timer);
        register(&second, &timer);
    }
    assert_eq!(timer_tasks(&timer), 2);
    timer.ensure_on_current_runtime();
    assert_eq!(timer_tasks(&timer), 2, "no runtime on this thread");
    drop(first);
    assert_eq!(timer_tasks(&timer), 1);
    let multi_threaded = Builder::new_multi_thread().worker_threads(2).build();
    let multi_threaded = multi_threaded.expect("a runtime");
    for _ in 0..3 {
        multi_threaded.block_on(async { timer.ensure_on_current_runtime() });
    }
    assert_eq!(timer_tasks(&timer), 2);
}

#[test]
fn timer_tasks_end_with_their_timer() {
    let (timer, first, second) = two_runtimes();
    let shared = Arc::downgrade(&timer.shared);
    drop(timer);
    first.block_on(yield_now());
    second.block_on(yield_now());
    assert!(shared.upgrade().is_none());
}

#[test]
fn a_timer_task_wakes_once_for_an_earlier_deadline_and_once_at_the_deadline() {
    let (timer, target) = (Arc::new(Timer::new()), Arc::<Target>::default());
    let (first, second) = (paused_runtime(), paused_runtime());
    register(&first, &timer);
    let polls = register_and_count(&second, &timer);
    let wakes = || polls.load(Ordering::Relaxed) - 1;
    assert_eq!(wakes(), 0);
    let handle = first.block_on(async {
        let handle = target.set(&timer, Instant::now() + HOUR);
        yield_now().await;
        handle
    });
    drive(&second, HOUR / 2);
    assert_eq!(wakes(), 1);
    drive(&first, 2 * HOUR);
    assert_eq!(target.observed(), [Timeliness::OnTime]);
    drive(&second, 10 * HOUR);
    assert_eq!(wakes(), 2);
    assert_eq!(target.observed().len(), 1);
    drop(handle);
}

#[test]
fn the_task_that_takes_over_becomes_the_leader() {
    let (timer, target) = (Arc::new(Timer::new()), Arc::<Target>::default());
    let (first, second) = (paused_runtime(), paused_runtime());
    register(&first, &timer);
    register(&second, &timer);
    let handle = first.block_on(async {
        let handle = target.set(&timer, Instant::now() + HOUR);
        yield_now().await;
        handle
    });
    second.block_on(async {
        sleep(HOUR + 2 * FAILOVER_DELAY).await;
        assert_eq!(target.observed(), [Timeliness::Late]);
        // The deadline is set on a thread without a runtime.
        let at = Instant::now() + HOUR;
        let reset = || handle.reset_earlier(at);
        std::thread::scope(|scope| scope.spawn(reset).join()).expect("no panic");
        sleep(HOUR + FAILOVER_DELAY / 2).await;
        assert_eq!(target.observed(), [Timeliness::Late, Timeliness::OnTime]);
    });
}

#[test]
fn a_runtime_without_a_clock_leaves_deadlines_to_the_others() {
    let (timer, target) = (Arc::new(Timer::new()), Arc::<Target>::default());
    let clockless = Builder::new_current_thread().build().expect("a runtime");
    let _handle = target.set(&timer, Instant::now() + HOUR);
    register(&clockless, &timer);
    let with_clock = paused_runtime();
    with_clock.block_on(async {
        timer.ensure_on_current_runtime();
        sleep(HOUR + FAILOVER_DELAY / 2).await;
        assert_eq!(target.observed(), [Timeliness::OnTime]);
    });
    assert_eq!(timer_tasks(&timer), 2);
}

#[test]
fn a_task_that_another_runtime_took_does_not_run_twice() {
    let timer = Arc::new(Timer::new());
    let (first, second) = (paused_runtime(), paused_runtime());
    register(&second, &timer);
    let runs = Arc::new(AtomicUsize::new(0));
    let task = {
        let runs = runs.clone();
        async move {
            runs.fetch_add(1, Ordering::Relaxed);
        }
    };
    first.block_on(async { timer.spawn(Migration::Always, task) });
    assert_eq!(runs.load(Ordering::Relaxed), 0);
    drive(&second, 2 * FAILOVER_DELAY);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    first.block_on(yield_now());
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(waiting_tasks(&timer), 0);
}

#[test]
fn a_started_task_migrates_only_if_it_may() {
    for migration in [Migration::Always, Migration::BeforeStart] {
        let (timer, first, second) = two_runtimes();
        let (finish, finished) = oneshot::channel::<()>();
        let (ended, mut end) = oneshot::channel();
        let task = async move {
            let ended = Unfinished(ended);
            // The first runtime's clock ends with it.
            migrating_timeout(HOUR, finished)
                .await
                .expect("in time")
                .expect("sent");
            ended.0.send(()).expect("the test receives");
        };
        first.block_on(async {
            timer.spawn(migration, task);
            yield_now().await;
        });
        drop(first);
        let sent = finish.send(());
        assert_eq!(sent.is_ok(), migration == Migration::Always);
        drive(&second, FAILOVER_DELAY);
        assert_eq!(end.try_recv().is_ok(), migration == Migration::Always);
        assert_eq!(waiting_tasks(&timer), 0);
    }
}

#[test]
fn a_task_that_panics_does_not_migrate() {
    let (timer, first, second) = two_runtimes();
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
    drive(&second, FAILOVER_DELAY);
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(waiting_tasks(&timer), 0);
}

#[test]
fn a_task_migrates_from_runtime_to_runtime_a_limited_number_of_times() {
    let timer = Arc::new(Timer::new());
    let (unfinished, mut end) = oneshot::channel();
    let mut runtime = paused_runtime();
    register(&runtime, &timer);
    runtime.block_on(async {
        let unfinished = Unfinished(unfinished);
        timer.spawn(Migration::Always, async move {
            let _unfinished = unfinished;
            pending::<()>().await;
        });
        yield_now().await;
    });
    let mut migrations = 0;
    while end.try_recv() == Err(oneshot::error::TryRecvError::Empty) {
        let next = paused_runtime();
        register(&next, &timer);
        drop(std::mem::replace(&mut runtime, next));
        drive(&runtime, FAILOVER_DELAY);
        migrations += 1;
        assert!(migrations < 100, "the migrations never end");
    }
    assert!(migrations > 2);
    assert_eq!(waiting_tasks(&timer), 0);
}

#[test]
fn a_task_without_a_runtime_is_dropped() {
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
    let only = paused_runtime();
    register(&only, &timer);
    // The runtime's timer task can still take the task later.
    timer.spawn(Migration::Always, task(unfinished));
    assert_eq!(end.try_recv(), Err(oneshot::error::TryRecvError::Empty));
    drop(only);
    assert_eq!(end.try_recv(), Err(oneshot::error::TryRecvError::Closed));
    assert_eq!(waiting_tasks(&timer), 0);
}

/// A task starts at most once. It is run to completion or dropped, whatever happens in between.
#[test]
fn no_task_is_lost_or_runs_twice_while_runtimes_start_and_end() {
    const THREADS: usize = 3;
    const RUNTIMES: usize = 50;
    const TASKS: usize = 20;
    #[derive(Default)]
    struct Counts {
        started: Vec<AtomicUsize>,
        ended: AtomicUsize,
        dropped: AtomicUsize,
    }
    struct Counted(Arc<Counts>);
    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
    let task = |counts: &Arc<Counts>, number: usize| {
        let counted = Counted(counts.clone());
        async move {
            counted.0.started[number].fetch_add(1, Ordering::Relaxed);
            yield_now().await;
            counted.0.ended.fetch_add(1, Ordering::Relaxed);
        }
    };
    let tasks = THREADS * RUNTIMES * TASKS;
    let counts = Arc::new(Counts {
        started: (0..tasks).map(|_| AtomicUsize::new(0)).collect(),
        ..Counts::default()
    });
    let timer = Arc::new(Timer::new());
    let mut builder = Builder::new_multi_thread();
    let long_lived = builder.worker_threads(1).enable_all().build();
    let long_lived = long_lived.expect("a runtime");
    long_lived.block_on(async { timer.ensure_on_current_runtime() });
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (timer, counts) = (&timer, &counts);
            scope.spawn(move || {
                for runtime in 0..RUNTIMES {
                    let short_lived = Builder::new_current_thread().enable_all().build();
                    short_lived.expect("a runtime").block_on(async {
                        timer.ensure_on_current_runtime();
                        for number in 0..TASKS {
                            let number = (thread * RUNTIMES + runtime) * TASKS + number;
                            timer.spawn(Migration::Always, task(counts, number));
                            if number.is_multiple_of(7) {
                                yield_now().await;
                            }
                        }
                    });
                }
            });
        }
    });
    let dropped = || counts.dropped.load(Ordering::Relaxed);
    let limit = 100;
    long_lived.block_on(async {
        for _ in 0..limit {
            if dropped() < tasks {
                sleep(FAILOVER_DELAY).await;
            }
        }
    });
    assert_eq!(dropped(), tasks);
    assert_eq!(waiting_tasks(&timer), 0);
    assert_eq!(timer_tasks(&timer), 1);
    let started = |counted: &AtomicUsize| counted.load(Ordering::Relaxed);
    assert!(counts.started.iter().all(|counted| started(counted) <= 1));
    // A few tasks may be dropped after migrating several times between runtimes that are ending.
    let ended = counts.ended.load(Ordering::Relaxed);
    assert!(ended > tasks - tasks / 20, "{ended} of {tasks}");
}

#[tokio::test(start_paused = true)]
async fn other_tasks_are_polled_during_a_backlog() {
    const TARGETS: usize = 20 * MAX_PER_POLL;
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let targets: Vec<_> = (0..TARGETS).map(|_| Arc::<Target>::default()).collect();
    let set = |target: &Arc<Target>| target.set(&timer, start + HOUR);
    let _handles: Vec<_> = targets.iter().map(set).collect();
    sleep(HOUR).await;
    let handled = || {
        targets
            .iter()
            .filter(|target| !target.observed().is_empty())
            .count()
    };
    let (mut before, mut turns) = (0, 0);
    while before < TARGETS {
        yield_now().await;
        let now = handled();
        assert!(now - before <= 2 * MAX_PER_POLL, "{before} to {now}");
        before = now;
        turns += 1;
        assert!(turns < 10 * TARGETS, "the turns never end");
    }
    for target in targets {
        assert_eq!(target.observed(), [Timeliness::OnTime]);
    }
}

/// While a timer task handles a backlog, no other one takes over and counts the backlog as late.
#[test]
fn a_leader_with_a_backlog_stays_the_leader() {
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let target = Arc::<Target>::default();
    let _handle = target.set(&timer, start);
    let behind = LatenessTracker::new(start + HOUR, Timeliness::OnTime);
    timer.entries().end_turn(behind.now());
    let other = paused_runtime();
    let mut task = TimerTask {
        shared: timer.shared.clone(),
        runtime: other.handle().id(),
        backlog: None,
    };
    assert!(timer.shared.state().register(task.runtime));
    let next = task.run_as_standby(&timer, start + HOUR + FAILOVER_DELAY / 2);
    assert_eq!(next, Some(start + HOUR + FAILOVER_DELAY));
    assert_eq!(target.observed(), []);
    task.run_as_standby(&timer, start + HOUR + FAILOVER_DELAY);
    assert_eq!(
        target.observed(),
        [Timeliness::Late],
        "the runtime had stopped"
    );
}

#[test]
fn a_turn_with_a_slow_target_does_not_hide_a_later_turn() {
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let target = Arc::<Target>::default();
    let _handle = target.set(&timer, start + HOUR);
    let later = start + 2 * HOUR;
    timer.entries().end_turn(later);
    timer.entries().end_turn(start + HOUR / 2);
    assert_eq!(timer.entries().turn_due_at(), Some(later));
}

/// Unhandled entries are not lost along with the timer task that had the backlog.
#[test]
fn a_runtime_that_ends_between_two_turns_leaves_its_backlog_to_another() {
    const TARGETS: usize = 10 * MAX_PER_POLL;
    let timer = Arc::new(Timer::new());
    let other = Builder::new_current_thread().enable_time().build();
    let other = other.expect("a runtime");
    other.block_on(async {
        timer.ensure_on_current_runtime();
        yield_now().await;
    });
    let first = Builder::new_current_thread().enable_time().build();
    let first = first.expect("a runtime");
    let targets: Vec<_> = (0..TARGETS).map(|_| Arc::<Target>::default()).collect();
    let handled = || {
        targets
            .iter()
            .filter(|target| !target.observed().is_empty())
            .count()
    };
    let handles: Vec<_> = first.block_on(async {
        timer.ensure_on_current_runtime();
        yield_now().await;
        let now = Instant::now();
        let set = |target: &Arc<Target>| target.set(&timer, now);
        let handles = targets.iter().map(set).collect();
        yield_now().await;
        handles
    });
    let done = handled();
    assert!(0 < done && done < TARGETS, "{done}");
    drop(first);
    other.block_on(async {
        let all_handled = async {
            while handled() < TARGETS {
                sleep(Duration::from_millis(1)).await;
            }
        };
        let limit = Duration::from_secs(60);
        tokio::time::timeout(limit, all_handled)
            .await
            .expect("the timer continues");
    });
    drop(handles);
}

/// Two timer tasks run at once, and each is woken by the deadlines that the other sets.
#[test]
fn every_entry_is_handled_by_either_of_two_timer_tasks() {
    const TARGETS: usize = 6 * MAX_PER_POLL;
    for _ in 0..20 {
        let timer = Arc::new(Timer::new());
        let targets: Vec<_> = (0..TARGETS).map(|_| Arc::<Target>::default()).collect();
        let handled = || {
            targets
                .iter()
                .filter(|target| !target.observed().is_empty())
                .count()
        };
        let handles = Mutex::new(Vec::new());
        let runtimes = [0, 1].map(|_| Builder::new_current_thread().enable_time().build());
        std::thread::scope(|scope| {
            for (which, runtime) in runtimes.into_iter().enumerate() {
                let (timer, targets, handles) = (&timer, &targets, &handles);
                scope.spawn(move || {
                    let runtime = runtime.expect("a runtime");
                    runtime.block_on(async {
                        timer.ensure_on_current_runtime();
                        yield_now().await;
                        for (n, target) in targets.iter().enumerate() {
                            if n % 2 == which {
                                let soon = Duration::from_micros((n as u64 * 7_919) % 5_000);
                                let handle = target.set(timer, Instant::now() + soon);
                                handles.lock().expect("no panic").push(handle);
                            }
                            if n % 32 == 0 {
                                yield_now().await;
                            }
                        }
                        let all_handled = async {
                            while which == 0 && handled() < TARGETS {
                                sleep(Duration::from_millis(1)).await;
                            }
                        };
                        let limit = Duration::from_secs(60);
                        tokio::time::timeout(limit, all_handled)
                            .await
                            .expect("the timer continues");
                    });
                });
            }
        });
    }
}
