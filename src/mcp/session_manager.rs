//! The session manager, which wraps another one and forwards everything.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use futures_util::{FutureExt, Stream, TryFutureExt};
use rmcp::{
    model::{
        ClientJsonRpcMessage, ClientNotification, GetExtensions, JsonRpcNotification,
        ServerJsonRpcMessage,
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
    create_stream::CreateStream,
    event_ids::{EventIds, Seal, Sealed},
    inner::ManagerInner,
    replay,
    resume::ResumeRequest,
    session::{Session, SessionListener},
    stream::without_suppressed,
    transport::CancellableTransport,
};
use crate::{call::RequestId, observe::SessionEvent, token::CallToken};

/// A [`SessionManager`] whose calls the layer knows exactly, and cancels by a typed message.
///
/// It forwards everything to the manager inside. With it, the layer parses no bodies and sees the answers of calls. It reads on
/// the stream of a client that hung up, so that an abandoned call never blocks its session. It keeps back what a cancelled call
/// still sends, and it gives the events of a store to their own session only.
///
/// The two find each other through the request's extensions:
///
/// ```
/// use std::sync::Arc;
/// use axum::Router;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
/// use rmcp::{ServerHandler, transport::streamable_http_server::StreamableHttpService};
///
/// struct MyServer;
/// impl ServerHandler for MyServer {}
///
/// let sessions = Arc::new(CancellableSessionManager::default());
/// let mcp = StreamableHttpService::new(|| Ok(MyServer), sessions, Default::default());
/// let app: Router = Router::new()
///     .nest_service("/mcp", mcp)
///     .layer(CancelOnDisconnectLayer::new());
/// # drop(app);
/// assert_eq!(CancellableSessionManager::new("a manager").inner(), &"a manager");
/// ```
pub struct CancellableSessionManager<M> {
    shared: Arc<ManagerInner<M>>,
    idle_timeout: Option<Duration>,
    listeners: Arc<[SessionListener]>,
    event_ids: EventIds,
}

// === impl CancellableSessionManager ===

impl CancellableSessionManager<LocalSessionManager> {
    /// Sessions in this process's memory, as rmcp's [`LocalSessionManager`] keeps them.
    ///
    /// The `keep_alive` of `config`, 5 minutes by default, becomes the [`idle_timeout`](Self::idle_timeout), and rmcp's own
    /// timer is turned off: that one closes sessions under silent calls whose clients are connected, and loses their answers.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::session::local::SessionConfig;
    ///
    /// let mut config = SessionConfig::default();
    /// config.keep_alive = Some(Duration::from_secs(3600)); // or `None`: never closed
    /// let sessions = CancellableSessionManager::local(config);
    /// assert_eq!(sessions.inner().session_config.keep_alive, None);
    /// ```
    pub fn local(mut config: SessionConfig) -> Self {
        let idle_timeout = config.keep_alive.take();
        let mut manager = LocalSessionManager::default();
        manager.session_config = config;
        Self {
            idle_timeout,
            ..Self::new(manager)
        }
    }
}

/// Sessions in this process's memory, with rmcp's defaults: [`local`](Self::local) with a default [`SessionConfig`].
///
/// ```
/// use mcp_cancel_on_disconnect::CancellableSessionManager;
///
/// let sessions = CancellableSessionManager::default();
/// assert!(format!("{sessions:?}").contains("idle_timeout: Some(300s)"));
/// ```
impl Default for CancellableSessionManager<LocalSessionManager> {
    fn default() -> Self {
        Self::local(SessionConfig::default())
    }
}

impl<M> CancellableSessionManager<M> {
    /// Sessions as `manager` keeps them.
    ///
    /// `manager` still closes them as it likes, even if an [`idle_timeout`](Self::idle_timeout) is set here: rmcp's own timer,
    /// `SessionConfig::keep_alive`, closes them under silent calls.
    pub fn new(manager: M) -> Self {
        Self {
            shared: Arc::new(ManagerInner::new(manager)),
            idle_timeout: None,
            listeners: Arc::default(),
            event_ids: EventIds::of_process(),
        }
    }

    /// Closes sessions that were not used for this long, at least 100 ms, of those created from now on. Their clients get 404 and
    /// open new ones.
    ///
    /// A session is used by every request, also while its body is on its way or a middleware behind the layer has it, by every
    /// open stream (standalone ones too), and by every call that has not ended, even if its client has left. An answer that is
    /// kept for a client that was away uses it as well. (Without a layer, a request that the session manager has not received
    /// and a call whose client has left are not known.) What the server sends does not count.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
    ///
    /// let mut manager = LocalSessionManager::default();
    /// manager.session_config.keep_alive = None; // else both timers run
    /// let sessions = CancellableSessionManager::new(manager).idle_timeout(Duration::from_secs(900));
    /// assert!(format!("{sessions:?}").contains("idle_timeout: Some(900s)"));
    /// ```
    pub fn idle_timeout(mut self, timeout: Duration) -> Self {
        self.idle_timeout = Some(timeout);
        self
    }

    /// Leaves idle sessions open until their clients or the manager inside end them.
    ///
    /// ```
    /// # use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// let sessions = CancellableSessionManager::default().no_idle_timeout();
    /// assert!(format!("{sessions:?}").contains("idle_timeout: None"));
    /// ```
    pub fn no_idle_timeout(mut self) -> Self {
        self.idle_timeout = None;
        self
    }

    /// Calls a closure for every session that opens and closes, from now on. A manager may have several.
    ///
    /// It is called where that happens, with no lock held: a session that opens is reported before its first message, and one that
    /// closes once its calls are cancelled and no request finds it any more. Of each session the opening is reported before the closing. What holds for an
    /// [`Observer`](crate::Observer) holds for it too: it must not block, and a panic of it is caught. Sessions that the manager
    /// inside makes or ends by itself are not seen.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use std::sync::mpsc;
    /// use mcp_cancel_on_disconnect::{CancellableSessionManager, observe::SessionEvent};
    /// use rmcp::transport::streamable_http_server::SessionManager;
    ///
    /// let (sender, told) = mpsc::channel();
    /// let sessions = CancellableSessionManager::default().on_session(move |event| {
    ///     let _sent = match event {
    ///         SessionEvent::Opened { session, .. } => sender.send(format!("{session} opened")),
    ///         SessionEvent::Closed { session, .. } => sender.send(format!("{session} closed")),
    ///         _ => Ok(()),
    ///     };
    /// });
    /// let (id, _transport) = sessions.create_session().await.unwrap();
    /// sessions.close_session(&id).await.unwrap();
    /// let told: Vec<String> = told.try_iter().collect();
    /// assert_eq!(told, [format!("{id} opened"), format!("{id} closed")]);
    /// # }
    /// ```
    pub fn on_session(
        mut self,
        watcher: impl Fn(&SessionEvent<'_>) + Send + Sync + 'static,
    ) -> Self {
        let watcher: SessionListener = Arc::new(watcher);
        self.listeners = self.listeners.iter().cloned().chain([watcher]).collect();
        self
    }

    /// Sets the key that binds the event ids of an [`EventStore`] to their sessions. Without a store it has no effect.
    ///
    /// Each event id carries a MAC of itself and its session, and an event is replayed only to that session. By default all
    /// managers of a process have one random key, so an event from another process, or from before a restart, is replayed to no
    /// client. Processes that share a store need the same key: at least 32 random bytes, secret. An empty key is ignored.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    ///
    /// let sessions = CancellableSessionManager::default().event_id_key("made by `openssl rand -hex 32`");
    /// assert!(!format!("{sessions:?}").contains("openssl"), "it is not shown");
    /// ```
    pub fn event_id_key(mut self, key: impl AsRef<[u8]>) -> Self {
        let key = key.as_ref();
        if !key.is_empty() {
            self.event_ids = EventIds::with_key(key);
        }
        self
    }

    /// The answer that a client which comes back to a session with this event is given from memory: that of the call on whose
    /// stream the event was. `None` if the call has not ended with an answer, if the event is that of the answer itself, or if
    /// the answer is not kept any more. Nothing changes by asking.
    ///
    /// An observer that gets an [`Event::Ended`](crate::Event::Ended) can keep the answer elsewhere in this way.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    ///
    /// let sessions = CancellableSessionManager::default();
    /// assert!(sessions.kept_answer("no session", "0/1").is_none());
    /// ```
    pub fn kept_answer(
        &self,
        session: &str,
        last_event_id: &str,
    ) -> Option<Arc<ServerJsonRpcMessage>> {
        replay::message(self.shared.retained_for(&session.into(), last_event_id)?)
    }

    /// The manager inside.
    ///
    /// Its owner can end the stream of a call that runs on (SEP-1699), and rmcp drops the answer of such a call. So from the first
    /// use of this method on, answers are copied as they pass, and kept if their stream has ended.
    pub fn inner(&self) -> &M {
        self.shared.early_ends.store(true, Ordering::Relaxed);
        &self.shared.manager
    }
}

impl<M: SessionManager> CancellableSessionManager<M> {
    /// Knows a session that the manager inside has made.
    fn open(
        &self,
        id: SessionId,
        transport: M::Transport,
        restored: bool,
    ) -> CancellableTransport<M::Transport> {
        let session = self
            .shared
            .open_session(id, self.idle_timeout, self.listeners.clone());
        session.notify_opened(restored);
        CancellableTransport::new(transport, session, self.shared.serve_tasks.clone())
    }

    /// What binds the event ids of a session to it. `None` if there is no event store.
    fn seal_of(&self, session: &SessionId) -> Option<Box<Seal>> {
        self.shared.manager.event_store()?;
        Some(Box::new(self.event_ids.seal_of(Some(session))))
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
            let transport = self.open(id.clone(), transport, false);
            (id, transport)
        })
    }

    fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<ServerJsonRpcMessage, Self::Error>> + Send {
        if let ClientJsonRpcMessage::Request(request) = &message
            && let Some(link) = CallToken::in_message(request.request.extensions())
        {
            // From its first call on the session is known to the layer.
            self.shared.can_bind(link.exchange().registry());
        }
        let used = self.shared.sessions.begin_use(id);
        let initialized = self.shared.manager.initialize_session(id, message);
        initialized.inspect(move |_| drop(used))
    }

    /// rmcp asks this for every request of a session, so it counts as a use.
    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.shared.touch_session(id).await;
        self.shared.manager.has_session(id).await
    }

    /// Cancels the session's calls first: once it is closed, it takes no message, and rmcp lets their
    /// handlers run for another 5 s.
    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        // A task that has served a session means that one, and not what was restored under its id since.
        let served = self.shared.serve_tasks.end(id);
        let is_current = |served: Arc<Session>| self.shared.sessions.is_current(&served);
        if served.is_some_and(|served| !served.upgrade().is_some_and(is_current)) {
            return Ok(());
        }
        self.shared.end_session(id.clone()).await
    }

    fn create_stream(
        &self,
        id: &SessionId,
        mut message: ClientJsonRpcMessage,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let used = self.shared.sessions.begin_use(id);
        let own_id = used.as_ref().map_or(id, |used| used.id());
        let call = self.shared.bind(own_id, &mut message);
        let shared = &self.shared;
        let untracked = match &call {
            Some(_) => None,
            None => shared.untracked(id, &message, used.as_ref()),
        };
        let opened = shared.submit(id, message, call.as_ref(), untracked.as_deref());
        CreateStream::new(opened, call, untracked, self.seal_of(id), used)
    }

    fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send {
        let cancels = match &message {
            ClientJsonRpcMessage::Notification(JsonRpcNotification {
                notification: ClientNotification::CancelledNotification(cancelled),
                ..
            }) => cancelled.params.request_id.as_ref().map(RequestId::from),
            _ => None,
        };
        let meant = cancels
            .clone()
            .and_then(|request| self.shared.find(id, request));
        let used = self.shared.sessions.begin_use(id);
        let accepted = self.shared.manager.accept_message(id, message);
        accepted.inspect_ok(move |()| {
            match (cancels, meant, &used) {
                (Some(request), Some((meant, _)), _) => {
                    self.shared.client_cancelled(id, request, meant);
                }
                // If it is a call that is not tracked, rmcp sends no answer.
                (Some(request), None, Some(used)) => used.suppressed.forget_untracked(&request),
                _ => {}
            }
            drop(used);
        })
    }

    fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let used = self.shared.sessions.begin_use(id);
        let opened = self.shared.manager.create_standalone_stream(id);
        let seal = self.seal_of(id);
        opened.map_ok(|stream| without_suppressed(Sealed::new(stream, seal), used))
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let resume = ResumeRequest {
            shared: &self.shared,
            session: id,
            last_event_id,
            seal: self.seal_of(id),
            used: self.shared.sessions.begin_use(id),
        };
        resume.stream().await
    }

    fn restore_session(
        &self,
        id: SessionId,
    ) -> impl Future<Output = Result<RestoreOutcome<Self::Transport>, Self::Error>> + Send {
        let restored = self.shared.manager.restore_session(id.clone());
        restored.map_ok(move |outcome| match outcome {
            RestoreOutcome::Restored(transport) => {
                self.shared.purge_session(&id);
                RestoreOutcome::Restored(self.open(id, transport, true))
            }
            RestoreOutcome::AlreadyPresent => RestoreOutcome::AlreadyPresent,
            // `RestoreOutcome` is non-exhaustive: an outcome that is not known cannot be wrapped.
            _ => RestoreOutcome::NotSupported,
        })
    }

    fn event_store(&self) -> Option<Arc<dyn EventStore>> {
        let store = self.shared.manager.event_store()?;
        Some(self.event_ids.wrap(store))
    }
}

impl<M> fmt::Debug for CancellableSessionManager<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancellableSessionManager")
            .field("sessions", &self.shared.sessions.len())
            .field("idle_timeout", &self.idle_timeout)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http::{Request, header};
    use http_body_util::Full;
    use rmcp::{
        ErrorData, RoleServer, ServerHandler,
        model::{InitializeRequestParams, InitializeResult},
        service::RequestContext,
        transport::streamable_http_server::StreamableHttpService,
    };
    use serde_json::json;

    use super::*;

    /// Another request closes a session when it can be found, and before anybody was told that it has opened.
    #[tokio::test]
    async fn a_session_that_closes_as_it_opens_is_told_of_in_that_order() {
        let told = Arc::new(Mutex::new(Vec::new()));
        let hears = told.clone();
        let manager = CancellableSessionManager::default().on_session(move |event| {
            let is_opened = matches!(event, SessionEvent::Opened { .. });
            hears.lock().unwrap().push(is_opened);
        });
        let (id, _transport) = manager.inner().create_session().await.unwrap();
        let watchers = manager.listeners.clone();
        let session = manager.shared.open_session(id.clone(), None, watchers);
        manager.close_session(&id).await.unwrap();
        assert!(told.lock().unwrap().is_empty());

        session.notify_opened(false);

        assert_eq!(*told.lock().unwrap(), [true, false]);
    }

    struct Panics;

    impl ServerHandler for Panics {
        async fn initialize(
            &self,
            _request: InitializeRequestParams,
            _context: RequestContext<RoleServer>,
        ) -> Result<InitializeResult, ErrorData> {
            panic!("on purpose")
        }
    }

    #[tokio::test]
    async fn a_closed_session_whose_service_panicked_is_not_kept() {
        let manager = CancellableSessionManager::local(SessionConfig::default());
        let manager = Arc::new(manager);
        let service =
            StreamableHttpService::new(|| Ok(Panics), manager.clone(), Default::default());
        let initialize = json!({ "jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": { "name": "test", "version": "1" },
        } });
        let request = Request::post("/mcp")
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, "application/json, text/event-stream")
            .header(header::CONTENT_TYPE, "application/json");
        let request = request
            .body(Full::<bytes::Bytes>::from(initialize.to_string()))
            .unwrap();
        let refused = service.handle(request).await;
        assert_eq!(refused.status(), 500);
        let ids: Vec<_> = manager
            .inner()
            .sessions
            .read()
            .await
            .keys()
            .cloned()
            .collect();
        let id = ids.first().unwrap();
        let session = Arc::downgrade(&manager.shared.sessions.find(id).unwrap());

        manager.close_session(id).await.unwrap();

        assert_eq!(manager.shared.sessions.len(), 0);
        assert!(session.upgrade().is_none(), "it is kept for ever");
    }
}
