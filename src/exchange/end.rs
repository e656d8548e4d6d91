//! How a call ends: answered, cancelled, or let go.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::Instant};
use tracing::{Instrument as _, Span};

use super::Exchange;
use crate::{
    call::{CallId, CallInfo, CancelReason, Outcome},
    cancel::{CancelError, Injection},
    detach::{DetachCause, Detachment},
    layer::Retain,
    observe::{Event, Remark, log_limit, say_once},
    policy::Verdict,
    registry::{
        Answer, Detached, End, Ended, Finished, Generation, Limit, Moves, UNSEEN_FOR, Wait, in_time,
    },
};

/// How long an injected cancel may take to be accepted: 10 s. A session whose client does not read may
/// hold it back, and it must not be held for ever.
const INJECTION_LIMIT: Duration = Duration::from_secs(10);

/// The least that an ended call is remembered for its client: 60 s, which is also how long rmcp means to keep
/// the events of a completed stream.
const REMEMBERED_FOR: Duration = Duration::from_secs(60);

/// One generation of a call: whoever has it tells when that stream has gone.
#[derive(Debug, Clone)]
pub(crate) struct Attachment {
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) id: CallId,
    pub(crate) generation: Generation,
}

/// A cancel on its way to the server. Reports when it is dropped, whatever became of it.
struct Delivery {
    exchange: Arc<Exchange>,
    id: CallId,
    result: Result<(), CancelError>,
}

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
    pub(super) fn let_go(
        self: &Arc<Self>,
        call: &CallInfo,
        generation: Generation,
        cause: DetachCause,
        barren: bool,
    ) {
        let now = Instant::now();
        let going = self.going(cause == DetachCause::EndedByServer);
        let (grace, deadline) = match call.policy().grace.verdict(call, going) {
            Verdict::CancelNow => (Some(Duration::ZERO), Some(now)),
            Verdict::CancelAfter(grace) => (Some(grace), now.checked_add(grace)),
            Verdict::RunOn => (None, None),
        };
        if deadline.is_none() && going.may_be_resumed_elsewhere(call) {
            say_once(Remark::StoredCallsRunOn);
        }
        let wait = match deadline {
            Some(deadline) => Wait::Until {
                deadline,
                retry: going.retry.unwrap_or_default(),
            },
            None if self.is_bound() && !going.by_server => Wait::ForItsEnd,
            None if call.session().is_some() && (going.replayable || !going.by_server) => {
                Wait::Unseen(now + UNSEEN_FOR)
            }
            // Nobody can come back for it, and its stream was all that was to be seen of it.
            None => return self.finish(call.id(), Outcome::Unknown),
        };
        let registry = &self.instance.registry;
        let detachment = Detachment::new(cause, now);
        let detached = registry.detach(call.id(), generation, wait, barren, detachment);
        let event = Event::Detached { call, cause, grace };
        match detached {
            Detached::Stale => {}
            Detached::Waiting => self.report(&event),
            Detached::Due => self.cancel_after(Some(&event), call.id(), cause.reason()),
            Detached::Beyond(limit, finished) => {
                self.untracked(call, limit);
                self.left(call.id(), finished);
            }
        }
    }

    /// Cancels a call, unless it has ended, or its client came back in this very moment (contract 3).
    pub(crate) fn cancel(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        self.cancel_after(None, id, reason);
    }

    fn cancel_after(self: &Arc<Self>, event: Option<&Event<'_>>, id: CallId, reason: CancelReason) {
        let span = self.span();
        if let Some(injection) = self.cancel_detached(event, id, reason) {
            self.inject(id, injection, span);
        }
    }

    /// Also reports what came before the cancel. The token does not wait for that.
    pub(super) fn cancel_detached(
        self: &Arc<Self>,
        event: Option<&Event<'_>>,
        id: CallId,
        reason: CancelReason,
    ) -> Option<Injection> {
        let ended = self.as_cancelled(id, reason)?;
        let finished = self.instance.registry.finish_detached(id, ended);
        if finished.is_some() {
            self.stop(id, reason);
        }
        if let Some(event) = event {
            self.report(event);
        }
        let finished = finished?;
        self.report_end(id, Outcome::Cancelled(reason), finished);
        self.injection(id, reason, finished)
    }

    /// Cancels a call, attached or not, whose server knows already.
    pub(crate) fn cancelled_elsewhere(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let outcome = match reason {
            CancelReason::ClientCancelled => Outcome::ClientCancelled,
            other => Outcome::Cancelled(other),
        };
        if self.cancel_any(id, reason, outcome).is_some() && self.are_calls_over() {
            self.hand_over();
        }
    }

    /// Cancels a call, attached or not, here. What is to be told of it, and to whom, is left to the caller.
    pub(super) fn cancel_any(
        &self,
        id: CallId,
        reason: CancelReason,
        outcome: Outcome,
    ) -> Option<Finished> {
        let ended = self.as_cancelled(id, reason);
        let finished = self.instance.registry.finish(id, ended)?;
        self.stop(id, reason);
        self.report_end(id, outcome, finished);
        Some(finished)
    }

    /// Cancels a call, attached or not, and tells its client. `false` if it has ended, or must run on.
    pub(crate) fn end_here(self: &Arc<Self>, id: CallId, reason: CancelReason) -> bool {
        let span = self.span();
        let Some(injection) = self.begin_end(id, reason) else {
            return false;
        };
        if let Some(injection) = injection {
            self.inject(id, injection, span);
        }
        true
    }

    /// The same, but for what is to be injected. `None` if it has ended, or must run on.
    pub(crate) fn begin_end(
        self: &Arc<Self>,
        id: CallId,
        reason: CancelReason,
    ) -> Option<Option<Injection>> {
        self.call(id).filter(|call| !call.must_run_on())?;
        let finished = self.cancel_any(id, reason, Outcome::Cancelled(reason))?;
        self.tell_client(id, reason);
        Some(self.injection(id, reason, finished))
    }

    /// The same when the server shuts down. `told` is dropped once the server took the cancel, or nobody can tell
    /// it any more.
    pub(crate) fn end_at_shutdown(self: &Arc<Self>, id: CallId, told: &mpsc::Sender<()>) -> bool {
        let span = self.span();
        let Some(injection) = self.begin_end(id, CancelReason::ShuttingDown) else {
            return false;
        };
        if let Some(injection) = injection {
            let told = told.clone();
            let telling = async move {
                let result = injection.await;
                drop(told);
                result
            };
            self.inject(id, Box::pin(telling), span);
        }
        true
    }

    /// What is remembered of a cancelled call.
    pub(super) fn as_cancelled(&self, id: CallId, reason: CancelReason) -> Option<Ended<Answer>> {
        let call = self.call(id)?;
        Some(Ended {
            end: End::Cancelled(call.request_id().clone(), reason),
            weight: 0,
            until: self.remembered_until(call),
        })
    }

    /// Goes through with the cancel of a call that has just ended so.
    pub(super) fn stop(&self, id: CallId, reason: CancelReason) {
        self.tell_ended();
        if self.was_last(id) {
            let older_stay = self.note_calls_over();
            self.fire(reason);
            if older_stay {
                self.hand_over();
            }
        }
    }

    /// What the server is to be told of a cancelled call.
    pub(super) fn injection(
        &self,
        id: CallId,
        reason: CancelReason,
        finished: Finished,
    ) -> Option<Injection> {
        let canceller = self.state().canceller.clone();
        let canceller = canceller.filter(|_| finished.injectable)?;
        Some(canceller.cancel(self.call(id)?, reason))
    }

    /// Has the injection run elsewhere, in a span, and reports if it fails. It is not repeated.
    pub(super) fn inject(self: &Arc<Self>, id: CallId, injection: Injection, span: Span) {
        let delivery = Delivery {
            exchange: self.clone(),
            id,
            result: Err(CancelError::undelivered()),
        };
        let delivered = async move {
            let result = in_time(INJECTION_LIMIT, injection).await;
            delivery.end(result.unwrap_or(Err(CancelError::timed_out())));
        };
        let registry = &self.instance.registry;
        registry.spawn(Moves::Always, delivered.instrument(span));
    }

    pub(super) fn cancel_failed(&self, id: CallId, error: &CancelError) {
        if let Some(call) = self.call(id) {
            self.report(&Event::CancelFailed { call, error });
        }
    }

    /// The answer of a call was seen: what to keep of it, and how many bytes that is.
    pub(crate) fn answered(&self, id: CallId, answer: Option<(Answer, usize)>) {
        let registry = &self.instance.registry;
        let kept = match self.instance.options.retain {
            Retain::All => true,
            Retain::Detached => registry.is_detached(id),
            Retain::Off => false,
        };
        let ended = answer.filter(|_| kept).and_then(|(mut answer, weight)| {
            answer.retry = self.retry();
            Some(Ended {
                end: End::Answered(answer),
                weight,
                until: self.remembered_until(self.call(id)?),
            })
        });
        self.end(id, Outcome::Completed, ended);
    }

    pub(crate) fn finish(&self, id: CallId, outcome: Outcome) {
        self.end(id, outcome, None);
    }

    fn end(&self, id: CallId, outcome: Outcome, remember: Option<Ended<Answer>>) {
        if let Some(finished) = self.instance.registry.finish(id, remember) {
            self.ended_as(id, outcome, finished);
        }
    }

    /// The registry let a call go whose end nobody will see.
    pub(crate) fn left(&self, id: CallId, finished: Finished) {
        self.ended_as(id, Outcome::Unknown, finished);
        if self.are_calls_over() {
            self.hand_over();
        }
    }

    /// There is no room for a call, which runs on as without the layer.
    pub(super) fn untracked(&self, call: &CallInfo, limit: Limit) {
        self.report(&Event::Untracked { call, limit });
        if let Some(calls) = self.instance.registry.reached(limit) {
            log_limit(limit, calls);
        }
    }

    /// Goes through with the end of a call that was not cancelled.
    fn ended_as(&self, id: CallId, outcome: Outcome, finished: Finished) {
        self.tell_ended();
        if self.was_last(id) {
            if self.note_calls_over() {
                self.hand_over();
            }
            self.forget_hooks();
        }
        self.report_end(id, outcome, finished);
    }

    /// Whether the other calls have ended as well: in a batch the token is that of all calls together.
    pub(super) fn was_last(&self, id: CallId) -> bool {
        let mut others = self.calls().filter(|call| call.id() != id);
        others.all(|call| !self.instance.registry.is_in_flight(call.id()))
    }

    /// Tells who waits in [`until_ended`](Self::until_ended).
    fn tell_ended(&self) {
        #[cfg(feature = "rmcp")]
        // Whoever comes to wait after this look finds that the call has ended.
        if let Some(ended) = self.ended.get() {
            ended.notify_waiters();
        }
    }

    pub(super) fn report_end(&self, id: CallId, outcome: Outcome, finished: Finished) {
        if let Some(call) = self.call(id) {
            self.report(&Event::Ended {
                call,
                outcome,
                detachment: finished.detachment,
            });
        }
        self.release_span(id);
    }

    fn remembered_until(&self, call: &CallInfo) -> Instant {
        let grace = match call.policy().grace.verdict(call, self.going(false)) {
            Verdict::CancelAfter(grace) => grace,
            Verdict::CancelNow | Verdict::RunOn => Duration::ZERO,
        };
        let now = Instant::now();
        now.checked_add(grace.max(REMEMBERED_FOR))
            .unwrap_or(now + REMEMBERED_FOR)
    }

    pub(super) fn fire(&self, reason: CancelReason) {
        if self.reason.set(reason).is_ok() {
            self.fire_all(reason);
        }
    }
}

// === impl Delivery ===

impl Delivery {
    fn end(mut self, result: Result<(), CancelError>) {
        self.result = result;
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        if let Err(error) = &self.result {
            self.exchange.cancel_failed(self.id, error);
        }
    }
}
