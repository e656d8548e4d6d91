//! Calls each target ([`OnDeadline`]) at its deadline, and runs background tasks.
//!
//! The timer runs on every runtime that serves requests, so that no work depends on any single runtime. A process can have several
//! runtimes, such as one per core, and any of them can stall, because its thread is busy or because no thread is driving it any more. In
//! addition, `Drop` code can run anywhere, for example on a thread without a runtime, or while a runtime is shutting down.
//!
//! 1. Every runtime that serves requests has one timer task. One of these tasks, the leader, handles deadlines on time. The other tasks
//!    look for overdue deadlines [`FAILOVER_DELAY`] later, and a task that finds any becomes the leader. Setting the earliest deadline on a
//!    runtime also makes its task the leader, because that runtime must be alive.
//! 2. A spawned task runs on the current runtime. If that runtime ends, or has not polled the task within [`FAILOVER_DELAY`], another
//!    runtime takes over the task (see [`pending_task`]).
//! 3. A timer task wakes once for the deadline that it is waiting for, and once whenever an earlier deadline is set.
//! 4. Expired entries are handled in turns of [`POLL_BUDGET`], and the timer task yields after each turn. [`lateness`] defines which
//!    deadlines count as late in that case.
//! 5. No lock is held while a target is called, dropped or woken. Each entry is taken out only just before its target is called, so if a
//!    target panics, the turn continues with the next entry, and if one blocks, another timer task handles the other entries.

use std::{
    ops::ControlFlow,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, Weak},
    time::Duration,
};

use futures_util::future::select;
use tokio::{
    runtime::{Handle, Id},
    task::yield_now,
    time::{Instant, sleep_until},
};

use self::{
    entries::{EntryId, ExpiredEntry, TimerEntries},
    pending_task::PendingTask,
    shared::{FAILOVER_DELAY, TimerShared},
    task_runner::TaskRunner,
};
use crate::{catch_panic::catch_panic, lock::lock};

mod entries;
mod lateness;
mod migrating_timeout;
mod pending_task;
mod runtime_cache;
mod shared;
mod task_runner;

pub(crate) use self::{
    entries::{MAX_RECHECKS, OnDeadline, Rearm, STALL_THRESHOLD},
    lateness::{LatenessTracker, RECHECK_DELAY, RECHECK_TOLERANCE, Timeliness},
    migrating_timeout::migrating_timeout,
    pending_task::Migration,
};

/// How long a timer task handles expired entries before yielding.
///
/// The turn ends with the target that exceeds this time.
const POLL_BUDGET: Duration = Duration::from_micros(100);

/// Maximum number of targets called in one turn. While the clock is paused, this is what bounds a turn.
const MAX_PER_POLL: usize = 64;

/// Stores an entry for each [`TimerHandle`], and the tasks waiting for a runtime.
#[derive(Default)]
pub(crate) struct Timer {
    shared: Arc<TimerShared>,
    entries: Mutex<TimerEntries>,
}

/// Owns a timer entry. The target holds the handle, and dropping the handle removes the entry.
pub(crate) struct TimerHandle {
    timer: Arc<Timer>,
    id: EntryId,
}

/// A runtime's timer task. It ends with its timer or with its runtime.
struct TimerTask {
    shared: Arc<TimerShared>,
    runtime: Id,
    /// How late the current backlog is, or `None` if the last turn handled all expired entries.
    backlog: Option<LatenessTracker>,
}

// === impl Timer ===

impl Timer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Spawns a timer task on the current runtime if it has none. Called for every request.
    pub(crate) fn ensure_on_current_runtime(self: &Arc<Self>) {
        if !self.shared.cache.is_registered() {
            self.register_current_runtime();
        }
    }

    /// Spawns a timer task on the current runtime if it has none. Does nothing outside of a runtime.
    #[cold]
    fn register_current_runtime(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let id = runtime.id();
        let is_new = {
            let mut state = self.shared.state();
            self.shared.cache.record(&runtime);
            state.register(id)
        };
        if is_new {
            let task = TimerTask {
                shared: self.shared.clone(),
                runtime: id,
                backlog: None,
            };
            drop(runtime.spawn(task.run(Arc::downgrade(self))));
        }
    }

    /// Runs a task on the current runtime, or on another one if the current one does not poll it.
    ///
    /// The task is dropped if no runtime is left, or if too many of the runtimes that take it over shut down.
    pub(crate) fn spawn(
        &self,
        migration: Migration,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        let pending = PendingTask {
            migration,
            task: Box::pin(task),
            migrations: 0,
        };
        TaskRunner::start(&self.shared, pending);
    }

    /// Calls `target` once `at` has passed, unless the handle is dropped first.
    #[must_use]
    pub(crate) fn set(self: &Arc<Self>, at: Instant, target: Weak<dyn OnDeadline>) -> TimerHandle {
        let id = self.update(|entries| entries.add(at, target));
        self.ensure_on_current_runtime();
        TimerHandle {
            timer: self.clone(),
            id,
        }
    }

    /// Changes the entries. If they now have an earlier deadline, wakes the timer tasks.
    ///
    /// The current runtime's task then also becomes the leader (rule 1).
    fn update<R>(&self, change: impl FnOnce(&mut TimerEntries) -> R) -> R {
        let (result, is_earlier) = {
            let mut entries = self.entries();
            (change(&mut entries), entries.needs_wake())
        };
        if is_earlier {
            let mut state = self.shared.state();
            if state.entries.len() > 1
                && let Ok(current) = Handle::try_current()
            {
                state.set_leader(current.id());
            }
            drop(state);
            self.shared.wake.notify_waiters();
        }
        result
    }

    /// Handles up to [`MAX_PER_POLL`] expired entries, for [`POLL_BUDGET`]. Returns when the next turn is due.
    ///
    /// Several timer tasks may call this concurrently.
    fn run_expired(&self, tracker: &LatenessTracker) -> Option<Instant> {
        let started = Instant::now();
        for _ in 0..MAX_PER_POLL {
            let Some((id, expired)) = self.take_expired(tracker.now()) else {
                break;
            };
            // A panic in user code, such as a destructor, must not affect other entries.
            if let Some(requeue) = catch_panic(|| expired.run(tracker)) {
                // Another timer task may have computed its sleep without this entry. If so, `update` wakes the timer tasks.
                self.update(|entries| entries.requeue(id, &requeue));
            }
            if started.elapsed() >= POLL_BUDGET {
                break;
            }
        }
        self.entries().end_turn(tracker.now())
    }

    fn take_expired(&self, now: Instant) -> Option<(EntryId, ExpiredEntry)> {
        self.entries().take_expired(now)
    }

    /// Handles all expired entries, as a timer task would.
    #[cfg(test)]
    pub(crate) fn run_expired_now(&self, now: Instant) -> Option<Instant> {
        self.run_all_expired(&LatenessTracker::new(now, Timeliness::OnTime))
    }

    #[cfg(test)]
    fn run_all_expired(&self, tracker: &LatenessTracker) -> Option<Instant> {
        loop {
            let next = self.run_expired(tracker);
            if next.is_none_or(|next| next > tracker.now()) {
                return next;
            }
        }
    }

    fn entries(&self) -> MutexGuard<'_, TimerEntries> {
        lock(&self.entries)
    }
}

impl Drop for Timer {
    /// Wakes the timer tasks, which hold no strong reference to the timer, so that they end.
    fn drop(&mut self) {
        self.shared.wake.notify_waiters();
    }
}

// === impl TimerHandle ===

impl TimerHandle {
    /// Moves the deadline to `at`, unless an earlier deadline is set.
    ///
    /// Can be called while the target is running. The earlier of this deadline and the one returned by the target then applies.
    pub(crate) fn reset_earlier(&self, at: Instant) {
        self.timer
            .update(|entries| entries.reset_earlier(self.id, at));
    }
}

#[cfg(test)]
impl TimerHandle {
    /// Returns the deadline, or `None` if the entry is disarmed.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.timer.entries().deadline(self.id)
    }
}

impl Drop for TimerHandle {
    fn drop(&mut self) {
        let _target = self.timer.entries().remove(self.id);
    }
}

// === impl TimerTask ===

impl TimerTask {
    /// Runs until the timer is dropped or the runtime shuts down.
    async fn run(mut self, timer: Weak<Timer>) {
        let mut can_sleep = true;
        loop {
            let shared = self.shared.clone();
            // Register before the entries are read, so that no wake-up is lost.
            let mut woken = pin!(shared.wake.notified());
            woken.as_mut().enable();
            let flow = timer.upgrade().map(|timer| self.run_once(&timer));
            let Some(ControlFlow::Continue(at)) = flow else {
                return;
            };
            if self.backlog.is_some() {
                // Let other tasks be polled before the next turn.
                yield_now().await;
                continue;
            }
            let at = at.filter(|_| can_sleep);
            // tokio panics here if the runtime was built without `enable_time`.
            let sleep = at.map(|at| catch_panic(|| sleep_until(at)));
            match sleep {
                Some(Some(sleep)) => {
                    select(woken, pin!(sleep)).await;
                }
                Some(None) => {
                    // From now on, the other runtimes handle all deadlines.
                    can_sleep = false;
                    self.shared.state().disable_sleep(self.runtime);
                    self.shared.wake.notify_waiters();
                }
                None => woken.await,
            }
        }
    }

    /// Takes over tasks and handles deadlines. Returns when to run next, or `Break` if the runtime is shutting down.
    fn run_once(&mut self, timer: &Timer) -> ControlFlow<(), Option<Instant>> {
        let now = Instant::now();
        let (tasks, next_task) = self.shared.state().pending.take_overdue(now);
        if !TaskRunner::steal(&self.shared, tasks) {
            return ControlFlow::Break(());
        }
        let is_leader = self.shared.state().is_or_becomes_leader(self.runtime);
        let backlog = self.backlog.take();
        let deadline = if is_leader {
            self.run_as_leader(timer, now, backlog)
        } else {
            self.run_as_standby(timer, now)
        };
        ControlFlow::Continue(deadline.into_iter().chain(next_task).min())
    }

    /// Starts a turn, or continues a backlog.
    fn run_as_leader(
        &mut self,
        timer: &Timer,
        now: Instant,
        backlog: Option<LatenessTracker>,
    ) -> Option<Instant> {
        let tracker = match backlog {
            Some(mut tracker) => {
                tracker.next_turn(now);
                tracker
            }
            None => LatenessTracker::new(now, Timeliness::OnTime),
        };
        self.run_turn(timer, tracker)
    }

    /// Becomes the leader and starts a turn if the leader is [`FAILOVER_DELAY`] late.
    ///
    /// Otherwise returns when the leader will be that late, or `None` if no entry is armed.
    fn run_as_standby(&mut self, timer: &Timer, now: Instant) -> Option<Instant> {
        let takeover_at = timer.entries().turn_due_at()?.checked_add(FAILOVER_DELAY)?;
        if takeover_at > now {
            return Some(takeover_at);
        }
        self.shared.state().set_leader(self.runtime);
        self.run_turn(timer, LatenessTracker::new(now, Timeliness::Late))
    }

    fn run_turn(&mut self, timer: &Timer, tracker: LatenessTracker) -> Option<Instant> {
        let next = timer.run_expired(&tracker);
        let has_backlog = next.is_some_and(|at| at <= tracker.now());
        self.backlog = has_backlog.then_some(tracker);
        next
    }
}

impl Drop for TimerTask {
    fn drop(&mut self) {
        let without_runtime = {
            let mut state = self.shared.state();
            state.deregister(self.runtime);
            self.shared.cache.invalidate();
            if state.entries.is_empty() {
                state.pending.take_without_runtime()
            } else {
                Vec::new()
            }
        };
        self.shared.wake.notify_waiters();
        // Dropping a task may run user code, which may panic.
        catch_panic(|| drop(without_runtime));
    }
}

#[cfg(test)]
mod tests;
