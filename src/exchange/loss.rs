//! The loss of a stream: what it means for its call, decided once.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::Instant;

use super::state::{Attachment, Exchange};
use crate::{
    call::{CallId, CallInfo, DetachCause, Detachment, Outcome},
    disconnect::{DisconnectAction, StreamEnd},
    observe::{Event, Hint},
    registry::{DetachOutcome, DetachedState, Generation, UNOBSERVED_TTL},
};

// === impl Attachment ===

impl Attachment {
    /// Says that the stream has gone. `barren`: it was a resume that brought no event.
    pub(crate) fn detach(&self, cause: DetachCause, barren: bool) {
        if let Some(call) = self.exchange.call(self.id) {
            self.exchange
                .on_stream_lost(call, self.generation, cause, barren);
        }
    }
}

// === impl Exchange ===

impl Exchange {
    /// A stream of a call has gone without its answer.
    #[cold]
    pub(super) fn on_stream_lost(
        self: &Arc<Self>,
        call: &CallInfo,
        generation: Generation,
        cause: DetachCause,
        barren: bool,
    ) {
        if self.maybe_answered.load(Ordering::Relaxed) {
            return self.remove_stream(call.id(), generation);
        }
        let now = Instant::now();
        let going = self.stream_end(cause == DetachCause::EndedByServer);
        let verdict = call.policy().grace.on_disconnect(call, going);
        let grace = match verdict {
            DisconnectAction::CancelNow => Some(Duration::ZERO),
            DisconnectAction::CancelAfter(grace) => Some(grace),
            DisconnectAction::KeepRunning => None,
        };
        let until = grace.and_then(|grace| {
            Some(DetachedState::GraceUntil {
                deadline: now.checked_add(grace)?,
                retry: going.retry.unwrap_or_default(),
            })
        });
        let run_on = self.keep_running_state(call, going, now);
        let (id, detachment) = (call.id(), Detachment::new(cause, now));
        let detached = self.with_session(|core| {
            let until = until.filter(|_| !core.is_maybe_resumed(id));
            let detached = match until.or(run_on) {
                Some(wait) => core.detach(id, generation, wait, barren, detachment),
                // Nobody can come back for it, and its stream was all that was to be seen of it.
                None => core.untrack(id, generation),
            };
            (detached, grace.filter(|_| until.is_some()))
        });
        let (detached, grace) = detached.unwrap_or((DetachOutcome::Ignored, None));
        if grace.is_none() && going.may_be_resumed_elsewhere(call) {
            self.shared.registry.hints.emit(Hint::StoredCallsRunOn);
        }
        let event = Event::Detached { call, cause, grace };
        match detached {
            DetachOutcome::Ignored => {}
            DetachOutcome::Waiting => {
                self.report(&event);
                let waits = grace.is_some_and(|grace| !grace.is_zero());
                if waits && cause != DetachCause::EndedByServer {
                    self.shared.registry.hints.emit(Hint::CallsWait);
                }
            }
            DetachOutcome::CancelNow => self.cancel_after(Some(&event), call.id(), cause.reason()),
            DetachOutcome::OverLimit(limit, finished) => {
                self.report_untracked(call, limit);
                self.end_untracked(call.id(), finished);
            }
            DetachOutcome::Untracked(finished) => self.apply_end(id, Outcome::Unknown, finished),
        }
    }

    /// How a call waits that is not to be cancelled. `None` if its end cannot be seen, and neither its client nor its `call_timeout`
    /// may still find it.
    pub(super) fn keep_running_state(
        &self,
        call: &CallInfo,
        going: StreamEnd,
        now: Instant,
    ) -> Option<DetachedState> {
        let patience = going.resume_window();
        if self.is_bound() && (!going.by_server || self.is_answer_observed(call)) {
            return Some(DetachedState::UntilComplete {
                resume_window: patience,
            });
        }
        let may_come_back = going.replayable || !going.by_server;
        let may_be_found = call.session().is_some() || call.deadline().is_some();
        (may_be_found && may_come_back).then_some(DetachedState::ForgetAt {
            until: now + UNOBSERVED_TTL,
            resume_window: patience,
        })
    }

    /// Whether the answer of a call is seen though nobody reads a stream of it.
    fn is_answer_observed(&self, call: &CallInfo) -> bool {
        let canceller = self.state().canceller.clone();
        canceller.is_some_and(|canceller| canceller.sees_answers(call))
    }

    /// A task that read a stream of its call on has ended. Nobody else sees the end of the call, unless that is known to come by
    /// elsewhere.
    pub(crate) fn remove_background_reader(&self, id: CallId) {
        let is_seen = self.is_late_answer_closed()
            && self
                .call(id)
                .is_some_and(|call| self.is_answer_observed(call));
        let unseen_until = (!is_seen).then(|| Instant::now() + UNOBSERVED_TTL);
        self.with_session(|core| core.remove_background_reader(id, unseen_until));
    }
}
