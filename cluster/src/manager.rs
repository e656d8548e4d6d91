//! Wraps the call-tracking session manager to tag event ids with their origin.
//!
//! 1. An event id is sent as `<plain>~<session generation>~<call number>~<request id>`. The number and the request id are omitted if the
//!    event does not belong to a call. When a client resumes, the layer rewrites the id to `<plain>` before any inner service reads it. The
//!    tag keeps two instances from using the same id for different events, and a reused request id from referring to two calls.
//! 2. Apart from its id, an event is passed through unchanged.
//! 3. If it is undecided whether a call's session is still local, the call waits. If there is still no decision after
//!    [`UNDECIDED_TIMEOUT`], the call gets an error instead of being started.

use std::{
    fmt, mem,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::{self, Context, Poll},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::{
    FutureExt as _, Stream, TryFutureExt as _,
    future::{Either, ready},
    stream,
};
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
use tokio::time::timeout;
use tracing::warn;

use crate::{
    answers::{AnswerSource, Answers, Call, DetachedCall},
    ids::{Incarnation, SessionHash},
    membership::heartbeat::Heartbeat,
    routing::{
        request_context::{on_resumed, resumed_call},
        resume::NO_EVENT,
        router::WaitingCalls,
    },
    sessions::{Sessions, drain_gate::InFlightGuard, generations::Generations},
};

pub(crate) mod messages;

use self::messages::{cancelled_call, not_started};

/// A session manager that tags event ids with their origin.
///
/// Created by [`Cluster::sessions`](crate::Cluster::sessions), which has an example.
pub struct ClusterSessionManager<M> {
    inner: Arc<CancellableSessionManager<M>>,
    recorder: Arc<AnswerRecorder>,
    generations: Arc<Generations>,
    sessions: Arc<Sessions>,
    heartbeat: Arc<Heartbeat>,
    waiting_calls: WaitingCalls,
    /// Whether the manager's service has been checked for a session store. A missing store is logged only once.
    is_store_checked: AtomicBool,
}

/// State that a session manager's streams share in order to store answers.
struct AnswerRecorder {
    answers: Arc<Answers>,
    source: Weak<dyn AnswerSource>,
}

/// Closes sessions through their session manager.
#[async_trait]
pub(crate) trait CloseSession: Send + Sync {
    /// Returns `true` if the manager has the session.
    async fn has(&self, session: &str) -> bool;

    /// Closes the session if the manager has it, and logs any failure.
    async fn close(&self, session: &str);
}

/// How long a call waits for the decision on whether its session is still local.
///
/// As long as the directory responds, the decision takes less time than this.
const UNDECIDED_TIMEOUT: Duration = Duration::from_secs(10);

pin_project! {
    /// A stream whose event ids are tagged with their origin.
    struct TaggedStream<S> {
        #[pin]
        events: S,
        tracked: TrackedStream,
    }
}

/// Tracks what a stream has sent, in case it is dropped before the answer has been read.
struct TrackedStream {
    recorder: Arc<AnswerRecorder>,
    /// The session's generation.
    generation: Incarnation,
    call: Option<Call>,
    /// The suffix of the stream's event ids.
    event_suffix: String,
    /// The plain id of the last event before the answer. While it is empty, the client cannot resume.
    event: String,
    is_answered: bool,
    has_ended: bool,
    /// Keeps the call in flight in its session's gate while the stream is open.
    _guard: Option<InFlightGuard>,
}

// === impl ClusterSessionManager ===

impl<M: SessionManager> ClusterSessionManager<M> {
    /// Wraps a session manager and registers its sessions with `sessions`.
    ///
    /// Also returns the handle for closing relinquished sessions.
    pub(crate) fn new(
        manager: CancellableSessionManager<M>,
        sessions: Arc<Sessions>,
        answers: Arc<Answers>,
        generations: Arc<Generations>,
        heartbeat: Arc<Heartbeat>,
        waiting_calls: WaitingCalls,
    ) -> (Self, Weak<dyn CloseSession>) {
        let (observed_answers, observed_generations, observed_sessions) =
            (answers.clone(), generations.clone(), sessions.clone());
        let inner = Arc::new(manager.on_session(move |event| match event {
            SessionEvent::Opened {
                session, restored, ..
            } => {
                observed_generations.begin(session, *restored);
                observed_sessions.on_opened(session, *restored);
            }
            SessionEvent::Closed { session, .. } => {
                observed_sessions.on_closed(session);
                observed_answers.on_session_closed(session);
                observed_generations.end(session);
            }
            _ => {}
        }));
        let closer: Weak<dyn CloseSession> = Arc::<CancellableSessionManager<M>>::downgrade(&inner);
        let source: Weak<dyn AnswerSource> = Arc::<CancellableSessionManager<M>>::downgrade(&inner);
        let recorder = Arc::new(AnswerRecorder { answers, source });
        (
            Self {
                inner,
                recorder,
                generations,
                sessions,
                heartbeat,
                waiting_calls,
                is_store_checked: AtomicBool::new(false),
            },
            closer,
        )
    }

    /// Checks, on the first call in a local session, whether its service has a session store.
    ///
    /// Logs a warning if it has none. A store would already have received the session's parameters by now.
    #[cold]
    fn check_store(&self, session: &str) {
        if let Some(has_params) = self.sessions.has_params(session)
            && !self.is_store_checked.swap(true, Ordering::Relaxed)
            && !has_params
        {
            warn!(target: "mcp_cancel_cluster", "this service's sessions are not in the directory, so other instances cannot find them and their orphaned calls are not cancelled: its `StreamableHttpServerConfig` needs `session_store = Some(Arc::new(cluster.clone()))`");
        }
    }

    /// Tags a stream's event ids. `event` is the plain id of the last event its client has received, or empty if there is none.
    fn tag<S>(
        &self,
        events: S,
        session: &str,
        call: Option<Call>,
        guard: Option<InFlightGuard>,
        event: String,
    ) -> TaggedStream<S> {
        let generation = self.generations.get(session);
        let tracked = TrackedStream {
            recorder: self.recorder.clone(),
            generation,
            event_suffix: Answers::event_suffix(generation, call.as_ref()),
            _guard: guard,
            call,
            event,
            is_answered: false,
            has_ended: false,
        };
        TaggedStream { events, tracked }
    }
}

impl<M: SessionManager> SessionManager for ClusterSessionManager<M> {
    type Error = M::Error;
    type Transport = CancellableTransport<M::Transport>;

    fn create_session(
        &self,
    ) -> impl Future<Output = Result<(SessionId, Self::Transport), Self::Error>> + Send {
        self.inner.create_session()
    }

    fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<ServerJsonRpcMessage, Self::Error>> + Send {
        let replay = self.sessions.begin_replay(id);
        let initialize = self.inner.initialize_session(id, message);
        // Not an async block, because that would store the inner future twice.
        initialize.inspect(move |initialized| {
            if let Some(replay) = replay {
                replay.complete();
            }
            if let Ok(ServerJsonRpcMessage::Response(_)) = initialized {
                self.sessions.on_initialize_accepted(id);
            }
        })
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
        if !self.is_store_checked.load(Ordering::Relaxed) {
            self.check_store(id);
        }
        let call = request.map(|request| {
            let number = self.recorder.answers.next_number();
            Call::new(id.clone(), request, number)
        });
        let is_call = call.is_some();
        let enter = move || is_call.then(|| self.sessions.enter(id)).flatten();
        let guard = enter();
        // Since the request was routed, this process may have stalled, or the session may have been relinquished and be about to close.
        let is_here = guard.is_some() || !is_call;
        let create = if is_here && self.heartbeat.may_serve(id) {
            let create = self.inner.create_stream(id, message);
            Either::Left(create.map_ok(|events| (Either::Left(events), guard)))
        } else {
            Either::Right(Box::pin(async move {
                let decision = timeout(UNDECIDED_TIMEOUT, self.heartbeat.wait_until_decided(id));
                if decision.await.is_err() {
                    let not_started = stream::once(ready(not_started(&message)));
                    return Ok((Either::Right(not_started), None));
                }
                // Re-enter, because a session closed and restored in the meantime has a new gate.
                drop(guard);
                let guard = enter();
                let created = self.inner.create_stream(id, message).await?;
                Ok((Either::Left(created), guard))
            }))
        };
        create.map_ok(|(events, guard)| self.tag(events, id, call, guard, String::new()))
    }

    fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), Self::Error>> + Send {
        let cancelled = cancelled_call(&message);
        self.inner
            .accept_message(id, message)
            .inspect_ok(move |()| {
                if let Some(call) = cancelled {
                    self.waiting_calls.cancel(SessionHash::of(id), &call);
                }
            })
    }

    fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        let open = self.inner.create_standalone_stream(id);
        open.map_ok(|events| self.tag(events, id, None, None, String::new()))
    }

    fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> impl Future<
        Output = Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error>,
    > + Send {
        on_resumed();
        let mut call = None;
        let mut last_event_id = last_event_id;
        if let Some((generation, named_call)) = resumed_call() {
            if generation == self.generations.get(id) {
                call = named_call.and_then(|named_call| Call::parse(id.clone(), &named_call));
            } else {
                // The session was restored while a layer was delaying the request, so its events are now numbered differently.
                NO_EVENT.clone_into(&mut last_event_id);
            }
        }
        let resume = self.inner.resume(id, last_event_id.clone());
        resume.map_ok(move |events| {
            if let Some(call) = &call {
                self.recorder.answers.on_resumed(call);
            }
            let guard = call.as_ref().and_then(|_| self.sessions.enter(id));
            self.tag(events, id, call, guard, last_event_id)
        })
    }

    async fn restore_session(
        &self,
        id: SessionId,
    ) -> Result<RestoreOutcome<Self::Transport>, Self::Error> {
        let session = SessionHash::of(&id);
        let step = self.sessions.restore_attempts.begin_step(session);
        let restored = self.inner.restore_session(id).await;
        step.complete();
        restored
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
impl<M: SessionManager> CloseSession for CancellableSessionManager<M> {
    async fn has(&self, session: &str) -> bool {
        matches!(self.has_session(&session.into()).await, Ok(true))
    }

    async fn close(&self, session: &str) {
        let id: SessionId = session.into();
        if self.has(session).await
            && let Err(error) = self.close_session(&id).await
        {
            warn!(target: "mcp_cancel_cluster", %error, "could not close a session on this instance");
        }
    }
}

impl<M: SessionManager> AnswerSource for CancellableSessionManager<M> {
    fn answer(&self, session: &str, event: &str) -> Option<Arc<ServerJsonRpcMessage>> {
        self.kept_answer(session, event)
    }
}

// === impl TaggedStream ===

impl<S: Stream<Item = ServerSseMessage>> Stream for TaggedStream<S> {
    type Item = ServerSseMessage;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<ServerSseMessage>> {
        let this = self.project();
        let Some(mut event) = task::ready!(this.events.poll_next(cx)) else {
            this.tracked.has_ended = true;
            return Poll::Ready(None);
        };
        this.tracked.tag(&mut event);
        Poll::Ready(Some(event))
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.events.size_hint()
    }
}

// === impl TrackedStream ===

impl TrackedStream {
    /// Tags an event's id, and records whether the event is the answer.
    fn tag(&mut self, event: &mut ServerSseMessage) {
        if let Some((call, message)) = self.call.as_ref().zip(event.message.as_deref()) {
            self.is_answered |= call.is_answered_by(message);
        }
        if let Some(id) = &mut event.event_id {
            let mut tagged = String::with_capacity(id.len() + self.event_suffix.len());
            tagged.push_str(id);
            tagged.push_str(&self.event_suffix);
            let plain = mem::replace(id, tagged);
            if !self.is_answered {
                self.event = plain;
            }
        }
    }
}

impl Drop for TrackedStream {
    fn drop(&mut self) {
        let is_read = self.is_answered && self.has_ended;
        // Without an event id, no client could resume to get the answer.
        if let Some(call) = self.call.take()
            && (!is_read || self.recorder.answers.retains_all())
            && !self.event.is_empty()
        {
            self.recorder.answers.on_detached(DetachedCall {
                call,
                generation: self.generation,
                event: mem::take(&mut self.event),
                source: self.recorder.source.clone(),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use rmcp::transport::streamable_http_server::session::local::SessionConfig;
    use serde_json::json;

    use super::*;
    use crate::{Cluster, MemoryDirectory};

    /// How many bytes larger than the inner manager's a future may be.
    const OVERHEAD: usize = 128;

    /// rmcp embeds these futures in its own and moves them for every request. An `async` block that awaits one would store it twice.
    #[tokio::test]
    async fn no_future_is_much_larger_than_that_of_the_inner_manager() {
        let cluster = Cluster::in_memory(&MemoryDirectory::default()).advertise("127.0.0.1:9");
        let cluster = cluster.connect().await.unwrap();
        let [inner, wrapped] =
            [(); 2].map(|()| CancellableSessionManager::local(SessionConfig::default()));
        let sessions = cluster.sessions(wrapped);
        let id: SessionId = "a".into();
        let message = || -> ClientJsonRpcMessage {
            serde_json::from_value(json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" })).unwrap()
        };
        for (name, size, inner) in [
            (
                "initialize_session",
                size_of_val(&sessions.initialize_session(&id, message())),
                size_of_val(&inner.initialize_session(&id, message())),
            ),
            (
                "create_stream",
                size_of_val(&sessions.create_stream(&id, message())),
                size_of_val(&inner.create_stream(&id, message())),
            ),
            (
                "accept_message",
                size_of_val(&sessions.accept_message(&id, message())),
                size_of_val(&inner.accept_message(&id, message())),
            ),
            (
                "resume",
                size_of_val(&sessions.resume(&id, String::new())),
                size_of_val(&inner.resume(&id, String::new())),
            ),
            (
                "restore_session",
                size_of_val(&sessions.restore_session(id.clone())),
                size_of_val(&inner.restore_session(id.clone())),
            ),
        ] {
            assert!(size <= inner + OVERHEAD, "{name}: {size}, inner {inner}");
        }
    }
}
