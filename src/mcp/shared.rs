//! What a session manager shares with its calls, which outlive the requests they came with.

use std::{
    any::TypeId,
    collections::hash_map::RandomState,
    hash::BuildHasher,
    pin::Pin,
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use futures_util::future::{join, join_all};
use rmcp::{
    model::{
        CancelledNotification, CancelledNotificationParam, ClientJsonRpcMessage,
        ClientNotification, JsonObject,
    },
    transport::streamable_http_server::{
        SessionManager,
        session::{EventStore, SessionId, local::LocalSessionManager},
    },
};
use tracing::warn;

use super::{
    going_on::GoingOn,
    owned::Owned,
    passing::EarlyEnds,
    session::{Owner, Serving, Session, Sessions},
    turns::Turns,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, Key, RequestId, Scope, SessionKey},
    cancel::{Announced, CancelError, Canceller, Injection},
    exchange::{BEFORE_CLOSE, Exchange, Registry},
    observe::Remarks,
    registry::{Form, Manager, Named},
    timer::{Moves, Timer},
};

/// What the calls need to be cancelled. They outlive requests, so they share it.
pub(super) struct Shared<M> {
    pub(super) manager: M,
    scope: u64,
    pub(super) sessions: Sessions,
    pub(super) serving: Arc<Serving>,
    /// Its own: sessions are looked at from when they are created, be there a layer or not.
    timer: Arc<Timer>,
    /// Whether anything was ever cancelled.
    cancels: AtomicBool,
    /// The registry of the first layer through which a call came. Calls through another layer are not
    /// bound: their sessions could not be told from ours.
    pub(super) registry: OnceLock<Arc<Registry>>,
    hasher: RandomState,
    pub(super) owned: Arc<Owned>,
    pub(super) remarks: Remarks,
    pub(super) turns: Arc<Turns>,
    /// Whether streams can end before their calls are answered, because somebody else can reach `manager`.
    pub(super) early_ends: Arc<AtomicBool>,
}

// === impl Shared ===

impl<M> Shared<M> {
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
            owned: Arc::default(),
            remarks: Remarks::default(),
            turns: Arc::default(),
            early_ends: Arc::default(),
        }
    }

    pub(super) fn session(&self, id: &SessionId) -> SessionKey {
        SessionKey {
            scope: Scope::Manager(self.scope),
            id: id.clone(),
        }
    }

    pub(super) fn named(&self, session: &SessionId, last_event_id: &str) -> Named {
        match self.registry.get() {
            Some(registry) => registry.named(&self.session(session), last_event_id.as_bytes()),
            None => Named::Nothing,
        }
    }

    /// The exchange of a call in flight.
    pub(super) fn exchange(&self, id: CallId) -> Option<Arc<Exchange>> {
        self.registry.get()?.call(id)
    }

    /// The call in flight of a session with this JSON-RPC id.
    pub(super) fn find(
        &self,
        session: &SessionId,
        request: RequestId,
    ) -> Option<(CallId, Arc<Exchange>)> {
        let session = self.session(session);
        self.registry.get()?.find(&Key { session, request })
    }

    fn calls_of(&self, session: &SessionId) -> Vec<(CallId, Arc<Exchange>)> {
        let registry = self.registry.get();
        registry.map_or_else(Vec::new, |registry| {
            registry.take_session(&self.session(session))
        })
    }

    /// Cancels what is in flight. What is on its way into the session already arrives as well: once it is closed,
    /// it takes no cancel, and rmcp lets the handler run for another 5 s.
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

    /// A session starts anew under its old id: its streams count from `0/0` again.
    pub(super) fn purge_session(&self, id: &SessionId) {
        for (id, exchange) in self.calls_of(id) {
            exchange.cancelled_elsewhere(id, CancelReason::SessionClosed);
        }
    }

    /// A keyed hash of a call's arguments.
    pub(super) fn fingerprint(&self, arguments: Option<&JsonObject>) -> u64 {
        // An object that was parsed always serializes, and with sorted keys.
        self.hasher
            .hash_one(serde_json::to_string(&arguments).unwrap_or_default())
    }

    /// What the call still sends goes nowhere from now on.
    pub(super) fn condemn(&self, session: &SessionId, call: &CallInfo) {
        // What is read after a look into the registry was written before one.
        self.cancels.store(true, Ordering::Relaxed);
        if let Some(session) = self.sessions.find(session) {
            session.late.condemn(call);
        }
    }

    /// Whether another call has the id of a call that has ended.
    fn is_reused(&self, session: &SessionId, call: &CallInfo) -> bool {
        let owner = self.find(session, call.request_id().clone());
        // One that waits for this very cancel is not met by it.
        owner.is_some_and(|(owner, exchange)| owner != call.id() && !exchange.is_behind_cancel())
    }

    /// The session of a new call whose id a cancel on its way means, too. The call has to wait for that.
    pub(super) fn awaits(&self, session: &SessionId, request: &RequestId) -> Option<Arc<Session>> {
        if !self.cancels.load(Ordering::Relaxed) {
            return None;
        }
        let session = self.sessions.find(session)?;
        session.is_injecting(request).then_some(session)
    }

    /// A new call may use the id of a cancelled one.
    pub(super) fn forgive(&self, session: &SessionId, call: &CallInfo) {
        if self.cancels.load(Ordering::Relaxed)
            && let Some(session) = self.sessions.find(session)
        {
            session.late.forgive(call);
        }
    }
}

impl<M: SessionManager> Shared<M> {
    /// Whether calls that come through a layer can be bound. The first layer that is met has them all.
    pub(super) fn belongs_to(self: &Arc<Self>, registry: &Arc<Registry>) -> bool {
        let own = self.registry.get_or_init(|| {
            let this: Weak<Self> = Arc::downgrade(self);
            registry.add_manager(this);
            registry.clone()
        });
        Arc::ptr_eq(own, registry)
    }

    /// What the manager's event ids say.
    pub(super) fn form(&self) -> Form {
        match is_rmcps::<M>() && self.manager.event_store().is_none() {
            true => Form::Rmcp,
            false => Form::Any,
        }
    }

    /// Knows a session from now on, and closes it when it is idle.
    pub(super) fn open_session(
        self: &Arc<Self>,
        id: SessionId,
        idle_timeout: Option<Duration>,
    ) -> Arc<Session> {
        let this: Weak<Self> = Arc::downgrade(self);
        let stored = self.manager.event_store();
        let owned = stored.map(|_| self.owned.clone());
        if !is_rmcps::<M>() {
            self.early_ends.store(true, Ordering::Relaxed);
        }
        let early_ends = EarlyEnds::new(self.early_ends.clone());
        let session = Session::new(id, idle_timeout, this, owned, early_ends);
        let session = Arc::new(session);
        self.sessions.add(session.clone());
        if let Some(at) = session.first_look() {
            let timed: Weak<Session> = Arc::downgrade(&session);
            session.keep_ticket(self.timer.set(at, timed));
        }
        session
    }

    /// A request for a session came. If that was closed for being idle a moment ago, the manager inside
    /// does not know it any more when this returns.
    pub(super) async fn touch_session(self: &Arc<Self>, id: &SessionId) {
        // Another runtime may have run the timer, and have ended.
        self.timer.on_this_runtime();
        if let Some(session) = self.sessions.touch(id) {
            let go_on = |closed| self.timer.spawn(Moves::Always, closed);
            GoingOn::new(self.clone().close(session), go_on).await;
        }
    }

    /// Ends a session as its client asks. Once begun, it is gone through with, be the client there or not.
    pub(super) async fn end_session(self: &Arc<Self>, id: SessionId) -> Result<(), M::Error> {
        // Whoever ends it need not have asked for it before.
        self.timer.on_this_runtime();
        let go_on = |ended: Pin<Box<_>>| {
            self.timer.spawn(Moves::Always, async move {
                let ended: Result<(), M::Error> = ended.await;
                if let Err(error) = ended {
                    warn!(target: "mcp_cancel_on_disconnect", %error, "session not closed");
                }
            });
        };
        GoingOn::new(self.clone().end(id), go_on).await
    }

    async fn end(self: Arc<Self>, id: SessionId) -> Result<(), M::Error> {
        self.end_calls(&id).await;
        self.sessions.remove(&id);
        self.manager.close_session(&id).await
    }

    /// The store as clients without a session may use it.
    pub(super) fn guarded_store(&self) -> Option<Arc<dyn EventStore>> {
        let store = self.manager.event_store()?;
        Some(self.owned.guard(store))
    }

    async fn close(self: Arc<Self>, session: Arc<Session>) {
        let close = async {
            let id = session.id();
            self.end_calls(id).await;
            if let Err(error) = self.manager.close_session(id).await {
                warn!(target: "mcp_cancel_on_disconnect", %error, "idle session not closed");
            }
            // Last: who asks for the session before waits here, and the manager inside would still take calls.
            self.sessions.remove_this(&session);
        };
        session.close_once(close).await;
    }
}

impl<M: SessionManager> Owner for Shared<M> {
    fn has_calls(&self, session: &SessionId) -> bool {
        let registry = self.registry.get();
        registry.is_some_and(|registry| !registry.detached_in(&self.session(session)).is_empty())
    }

    fn call(&self, session: &SessionId, request: RequestId) -> Option<(CallId, Arc<Exchange>)> {
        self.find(session, request)
    }

    fn close_idle(self: Arc<Self>, id: SessionId) {
        let this = self.clone();
        self.timer.spawn(Moves::Always, async move {
            let session = this.sessions.find(&id);
            if let Some(session) = session.filter(|session| session.is_over()) {
                this.close(session).await;
            }
        });
    }
}

impl<M: SessionManager> Manager for Shared<M> {
    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn has(&self, session: &str) -> bool {
        self.sessions.has(session)
            // The manager inside may have sessions of its own: shared with others, or restored by itself.
            || self.registry.get().is_some_and(|registry| {
                registry.has_session(&self.session(&session.into()))
            })
    }
}

impl<M: SessionManager> Canceller for Shared<M> {
    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn has_event_store(&self) -> bool {
        self.manager.event_store().is_some()
    }

    fn announce(&self, call: &CallInfo) -> Option<Announced> {
        let session = self.sessions.find(call.session()?)?;
        Some(Box::new(session.inject(call.request_id())))
    }

    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection {
        let Some(session) = call.session_id().cloned() else {
            return Box::pin(async { Err(CancelError::failed("not a session call")) });
        };
        // First it is known to be on its way, then it looks whom it would meet: a call that comes with the same id
        // owns the key first, and then looks what is on its way.
        self.cancels.store(true, Ordering::Relaxed);
        let injecting = self.sessions.find(&session);
        let injecting = injecting.map(|session| session.inject(call.request_id()));
        if self.is_reused(&session, call) {
            return Box::pin(async { Err(CancelError::reused()) });
        }
        self.condemn(&session, call);
        let cancelled = CancelledNotificationParam::new(
            Some(call.request_id().into()),
            Some(reason.to_string()),
        );
        let message = ClientJsonRpcMessage::notification(
            ClientNotification::CancelledNotification(CancelledNotification::new(cancelled)),
        );
        Box::pin(async move {
            let accepted = self.manager.accept_message(&session, message).await;
            drop(injecting);
            accepted.map_err(|error| CancelError::failed(error.to_string()))
        })
    }
}

/// Whether it is rmcp's own manager, in which streams end early only at the hands of others.
pub(super) fn is_rmcps<M: 'static>() -> bool {
    TypeId::of::<M>() == TypeId::of::<LocalSessionManager>()
}
