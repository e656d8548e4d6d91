//! The state that a session manager shares with its calls, which outlive the requests they came with.

use std::{
    any::TypeId,
    collections::hash_map::RandomState,
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
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
    kept,
    passing::EarlyEnds,
    serving::Serving,
    session::{Owner, Session, Sessions, Watcher},
    spawn_on_drop::SpawnOnDrop,
    turns::Turns,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, Key, RequestId, Scope, SessionKey},
    cancel::{Announced, CancelError, Canceller, Injection},
    exchange::{BEFORE_CLOSE, Exchange, PendingCancel, Registry},
    observe::Remarks,
    registry::{Answer, End, Form, Manager, Named},
    timer::{Migration, Timer},
};

/// A session manager's own state, which its calls share: they need it to be cancelled.
pub(super) struct SharedManager<M> {
    pub(super) manager: M,
    scope: u64,
    pub(super) sessions: Sessions,
    pub(super) serving: Arc<Serving>,
    /// Its own: sessions are looked at from when they are created, be there a layer or not.
    timer: Arc<Timer>,
    /// Whether anything was ever cancelled. Until then no call asks whether a cancel means it.
    cancels: AtomicBool,
    /// The registry of the first layer through which a call came. Calls through another layer are not
    /// bound: their sessions could not be told from ours.
    pub(super) registry: OnceLock<Arc<Registry>>,
    /// Hashes the arguments of calls.
    pub(super) hasher: RandomState,
    pub(super) remarks: Remarks,
    pub(super) turns: Arc<Turns>,
    /// Whether streams can end before their calls are answered: an event store may fail, or other code can reach `manager`.
    pub(super) early_ends: Arc<AtomicBool>,
}

// === impl SharedManager ===

impl<M> SharedManager<M> {
    pub(super) fn new(manager: M) -> Self {
        static NEXT_SCOPE: AtomicU64 = AtomicU64::new(0);
        Self {
            manager,
            scope: NEXT_SCOPE.fetch_add(1, Ordering::Relaxed),
            sessions: Sessions::default(),
            serving: Arc::default(),
            timer: Arc::new(Timer::new()),
            cancels: AtomicBool::new(false),
            registry: OnceLock::new(),
            hasher: RandomState::new(),
            remarks: Remarks::default(),
            turns: Arc::default(),
            early_ends: Arc::default(),
        }
    }

    pub(super) fn key_of(&self, id: &SessionId) -> SessionKey {
        SessionKey {
            scope: Scope::Manager(self.scope),
            id: id.clone(),
        }
    }

    /// What a client means that comes back to a session with this event.
    pub(super) fn named(&self, session: &SessionId, last_event_id: &str) -> Named<Exchange> {
        match self.registry.get() {
            Some(registry) => registry.named(&self.key_of(session), last_event_id.as_bytes()),
            None => Named::Nothing,
        }
    }

    /// What the memory has for a client that has seen everything up to the event.
    pub(super) fn ended(&self, session: &SessionId, last_event_id: &str) -> Option<End<Answer>> {
        match self.named(session, last_event_id) {
            Named::Ended(end) if !kept::is_known(&end, last_event_id) => Some(end),
            _ => None,
        }
    }

    /// The call in flight of a session with this JSON-RPC id.
    pub(super) fn find(
        &self,
        session: &SessionId,
        request: RequestId,
    ) -> Option<(CallId, Arc<Exchange>)> {
        let session = self.key_of(session);
        self.registry.get()?.find(&Key { session, request })
    }

    fn calls_of(&self, session: &SessionId) -> Vec<(CallId, Arc<Exchange>)> {
        let registry = self.registry.get();
        registry.map_or_else(Vec::new, |registry| {
            registry.take_session(&self.key_of(session))
        })
    }

    /// Cancels what is in flight, and lets cancels that are on their way arrive: a session that is closed takes none, and
    /// rmcp lets the handler run for another 5 s.
    async fn end_calls(&self, id: &SessionId) {
        let calls = self.calls_of(id).into_iter();
        let cancels = join_all(calls.map(|(id, exchange)| exchange.cancel_before_close(id)));
        let under_way = async {
            if let Some(session) = self.sessions.find(id) {
                session.injected(None, BEFORE_CLOSE).await;
            }
        };
        // Both are given the same second.
        join(cancels, under_way).await;
    }

    /// Forgets the calls of a session that starts anew under its old id: its streams count from `0/0` again.
    pub(super) fn purge_session(&self, id: &SessionId) {
        for (id, exchange) in self.calls_of(id) {
            exchange.cancelled_elsewhere(id, CancelReason::SessionClosed);
        }
    }

    /// Mutes what the call still sends.
    pub(super) fn mute(&self, session: &SessionId, call: &CallInfo) {
        // The lock of the session's home orders it: a cancel looks there after this, and a new call does so before it reads
        // this.
        self.cancels.store(true, Ordering::Relaxed);
        let Some(entered) = self.sessions.find(session) else {
            return;
        };
        entered.muted.mute(call);
        // Muted first: a call that comes after this look takes its token back itself.
        if call.progress_token().is_some() && self.has_newer_with_token(session, call) {
            entered.muted.unmute_token(call);
        }
    }

    /// Whether a newer call of the session has the progress token of this one.
    fn has_newer_with_token(&self, session: &SessionId, call: &CallInfo) -> bool {
        let Some(registry) = self.registry.get() else {
            return false;
        };
        registry.calls_of(session).any(|(id, exchange)| {
            let newer = exchange.call(id).filter(|_| id > call.id());
            newer.is_some_and(|newer| newer.progress_token() == call.progress_token())
        })
    }

    /// Whether another call has the id of a call that has ended. `None` if that is not decided yet.
    fn is_reused(&self, session: &SessionId, call: &CallInfo) -> Option<bool> {
        let key = Key {
            session: self.key_of(session),
            request: call.request_id().clone(),
        };
        let other = self.registry.get()?.find_any(&key);
        let Some((other, exchange)) = other.filter(|(other, _)| *other != call.id()) else {
            return Some(false);
        };
        match exchange.pending_cancel() {
            // It waits for this very cancel.
            PendingCancel::Awaited => Some(false),
            PendingCancel::Unknown => None,
            PendingCancel::None if exchange.is_accepted(other) => Some(true),
            PendingCancel::None => None,
        }
    }

    /// The session of a new call, if a cancel on its way means the call's id as well. The call has to wait for that cancel.
    pub(super) fn awaits(&self, session: &SessionId, request: &RequestId) -> Option<Arc<Session>> {
        if !self.cancels.load(Ordering::Relaxed) {
            return None;
        }
        self.injecting(session, request)
    }

    /// The same for a call that is not tracked. A cancel does not find such a call, so the two need another order: a cancel is
    /// announced before its call leaves the registry, and this comes after the look for that call.
    pub(super) fn injecting(
        &self,
        session: &SessionId,
        request: &RequestId,
    ) -> Option<Arc<Session>> {
        let session = self.sessions.find(session)?;
        session.is_injecting(request).then_some(session)
    }

    /// Lets a new call be heard, although it may have the id of a cancelled one.
    pub(super) fn unmute(&self, session: &SessionId, call: &CallInfo) {
        if self.cancels.load(Ordering::Relaxed)
            && let Some(session) = self.sessions.find(session)
        {
            session.muted.unmute(call);
        }
    }
}

impl<M: SessionManager> SharedManager<M> {
    /// Whether calls that come through a layer can be bound: those of the first layer that was met can.
    pub(super) fn belongs_to(self: &Arc<Self>, registry: &Arc<Registry>) -> bool {
        let own = self.registry.get_or_init(|| {
            let this: Weak<Self> = Arc::downgrade(self);
            registry.add_manager(this);
            registry.clone()
        });
        Arc::ptr_eq(own, registry)
    }

    /// Whether it is rmcp's own manager without an event store. Its streams end early only at the hands of others, and it refuses
    /// the resume of a call in flight only once it has sent the answer. An event store may fail at either.
    pub(super) fn is_rmcps(&self) -> bool {
        TypeId::of::<M>() == TypeId::of::<LocalSessionManager>()
            && self.manager.event_store().is_none()
    }

    /// The form of the manager's event ids.
    pub(super) fn form(&self) -> Form {
        if self.is_rmcps() {
            Form::Rmcp
        } else {
            Form::Any
        }
    }

    /// Enters a session, which is closed when it is idle.
    pub(super) fn open_session(
        self: &Arc<Self>,
        id: SessionId,
        idle_timeout: Option<Duration>,
        watchers: Arc<[Watcher]>,
    ) -> Arc<Session> {
        let this: Weak<Self> = Arc::downgrade(self);
        if !self.is_rmcps() {
            self.early_ends.store(true, Ordering::Relaxed);
        }
        let early_ends = EarlyEnds::new(self.early_ends.clone());
        let session = Session::new(id, idle_timeout, this, early_ends, watchers);
        let session = Arc::new(session);
        self.sessions.add(session.clone());
        session.watch(&self.timer);
        session
    }

    /// Notes that a request for a session came. If the session was closed for being idle a moment ago, the manager inside
    /// no longer knows it when this returns.
    pub(super) async fn touch_session(self: &Arc<Self>, id: &SessionId) {
        // Another runtime may have run the timer, and have ended.
        self.timer.ensure_on_current_runtime();
        if let Some(session) = self.sessions.touch(id) {
            let spawn = |closed| self.timer.spawn(Migration::Always, closed);
            SpawnOnDrop::new(self.clone().close(session), spawn).await;
        }
    }

    /// Ends a session as its client asks, also if the client goes away meanwhile.
    pub(super) async fn end_session(self: &Arc<Self>, id: SessionId) -> Result<(), M::Error> {
        // No other request need have come before this one.
        self.timer.ensure_on_current_runtime();
        let spawn = |ended: Pin<Box<_>>| {
            let id = id.clone();
            self.timer.spawn(Migration::Always, async move {
                let ended: Result<(), M::Error> = ended.await;
                if let Err(error) = ended {
                    let error = without_id(&error, &id);
                    warn!(target: "mcp_cancel_on_disconnect", error, "session not closed");
                }
            });
        };
        SpawnOnDrop::new(self.clone().end(id.clone()), spawn).await
    }

    async fn end(self: Arc<Self>, id: SessionId) -> Result<(), M::Error> {
        self.end_calls(&id).await;
        let session = self.sessions.remove(&id);
        let closed = self.manager.close_session(&id).await;
        // rmcp's own has closed a session that it reports as terminated.
        let is_open = closed.is_err() && matches!(self.manager.has_session(&id).await, Ok(true));
        match session {
            Some(session) if is_open => self.sessions.put_back(session),
            Some(session) => session.tell_closed(),
            None => {}
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
            if let Err(error) = self.manager.close_session(id).await {
                let error = without_id(&error, id);
                warn!(target: "mcp_cancel_on_disconnect", error, "idle session not closed");
            }
        };
        // The manager inside may panic, and other requests wait for this end.
        let _panicked = AssertUnwindSafe(close).catch_unwind().await;
        // Last: until here the manager inside may still take calls, so a request for the session has to wait.
        self.sessions.remove_this(session);
    }
}

impl<M: SessionManager> Owner for SharedManager<M> {
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
            if let Some(session) = session.filter(|session| session.is_over()) {
                this.close(session).await;
            }
        });
    }
}

impl<M: SessionManager> Manager for SharedManager<M> {
    fn begin_use(&self, session: &str) -> Option<Box<dyn Send + Sync>> {
        Some(Box::new(self.sessions.begin_use(session)?))
    }

    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn has(&self, session: &str) -> bool {
        self.sessions.has(session)
            // The manager inside may have sessions of its own: shared with others, or restored by itself.
            || self.registry.get().is_some_and(|registry| {
                registry.has_session(&self.key_of(&session.into()))
            })
    }
}

impl<M: SessionManager> Canceller for SharedManager<M> {
    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn has_event_store(&self) -> bool {
        self.manager.event_store().is_some()
    }

    fn sees_answers(&self, call: &CallInfo) -> bool {
        let session = call.session();
        session.is_some_and(|session| self.sessions.find(session).is_some())
    }

    fn announce(&self, call: &CallInfo) -> Option<Announced> {
        let session = self.sessions.find(call.session()?)?;
        Some(Box::new(session.inject(call.request_id())))
    }

    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection {
        let Some(session) = call.session_id().cloned() else {
            return Box::pin(async { Err(CancelError::failed("not a session call")) });
        };
        // First the cancel is announced, then it looks which call it would meet. A call that comes with the same id does the
        // reverse: it owns the key first, and then looks which cancels are on their way. So one of the two sees the other.
        self.cancels.store(true, Ordering::Relaxed);
        let injecting = self.announce(call);
        let undecided = match self.is_reused(&session, call) {
            Some(true) => return Box::pin(async { Err(CancelError::REUSED) }),
            Some(false) => {
                self.mute(&session, call);
                None
            }
            // Who polls this waits for that first. Muted now, the other call would be silent as well.
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
                self.mute(&session, &call);
            }
            let accepted = self.manager.accept_message(&session, message).await;
            drop(injecting);
            accepted.map_err(|error| CancelError::failed(without_id(&error, &session)))
        })
    }
}

/// The error of a manager inside as it can be logged and reported: it may name the session, and a client that knows the id of a
/// session can speak for it.
fn without_id(error: &impl ToString, session: &str) -> String {
    error.to_string().replace(session, "…")
}
