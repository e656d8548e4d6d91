//! The timer, which looks at things when their times come, and runs tasks, on every runtime that serves requests.
//!
//! `Drop` code may run anywhere: on a thread without a runtime, or while a runtime shuts down. A process may have
//! several runtimes, one for each core for example, and each may stand still because its thread computes, or because nobody
//! drives it any more. So nothing waits for one runtime alone.
//!
//! 1. Every runtime that serves requests has a keeper, a task of its own. One of them, the first, looks at what is due
//!    on time; the others look [`SLACK`] later, and the one that finds it overdue becomes the first. The runtime
//!    on which the earliest time was set is alive, so its keeper is the first from then on.
//! 2. A task runs on the runtime on which it was wanted. If it has not begun there [`SLACK`] later, or that runtime
//!    ends, another runtime takes it (see [`errand`]).
//! 3. A keeper wakes once for a time that it waits for, and once when it is told of an earlier one.
//! 4. What is due is done in turns of [`TURN`], with other tasks of the runtime in between; see [`watch`] for what is late
//!    then.
//! 5. No lock is held while something is looked at, dropped or woken. Each thing is taken out just before its own
//!    look, so a look that panics or lasts leaves the others to the keeper that looks next.

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
    entries::{EntryId, Expired, TimerEntries},
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

/// How long a keeper goes on with what is due before others are served: 0.1 ms, and one look.
const POLL_BUDGET: Duration = Duration::from_micros(100);

/// How often it looks at something in a turn at most: 64 times, where a clock stands still.
const MAX_PER_POLL: usize = 64;

/// Keeps the time of what has a [`Ticket`], and the tasks that have not begun.
#[derive(Default)]
pub(crate) struct Timer {
    shared: Arc<TimerShared>,
    entries: Mutex<TimerEntries>,
}

/// Keeps an alarm set. What is looked at owns it; nothing of the alarm is left once it is dropped.
pub(crate) struct TimerHandle {
    timer: Arc<Timer>,
    id: EntryId,
}

/// Keeps time on one runtime, until it is dropped, alone or with its runtime.
struct TimerTask {
    shared: Arc<TimerShared>,
    runtime: Id,
    /// Its last turn, if more was due after it.
    backlog: Option<LatenessTracker>,
}

// === impl Timer ===

impl Timer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Has the current runtime keep time too, if it does not yet. Called with every request.
    pub(crate) fn ensure_on_current_runtime(self: &Arc<Self>) {
        if !self.shared.cache.is_registered() {
            self.register_current_runtime();
        }
    }

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
            let keeper = TimerTask {
                shared: self.shared.clone(),
                runtime: id,
                backlog: None,
            };
            drop(runtime.spawn(keeper.run(Arc::downgrade(self))));
        }
    }

    /// Runs a task on this runtime, or on another one that keeps time if this one does not come to it. When none is
    /// left, the task is dropped.
    pub(crate) fn spawn(&self, moves: Migration, task: impl Future<Output = ()> + Send + 'static) {
        let errand = PendingTask {
            migration: moves,
            task: Box::pin(task),
            migrations: 0,
        };
        TaskRunner::start(&self.shared, errand);
    }

    /// Has something looked at when its time comes, as long as its ticket is kept.
    #[must_use]
    pub(crate) fn set(self: &Arc<Self>, at: Instant, timed: Weak<dyn OnDeadline>) -> TimerHandle {
        let id = self.update(|alarms| alarms.add(at, timed));
        self.ensure_on_current_runtime();
        TimerHandle {
            timer: self.clone(),
            id,
        }
    }

    /// Changes something in the alarms, and has the keepers look again if that brought an earlier time.
    fn update<R>(&self, change: impl FnOnce(&mut TimerEntries) -> R) -> R {
        let (result, is_news) = {
            let mut alarms = self.entries();
            (change(&mut alarms), alarms.needs_wake())
        };
        if is_news {
            let mut state = self.shared.state();
            if state.entries.len() > 1
                && let Ok(here) = Handle::try_current()
            {
                state.set_leader(here.id());
            }
            drop(state);
            self.shared.wake.notify_waiters();
        }
        result
    }

    /// Looks at what is due for a [`TURN`], and tells when to come back. Any number of keepers may do so at the same time.
    fn run_expired(&self, watch: &LatenessTracker) -> Option<Instant> {
        let begun = Instant::now();
        for _ in 0..MAX_PER_POLL {
            let Some((id, due)) = self.take_expired(watch.now()) else {
                break;
            };
            // A user's destructor that panics in it harms nothing else.
            if let Some(again) = catch_panic(|| due.run(watch)) {
                // Another keeper may have looked meanwhile, and sleep past what was taken out here.
                self.update(|alarms| alarms.requeue(id, &again));
            }
            if begun.elapsed() >= POLL_BUDGET {
                break;
            }
        }
        self.entries().end_turn(watch.now())
    }

    fn take_expired(&self, now: Instant) -> Option<(EntryId, Expired)> {
        self.entries().take_expired(now)
    }

    /// Looks at all that is due, as a keeper does.
    #[cfg(test)]
    pub(crate) fn run_expired_now(&self, now: Instant) -> Option<Instant> {
        self.run_all_expired(&LatenessTracker::new(now, Timeliness::OnTime))
    }

    #[cfg(test)]
    fn run_all_expired(&self, watch: &LatenessTracker) -> Option<Instant> {
        loop {
            let next = self.run_expired(watch);
            if next.is_none_or(|next| next > watch.now()) {
                return next;
            }
        }
    }

    fn entries(&self) -> MutexGuard<'_, TimerEntries> {
        lock(&self.entries)
    }
}

impl Drop for Timer {
    /// The keepers hold no strong reference to it; they must wake once more to see that it is gone.
    fn drop(&mut self) {
        self.shared.wake.notify_waiters();
    }
}

// === impl Ticket ===

impl TimerHandle {
    /// Has it looked at by `at`, if it would be looked at later or not at all. During a look too the earlier time counts,
    /// and none is lost.
    pub(crate) fn reset_earlier(&self, at: Instant) {
        self.timer
            .update(|alarms| alarms.reset_earlier(self.id, at));
    }
}

#[cfg(test)]
impl TimerHandle {
    /// When it is looked at next.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.timer.entries().deadline(self.id)
    }
}

impl Drop for TimerHandle {
    fn drop(&mut self) {
        let _gone = self.timer.entries().remove(self.id);
    }
}

// === impl Keeper ===

impl TimerTask {
    async fn run(mut self, timer: Weak<Timer>) {
        let mut can_sleep = true;
        loop {
            let shared = self.shared.clone();
            // Listens before it looks.
            let mut woken = pin!(shared.wake.notified());
            woken.as_mut().enable();
            let look = timer.upgrade().map(|timer| self.run_once(&timer));
            let Some(ControlFlow::Continue(at)) = look else {
                return;
            };
            if self.backlog.is_some() {
                // Others are served before it goes on.
                yield_now().await;
                continue;
            }
            let at = at.filter(|_| can_sleep);
            // Where the runtime has no clock, tokio tells only by a panic.
            let alarm = at.map(|at| catch_panic(|| sleep_until(at)));
            match alarm {
                Some(Some(alarm)) => {
                    select(woken, pin!(alarm)).await;
                }
                Some(None) => {
                    // All times are left to the others.
                    can_sleep = false;
                    self.shared.state().disable_sleep(self.runtime);
                    self.shared.wake.notify_waiters();
                }
                None => woken.await,
            }
        }
    }

    /// Says when to come back, if at all. `Break` if the runtime takes no tasks any more.
    fn run_once(&mut self, timer: &Timer) -> ControlFlow<(), Option<Instant>> {
        let now = Instant::now();
        let (errands, next_errand) = self.shared.state().pending.take_overdue(now);
        if !TaskRunner::steal(&self.shared, errands) {
            return ControlFlow::Break(());
        }
        let is_first = self.shared.state().is_or_becomes_leader(self.runtime);
        let behind = self.backlog.take();
        let deadline = if is_first {
            self.run_as_leader(timer, now, behind)
        } else {
            self.run_as_standby(timer, now)
        };
        ControlFlow::Continue(deadline.into_iter().chain(next_errand).min())
    }

    /// Does what is due, or goes on with it.
    fn run_as_leader(
        &mut self,
        timer: &Timer,
        now: Instant,
        behind: Option<LatenessTracker>,
    ) -> Option<Instant> {
        let watch = match behind {
            Some(mut watch) => {
                watch.next_turn(now);
                watch
            }
            None => LatenessTracker::new(now, Timeliness::OnTime),
        };
        self.run_turn(timer, watch)
    }

    /// Does what the first keeper has not done in time.
    fn run_as_standby(&mut self, timer: &Timer, now: Instant) -> Option<Instant> {
        let overdue = timer.entries().turn_due_at()?.checked_add(FAILOVER_DELAY)?;
        if overdue > now {
            return Some(overdue);
        }
        self.shared.state().set_leader(self.runtime);
        self.run_turn(timer, LatenessTracker::new(now, Timeliness::Late))
    }

    fn run_turn(&mut self, timer: &Timer, watch: LatenessTracker) -> Option<Instant> {
        let next = timer.run_expired(&watch);
        let is_behind = next.is_some_and(|at| at <= watch.now());
        self.backlog = is_behind.then_some(watch);
        next
    }
}

impl Drop for TimerTask {
    fn drop(&mut self) {
        let nobody_takes = {
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
        // These may be the user's.
        catch_panic(|| drop(nobody_takes));
    }
}

#[cfg(test)]
mod tests;
