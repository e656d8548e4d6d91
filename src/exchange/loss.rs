//! The loss of a stream: what it means for its call, decided once.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::time::Instant;

use super::state::{Attachment, Exchange};
use crate::{
    call::{CallId, CallInfo, DetachCause, Detachment, Outcome},
    observe::{Event, Hint},
    registry::{Detached, Generation, UNSEEN_FOR, Wait},
    verdict::{Going, Verdict},
};

// === impl Attachment ===

impl Attachment {
    /// Says that the stream has gone. `barren`: it was a resume that brought no event.
    pub(crate) fn detach(&self, cause: DetachCause, barren: bool) {
        if let Some(call) = self.exchange.call(self.id) {
            self.exchange.let_go(call, self.generation, cause, barren);
        }
    }
}

// === impl Exchange ===

impl Exchange {
    /// A stream of a call has gone without its answer.
    #[cold]
    pub(super) fn let_go(
        self: &Arc<Self>,
        call: &CallInfo,
        generation: Generation,
        cause: DetachCause,
        barren: bool,
    ) {
        if self.maybe_answered.load(Ordering::Relaxed) {
            return self.lose_stream(call.id(), generation);
        }
        let now = Instant::now();
        let going = self.going(cause == DetachCause::EndedByServer);
        let verdict = call.policy().grace.verdict(call, going);
        let grace = match verdict {
            Verdict::CancelNow => Some(Duration::ZERO),
            Verdict::CancelAfter(grace) => Some(grace),
            Verdict::RunOn => None,
        };
        let until = grace.and_then(|grace| {
            Some(Wait::Until {
                deadline: now.checked_add(grace)?,
                retry: going.retry.unwrap_or_default(),
            })
        });
        let run_on = self.run_on(call, going, now);
        let (id, detachment) = (call.id(), Detachment::new(cause, now));
        let detached = self.at_home(|core| {
            let until = until.filter(|_| !core.is_spared(id));
            let detached = match until.or(run_on) {
                Some(wait) => core.detach(id, generation, wait, barren, detachment),
                // Nobody can come back for it, and its stream was all that was to be seen of it.
                None => core.leave(id, generation),
            };
            (detached, grace.filter(|_| until.is_some()))
        });
        let (detached, grace) = detached.unwrap_or((Detached::Stale, None));
        if grace.is_none() && going.may_be_resumed_elsewhere(call) {
            self.instance.registry.hints.emit(Hint::StoredCallsRunOn);
        }
        let event = Event::Detached { call, cause, grace };
        match detached {
            Detached::Stale => {}
            Detached::Waiting => {
                self.report(&event);
                let waits = grace.is_some_and(|grace| !grace.is_zero());
                if waits && cause != DetachCause::EndedByServer {
                    self.instance.registry.hints.emit(Hint::CallsWait);
                }
            }
            Detached::Due => self.cancel_after(Some(&event), call.id(), cause.reason()),
            Detached::Beyond(limit, finished) => {
                self.untracked(call, limit);
                self.left_unseen(call.id(), finished);
            }
            Detached::Left(finished) => self.ended_as(id, Outcome::Unknown, finished),
        }
    }

    /// How a call waits that is not to be cancelled. `None` if its end cannot be seen, and neither its client nor its `call_timeout`
    /// may still find it.
    pub(super) fn run_on(&self, call: &CallInfo, going: Going, now: Instant) -> Option<Wait> {
        let patience = going.patience();
        if self.is_bound() && (!going.by_server || self.is_answered_in_sight(call)) {
            return Some(Wait::ForItsEnd { patience });
        }
        let may_come_back = going.replayable || !going.by_server;
        let may_be_found = call.session().is_some() || call.deadline().is_some();
        (may_be_found && may_come_back).then_some(Wait::Unseen {
            until: now + UNSEEN_FOR,
            patience,
        })
    }

    /// Whether the answer of a call is seen though nobody reads a stream of it.
    fn is_answered_in_sight(&self, call: &CallInfo) -> bool {
        let canceller = self.state().canceller.clone();
        canceller.is_some_and(|canceller| canceller.sees_answers(call))
    }

    /// A task that read a stream of its call on has ended. Nobody else sees the end of the call, unless that is known to come by
    /// elsewhere.
    pub(crate) fn lose_sight(&self, id: CallId) {
        let is_seen = self.is_passage_closed()
            && self
                .call(id)
                .is_some_and(|call| self.is_answered_in_sight(call));
        let unseen_until = (!is_seen).then(|| Instant::now() + UNSEEN_FOR);
        self.at_home(|core| core.lose_sight(id, unseen_until));
    }
}
