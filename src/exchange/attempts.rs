//! Handles requests that a middleware sends more than once.
//!
//! A middleware between the layer and the session manager can resend a request. Each attempt that the session manager accepts becomes a
//! stream of the call, or a separate call if the first call has already ended. An attempt affects other calls only once it has been
//! accepted. Until then, an older call with the same id keeps that id, and no call is superseded.

use std::{mem, sync::Arc};

use super::{
    cancel::Cancel,
    state::{Attachment, Attempts, CallRef, Dispatch, Exchange, ExchangeState, Phase, RequestKind},
};
use crate::{
    call::{CallId, CallInfo, DetachCause, Key, Outcome, SessionKey},
    cancel::Canceller,
    registry::{POST_GENERATION, notify_untracked},
};

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    Accepted,
    Refused,
    /// The dispatch was dropped, so it is not known whether the attempt was accepted.
    Abandoned,
}

// === impl ExchangeState ===

impl ExchangeState {
    /// Records that another attempt at sending an in-flight call's request is being dispatched.
    fn begin_attempt(&mut self) {
        if let Dispatch::InProgress(attempts) = &mut self.dispatch {
            attempts.in_progress += 1;
        } else {
            self.dispatch = Dispatch::InProgress(Attempts {
                in_progress: 1,
                // The call is still in flight, so at least one earlier attempt has not been refused.
                was_accepted: true,
                ..Attempts::default()
            });
        }
    }
}

// === impl Exchange ===

impl Exchange {
    /// Returns `true` if `canceller` has already bound the call.
    ///
    /// If so, a middleware has resent the request. This compares scopes rather than pointers, because one manager may wrap another.
    pub(super) fn is_bound_by(&self, canceller: &dyn Canceller) -> bool {
        self.info().is_some() && {
            let state = self.state();
            let bound = state.canceller.as_ref().filter(|_| state.is_bound());
            bound.is_some_and(|bound| bound.scope() == canceller.scope())
        }
    }

    /// Binds another attempt at sending the same request.
    ///
    /// The attempt becomes another stream of the call, or a separate call if the first call has ended. Returns `None` if the attempt is
    /// not tracked.
    ///
    /// An attempt with a different request id or session means that the request consists of several messages, such as a batch that a
    /// middleware has split. They share one response, so none of them is cancelled, and the call ends with an unknown outcome.
    #[cold]
    pub(super) fn bind_attempt(
        self: &Arc<Self>,
        call: CallInfo,
        key: &Key,
        canceller: Arc<dyn Canceller>,
        fingerprint: impl FnOnce() -> u64,
    ) -> Option<Attachment> {
        let CallRef { info, entry } = self.call.get()?;
        let id = info.id();
        if *info.request_id() != key.request || info.session_id() != Some(&key.session.id) {
            self.finish(id, Outcome::Unknown);
            return None;
        }
        let mut state = self.state();
        if state.is_answered {
            return None;
        }
        // Attach under the state lock, so that from now on any cancellation is deferred until the server has received this attempt, too.
        let ((detachment, generation), deferred) =
            entry.with_deferred(|session| (session.detachment(id), session.attach(id)));
        if generation.is_some() {
            state.begin_attempt();
        }
        drop(state);
        deferred.run();
        if let Some(generation) = generation {
            self.reopen_late_answer();
            if detachment.is_some() {
                self.on_resumed(id, detachment);
            }
            return Some(self.attachment(id, generation));
        }
        let next = {
            let mut state = self.state();
            state.next.upgrade().unwrap_or_else(|| {
                let next = Self::from_parts(
                    self.shared.clone(),
                    self.session.clone(),
                    self.revision,
                    self.revision_date,
                    RequestKind::Post(self.extensions()),
                );
                next.state().phase = state.phase;
                let next = Arc::new(next);
                state.next = Arc::downgrade(&next);
                next
            })
        };
        // Boxed, because this function and `bind` call each other.
        next.bind(
            call,
            canceller,
            Box::new(fingerprint) as Box<dyn FnOnce() -> u64 + '_>,
        )
    }

    /// Returns the exchange of the separate call that a later attempt has started, if any.
    #[cold]
    pub(super) fn next_call(&self) -> Option<Arc<Self>> {
        self.state().next.upgrade()
    }

    /// Called when the session manager has accepted a call's request. Applies whatever was deferred until then.
    pub(crate) fn on_dispatched(self: &Arc<Self>, id: CallId) {
        if let Some(call) = self.call(id).filter(|call| call.policy().supersede) {
            self.supersede(call);
        }
        self.end_attempt(id, Attempt::Accepted);
    }

    /// Called when a call's dispatch has been abandoned. The session manager may have accepted the request anyway.
    pub(crate) fn on_dispatch_abandoned(self: &Arc<Self>, id: CallId) {
        self.end_attempt(id, Attempt::Abandoned);
    }

    /// Called when the session manager has refused a call's request.
    ///
    /// Ends the call, unless another attempt is in progress or may have been accepted.
    pub(crate) fn on_refused(self: &Arc<Self>, attachment: &Attachment) {
        let is_sole = match &self.state().dispatch {
            Dispatch::InProgress(attempts) => attempts.in_progress <= 1 && !attempts.was_accepted,
            Dispatch::NotBound | Dispatch::Done { .. } => true,
        };
        if is_sole {
            self.finish(attachment.id, Outcome::Failed);
        } else {
            attachment.detach(DetachCause::ResponseDropped, false);
        }
        self.end_attempt(attachment.id, Attempt::Refused);
    }

    /// Records how an attempt ended. After the last attempt, applies whatever was deferred until then.
    ///
    /// A deferred cancellation is sent only if the server may have accepted at least one attempt.
    fn end_attempt(self: &Arc<Self>, id: CallId, attempt: Attempt) {
        let (contested, ended) = {
            let mut state = self.state();
            let Dispatch::InProgress(attempts) = &mut state.dispatch else {
                return;
            };
            attempts.in_progress = attempts.in_progress.saturating_sub(1);
            attempts.was_accepted |= attempt != Attempt::Refused;
            let contested = attempts.contested.take_if(|_| attempt != Attempt::Refused);
            let ended = (attempts.in_progress == 0).then(|| mem::take(attempts));
            let ended = ended.map(|attempts| {
                // If the server never accepted the request, the id may belong to another call, which would be cancelled instead.
                let deferred_cancel = attempts.deferred_cancel.filter(|_| attempts.was_accepted);
                state.dispatch = Dispatch::Done {
                    is_cancelled: deferred_cancel.is_some(),
                };
                (deferred_cancel, state.canceller.clone(), state.phase)
            });
            (contested, ended)
        };
        if let Some(key) = contested {
            self.resolve_contest(id, *key, attempt);
        }
        let Some(((deferred_cancel, canceller, phase), call)) = ended.zip(self.call(id)) else {
            return;
        };
        match deferred_cancel.zip(canceller) {
            Some(((reason, guard), canceller)) => {
                self.inject(id, canceller.cancel(call, reason), self.span());
                drop(guard);
            }
            None if phase == Phase::Dropped => {
                self.on_stream_lost(call, POST_GENERATION, DetachCause::Disconnected, false)
            }
            None => {}
        }
    }

    /// Decides which call owns the request id after a contested attempt.
    ///
    /// Called if an older in-flight call has the same id and the attempt was accepted or abandoned.
    #[cold]
    fn resolve_contest(self: &Arc<Self>, id: CallId, key: Key, attempt: Attempt) {
        if attempt == Attempt::Abandoned {
            // Either call may own the id now, so cancelling one could cancel the other.
            return self.finish(id, Outcome::Unknown);
        }
        let Key {
            session: SessionKey { scope, .. },
            request,
        } = key;
        notify_untracked(
            self.with_session(|session| session.rekey(id, &scope, request))
                .flatten(),
        );
        self.notify_changed();
    }

    /// Cancels the session's older detached calls that `call` supersedes.
    #[cold]
    fn supersede(&self, call: &CallInfo) {
        let canceller = self.state().canceller.clone();
        let Some(key) = canceller.and_then(|canceller| call.key(canceller.scope())) else {
            return;
        };
        for (id, exchange) in self.shared.registry.detached_in(&key.session) {
            let repeated = exchange.call(id).filter(|_| id < call.id());
            // An older call with the same id is untracked rather than cancelled, because the client would mistake an answer from the
            // older call's handler for the answer to this call.
            let repeated = repeated.filter(|older| older.request_id() != call.request_id());
            if repeated.is_some_and(|older| call.supersedes(older)) {
                exchange.cancel(id, Cancel::superseded());
            }
        }
    }
}
