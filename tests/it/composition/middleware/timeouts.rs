//! Timeouts that expire. The clock jumps, so no test has to wait.

use std::time::Duration;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::Response,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer,
    CancelReason::{self, ClientDisconnected, ResponseDropped},
    Outcome,
};
use serde_json::json;
use tower_http::timeout::{ResponseBodyTimeoutLayer, TimeoutLayer};

use super::{text, whole_answer};
use crate::{
    log::number,
    stack::{Bench, SessionMode, bare, listening},
    support::*,
};

/// Less than rmcp's keep-alive of 15 s.
///
/// The keep-alive does not follow the jump, so it would fire all the time.
const LIMIT: Duration = Duration::from_secs(10);

fn timeout() -> TimeoutLayer {
    TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LIMIT)
}

/// Sends no head until it has the whole body.
///
/// A middleware that signs or rewrites responses does the same.
async fn collected(request: Request, next: Next) -> Response {
    let (head, body) = next.run(request).await.into_parts();
    let body = to_bytes(body, usize::MAX).await.expect("a body");
    Response::from_parts(head, Body::from(body))
}

/// Advances the clock past the limit.
async fn time_out() {
    tokio::time::pause();
    tokio::time::advance(LIMIT + Duration::from_millis(1)).await;
    tokio::time::resume();
}

/// Starts a held call through the stack that `build` makes.
async fn held(
    mode: SessionMode,
    build: fn(Router, CancelOnDisconnectLayer) -> Router,
) -> (Bench, Connection) {
    let bench = Bench::new(mode, build).await;
    let call = bench.client(&[]).await;
    let call = call.call(1, "hold", json!({ "label": "a" })).await;
    bench.witness.started("a").await;
    (bench, call)
}

/// Like [`held`], but after the limit for the head has passed.
async fn timed_out(
    mode: SessionMode,
    build: fn(Router, CancelOnDisconnectLayer) -> Router,
) -> (Bench, Connection) {
    let (bench, call) = held(mode, build).await;
    time_out().await;
    (bench, call)
}

/// Like [`held`], but once the body has started and been silent for longer than its limit.
async fn silent(
    mode: SessionMode,
    build: fn(Router, CancelOnDisconnectLayer) -> Router,
) -> (Bench, Connection) {
    let (bench, mut call) = held(mode, build).await;
    call.head().await;
    if mode != SessionMode::Stateless {
        call.event().await.expect("the priming event");
    }
    time_out().await;
    (bench, call)
}

#[tokio::test]
async fn a_timeout_outside_that_fires_is_a_disconnect() {
    for mode in SessionMode::ALL {
        let (bench, mut call) = timed_out(mode, |rmcp, cancel| {
            rmcp.layer(from_fn(collected))
                .layer(cancel)
                .layer(timeout())
        })
        .await;
        assert_eq!(call.reply().await.status, 504, "{mode:?}");
        assert!(bench.witness.ended("a").await.is_cancelled(), "{mode:?}");
        let cancelled = [(number(1), ClientDisconnected)];
        assert_eq!(bench.log.cancelled(), cancelled, "{mode:?}");
        assert!(bench.layer.calls().is_empty(), "{mode:?}");
    }
}

#[tokio::test]
async fn a_timeout_outside_that_fires_is_a_disconnect_of_a_call_with_a_json_answer() {
    let start = async |witness: &Witness, cancel: CancelOnDisconnectLayer| {
        let rmcp = router(listening(witness).service(Mode::StatelessJson, bare()));
        let served = serve(rmcp.layer(cancel).layer(timeout())).await;
        (served.addr, served)
    };
    let bench = Bench::start(SessionMode::Stateless, start).await;
    let mcp = bench.client(&[]).await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    bench.witness.started("a").await;
    time_out().await;
    assert_eq!(call.reply().await.status, 504);
    assert!(bench.witness.ended("a").await.is_cancelled());
    let cancelled = [(number(1), ClientDisconnected)];
    assert_eq!(bench.log.cancelled(), cancelled);
}

fn inside(rmcp: Router, cancel: CancelOnDisconnectLayer) -> Router {
    rmcp.layer(from_fn(collected))
        .layer(timeout())
        .layer(cancel)
}

#[tokio::test]
async fn a_call_whose_response_an_inner_timeout_dropped_is_cancelled_if_it_was_bound() {
    let (bench, mut call) = timed_out(SessionMode::Wrapped, inside).await;
    assert_eq!(call.reply().await.status, 504);
    assert!(bench.witness.ended("a").await.is_cancelled());
    assert_eq!(bench.log.cancelled(), [(number(1), ResponseDropped)]);
    assert!(bench.layer.calls().is_empty());
}

#[tokio::test]
async fn a_call_whose_response_an_inner_timeout_dropped_has_failed_if_it_was_not_bound() {
    for mode in [SessionMode::LayerOnly, SessionMode::Stateless] {
        let (bench, mut call) = timed_out(mode, inside).await;
        assert_eq!(call.reply().await.status, 504, "{mode:?}");
        assert_eq!(bench.log.ends(&number(1)), [Outcome::Failed], "{mode:?}");
        assert_eq!(bench.log.cancelled(), [], "{mode:?}");
        assert!(bench.layer.calls().is_empty(), "{mode:?}");
    }
}

#[tokio::test]
async fn a_session_continues_after_a_timeout_inside() {
    let bench = Bench::new(SessionMode::Wrapped, inside).await;
    let mcp = bench.client(&[]).await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    bench.witness.started("a").await;
    time_out().await;
    assert_eq!(call.reply().await.status, 504);
    assert!(bench.witness.ended("a").await.is_cancelled());
    let mut echo = mcp.call(1, "echo", json!({ "text": "again" })).await;
    assert_eq!(text(&whole_answer(&mut echo).await), "again");
    assert_eq!(bench.log.ends(&number(1))[1..], [Outcome::Completed]);
}

#[tokio::test]
async fn a_body_that_times_out_inside_is_a_dropped_response() {
    let inside = |rmcp: Router, cancel: CancelOnDisconnectLayer| {
        rmcp.layer(ResponseBodyTimeoutLayer::new(LIMIT))
            .layer(cancel)
    };
    assert_times_out(inside, ResponseDropped).await;
}

#[tokio::test]
async fn a_body_that_times_out_outside_is_a_disconnect() {
    let outside = |rmcp: Router, cancel: CancelOnDisconnectLayer| {
        rmcp.layer(cancel)
            .layer(ResponseBodyTimeoutLayer::new(LIMIT))
    };
    assert_times_out(outside, ClientDisconnected).await;
}

/// Asserts that a stack with a time limit on bodies cancels the call for this reason.
async fn assert_times_out(
    stack: fn(Router, CancelOnDisconnectLayer) -> Router,
    reason: CancelReason,
) {
    for mode in SessionMode::ALL {
        let (bench, mut call) = silent(mode, stack).await;
        assert_eq!(call.answer().await, None, "{mode:?}");
        assert!(!call.is_complete(), "{mode:?}");
        assert!(bench.witness.ended("a").await.is_cancelled(), "{mode:?}");
        assert_eq!(bench.log.cancelled(), [(number(1), reason)], "{mode:?}");
    }
}
