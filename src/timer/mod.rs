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
    alarms::{AlarmId, Alarms, Due},
    errand::Errand,
    runner::Runner,
    shared::{Keepers, SLACK},
};
use crate::{lock::lock, quietly::quietly};

mod alarms;
mod errand;
mod in_time;
mod roll;
mod runner;
mod shared;
mod watch;

pub(crate) use self::{
    alarms::{LATE, MAX_GLANCES, NextLook, Timed},
    errand::Moves,
    in_time::in_time,
    watch::{GLANCE, Noticed, ON_TIME, Watch},
};

/// How long a keeper goes on with what is due before others are served: 0.1 ms, and one look.
const TURN: Duration = Duration::from_micros(100);

/// How often it looks at something in a turn at most: 64 times, where a clock stands still.
const LOOKS: usize = 64;

/// Keeps the time of what has a [`Ticket`], and the tasks that have not begun.
#[derive(Default)]
pub(crate) struct Timer {
    shared: Arc<Keepers>,
    alarms: Mutex<Alarms>,
}

/// Keeps an alarm set. What is looked at owns it; nothing of the alarm is left once it is dropped.
pub(crate) struct Ticket {
    timer: Arc<Timer>,
    id: AlarmId,
}

/// Keeps time on one runtime, until it is dropped, alone or with its runtime.
struct Keeper {
    shared: Arc<Keepers>,
    runtime: Id,
    /// Its last turn, if more was due after it.
    behind: Option<Watch>,
}

// === impl Timer ===

impl Timer {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    /// Has the current runtime keep time too, if it does not yet. Called with every request.
    pub(crate) fn on_this_runtime(self: &Arc<Self>) {
        if !self.shared.roll.is_here() {
            self.enter();
        }
    }

    #[cold]
    fn enter(self: &Arc<Self>) {
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        let id = runtime.id();
        let is_new = {
            let mut state = self.shared.state();
            self.shared.roll.note(&runtime);
            state.enter(id)
        };
        if is_new {
            let keeper = Keeper {
                shared: self.shared.clone(),
                runtime: id,
                behind: None,
            };
            drop(runtime.spawn(keeper.run(Arc::downgrade(self))));
        }
    }

    /// Runs a task on this runtime, or on another one that keeps time if this one does not come to it. When none is
    /// left, the task is dropped.
    pub(crate) fn spawn(&self, moves: Moves, task: impl Future<Output = ()> + Send + 'static) {
        let errand = Errand {
            moves,
            task: Box::pin(task),
            moved: 0,
        };
        Runner::start(&self.shared, errand);
    }

    /// Has something looked at when its time comes, as long as its ticket is kept.
    #[must_use]
    pub(crate) fn set(self: &Arc<Self>, at: Instant, timed: Weak<dyn Timed>) -> Ticket {
        let id = self.change(|alarms| alarms.add(at, timed));
        self.on_this_runtime();
        Ticket {
            timer: self.clone(),
            id,
        }
    }

    /// Changes something in the alarms, and has the keepers look again if that brought an earlier time.
    fn change<R>(&self, change: impl FnOnce(&mut Alarms) -> R) -> R {
        let (result, is_news) = {
            let mut alarms = self.alarms();
            (change(&mut alarms), alarms.must_tell())
        };
        if is_news {
            let mut state = self.shared.state();
            if state.keepers.len() > 1
                && let Ok(here) = Handle::try_current()
            {
                state.prefer(here.id());
            }
            drop(state);
            self.shared.wake.notify_waiters();
        }
        result
    }

    /// Looks at what is due for a [`TURN`], and tells when to come back. Any number of keepers may do so at the same time.
    fn look(&self, watch: &Watch) -> Option<Instant> {
        let begun = Instant::now();
        for _ in 0..LOOKS {
            let Some((id, due)) = self.take_due(watch.now()) else {
                break;
            };
            // A user's destructor that panics in it harms nothing else.
            if let Some(again) = quietly(|| due.look(watch)) {
                // Another keeper may have looked meanwhile, and sleep past what was taken out here.
                self.change(|alarms| alarms.again(id, &again));
            }
            if begun.elapsed() >= TURN {
                break;
            }
        }
        self.alarms().come_back(watch.now())
    }

    fn take_due(&self, now: Instant) -> Option<(AlarmId, Due)> {
        self.alarms().take_due(now)
    }

    /// Looks at all that is due, as a keeper does.
    #[cfg(test)]
    pub(crate) fn look_now(&self, now: Instant) -> Option<Instant> {
        self.look_all(&Watch::new(now, Noticed::InTime))
    }

    #[cfg(test)]
    fn look_all(&self, watch: &Watch) -> Option<Instant> {
        loop {
            let next = self.look(watch);
            if next.is_none_or(|next| next > watch.now()) {
                return next;
            }
        }
    }

    fn alarms(&self) -> MutexGuard<'_, Alarms> {
        lock(&self.alarms)
    }
}

impl Drop for Timer {
    /// The keepers hold no strong reference to it; they must wake once more to see that it is gone.
    fn drop(&mut self) {
        self.shared.wake.notify_waiters();
    }
}

// === impl Ticket ===

impl Ticket {
    /// Has it looked at by `at`, if it would be looked at later or not at all. During a look too the earlier time counts,
    /// and none is lost.
    pub(crate) fn by(&self, at: Instant) {
        self.timer.change(|alarms| alarms.by(self.id, at));
    }
}

#[cfg(test)]
impl Ticket {
    /// When it is looked at next.
    pub(crate) fn at(&self) -> Option<Instant> {
        self.timer.alarms().at(self.id)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _gone = self.timer.alarms().remove(self.id);
    }
}

// === impl Keeper ===

impl Keeper {
    async fn run(mut self, timer: Weak<Timer>) {
        let mut can_sleep = true;
        loop {
            let shared = self.shared.clone();
            // Listens before it looks.
            let mut woken = pin!(shared.wake.notified());
            woken.as_mut().enable();
            let look = timer.upgrade().map(|timer| self.look(&timer));
            let Some(ControlFlow::Continue(at)) = look else {
                return;
            };
            if self.behind.is_some() {
                // Others are served before it goes on.
                yield_now().await;
                continue;
            }
            let at = at.filter(|_| can_sleep);
            // Where the runtime has no clock, tokio tells only by a panic.
            let alarm = at.map(|at| quietly(|| sleep_until(at)));
            match alarm {
                Some(Some(alarm)) => {
                    select(woken, pin!(alarm)).await;
                }
                Some(None) => {
                    // All times are left to the others.
                    can_sleep = false;
                    self.shared.state().cannot_sleep(self.runtime);
                    self.shared.wake.notify_waiters();
                }
                None => woken.await,
            }
        }
    }

    /// Says when to come back, if at all. `Break` if the runtime takes no tasks any more.
    fn look(&mut self, timer: &Timer) -> ControlFlow<(), Option<Instant>> {
        let now = Instant::now();
        let (errands, next_errand) = self.shared.state().errands.take_due(now);
        if !Runner::take_over(&self.shared, errands) {
            return ControlFlow::Break(());
        }
        let is_first = self.shared.state().is_first(self.runtime);
        let behind = self.behind.take();
        let deadline = if is_first {
            self.turn(timer, now, behind)
        } else {
            self.stand_by(timer, now)
        };
        ControlFlow::Continue(deadline.into_iter().chain(next_errand).min())
    }

    /// Does what is due, or goes on with it.
    fn turn(&mut self, timer: &Timer, now: Instant, behind: Option<Watch>) -> Option<Instant> {
        let watch = match behind {
            Some(mut watch) => {
                watch.go_on(now);
                watch
            }
            None => Watch::new(now, Noticed::InTime),
        };
        self.watch(timer, watch)
    }

    /// Does what the first keeper has not done in time.
    fn stand_by(&mut self, timer: &Timer, now: Instant) -> Option<Instant> {
        let overdue = timer.alarms().looked_at_by()?.checked_add(SLACK)?;
        if overdue > now {
            return Some(overdue);
        }
        self.shared.state().prefer(self.runtime);
        self.watch(timer, Watch::new(now, Noticed::Late))
    }

    fn watch(&mut self, timer: &Timer, watch: Watch) -> Option<Instant> {
        let next = timer.look(&watch);
        let is_behind = next.is_some_and(|at| at <= watch.now());
        self.behind = is_behind.then_some(watch);
        next
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let nobody_takes = {
            let mut state = self.shared.state();
            state.leave(self.runtime);
            self.shared.roll.renew();
            if state.keepers.is_empty() {
                state.errands.take_free()
            } else {
                Vec::new()
            }
        };
        self.shared.wake.notify_waiters();
        // These may be the user's.
        quietly(|| drop(nobody_takes));
    }
}

#[cfg(test)]
mod tests;
