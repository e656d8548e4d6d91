//! The only place that sleeps for calls, or spawns.
//!
//! `Drop` code may run anywhere: on a thread without a runtime, or while a runtime shuts down. A process may have
//! several runtimes (servers with one for each core have), and each may stand still: its thread computes, or nobody
//! drives it any more. So nothing waits for one runtime alone.
//!
//! 1. Every runtime that serves requests has a timer, a task of its own. One of them, the first, looks at a deadline
//!    on time; the others look [`SLACK`] later, and the one that finds it overdue becomes the first. The runtime
//!    on which the earliest deadline was made is alive, so its timer is the first from then on.
//! 2. A task runs on the runtime on which it was wanted. If it has not begun there [`SLACK`] later, or that runtime
//!    ends, another runtime takes it (see [`errand`]).
//! 3. A timer wakes once for a deadline that it waits for, and once when it is told of an earlier one.

use std::{
    pin::pin,
    sync::{Arc, Weak},
};

use futures_util::future::select;
use tokio::{
    runtime::{Handle, Id},
    time::{Instant, Sleep, sleep_until},
};

use self::{
    errand::Errand,
    runner::Runner,
    shared::{SLACK, Shared},
};

use crate::quietly::quietly;

mod errand;
mod in_time;
mod roll;
mod runner;
mod shared;

pub(crate) use self::{errand::Moves, in_time::in_time};

/// What the driver wakes for deadlines. Any number of timers may ask at the same time.
pub(super) trait Expire: Send + Sync + 'static {
    /// When it is to be looked at next, as far as the driver was told.
    fn due(&self) -> Option<Instant>;

    /// Cancels what is due and tells when to come back.
    fn expire(self: Arc<Self>, now: Instant, noticed: Noticed) -> Option<Instant>;
}

/// How a deadline that has passed was noticed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Noticed {
    /// By the timer that was to notice it, unless that one slept too long.
    InTime,
    /// By the same one, but some time after: clients that were in time may not be heard yet.
    Delayed,
    /// The runtime that was to notice it stands still. Clients may wait there to be heard.
    Late,
}

pub(super) struct Driver {
    shared: Arc<Shared>,
}

/// The timer of one runtime. Dropped, also with its runtime, it is none of the timers any more.
struct Timer {
    shared: Arc<Shared>,
    runtime: Id,
}

/// What a look at the clock decides.
enum Look {
    /// To come back at this time, if at all.
    Sleep(Option<Instant>),
    /// The runtime takes no tasks any more.
    Ended,
}

// === impl Driver ===

impl Driver {
    pub(super) fn new() -> Self {
        Self {
            shared: Arc::new(Shared::new()),
        }
    }

    /// Gives the current runtime a timer, unless it has one or there is no runtime. Called for every request.
    pub(super) fn start(&self, target: impl FnOnce() -> Weak<dyn Expire>) {
        if !self.shared.roll.is_here() {
            self.enter(target);
        }
    }

    #[cold]
    fn enter(&self, target: impl FnOnce() -> Weak<dyn Expire>) {
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
            let timer = Timer {
                shared: self.shared.clone(),
                runtime: id,
            };
            drop(runtime.spawn(timer.run(target())));
        }
    }

    /// Has the timers look again: there is an earlier deadline.
    pub(super) fn wake(&self) {
        {
            let mut state = self.shared.state();
            if state.timers.len() > 1
                && let Ok(here) = Handle::try_current()
            {
                state.prefer(here.id());
            }
        }
        self.shared.wake.notify_waiters();
    }

    /// Runs `task` on the current runtime, or on another one that has a timer if that does not come to it. Without
    /// any, or when they all end, the task is dropped.
    pub(super) fn spawn(&self, moves: Moves, task: impl Future<Output = ()> + Send + 'static) {
        Runner::start(&self.shared, Errand::new(moves, Box::pin(task)));
    }
}

impl Drop for Driver {
    /// The timers hold no strong reference to their target; they must wake once more to see that it is gone.
    fn drop(&mut self) {
        self.shared.wake.notify_waiters();
    }
}

// === impl Timer ===

impl Timer {
    async fn run(self, target: Weak<dyn Expire>) {
        let mut can_sleep = true;
        loop {
            // Listens before it looks.
            let mut woken = pin!(self.shared.wake.notified());
            woken.as_mut().enable();
            let Some(target) = target.upgrade() else {
                return;
            };
            let alarm = match self.look(target) {
                Look::Sleep(at) => at.filter(|_| can_sleep).map(alarm),
                Look::Ended => return,
            };
            match alarm {
                Some(Some(alarm)) => {
                    select(woken, pin!(alarm)).await;
                }
                Some(None) => {
                    can_sleep = false;
                    self.cannot_sleep();
                }
                None => woken.await,
            }
        }
    }

    fn look(&self, target: Arc<dyn Expire>) -> Look {
        let now = Instant::now();
        let (errands, next_errand) = self.shared.state().errands.take_due(now);
        if !Runner::take_over(&self.shared, errands) {
            return Look::Ended;
        }
        let is_first = self.shared.state().is_first(self.runtime);
        let deadline = match is_first {
            true => target.expire(now, Noticed::InTime),
            false => self.stand_by(target, now),
        };
        Look::Sleep(deadline.into_iter().chain(next_errand).min())
    }

    /// Does what the first has not done.
    fn stand_by(&self, target: Arc<dyn Expire>, now: Instant) -> Option<Instant> {
        let overdue = target.due()?.checked_add(SLACK)?;
        if overdue > now {
            return Some(overdue);
        }
        self.shared.state().prefer(self.runtime);
        target.expire(now, Noticed::Late)
    }

    /// Leaves deadlines to the others.
    fn cannot_sleep(&self) {
        self.shared.state().cannot_sleep(self.runtime);
        self.shared.wake.notify_waiters();
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        let nobody_takes = {
            let mut state = self.shared.state();
            state.leave(self.runtime);
            self.shared.roll.renew();
            match state.timers.is_empty() {
                true => state.errands.take_free(),
                false => Vec::new(),
            }
        };
        self.shared.wake.notify_waiters();
        // They may be the user's.
        quietly(|| drop(nobody_takes));
    }
}

/// `None` if the runtime has no clock, of which tokio tells by a panic only.
fn alarm(at: Instant) -> Option<Sleep> {
    quietly(|| sleep_until(at))
}

#[cfg(test)]
mod tests;
