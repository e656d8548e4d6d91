//! A session manager wrapper that makes session calls visible to the layer.

use std::{
    fmt,
    sync::{Arc, atomic::Ordering},
};

use futures_util::{FutureExt, Stream, TryFutureExt};
use rmcp::{
    model::{
        ClientJsonRpcMessage, ClientNotification, GetExtensions, JsonRpcNotification,
        ServerJsonRpcMessage,
    },
    transport::streamable_http_server::{
        RestoreOutcome, SessionManager,
        session::{EventStore, ServerSseMessage, SessionId},
    },
};

use super::{
    create_stream::CreateStream,
    event_ids::{EventIdKey, Seal, Sealed},
    idle::IdleTimeouts,
    inner::ManagerInner,
    replay,
    resume::ResumeRequest,
    session::{Session, SessionListener},
    session_use::ClientStream,
    stream::without_suppressed,
    transport::CancellableTransport,
};
use crate::{call::RequestId, observe::SessionEvent, token::CallToken};

/// A [`SessionManager`] wrapper that lets the layer track session calls exactly.
///
/// The layer cancels these calls by handing a `notifications/cancelled` message directly to the inner manager.
///
/// All methods are forwarded to the inner manager. The layer observes each answer as it passes through, so it does not have to
/// parse the bodies of session calls. After a client has disconnected, the wrapper keeps reading its stream, so that a detached
/// call never blocks its session. It also suppresses messages that a cancelled call is still sending, and replays stored events
/// only to the session they belong to.
///
/// The layer and the session manager find each other through each request's extensions:
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
/// let mcp = StreamableHttpService::new(|| Ok(MyServer), sessions.clone(), Default::default());
/// let app: Router = Router::new()
///     .nest_service("/mcp", mcp)
///     .layer(CancelOnDisconnectLayer::new());
/// # drop(app);
/// # assert!(format!("{sessions:?}").contains("sessions: 0"));
/// ```
pub struct CancellableSessionManager<M> {
    shared: Arc<ManagerInner<M>>,
    pub(super) idle_timeouts: IdleTimeouts,
    listeners: Arc<[SessionListener]>,
    event_id_key: EventIdKey,
}

// === impl CancellableSessionManager ===

impl<M> CancellableSessionManager<M> {
    /// Wraps a session manager.
    ///
    /// `manager` still closes sessions by its own rules, even if an [`idle_timeout`](Self::idle_timeout) is set on the wrapper.
    /// In particular, rmcp's own timer (`SessionConfig::keep_alive`) closes them even during silent calls.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
    ///
    /// let mut manager = LocalSessionManager::default();
    /// manager.session_config.keep_alive = None;
    /// let sessions = CancellableSessionManager::new(manager);
    /// assert!(format!("{sessions:?}").contains("idle_timeout: None"), "sessions are never closed for being idle");
    /// ```
    pub fn new(manager: M) -> Self {
        Self {
            shared: Arc::new(ManagerInner::new(manager)),
            idle_timeouts: IdleTimeouts::default(),
            listeners: Arc::default(),
            event_id_key: EventIdKey::process_wide(),
        }
    }

    /// Adds a closure to be called whenever a session opens or closes.
    ///
    /// Only sessions opened afterwards are reported. You can add several closures; they are called synchronously, with no lock
    /// held. A session is reported as opened before its first message and before it is reported as closed. It is reported as
    /// closed once its calls have been cancelled and no request can find it any more.
    ///
    /// As with an [`Observer`](crate::Observer), the closure must not block, and panics in it are caught. Sessions that the inner
    /// manager opens or closes on its own are not reported.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use std::sync::mpsc;
    /// use mcp_cancel_on_disconnect::{CancellableSessionManager, observe::SessionEvent};
    /// use rmcp::transport::streamable_http_server::SessionManager;
    ///
    /// let (sender, reported) = mpsc::channel();
    /// let sessions = CancellableSessionManager::default().on_session(move |event| {
    ///     let _ = match event {
    ///         SessionEvent::Opened { session, .. } => sender.send(format!("{session} opened")),
    ///         SessionEvent::Closed { session, .. } => sender.send(format!("{session} closed")),
    ///         _ => Ok(()),
    ///     };
    /// });
    /// let (id, _transport) = sessions.create_session().await.unwrap();
    /// sessions.close_session(&id).await.unwrap();
    /// let reported: Vec<String> = reported.try_iter().collect();
    /// assert_eq!(reported, [format!("{id} opened"), format!("{id} closed")]);
    /// # }
    /// ```
    pub fn on_session(
        mut self,
        listener: impl Fn(&SessionEvent<'_>) + Send + Sync + 'static,
    ) -> Self {
        let listener: SessionListener = Arc::new(listener);
        self.listeners = self.listeners.iter().cloned().chain([listener]).collect();
        self
    }

    /// Sets the key that binds an [`EventStore`]'s event ids to their sessions.
    ///
    /// Each event id sent to a client carries a MAC over the store's own id and the session, so that an event is replayed only to
    /// its own session. Without a store, the key has no effect. By default, all managers in a process share one random key, so
    /// events from another process, or from before a restart, are not replayed to any client. Processes that share a store need
    /// the same key, which should be at least 32 random bytes, kept secret. An empty key is ignored.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    ///
    /// let sessions = CancellableSessionManager::default().event_id_key("made by `openssl rand -hex 32`");
    /// assert!(!format!("{sessions:?}").contains("openssl"), "the key is shown");
    /// ```
    pub fn event_id_key(mut self, key: impl AsRef<[u8]>) -> Self {
        let key = key.as_ref();
        if !key.is_empty() {
            self.event_id_key = EventIdKey::new(key);
        }
        self
    }

    /// Returns what a client resuming after `last_event_id` has yet to receive.
    ///
    /// This is the retained answer or, if the call was cancelled, its error.
    ///
    /// Returns `None` if the event's call has not ended, if the event is the answer itself, or if nothing is retained.
    ///
    /// An observer of [`Event::Ended`](crate::Event::Ended) can use this to store the answer elsewhere. This method has no side
    /// effects.
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

    /// Returns the inner manager.
    ///
    /// Code using the inner manager can end a running call's stream (SEP-1699), in which case rmcp drops the answer. Once this
    /// method has been called, answers are therefore copied as they pass through, and retained if their stream has already ended.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let sessions = CancellableSessionManager::default();
    /// assert!(sessions.inner().sessions.read().await.is_empty());
    /// # }
    /// ```
    pub fn inner(&self) -> &M {
        self.shared.early_ends.store(true, Ordering::Relaxed);
        &self.shared.manager
    }
}

impl<M: SessionManager> CancellableSessionManager<M> {
    /// Adds a session created or restored by the inner manager.
    fn open(
        &self,
        id: SessionId,
        transport: M::Transport,
        restored: bool,
    ) -> CancellableTransport<M::Transport> {
        let session = self
            .shared
            .open_session(id, self.idle_timeouts, self.listeners.clone());
        session.notify_opened(restored);
        CancellableTransport::new(transport, session, self.shared.serve_tasks.clone())
    }

    /// Returns the seal for a session's event ids, or `None` without an event store.
    fn seal_for(&self, session: &SessionId) -> Option<Box<Seal>> {
        self.shared.manager.event_store()?;
        Some(Box::new(self.event_id_key.seal_for(Some(session))))
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
            && let Some(token) = CallToken::in_message(request.request.extensions())
        {
            // The layer has to know about the session from its first call on.
            self.shared.join_registry(token.exchange().registry());
        }
        let session_use = self.shared.sessions.begin_use(id);
        let initialized = self.shared.manager.initialize_session(id, message);
        initialized.inspect(move |_| drop(session_use))
    }

    /// Records a request for the session, because rmcp calls this for every GET and POST.
    ///
    /// If the session is being closed for being idle, waits until the inner manager has closed it.
    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.shared.touch_session(id).await;
        self.shared.manager.has_session(id).await
    }

    /// Cancels a session's calls and then closes the session.
    ///
    /// The order matters: a closed session no longer accepts cancellations, so rmcp would let its handlers run for another 5 s.
    /// Does nothing if the current task served a session that has since ended or been replaced.
    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        // Let a task close only the session it served, not one that has since been restored under the same id.
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
        let session_use = self.shared.sessions.begin_use(id);
        let own_id = session_use
            .as_ref()
            .map_or(id, |session_use| session_use.id());
        let call = self.shared.bind(own_id, &mut message);
        let shared = &self.shared;
        let untracked = match &call {
            Some(_) => None,
            None => shared.untracked(id, &message, session_use.as_ref()),
        };
        let opened = shared.submit(id, message, call.as_ref(), untracked.as_deref());
        CreateStream::new(opened, call, untracked, self.seal_for(id), session_use)
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
        let target = cancels
            .clone()
            .and_then(|request| self.shared.find(id, request));
        let session_use = self.shared.sessions.begin_use(id);
        let accepted = self.shared.manager.accept_message(id, message);
        accepted.inspect_ok(move |()| {
            match (cancels, target, &session_use) {
                (Some(request), Some((target, _)), _) => {
                    self.shared.on_client_cancel(id, request, target);
                }
                // rmcp does not answer a cancelled call, so forget an untracked call now.
                (Some(request), None, Some(session_use)) => {
                    session_use.suppressed.forget_untracked(&request)
                }
                _ => {}
            }
            drop(session_use);
        })
    }

    fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let session_use = self.shared.sessions.begin_use(id);
        let opened = self.shared.manager.create_standalone_stream(id);
        let seal = self.seal_for(id);
        opened.map_ok(|stream| {
            let session_use =
                session_use.map(|session_use| session_use.with_stream(ClientStream::Standalone));
            without_suppressed(Sealed::new(stream, seal), session_use)
        })
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
            seal: self.seal_for(id),
            session_use: self.shared.sessions.begin_use(id),
        };
        resume.into_stream().await
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
            // `RestoreOutcome` is non-exhaustive, and an unknown outcome cannot be wrapped.
            _ => RestoreOutcome::NotSupported,
        })
    }

    fn event_store(&self) -> Option<Arc<dyn EventStore>> {
        let store = self.shared.manager.event_store()?;
        Some(self.event_id_key.wrap(store))
    }
}

impl<M> fmt::Debug for CancellableSessionManager<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CancellableSessionManager")
            .field("sessions", &self.shared.sessions.len())
            .field("idle_timeout", &self.idle_timeouts.idle)
            .field("lost_timeout", &self.idle_timeouts.lost)
            .field(
                "ignore_standalone_streams",
                &self.idle_timeouts.ignore_standalone_streams,
            )
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

    /// Another request finds and closes a session before its opening is reported.
    #[tokio::test]
    async fn a_session_that_closes_before_its_opening_is_reported_is_reported_in_order() {
        let reported = Arc::new(Mutex::new(Vec::new()));
        let listener = reported.clone();
        let manager = CancellableSessionManager::default().on_session(move |event| {
            let is_opened = matches!(event, SessionEvent::Opened { .. });
            listener.lock().unwrap().push(is_opened);
        });
        let (id, _transport) = manager.inner().create_session().await.unwrap();
        let listeners = manager.listeners.clone();
        let session = manager
            .shared
            .open_session(id.clone(), IdleTimeouts::default(), listeners);
        manager.close_session(&id).await.unwrap();
        assert!(reported.lock().unwrap().is_empty());

        session.notify_opened(false);

        assert_eq!(*reported.lock().unwrap(), [true, false]);
    }

    /// The inner manager takes a long time to close a session, which is restored in the meantime.
    #[tokio::test]
    async fn the_end_of_a_session_is_reported_before_the_opening_of_the_restored_one() {
        let reported = Arc::new(Mutex::new(Vec::new()));
        let listener = reported.clone();
        let manager = CancellableSessionManager::default().on_session(move |event| {
            let line = match event {
                SessionEvent::Opened { restored, .. } => format!("opened, restored: {restored}"),
                SessionEvent::Closed { reason, .. } => format!("closed: {reason}"),
            };
            listener.lock().unwrap().push(line);
        });
        let (id, _transport) = manager.create_session().await.unwrap();
        let sessions = &manager.shared.sessions;
        let ending = sessions.mark_ending(&id).unwrap();
        assert!(sessions.find(&id).is_none());
        assert!(
            sessions.mark_ending(&id).is_none(),
            "the session ended twice"
        );
        let listeners = manager.listeners.clone();
        let restored = manager
            .shared
            .open_session(id.clone(), IdleTimeouts::default(), listeners);
        restored.notify_opened(true);

        drop(ending);

        assert!(sessions.is_current(&restored));
        assert_eq!(
            *reported.lock().unwrap(),
            [
                "opened, restored: false",
                "closed: ended",
                "opened, restored: true"
            ]
        );
    }

    #[tokio::test]
    async fn a_session_that_the_inner_manager_does_not_close_is_found_again() {
        let manager = CancellableSessionManager::default();
        let (id, _transport) = manager.create_session().await.unwrap();
        let sessions = &manager.shared.sessions;

        sessions.mark_ending(&id).unwrap().reopen();

        assert!(sessions.find(&id).is_some());
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
    async fn a_closed_session_whose_service_panicked_is_removed() {
        let manager = CancellableSessionManager::default();
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
        assert!(session.upgrade().is_none(), "the session is kept forever");
    }
}
