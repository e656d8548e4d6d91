//! The state a session manager shares with its calls, which outlive their requests.

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

use futures_util::{FutureExt as _, future::join};
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

/// A session manager's state, shared with its calls to deliver their cancellations.
pub(super) struct ManagerInner<M> {
    pub(super) manager: M,
    scope: u64,
    pub(super) sessions: Arc<Sessions>,
    pub(super) serve_tasks: Arc<ServeTasks>,
    /// The manager's own timer, so that idle sessions are closed even without a layer.
    timer: Arc<Timer>,
    /// Whether any call has ever been cancelled. Until then, tracked calls skip the search for pending cancellations.
    has_cancelled: AtomicBool,
    /// The registry of the first layer to pass a call to this manager.
    ///
    /// Calls through another layer are not bound, because the two layers' sessions could not be distinguished.
    pub(super) registry: OnceLock<Arc<Registry>>,
    /// Hasher for call fingerprints.
    pub(super) hasher: RandomState,
    pub(super) hints: SetupHints,
    pub(super) resume_queue: Arc<ResumeQueue>,
    /// Whether streams can end before the answer is delivered (see [`EarlyStreamEnds`]).
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

    pub(super) fn session_key(&self, id: &SessionId) -> SessionKey {
        SessionKey {
            scope: Scope::Manager(self.scope),
            id: id.clone(),
        }
    }

    /// Returns the call or retained outcome that an event id belongs to.
    pub(super) fn match_event(&self, session: &SessionId, event_id: &str) -> EventMatch<Exchange> {
        match self.registry.get() {
            Some(registry) => registry.match_event(&self.session_key(session), event_id.as_bytes()),
            None => EventMatch::Nothing,
        }
    }

    /// Returns the outcome retained for a client whose last event is `last_event_id`.
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

    /// Returns the session's in-flight call whose accepted request has the id `request`.
    pub(super) fn find(
        &self,
        session: &SessionId,
        request: RequestId,
    ) -> Option<(CallId, Arc<Exchange>)> {
        let session = self.session_key(session);
        self.registry.get()?.find(&Key { session, request })
    }

    fn begin_close(&self, session: &SessionId) -> Vec<(CallId, Arc<Exchange>)> {
        let registry = self.registry.get();
        registry.map_or_else(Vec::new, |registry| {
            registry.begin_close(&self.session_key(session))
        })
    }

    /// Cancels a session's calls, removes retained calls, and waits for pending cancellations.
    ///
    /// This must happen first: a closed session accepts no cancellations, and rmcp would let its handlers run for another 5 s.
    async fn end_calls(&self, id: &SessionId) {
        let cancels = Exchange::cancel_before_close(self.begin_close(id));
        let pending_cancels = async {
            if let Some(session) = self.sessions.find(id) {
                session.wait_for_cancels(None, CLOSE_CANCEL_TIMEOUT).await;
            }
        };
        // Both wait for at most one second.
        join(cancels, pending_cancels).await;
    }

    /// Ends a restored session's old calls and removes retained calls. The session keeps its id, and its event ids restart at
    /// `0/0`, so they could otherwise be mistaken for an old call's event ids.
    pub(super) fn purge_session(&self, id: &SessionId) {
        for (id, exchange) in self.begin_close(id) {
            exchange.cancel(id, Cancel::external(CancelReason::SessionClosed));
        }
    }

    /// Suppresses the messages that a cancelled call is still sending.
    pub(super) fn suppress(&self, session: &SessionId, call: &CallInfo) {
        // Relaxed is enough: a cancellation takes the session entry's lock after this store, and a new call before its load.
        self.has_cancelled.store(true, Ordering::Relaxed);
        let Some(found) = self.sessions.find(session) else {
            return;
        };
        found.suppressed.suppress(call);
        // Suppress first and check afterwards: a call bound after the check claims its token itself.
        if call.progress_token().is_some() && self.is_token_reused(session, call) {
            found.suppressed.resume_token_delivery(call);
        }
    }

    /// Returns `true` if a newer call in the session has this call's progress token.
    ///
    /// Also returns `true` if there are too many newer calls to check.
    fn is_token_reused(&self, session: &SessionId, call: &CallInfo) -> bool {
        let Some(registry) = self.registry.get() else {
            return false;
        };
        let is_reused = registry.any_newer(session, call.id(), |id, exchange| {
            let newer = exchange.call(id);
            newer.is_some_and(|newer| newer.progress_token() == call.progress_token())
        });
        is_reused.unwrap_or(true)
    }

    /// Returns whether another call has reused a cancelled call's id, or `None` if undecided.
    fn is_id_reused(&self, session: &SessionId, call: &CallInfo) -> Option<bool> {
        let key = Key {
            session: self.session_key(session),
            request: call.request_id().clone(),
        };
        let other = self.registry.get()?.find_including_unaccepted(&key);
        let Some((other, exchange)) = other.filter(|(other, _)| *other != call.id()) else {
            return Some(false);
        };
        match exchange.pending_cancel() {
            // The other call is waiting for this cancellation.
            PendingCancel::Awaited => Some(false),
            PendingCancel::Unknown => None,
            PendingCancel::None if exchange.is_accepted(other) => Some(true),
            PendingCancel::None => None,
        }
    }

    /// Returns a new call's session if the call must wait for a pending cancellation of its id.
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

    /// Returns an untracked call's session if a cancellation with the call's id is pending.
    ///
    /// An untracked call is not in the registry, so a cancellation cannot find it. Instead, the call has to find the
    /// cancellation, and it must first look up the older call in the registry: a cancellation becomes pending before its call is
    /// removed from the registry, so at least one of the two is found.
    pub(super) fn find_pending_cancel(
        &self,
        session: &SessionId,
        request: &RequestId,
    ) -> Option<Arc<Session>> {
        let session = self.sessions.find(session)?;
        session.has_pending_cancel(request).then_some(session)
    }

    /// Lets a new call's messages through, even if it reuses a cancelled call's ids.
    pub(super) fn resume_delivery(&self, session: &SessionId, call: &CallInfo) {
        if self.has_cancelled.load(Ordering::Relaxed)
            && let Some(session) = self.sessions.find(session)
        {
            session.suppressed.resume_delivery(call);
        }
    }
}

impl<M: SessionManager> ManagerInner<M> {
    /// Joins `registry`, unless this manager has already joined another registry. Returns `true` if `registry` has been joined.
    /// Only the joined registry's calls are bound.
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
    /// This manager's streams end early only if other code ends them, or if it refuses a resume. It refuses to resume an
    /// in-flight call only if it has already sent the answer, or if the client has made up the event id. With an event store,
    /// neither can be relied on, because the store can fail.
    pub(super) fn is_local_manager(&self) -> bool {
        TypeId::of::<M>() == TypeId::of::<LocalSessionManager>()
            && self.manager.event_store().is_none()
    }

    pub(super) fn event_id_format(&self) -> EventIdFormat {
        if self.is_local_manager() {
            EventIdFormat::Rmcp
        } else {
            EventIdFormat::Other
        }
    }

    /// Adds a session, replacing an older one with the same id, and starts its idle timer.
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

    /// Records a request for a session. If the session is being closed for being idle, waits until it is closed.
    pub(super) async fn touch_session(self: &Arc<Self>, id: &SessionId) {
        // The timer's only runtime might have shut down.
        self.timer.ensure_on_current_runtime();
        if let Some(session) = self.sessions.touch(id) {
            let spawn = |closed| self.timer.spawn(Migration::Always, closed);
            SpawnOnDrop::new(self.clone().close(session), spawn).await;
        }
    }

    /// Closes a session, which stays open if the inner manager fails to close it. If this future is dropped, for example because
    /// the client disconnects, a task carries on and logs any error.
    pub(super) async fn end_session(self: &Arc<Self>, id: SessionId) -> Result<(), M::Error> {
        // This might be the first request on this runtime.
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
        let ending = self.sessions.mark_ending(&id);
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
        // The inner manager might panic, and other requests are awaiting this future.
        let _ = AssertUnwindSafe(close).catch_unwind().await;
        // Remove the session last: until now, the inner manager might have accepted calls, so its requests had to wait.
        self.sessions.remove_this(session);
    }
}

impl<M: SessionManager> Owner for ManagerInner<M> {
    fn is_awaited(&self, session: &SessionId, now: Instant) -> bool {
        let registry = self.registry.get();
        registry.is_some_and(|registry| registry.is_awaited(&self.session_key(session), now))
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
            // The inner manager may also have sessions opened by other code sharing it, or sessions it has restored.
            || self.registry.get().is_some_and(|registry| {
                registry.has_session(&self.session_key(&session.into()))
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
        // The cancellation first becomes pending and then looks up which call now has its id. A new call with the same id first
        // registers its key and then looks for pending cancellations. Both use the same two locks, so at least one of them finds
        // the other.
        self.has_cancelled.store(true, Ordering::Relaxed);
        let guard = self.announce_cancel(call);
        let undecided = match self.is_id_reused(&session, call) {
            Some(true) => return Box::pin(async { Err(CancelError::REUSED) }),
            Some(false) => {
                self.suppress(&session, call);
                None
            }
            // The caller waits for the decision before polling this future. Suppressing messages now could affect the other call.
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

/// Returns an inner manager's error with the session id redacted, for logs and reports.
///
/// The id has to stay secret, because any client that knows it can act on the session's behalf.
fn redact_session(error: &impl ToString, session: &str) -> String {
    error.to_string().replace(session, "…")
}
