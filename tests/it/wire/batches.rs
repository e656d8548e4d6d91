//! JSON-RPC batches (2025-03-26): several calls in one POST, with one stream for all of them.
//!
//! rmcp has none. The server behind the layer is a script: it answers every POST of requests with a stream
//! that the test writes, every GET with another, and notes the notifications.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, Bytes},
    response::{IntoResponse, Response},
    routing::post,
};
use futures_util::stream;
use http::StatusCode;
use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome, RequestId};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::{
    setup::{Plan, Server, Setup, StoppedClock, What},
    support::*,
};

const GRACE: Duration = Duration::from_secs(20);

/// To which tokio rounds a timer up.
const TICK: Duration = Duration::from_millis(1);

const ORPHANED: Outcome = Outcome::Cancelled(CancelReason::Orphaned);

const DETACHED: What = What::Detached(Some(GRACE));

#[tokio::test]
async fn each_request_of_a_batch_is_a_call() {
    let (setup, mut script) = Script::start().await;
    let mcp = session(&setup);
    let mut batch = send(&mcp).await;
    let stream = script.next_stream().await;
    assert_eq!(setup.calls.len(), 2);

    stream.send(&answer(json!("two")));
    assert_eq!(batch.answer().await, Some(answer(json!("two"))));
    assert_eq!(setup.events.ended(&mcp, "two").await, Outcome::Completed);
    assert_eq!(setup.events.of(&mcp, 1), [What::Started]);
    stream.send(&answer(json!(1)));

    assert_eq!(batch.answer().await, Some(answer(json!(1))));
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert!(setup.calls.is_empty());
    assert_eq!(setup.events.all().len(), 4, "the notification is no call");
}

#[tokio::test]
async fn answers_in_one_message_end_all_their_calls() {
    let (setup, mut script) = Script::start().await;
    let mcp = session(&setup);
    let mut batch = send(&mcp).await;
    let stream = script.next_stream().await;

    stream.send(&json!([answer(json!(1)), answer(json!("two"))]));

    batch.answer().await.expect("both");
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert_eq!(setup.events.ended(&mcp, "two").await, Outcome::Completed);
    assert!(setup.calls.is_empty());
}

#[tokio::test]
async fn only_the_unanswered_calls_of_a_batch_are_cancelled() {
    let clock = StoppedClock::stop();
    let (setup, mut script) = Script::start().await;
    let mcp = session(&setup);
    let mut batch = send(&mcp).await;
    let stream = script.next_stream().await;
    stream.send(&answer(json!(1)));
    batch.answer().await.expect("the first");

    batch.fin();

    setup.events.detached(&mcp, "two").await;
    clock.advance(GRACE + TICK).await;
    assert_eq!(setup.events.ended(&mcp, "two").await, ORPHANED);
    assert_eq!(script.next_cancelled().await, json!("two"));
    let expected = [What::Started, What::Ended(Outcome::Completed)];
    assert_eq!(setup.events.of(&mcp, 1), expected);
    assert!(setup.calls.is_empty());
}

#[tokio::test]
async fn an_abandoned_batch_is_cancelled_call_by_call() {
    let clock = StoppedClock::stop();
    let (setup, mut script) = Script::start().await;
    let mcp = session(&setup);
    let batch = send(&mcp).await;
    let _stream = script.next_stream().await;
    batch.fin();
    setup.events.detached(&mcp, 1).await;
    setup.events.detached(&mcp, "two").await;

    clock.advance(GRACE + TICK).await;

    let mut cancelled = vec![script.next_cancelled().await, script.next_cancelled().await];
    cancelled.sort_by_key(Value::to_string);
    assert_eq!(cancelled, [json!("two"), json!(1)]);
    assert!(setup.calls.is_empty());
}

#[tokio::test]
async fn a_resume_keeps_all_calls_of_a_batch() {
    let clock = StoppedClock::stop();
    let (setup, mut script) = Script::start().await;
    let mcp = session(&setup);
    detach(&setup, &mcp, &mut script).await;
    clock.advance(GRACE - TICK).await;

    let mut resumed = mcp.resume("event-1").await;

    assert_eq!(resumed.head().await.status, 200);
    let stream = script.next_stream().await;
    clock.advance(GRACE * 2).await;
    stream.send(&answer(json!(1)));
    resumed.answer().await.expect("an answer");
    stream.send(&answer(json!("two")));
    resumed.answer().await.expect("an answer");
    for id in [json!(1), json!("two")] {
        let expected = [
            What::Started,
            DETACHED,
            What::Resumed,
            What::Ended(Outcome::Completed),
        ];
        assert_eq!(setup.events.of(&mcp, id), expected);
    }
    assert!(setup.calls.is_empty());
}

#[tokio::test]
async fn a_resumed_batch_hears_of_a_cancelled_call_once() {
    let (setup, mut script) = Script::start().await;
    let mcp = session(&setup);
    detach(&setup, &mcp, &mut script).await;
    let mut resumed = mcp.resume("event-1").await;
    assert_eq!(resumed.head().await.status, 200);
    let stream = script.next_stream().await;
    setup.events.resumed(&mcp, "two", 1).await;

    let one = setup.calls.find("the session", &RequestId::Number(1));
    let one = one.expect("the call is in flight");
    assert!(setup.calls.cancel(one, CancelReason::Requested));

    let error = resumed.answer().await.expect("the error");
    assert_eq!(
        (&error["id"], &error["error"]["code"]),
        (&json!(1), &json!(-32800))
    );
    stream.send(&answer(json!("two")));
    assert_eq!(resumed.answer().await, Some(answer(json!("two"))));
}

/// Whichever of them it was.
#[tokio::test]
async fn a_resume_after_one_answer_keeps_the_other_calls_of_the_batch() {
    for (answered, waiting) in [(json!(1), json!("two")), (json!("two"), json!(1))] {
        let (setup, mut script) = Script::start().await;
        let mcp = session(&setup);
        let mut batch = send(&mcp).await;
        let stream = script.next_stream().await;
        stream.send_priming("event-1");
        stream.send(&answer(answered.clone()));
        batch.answer().await.expect("the first");
        batch.fin();
        setup.events.detached(&mcp, waiting.clone()).await;

        let mut resumed = mcp.resume("event-1").await;

        assert_eq!(resumed.head().await.status, 200);
        let stream = script.next_stream().await;
        stream.send(&answer(waiting.clone()));
        resumed.answer().await.expect("the other");
        let expected = [
            What::Started,
            DETACHED,
            What::Resumed,
            What::Ended(Outcome::Completed),
        ];
        assert_eq!(setup.events.of(&mcp, waiting), expected);
    }
}

/// The server behind the layer.
struct Script {
    streams: mpsc::UnboundedReceiver<Stream>,
    cancelled: mpsc::UnboundedReceiver<Value>,
}

/// A response of the server. Dropped, it ends.
struct Stream(mpsc::UnboundedSender<Bytes>);

// === impl Script ===

impl Script {
    async fn start() -> (Setup, Self) {
        let (open, streams) = mpsc::unbounded_channel();
        let (cancel, cancelled) = mpsc::unbounded_channel();
        // Streams that the test does not ask for stay open.
        let kept = Arc::new(Mutex::new(open));
        let opened = kept.clone();
        let get = move || {
            let opened = opened.clone();
            async move { event_stream(&opened) }
        };
        let post = post(move |body: String| async move {
            let message: Value = serde_json::from_str(&body).expect("the body is JSON");
            if message["method"] == "notifications/cancelled" {
                let id = message["params"]["requestId"].clone();
                cancel.send(id).expect("the test listens");
                return StatusCode::ACCEPTED.into_response();
            }
            event_stream(&kept)
        });
        let router = Router::new().route(PATH, post.get(get));
        let plan = Plan::of(Server::LayerOnly).grace(Grace::After(GRACE));
        let setup = plan.inside(|_| router).start().await;
        (setup, Self { streams, cancelled })
    }

    async fn next_stream(&mut self) -> Stream {
        let stream = within("a stream", self.streams.recv()).await;
        stream.expect("the server lives")
    }

    /// The id of the next call that the server is told to cancel.
    async fn next_cancelled(&mut self) -> Value {
        let id = within("notifications/cancelled", self.cancelled.recv()).await;
        id.expect("the server lives")
    }
}

fn event_stream(opened: &Mutex<mpsc::UnboundedSender<Stream>>) -> Response {
    let (events, receiver) = mpsc::unbounded_channel();
    let opened = opened.lock().unwrap_or_else(PoisonError::into_inner);
    opened.send(Stream(events)).expect("the test listens");
    let events = stream::unfold(receiver, async |mut receiver| {
        let event = receiver.recv().await?;
        Some((Ok::<_, Infallible>(event), receiver))
    });
    let content_type = [("content-type", "text/event-stream")];
    (content_type, Body::from_stream(events)).into_response()
}

// === impl Stream ===

impl Stream {
    fn send(&self, message: &Value) {
        self.write(format!("data: {message}\n\n"));
    }

    fn send_priming(&self, id: &str) {
        self.write(format!("id: {id}\ndata:\n\n"));
    }

    fn write(&self, event: String) {
        self.0.send(event.into()).expect("the response lives");
    }
}

fn session(setup: &Setup) -> Mcp {
    Mcp::stateless(setup.served.addr, PATH)
        .version("2025-03-26")
        .in_session("the session")
}

/// Two requests and a notification.
async fn send(mcp: &Mcp) -> Connection {
    let batch = json!([
        mcp.call_message(1, "hold", json!({})),
        { "jsonrpc": "2.0", "method": "notifications/roots/list_changed" },
        mcp.call_message("two", "hold", json!({})),
    ]);
    mcp.send(&mcp.post_request(batch.to_string())).await
}

fn answer(id: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "result": {} })
}

/// A batch whose client has read the event "event-1" and is gone.
async fn detach(setup: &Setup, mcp: &Mcp, script: &mut Script) {
    let mut batch = send(mcp).await;
    script.next_stream().await.send_priming("event-1");
    batch.head().await;
    batch.event().await.expect("the priming event");
    batch.fin();
    setup.events.detached(mcp, 1).await;
    setup.events.detached(mcp, "two").await;
}
