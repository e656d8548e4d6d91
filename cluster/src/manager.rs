//! The session manager that says whose events are: the outermost, around the one that knows the calls.
//!
//! 1. An event id leaves as `<plain>~<life of the session>~<request id>`, and the layer has cut it back before anything inside reads it.
//!    So two instances never mean different events by the same id.
//! 2. What it changes of an event is its id alone.

use std::{
    fmt,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
};

use async_trait::async_trait;
use futures_util::{Stream, TryFutureExt};
use mcp_cancel_on_disconnect::{
    CancellableSessionManager, observe::SessionEvent, transport::CancellableTransport,
};
use pin_project_lite::pin_project;
use rmcp::{
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::streamable_http_server::{
        RestoreOutcome, SessionManager,
        session::{EventStore, ServerSseMessage, SessionId},
    },
};
use tracing::warn;

use crate::{
    answers::{self, Answers, Call},
    door::Visit,
    ids::Incarnation,
    lives::Lives,
    resumed::resumed_call,
    sessions::Sessions,
    transport::ClusterTransport,
};

/// A session manager whose events say which instance they are of. [`Cluster::sessions`](crate::Cluster::sessions) makes it, and
/// has an example.
pub struct ClusterSessionManager<M> {
    inner: Arc<CancellableSessionManager<M>>,
    answers: Arc<Answers>,
    lives: Arc<Lives>,
    sessions: Arc<Sessions>,
}

/// What can close a session that is another instance's by now.
#[async_trait]
pub(crate) trait Closes: Send + Sync {
    async fn close(&self, session: &str);
}

pin_project! {
    /// A stream of which the events say whose they are.
    struct Signed<S> {
        #[pin]
        events: S,
        watched: Watched,
    }
}

/// A stream, and whether it has brought the answer of its call. Dropped before that, its client has gone.
struct Watched {
    answers: Arc<Answers>,
    /// The one of its session.
    life: Incarnation,
    call: Option<Call>,
    is_answered: bool,
    /// As long as a stream of a call is open, somebody is inside of its session.
    _visit: Option<Visit>,
}

// === impl ClusterSessionManager ===

impl<M: SessionManager> ClusterSessionManager<M> {
    /// Has `sessions` know of all sessions of `manager`. Also returns what closes those that are lost.
    pub(crate) fn new(
        manager: CancellableSessionManager<M>,
        sessions: Arc<Sessions>,
        answers: Arc<Answers>,
        lives: Arc<Lives>,
    ) -> (Self, Weak<dyn Closes>) {
        let (of_sessions, their_lives, listed) = (answers.clone(), lives.clone(), sessions.clone());
        let inner = Arc::new(manager.on_session(move |event| match event {
            SessionEvent::Opened {
                session, restored, ..
            } => {
                their_lives.begin(session, *restored);
                listed.opened(session);
            }
            SessionEvent::Closed { session, .. } => {
                listed.closed(session);
                of_sessions.closed(session);
                their_lives.end(session);
            }
            _ => {}
        }));
        let closes: Weak<dyn Closes> = Arc::<CancellableSessionManager<M>>::downgrade(&inner);
        (
            Self {
                inner,
                answers,
                lives,
                sessions,
            },
            closes,
        )
    }

    fn sign<S>(&self, events: S, session: &str, call: Option<Call>) -> Signed<S> {
        let watched = Watched {
            answers: self.answers.clone(),
            life: self.lives.of(session),
            _visit: call.as_ref().and_then(|_| self.sessions.enter(session)),
            call,
            is_answered: false,
        };
        Signed { events, watched }
    }

    fn transport(
        &self,
        id: &SessionId,
        transport: CancellableTransport<M::Transport>,
    ) -> ClusterTransport<CancellableTransport<M::Transport>> {
        ClusterTransport::new(
            transport,
            id.clone(),
            self.lives.of(id),
            self.answers.clone(),
        )
    }
}

impl<M: SessionManager> SessionManager for ClusterSessionManager<M> {
    type Error = M::Error;
    type Transport = ClusterTransport<CancellableTransport<M::Transport>>;

    fn create_session(
        &self,
    ) -> impl Future<Output = Result<(SessionId, Self::Transport), Self::Error>> + Send {
        let created = self.inner.create_session();
        created.map_ok(|(id, transport)| {
            let transport = self.transport(&id, transport);
            (id, transport)
        })
    }

    fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<ServerJsonRpcMessage, Self::Error>> + Send {
        self.inner.initialize_session(id, message)
    }

    fn has_session(
        &self,
        id: &SessionId,
    ) -> impl Future<Output = Result<bool, Self::Error>> + Send {
        self.inner.has_session(id)
    }

    fn close_session(
        &self,
        id: &SessionId,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send {
        self.inner.close_session(id)
    }

    fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let request = match &message {
            ClientJsonRpcMessage::Request(request) => Some(&request.id),
            _ => None,
        };
        let call = request.map(|request| Call::new(id.clone(), request));
        let opened = self.inner.create_stream(id, message);
        opened.map_ok(move |events| self.sign(events, id, call))
    }

    fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send {
        self.inner.accept_message(id, message)
    }

    fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let opened = self.inner.create_standalone_stream(id);
        opened.map_ok(|events| self.sign(events, id, None))
    }

    fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let call = resumed_call().and_then(|request| Call::read(id.clone(), &request));
        let resumed = self.inner.resume(id, last_event_id);
        resumed.map_ok(move |events| {
            if let Some(call) = &call {
                self.answers.back(call);
            }
            self.sign(events, id, call)
        })
    }

    fn restore_session(
        &self,
        id: SessionId,
    ) -> impl Future<Output = Result<RestoreOutcome<Self::Transport>, Self::Error>> + Send {
        let restored = self.inner.restore_session(id.clone());
        restored.map_ok(move |outcome| match outcome {
            RestoreOutcome::Restored(transport) => {
                RestoreOutcome::Restored(self.transport(&id, transport))
            }
            RestoreOutcome::AlreadyPresent => RestoreOutcome::AlreadyPresent,
            // `RestoreOutcome` is non-exhaustive: an outcome that is not known cannot be wrapped.
            _ => RestoreOutcome::NotSupported,
        })
    }

    fn event_store(&self) -> Option<Arc<dyn EventStore>> {
        self.inner.event_store()
    }
}

impl<M> fmt::Debug for ClusterSessionManager<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterSessionManager")
            .field("inner", &self.inner)
            .finish_non_exhaustive()
    }
}

#[async_trait]
impl<M: SessionManager> Closes for CancellableSessionManager<M> {
    async fn close(&self, session: &str) {
        let id: SessionId = session.into();
        if let Ok(true) = self.has_session(&id).await
            && let Err(error) = self.close_session(&id).await
        {
            warn!(target: "mcp_cancel_cluster", %error, "a session of another instance is not closed here");
        }
    }
}

// === impl Signed ===

impl<S: Stream<Item = ServerSseMessage>> Stream for Signed<S> {
    type Item = ServerSseMessage;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<ServerSseMessage>> {
        let this = self.project();
        let Some(mut event) = ready!(this.events.poll_next(cx)) else {
            return Poll::Ready(None);
        };
        if let Some(id) = &mut event.event_id {
            Answers::sign(id, this.watched.life, this.watched.call.as_ref());
        }
        if let Some(message) = event.message.as_deref() {
            this.watched.pass(message);
        }
        Poll::Ready(Some(event))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.events.size_hint()
    }
}

// === impl Watched ===

impl Watched {
    fn pass(&mut self, message: &ServerJsonRpcMessage) {
        let call = self.call.as_ref().zip(answers::answered(message));
        self.is_answered |= call.is_some_and(|(call, request)| call.is(request));
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        if let Some(call) = self.call.take().filter(|_| !self.is_answered) {
            self.answers.gone(call, self.life);
        }
    }
}
