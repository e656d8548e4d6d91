//! The end of a call: answered, cancelled, or untracked.

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

/// Minimum time that an ended call is retained for its client: 60 s.
///
/// Chosen because rmcp intends to keep the events of a completed stream for the same time.
const MIN_RETENTION: Duration = Duration::from_secs(60);

/// A call that has just been cancelled. Its server may still have to be notified.
pub(super) struct JustCancelled {
    finished: Finished,
    /// Taken before the call ended, so that a task that closes its session waits for the injection.
    guard: Option<CancelGuard>,
}

// === impl Exchange ===

impl Exchange {
    /// Cancels a call whose grace has expired, unless its client has just resumed.
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

    /// Cancels a call if `finish` ends it. The token fires first, then `event` is reported, and then the end of the call.
    ///
    /// `event` is reported even if `finish` does not end the call.
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

    /// Cancels a call, attached or not, whose server has already received the cancel.
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
        // The server may have received the cancel before the call itself.
        if reason == CancelReason::ClientCancelled {
            self.defer_cancel(reason, cancelled);
        }
        self.release_canceller();
    }

    /// Cancels a call, attached or not. The caller notifies its server and its client.
    ///
    /// If `outcome` is `None`, it is determined by whether the cancel has a recipient.
    pub(super) fn cancel_now(
        &self,
        id: CallId,
        reason: CancelReason,
        outcome: Option<Outcome>,
    ) -> Option<JustCancelled> {
        let finish = |core: &mut SessionState, ended| core.finish(id, Some(ended));
        let cancelled = self.mark_cancelled(id, reason, finish)?;
        let determined = self.apply_cancel(id, reason, cancelled.finished);
        self.report_end(id, outcome.unwrap_or(determined), cancelled.finished);
        Some(cancelled)
    }

    /// Cancels a call, attached or not, and sends its client the error. Returns `false` if the call has ended, or runs as a task.
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

    /// Cancels a call as [`force_cancel`](Self::force_cancel) does, and returns the injection.
    ///
    /// Returns `None` if the call has ended, or runs as a task, and `Some(None)` if there is no injection to send now.
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

    /// Cancels a call when the server shuts down. Returns `false` if the call has ended, or runs as a task.
    ///
    /// A clone of `delivered` is dropped once the server has accepted the cancel, or the delivery has failed.
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
            let delivered = delivered.clone();
            let delivering = async move {
                let result = injection.await;
                drop(delivered);
                result
            };
            self.inject(id, Box::pin(delivering), span);
        }
        true
    }

    /// Ends a call in the registry, which retains it as cancelled.
    fn mark_cancelled(
        &self,
        id: CallId,
        reason: CancelReason,
        finish: impl FnOnce(&mut SessionState, Completion<Answer>) -> Option<Finished>,
    ) -> Option<JustCancelled> {
        let (call, now) = (self.call(id)?, Instant::now());
        let canceller = self.state().canceller.clone();
        // No session manager has bound the call yet, so it has no key. If one still binds the call, the cancel is sent after it.
        let may_still_be_bound = canceller.is_none() && call.session().is_some();
        let guard = canceller.and_then(|canceller| canceller.begin_cancel(call));
        let ended = Completion {
            outcome: RetainedOutcome::Cancelled(call.request_id().clone(), reason),
            weight: 0,
            at: now,
            until: self.retain_until(call, now),
        };
        let mut finished = self.with_session(|core| finish(core, ended))??;
        finished.may_cancel_server |= may_still_be_bound;
        Some(JustCancelled { finished, guard })
    }

    /// Applies the cancel of a call that has just been marked as cancelled. Returns its outcome.
    fn apply_cancel(&self, id: CallId, reason: CancelReason, finished: Finished) -> Outcome {
        let has_recipient = self.has_cancel_recipient(id, finished);
        self.notify_changed();
        let has_older = self.mark_call_ended(false);
        self.fire(reason);
        if has_older {
            self.register_orphaned_streams();
        }
        if has_recipient {
            Outcome::Cancelled(reason)
        } else {
            Outcome::Abandoned(reason)
        }
    }

    /// Returns `true` if code that can stop the work of a call is notified of the cancel.
    ///
    /// Such code has the call's token, or is its server. The server is notified by an injection, or by the end of the stream if its
    /// protocol revision defines that as the cancel.
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
            // No session manager has bound the call yet. If one still does, it sends the cancel. After the response head, none does.
            None => call.session().is_some() && !state.has_head,
        }
    }

    /// Returns the injection of a cancelled call, if there is one to send now.
    pub(super) fn injection(
        &self,
        id: CallId,
        reason: CancelReason,
        cancelled: JustCancelled,
    ) -> Option<Injection> {
        // The guard in `cancelled` keeps the cancel pending until the injection exists.
        let (cancelled, canceller) = self.defer_cancel(reason, cancelled)?;
        let Some(canceller) = canceller.filter(|_| cancelled.finished.may_cancel_server) else {
            self.release_canceller();
            return None;
        };
        Some(canceller.cancel(self.call(id)?, reason))
    }

    /// Defers a cancel while the call is being dispatched. Otherwise returns it, unless the dispatch has already sent it.
    ///
    /// The check and the deferral take one lock, because a session manager may bind the call concurrently.
    fn defer_cancel(
        &self,
        reason: CancelReason,
        cancelled: JustCancelled,
    ) -> Option<(JustCancelled, Option<Arc<dyn Canceller>>)> {
        let mut state = self.state();
        match &mut state.dispatch {
            Dispatch::InProgress(attempts) => {
                // `rebind` may have deferred it already.
                if cancelled.finished.may_cancel_server && attempts.deferred_cancel.is_none() {
                    attempts.deferred_cancel = Some((reason, cancelled.guard));
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

    /// Ends a call whose answer was observed. `answer` returns what is to be retained, and its size in bytes. It is called only if
    /// the answer is to be retained.
    pub(crate) fn answered(&self, id: CallId, answer: impl FnOnce() -> Option<(Answer, usize)>) {
        let is_retained = match self.shared.options.retain {
            RetainAnswers::All => true,
            RetainAnswers::Detached => self.is_detached(id),
            RetainAnswers::Off => false,
        };
        let answer = if is_retained { answer() } else { None };
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

    /// Called when a gateway between the layer and its server has the answer.
    ///
    /// The gateway will deliver it to a client that resumes.
    pub(crate) fn on_answered_externally(&self) {
        let (call, is_open) = {
            let mut state = self.state();
            state.is_answered = true;
            (self.info(), state.phase.is_open())
        };
        match call {
            Some(call) => self.finish(call.id(), Outcome::Completed),
            // No call can start any more, and a disconnect has no effect from now on. An earlier disconnect has closed the phase,
            // and fires the token itself.
            None if is_open => self.signal.disarm(),
            None => {}
        }
    }

    pub(crate) fn finish(&self, id: CallId, outcome: Outcome) {
        self.end(id, outcome, None);
    }

    fn end(&self, id: CallId, outcome: Outcome, completion: Option<Completion<Answer>>) {
        if let Some(finished) = self
            .with_session(|core| core.finish(id, completion))
            .flatten()
        {
            self.apply_end(id, outcome, finished);
        }
    }

    /// Ends a call that the registry has untracked, with the outcome unknown.
    #[cold]
    pub(crate) fn end_untracked(&self, id: CallId, finished: Finished) {
        self.apply_end(id, Outcome::Unknown, finished);
        if self.has_call_ended() {
            self.register_orphaned_streams();
        }
    }

    /// Reports a call that is not tracked because of a limit. The call keeps running as it would without the layer.
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

    /// Applies the end of a call that was not cancelled.
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
        if finished.has_evicted {
            self.report_evicted();
        }
    }

    /// Reports the evicted outcomes, of this call or of others.
    #[cold]
    fn report_evicted(&self) {
        let registry = &self.shared.registry;
        let evicted = self
            .with_session(SessionState::take_evicted)
            .unwrap_or_default();
        for evicted in &evicted {
            // Not in the span of this call, because the answer may belong to another call.
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

    /// Returns the time until which the outcome of a call is retained, unless it is evicted.
    ///
    /// An attached call is treated as if its client had just disconnected.
    fn retain_until(&self, call: &CallInfo, now: Instant) -> Instant {
        let grace = call.policy().grace;
        let resume_window = match grace.max_grace(self.retry()) {
            // Nearly always. No disconnect action has a longer resume window.
            short if short <= MIN_RETENTION => short,
            _ => {
                let stream_end = self.stream_end(false);
                grace
                    .on_disconnect(call, stream_end)
                    .resume_window(stream_end)
            }
        };
        now.checked_add(resume_window.max(MIN_RETENTION))
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
