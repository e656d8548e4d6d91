//! An in-flight call's timers: its call timeout and, while it is detached, its grace period.

use std::time::Duration;

use tokio::time::Instant;

use super::generation::Generation;
use crate::{
    call::Detachment,
    timer::{MAX_RECHECKS, RECHECK_DELAY, RECHECK_TOLERANCE, STALL_THRESHOLD},
};

/// Maximum time a pending resume keeps a call running past the end of its grace period.
///
/// Inner services answer a GET much sooner, and an orphan running for this much longer does no harm.
pub(crate) const MAX_RESUME_WAIT: Duration = Duration::from_secs(5);

/// Maximum lateness at which an expired grace period is acted on at once. tokio's timers round up to the next millisecond, so an expiry
/// this late is still punctual.
pub(super) const TIMER_RESOLUTION: Duration = Duration::from_millis(2);

/// Maximum number of empty resumes in a row that renew the grace period.
///
/// A resume is empty if it delivered no events or was turned away. A client polling every 3 s reaches this limit after a minute.
pub(crate) const MAX_EMPTY_RESUMES: u32 = 20;

/// The state of a detached call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DetachedState {
    /// The call is cancelled at `deadline` if it is still detached by then. `retry` is how long its client waits before resuming.
    GraceUntil { deadline: Instant, retry: Duration },
    /// The call keeps running, and its end will be observed. The answer is retained for the resume window.
    UntilComplete { resume_window: Duration },
    /// The call keeps running unobserved and is removed at `until`.
    ForgetAt {
        until: Instant,
        resume_window: Duration,
    },
}

/// An in-flight call's timers, and the state that affects them.
#[derive(Debug, Default)]
pub(super) struct CallTimers {
    /// When the call is cancelled at the latest, attached or not.
    pub(super) deadline: Option<Instant>,
    /// This call's key in `SessionState::due`.
    pub(super) due: Option<Instant>,
    /// `None` while the call is attached.
    pub(super) detached: Option<Detached>,
    /// The open resumed streams.
    pub(super) resumed: Vec<Generation>,
    /// Number of resumes received but not yet answered.
    pending_resumes: u32,
    /// Number of tasks reading one of the call's streams in the background, to observe its end.
    background_readers: u32,
    /// Number of consecutive resumes that delivered no events or were turned away.
    empty_resumes: u32,
    /// Whether the client may have resumed unobserved. If so, the call is not cancelled when one of its streams is lost, and no other call
    /// supersedes it.
    pub(super) may_have_been_resumed: bool,
    /// Number of times the grace period has expired.
    expiry_count: u32,
    /// The end of the last grace period. Empty resumes beyond [`MAX_EMPTY_RESUMES`] do not move it.
    last_grace_deadline: Option<Instant>,
}

/// The state and timers of a call without an open stream.
#[derive(Debug, Clone, Copy)]
pub(super) struct Detached {
    pub(super) detachment: Detachment,
    pub(super) state: DetachedState,
    /// How long the client may take to resume. This is the grace period if there is one, or longer if the client may have resumed
    /// unobserved.
    pub(super) resume_window: Duration,
    /// Whether the grace period has been extended because of a stall.
    was_extended: bool,
    /// When to recheck an expiry that was late or has just been confirmed. The expiry is not acted on before then.
    recheck_at: Option<Instant>,
    /// Number of times an expiry has been rechecked.
    rechecks: u8,
    /// Whether the grace period has expired, so that the call must be cancelled or the cancellation confirmed.
    pub(super) is_expired: bool,
    /// Whether the cancellation has been confirmed.
    is_confirmed: bool,
    /// When to remove the call because no task is observing its end, or `None` while a task is.
    unobserved_until: Option<Instant>,
    /// When the last pending resume ended, capped at [`MAX_RESUME_WAIT`] after the grace period.
    resumes_ended_at: Option<Instant>,
}

/// Identifies one expiry of a call's grace period.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ExpiryToken(u32);

/// What to do with a call whose deadline has expired.
pub(super) enum ExpiryDecision {
    /// The grace period has expired.
    GraceExpired,
    /// The grace period has expired, and the cancellation has been confirmed.
    GraceConfirmed,
    /// The call timeout has passed.
    CallTimeout,
    Postponed,
    Forget,
}

// === impl DetachedState ===

impl DetachedState {
    fn resume_window(self, detached_at: Instant) -> Duration {
        match self {
            Self::GraceUntil { deadline, .. } => deadline.saturating_duration_since(detached_at),
            Self::UntilComplete { resume_window } | Self::ForgetAt { resume_window, .. } => {
                resume_window
            }
        }
    }
}

// === impl CallTimers ===

impl CallTimers {
    /// Returns timers for an attached call, which is cancelled at `deadline` at the latest.
    pub(super) fn with_deadline(deadline: Instant) -> Self {
        Self {
            deadline: Some(deadline),
            ..Self::default()
        }
    }

    /// Detaches the call. Returns when its timer has to be checked, or `None` if the call waits without a deadline.
    pub(super) fn detach(
        &mut self,
        mut state: DetachedState,
        resumed_without_events: bool,
        detachment: Detachment,
    ) -> Option<Instant> {
        let resume_window = state.resume_window(detachment.detached_at());
        self.empty_resumes = if resumed_without_events {
            self.empty_resumes + 1
        } else {
            0
        };
        if let DetachedState::GraceUntil { deadline, .. } = &mut state {
            if self.empty_resumes > MAX_EMPTY_RESUMES {
                // Do not start a new grace period. Instead, let the last one run out.
                *deadline = self.last_grace_deadline.unwrap_or(*deadline).min(*deadline);
            }
            self.last_grace_deadline = Some(*deadline);
        }
        self.detached = Some(Detached {
            detachment,
            state,
            resume_window,
            was_extended: false,
            recheck_at: None,
            rechecks: 0,
            is_expired: false,
            is_confirmed: false,
            unobserved_until: None,
            resumes_ended_at: None,
        });
        self.detached_deadline()
    }

    /// Marks the grace period as expired. The caller must cancel the call, or request a confirmation.
    pub(super) fn mark_expired(&mut self) {
        if let Some(detached) = &mut self.detached {
            detached.is_expired = true;
            self.expiry_count = self.expiry_count.wrapping_add(1);
        }
    }

    /// Returns the current expiry's token.
    ///
    /// Returns `None` if the grace period has not expired, or if the expiry has since been invalidated.
    pub(super) fn expiry(&self) -> Option<ExpiryToken> {
        let is_expired = self.detached.is_some_and(|detached| detached.is_expired);
        is_expired.then_some(ExpiryToken(self.expiry_count))
    }

    /// Invalidates the expiry and its confirmation, so that the timer is rechecked.
    fn invalidate_expiry(&mut self) {
        if let Some(detached) = &mut self.detached {
            detached.is_expired = false;
            detached.is_confirmed = false;
        }
    }

    /// Postpones the end of the grace period to `until`, because the cancellation has not been confirmed.
    ///
    /// A later stall may extend the grace period again.
    pub(super) fn postpone(&mut self, until: Instant) {
        self.invalidate_expiry();
        if let Some(detached) = &mut self.detached
            && let DetachedState::GraceUntil { deadline, .. } = &mut detached.state
        {
            *deadline = until;
            detached.was_extended = false;
            detached.recheck_at = None;
            detached.rechecks = 0;
            self.last_grace_deadline = Some(until);
        }
    }

    /// Confirms that the call may be cancelled. The timer is checked once more, in case the runtime has stalled during the confirmation.
    pub(super) fn confirm(&mut self, now: Instant) {
        self.invalidate_expiry();
        if let Some(detached) = &mut self.detached {
            detached.is_confirmed = true;
            detached.recheck_at = Some(now + RECHECK_DELAY);
            detached.rechecks = detached.rechecks.saturating_add(1);
        }
    }

    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let is_expired = self.detached.is_some_and(|detached| detached.is_expired);
        let grace = self.detached_deadline().filter(|_| !is_expired);
        grace.into_iter().chain(self.deadline).min()
    }

    /// Returns when the grace timer has to be checked.
    ///
    /// Returns `None` if the call is attached or waits without a deadline.
    pub(super) fn detached_deadline(&self) -> Option<Instant> {
        let detached = self.detached.as_ref()?;
        match detached.state {
            DetachedState::GraceUntil { deadline, .. } => {
                let at = if self.has_pending_resume() {
                    resume_deadline(deadline)
                } else {
                    // A deadline that passed while a resume was pending is not late, because it could not be acted on then.
                    detached.resumes_ended_at.unwrap_or(deadline).max(deadline)
                };
                Some(detached.recheck_at.unwrap_or(at).max(at))
            }
            // Wait for the call's own deadline, at which an unobserved call can still be cancelled.
            DetachedState::ForgetAt { until, .. } => Some(until).max(self.deadline),
            DetachedState::UntilComplete { .. } => detached
                .unobserved_until
                .map(|at| at.max(self.deadline.unwrap_or(at))),
        }
    }

    pub(super) fn has_pending_resume(&self) -> bool {
        self.pending_resumes > 0
    }

    /// Adds a pending resume. While any is pending, the grace period expires [`MAX_RESUME_WAIT`] later.
    ///
    /// A resume may be the first to discover that the grace period has expired late (invariant 7), so the lateness is checked now. Once the
    /// resume has ended, the lateness can no longer be determined.
    pub(super) fn begin_resume(&mut self, now: Instant) {
        if !self.has_pending_resume()
            && let Some(at) = self.detached_deadline()
        {
            self.postpone_if_late(now, at, now.duration_since(at), false);
        }
        self.pending_resumes = self.pending_resumes.saturating_add(1);
        self.invalidate_expiry();
    }

    /// Restarts the grace period, because the client has been asked to retry later. Never shortens it.
    ///
    /// Has no effect on an attached call, or after [`MAX_EMPTY_RESUMES`] empty or refused resumes in a row.
    pub(super) fn renew_grace(&mut self, now: Instant) {
        if let Some(detached) = &mut self.detached
            && let DetachedState::GraceUntil { deadline, .. } = &mut detached.state
            && self.empty_resumes < MAX_EMPTY_RESUMES
            && let Some(renewed) = now.checked_add(detached.resume_window)
        {
            self.empty_resumes += 1;
            *deadline = renewed.max(*deadline);
            self.last_grace_deadline = Some(*deadline);
        }
    }

    /// Removes a pending resume. Once the last one is removed, the grace period can expire.
    pub(super) fn end_resume(&mut self, now: Instant) {
        if self.pending_resumes != 1 {
            self.pending_resumes = self.pending_resumes.saturating_sub(1);
            return;
        }
        self.pending_resumes = 0;
        self.invalidate_expiry();
        if let Some(detached) = &mut self.detached
            && let DetachedState::GraceUntil { deadline, .. } = detached.state
        {
            // After `resume_deadline`, the grace period can expire even if a resume is pending.
            detached.resumes_ended_at = Some(now.min(resume_deadline(deadline)));
        }
    }

    /// Lets the call keep running, because its client may have resumed unobserved. If the call is detached, this takes effect at once.
    pub(super) fn mark_maybe_resumed(&mut self, state: DetachedState) {
        self.invalidate_expiry();
        self.may_have_been_resumed = true;
        if let Some(detached) = &mut self.detached {
            detached.state = state;
            let resume_window = state.resume_window(detached.detachment.detached_at());
            detached.resume_window = detached.resume_window.max(resume_window);
        }
    }

    /// Returns until when to retain the outcome of a call ending at `ended_at`.
    ///
    /// Returns `None` if the call is attached. Otherwise, this is the end of its resume window, counted from `ended_at`, or the end of its
    /// grace period including all postponements, whichever is later.
    pub(super) fn retained_until(&self, ended_at: Instant) -> Option<Instant> {
        let detached = self.detached.as_ref()?;
        let window_end = ended_at.checked_add(detached.resume_window);
        let grace_deadline = match detached.state {
            DetachedState::GraceUntil { deadline, .. } => Some(deadline),
            DetachedState::UntilComplete { .. } | DetachedState::ForgetAt { .. } => None,
        };
        window_end.max(grace_deadline)
    }

    /// Adds a task that reads one of the call's streams in the background.
    pub(super) fn add_background_reader(&mut self) {
        self.background_readers = self.background_readers.saturating_add(1);
        if let Some(detached) = &mut self.detached {
            detached.unobserved_until = None;
        }
    }

    /// Removes a background reader that has ended without observing the call's end.
    pub(super) fn remove_background_reader(&mut self, unobserved_until: Option<Instant>) {
        self.background_readers = self.background_readers.saturating_sub(1);
        if self.background_readers == 0
            && let Some(detached) = &mut self.detached
            && let Some(unobserved_until) = unobserved_until
        {
            detached.unobserved_until.get_or_insert(unobserved_until);
        }
    }

    /// Decides what to do with a call whose deadline was `at`.
    ///
    /// `lateness` is how long after `at` the timer ran, and `is_stalled` whether a runtime is known to have been stalled.
    pub(super) fn check(
        &mut self,
        now: Instant,
        at: Instant,
        lateness: Duration,
        is_stalled: bool,
    ) -> ExpiryDecision {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return ExpiryDecision::CallTimeout;
        }
        match self.detached.map(|detached| detached.state) {
            Some(DetachedState::GraceUntil { .. })
                if self.postpone_if_late(now, at, lateness, is_stalled) =>
            {
                ExpiryDecision::Postponed
            }
            Some(DetachedState::GraceUntil { .. }) => {
                self.mark_expired();
                if self.detached.is_some_and(|detached| detached.is_confirmed) {
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

    /// Postpones a grace period that was found to have expired late (invariant 7). Returns `false` if the expiry can be acted on now.
    fn postpone_if_late(
        &mut self,
        now: Instant,
        at: Instant,
        lateness: Duration,
        is_stalled: bool,
    ) -> bool {
        let Some(detached) = &mut self.detached else {
            return false;
        };
        let DetachedState::GraceUntil { deadline, retry } = &mut detached.state else {
            return false;
        };
        let tolerated = if detached.recheck_at == Some(at) {
            RECHECK_TOLERANCE
        } else {
            TIMER_RESOLUTION
        };
        let deadline = if (is_stalled || lateness > STALL_THRESHOLD) && !detached.was_extended {
            detached.was_extended = true;
            // A confirmation from before the stall may no longer be valid.
            detached.is_confirmed = false;
            *deadline = now + (2 * *retry).max(MAX_RESUME_WAIT);
            *deadline
        } else if (is_stalled || lateness > tolerated) && detached.rechecks < MAX_RECHECKS {
            detached.rechecks += 1;
            *detached.recheck_at.insert(now + RECHECK_DELAY)
        } else {
            return false;
        };
        self.last_grace_deadline = Some(deadline);
        true
    }
}

fn resume_deadline(deadline: Instant) -> Instant {
    deadline.checked_add(MAX_RESUME_WAIT).unwrap_or(deadline)
}
