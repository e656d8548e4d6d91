//! What a session manager shares with its calls, which outlive the requests they came with.

use std::{
    collections::{HashMap, hash_map::RandomState},
    hash::BuildHasher,
    sync::{
        Arc, OnceLock, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use futures_util::future::join_all;
use rmcp::{
    model::{
        CancelledNotification, CancelledNotificationParam, ClientJsonRpcMessage,
        ClientNotification, JsonObject,
    },
    transport::streamable_http_server::{SessionManager, session::SessionId},
};

use super::late::Late;
use crate::{
    call::{CallId, CallInfo, CancelReason},
    cancel::{CancelError, Canceller, Injection},
    exchange::Exchange,
    registry::{Named, Registry, Scope, SessionKey},
};

/// What the calls need to be cancelled. They outlive requests, so they share it.
pub(super) struct Shared<M> {
    pub(super) manager: M,
    scope: u64,
    /// What was cancelled, by session; shared with the session's transport.
    late: RwLock<HashMap<SessionId, Arc<Late>>>,
    /// Whether anything was ever cancelled.
    cancels: AtomicBool,
    /// The registry of the first layer through which a call came. Calls through another layer are not
    /// bound: their sessions could not be told from ours.
    pub(super) registry: OnceLock<Arc<Registry>>,
    hasher: RandomState,
}

// === impl Shared ===

impl<M> Shared<M> {
    pub(super) fn new(manager: M) -> Self {
        static NEXT_SCOPE: AtomicU64 = AtomicU64::new(0);
        Self {
            manager,
            scope: NEXT_SCOPE.fetch_add(1, Ordering::Relaxed),
            late: RwLock::default(),
            cancels: AtomicBool::new(false),
            registry: OnceLock::new(),
            hasher: RandomState::new(),
        }
    }

    /// A new session starts with nothing cancelled, also if an older one had its id.
    pub(super) fn watch_session(&self, id: &SessionId) -> Arc<Late> {
        let late = Arc::new(Late::default());
        let mut sessions = self.late.write().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(id.clone(), late.clone());
        late
    }

    pub(super) fn belongs_to(&self, registry: &Arc<Registry>) -> bool {
        Arc::ptr_eq(self.registry.get_or_init(|| registry.clone()), registry)
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

    fn calls_of(&self, session: &SessionId) -> Vec<(CallId, Arc<Exchange>)> {
        let registry = self.registry.get();
        registry.map_or_else(Vec::new, |registry| {
            registry.take_session(&self.session(session))
        })
    }

    pub(super) async fn end_session(&self, id: &SessionId) {
        let calls = self.calls_of(id).into_iter();
        join_all(calls.map(|(id, exchange)| exchange.cancel_before_close(id))).await;
        self.forget_session(id);
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

    fn forget_session(&self, id: &SessionId) {
        let mut sessions = self.late.write().unwrap_or_else(PoisonError::into_inner);
        sessions.remove(id);
    }

    pub(super) fn late(&self, session: &str) -> Option<Arc<Late>> {
        let sessions = self.late.read().unwrap_or_else(PoisonError::into_inner);
        sessions.get(session).cloned()
    }

    /// What the call still sends goes nowhere from now on.
    pub(super) fn condemn(&self, session: &SessionId, call: &CallInfo) {
        self.cancels.store(true, Ordering::Relaxed);
        if let Some(late) = self.late(session) {
            late.condemn(call);
        }
    }

    /// A new call may use the id of a cancelled one.
    pub(super) fn forgive(&self, session: &SessionId, call: &CallInfo) {
        if self.cancels.load(Ordering::Relaxed)
            && let Some(late) = self.late(session)
        {
            late.forgive(call);
        }
    }
}

impl<M: SessionManager> Canceller for Shared<M> {
    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn has_event_store(&self) -> bool {
        self.manager.event_store().is_some()
    }

    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection {
        let Some(session) = call.session_id().cloned() else {
            return Box::pin(async { Err(CancelError::failed("not a session call")) });
        };
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
            accepted.map_err(|error| CancelError::failed(error.to_string()))
        })
    }
}
