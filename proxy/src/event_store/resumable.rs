//! A service that adds resumability to a server that has none.
//!
//! | request | what the service does |
//! |---|---|
//! | POST of a call in a session, before revision 2026-07-28 | reads the server's events into the event store, and sends them from there |
//! | POST of `initialize` | forwards it, and starts the session |
//! | POST of `notifications/cancelled` | forwards it; if the server accepts it, closes the server's stream for that call 1 s later |
//! | GET with an event id issued by the event store | answers it from the event store |
//! | DELETE | forwards it; if the server accepts it, ends the session's streams |
//! | any other request | forwards it |
//!
//! Requests are forwarded unchanged, except for the layer's cancellation, which is sent with the credentials and id of the call
//! that it cancels. A fast response to a call is also passed through unchanged, unless it is an event stream. If the response
//! is slow and the client supports priming events, the client's event stream starts before the server has sent its response
//! head.
//!
//! A client may resume with different credentials than it used for the call, such as a fresh token. The service then sends the
//! server a `ping` with the new credentials. The client only gets its stream if the server accepts them, by answering with a
//! result or with the error "method not found". Credentials are the URL's path and query, and all header fields not known to be
//! harmless.
//!
//! The latest credentials accepted for a call are also used to request the rest of its answer, and to send the layer's
//! cancellation. If the server refuses a cancellation sent with these credentials, the cancellation is resent once with the
//! latest credentials accepted in the session, if these differ.

use std::{
    convert::Infallible,
    mem,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use mcp_cancel_on_disconnect::CallToken;
use tower_service::Service;
use tracing::Instrument as _;

use super::{
    call::Call,
    credentials::SentCredentials,
    ping::Ping,
    session::Session,
    sessions::{EventStore, Lookup, unknown_event},
    stream::Stream,
    upstream::{Answer, PendingResponse, Writer},
    upstream_resume::UpstreamResume,
};
use crate::{
    headers::{
        EVENT_STREAM, FIRST_REVISION_WITH_PRIMING, LAST_EVENT_ID, PROTOCOL_VERSION, SESSION_ID,
        accepts, exactly_one, has_content_coding, has_content_type, has_sessions, same_value,
    },
    http_service::read_to_end,
    message::{IdKey, Kind, MAX_BODY, Message},
};

/// Minimum time the server must be silent before an event stream is started.
///
/// Most refusals arrive earlier than this, so they can still be passed through unchanged.
pub const MIN_COMMIT_AFTER: Duration = Duration::from_millis(250);

mod cancel;

/// Adds resumability to the server behind `S`.
///
/// ```
/// use std::{convert::Infallible, time::Duration};
/// use axum::body::Body;
/// use http::{Request, Response};
/// use mcp_cancel_proxy::event_store::{EventStore, Limits, Resumable};
///
/// let server = tower::service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::<Body>::default()));
/// let store = EventStore::new(Limits::default());
/// let service = Resumable::new(server, store).commit_after(Duration::from_secs(2));
/// # drop(service);
/// ```
#[derive(Debug, Clone)]
pub struct Resumable<S> {
    inner: S,
    store: EventStore,
    commit_after: Duration,
}

/// Evicts its stream on drop, unless the stream has been taken out.
struct UnopenedStream(Option<Stream>);

/// On drop, removes a session created for a single request, unless it is in use.
struct UnusedSession<'a>(EventStore, &'a str);

// === impl Resumable ===

impl<S> Resumable<S> {
    /// Creates a service that stores the event streams sent by `inner` in `store`.
    pub fn new(inner: S, store: EventStore) -> Self {
        Self {
            inner,
            store,
            commit_after: Duration::from_secs(1),
        }
    }

    /// Returns the server.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Returns the event store.
    pub fn event_store(&self) -> &EventStore {
        &self.store
    }

    /// Sets how long the server may be silent before a call's event stream is started.
    ///
    /// The default is 1 s. The minimum is [`MIN_COMMIT_AFTER`], and lower values are raised to it.
    pub fn commit_after(mut self, silence: Duration) -> Self {
        self.commit_after = silence.max(MIN_COMMIT_AFTER);
        self
    }
}

impl<S> Service<Request<Body>> for Resumable<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        // Call the service that was polled ready, rather than its clone.
        let inner = self.inner.clone();
        let this = Self {
            inner: mem::replace(&mut self.inner, inner),
            store: self.store.clone(),
            commit_after: self.commit_after,
        };
        Box::pin(async move { Ok(this.serve(request).await) })
    }
}

impl<S> Resumable<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    async fn serve(mut self, request: Request<Body>) -> Response<Body> {
        match *request.method() {
            Method::GET => self.get(request).await,
            Method::POST if may_have_sessions(request.headers()) => self.post(request).await,
            Method::DELETE => {
                let session = exactly_one(request.headers(), &SESSION_ID).map(str::to_owned);
                let known = session.as_ref().and_then(|id| self.store.session(id));
                // If the server ends the session's streams before it responds, their answers are not lost.
                let _pending_ends = known.map(|known| known.begin_end());
                let response = self.forward(request).await;
                if let Some(session) = session.filter(|_| response.status().is_success()) {
                    self.store.close(&session);
                }
                response
            }
            _ => self.forward(request).await,
        }
    }

    async fn forward(&mut self, request: Request<Body>) -> Response<Body> {
        match self.inner.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    /// Forwards a session's request unchanged, and stores its credentials if it is accepted.
    async fn forward_in_session(
        &mut self,
        session: Option<Session>,
        request: Request<Body>,
    ) -> Response<Body> {
        let accepting = session.map(|session| (session, SentCredentials::of(&request)));
        let response = self.forward(request).await;
        if let Some((session, sent)) = accepting.filter(|_| response.status().is_success()) {
            session.accept_credentials(sent);
        }
        response
    }

    /// Resumes a stream from the event store, once the server has accepted the client.
    ///
    /// A GET without an id issued by the event store is forwarded.
    async fn get(&mut self, request: Request<Body>) -> Response<Body> {
        let headers = request.headers();
        let id = exactly_one(headers, &SESSION_ID).unwrap_or_default();
        let session = self.store.session(id);
        let last = same_value(headers, &LAST_EVENT_ID);
        let Some(last) = last.filter(|last| self.store.owns(last)) else {
            return self.forward_in_session(session, request).await;
        };
        let Lookup::Stream(stream, seq) = self.store.look_up(id, last) else {
            return unknown_event();
        };
        if !stream.has_credentials_of(&request) {
            let sent = SentCredentials::of(&request);
            let _pending_check = stream.begin_check();
            let ping = Ping::new();
            let answer = self.forward(ping_request(request, &ping)).await;
            if let Some(refusal) = ping.refusal(answer).await {
                return refusal;
            }
            stream.accept_credentials(sent.credentials.clone());
            if let Some(session) = session {
                session.accept_credentials(sent);
            }
        }
        self.store.respond_after(&stream, seq)
    }

    async fn post(&mut self, request: Request<Body>) -> Response<Body> {
        if has_content_coding(request.headers()) {
            return self.forward(request).await;
        }
        let (parts, body) = request.into_parts();
        let body = match read_to_end(body, MAX_BODY).await {
            Ok(body) => body,
            Err(body) => return self.forward(Request::from_parts(parts, body)).await,
        };
        let session = exactly_one(&parts.headers, &SESSION_ID).map(str::to_owned);
        let Some(message) = Message::read(&body) else {
            return self
                .forward(Request::from_parts(parts, Body::from(body)))
                .await;
        };
        let has_method = |method: &str| message.method.as_deref() == Some(method);
        // A client's own cancellation already carries credentials and an id, but a cancellation from the layer needs those of
        // its call. Without a layer, requests have no token.
        let token = parts.extensions.get::<CallToken>();
        let is_from_layer = token.is_none_or(CallToken::is_replay);
        let with_body = |body: &Bytes| Request::from_parts(parts, Body::from(body.clone()));
        match (message.kind, session) {
            (Kind::Request, session) if has_method("initialize") => {
                let requested_revision = message.params().protocol_version.unwrap_or_default();
                let response = self.forward(with_body(&body)).await;
                let session_id =
                    exactly_one(response.headers(), &SESSION_ID).or(session.as_deref());
                if let Some(session) = session_id.filter(|_| response.status().is_success()) {
                    self.store.begin(session, Some(&requested_revision));
                }
                response
            }
            (Kind::Notification, Some(id)) if has_method("notifications/cancelled") => {
                let key = message.params().request_id.and_then(IdKey::of);
                let session = self.store.session(&id);
                let call = session
                    .clone()
                    .zip(key)
                    .and_then(|(session, key)| Some((session.find(&key)?, session)));
                let _pending_end = call.as_ref().map(|(stream, _)| stream.begin_end());
                let response = match &call {
                    Some((stream, session)) if is_from_layer => {
                        let cancel = with_body(&body).map(|_| body.clone());
                        self.cancel(stream, session, &message, cancel).await
                    }
                    _ => self.forward_in_session(session, with_body(&body)).await,
                };
                if let Some((stream, _)) = call.filter(|_| response.status().is_success()) {
                    stream.close_soon();
                }
                response
            }
            (Kind::Request, Some(session)) if has_session_revision(&message) => {
                let Some(call) = message.id.and_then(Call::new) else {
                    return self.forward(with_body(&body)).await;
                };
                let request = with_body(&body);
                drop(body);
                self.serve_call(&session, call, request).await
            }
            (_, session) => {
                let session = session.and_then(|session| self.store.session(&session));
                self.forward_in_session(session, with_body(&body)).await
            }
        }
    }

    /// Serves a call in a session.
    ///
    /// If the server answers with an event stream, or is silent for too long, the client reads from the event store. Any other
    /// response is passed through unchanged. If the store has no room for a call, the call is simply forwarded.
    async fn serve_call(&mut self, id: &str, call: Call, request: Request<Body>) -> Response<Body> {
        let sent = SentCredentials::of(&request);
        let call = call
            .token(request.extensions().get::<CallToken>().cloned())
            .credentials(sent.credentials.clone())
            .with_extra_bytes(sent.bytes);
        // The session may have started before the proxy did. Even then, this request's revision shows whether the client supports
        // priming events.
        let supports_priming = exactly_one(request.headers(), &PROTOCOL_VERSION)
            .is_some_and(|revision| revision >= FIRST_REVISION_WITH_PRIMING);
        let existing = self.store.session(id);
        let _unused_session = if existing.is_none() && supports_priming {
            Some(UnusedSession(self.store.clone(), id))
        } else {
            None
        };
        let session = match existing {
            None if supports_priming => self.store.begin(id, None),
            session => session,
        };
        if let Some(session) = session.as_ref().filter(|_| supports_priming) {
            session.set_primes(true);
        }
        let primes = session.as_ref().is_some_and(|session| session.primes());
        // Only the server knows whether an unknown session exists. So unless the session was started above, open the stream only
        // once the response has arrived.
        let (mut unopened, call) = match &session {
            Some(session) => match session.open(call) {
                Some(stream) => (UnopenedStream(Some(stream)), None),
                None => return self.forward(request).await,
            },
            None => (UnopenedStream(None), Some(call)),
        };
        let may_commit = primes && accepts(request.headers(), EVENT_STREAM);
        let resume = UpstreamResume::new(self.inner.clone(), &request);
        let pending = self.inner.call(request);
        let mut pending: PendingResponse = Box::pin(async move {
            let response = match pending.await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            if let Some(session) = session.filter(|_| response.status().is_success()) {
                session.accept_credentials(sent);
            }
            response
        });
        let response = if may_commit {
            tokio::time::timeout(self.commit_after, &mut pending)
                .await
                .ok()
        } else {
            Some((&mut pending).await)
        };
        let Some(response) = response else {
            let Some(stream) = unopened.0.take() else {
                return pending.await;
            };
            stream.prime();
            let response = stream.respond();
            spawn_writer(stream, resume, Answer::Pending(pending));
            return response;
        };
        let (mut head, body) = response.into_parts();
        let is_readable = head.status.is_success()
            && has_content_type(&head.headers, EVENT_STREAM)
            && !has_content_coding(&head.headers);
        if !is_readable {
            return Response::from_parts(head, body);
        }
        let opened = call.and_then(|call| self.store.begin(id, None)?.open(call));
        let Some(stream) = unopened.0.take().or(opened) else {
            return Response::from_parts(head, body);
        };
        if primes {
            stream.prime();
        }
        head.headers.remove(header::CONTENT_LENGTH);
        let response = Response::from_parts(head, stream.respond().into_body());
        spawn_writer(stream, resume, Answer::Events(body));
        response
    }
}

fn spawn_writer<S>(stream: Stream, resume: UpstreamResume<S>, answer: Answer)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Send + 'static,
    S::Future: Send + 'static,
{
    let writer = Writer::new(stream.clone(), resume);
    let task = tokio::spawn(writer.write(answer).in_current_span());
    stream.set_writer(task.abort_handle());
}

/// Turns a client's resume request into a `ping` with the same credentials.
fn ping_request(resume: Request<Body>, ping: &Ping) -> Request<Body> {
    let ping = ping.message();
    let (mut head, _) = resume.into_parts();
    head.method = Method::POST;
    // Otherwise, the `ping` would be mistaken for one of the client's calls.
    head.extensions.remove::<CallToken>();
    let headers = &mut head.headers;
    headers.remove(LAST_EVENT_ID);
    headers.insert(header::CONTENT_LENGTH, ping.len().into());
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(
        header::ACCEPT,
        HeaderValue::from_static("application/json, text/event-stream"),
    );
    Request::from_parts(head, Body::from(ping))
}

/// Returns `true` if the request's revision has sessions, or if the request states none.
fn may_have_sessions(headers: &HeaderMap) -> bool {
    if !headers.contains_key(PROTOCOL_VERSION) {
        return true;
    }
    exactly_one(headers, &PROTOCOL_VERSION).is_some_and(has_sessions)
}

/// Returns `true` if a message's `_meta` states no revision, or a revision that has sessions.
fn has_session_revision(message: &Message<'_>) -> bool {
    let revision = message.params().revision;
    revision.is_none_or(|revision| has_sessions(&revision))
}

// === impl UnusedSession ===

impl Drop for UnusedSession<'_> {
    fn drop(&mut self) {
        self.0.remove_unused(self.1);
    }
}

// === impl UnopenedStream ===

impl Drop for UnopenedStream {
    fn drop(&mut self) {
        if let Some(stream) = &self.0 {
            stream.evict();
        }
    }
}
