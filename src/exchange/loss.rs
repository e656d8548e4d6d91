//! Decides what happens to a call whose stream was lost. The decision is made only once, at the time of the loss.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    cancel::Cancel,
    state::{Attachment, Exchange},
};
use crate::{
    call::{CallId, CallInfo, DetachCause, Detachment, Outcome},
    disconnect::{DisconnectAction, StreamEnd},
    observe::{Event, Hint},
    registry::{DetachOutcome, DetachedState, Generation, UNOBSERVED_TTL},
};

// === impl Attachment ===

impl Attachment {
    /// Reports that the stream ended before the answer was delivered.
    ///
    /// `resumed_without_events` is `true` if a client opened the stream to resume the call, and it carried no events.
    pub(crate) fn detach(&self, cause: DetachCause, resumed_without_events: bool) {
        if let Some(call) = self.exchange.call(self.id) {
            self.exchange
                .on_stream_lost(call, self.generation, cause, resumed_without_events);
        }
    }
}

// === impl Exchange ===

impl Exchange {
    /// Handles a stream that ended before its call's answer was delivered.
    #[cold]
    pub(super) fn on_stream_lost(
        self: &Arc<Self>,
        call: &CallInfo,
        generation: Generation,
        cause: DetachCause,
        resumed_without_events: bool,
    ) {
        // The answer may already have been delivered, so the call must not be cancelled.
        if self.may_have_been_answered.load(Ordering::Relaxed) {
            return self.remove_stream(call.id(), generation);
        }
        let now = Instant::now();
        let mut stream_end = self.stream_end(cause == DetachCause::EndedByServer);
        stream_end.retry = self
            .with_session(|session| session.record_retry(stream_end.retry))
            .flatten();
        let action = call.policy().grace.decide(call, stream_end);
        let grace = match action {
            DisconnectAction::CancelNow => Some(Duration::ZERO),
            DisconnectAction::CancelAfter(grace) => Some(grace),
            DisconnectAction::KeepRunning => None,
        };
        let until = grace.and_then(|grace| {
            Some(DetachedState::GraceUntil {
                deadline: now.checked_add(grace)?,
                retry: stream_end.retry.unwrap_or_default(),
            })
        });
        let keep_running = self.keep_running_state(call, stream_end, now);
        let (id, detachment) = (call.id(), Detachment::new(cause, now));
        let detached = self.with_session(|session| {
            let until = until.filter(|_| !session.may_have_been_resumed(id));
            let detached = match until.or(keep_running) {
                Some(state) => {
                    session.detach(id, generation, state, resumed_without_events, detachment)
                }
                // From now on, the layer cannot tell whether the call is resumed or ends.
                None => session.untrack(id, generation),
            };
            (detached, grace.filter(|_| until.is_some()))
        });
        let (detached, grace) = detached.unwrap_or((DetachOutcome::Ignored, None));
        if grace.is_none() && stream_end.may_be_resumed_elsewhere(call) {
            self.shared
                .registry
                .hints
                .emit(Hint::StoredCallsKeepRunning);
        }
        let event = Event::Detached { call, cause, grace };
        match detached {
            DetachOutcome::Ignored => {}
            DetachOutcome::Waiting => {
                self.report(&event);
                let is_waiting = grace.is_some_and(|grace| !grace.is_zero());
                if is_waiting && cause != DetachCause::EndedByServer {
                    self.shared.registry.hints.emit(Hint::WaitingForResume);
                }
            }
            DetachOutcome::CancelNow => {
                self.cancel_and_report(call.id(), Cancel::expired(cause.reason()), Some(&event));
            }
            DetachOutcome::OverLimit(limit, finished) => {
                self.report_untracked(call, limit);
                self.end_untracked(call.id(), finished);
            }
            DetachOutcome::Untracked(finished) => self.apply_end(id, Outcome::Unknown, finished),
        }
    }

    /// Called when a gateway between the layer and its server can no longer obtain the answer.
    ///
    /// The gateway sends an error instead, so a client that resumes the call will not receive the answer, either.
    pub(crate) fn on_answer_lost(self: &Arc<Self>) {
        let Some(call) = self.info() else {
            return;
        };
        let stream_end = StreamEnd {
            replayable: false,
            retry: None,
            by_server: false,
            stored: false,
        };
        let is_cancelled = match call.policy().grace.decide(call, stream_end) {
            DisconnectAction::CancelNow | DisconnectAction::CancelAfter(_) => true,
            DisconnectAction::KeepRunning => false,
        };
        if is_cancelled && !self.may_have_been_answered.load(Ordering::Relaxed) {
            self.cancel(call.id(), Cancel::lost());
        }
    }

    /// Returns the state for a detached call that must not be cancelled.
    ///
    /// Returns `None` if the call must be untracked instead. This is the case if the layer cannot tell when the call ends, and one of the
    /// following applies:
    ///
    /// - the server ended the stream, and no client can resume it;
    /// - the call has neither a session nor a deadline.
    pub(super) fn keep_running_state(
        &self,
        call: &CallInfo,
        stream_end: StreamEnd,
        now: Instant,
    ) -> Option<DetachedState> {
        let resume_window = stream_end.resume_window();
        if self.is_bound() && (!stream_end.by_server || self.is_answer_observed(call)) {
            return Some(DetachedState::UntilComplete { resume_window });
        }
        let may_resume = stream_end.replayable || !stream_end.by_server;
        let may_be_found = call.session().is_some() || call.deadline().is_some();
        (may_be_found && may_resume).then_some(DetachedState::ForgetAt {
            until: now + UNOBSERVED_TTL,
            resume_window,
        })
    }

    /// Returns `true` if the session manager observes a call's answer even if no stream is read.
    fn is_answer_observed(&self, call: &CallInfo) -> bool {
        let canceller = self.state().canceller.clone();
        canceller.is_some_and(|canceller| canceller.observes_answers(call))
    }

    /// Records that a task is no longer reading one of the call's streams in the background.
    ///
    /// After that, the layer cannot tell when the call ends, unless the session manager observes the answer.
    pub(crate) fn remove_background_reader(&self, id: CallId) {
        let is_observed = self.late_answers_closed()
            && self
                .call(id)
                .is_some_and(|call| self.is_answer_observed(call));
        let unobserved_until = (!is_observed).then(|| Instant::now() + UNOBSERVED_TTL);
        self.with_session(|session| session.remove_background_reader(id, unobserved_until));
    }
}
