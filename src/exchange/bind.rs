//! Handles the session manager's reports about a call.
//!
//! The first report contains the call as a typed message. Later reports are about the call's streams.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
};

use super::{
    identity::SessionHeader,
    request_body::{BodyKind, RequestBody},
    state::{
        Attachment, Attempts, CallRef, Dispatch, Exchange, ExchangeState, LateAnswer,
        OpaqueMessage, PendingCancel, Phase,
    },
};
use crate::{
    call::{CallId, CallInfo, DetachCause, Key},
    cancel::Canceller,
    limits::Limit,
    registry::{Generation, POST_GENERATION, notify_untracked},
};

/// Marks a call as being read by a background task, which can tell when the call ends.
pub(crate) struct BackgroundReader {
    exchange: Arc<Exchange>,
    call: CallId,
}

// === impl BackgroundReader ===

impl BackgroundReader {
    pub(crate) fn new(exchange: Arc<Exchange>, call: CallId) -> Self {
        exchange.add_background_reader(call);
        Self { exchange, call }
    }
}

impl Drop for BackgroundReader {
    fn drop(&mut self) {
        self.exchange.remove_background_reader(self.call);
    }
}

// === impl Attachment ===

impl Attachment {
    /// Reports that the stream was dropped, by an inner service or because of a disconnect.
    pub(crate) fn on_stream_dropped(&self) {
        let (is_disconnected, stream_end_cause) = {
            let mut state = self.exchange.state();
            let resumed = self.generation != POST_GENERATION;
            let stream_end_cause = state.stream_end_cause.take_if(|_| resumed);
            (resumed || state.phase == Phase::Dropped, stream_end_cause)
        };
        let cause = match is_disconnected {
            true => stream_end_cause.unwrap_or(DetachCause::Disconnected),
            // During unwinding, this destructor runs before the exchange's guard is dropped.
            false if std::thread::panicking() => DetachCause::ServicePanicked,
            false => DetachCause::ResponseDropped,
        };
        self.detach(cause, false);
    }
}

// === impl ExchangeState ===

impl ExchangeState {
    /// Makes the session manager the canceller and starts dispatching the first attempt.
    ///
    /// Returns the previous canceller, which only serves calls without a session manager.
    fn set_canceller(
        &mut self,
        canceller: Arc<dyn Canceller>,
        contested: Option<Key>,
    ) -> Option<Arc<dyn Canceller>> {
        self.dispatch = Dispatch::InProgress(Attempts {
            in_progress: 1,
            contested: contested.map(Box::new),
            ..Attempts::default()
        });
        self.request = RequestBody::Known(BodyKind::Plain);
        self.canceller.replace(canceller)
    }
}

// === impl Exchange ===

impl Exchange {
    /// Binds a typed message's call to its session manager and attaches it. Returns `None` if the call is not tracked.
    ///
    /// After this, cancellations are deferred until the session manager has accepted the request (see
    /// [`on_dispatched`](Self::on_dispatched)). Until then, the call does not affect any other call, tracked or not: it supersedes no
    /// call, and an older in-flight call with the same id keeps that id. The caller must then set whether the call
    /// [waits for a cancellation](Self::set_pending_cancel).
    ///
    /// The following are not tracked:
    ///
    /// - `initialize`;
    /// - a call without a session or with an ambiguous session header;
    /// - a call over the limit;
    /// - a call that has already been answered.
    pub(crate) fn bind(
        self: &Arc<Self>,
        mut call: CallInfo,
        canceller: Arc<dyn Canceller>,
        fingerprint: impl FnOnce() -> u64,
    ) -> Option<Attachment> {
        if matches!(self.session, SessionHeader::Ambiguous) || call.method() == "initialize" {
            return None;
        }
        call.set_protocol_version(self.protocol_version());
        call.set_extensions(self.extensions());
        let key = call.key(canceller.scope())?;
        if self.is_bound_by(&*canceller) {
            return self.bind_attempt(call, &key, canceller, fingerprint);
        }
        if self.info().is_none() && !self.shared.registry.has_capacity() {
            self.skip_tracking(&call);
            return None;
        }
        match self.info() {
            Some(known) => call.set_policy(known.policy()),
            None => call.set_policy(self.shared.options.policy_for(&call)),
        }
        if call.policy().supersede {
            call.set_fingerprint(fingerprint());
        }
        self.capture_span();
        let id = call.id();
        // This must be set before the call can be found.
        self.set_pending_cancel(PendingCancel::Unknown);
        let mut state = self.state();
        if self.info().is_some() {
            drop(state);
            return self.rebind(call, key, canceller);
        }
        if state.request.is_untracked() {
            // The call was over the limit when its body was read, and has already been reported.
            drop(state);
            self.release_span();
            return None;
        }
        if state.is_answered {
            state.request = RequestBody::Known(BodyKind::Other);
            drop(state);
            self.report_completed_at_once(&call);
            return None;
        }
        let registered = self.register(call, Some(key), true);
        let contested = if registered.is_contested {
            self.key_of_call(&*canceller)
        } else {
            None
        };
        let replay = state.set_canceller(canceller, contested);
        // The body no longer needs to be parsed.
        self.must_parse_body.store(false, Ordering::Relaxed);
        drop(state);
        // Drop this without holding the lock, because it owns the request's extensions, whose destructors may run application code.
        drop(replay);
        self.on_registered(registered);
        Some(self.attachment(id, POST_GENERATION))
    }

    pub(super) fn attachment(self: &Arc<Self>, id: CallId, generation: Generation) -> Attachment {
        Attachment {
            exchange: self.clone(),
            id,
            generation,
        }
    }

    fn key_of_call(&self, canceller: &dyn Canceller) -> Option<Key> {
        self.info()?.key(canceller.scope())
    }

    /// Records that a call is not tracked because it is over the limit.
    #[cold]
    fn skip_tracking(&self, call: &CallInfo) {
        let untracked = RequestBody::Known(BodyKind::Untracked(None));
        let previous = mem::replace(&mut self.state().request, untracked);
        // The call may already have been reported when its body was read.
        if !previous.is_untracked() {
            self.report_untracked(call, Limit::Calls);
        }
    }

    /// Binds a call already known from the request body.
    ///
    /// This happens if the body was parsed before the session manager received the message. If the call has been cancelled in the
    /// meantime, it is still dispatched, and the cancellation is sent afterwards. Returns `None` if the message's request id or session
    /// does not match the request body.
    #[cold]
    fn rebind(
        self: &Arc<Self>,
        typed: CallInfo,
        key: Key,
        canceller: Arc<dyn Canceller>,
    ) -> Option<Attachment> {
        let CallRef { info: call, entry } = self.call.get()?;
        if *call.request_id() != key.request || call.session_id() != Some(&key.session.id) {
            return None;
        }
        call.merge_typed(typed);
        let deadline = call.deadline();
        let mut state = self.state();
        // Cancellations must now use the key by which the server knows the call.
        let ((untracked, contested), deferred) = entry.with_deferred(|session| {
            if let Some(deadline) = deadline {
                session.set_deadline(call.id(), deadline);
            }
            let accepted_call = session.find(&key.session.scope, &key.request);
            if accepted_call.is_some_and(|(accepted_call, _)| accepted_call != call.id()) {
                return (None, Some(key));
            }
            (
                session.rekey(call.id(), &key.session.scope, key.request),
                None,
            )
        });
        let replay = state.set_canceller(canceller, contested);
        drop(state);
        deferred.run();
        drop(replay);
        notify_untracked(untracked);
        self.notify_changed();
        // The call was cancelled before it was bound, so the server has yet to receive the cancellation.
        if !self.is_in_flight(call.id())
            && let Some(reason) = self.signal.reason()
            && let Dispatch::InProgress(attempts) = &mut self.state().dispatch
        {
            attempts.deferred_cancel.get_or_insert((reason, None));
        }
        Some(self.attachment(call.id(), POST_GENERATION))
    }

    /// Stores the transport's copy of the answer, or returns it if no stream will deliver it.
    pub(crate) fn offer_late_answer(&self, answer: OpaqueMessage) -> Option<OpaqueMessage> {
        let late_answer = &mut self.state().late_answer;
        match late_answer {
            LateAnswer::Closed => Some(answer),
            LateAnswer::Possible | LateAnswer::Received(_) => {
                *late_answer = LateAnswer::Received(answer);
                None
            }
        }
    }

    /// Records that no stream will deliver the answer any more. Returns the transport's copy of the answer, if it has been offered.
    pub(crate) fn close_late_answer(&self) -> Option<OpaqueMessage> {
        let previous = mem::replace(&mut self.state().late_answer, LateAnswer::Closed);
        match previous {
            LateAnswer::Received(answer) => Some(answer),
            LateAnswer::Possible | LateAnswer::Closed => None,
        }
    }

    /// Returns `true` if no stream will deliver the answer, so only the transport observes it.
    pub(super) fn late_answers_closed(&self) -> bool {
        matches!(self.state().late_answer, LateAnswer::Closed)
    }

    /// Records that the call once again has an open stream, which will deliver the answer.
    pub(crate) fn reopen_late_answer(&self) {
        let late_answer = &mut self.state().late_answer;
        if matches!(late_answer, LateAnswer::Closed) {
            *late_answer = LateAnswer::Possible;
        }
    }

    /// Sets whether the call waits for the pending cancellation of an older call with its id.
    ///
    /// Once this is known, wakes the cancellations waiting to find out.
    pub(crate) fn set_pending_cancel(&self, pending: PendingCancel) {
        self.pending_cancel.store(pending as u8, Ordering::Release);
        if pending != PendingCancel::Unknown {
            self.notify_changed();
        }
    }

    pub(crate) fn pending_cancel(&self) -> PendingCancel {
        match self.pending_cancel.load(Ordering::Acquire) {
            0 => PendingCancel::None,
            1 => PendingCancel::Unknown,
            _ => PendingCancel::Awaited,
        }
    }

    /// Closes the open streams, because their remaining events are being read elsewhere.
    pub(crate) fn close_streams(&self) {
        let streams = self.state().streams.upgrade_all();
        for stream in streams {
            stream.close();
        }
    }
}

#[cfg(test)]
mod tests;
