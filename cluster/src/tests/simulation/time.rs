//! Simulated time. Each process has its own runtime, and all runtimes follow one clock.
//!
//! 1. Every instance has its own current-thread runtime with a paused clock, and all clients share one. A runtime is polled only by
//!    [`Host::run_to`], so a suspended process is a runtime that is not polled, and a killed one is a runtime that has been dropped along
//!    with its tasks.
//! 2. Everything that passes from one runtime to another is a [`Post`]: a closure and the time at which it is due. The runtime that it
//!    wakes is first advanced to that time and then polled.
//! 3. A runtime without a post is advanced at least every [`LAG`]. Its own timers fire in order and on time, but what they send to other
//!    runtimes is up to [`LAG`] late.
//! 4. Anything seen by two runtimes is timed in milliseconds since the start of the run. The `Instant`s of two runtimes are never compared.

use std::{
    cell::Cell,
    cmp::Reverse,
    collections::BinaryHeap,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll, Waker},
    time::Duration,
};

use tokio::{
    runtime::{Builder, Handle, Runtime},
    sync::oneshot,
    time::{Instant, advance, sleep_until},
};

/// Milliseconds since the start of a run.
pub(super) type Ms = u64;

/// The wall clock at the start of a run.
const EPOCH: u64 = 1_700_000_000_000;

thread_local! {
    /// The wall clock of the process that is being polled, or `None` outside of runs.
    static WALL_CLOCK: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Returns the wall clock of the process that is being polled, in milliseconds since 1970.
///
/// Returns `None` outside of runs.
pub(crate) fn wall_clock() -> Option<u64> {
    WALL_CLOCK.get()
}

/// The id of a process: [`WORLD`] or an instance.
pub(super) type HostId = usize;

/// The process in which all clients and the directory run.
pub(super) const WORLD: HostId = 0;

/// How far a runtime without a post may lag behind.
pub(super) const LAG: Ms = 100;

/// Closures that become due at a given time. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Post(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    now: Ms,
    next_number: u64,
    due: BinaryHeap<Reverse<Item>>,
}

struct Item {
    at: Ms,
    number: u64,
    host: HostId,
    action: Action,
}

pub(super) type Action = Box<dyn FnOnce() + Send>;

pub(super) struct Host {
    pub(super) id: HostId,
    runtime: Option<Runtime>,
    idle: Arc<Mutex<Option<Waker>>>,
    created: Ms,
    start: Instant,
    /// The time on the process's clock.
    at: Ms,
    /// The error of the process's wall clock.
    skew: i64,
}

// === impl Post ===

impl Post {
    pub(super) fn now(&self) -> Ms {
        self.state().now
    }

    /// Runs `action` after `delay`, but at least 1 ms from now, and then polls `host`'s runtime.
    pub(super) fn after(&self, host: HostId, delay: Ms, action: impl FnOnce() + Send + 'static) {
        let at = self.now() + delay.max(1);
        self.at(host, at, Box::new(action));
    }

    pub(super) fn at(&self, host: HostId, at: Ms, action: Action) {
        let mut state = self.state();
        state.next_number += 1;
        let number = state.next_number;
        state.due.push(Reverse(Item {
            at,
            number,
            host,
            action,
        }));
    }

    /// Waits in one of `host`'s tasks.
    pub(super) async fn pause(&self, host: HostId, delay: Ms) {
        let (end, ended) = oneshot::channel::<()>();
        self.after(host, delay, move || drop(end));
        let _ = ended.await;
    }

    /// Returns when the next closure is due, or `None` if there is none.
    pub(super) fn next_due(&self) -> Option<Ms> {
        self.state().due.peek().map(|item| item.0.at)
    }

    pub(super) fn set_now(&self, now: Ms) {
        self.state().now = now;
    }

    /// Takes a closure that is due, or returns `None` if none is.
    pub(super) fn take_due(&self) -> Option<(HostId, Action)> {
        let mut state = self.state();
        if state.due.peek()?.0.at > state.now {
            return None;
        }
        let Reverse(item) = state.due.pop()?;
        Some((item.host, item.action))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }
}

impl PartialEq for Item {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl Eq for Item {}

impl PartialOrd for Item {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Item {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

// === impl Host ===

impl Host {
    pub(super) fn new(id: HostId, now: Ms) -> Self {
        let idle = Arc::new(Mutex::new(None::<Waker>));
        let idle_waker = idle.clone();
        let runtime = Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .on_thread_park(move || {
                let waker = idle_waker.lock().unwrap().take();
                if let Some(waker) = waker {
                    waker.wake();
                }
            })
            .build()
            .unwrap();
        let start = {
            let _entered = runtime.enter();
            Instant::now()
        };
        Self {
            id,
            runtime: Some(runtime),
            idle,
            created: now,
            start,
            at: now,
            skew: 0,
        }
    }

    /// Sets the wall clock's error.
    pub(super) fn set_skew(&mut self, skew: i64) {
        self.skew = skew;
    }

    fn set_wall_clock(&self) {
        WALL_CLOCK.set((EPOCH + self.at).checked_add_signed(self.skew));
    }

    pub(super) fn handle(&self) -> Handle {
        self.runtime.as_ref().unwrap().handle().clone()
    }

    pub(super) fn at(&self) -> Ms {
        self.at
    }

    /// Polls the tasks until the clock is at `now` and no task is ready.
    ///
    /// Does nothing if the process has been killed, or if its clock is not behind.
    pub(super) fn run_to(&mut self, now: Ms) {
        let Some(runtime) = self.runtime.as_ref().filter(|_| now > self.at) else {
            return;
        };
        self.set_wall_clock();
        let until = self.start + Duration::from_millis(now - self.created);
        runtime.block_on(async {
            sleep_until(until).await;
            Idle {
                waker: &self.idle,
                is_set: false,
            }
            .await;
        });
        self.at = now;
    }

    /// Sets the clock to `now` at once, as for a process that has been suspended until then.
    ///
    /// Does nothing if the process has been killed, or if its clock is not behind.
    pub(super) fn jump_to(&mut self, now: Ms) {
        let Some(runtime) = self.runtime.as_ref().filter(|_| now > self.at) else {
            return;
        };
        let by = Duration::from_millis(now - self.at);
        runtime.block_on(advance(by));
        self.at = now;
    }

    /// Drops all tasks.
    pub(super) fn kill(&mut self) {
        drop(self.runtime.take());
    }

    /// Runs a future that does not wait.
    pub(super) fn run<T>(&self, future: impl Future<Output = T>) -> T {
        self.set_wall_clock();
        self.runtime.as_ref().unwrap().block_on(future)
    }
}

/// Ready as soon as none of the runtime's tasks is.
struct Idle<'a> {
    waker: &'a Mutex<Option<Waker>>,
    is_set: bool,
}

impl Future for Idle<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        if self.is_set && self.waker.lock().unwrap().is_none() {
            return Poll::Ready(());
        }
        *self.waker.lock().unwrap() = Some(cx.waker().clone());
        self.is_set = true;
        Poll::Pending
    }
}
