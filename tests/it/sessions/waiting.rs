//! Requests that wait between the layer and rmcp for longer than the session's idle timeout.

use crate::setup::Setup;
use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::to_bytes,
    extract::Request,
    middleware::{Next, from_fn},
};
use rmcp::transport::streamable_http_server::session::local::SessionConfig;
use serde_json::json;
use tokio::sync::Notify;

use super::idle::{default_plan, eventually, is_open, settle};
use crate::{setup::StoppedClock, support::*};

const IDLE: Duration = SessionConfig::DEFAULT_KEEP_ALIVE;

/// The header of a request that waits. Its value specifies whether it waits before or after its body is read.
const WAIT_HEADER: &str = "x-waits";

/// A queue in front of rmcp.
#[derive(Clone, Default)]
struct Queue {
    waiting: Arc<Notify>,
    turn: Arc<Notify>,
}

// === impl Queue ===

impl Queue {
    fn before(self, router: Router) -> Router {
        let wait = move |request: Request, next: Next| {
            let queue = self.clone();
            async move {
                let Some(when) = request.headers().get(WAIT_HEADER).cloned() else {
                    return next.run(request).await;
                };
                let (head, mut body) = request.into_parts();
                if when == "after" {
                    let whole = to_bytes(body, usize::MAX).await;
                    body = whole.expect("a body").into();
                }
                queue.waiting.notify_one();
                queue.turn.notified().await;
                next.run(Request::from_parts(head, body)).await
            }
        };
        router.layer(from_fn(wait))
    }

    async fn entered(&self) {
        within("a request to wait", self.waiting.notified()).await;
    }
}

#[tokio::test]
async fn a_call_that_waits_keeps_its_session() {
    let clock = StoppedClock::stop();
    for when in ["before", "after"] {
        let (setup, queue) = queued().await;
        let mcp = setup.mcp().await;
        let call = mcp.call_request(1, "echo", json!({ "text": "late" }));
        let mut call = mcp.send(&call.header(WAIT_HEADER, when)).await;
        queue.entered().await;
        settle(&setup).await;
        assert_eq!(setup.calls.len(), usize::from(when == "after"));

        clock.advance(2 * IDLE).await;
        settle(&setup).await;
        assert!(is_open(&setup, &mcp).await, "{when}");

        queue.turn.notify_one();
        let answer = call.answer().await.expect("an answer");
        assert_eq!(answer["result"]["content"][0]["text"], "late", "{when}");
        assert_closed(&clock, &setup, &mcp).await;
    }
}

#[tokio::test]
async fn a_stream_that_waits_to_be_opened_keeps_its_session() {
    let clock = StoppedClock::stop();
    let (setup, queue) = queued().await;
    let mcp = setup.mcp().await;
    let listen = mcp.get_request().header(WAIT_HEADER, "before");
    let mut listen = mcp.send(&listen).await;
    queue.entered().await;
    settle(&setup).await;

    clock.advance(2 * IDLE).await;
    settle(&setup).await;

    queue.turn.notify_one();
    assert_eq!(listen.head().await.status, 200);
}

/// The layer has sent the head itself.
#[tokio::test]
async fn a_call_that_waits_behind_an_early_head_keeps_its_session() {
    let queue = Queue::default();
    let inside = queue.clone();
    let plan = default_plan().layer(|layer| layer.commit_after(IDLE / 2));
    let (clock, setup, mcp) = plan.inside(|router| inside.before(router)).stopped().await;
    let call = mcp.call_request(1, "echo", json!({ "text": "late" }));
    let mut call = mcp.send(&call.header(WAIT_HEADER, "after")).await;
    queue.entered().await;
    settle(&setup).await;
    clock.advance(IDLE / 2 + Duration::from_millis(1)).await;
    assert_eq!(call.head().await.status, 200);

    clock.advance(2 * IDLE).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await);

    queue.turn.notify_one();
    let answer = call.answer().await.expect("an answer");
    assert_eq!(answer["result"]["content"][0]["text"], "late");
}

#[tokio::test]
async fn a_waiting_call_of_a_disconnected_client_does_not_keep_its_session_open() {
    let clock = StoppedClock::stop();
    let (setup, queue) = queued().await;
    let mcp = setup.mcp().await;
    let call = mcp.call_request(1, "echo", json!({ "text": "late" }));
    let call = mcp.send(&call.header(WAIT_HEADER, "before")).await;
    queue.entered().await;

    drop(call);
    settle(&setup).await;
    assert_closed(&clock, &setup, &mcp).await;
}

/// Asserts that the session is closed for being idle.
async fn assert_closed(clock: &StoppedClock, setup: &Setup, mcp: &Mcp) {
    eventually("the session to be closed", async || {
        clock.advance_past(Duration::from_millis(500)).await;
        !is_open(setup, mcp).await
    })
    .await;
}

async fn queued() -> (Setup, Queue) {
    let queue = Queue::default();
    let inside = queue.clone();
    let plan = default_plan().inside(|router| inside.before(router));
    (plan.start().await, queue)
}
