//! The service that gives resumability to a server that has none.
//!
//! | request | what becomes of it |
//! |---|---|
//! | POST of a call in a session, before revision 2026-07-28 | its stream of events is read here, and the client reads from the hub |
//! | POST of `initialize` | passes; begins the session |
//! | POST of `notifications/cancelled` | passes; if the server took it, its stream of that call is let go a second later |
//! | GET with an event id of the hub | answered here |
//! | DELETE | passes; if the server took it, the streams of its session end |
//! | everything else | passes |
//!
//! What passes is not altered. Of a call whose answer is JSON, and fast, the answer passes as well. If it is slow, and the
//! client can be told of an event id to come back with, an event stream begins without waiting for the server's head.
//!
//! A client that resumes with other credentials than the call had (it may have got a fresh token) gets its stream only if
//! the server answers a `ping` with these, with a result and not with an error. Credentials are the path and the query of
//! its URL, and all header fields that are not known to be harmless. The latest that were accepted are those with which the
//! rest of the answer is asked for, and with which the layer's cancel is sent.

use std::{
    convert::Infallible,
    mem,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, Request, Response, header, uri::PathAndQuery,
};
use mcp_cancel_on_disconnect::CallToken;
use tower_service::Service;
use tracing::Instrument as _;

use super::{
    again::Again,
    call::Call,
    credentials::Credentials,
    pong,
    sessions::{Hub, Lookup, unknown_event},
    stream::Stream,
    upstream::{Answer, Answering, Writer},
};
use crate::{
    head::{
        EVENT_STREAM, FIRST_PRIMED, LAST_EVENT_ID, PROTOCOL_VERSION, SESSION_ID, accepts,
        has_sessions, is_coded, is_of_type, one,
    },
    message::{IdKey, Kind, MAX_BODY, Message},
    stage::read_whole,
};

/// The shortest silence before an event stream begins: 250 ms. What a server refuses it refuses faster, and its head
/// should pass as it is.
pub const MIN_COMMIT_AFTER: Duration = Duration::from_millis(250);

/// Gives resumability to the server behind `S`.
///
/// ```
/// use std::{convert::Infallible, time::Duration};
/// use axum::body::Body;
/// use http::{Request, Response};
/// use mcp_cancel_proxy::hub::{Hub, Limits, Resumable};
///
/// let server = tower::service_fn(async |_: Request<Body>| Ok::<_, Infallible>(Response::<Body>::default()));
/// let hub = Hub::new(Limits::default());
/// let service = Resumable::new(server, hub).commit_after(Duration::from_secs(2));
/// # drop(service);
/// ```
#[derive(Debug, Clone)]
pub struct Resumable<S> {
    inner: S,
    hub: Hub,
    commit_after: Duration,
}

/// Forgets a stream unless its call turns out to have one.
struct Reserved(Option<Stream>);

/// Forgets a session of which nobody but a request spoke, unless the server has accepted a call in it.
struct Unused<'a>(Hub, &'a str);

// === impl Resumable ===

impl<S> Resumable<S> {
    /// Keeps the streams of `inner` in `hub`.
    pub fn new(inner: S, hub: Hub) -> Self {
        Self {
            inner,
            hub,
            commit_after: Duration::from_secs(1),
        }
    }

    /// The server.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// Where its streams are kept.
    pub fn hub(&self) -> &Hub {
        &self.hub
    }

    /// How long a call may be silent before its event stream begins, 1 s by default and [`MIN_COMMIT_AFTER`] at least.
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
        // The readied one is the one to be called.
        let inner = self.inner.clone();
        let this = Self {
            inner: mem::replace(&mut self.inner, inner),
            hub: self.hub.clone(),
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
            Method::POST if may_be_older(request.headers()) => self.post(request).await,
            Method::DELETE => {
                let session = one(request.headers(), &SESSION_ID).map(str::to_owned);
                let response = self.pass(request).await;
                if let Some(session) = session.filter(|_| response.status().is_success()) {
                    self.hub.close(&session);
                }
                response
            }
            _ => self.pass(request).await,
        }
    }

    /// Hands a request on, as it is.
    async fn pass(&mut self, request: Request<Body>) -> Response<Body> {
        match self.inner.call(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        }
    }

    async fn get(&mut self, request: Request<Body>) -> Response<Body> {
        let headers = request.headers();
        let Some(last) = one(headers, &LAST_EVENT_ID).filter(|last| self.hub.owns(last)) else {
            return self.pass(request).await;
        };
        let session = one(headers, &SESSION_ID).unwrap_or_default();
        let Lookup::Stream(stream, seq) = self.hub.look_up(session, last) else {
            return unknown_event();
        };
        if !stream.is_of(&request) {
            let credentials = Credentials::of(&request);
            let _question = stream.question();
            let answer = self.pass(ping(request)).await;
            if let Some(refused) = pong::refused(answer).await {
                return refused;
            }
            stream.accept(credentials);
        }
        self.hub.respond_after(&stream, seq)
    }

    async fn post(&mut self, request: Request<Body>) -> Response<Body> {
        if is_coded(request.headers()) {
            return self.pass(request).await;
        }
        let (parts, body) = request.into_parts();
        let body = match read_whole(body, MAX_BODY).await {
            Ok(body) => body,
            Err(body) => return self.pass(Request::from_parts(parts, body)).await,
        };
        let session = one(&parts.headers, &SESSION_ID).map(str::to_owned);
        let Some(message) = Message::read(&body) else {
            return self
                .pass(Request::from_parts(parts, Body::from(body)))
                .await;
        };
        let is = |method: &str| message.method.as_deref() == Some(method);
        // A cancel that the layer replays is its own, about a call whose client has left.
        let token = parts.extensions.get::<CallToken>();
        let is_layers = token.is_none_or(CallToken::is_replay);
        let again = |body: &Bytes| Request::from_parts(parts, Body::from(body.clone()));
        match (message.kind, session) {
            (Kind::Request, session) if is("initialize") => {
                let asked_for = message.params().protocol_version.unwrap_or_default();
                let response = self.pass(again(&body)).await;
                let given = one(response.headers(), &SESSION_ID).or(session.as_deref());
                if let Some(session) = given.filter(|_| response.status().is_success()) {
                    self.hub.begin(session, Some(&asked_for));
                }
                response
            }
            (Kind::Notification, Some(session)) if is("notifications/cancelled") => {
                let key = message.params().request_id.and_then(IdKey::of);
                let session = self.hub.session(&session);
                let stream = session
                    .zip(key)
                    .and_then(|(session, key)| session.find(&key));
                let mut request = again(&body);
                if let Some(stream) = stream.as_ref().filter(|_| is_layers) {
                    if let Some(credentials) = stream.credentials() {
                        credentials.put_on(&mut request);
                    }
                    if let Some(id) = stream.call_text() {
                        request = with_request_id(request, &body, &message, id);
                    }
                }
                let response = self.pass(request).await;
                if let Some(stream) = stream.filter(|_| response.status().is_success()) {
                    stream.let_go();
                }
                response
            }
            (Kind::Request, Some(session)) if is_older(&message) => {
                let Some(call) = message.id.and_then(Call::new) else {
                    return self.pass(again(&body)).await;
                };
                let request = again(&body);
                drop(body);
                self.call_in(&session, call, request).await
            }
            _ => self.pass(again(&body)).await,
        }
    }

    /// A call in a session.
    async fn call_in(&mut self, id: &str, call: Call, request: Request<Body>) -> Response<Body> {
        let call = call
            .token(request.extensions().get::<CallToken>().cloned())
            .credentials(Credentials::of(&request))
            .besides(size_of_head(&request));
        // The proxy may have been started since the session began. A client of this revision knows events without a message.
        let says_so = one(request.headers(), &PROTOCOL_VERSION)
            .is_some_and(|revision| revision >= FIRST_PRIMED);
        let known = self.hub.session(id);
        let _unused = if known.is_none() && says_so {
            Some(Unused(self.hub.clone(), id))
        } else {
            None
        };
        let session = match known {
            None if says_so => self.hub.begin(id, None),
            session => session,
        };
        if let Some(session) = session.as_ref().filter(|_| says_so) {
            session.set_primes(true);
        }
        let primes = session.as_ref().is_some_and(|session| session.primes());
        // A session that is not known yet may not be one: its server decides.
        let (mut reserved, call) = match session {
            Some(session) => match session.open(call) {
                Some(stream) => (Reserved(Some(stream)), None),
                None => return self.pass(request).await,
            },
            None => (Reserved(None), Some(call)),
        };
        let may_commit = primes && accepts(request.headers(), EVENT_STREAM);
        let again = Again::new(self.inner.clone(), &request);
        let answering = self.inner.call(request);
        let mut answering: Answering = Box::pin(async move {
            match answering.await {
                Ok(response) => response,
                Err(never) => match never {},
            }
        });
        let response = if may_commit {
            tokio::time::timeout(self.commit_after, &mut answering)
                .await
                .ok()
        } else {
            Some((&mut answering).await)
        };
        let Some(response) = response else {
            let Some(stream) = reserved.0.take() else {
                return answering.await;
            };
            stream.prime();
            let response = stream.respond();
            spawn(stream, again, Answer::Answering(answering));
            return response;
        };
        let (mut head, body) = response.into_parts();
        let is_readable = head.status.is_success()
            && is_of_type(&head.headers, EVENT_STREAM)
            && !is_coded(&head.headers);
        if !is_readable {
            return Response::from_parts(head, body);
        }
        let opened = call.and_then(|call| self.hub.begin(id, None)?.open(call));
        let Some(stream) = reserved.0.take().or(opened) else {
            return Response::from_parts(head, body);
        };
        if primes {
            stream.prime();
        }
        head.headers.remove(header::CONTENT_LENGTH);
        let response = Response::from_parts(head, stream.respond().into_body());
        spawn(stream, again, Answer::Events(body));
        response
    }
}

fn spawn<S>(stream: Stream, again: Again<S>, answer: Answer)
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
    S: Send + 'static,
    S::Future: Send + 'static,
{
    let writer = Writer::new(stream.clone(), again);
    let task = tokio::spawn(writer.write(answer).in_current_span());
    stream.written_by(task.abort_handle());
}

/// The same cancel with the id of the call as its client wrote it: to a server `1` and `1.0` may differ.
fn with_request_id(
    request: Request<Body>,
    body: &Bytes,
    message: &Message<'_>,
    id: &str,
) -> Request<Body> {
    let Some(body) = message.with_request_id(body, id) else {
        return request;
    };
    let mut request = request.map(|_| Body::empty());
    let length = body.len().into();
    request.headers_mut().insert(header::CONTENT_LENGTH, length);
    request.map(|_| Body::from(body))
}

/// Has the server judge who comes back.
fn ping(resume: Request<Body>) -> Request<Body> {
    let id = pong::ID;
    let ping = Bytes::from(format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#));
    let (mut head, _) = resume.into_parts();
    head.method = Method::POST;
    // It is no call of the client's.
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

/// What the head of a request takes, about.
fn size_of_head(request: &Request<Body>) -> usize {
    let of_header =
        |(name, value): (&HeaderName, &HeaderValue)| 96 + name.as_str().len() + value.len();
    let headers: usize = request.headers().iter().map(of_header).sum();
    headers
        + size_of::<PathAndQuery>()
        + request.uri().path().len()
        + request.uri().query().map_or(0, str::len)
}

/// Whether a request can be of a revision with sessions. One that names something else than a date is not known to be.
fn may_be_older(headers: &HeaderMap) -> bool {
    if !headers.contains_key(PROTOCOL_VERSION) {
        return true;
    }
    one(headers, &PROTOCOL_VERSION).is_some_and(has_sessions)
}

fn is_older(message: &Message<'_>) -> bool {
    let revision = message.params().revision;
    revision.is_none_or(|revision| has_sessions(&revision))
}

// === impl Unused ===

impl Drop for Unused<'_> {
    fn drop(&mut self) {
        self.0.forget_unused(self.1);
    }
}

// === impl Reserved ===

impl Drop for Reserved {
    fn drop(&mut self) {
        if let Some(stream) = &self.0 {
            stream.forget();
        }
    }
}
