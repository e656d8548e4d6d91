//! Bodies that are not calls, or that are ambiguous.
//!
//! The inner service decides about them, so its answer is the same with and without the layer. No such body cancels
//! anything or adds any state.

#![allow(
    clippy::restriction,
    reason = "a failed expectation should end the test, but clippy only exempts functions marked #[test]"
)]

use std::{future::pending, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{Request as AxumRequest, State},
    middleware::{Next, from_fn, from_fn_with_state},
    response::Response,
};
use futures_util::future::join_all;
use http::HeaderMap;
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use self::table::{Row, Sent, table};
use crate::{
    stack::{Bench, SessionMode},
    support::*,
};

mod table;

/// A server with a held call, whose id is 1, in the session to which all bodies are sent.
struct Held {
    bench: Bench,
    mcp: Mcp,
    call: Connection,
}

/// What a client receives.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    status: u16,
    headers: HeaderMap,
    body: String,
}

/// Counts the exchanges that are over.
#[derive(Clone)]
struct ExchangeCounter(Arc<watch::Sender<usize>>);

/// An exchange that is not over yet.
struct ExchangeGuard(ExchangeCounter);

// === impl Held ===

impl Held {
    async fn new(
        mode: SessionMode,
        build: impl FnOnce(Router, CancelOnDisconnectLayer) -> Router,
    ) -> Self {
        let bench = Bench::new(mode, build).await;
        let mcp = bench.client(&[]).await;
        let mut call = mcp.call(1, "hold", json!({ "label": "held" })).await;
        bench.witness.started("held").await;
        assert_eq!(call.head().await.status, 200);
        Self { bench, mcp, call }
    }

    /// Creates a server without the layer but with rmcp's own session manager.
    async fn bare(mode: SessionMode) -> Self {
        let mode = match mode {
            SessionMode::Wrapped | SessionMode::LayerOnly => SessionMode::LayerOnly,
            SessionMode::Stateless => SessionMode::Stateless,
        };
        Self::new(mode, |rmcp, _| rmcp).await
    }

    async fn layered(mode: SessionMode) -> Self {
        Self::new(mode, |rmcp, cancel| rmcp.layer(cancel)).await
    }

    async fn answer(&self, row: &Row) -> Answer {
        let request = row.request(&self.mcp);
        let (head, body) = match &row.sent {
            Sent::Whole | Sent::Chunked(_) => {
                let mut connection = self.send(row, &self.mcp).await;
                let head = connection.head().await;
                (head, connection.body_to_end().await)
            }
            Sent::OverHttp2 => {
                let mut connection = H2::open(self.bench.addr).await;
                let mut stream = connection.send(&request).await;
                (stream.head().await, stream.body_to_end().await)
            }
        };
        let mut headers = head.headers;
        headers.remove("date");
        Answer {
            status: head.status,
            headers,
            body: String::from_utf8(body).expect("rmcp answers with text"),
        }
    }

    /// Sends a body on its own connection. If the body is large, only its start is sent.
    async fn send(&self, row: &Row, mcp: &Mcp) -> Connection {
        let request = row.request(mcp);
        let mut connection = Connection::open(self.bench.addr).await;
        match &row.sent {
            Sent::Whole => connection.send(&request).await,
            Sent::Chunked(sizes) => connection.send_chunked(&request, sizes).await,
            Sent::OverHttp2 => {
                let mut cut = request.clone();
                cut.body.truncate(100_000);
                connection.send_cut(&cut, request.body.len()).await;
            }
        }
        connection
    }

    /// Asserts that the held call is untouched and that there is no other.
    async fn check_untouched(mut self, mode: SessionMode) {
        let Bench {
            witness,
            log,
            layer,
            ..
        } = &self.bench;
        // Anything meant for the session has been injected before this.
        let mut echo = self.mcp.call(2, "echo", json!({ "text": "x" })).await;
        echo.answer().await.expect("the session is open");
        echo.body_to_end().await;
        assert!(witness.is_running("held"), "{mode:?}: {:#?}", log.events());
        assert_eq!(layer.calls().len(), 1, "{mode:?}: {:#?}", log.events());
        witness.release("held");
        let answer = self.call.answer().await.expect("an answer");
        let text = &answer["result"]["content"][0]["text"];
        assert_eq!(text, "done:held", "{mode:?}");
        self.call.body_to_end().await;
        assert!(layer.calls().is_empty(), "{mode:?}");
    }
}

// === impl ExchangeCounter ===

impl ExchangeCounter {
    fn new() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }

    /// Makes `app` count its exchanges.
    fn watch(&self, app: Router) -> Router {
        let over = self.clone();
        app.layer(from_fn(move |request: AxumRequest, next: Next| {
            let guard = ExchangeGuard(over.clone());
            async move {
                let response = next.run(request).await;
                response.map(|body| {
                    // The body holds this guard until it is dropped.
                    Body::new(body.map_frame(move |frame| {
                        let _going = &guard;
                        frame
                    }))
                })
            }
        }))
    }

    async fn reaches(&self, count: usize, what: &str) {
        let mut over = self.0.subscribe();
        let reached = over.wait_for(|over| *over >= count);
        within(what, reached).await.expect("the sender is alive");
    }

    fn count(&self) -> usize {
        *self.0.borrow()
    }
}

impl Drop for ExchangeGuard {
    fn drop(&mut self) {
        self.0.0.send_modify(|over| *over += 1);
    }
}

// --- Tests ---

async fn every_answer_is_the_same(mode: SessionMode) {
    let (bare, layered) = (Held::bare(mode).await, Held::layered(mode).await);
    for row in table() {
        let (wanted, received) = (bare.answer(&row).await, layered.answer(&row).await);
        assert_eq!(received, wanted, "{mode:?}: {}", row.what);
    }
    assert_eq!(layered.bench.log.cancelled(), [], "{mode:?}");
    layered.check_untouched(mode).await;
}

#[tokio::test]
async fn a_bad_body_is_answered_as_without_the_layer() {
    join_all(SessionMode::ALL.map(every_answer_is_the_same)).await;
}

async fn no_disconnect_affects_the_held_call(mode: SessionMode) {
    let held = Held::layered(mode).await;
    for row in table() {
        held.send(&row, &held.mcp).await.fin();
    }
    held.check_untouched(mode).await;
}

#[tokio::test]
async fn a_disconnect_from_any_bad_body_does_not_affect_a_call_of_a_session() {
    let modes = [SessionMode::Wrapped, SessionMode::LayerOnly];
    join_all(modes.map(no_disconnect_affects_the_held_call)).await;
}

#[tokio::test]
async fn a_disconnect_from_any_bad_body_does_not_affect_a_stateless_call() {
    no_disconnect_affects_the_held_call(SessionMode::Stateless).await;
}

/// Reads the body of a request that asks for it, reports that, and then never answers.
///
/// A replayed cancellation is passed to rmcp.
async fn undecided(
    State(read): State<mpsc::UnboundedSender<()>>,
    request: AxumRequest,
    next: Next,
) -> Response {
    let token = request.extensions().get::<CallToken>();
    let is_replay = token.is_none_or(CallToken::is_replay);
    if is_replay || !request.headers().contains_key("x-undecided") {
        return next.run(request).await;
    }
    let _whole_or_cut = request.into_body().collect().await;
    read.send(()).expect("the test is listening");
    pending().await
}

async fn no_disconnect_before_the_decision_affects_the_held_call(mode: SessionMode) {
    let (reader, mut read) = mpsc::unbounded_channel();
    let over = ExchangeCounter::new();
    let watching = over.clone();
    let held = Held::new(mode, move |rmcp, cancel| {
        let app = rmcp.layer(from_fn_with_state(reader, undecided));
        watching.watch(app.layer(cancel))
    })
    .await;
    let mcp = held.mcp.clone().header("x-undecided", "1");
    for row in table() {
        let before = over.count();
        let end = format!("{} to be over", row.what);
        if matches!(row.sent, Sent::OverHttp2) {
            let mut connection = H2::open(held.bench.addr).await;
            let stream = connection.send(&row.request(&mcp)).await;
            within(&end, read.recv())
                .await
                .expect("the server is running");
            stream.reset();
        } else {
            let connection = held.send(&row, &mcp).await;
            within(&end, read.recv())
                .await
                .expect("the server is running");
            connection.fin();
        }
        over.reaches(before + 1, &end).await;
    }
    held.check_untouched(mode).await;
}

#[tokio::test]
async fn a_disconnect_before_the_refusal_does_not_affect_a_call() {
    join_all(SessionMode::ALL.map(no_disconnect_before_the_decision_affects_the_held_call)).await;
}

#[test]
fn the_table_has_at_least_forty_bodies_and_no_two_with_the_same_name() {
    let table = table();
    let names: std::collections::BTreeSet<&str> = table.iter().map(|row| row.what).collect();
    assert_eq!(names.len(), table.len());
    assert!(table.len() >= 40);
}
