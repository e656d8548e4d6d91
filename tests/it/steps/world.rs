//! A server in process that the test polls by hand.

use std::{
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes, HttpBody as _},
    response::Response,
};
use futures_util::{future::BoxFuture, stream};
use http::Request;
use mcp_cancel_on_disconnect::{
    CallToken, Calls, CancelOnDisconnectLayer, CancelReason, CancellableSessionManager,
};
use rmcp::{
    model::CancelledNotificationParam,
    transport::streamable_http_server::session::local::LocalSessionManager,
};
use serde_json::{Value, json};
use tokio::{
    sync::{Notify, mpsc},
    task::yield_now,
};
use tower::ServiceExt as _;

use super::{
    Handler,
    inside::{InPoll, Inside},
};
use crate::{
    setup::{
        EXCHANGE, EventKind, Events, Scripted, Server, Sessions, advance_past, paused_runtime,
    },
    support::{Mode, PATH, Witness, handshake, server::report},
};

/// The call's JSON-RPC id. No other source produces this number.
const ID: u64 = 7;

/// The id of the call whose connection is dropped inside a poll.
const OTHER: u64 = 8;

const VERSION: &str = "2025-06-18";

/// The number of turns of the runtime after which every task has got as far as it can.
const MAX_TURNS: usize = 64;

pub(super) struct World {
    pub(super) server: Server,
    pub(super) calls: Calls,
    router: Router,
    session: Option<String>,
    events: Events,
    witness: Witness,
    tokens: Arc<std::sync::Mutex<Vec<CallToken>>>,
    cancels: mpsc::UnboundedReceiver<CancelledNotificationParam>,
    release: Arc<Notify>,
    inside: Inside,
}

/// An exchange, as its client's connection sees it.
pub(super) struct Call {
    stage: Stage,
    pub(super) polls: usize,
    pub(super) text: String,
    pub(super) last: Polled,
}

enum Stage {
    Future(BoxFuture<'static, Response>),
    Body(Pin<Box<Body>>),
    Over,
}

/// The result of the last poll.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Polled {
    Nothing,
    Something,
    End,
    Panicked,
}

// === impl World ===

impl World {
    /// Runs a test in its own world.
    pub(super) fn run<T>(
        server: Server,
        handler: Handler,
        test: impl AsyncFnOnce(&mut Self) -> T,
    ) -> T {
        paused_runtime().block_on(async {
            let mut world = Self::new(server, handler).await;
            test(&mut world).await
        })
    }

    async fn new(server: Server, handler: Handler) -> Self {
        let release = Arc::new(Notify::new());
        let tokens = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (cancelled, cancels) = mpsc::unbounded_channel();
        let scripted = Scripted::labelled({
            let (release, tokens) = (release.clone(), tokens.clone());
            move |label, context| {
                let (release, tokens) = (release.clone(), tokens.clone());
                async move {
                    let token = CallToken::of(&context).expect("the layer's token");
                    tokens.lock().expect("no panic").push(token);
                    yield_now().await;
                    report(&context, &label, 1).await;
                    yield_now().await;
                    let ends = async {
                        match handler {
                            Handler::Answers => yield_now().await,
                            Handler::Waits => release.notified().await,
                        }
                    };
                    tokio::select! {
                        biased;
                        () = context.ct.cancelled() => {}
                        () = ends => {}
                    }
                    Ok("done".to_owned())
                }
            }
        });
        let scripted = scripted.on_cancelled(cancelled);
        let witness = scripted.witness.clone();
        let local = LocalSessionManager::default();
        let sessions = match server {
            Server::Wrapped => Sessions::Wrapped(Arc::new(CancellableSessionManager::new(local))),
            _ => Sessions::Local(Arc::new(local)),
        };
        let mode = match server {
            Server::StatelessSse => Mode::StatelessSse,
            Server::StatelessJson => Mode::StatelessJson,
            Server::Wrapped | Server::LayerOnly | Server::Bare => Mode::Session,
        };
        let router = sessions.router(scripted, mode.config().with_sse_keep_alive(None));
        let inside = Inside::default();
        let events = Events::default();
        let layer = CancelOnDisconnectLayer::new().observe(events.observer());
        let mut world = Self {
            server,
            calls: layer.calls(),
            router: inside.count(router).layer(layer),
            session: None,
            events,
            witness,
            tokens,
            cancels,
            release,
            inside,
        };
        if server.has_sessions() {
            world.connect().await;
        }
        world
    }

    async fn connect(&mut self) {
        let [initialize, initialized] = handshake(VERSION);
        let response = self.post(&initialize).await;
        let session = response.headers().get("mcp-session-id").expect("a session");
        self.session = Some(session.to_str().expect("visible").to_owned());
        let mut rest = Call::of_body(response.into_body());
        rest.read(super::MAX_STEPS).await;
        assert_eq!(self.post(&initialized).await.status(), 202);
        self.turn(MAX_TURNS).await;
    }

    async fn post(&self, message: &Value) -> Response {
        let request = self.request("POST").body(Body::from(message.to_string()));
        let Ok(response) = self
            .router
            .clone()
            .oneshot(request.expect("a request"))
            .await;
        response
    }

    fn request(&self, method: &str) -> http::request::Builder {
        let request = Request::builder()
            .method(method)
            .uri(PATH)
            .header("host", "localhost")
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header("mcp-protocol-version", VERSION);
        match &self.session {
            Some(session) => request.header("mcp-session-id", session),
            None => request,
        }
    }

    /// Returns the call before its first poll.
    pub(super) fn call(&self) -> Call {
        self.call_with(ID, self.request("POST").header(EXCHANGE, "watched"))
    }

    fn call_with(&self, id: u64, request: http::request::Builder) -> Call {
        let message = json!({
            "jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": {
                "name": "work",
                "arguments": { "label": id.to_string() },
                "_meta": { "progressToken": id },
            },
        });
        let request = request.body(in_pieces(message.to_string()));
        Call::new(self.router.clone(), request.expect("a request"))
    }

    /// Returns the resume before its first poll, or `None` if the client has no event id.
    pub(super) fn resume(&self, call: &Call) -> Option<Call> {
        let id = call.last_event_id().filter(|_| self.session.is_some())?;
        let request = self.request("GET").header("last-event-id", id);
        let request = request.body(Body::empty()).expect("a request");
        Some(Call::new(self.router.clone(), request))
    }

    pub(super) fn cancel(&self) -> bool {
        let call = self.calls.snapshot().pop();
        call.is_some_and(|call| self.calls.cancel(call.info().id(), CancelReason::Requested))
    }

    /// Plans an act inside a poll of the next call.
    pub(super) async fn plan_inside(&self, what: InPoll, polls: usize) {
        let calls = self.calls.clone();
        match what {
            // Panics without printing a message.
            InPoll::Panics => self
                .inside
                .plan(polls, || resume_unwind(Box::new("on purpose"))),
            InPoll::Cancels => self.inside.plan(polls, move || {
                for call in calls.snapshot() {
                    calls.cancel(call.info().id(), CancelReason::Requested);
                }
            }),
            InPoll::DropsAnother => {
                let mut other = self.call_with(OTHER, self.request("POST"));
                other.read(polls).await;
                self.inside.plan(polls, move || other.disconnect());
            }
        }
    }

    pub(super) fn release(&self) {
        self.release.notify_one();
    }

    /// Lets other tasks run.
    pub(super) async fn turn(&self, times: usize) {
        for _ in 0..times {
            yield_now().await;
        }
    }

    pub(super) async fn pass(&self, time: Duration) {
        self.turn(MAX_TURNS).await;
        advance_past(time).await;
    }

    pub(super) fn events(&self) -> Vec<EventKind> {
        self.events.all()
    }

    /// Returns the reasons from all handlers' tokens that have fired.
    pub(super) fn reasons(&self) -> Vec<CancelReason> {
        let tokens = self.tokens.lock().expect("no panic");
        tokens.iter().filter_map(CallToken::reason).collect()
    }

    /// Returns the ids of the cancels that have reached the server.
    ///
    /// Asserts that each id has been used, and cancelled only once.
    pub(super) fn cancelled_ids(&mut self) -> Vec<Value> {
        let mut reached = Vec::new();
        while let Ok(cancelled) = self.cancels.try_recv() {
            let id = serde_json::to_value(&cancelled.request_id).expect("an id");
            assert!(id == json!(ID) || id == json!(OTHER), "{id}");
            assert!(!reached.contains(&id), "{id} was cancelled twice");
            reached.push(id);
        }
        reached
    }

    pub(super) fn running(&self) -> usize {
        self.witness.running()
    }
}

/// Returns a body in two frames, with one `Pending` poll before each.
fn in_pieces(text: String) -> Body {
    let (first, second) = text.split_at(text.len() / 2);
    let pieces = [first.to_owned(), second.to_owned()].into_iter();
    Body::from_stream(stream::unfold(pieces, async |mut pieces| {
        let piece = pieces.next()?;
        yield_now().await;
        Some((
            Ok::<_, std::convert::Infallible>(Bytes::from(piece)),
            pieces,
        ))
    }))
}

// === impl Call ===

impl Call {
    fn new(router: Router, request: Request<Body>) -> Self {
        let answering = async move {
            let Ok(response) = router.oneshot(request).await;
            response
        };
        Self::at(Stage::Future(Box::pin(answering)))
    }

    fn of_body(body: Body) -> Self {
        Self::at(Stage::Body(Box::pin(body)))
    }

    fn at(stage: Stage) -> Self {
        Self {
            stage,
            polls: 0,
            text: String::new(),
            last: Polled::Nothing,
        }
    }

    /// Polls the exchange this many times, with other tasks running after each poll.
    pub(super) async fn read(&mut self, polls: usize) {
        for _ in 0..polls {
            if self.is_over() {
                return;
            }
            self.polls += 1;
            self.last = catch_unwind(AssertUnwindSafe(|| self.poll())).unwrap_or(Polled::Panicked);
            if matches!(self.last, Polled::End | Polled::Panicked) {
                self.stage = Stage::Over;
            }
            yield_now().await;
        }
    }

    fn poll(&mut self) -> Polled {
        let mut cx = Context::from_waker(Waker::noop());
        match &mut self.stage {
            Stage::Over => Polled::End,
            Stage::Future(future) => match future.as_mut().poll(&mut cx) {
                Poll::Pending => Polled::Nothing,
                Poll::Ready(response) => {
                    self.stage = Stage::Body(Box::pin(response.into_body()));
                    Polled::Something
                }
            },
            Stage::Body(body) => match body.as_mut().poll_frame(&mut cx) {
                Poll::Pending => Polled::Nothing,
                Poll::Ready(Some(Ok(frame))) => {
                    let data = frame.into_data().expect("no trailers");
                    self.text
                        .push_str(str::from_utf8(&data).expect("whole events"));
                    Polled::Something
                }
                Poll::Ready(Some(Err(_)) | None) => Polled::End,
            },
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.stage, Stage::Over)
    }

    /// Drops the exchange, as if its connection had closed.
    pub(super) fn disconnect(&mut self) {
        self.stage = Stage::Over;
    }

    fn last_event_id(&self) -> Option<&str> {
        let mut lines = self.text.lines().rev();
        lines.find_map(|line| line.strip_prefix("id: "))
    }
}
