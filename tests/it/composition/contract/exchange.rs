//! Requests that pass through a layer without a socket or a runtime.

use std::{
    convert::Infallible,
    future::ready,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Method, Request, Response, header};
use http_body::Body;
use http_body_util::{BodyExt as _, Full};
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancelReason, Grace, Outcome,
    body::{ResponseBody, TeeBody},
};
use tower::{Layer as _, Service, ServiceExt as _, service_fn};

use super::script::{Script, Scripted};
use crate::log::{Log, number};

/// The call in the requests below.
pub(super) const CALL: &str =
    r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"hold","arguments":{}}}"#;

/// The request that the inner service receives.
pub(super) type InnerRequest = Request<TeeBody<Full<Bytes>>>;

/// The inner service's result.
pub(super) type Answer<E> = Result<Response<Scripted>, E>;

/// The layer's result.
type Passed<E> = Result<Response<ResponseBody<Scripted>>, E>;

/// The kind of request that passes through the layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A request that has nothing to do with MCP.
    Plain,
    /// A call without a session.
    Stateless,
    /// A call in a session.
    Session,
}

/// The latest request's token, as the inner service found it. All clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Tokens(Arc<Mutex<Option<CallToken>>>);

/// What a destructor found in the token when it ran. All clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct TokenAtDrop(Arc<Mutex<Option<Option<CancelReason>>>>);

/// Records, in its destructor, whether the token has fired by then.
#[derive(Debug)]
pub(super) struct RecordsTokenOnDrop {
    token: CallToken,
    at_drop: TokenAtDrop,
}

// === impl Kind ===

impl Kind {
    pub(super) const ALL: [Self; 3] = [Self::Plain, Self::Stateless, Self::Session];

    pub(super) fn is_call(self) -> bool {
        self != Self::Plain
    }

    pub(super) fn request(self) -> Request<Full<Bytes>> {
        self.request_with(Full::from(CALL))
    }

    pub(super) fn request_with<B>(self, body: B) -> Request<B> {
        let request = Request::post("/mcp");
        let request = match self {
            Self::Plain => request.header(header::CONTENT_TYPE, "text/plain"),
            Self::Stateless | Self::Session => {
                request.header(header::CONTENT_TYPE, "application/json")
            }
        };
        let request = match self {
            Self::Session => request.header("mcp-session-id", "the-session"),
            Self::Plain | Self::Stateless => request,
        };
        request.body(body).expect("a request")
    }
}

/// Returns a layer without a grace period, and its log.
pub(super) fn immediate() -> (CancelOnDisconnectLayer, Log) {
    Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate))
}

/// Returns a service that reads the request in full and then runs `rest`.
pub(super) fn reading<B, F, E, R>(
    tokens: &Tokens,
    rest: R,
) -> impl Service<Request<B>, Response = Response<Scripted>, Error = E, Future: Send + 'static>
+ Clone
+ Send
+ 'static
+ use<B, F, E, R>
where
    R: Fn(&Tokens) -> F + Clone + Send + 'static,
    B: Body<Data = Bytes, Error = Infallible> + Send + 'static,
    F: Future<Output = Answer<E>> + Send + 'static,
{
    let tokens = tokens.clone();
    service_fn(move |request: Request<B>| {
        let (tokens, rest) = (tokens.clone(), rest.clone());
        async move {
            tokens.record(&request);
            let Ok(_whole) = request.into_body().collect().await;
            rest(&tokens).await
        }
    })
}

/// Sends a request through `layer` to a service that answers at once with `answer`.
pub(super) fn respond(
    layer: &CancelOnDisconnectLayer,
    request: Request<Full<Bytes>>,
    answer: impl Fn(&Tokens) -> Response<Scripted> + Clone + Send + 'static,
) -> (Response<ResponseBody<Scripted>>, CallToken) {
    let tokens = Tokens::default();
    let service = layer.layer(reading(&tokens, move |tokens| ready(Ok(answer(tokens)))));
    let response = service.oneshot(request).now_or_never();
    let response: Result<_, Infallible> = response.expect("the service answers at once");
    let Ok(response) = response;
    (response, tokens.latest())
}

/// Like [`respond`], with an event stream that follows `script`.
pub(super) fn exchange(
    layer: &CancelOnDisconnectLayer,
    request: Request<Full<Bytes>>,
    script: &Script,
) -> (Response<ResponseBody<Scripted>>, CallToken) {
    let script = script.clone();
    respond(layer, request, move |_| event_stream(script.body()))
}

/// Sends a request through a layer without a grace period, to a service whose stream stalls.
pub(super) fn stalled(
    kind: Kind,
) -> (
    CancelOnDisconnectLayer,
    Log,
    Response<ResponseBody<Scripted>>,
    CallToken,
) {
    let (layer, log) = immediate();
    let (response, token) = exchange(&layer, kind.request(), &Script::stalled());
    (layer, log, response, token)
}

/// Prepares a request through a layer without a grace period.
///
/// The service reads it in full and then runs `rest`.
pub(super) fn sent<F, E: 'static>(
    kind: Kind,
    rest: impl Fn(&Tokens) -> F + Clone + Send + 'static,
) -> (
    CancelOnDisconnectLayer,
    Log,
    Tokens,
    Pin<Box<impl Future<Output = Passed<E>>>>,
)
where
    F: Future<Output = Answer<E>> + Send + 'static,
{
    let (layer, log) = immediate();
    let tokens = Tokens::default();
    let service = layer.layer(reading(&tokens, rest));
    let response = Box::pin(service.oneshot(kind.request()));
    (layer, log, tokens, response)
}

/// Asserts that the call, if there is one, has ended with this cancellation.
pub(super) fn assert_cancelled(log: &Log, kind: Kind, reason: CancelReason) {
    if kind.is_call() {
        let end = [Outcome::Cancelled(reason)];
        assert_eq!(log.ends(&number(7)), end, "{kind:?}");
    }
}

/// Returns a 200 response with a body of server-sent events.
pub(super) fn event_stream<B>(body: B) -> Response<B> {
    Response::builder()
        .header(header::CONTENT_TYPE, "text/event-stream")
        .body(body)
        .expect("a response")
}

/// Returns a request without a body, which is not a call.
pub(super) fn bodyless(method: Method) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .body(Full::default())
        .expect("a request")
}

/// Polls a future once.
pub(super) fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

// === impl Tokens ===

impl Tokens {
    /// Records the token of a client's request.
    pub(super) fn record<B>(&self, request: &Request<B>) {
        let token = request.extensions().get::<CallToken>();
        if let Some(token) = token.filter(|token| !token.is_replay()) {
            // Querying the token marks it as observed, so that a cancellation counts as delivered.
            assert!(!token.is_cancelled());
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(token.clone());
        }
    }

    pub(super) fn latest(&self) -> CallToken {
        let token = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        token.clone().expect("the service has seen a token")
    }
}

// === impl TokenAtDrop ===

impl TokenAtDrop {
    /// Returns what the destructor found in the token, or `None` before it has run.
    pub(super) fn reason_at_drop(&self) -> Option<Option<CancelReason>> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl RecordsTokenOnDrop ===

impl RecordsTokenOnDrop {
    pub(super) fn new(token: CallToken, at_drop: &TokenAtDrop) -> Self {
        let at_drop = at_drop.clone();
        Self { token, at_drop }
    }
}

impl Drop for RecordsTokenOnDrop {
    fn drop(&mut self) {
        let mut at_drop = self
            .at_drop
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *at_drop = Some(self.token.reason());
    }
}
