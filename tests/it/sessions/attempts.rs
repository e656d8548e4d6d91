//! A middleware between the layer and the session manager that sends requests more than once.

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::Response,
};
use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome};
use std::time::Duration;

use crate::{
    setup::{DISCONNECTED, EventKind, Plan, Server, Setup},
    support::*,
};

/// Longer than a test takes.
const GRACE: Duration = Duration::from_secs(3_600);

const DROPPED: Outcome = Outcome::Cancelled(CancelReason::ResponseDropped);

/// What the middleware does with the first response.
#[derive(Clone, Copy, PartialEq, Eq)]
enum First {
    /// Drops it once the second response has arrived, as a hedge would.
    Hedged,
    /// Drops it before the request is sent again, as a retry after a timeout would.
    TimedOut,
    /// Reads it in full and discards it.
    Answered,
}

#[tokio::test]
async fn an_attempt_that_is_dropped_does_not_cancel_the_one_that_won() {
    let (setup, mcp) = repeating(First::Hedged, Grace::Immediate).await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    assert_eq!(setup.calls.len(), 1);
    setup.assert_usable(&mcp).await;
    assert_eq!(setup.events.of(&mcp, 1), [EventKind::Started]);

    setup.witness.release("a");

    call.assert_done("a").await;
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
}

#[tokio::test]
async fn a_disconnect_cancels_the_attempt_that_won() {
    let (setup, mcp) = repeating(First::Hedged, Grace::Immediate).await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;

    call.fin();

    assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
    assert!(setup.calls.is_empty());
}

/// The first attempt is waiting for its client, and the second attempt counts as that client.
#[tokio::test]
async fn an_attempt_after_one_that_timed_out_is_not_cancelled_instead() {
    let (setup, mcp) = repeating(First::TimedOut, Grace::After(GRACE)).await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    assert_eq!((setup.calls.len(), setup.calls.detached()), (1, 0));

    setup.witness.release("a");

    call.assert_done("a").await;
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
}

#[tokio::test]
async fn an_attempt_after_one_that_was_cancelled_is_a_separate_call() {
    let (setup, mcp) = repeating(First::TimedOut, Grace::Immediate).await;
    let mut call = mcp.call(1, "hold", arguments("a")).await;
    call.head().await;
    assert_eq!(ends(&setup, &mcp), [DROPPED]);
    assert_eq!(setup.calls.len(), 1);

    call.fin();

    setup.events.ended_times(&mcp, 1, 2).await;
    assert_eq!(ends(&setup, &mcp), [DROPPED, DISCONNECTED]);
    assert!(setup.calls.is_empty());
}

#[tokio::test]
async fn an_attempt_after_one_that_was_answered_is_a_separate_call() {
    let (setup, mcp) = repeating(First::Answered, Grace::Immediate).await;
    let mut call = mcp
        .call(1, "echo", serde_json::json!({ "text": "a" }))
        .await;

    assert!(call.answer().await.is_some());

    setup.events.ended_times(&mcp, 1, 2).await;
    assert_eq!(ends(&setup, &mcp), [Outcome::Completed; 2]);
}

/// Returns how the calls for request 1 have ended.
fn ends(setup: &Setup, mcp: &Mcp) -> Vec<Outcome> {
    let all = setup.events.of(mcp, 1);
    let ends = all.into_iter().filter_map(|kind| match kind {
        EventKind::Ended(outcome) => Some(outcome),
        _ => None,
    });
    ends.collect()
}

fn arguments(label: &str) -> serde_json::Value {
    serde_json::json!({ "label": label })
}

async fn repeating(first: First, grace: Grace) -> (Setup, Mcp) {
    let repeat = move |request: Request, next: Next| repeat(first, request, next);
    let plan = Plan::of(Server::Wrapped).grace(grace);
    let setup = plan.inside(move |router: Router| router.layer(from_fn(repeat)));
    let (setup, mcp) = setup.client().await;
    (setup, mcp)
}

/// Sends the call with id 1 twice.
async fn repeat(first: First, request: Request, next: Next) -> Response {
    let (head, body) = request.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("a body");
    let attempt = || Request::from_parts(head.clone(), Body::from(body.clone()));
    let text = String::from_utf8_lossy(&body);
    let is_repeated = text.contains("tools/call") && text.contains("\"id\":1,");
    if !is_repeated {
        return next.run(attempt()).await;
    }
    let beaten = next.clone().run(attempt()).await;
    match first {
        First::Hedged => {
            let won = next.run(attempt()).await;
            drop(beaten);
            won
        }
        First::TimedOut => {
            drop(beaten);
            next.run(attempt()).await
        }
        First::Answered => {
            let _answer = to_bytes(beaten.into_body(), usize::MAX).await;
            next.run(attempt()).await
        }
    }
}
