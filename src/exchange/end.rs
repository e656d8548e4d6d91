//! The end of a call: answered, cancelled, or let go.

use std::{sync::Arc, time::Duration};

use tokio::{sync::mpsc, time::Instant};

use super::state::{Dispatch, Exchange, SessionState};
use crate::{
    call::{CallId, CallInfo, CancelReason, Outcome},
    cancel::{CancelGuard, Canceller, Injection},
    limits::Limit,
    observe::{Event, log_evicted, log_limit},
    options::RetainAnswers,
    registry::{Answer, Completion, Finished, RetainedOutcome, Tracked},
};

/// The least that an ended call is remembered for its client: 60 s, which is also how long rmcp means to keep
/// the events of a completed stream.
const MIN_RETENTION: Duration = Duration::from_secs(60);

/// A call that was cancelled here just now, and of which its server is to be told.
pub(super) struct JustCancelled {
    finished: Finished,
    /// From before the call had ended: who finds that it has, and closes its session, waits for the injection.
    guard: Option<CancelGuard>,
}

// === impl Exchange ===

impl Exchange {
    /// Cancels a call, unless it has ended, or its client came back in this very moment (contract 3).
    pub(crate) fn cancel(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        self.cancel_after(None, id, reason);
    }

    pub(super) fn cancel_after(
        self: &Arc<Self>,
        event: Option<&Event<'_>>,
        id: CallId,
        reason: CancelReason,
    ) {
        let span = self.span();
        let finish = |core: &mut SessionState, ended| core.finish_due(id, ended);
        if let Some(injection) = self.cancel_detached(event, id, reason, finish) {
            self.inject(id, injection, span);
        }
    }

    /// Also reports what came before the cancel. The token does not wait for that.
    pub(super) fn cancel_detached(
        self: &Arc<Self>,
        event: Option<&Event<'_>>,
        id: CallId,
        reason: CancelReason,
        finish: impl FnOnce(&mut SessionState, Completion<Answer>) -> Option<Finished>,
    ) -> Option<Injection> {
        let cancelled = self.mark_cancelled(id, reason, finish);
        let cancelled = cancelled.map(|it| (self.apply_cancel(id, reason, it.finished), it));
        if let Some(event) = event {
            self.report(event);
        }
        let (outcome, cancelled) = cancelled?;
        self.report_end(id, outcome, cancelled.finished);
        self.injection(id, reason, cancelled)
    }

    /// Cancels a call, attached or not, whose server knows already.
    pub(crate) fn on_cancelled_externally(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let outcome = match reason {
            CancelReason::ClientCancelled => Outcome::ClientCancelled,
            other => Outcome::Cancelled(other),
        };
        let Some(cancelled) = self.cancel_now(id, reason, Some(outcome)) else {
            return;
        };
        if self.has_call_ended() {
            self.register_orphaned_streams();
        }
        // Its server may have heard of the cancel before it heard of the call.
        if reason == CancelReason::ClientCancelled {
            self.defer_cancel(reason, cancelled);
        }
        self.release_canceller();
    }

    /// Cancels a call, attached or not, here. What is to be told of it, and to whom, is left to the caller, who may
    /// know its outcome.
    pub(super) fn cancel_now(
        &self,
        id: CallId,
        reason: CancelReason,
        outcome: Option<Outcome>,
    ) -> Option<JustCancelled> {
        let finish = |core: &mut SessionState, ended| core.finish(id, Some(ended));
        let cancelled = self.mark_cancelled(id, reason, finish)?;
        let seen = self.apply_cancel(id, reason, cancelled.finished);
        self.report_end(id, outcome.unwrap_or(seen), cancelled.finished);
        Some(cancelled)
    }

    /// Cancels a call, attached or not, and tells its client. `false` if it has ended, or must run on.
    pub(crate) fn force_cancel(self: &Arc<Self>, id: CallId, reason: CancelReason) -> bool {
        let span = self.span();
        let Some(injection) = self.begin_force_cancel(id, reason) else {
            return false;
        };
        if let Some(injection) = injection {
            self.inject(id, injection, span);
        }
        true
    }

    /// The same, but for what is to be injected. `None` if it has ended, or must run on.
    pub(crate) fn begin_force_cancel(
        self: &Arc<Self>,
        id: CallId,
        reason: CancelReason,
    ) -> Option<Option<Injection>> {
        self.call(id).filter(|call| !call.is_task())?;
        let cancelled = self.cancel_now(id, reason, None)?;
        self.send_cancel_error(id, reason);
        Some(self.injection(id, reason, cancelled))
    }

    /// The same when the server shuts down. `told` is dropped once the server took the cancel, or nobody can tell
    /// it any more.
    pub(crate) fn cancel_at_shutdown(
        self: &Arc<Self>,
        id: CallId,
        delivered: &mpsc::Sender<()>,
    ) -> bool {
        let span = self.span();
        let Some(injection) = self.begin_force_cancel(id, CancelReason::ShuttingDown) else {
            return false;
        };
        if let Some(injection) = injection {
            let told = delivered.clone();
            let telling = async move {
                let result = injection.await;
                drop(told);
                result
            };
            self.inject(id, Box::pin(telling), span);
        }
        true
    }

    /// Has the registry end a call, which is remembered as cancelled.
    fn mark_cancelled(
        &self,
        id: CallId,
        reason: CancelReason,
        finish: impl FnOnce(&mut SessionState, Completion<Answer>) -> Option<Finished>,
    ) -> Option<JustCancelled> {
        let (call, now) = (self.call(id)?, Instant::now());
        let canceller = self.state().canceller.clone();
        // No session manager has it yet, so it has no key that could be another's. One may get it in this very moment.
        let is_on_its_way = canceller.is_none() && call.session().is_some();
        let announced = canceller.and_then(|canceller| canceller.begin_cancel(call));
        let ended = Completion {
            outcome: RetainedOutcome::Cancelled(call.request_id().clone(), reason),
            weight: 0,
            at: now,
            until: self.retain_until(call, now),
        };
        let mut finished = self.with_session(|core| finish(core, ended))??;
        finished.may_cancel_server |= is_on_its_way;
        Some(JustCancelled {
            finished,
            guard: announced,
        })
    }

    /// Goes through with the cancel of a call that has just ended so. Says what became of it.
    fn apply_cancel(&self, id: CallId, reason: CancelReason, finished: Finished) -> Outcome {
        let is_told = self.has_cancel_recipient(id, finished);
        self.notify_changed();
        let older_stay = self.mark_call_ended(false);
        self.fire(reason);
        if older_stay {
            self.register_orphaned_streams();
        }
        if is_told {
            Outcome::Cancelled(reason)
        } else {
            Outcome::Abandoned(reason)
        }
    }

    /// Whether anybody who can stop the work of a call hears that it is cancelled: its server, by an injection or
    /// because its revision makes the end of the stream the cancel, or somebody who has its token.
    fn has_cancel_recipient(&self, id: CallId, finished: Finished) -> bool {
        let Some(call) = self.call(id) else {
            return false;
        };
        if call.is_cancelled_on_disconnect() || self.signal.is_observed() {
            return true;
        }
        let state = self.state();
        match state.canceller {
            Some(_) => finished.may_cancel_server,
            // A session manager has not got it yet. If it still comes there, so does the cancel. Once it was answered, it
            // does not.
            None => call.session().is_some() && !state.has_head,
        }
    }

    /// What the server is to be told of a cancelled call now.
    pub(super) fn injection(
        &self,
        id: CallId,
        reason: CancelReason,
        cancelled: JustCancelled,
    ) -> Option<Injection> {
        // What was announced stays so until there is an injection.
        let (cancelled, canceller) = self.defer_cancel(reason, cancelled)?;
        let Some(canceller) = canceller.filter(|_| cancelled.finished.may_cancel_server) else {
            self.release_canceller();
            return None;
        };
        Some(canceller.cancel(self.call(id)?, reason))
    }

    /// Keeps what is to be told until the call was handed over. Returns who is to tell it now, if it was, or nobody has the
    /// call: in the same moment, because a session manager that binds the call next tells it then.
    fn defer_cancel(
        &self,
        reason: CancelReason,
        cancelled: JustCancelled,
    ) -> Option<(JustCancelled, Option<Arc<dyn Canceller>>)> {
        let mut state = self.state();
        match &mut state.dispatch {
            Dispatch::InProgress(opening) => {
                // Unless who handed it over saw that it is cancelled.
                if cancelled.finished.may_cancel_server && opening.deferred_cancel.is_none() {
                    opening.deferred_cancel = Some((reason, cancelled.guard));
                }
                None
            }
            Dispatch::Done { is_cancelled: true } => None,
            Dispatch::Done {
                is_cancelled: false,
            }
            | Dispatch::NotBound => Some((cancelled, state.canceller.clone())),
        }
    }

    /// The answer of a call was seen. `answer` says what to keep of it, and how many bytes that is; it is not asked if
    /// nothing is to be kept.
    pub(crate) fn answered(&self, id: CallId, answer: impl FnOnce() -> Option<(Answer, usize)>) {
        let kept = match self.shared.options.retain {
            RetainAnswers::All => true,
            RetainAnswers::Detached => self.is_detached(id),
            RetainAnswers::Off => false,
        };
        let answer = if kept { answer() } else { None };
        let ended = answer.and_then(|(mut answer, weight)| {
            answer.retry = self.retry();
            let now = Instant::now();
            Some(Completion {
                outcome: RetainedOutcome::Answered(answer),
                weight,
                at: now,
                until: self.retain_until(self.call(id)?, now),
            })
        });
        self.end(id, Outcome::Completed, ended);
    }

    /// Somebody between the layer and its server has the answer, and will give it to the client, whenever that comes for it.
    pub(crate) fn on_answered_externally(&self) {
        let (call, is_open) = {
            let mut state = self.state();
            state.is_answered = true;
            (self.info(), state.phase.is_open())
        };
        match call {
            Some(call) => self.finish(call.id(), Outcome::Completed),
            // No call comes any more, and a client that leaves from now on means nothing. One that has left fires the token now.
            None if is_open => self.signal.disarm(),
            None => {}
        }
    }

    pub(crate) fn finish(&self, id: CallId, outcome: Outcome) {
        self.end(id, outcome, None);
    }

    fn end(&self, id: CallId, outcome: Outcome, remember: Option<Completion<Answer>>) {
        if let Some(finished) = self
            .with_session(|core| core.finish(id, remember))
            .flatten()
        {
            self.apply_end(id, outcome, finished);
        }
    }

    /// The registry let a call go whose end nobody will see.
    #[cold]
    pub(crate) fn end_untracked(&self, id: CallId, finished: Finished) {
        self.apply_end(id, Outcome::Unknown, finished);
        if self.has_call_ended() {
            self.register_orphaned_streams();
        }
    }

    /// There is no room for a call, which runs on as without the layer.
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

    /// Goes through with the end of a call that was not cancelled.
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

    pub(super) fn report_end(&self, id: CallId, outcome: Outcome, finished: Finished) {
        if let Some(call) = self.call(id) {
            self.report(&Event::Ended {
                call,
                outcome,
                detachment: finished.detachment,
            });
        }
        self.release_span();
        if finished.needs_eviction {
            self.report_evicted();
        }
    }

    /// There was no room for what is kept of some calls, be it this one or others.
    #[cold]
    fn report_evicted(&self) {
        let registry = &self.shared.registry;
        let mut dropped = self
            .with_session(SessionState::take_evicted)
            .unwrap_or_default();
        dropped.extend(registry.evict());
        for dropped in &dropped {
            // Not in the span of this call, which has nothing to do with it.
            self.shared.report(&Event::AnswerEvicted {
                call: dropped.call,
                session: &dropped.session,
                outcome: dropped.outcome,
                bytes: dropped.bytes,
            });
        }
        if let Some(answers) = registry
            .limit_warnings
            .record_evictions(dropped.len(), Instant::now())
        {
            log_evicted(answers);
        }
    }

    /// How long the end of a call is kept at least, and if its client was there: as if it had gone just before.
    fn retain_until(&self, call: &CallInfo, now: Instant) -> Instant {
        let grace = call.policy().grace;
        let patience = match grace.max_grace(self.retry()) {
            // Nearly always: no verdict says more.
            short if short <= MIN_RETENTION => short,
            _ => {
                let going = self.stream_end(false);
                grace.on_disconnect(call, going).resume_window(going)
            }
        };
        now.checked_add(patience.max(MIN_RETENTION))
            .unwrap_or(now + MIN_RETENTION)
    }
}

impl Tracked for Exchange {
    fn on_untracked(&self, id: CallId, finished: Finished) {
        self.end_untracked(id, finished);
    }

    fn on_grace_expired(self: &Arc<Self>, id: CallId) {
        if let Some(cause) = self
            .with_session(|core| core.cause_without_grace(id))
            .flatten()
        {
            return self.cancel(id, cause.reason());
        }
        match &self.shared.options.confirm {
            Some(confirm) => self.request_confirmation(id, &**confirm),
            None => self.cancel(id, CancelReason::Orphaned),
        }
    }

    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        match reason {
            CancelReason::TimedOut => drop(self.force_cancel(id, reason)),
            _ => self.cancel(id, reason),
        }
    }
}
