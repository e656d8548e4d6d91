//! The wrapper that binds calls from typed messages.

use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use futures_util::{FutureExt, Stream, TryFutureExt};
use rmcp::{
    model::{
        CancelledNotification, CancelledNotificationParam, ClientJsonRpcMessage,
        ClientNotification, ClientRequest, GetExtensions, GetMeta, RequestId, ServerJsonRpcMessage,
    },
    transport::streamable_http_server::{
        RestoreOutcome, SessionManager,
        session::{
            EventStore, ServerSseMessage, SessionId,
            local::{LocalSessionManager, SessionConfig},
        },
    },
};

use super::{
    late::Late,
    stream::{BoundCall, CallStream},
    transport::CancellableTransport,
};
use crate::{
    call::{CallInfo, CancelReason, Outcome},
    cancel::{CancelError, Canceller, Injection},
    registry::Scope,
    token::CallToken,
};

/// A [`SessionManager`] whose calls the layer knows exactly, and cancels by a typed message.
///
/// It forwards everything to the manager inside. What it adds: the layer need not parse request bodies,
/// sees the answer of a call when it passes, reads on the stream of a client that hung up (so that one
/// abandoned call never blocks its session), and keeps back what a cancelled call still sends.
///
/// The two find each other through the request's extensions:
///
/// ```
/// use std::sync::Arc;
/// use axum::Router;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
/// use rmcp::{
///     ServerHandler,
///     transport::streamable_http_server::{StreamableHttpService, session::local::SessionConfig},
/// };
///
/// struct MyServer;
/// impl ServerHandler for MyServer {}
///
/// let sessions = Arc::new(CancellableSessionManager::local(SessionConfig::default()));
/// let mcp = StreamableHttpService::new(|| Ok(MyServer), sessions, Default::default());
/// let app: Router = Router::new()
///     .nest_service("/mcp", mcp)
///     .layer(CancelOnDisconnectLayer::new());
/// # drop(app);
/// ```
pub struct CancellableSessionManager<M> {
    shared: Arc<Shared<M>>,
}

/// What the calls need to be cancelled. They outlive requests, so they share it.
struct Shared<M> {
    manager: M,
    scope: u64,
    /// What was cancelled, by session; shared with the session's transport.
    late: RwLock<HashMap<SessionId, Arc<Late>>>,
    /// Whether anything was ever cancelled.
    cancels: AtomicBool,
}

// === impl CancellableSessionManager ===

impl CancellableSessionManager<LocalSessionManager> {
    /// Sessions in this process's memory, as rmcp's [`LocalSessionManager`] keeps them.
    pub fn local(config: SessionConfig) -> Self {
        let mut manager = LocalSessionManager::default();
        manager.session_config = config;
        Self::new(manager)
    }
}

impl<M> CancellableSessionManager<M> {
    /// Sessions as `manager` keeps them.
    pub fn new(manager: M) -> Self {
        static NEXT_SCOPE: AtomicU64 = AtomicU64::new(0);
        Self {
            shared: Arc::new(Shared {
                manager,
                scope: NEXT_SCOPE.fetch_add(1, Ordering::Relaxed),
                late: RwLock::default(),
                cancels: AtomicBool::new(false),
            }),
        }
    }

    /// The manager inside.
    pub fn inner(&self) -> &M {
        &self.shared.manager
    }
}

impl<M: SessionManager> CancellableSessionManager<M> {
    /// Binds the call in `message` to the exchange it came with.
    fn bind(&self, session: &SessionId, message: &ClientJsonRpcMessage) -> Option<BoundCall> {
        let ClientJsonRpcMessage::Request(request) = message else {
            return None;
        };
        let link = CallToken::in_message(request.request.extensions())?;
        let tool = match &request.request {
            ClientRequest::CallToolRequest(call) => Some(&*call.params.name),
            _ => None,
        };
        let progress = request.request.get_meta().get_progress_token();
        let call = CallInfo::new((&request.id).into(), request.request.method())
            .with_tool(tool)
            .with_session(Some(session.clone()))
            .with_progress_token(progress.map(|token| (&token.0).into()));
        self.shared.forgive(session, &call);
        let exchange = link.exchange().clone();
        let id = exchange.bind(call, self.shared.clone())?;
        Some(BoundCall::new(exchange, id, request.id.clone()))
    }
}

impl<M: SessionManager> SessionManager for CancellableSessionManager<M> {
    type Error = M::Error;
    type Transport = CancellableTransport<M::Transport>;

    fn create_session(
        &self,
    ) -> impl Future<Output = Result<(SessionId, Self::Transport), Self::Error>> + Send {
        let created = self.shared.manager.create_session();
        created.map_ok(|(id, transport)| {
            let late = self.shared.watch_session(&id);
            (id, CancellableTransport::new(transport, late))
        })
    }

    fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<ServerJsonRpcMessage, Self::Error>> + Send {
        self.shared.manager.initialize_session(id, message)
    }

    fn has_session(
        &self,
        id: &SessionId,
    ) -> impl Future<Output = Result<bool, Self::Error>> + Send {
        self.shared.manager.has_session(id)
    }

    fn close_session(
        &self,
        id: &SessionId,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send {
        let closed = self.shared.manager.close_session(id);
        closed.inspect(|_| self.shared.forget_session(id))
    }

    fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let call = self.bind(id, &message);
        let opened = self.shared.manager.create_stream(id, message);
        opened.map(|opened| match (opened, call) {
            (Ok(stream), call) => Ok(CallStream::new(stream, call)),
            (Err(error), Some(call)) => {
                call.end(Outcome::Failed);
                Err(error)
            }
            (Err(error), None) => Err(error),
        })
    }

    fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send {
        self.shared.manager.accept_message(id, message)
    }

    fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        self.shared.manager.create_standalone_stream(id)
    }

    fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        self.shared.manager.resume(id, last_event_id)
    }

    fn restore_session(
        &self,
        id: SessionId,
    ) -> impl Future<Output = Result<RestoreOutcome<Self::Transport>, Self::Error>> + Send {
        let restored = self.shared.manager.restore_session(id.clone());
        restored.map_ok(move |outcome| match outcome {
            RestoreOutcome::Restored(transport) => {
                let late = self.shared.watch_session(&id);
                RestoreOutcome::Restored(CancellableTransport::new(transport, late))
            }
            RestoreOutcome::AlreadyPresent => RestoreOutcome::AlreadyPresent,
            // `RestoreOutcome` is non-exhaustive: what we do not know we cannot wrap.
            _ => RestoreOutcome::NotSupported,
        })
    }

    fn event_store(&self) -> Option<Arc<dyn EventStore>> {
        self.shared.manager.event_store()
    }
}

impl<M> fmt::Debug for CancellableSessionManager<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancellableSessionManager")
            .finish_non_exhaustive()
    }
}

// === impl Shared ===

impl<M> Shared<M> {
    /// A new session starts with nothing cancelled, also if an older one had its id.
    fn watch_session(&self, id: &SessionId) -> Arc<Late> {
        let late = Arc::new(Late::default());
        let mut sessions = self.late.write().unwrap_or_else(PoisonError::into_inner);
        sessions.insert(id.clone(), late.clone());
        late
    }

    fn forget_session(&self, id: &SessionId) {
        let mut sessions = self.late.write().unwrap_or_else(PoisonError::into_inner);
        sessions.remove(id);
    }

    fn late(&self, session: &str) -> Option<Arc<Late>> {
        let sessions = self.late.read().unwrap_or_else(PoisonError::into_inner);
        sessions.get(session).cloned()
    }

    /// A new call may use the id of a cancelled one.
    fn forgive(&self, session: &SessionId, call: &CallInfo) {
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

    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection {
        let Some(session) = call.session_id().cloned() else {
            return Box::pin(async { Err(CancelError::failed("not a session call")) });
        };
        self.cancels.store(true, Ordering::Relaxed);
        if let Some(late) = self.late(&session) {
            late.condemn(call);
        }
        let cancelled = CancelledNotificationParam::new(
            Some(RequestId::from(call.request_id())),
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
