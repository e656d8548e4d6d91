//! A server controlled by the test, and a client in front of the layer and the event store.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use http_body_util::{BodyExt, StreamBody};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event, Outcome};
use mcp_cancel_proxy::event_store::{EventStore, Limits, Resumable};
use tokio::sync::{mpsc, oneshot};
use tower::{Service, ServiceExt, util::BoxCloneService};
use tower_layer::Layer;

/// A revision whose clients support priming events.
pub const WITH_PRIMING: &str = "2025-11-25";

/// The session that the tests use.
pub const SESSION: &str = "s";

/// The server. Each request waits for the test to answer it.
#[derive(Clone)]
pub struct Server(mpsc::UnboundedSender<Arrived>);

/// A request that the server has received.
pub struct Arrived {
    pub method: Method,
    pub uri: Uri,
    pub headers: HeaderMap,
    pub body: String,
    answer: oneshot::Sender<Response<Body>>,
}

/// An event stream written by the server.
pub struct Events(mpsc::Sender<Result<Bytes, std::io::Error>>);

/// The layer and the event store, between the server and its clients.
pub struct Setup {
    pub store: EventStore,
    pub arrived: mpsc::UnboundedReceiver<Arrived>,
    pub ended: mpsc::UnboundedReceiver<Outcome>,
    service: BoxCloneService<Request<Body>, Response<Body>, Infallible>,
}

/// The client's end of a response.
pub struct Stream {
    pub status: StatusCode,
    pub headers: HeaderMap,
    body: Body,
    buffer: String,
}

/// An event as a client reads it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seen {
    pub id: Option<String>,
    pub data: String,
}

// === impl Server ===

impl Service<Request<Body>> for Server {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let arrivals = self.0.clone();
        Box::pin(async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let (answer, answered) = oneshot::channel();
            let arrived = Arrived {
                method: head.method,
                uri: head.uri,
                headers: head.headers,
                body: String::from_utf8(body.into()).unwrap(),
                answer,
            };
            if arrivals.send(arrived).is_err() {
                return Ok(status(503));
            }
            // A request that the test drops is refused.
            Ok(answered.await.unwrap_or_else(|_| status(503)))
        })
    }
}

fn status(status: u16) -> Response<Body> {
    Response::builder()
        .status(status)
        .body(Body::empty())
        .unwrap()
}

// === impl Arrived ===

impl Arrived {
    pub fn answer(self, response: Response<Body>) {
        // Fails if the request has been aborted.
        let _ = self.answer.send(response);
    }

    pub fn status(self, code: u16) {
        self.answer(status(code));
    }

    pub fn json(self, json: &str) {
        let response = Response::builder()
            .header(header::CONTENT_TYPE, "application/json")
            .body(Body::from(json.to_owned()))
            .unwrap();
        self.answer(response);
    }

    /// Answers a `ping` with a result.
    pub fn pong(self) {
        let pong = pong_of(&self.id());
        self.json(&pong);
    }

    /// Returns the message's id as JSON text.
    pub fn id(&self) -> String {
        let message: serde_json::Value = serde_json::from_str(&self.body).unwrap();
        message["id"].to_string()
    }

    /// Answers with an event stream, which the test writes and which ends when it is dropped.
    pub fn events(self) -> Events {
        let (events, frames) = mpsc::channel(1);
        let frames = futures_util::stream::unfold(frames, async |mut frames| {
            let frame: Result<Bytes, std::io::Error> = frames.recv().await?;
            Some((frame.map(http_body::Frame::data), frames))
        });
        let response = Response::builder()
            .header(header::CONTENT_TYPE, "text/event-stream")
            .body(Body::new(StreamBody::new(frames)))
            .unwrap();
        self.answer(response);
        Events(events)
    }

    /// Waits until the request is aborted.
    pub async fn aborted(mut self) {
        self.answer.closed().await;
    }
}

// === impl Events ===

impl Events {
    pub async fn send(&self, text: impl AsRef<[u8]>) {
        let frame = Bytes::copy_from_slice(text.as_ref());
        self.0
            .send(Ok(frame))
            .await
            .expect("the event store is reading");
    }

    pub async fn message(&self, json: &str) {
        self.send(format!("data: {json}\n\n")).await;
    }

    pub async fn progress(&self, progress: u32) {
        self.message(&progress_of(progress)).await;
    }

    /// Answers call 1 and ends the stream.
    pub async fn answer(self) {
        self.message(&answer(1)).await;
    }

    /// Ends the stream with a connection error.
    pub async fn cut(self) {
        let error = std::io::Error::other("cut");
        self.0
            .send(Err(error))
            .await
            .expect("the event store is reading");
    }

    /// Waits until the reader has been dropped.
    pub async fn closed(&self) {
        self.0.closed().await;
    }

    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

pub fn call(id: u32) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"slow"}}}}"#)
}

pub fn answer(id: u32) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{"content":[]}}}}"#)
}

/// Returns the answer to a `ping` whose id is given as JSON text.
pub fn pong_of(id: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#)
}

pub fn progress_of(progress: u32) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":1,"progress":{progress}}}}}"#
    )
}

pub fn request_of(id: u32) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"roots/list"}}"#)
}

pub fn cancel_of(id: u32) -> String {
    format!(
        r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#
    )
}

// === impl Setup ===

impl Setup {
    /// Creates a setup without a session.
    pub fn with(limits: Limits) -> Self {
        let (arrivals, arrived) = mpsc::unbounded_channel();
        let (ends, ended) = mpsc::unbounded_channel();
        let store = EventStore::new(limits);
        let resumable = Resumable::new(Server(arrivals), store.clone());
        let confirm = store.clone();
        let layer = CancelOnDisconnectLayer::new();
        let layer = layer.confirm(move |orphan| std::future::ready(confirm.confirm(orphan)));
        let layer = layer.observe(move |event: &Event<'_>| {
            if let Event::Ended { outcome, .. } = event {
                let _ = ends.send(*outcome);
            }
        });
        let inner = resumable.map_request(|request: Request<_>| request.map(Body::new));
        let service = layer
            .layer(inner)
            .map_response(|response: Response<_>| response.map(Body::new));
        Self {
            store,
            arrived,
            ended,
            service: BoxCloneService::new(service),
        }
    }

    /// Creates a setup with a session, opened by a client that requested this revision.
    pub async fn started(revision: &str) -> Self {
        Self::started_with(revision, Limits::default()).await
    }

    pub async fn started_with(revision: &str, limits: Limits) -> Self {
        let mut setup = Self::with(limits);
        let body = format!(
            r#"{{"jsonrpc":"2.0","id":0,"method":"initialize","params":{{"protocolVersion":"{revision}"}}}}"#
        );
        let request = Request::post("/mcp").body(Body::from(body)).unwrap();
        let waiting = setup.send(request);
        let arrived = setup.next().await;
        let response = Response::builder()
            .header(header::CONTENT_TYPE, "application/json")
            .header("mcp-session-id", SESSION)
            .body(Body::from(r#"{"jsonrpc":"2.0","id":0,"result":{}}"#))
            .unwrap();
        arrived.answer(response);
        assert_eq!(waiting.await.unwrap().status, 200);
        setup
    }

    /// Creates a setup whose server answers call 1 with an event stream.
    pub async fn called(revision: &str) -> (Self, Stream, Events) {
        let mut setup = Self::started(revision).await;
        let (client, server) = setup.call(1).await;
        (setup, client, server)
    }

    /// Like [`Setup::called`], with a client that has read the priming event.
    pub async fn primed() -> (Self, Stream, Seen, Events) {
        Self::primed_with(Limits::default()).await
    }

    async fn primed_with(limits: Limits) -> (Self, Stream, Seen, Events) {
        let mut setup = Self::started_with(WITH_PRIMING, limits).await;
        let (mut client, server) = setup.call(1).await;
        let primed = client.event().await.unwrap();
        (setup, client, primed, server)
    }

    /// Like [`Setup::primed`], with a client that has since disconnected.
    pub async fn detached() -> (Self, Seen, Events) {
        Self::detached_with(Limits::default()).await
    }

    pub async fn detached_with(limits: Limits) -> (Self, Seen, Events) {
        let (setup, client, primed, server) = Self::primed_with(limits).await;
        drop(client);
        (setup, primed, server)
    }

    /// Returns the next request that the server receives.
    pub async fn next(&mut self) -> Arrived {
        in_time(self.arrived.recv())
            .await
            .expect("the server still exists")
    }

    /// Sends a request in its own task.
    ///
    /// Dropping the handle does not stop it, but aborting the task drops the request.
    pub fn send(&self, request: Request<Body>) -> tokio::task::JoinHandle<Stream> {
        let service = self.service.clone();
        tokio::spawn(async move {
            let response = service.oneshot(request).await.unwrap();
            let (head, body) = response.into_parts();
            Stream {
                status: head.status,
                headers: head.headers,
                body,
                buffer: String::new(),
            }
        })
    }

    pub fn post(&self, body: impl Into<String>) -> tokio::task::JoinHandle<Stream> {
        self.send(posted(SESSION, body))
    }

    pub fn resume(&self, last: &str) -> tokio::task::JoinHandle<Stream> {
        self.send(resumed(SESSION, last))
    }

    /// Resumes after an event.
    pub async fn resumed(&self, last: &Seen) -> Stream {
        let last = last.id.as_deref().expect("the event has an id");
        in_time(self.resume(last)).await.unwrap()
    }

    /// Starts a call that the server answers with an event stream.
    pub async fn call(&mut self, id: u32) -> (Stream, Events) {
        let waiting = self.post(call(id));
        let events = self.next().await.events();
        (in_time(waiting).await.unwrap(), events)
    }

    /// Returns the outcome of the next call to end.
    pub async fn outcome(&mut self) -> Outcome {
        in_time(self.ended.recv())
            .await
            .expect("the layer still exists")
    }

    /// Drops everything but the event store.
    pub fn into_event_store(self) -> EventStore {
        self.store
    }
}

/// Returns a POST in a session.
pub fn posted(session: &str, body: impl Into<String>) -> Request<Body> {
    Request::post("/mcp")
        .header("mcp-session-id", session)
        .header(header::ACCEPT, "application/json, text/event-stream")
        .header(header::CONTENT_TYPE, "application/json")
        .body(Body::from(body.into()))
        .unwrap()
}

/// Returns a GET in a session, resuming after the event with this id.
pub fn resumed(session: &str, last: &str) -> Request<Body> {
    Request::get("/mcp")
        .header("mcp-session-id", session)
        .header(header::ACCEPT, "text/event-stream")
        .header("last-event-id", last)
        .body(Body::empty())
        .unwrap()
}

// === impl Stream ===

impl Stream {
    /// Returns the next event, or `None` at the end of the stream.
    pub async fn event(&mut self) -> Option<Seen> {
        loop {
            let block = in_time(self.block()).await?;
            let mut seen = Seen {
                id: None,
                data: String::new(),
            };
            let mut is_event = false;
            for line in block.lines() {
                if let Some(id) = line.strip_prefix("id: ") {
                    seen.id = Some(id.to_owned());
                } else if let Some(data) = line.strip_prefix("data:") {
                    is_event = true;
                    seen.data.push_str(data.trim_start_matches(' '));
                }
            }
            if is_event {
                return Some(seen);
            }
        }
    }

    /// Returns the data of all remaining events.
    pub async fn rest(&mut self) -> Vec<String> {
        let mut rest = Vec::new();
        while let Some(seen) = self.event().await {
            rest.push(seen.data);
        }
        rest
    }

    /// Reads the next frame, which may end in the middle of an event.
    pub async fn read_frame(&mut self) {
        let frame = self.body.frame().await.unwrap().unwrap();
        let bytes = frame.into_data().unwrap();
        self.buffer.push_str(std::str::from_utf8(&bytes).unwrap());
    }

    /// Returns the next event or comment, without the blank line that ends it.
    pub async fn block(&mut self) -> Option<String> {
        // The buffer has already been searched up to here.
        let mut from = 0;
        loop {
            if let Some(end) = self.buffer[from..].find("\n\n") {
                let rest = self.buffer.split_off(from + end + 2);
                let mut block = std::mem::replace(&mut self.buffer, rest);
                block.truncate(from + end);
                return Some(block);
            }
            from = self.buffer.len().saturating_sub(1);
            let frame = self.body.frame().await?.ok()?;
            let bytes = frame.into_data().ok()?;
            self.buffer.push_str(std::str::from_utf8(&bytes).unwrap());
        }
    }

    /// Returns the whole body as text.
    pub async fn text(self) -> String {
        let bytes = in_time(self.body.collect()).await.unwrap().to_bytes();
        String::from_utf8(bytes.into()).unwrap()
    }
}

/// Panics after an hour on the paused clock, which is longer than any grace period.
pub async fn in_time<T>(future: impl IntoFuture<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(3600), future)
        .await
        .expect("the future completes in time")
}

/// Runs all tasks that are not waiting for time to pass.
pub async fn settle() {
    tokio::time::sleep(Duration::from_millis(1)).await;
}
