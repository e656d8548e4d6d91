//! The times of one call in flight: its deadline, and its clock while it is detached.

use std::time::Duration;

use tokio::time::Instant;

use super::generation::Generation;
use crate::{
    call::Detachment,
    timer::{MAX_RECHECKS, RECHECK_DELAY, RECHECK_TOLERANCE, STALL_THRESHOLD},
};

/// How long a hold may keep a call past its deadline: 5 s, far more than an inner service takes to answer
/// a GET, and little for an orphan.
pub(crate) const MAX_HOLD: Duration = Duration::from_secs(5);

/// How late the end of a grace may be noticed to be acted on at once: 2 ms. Tokio's timers round up to 1 ms.
pub(super) const JITTER: Duration = Duration::from_millis(2);

/// How many resumes in a row may renew the grace although they brought nothing: 20, a minute for
/// a client that polls every 3 s.
pub(crate) const MAX_BARREN: u32 = 20;

/// What becomes of a call when its client goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Cancelled at `deadline` if it is still detached then. `retry` is how long its client waits before
    /// it comes back.
    Until { deadline: Instant, retry: Duration },
    /// Runs on. Its end will be seen. The answer is kept so long for its client.
    ForItsEnd { patience: Duration },
    /// Runs on unseen, forgotten at this time.
    Unseen { until: Instant, patience: Duration },
}

/// When a call is to be looked at.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// When it is cancelled at the latest, attached or not.
    pub(super) deadline: Option<Instant>,
    /// When it is looked at next, which is what `due` holds for it.
    pub(super) due: Option<Instant>,
    /// Its clock, while it is detached.
    pub(super) clock: Option<Clock>,
    /// The resumes whose streams live.
    pub(super) resumed: Vec<Generation>,
    /// How many resumes were received and are not answered.
    holds: u32,
    /// How many tasks read a stream of it on, and will see its end.
    readers: u32,
    barren: u32,
    /// Its client may have come back where nobody sees it: the loss of its stream means nothing, and no other call supersedes it.
    pub(super) is_spared: bool,
    /// How often somebody was told to cancel it.
    dues: u32,
    last_deadline: Option<Instant>,
}

/// The clock of a detached call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    pub(super) detachment: Detachment,
    pub(super) wait: Wait,
    /// How long its client may stay away, as was decided when it went: the grace of a call that has one.
    pub(super) patience: Duration,
    /// It was put off for long.
    put_off: bool,
    /// Not before this time is it over: that it was, was noticed late.
    again: Option<Instant>,
    /// How often it was looked at again.
    glances: u8,
    /// Its time is over, and somebody was told to cancel the call.
    pub(super) given_out: bool,
    /// Whoever had to be asked said that it may be cancelled.
    confirmed: bool,
    /// Nobody reads a stream of the call on, which would run to its end: when it is forgotten.
    unwatched: Option<Instant>,
    /// When the last hold ended, or could have lasted to.
    released: Option<Instant>,
}

/// Which time it is that somebody was told to cancel a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Expiry(u32);

/// What a look at a call whose time has come decides.
pub(super) enum Judged {
    /// The time that its client had to come back is over.
    Orphan,
    /// The same, and nobody is to be asked any more.
    ConfirmedOrphan,
    /// The time that it may last is over.
    TooLong,
    PutOff,
    Forget,
}

// === impl Wait ===

impl Wait {
    fn patience(self, since: Instant) -> Duration {
        match self {
            Self::Until { deadline, .. } => deadline.saturating_duration_since(since),
            Self::ForItsEnd { patience } | Self::Unseen { patience, .. } => patience,
        }
    }
}

// === impl Times ===

impl Times {
    /// Of a call that is attached, and cancelled at this time at the latest.
    pub(super) fn lasting_to(deadline: Instant) -> Self {
        Self {
            deadline: Some(deadline),
            ..Self::default()
        }
    }

    /// Starts the clock. Returns when it is to be looked at.
    pub(super) fn detach(
        &mut self,
        mut wait: Wait,
        barren: bool,
        detachment: Detachment,
    ) -> Option<Instant> {
        let patience = wait.patience(detachment.since());
        self.barren = if barren { self.barren + 1 } else { 0 };
        if let Wait::Until { deadline, .. } = &mut wait {
            if self.barren > MAX_BARREN {
                *deadline = self.last_deadline.unwrap_or(*deadline).min(*deadline);
            }
            self.last_deadline = Some(*deadline);
        }
        self.clock = Some(Clock {
            detachment,
            wait,
            patience,
            put_off: false,
            again: None,
            glances: 0,
            given_out: false,
            confirmed: false,
            unwatched: None,
            released: None,
        });
        self.grace_ends()
    }

    /// Notes that somebody was told to cancel the call.
    pub(super) fn give_out(&mut self) {
        if let Some(clock) = &mut self.clock {
            clock.given_out = true;
            self.dues = self.dues.wrapping_add(1);
        }
    }

    /// The time that somebody was told to cancel the call, if that holds.
    pub(super) fn given_out(&self) -> Option<Expiry> {
        let is_given_out = self.clock.is_some_and(|clock| clock.given_out);
        is_given_out.then_some(Expiry(self.dues))
    }

    /// Has the clock looked at again. What was said of it does not hold any more.
    fn take_back(&mut self) {
        if let Some(clock) = &mut self.clock {
            clock.given_out = false;
            clock.confirmed = false;
        }
    }

    /// Nobody said yet that the call may be cancelled: its time goes on.
    pub(super) fn put_off(&mut self, until: Instant) {
        self.take_back();
        if let Some(clock) = &mut self.clock
            && let Wait::Until { deadline, .. } = &mut clock.wait
        {
            *deadline = until;
            clock.put_off = false;
            clock.again = None;
            clock.glances = 0;
            self.last_deadline = Some(until);
        }
    }

    /// The call may be cancelled. Nobody knows whether the runtime stood still while that was asked, so the clock is looked
    /// at once more.
    pub(super) fn confirm(&mut self, now: Instant) {
        self.take_back();
        if let Some(clock) = &mut self.clock {
            clock.confirmed = true;
            clock.again = Some(now + RECHECK_DELAY);
            clock.glances = clock.glances.saturating_add(1);
        }
    }

    pub(super) fn next_look(&self) -> Option<Instant> {
        let is_given_out = self.clock.is_some_and(|clock| clock.given_out);
        let grace = self.grace_ends().filter(|_| !is_given_out);
        grace.into_iter().chain(self.deadline).min()
    }

    /// When the clock of a detached call is looked at.
    pub(super) fn grace_ends(&self) -> Option<Instant> {
        let clock = self.clock.as_ref()?;
        match clock.wait {
            Wait::Until { deadline, .. } => {
                let at = if self.is_held() {
                    hold_ends(deadline)
                } else {
                    // A deadline that passed meanwhile could not be noticed before.
                    clock.released.unwrap_or(deadline).max(deadline)
                };
                Some(clock.again.unwrap_or(at).max(at))
            }
            // Not before its deadline: who cannot see its end can still cancel it.
            Wait::Unseen { until, .. } => Some(until).max(self.deadline),
            Wait::ForItsEnd { .. } => clock
                .unwatched
                .map(|at| at.max(self.deadline.unwrap_or(at))),
        }
    }

    pub(super) fn is_held(&self) -> bool {
        self.holds > 0
    }

    /// Adds a hold, of which the first stops the clock.
    ///
    /// A resume may be the first to notice that the time is over (invariant 7). It would not know that any more when
    /// the hold ends.
    pub(super) fn hold(&mut self, now: Instant) {
        if !self.is_held()
            && let Some(at) = self.grace_ends()
        {
            self.put_off_if_late(now, at, now.duration_since(at), false);
        }
        self.holds = self.holds.saturating_add(1);
        self.take_back();
    }

    /// Takes a hold away. The clock goes on with the last.
    pub(super) fn release(&mut self, now: Instant) {
        if self.holds != 1 {
            self.holds = self.holds.saturating_sub(1);
            return;
        }
        self.holds = 0;
        self.take_back();
        if let Some(clock) = &mut self.clock
            && let Wait::Until { deadline, .. } = clock.wait
        {
            clock.released = Some(now.min(hold_ends(deadline)));
        }
    }

    /// Lets a call run on, now if it is detached.
    pub(super) fn spare(&mut self, wait: Wait) {
        self.take_back();
        self.is_spared = true;
        if let Some(clock) = &mut self.clock {
            clock.wait = wait;
        }
    }

    /// How long the end of a detached call is kept that comes at `at`: for as long as its client may stay away, and to the end
    /// of its grace, however often that was put off. `None` if it has a client.
    pub(super) fn retained_until(&self, at: Instant) -> Option<Instant> {
        let clock = self.clock.as_ref()?;
        let whole = at.checked_add(clock.patience);
        let waits_to = match clock.wait {
            Wait::Until { deadline, .. } => Some(deadline),
            Wait::ForItsEnd { .. } | Wait::Unseen { .. } => None,
        };
        whole.max(waits_to)
    }

    /// A task reads a stream of the call on.
    pub(super) fn add_reader(&mut self) {
        self.readers = self.readers.saturating_add(1);
        if let Some(clock) = &mut self.clock {
            clock.unwatched = None;
        }
    }

    /// Such a task has ended without having seen the call's end.
    pub(super) fn remove_reader(&mut self, unseen_until: Option<Instant>) {
        self.readers = self.readers.saturating_sub(1);
        if self.readers == 0
            && let Some(clock) = &mut self.clock
            && let Some(unseen_until) = unseen_until
        {
            clock.unwatched.get_or_insert(unseen_until);
        }
    }

    /// Looks at a call at `now` that was to be looked at at `at`, which was noticed so late. `starved`: it is known that a
    /// runtime stood still.
    pub(super) fn look(
        &mut self,
        now: Instant,
        at: Instant,
        late: Duration,
        starved: bool,
    ) -> Judged {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return Judged::TooLong;
        }
        match self.clock.map(|clock| clock.wait) {
            Some(Wait::Until { .. }) if self.put_off_if_late(now, at, late, starved) => {
                Judged::PutOff
            }
            Some(Wait::Until { .. }) => {
                self.give_out();
                if self.clock.is_some_and(|clock| clock.confirmed) {
                    Judged::ConfirmedOrphan
                } else {
                    Judged::Orphan
                }
            }
            Some(Wait::Unseen { .. } | Wait::ForItsEnd { .. }) => Judged::Forget,
            None => Judged::PutOff,
        }
    }

    fn put_off_if_late(
        &mut self,
        now: Instant,
        at: Instant,
        late: Duration,
        starved: bool,
    ) -> bool {
        let Some(clock) = &mut self.clock else {
            return false;
        };
        let Wait::Until { deadline, retry } = &mut clock.wait else {
            return false;
        };
        let tolerated = if clock.again == Some(at) {
            RECHECK_TOLERANCE
        } else {
            JITTER
        };
        let ends = if (starved || late > STALL_THRESHOLD) && !clock.put_off {
            clock.put_off = true;
            // What was true before need not be so any more.
            clock.confirmed = false;
            *deadline = now + (2 * *retry).max(MAX_HOLD);
            *deadline
        } else if (starved || late > tolerated) && clock.glances < MAX_RECHECKS {
            clock.glances += 1;
            *clock.again.insert(now + RECHECK_DELAY)
        } else {
            return false;
        };
        self.last_deadline = Some(ends);
        true
    }
}

fn hold_ends(deadline: Instant) -> Instant {
    deadline.checked_add(MAX_HOLD).unwrap_or(deadline)
}
