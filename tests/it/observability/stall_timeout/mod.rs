//! Silent streams: probes, heads that are sent early, and clients that do not read.
//!
//! There are no sockets. Instead, the test writes an inner service's answer step by step. The clock jumps to the next
//! timer when every task is waiting.

use std::{io, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use futures_util::stream;
use http::{Extensions, HeaderMap, Request, Response, header};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, Grace,
    body::{ResponseBody, TeeBody},
};
use serde_json::{Value, json};
use tokio::sync::{mpsc, oneshot};
use tower::{Layer as _, ServiceExt as _, service_fn, util::BoxCloneSyncService};

use crate::log::Log;

mod commit;
mod drained;
mod probes;
mod stall;

const PROBE: &str = ":\n\n";

/// The client's side, whose requests pass through the layer.
#[derive(Clone)]
struct Client {
    service: BoxCloneSyncService<Request<Body>, Response<ResponseBody<Body>>, io::Error>,
}

/// The server's side.
struct Server {
    next_request: mpsc::UnboundedReceiver<ReceivedRequest>,
}

/// A request that is waiting for its answer.
#[derive(Debug)]
struct ReceivedRequest {
    /// `None` for a replayed cancellation.
    token: Option<CallToken>,
    headers: HeaderMap,
    answer: oneshot::Sender<io::Result<Response<Body>>>,
}

/// Writes an answer's body.
struct Feed(mpsc::UnboundedSender<Bytes>);

/// Returns a layer that does not wait for clients to resume, and its log.
fn immediate() -> (CancelOnDisconnectLayer, Log) {
    Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate))
}

/// Returns a client and a server with the layer between them.
fn between(layer: &CancelOnDisconnectLayer) -> (Client, Server) {
    let (ask, next_request) = mpsc::unbounded_channel();
    let inner = service_fn(move |request: Request<TeeBody<Body>>| {
        let ask = ask.clone();
        async move {
            let (head, body) = request.into_parts();
            let _whole = body.collect().await;
            let (answer, answered) = oneshot::channel();
            let next_request = ReceivedRequest {
                token: observed_token(&head.extensions),
                headers: head.headers,
                answer,
            };
            ask.send(next_request).expect("the test is waiting");
            answered.await.expect("the test answers")
        }
    });
    let service = BoxCloneSyncService::new(layer.layer(inner));
    (Client { service }, Server { next_request })
}

/// Returns a stateless call from a client that accepts both kinds of answer.
fn call() -> Request<Body> {
    post(&json!({ "jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": { "name": "a" } }))
}

fn post(message: &Value) -> Request<Body> {
    Request::post("/mcp")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json, text/event-stream")
        .body(Body::from(message.to_string()))
        .expect("a request")
}

fn events(body: Body) -> Response<Body> {
    typed("text/event-stream", body)
}

fn typed(content_type: &str, body: Body) -> Response<Body> {
    let response = Response::builder().header(header::CONTENT_TYPE, content_type);
    response.body(body).expect("a response")
}

/// Returns a body's next frame, or `None` at its end.
async fn frame(body: &mut ResponseBody<Body>) -> Option<String> {
    let frame = body.frame().await?.expect("the body does not fail");
    let data = frame.into_data().expect("no trailers");
    Some(String::from_utf8(data.into()).expect("text"))
}

/// Returns the rest of a body.
async fn rest(body: &mut ResponseBody<Body>) -> String {
    let mut rest = String::new();
    while let Some(frame) = frame(body).await {
        rest.push_str(&frame);
    }
    rest
}

/// Returns `true` if a body does not send anything for this long.
async fn is_silent(body: &mut ResponseBody<Body>, time: Duration) -> bool {
    tokio::time::timeout(time, frame(body)).await.is_err()
}

// === impl Client ===

impl Client {
    async fn send(&self, request: Request<Body>) -> Response<ResponseBody<Body>> {
        let sent = self.service.clone().oneshot(request).await;
        sent.expect("the service does not fail")
    }
}

// === impl Server ===

impl Server {
    async fn next_request(&mut self) -> ReceivedRequest {
        self.next_request
            .recv()
            .await
            .expect("a request from the client")
    }

    /// Answers the next request with a stream.
    async fn stream(&mut self) -> (Feed, CallToken) {
        let next_request = self.next_request().await;
        let token = next_request.token();
        let (feed, body) = Feed::new();
        next_request.answer(events(body));
        (feed, token)
    }
}

// === impl ReceivedRequest ===

impl ReceivedRequest {
    fn token(&self) -> CallToken {
        self.token.clone().expect("a token")
    }

    fn answer(self, response: Response<Body>) {
        self.answer
            .send(Ok(response))
            .expect("the layer is waiting");
    }

    fn fail(self) {
        let error = io::Error::other("broken on purpose");
        self.answer.send(Err(error)).expect("the layer is waiting");
    }

    /// Waits until the answer's receiver is dropped.
    async fn abandoned(&mut self) {
        self.answer.closed().await;
    }
}

// === impl Feed ===

impl Feed {
    fn new() -> (Self, Body) {
        let (sender, receiver) = mpsc::unbounded_channel::<Bytes>();
        let frames = stream::unfold(receiver, async |mut receiver| {
            let frame = receiver.recv().await?;
            Some((Ok::<_, io::Error>(frame), receiver))
        });
        (Self(sender), Body::from_stream(frames))
    }

    fn write(&self, text: impl Into<Bytes>) {
        self.0.send(text.into()).expect("the body is still alive");
    }

    /// Waits until the body is dropped.
    async fn dropped(&self) {
        self.0.closed().await;
    }

    fn is_dropped(&self) -> bool {
        self.0.is_closed()
    }
}

/// Returns a request's token, taken as by a handler that is to be notified of a cancellation.
fn observed_token(extensions: &Extensions) -> Option<CallToken> {
    let token: Option<CallToken> = extensions.get().cloned();
    assert!(token.as_ref().is_none_or(|token| !token.is_cancelled()));
    token
}
