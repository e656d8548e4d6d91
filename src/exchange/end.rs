//! Ends calls that are answered, fail or are untracked. For cancellations, see [`cancel`](super::cancel).

use std::time::Duration;

use tokio::time::Instant;

use super::state::{Exchange, SessionState};
use crate::{
    call::{CallId, CallInfo, Outcome},
    limits::Limit,
    observe::{Event, log_evicted, log_limit},
    options::RetainAnswers,
    registry::{Answer, Completion, Finished, RetainedOutcome},
};

/// Minimum time an ended call is retained for its client.
///
/// rmcp aims to retain a completed stream's events for just as long.
const MIN_RETENTION: Duration = Duration::from_secs(60);

// === impl Exchange ===

impl Exchange {
    /// Ends a call whose answer has been observed.
    ///
    /// `answer` returns the answer to retain and its size in bytes. It is only called if this call's answer is to be retained
    /// ([`RetainAnswers`]).
    pub(crate) fn on_answered(&self, id: CallId, answer: impl FnOnce() -> Option<(Answer, usize)>) {
        let is_retained = match self.shared.options.retain {
            RetainAnswers::All => true,
            RetainAnswers::Detached => self.is_detached(id),
            RetainAnswers::Off => false,
        };
        let answer = if is_retained { answer() } else { None };
        let completion = answer.and_then(|(mut answer, weight)| {
            answer.retry = self.retry();
            let now = Instant::now();
            Some(Completion {
                outcome: RetainedOutcome::Answered(answer),
                weight,
                at: now,
                until: self.retain_until(self.call(id)?, now),
            })
        });
        self.end(id, Outcome::Completed, completion);
    }

    /// Called when a gateway between the layer and its server has received the answer.
    ///
    /// If the client resumes the call, the gateway will deliver the answer.
    pub(crate) fn on_answered_externally(&self) {
        let (call, is_open) = {
            let mut state = self.state();
            state.is_answered = true;
            (self.info(), state.phase.is_open())
        };
        match call {
            Some(call) => self.finish(call.id(), Outcome::Completed),
            // After this, no call can start, and a disconnect has no effect. If the client has already disconnected, the exchange is no
            // longer open, and the disconnect itself fires the token.
            None if is_open => self.signal.disarm(),
            None => {}
        }
    }

    /// Ends a call with `outcome`, without retaining an answer. Does nothing if the call has already ended.
    pub(crate) fn finish(&self, id: CallId, outcome: Outcome) {
        self.end(id, outcome, None);
    }

    fn end(&self, id: CallId, outcome: Outcome, completion: Option<Completion<Answer>>) {
        if let Some(finished) = self
            .with_session(|session| session.finish(id, completion))
            .flatten()
        {
            self.apply_end(id, outcome, finished);
        }
    }

    /// Ends a call that the registry no longer tracks, with an unknown outcome.
    #[cold]
    pub(crate) fn end_untracked(&self, id: CallId, finished: Finished) {
        self.apply_end(id, Outcome::Unknown, finished);
        if self.has_call_ended() {
            self.register_orphaned_streams();
        }
    }

    /// Reports that a call is untracked because of a limit. The call keeps running as it would without the layer.
    #[cold]
    pub(super) fn report_untracked(&self, call: &CallInfo, limit: Limit) {
        self.report(&Event::Untracked { call, limit });
        if let Some(calls) = self
            .shared
            .registry
            .limit_warnings
            .record(limit, Instant::now())
        {
            log_limit(limit, calls);
        }
    }

    /// Applies the effects of a call ending without a cancellation.
    pub(super) fn apply_end(&self, id: CallId, outcome: Outcome, finished: Finished) {
        self.notify_changed();
        let is_delivering = outcome == Outcome::Completed && finished.detachment.is_none();
        if self.mark_call_ended(is_delivering) {
            self.register_orphaned_streams();
        }
        self.signal.disarm();
        self.release_canceller();
        self.report_end(id, outcome, finished);
    }

    /// Reports a call's end and any evicted outcomes, and closes the call's span.
    pub(super) fn report_end(&self, id: CallId, outcome: Outcome, finished: Finished) {
        if let Some(call) = self.call(id) {
            self.report(&Event::Ended {
                call,
                outcome,
                detachment: finished.detachment,
            });
        }
        self.release_span();
        if finished.has_evicted {
            self.report_evicted();
        }
    }

    /// Reports evicted outcomes, which may belong to other calls.
    #[cold]
    fn report_evicted(&self) {
        let registry = &self.shared.registry;
        let evicted = self
            .with_session(SessionState::take_evicted)
            .unwrap_or_default();
        for evicted in &evicted {
            // Report this outside the call's span, because the answer may belong to another call.
            self.shared.report(&Event::AnswerEvicted {
                call: evicted.call,
                session: &evicted.session,
                outcome: evicted.outcome,
                bytes: evicted.bytes,
            });
        }
        if let Some(answers) = registry
            .limit_warnings
            .record_evictions(evicted.len(), Instant::now())
        {
            log_evicted(answers);
        }
    }

    /// Returns the time until which a call's outcome is retained, unless it is evicted sooner.
    ///
    /// An attached call is treated as if its client had just disconnected.
    pub(super) fn retain_until(&self, call: &CallInfo, now: Instant) -> Instant {
        let grace = call.policy().grace;
        let resume_window = match grace.max_grace(self.retry()) {
            // The usual case: no disconnect action has a longer resume window than this, so there is nothing to decide.
            short if short <= MIN_RETENTION => short,
            _ => {
                let stream_end = self.stream_end(false);
                grace.decide(call, stream_end).resume_window(stream_end)
            }
        };
        now.checked_add(resume_window.max(MIN_RETENTION))
            .unwrap_or(now + MIN_RETENTION)
    }
}
