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
pub(crate) const MAX_RESUME_WAIT: Duration = Duration::from_secs(5);

/// How late the end of a grace may be noticed to be acted on at once: 2 ms. Tokio's timers round up to 1 ms.
pub(super) const TIMER_RESOLUTION: Duration = Duration::from_millis(2);

/// How many resumes in a row may renew the grace although they brought nothing: 20, a minute for
/// a client that polls every 3 s.
pub(crate) const MAX_EMPTY_RESUMES: u32 = 20;

/// What becomes of a call when its client goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DetachedState {
    /// Cancelled at `deadline` if it is still detached then. `retry` is how long its client waits before
    /// it comes back.
    GraceUntil { deadline: Instant, retry: Duration },
    /// Runs on. Its end will be seen. The answer is kept so long for its client.
    UntilComplete { resume_window: Duration },
    /// Runs on unseen, forgotten at this time.
    ForgetAt {
        until: Instant,
        resume_window: Duration,
    },
}

/// When a call is to be looked at.
#[derive(Debug, Default)]
pub(super) struct CallTimers {
    /// When it is cancelled at the latest, attached or not.
    pub(super) deadline: Option<Instant>,
    /// When it is looked at next, which is what `due` holds for it.
    pub(super) due: Option<Instant>,
    /// Its clock, while it is detached.
    pub(super) grace_timer: Option<GraceTimer>,
    /// The resumes whose streams live.
    pub(super) resumed: Vec<Generation>,
    /// How many resumes were received and are not answered.
    pending_resumes: u32,
    /// How many tasks read a stream of it on, and will see its end.
    background_readers: u32,
    empty_resumes: u32,
    /// Its client may have come back where nobody sees it: the loss of its stream means nothing, and no other call supersedes it.
    pub(super) is_maybe_resumed: bool,
    /// How often somebody was told to cancel it.
    expiry_count: u32,
    last_deadline: Option<Instant>,
}

/// The clock of a detached call.
#[derive(Debug, Clone, Copy)]
pub(super) struct GraceTimer {
    pub(super) detachment: Detachment,
    pub(super) state: DetachedState,
    /// How long its client may stay away, as was decided when it went: the grace of a call that has one.
    pub(super) resume_window: Duration,
    /// It was put off for long.
    was_postponed: bool,
    /// Not before this time is it over: that it was, was noticed late.
    recheck_at: Option<Instant>,
    /// How often it was looked at again.
    rechecks: u8,
    /// Its time is over, and somebody was told to cancel the call.
    pub(super) is_expired: bool,
    /// Whoever had to be asked said that it may be cancelled.
    is_confirmed: bool,
    /// Nobody reads a stream of the call on, which would run to its end: when it is forgotten.
    unobserved_until: Option<Instant>,
    /// When the last hold ended, or could have lasted to.
    resumes_ended_at: Option<Instant>,
}

/// Which time it is that somebody was told to cancel a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpiryToken(u32);

/// What a look at a call whose time has come decides.
pub(super) enum ExpiryDecision {
    /// The time that its client had to come back is over.
    GraceExpired,
    /// The same, and nobody is to be asked any more.
    GraceConfirmed,
    /// The time that it may last is over.
    CallTimeout,
    Postponed,
    Forget,
}

// === impl Wait ===

impl DetachedState {
    fn resume_window(self, since: Instant) -> Duration {
        match self {
            Self::GraceUntil { deadline, .. } => deadline.saturating_duration_since(since),
            Self::UntilComplete {
                resume_window: patience,
            }
            | Self::ForgetAt {
                resume_window: patience,
                ..
            } => patience,
        }
    }
}

// === impl Times ===

impl CallTimers {
    /// Of a call that is attached, and cancelled at this time at the latest.
    pub(super) fn with_deadline(deadline: Instant) -> Self {
        Self {
            deadline: Some(deadline),
            ..Self::default()
        }
    }

    /// Starts the clock. Returns when it is to be looked at.
    pub(super) fn detach(
        &mut self,
        mut wait: DetachedState,
        barren: bool,
        detachment: Detachment,
    ) -> Option<Instant> {
        let patience = wait.resume_window(detachment.since());
        self.empty_resumes = if barren { self.empty_resumes + 1 } else { 0 };
        if let DetachedState::GraceUntil { deadline, .. } = &mut wait {
            if self.empty_resumes > MAX_EMPTY_RESUMES {
                *deadline = self.last_deadline.unwrap_or(*deadline).min(*deadline);
            }
            self.last_deadline = Some(*deadline);
        }
        self.grace_timer = Some(GraceTimer {
            detachment,
            state: wait,
            resume_window: patience,
            was_postponed: false,
            recheck_at: None,
            rechecks: 0,
            is_expired: false,
            is_confirmed: false,
            unobserved_until: None,
            resumes_ended_at: None,
        });
        self.detached_deadline()
    }

    /// Notes that somebody was told to cancel the call.
    pub(super) fn mark_expired(&mut self) {
        if let Some(clock) = &mut self.grace_timer {
            clock.is_expired = true;
            self.expiry_count = self.expiry_count.wrapping_add(1);
        }
    }

    /// The time that somebody was told to cancel the call, if that holds.
    pub(super) fn expiry(&self) -> Option<ExpiryToken> {
        let is_given_out = self.grace_timer.is_some_and(|clock| clock.is_expired);
        is_given_out.then_some(ExpiryToken(self.expiry_count))
    }

    /// Has the clock looked at again. What was said of it does not hold any more.
    fn invalidate_expiry(&mut self) {
        if let Some(clock) = &mut self.grace_timer {
            clock.is_expired = false;
            clock.is_confirmed = false;
        }
    }

    /// Nobody said yet that the call may be cancelled: its time goes on.
    pub(super) fn postpone(&mut self, until: Instant) {
        self.invalidate_expiry();
        if let Some(clock) = &mut self.grace_timer
            && let DetachedState::GraceUntil { deadline, .. } = &mut clock.state
        {
            *deadline = until;
            clock.was_postponed = false;
            clock.recheck_at = None;
            clock.rechecks = 0;
            self.last_deadline = Some(until);
        }
    }

    /// The call may be cancelled. Nobody knows whether the runtime stood still while that was asked, so the clock is looked
    /// at once more.
    pub(super) fn confirm(&mut self, now: Instant) {
        self.invalidate_expiry();
        if let Some(clock) = &mut self.grace_timer {
            clock.is_confirmed = true;
            clock.recheck_at = Some(now + RECHECK_DELAY);
            clock.rechecks = clock.rechecks.saturating_add(1);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let is_given_out = self.grace_timer.is_some_and(|clock| clock.is_expired);
        let grace = self.detached_deadline().filter(|_| !is_given_out);
        grace.into_iter().chain(self.deadline).min()
    }

    /// When the clock of a detached call is looked at.
    pub(super) fn detached_deadline(&self) -> Option<Instant> {
        let clock = self.grace_timer.as_ref()?;
        match clock.state {
            DetachedState::GraceUntil { deadline, .. } => {
                let at = if self.has_pending_resume() {
                    resume_deadline(deadline)
                } else {
                    // A deadline that passed meanwhile could not be noticed before.
                    clock.resumes_ended_at.unwrap_or(deadline).max(deadline)
                };
                Some(clock.recheck_at.unwrap_or(at).max(at))
            }
            // Not before its deadline: who cannot see its end can still cancel it.
            DetachedState::ForgetAt { until, .. } => Some(until).max(self.deadline),
            DetachedState::UntilComplete { .. } => clock
                .unobserved_until
                .map(|at| at.max(self.deadline.unwrap_or(at))),
        }
    }

    pub(super) fn has_pending_resume(&self) -> bool {
        self.pending_resumes > 0
    }

    /// Adds a hold, of which the first stops the clock.
    ///
    /// A resume may be the first to notice that the time is over (invariant 7). It would not know that any more when
    /// the hold ends.
    pub(super) fn begin_resume(&mut self, now: Instant) {
        if !self.has_pending_resume()
            && let Some(at) = self.detached_deadline()
        {
            self.postpone_if_late(now, at, now.duration_since(at), false);
        }
        self.pending_resumes = self.pending_resumes.saturating_add(1);
        self.invalidate_expiry();
    }

    /// Takes a hold away. The clock goes on with the last.
    pub(super) fn end_resume(&mut self, now: Instant) {
        if self.pending_resumes != 1 {
            self.pending_resumes = self.pending_resumes.saturating_sub(1);
            return;
        }
        self.pending_resumes = 0;
        self.invalidate_expiry();
        if let Some(clock) = &mut self.grace_timer
            && let DetachedState::GraceUntil { deadline, .. } = clock.state
        {
            clock.resumes_ended_at = Some(now.min(resume_deadline(deadline)));
        }
    }

    /// Lets a call run on, now if it is detached.
    pub(super) fn set_maybe_resumed(&mut self, wait: DetachedState) {
        self.invalidate_expiry();
        self.is_maybe_resumed = true;
        if let Some(clock) = &mut self.grace_timer {
            clock.state = wait;
        }
    }

    /// How long the end of a detached call is kept that comes at `at`: for as long as its client may stay away, and to the end
    /// of its grace, however often that was put off. `None` if it has a client.
    pub(super) fn retained_until(&self, at: Instant) -> Option<Instant> {
        let clock = self.grace_timer.as_ref()?;
        let whole = at.checked_add(clock.resume_window);
        let waits_to = match clock.state {
            DetachedState::GraceUntil { deadline, .. } => Some(deadline),
            DetachedState::UntilComplete { .. } | DetachedState::ForgetAt { .. } => None,
        };
        whole.max(waits_to)
    }

    /// A task reads a stream of the call on.
    pub(super) fn add_background_reader(&mut self) {
        self.background_readers = self.background_readers.saturating_add(1);
        if let Some(clock) = &mut self.grace_timer {
            clock.unobserved_until = None;
        }
    }

    /// Such a task has ended without having seen the call's end.
    pub(super) fn remove_background_reader(&mut self, unseen_until: Option<Instant>) {
        self.background_readers = self.background_readers.saturating_sub(1);
        if self.background_readers == 0
            && let Some(clock) = &mut self.grace_timer
            && let Some(unseen_until) = unseen_until
        {
            clock.unobserved_until.get_or_insert(unseen_until);
        }
    }

    /// Looks at a call at `now` that was to be looked at at `at`, which was noticed so late. `starved`: it is known that a
    /// runtime stood still.
    pub(super) fn check(
        &mut self,
        now: Instant,
        at: Instant,
        late: Duration,
        starved: bool,
    ) -> ExpiryDecision {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return ExpiryDecision::CallTimeout;
        }
        match self.grace_timer.map(|clock| clock.state) {
            Some(DetachedState::GraceUntil { .. })
                if self.postpone_if_late(now, at, late, starved) =>
            {
                ExpiryDecision::Postponed
            }
            Some(DetachedState::GraceUntil { .. }) => {
                self.mark_expired();
                if self.grace_timer.is_some_and(|clock| clock.is_confirmed) {
                    ExpiryDecision::GraceConfirmed
                } else {
                    ExpiryDecision::GraceExpired
                }
            }
            Some(DetachedState::ForgetAt { .. } | DetachedState::UntilComplete { .. }) => {
                ExpiryDecision::Forget
            }
            None => ExpiryDecision::Postponed,
        }
    }

    fn postpone_if_late(
        &mut self,
        now: Instant,
        at: Instant,
        late: Duration,
        starved: bool,
    ) -> bool {
        let Some(clock) = &mut self.grace_timer else {
            return false;
        };
        let DetachedState::GraceUntil { deadline, retry } = &mut clock.state else {
            return false;
        };
        let tolerated = if clock.recheck_at == Some(at) {
            RECHECK_TOLERANCE
        } else {
            TIMER_RESOLUTION
        };
        let ends = if (starved || late > STALL_THRESHOLD) && !clock.was_postponed {
            clock.was_postponed = true;
            // What was true before need not be so any more.
            clock.is_confirmed = false;
            *deadline = now + (2 * *retry).max(MAX_RESUME_WAIT);
            *deadline
        } else if (starved || late > tolerated) && clock.rechecks < MAX_RECHECKS {
            clock.rechecks += 1;
            *clock.recheck_at.insert(now + RECHECK_DELAY)
        } else {
            return false;
        };
        self.last_deadline = Some(ends);
        true
    }
}

fn resume_deadline(deadline: Instant) -> Instant {
    deadline.checked_add(MAX_RESUME_WAIT).unwrap_or(deadline)
}
