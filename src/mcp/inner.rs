//! The state that a session manager shares with its calls, which outlive their requests.

use std::{
    any::TypeId,
    collections::hash_map::RandomState,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use futures_util::{
    FutureExt as _,
    future::{join, join_all},
};
use rmcp::{
    model::{
        CancelledNotification, CancelledNotificationParam, ClientJsonRpcMessage, ClientNotification,
    },
    transport::streamable_http_server::{
        SessionManager,
        session::{SessionId, local::LocalSessionManager},
    },
};
use tokio::time::Instant;
use tracing::warn;

use super::{
    early_stream_end::EarlyStreamEnds,
    idle::IdleTimeouts,
    replay,
    resume_queue::ResumeQueue,
    serve_tasks::ServeTasks,
    session::{Owner, Session, SessionListener, Sessions},
    spawn_on_drop::SpawnOnDrop,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, Key, RequestId, Scope, SessionKey},
    cancel::{CancelError, CancelGuard, Canceller, Injection},
    exchange::{CLOSE_CANCEL_TIMEOUT, Cancel, Exchange, PendingCancel, Registry},
    observe::SetupHints,
    registry::{Answer, EventIdFormat, EventMatch, Manager, RetainedOutcome},
    timer::{Migration, Timer},
};

/// The inner state of a session manager. Calls share it, because it delivers their cancels.
pub(super) struct ManagerInner<M> {
    pub(super) manager: M,
    scope: u64,
    pub(super) sessions: Arc<Sessions>,
    pub(super) serve_tasks: Arc<ServeTasks>,
    /// The manager's own timer, because idle sessions are closed with or without a layer.
    timer: Arc<Timer>,
    /// `true` once a call has been cancelled. Until then, tracked calls do not look for pending cancels.
    has_cancelled: AtomicBool,
    /// The registry of the first layer that passed a call to this manager.
    ///
    /// Calls through another layer are not bound, because their sessions could not be distinguished.
    pub(super) registry: OnceLock<Arc<Registry>>,
    /// Hasher for the fingerprints of calls.
    pub(super) hasher: RandomState,
    pub(super) hints: SetupHints,
    pub(super) resume_queue: Arc<ResumeQueue>,
    /// `true` if streams can end before the answer: see [`EarlyStreamEnds`].
    pub(super) early_ends: Arc<AtomicBool>,
}

// === impl ManagerInner ===

impl<M> ManagerInner<M> {
    pub(super) fn new(manager: M) -> Self {
        static NEXT_SCOPE: AtomicU64 = AtomicU64::new(0);
        Self {
            manager,
            scope: NEXT_SCOPE.fetch_add(1, Ordering::Relaxed),
            sessions: Arc::default(),
            serve_tasks: Arc::default(),
            timer: Arc::new(Timer::new()),
            has_cancelled: AtomicBool::new(false),
            registry: OnceLock::new(),
            hasher: RandomState::new(),
            hints: SetupHints::default(),
            resume_queue: Arc::default(),
            early_ends: Arc::default(),
        }
    }

    pub(super) fn key_of(&self, id: &SessionId) -> SessionKey {
        SessionKey {
            scope: Scope::Manager(self.scope),
            id: id.clone(),
        }
    }

    /// Returns the call or retained outcome that an event id belongs to.
    pub(super) fn match_event(&self, session: &SessionId, event_id: &str) -> EventMatch<Exchange> {
        match self.registry.get() {
            Some(registry) => registry.match_event(&self.key_of(session), event_id.as_bytes()),
            None => EventMatch::Nothing,
        }
    }

    /// Returns the retained outcome for a client whose last event is `last_event_id`.
    pub(super) fn retained_for(
        &self,
        session: &SessionId,
        last_event_id: &str,
    ) -> Option<RetainedOutcome<Answer>> {
        match self.match_event(session, last_event_id) {
            EventMatch::Ended(end) if !replay::has_answer(&end, last_event_id) => Some(end),
            _ => None,
        }
    }

    /// Returns the in-flight call of a session whose accepted request has the id `request`.
    pub(super) fn find(
        &self,
        session: &SessionId,
        request: RequestId,
    ) -> Option<(CallId, Arc<Exchange>)> {
        let session = self.key_of(session);
        self.registry.get()?.find(&Key { session, request })
    }

    fn begin_close(&self, session: &SessionId) -> Vec<(CallId, Arc<Exchange>)> {
        let registry = self.registry.get();
        registry.map_or_else(Vec::new, |registry| {
            registry.begin_close(&self.key_of(session))
        })
    }

    /// Cancels the in-flight calls, removes the retained calls, and waits for pending cancels.
    ///
    /// Needed because a closed session does not accept cancels, and rmcp lets its handlers run for another 5 s.
    async fn end_calls(&self, id: &SessionId) {
        let calls = self.begin_close(id).into_iter();
        let cancels = join_all(calls.map(|(id, exchange)| exchange.cancel_before_close(id)));
        let pending_cancels = async {
            if let Some(session) = self.sessions.find(id) {
                session.wait_for_cancels(None, CLOSE_CANCEL_TIMEOUT).await;
            }
        };
        // Both have the same timeout of one second.
        join(cancels, pending_cancels).await;
    }

    /// Ends the calls of a session that is restored under its old id, and removes retained ones. The event ids of the restored session
    /// start at `0/0` again, so they could refer to old calls.
    pub(super) fn purge_session(&self, id: &SessionId) {
        for (id, exchange) in self.begin_close(id) {
            exchange.cancel(id, Cancel::external(CancelReason::SessionClosed));
        }
    }

    /// Suppresses the messages that a cancelled call still sends.
    pub(super) fn suppress(&self, session: &SessionId, call: &CallInfo) {
        // Relaxed, because the lock of the session entry orders the accesses. A cancel takes that lock after this store, and a new call
        // takes it before its load.
        self.has_cancelled.store(true, Ordering::Relaxed);
        let Some(found) = self.sessions.find(session) else {
            return;
        };
        found.suppressed.suppress(call);
        // Suppressed first: a call that is bound after this check claims its token itself.
        if call.progress_token().is_some() && self.has_newer_with_token(session, call) {
            found.suppressed.resume_delivery_of_token(call);
        }
    }

    /// Returns `true` if a newer call of the session has the progress token of this one.
    fn has_newer_with_token(&self, session: &SessionId, call: &CallInfo) -> bool {
        let Some(registry) = self.registry.get() else {
            return false;
        };
        registry.calls_of(session).any(|(id, exchange)| {
            let newer = exchange.call(id).filter(|_| id > call.id());
            newer.is_some_and(|newer| newer.progress_token() == call.progress_token())
        })
    }

    /// Returns whether another call has reused the id of a cancelled call. `None` if undecided.
    fn is_reused(&self, session: &SessionId, call: &CallInfo) -> Option<bool> {
        let key = Key {
            session: self.key_of(session),
            request: call.request_id().clone(),
        };
        let other = self.registry.get()?.find_unaccepted_too(&key);
        let Some((other, exchange)) = other.filter(|(other, _)| *other != call.id()) else {
            return Some(false);
        };
        match exchange.pending_cancel() {
            // The other call waits for this cancel.
            PendingCancel::Awaited => Some(false),
            PendingCancel::Unknown => None,
            PendingCancel::None if exchange.is_accepted(other) => Some(true),
            PendingCancel::None => None,
        }
    }

    /// Returns the session of a new call if a pending cancel has the call's id. The call must wait for that cancel.
    pub(super) fn pending_cancel_for(
        &self,
        session: &SessionId,
        request: &RequestId,
    ) -> Option<Arc<Session>> {
        if !self.has_cancelled.load(Ordering::Relaxed) {
            return None;
        }
        self.find_pending_cancel(session, request)
    }

    /// Returns the session of an untracked call if a pending cancel has the call's id.
    ///
    /// A cancel cannot find an untracked call in the registry. It becomes pending before its own call is removed from there, so this
    /// check must run after the lookup of that call.
    pub(super) fn find_pending_cancel(
        &self,
        session: &SessionId,
        request: &RequestId,
    ) -> Option<Arc<Session>> {
        let session = self.sessions.find(session)?;
        session.has_pending_cancel(request).then_some(session)
    }

    /// Lets the messages of a new call through, even if it reuses the ids of a cancelled one.
    pub(super) fn resume_delivery(&self, session: &SessionId, call: &CallInfo) {
        if self.has_cancelled.load(Ordering::Relaxed)
            && let Some(session) = self.sessions.find(session)
        {
            session.suppressed.resume_delivery(call);
        }
    }
}

impl<M: SessionManager> ManagerInner<M> {
    /// Joins `registry` if no other was joined before. Returns `true` if it is the joined one. Only calls of that one are bound.
    pub(super) fn join_registry(self: &Arc<Self>, registry: &Arc<Registry>) -> bool {
        let joined = self.registry.get_or_init(|| {
            let this: Weak<Self> = Arc::downgrade(self);
            registry.add_manager(this);
            registry.clone()
        });
        Arc::ptr_eq(joined, registry)
    }

    /// Returns `true` for rmcp's own manager without an event store.
    ///
    /// Its streams end early only if other code ends them, or if it refuses a resume. It refuses the resume of an in-flight call only
    /// if it has sent the answer, or if the client invented the event id. With an event store neither is certain, because the store may
    /// fail.
    pub(super) fn is_local_manager(&self) -> bool {
        TypeId::of::<M>() == TypeId::of::<LocalSessionManager>()
            && self.manager.event_store().is_none()
    }

    /// Returns the format of the manager's event ids.
    pub(super) fn event_id_format(&self) -> EventIdFormat {
        if self.is_local_manager() {
            EventIdFormat::Rmcp
        } else {
            EventIdFormat::Any
        }
    }

    /// Adds a session, in place of an older one with the same id, and starts its idle timer.
    pub(super) fn open_session(
        self: &Arc<Self>,
        id: SessionId,
        idle_timeouts: IdleTimeouts,
        listeners: Arc<[SessionListener]>,
    ) -> Arc<Session> {
        let this: Weak<Self> = Arc::downgrade(self);
        if !self.is_local_manager() {
            self.early_ends.store(true, Ordering::Relaxed);
        }
        let early_ends = EarlyStreamEnds::new(self.early_ends.clone());
        let session = Session::new(id, idle_timeouts, this, early_ends, listeners);
        let session = Arc::new(session);
        self.sessions.add(session.clone());
        session.start_idle_timer(&self.timer);
        session
    }

    /// Records a request for a session. If the session was closed as idle, waits until the inner manager has closed it.
    pub(super) async fn touch_session(self: &Arc<Self>, id: &SessionId) {
        // The timer's only runtime may have ended.
        self.timer.ensure_on_current_runtime();
        if let Some(session) = self.sessions.touch(id) {
            let spawn = |closed| self.timer.spawn(Migration::Always, closed);
            SpawnOnDrop::new(self.clone().close(session), spawn).await;
        }
    }

    /// Closes a session, unless the inner manager fails to close it. If this future is dropped, for example because the client
    /// disconnects, a task continues and logs an error.
    pub(super) async fn end_session(self: &Arc<Self>, id: SessionId) -> Result<(), M::Error> {
        // This may be the first request on this runtime.
        self.timer.ensure_on_current_runtime();
        let spawn = |end: Pin<Box<_>>| {
            let id = id.clone();
            self.timer.spawn(Migration::Always, async move {
                let result: Result<(), M::Error> = end.await;
                if let Err(error) = result {
                    let error = redact_session(&error, &id);
                    warn!(target: "mcp_cancel_on_disconnect", error, "session not closed");
                }
            });
        };
        SpawnOnDrop::new(self.clone().end(id.clone()), spawn).await
    }

    async fn end(self: Arc<Self>, id: SessionId) -> Result<(), M::Error> {
        self.end_calls(&id).await;
        let ending = self.sessions.begin_end(&id);
        let closed = self.manager.close_session(&id).await;
        // rmcp's own manager removes a session even if it then fails to close it.
        let is_open = closed.is_err() && matches!(self.manager.has_session(&id).await, Ok(true));
        if let Some(ending) = ending.filter(|_| is_open) {
            ending.reopen();
        }
        closed
    }

    async fn close(self: Arc<Self>, session: Arc<Session>) {
        let closed = session.clone();
        let close = move || async move { self.close_idle_session(&closed).await }.boxed();
        session.close_once(close).await;
    }

    async fn close_idle_session(&self, session: &Arc<Session>) {
        let close = async {
            let id = session.id();
            self.end_calls(id).await;
            match self.manager.close_session(id).await {
                Ok(()) => session.log_closed(),
                Err(error) => {
                    let error = redact_session(&error, id);
                    warn!(target: "mcp_cancel_on_disconnect", error, "idle session not closed");
                }
            }
        };
        // The inner manager may panic, and other requests await this future.
        let _panicked = AssertUnwindSafe(close).catch_unwind().await;
        // Last: until here the inner manager may still accept calls, so a request for the session has to wait.
        self.sessions.remove_this(session);
    }
}

impl<M: SessionManager> Owner for ManagerInner<M> {
    fn is_awaited(&self, session: &SessionId, now: Instant) -> bool {
        let registry = self.registry.get();
        registry.is_some_and(|registry| registry.is_awaited(&self.key_of(session), now))
    }

    fn call(&self, session: &SessionId, request: RequestId) -> Option<(CallId, Arc<Exchange>)> {
        self.find(session, request)
    }

    fn close_idle(self: Arc<Self>, id: SessionId) {
        let this = self.clone();
        self.timer.spawn(Migration::Always, async move {
            let session = this.sessions.find(&id);
            if let Some(session) = session.filter(|session| session.is_closed()) {
                this.close(session).await;
            }
        });
    }
}

impl<M: SessionManager> Manager for ManagerInner<M> {
    fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>> {
        Some(Box::new(self.sessions.begin_use(session)?))
    }

    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn has(&self, session: &str) -> bool {
        self.sessions.has(session)
            // The inner manager may have sessions that this manager did not open, because other code shares it, or because it
            // restored them.
            || self.registry.get().is_some_and(|registry| {
                registry.has_session(&self.key_of(&session.into()))
            })
    }
}

impl<M: SessionManager> Canceller for ManagerInner<M> {
    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn has_event_store(&self) -> bool {
        self.manager.event_store().is_some()
    }

    fn observes_answers(&self, call: &CallInfo) -> bool {
        let session = call.session();
        session.is_some_and(|session| self.sessions.find(session).is_some())
    }

    fn announce_cancel(&self, call: &CallInfo) -> Option<CancelGuard> {
        let session = self.sessions.find(call.session()?)?;
        Some(Box::new(session.announce_cancel(call.request_id())))
    }

    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection {
        let Some(session) = call.session_id().cloned() else {
            return Box::pin(async { Err(CancelError::failed("not a session call")) });
        };
        // The cancel becomes pending first, and then looks up the call that now has its id. A new call with the same id registers its
        // key first, and then looks for pending cancels. Both use the same two locks, so at least one of them finds the other.
        self.has_cancelled.store(true, Ordering::Relaxed);
        let guard = self.announce_cancel(call);
        let undecided = match self.is_reused(&session, call) {
            Some(true) => return Box::pin(async { Err(CancelError::REUSED) }),
            Some(false) => {
                self.suppress(&session, call);
                None
            }
            // The caller waits for the decision before it polls this future. Suppressing now could suppress the other call.
            None => Some(call.clone()),
        };
        let cancelled = CancelledNotificationParam::new(
            Some(call.request_id().into()),
            Some(reason.to_string()),
        );
        let message = ClientJsonRpcMessage::notification(
            ClientNotification::CancelledNotification(CancelledNotification::new(cancelled)),
        );
        Box::pin(async move {
            if let Some(call) = undecided {
                self.suppress(&session, &call);
            }
            let accepted = self.manager.accept_message(&session, message).await;
            drop(guard);
            accepted.map_err(|error| CancelError::failed(redact_session(&error, &session)))
        })
    }
}

/// Returns the error of an inner manager without the session id, for the log and for reports.
///
/// A client that knows the id of a session can act for it.
fn redact_session(error: &impl ToString, session: &str) -> String {
    error.to_string().replace(session, "…")
}
