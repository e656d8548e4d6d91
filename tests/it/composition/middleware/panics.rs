//! Panics in the services around a call in flight.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use axum::{
    Router,
    extract::{Request, State},
    middleware::{Next, from_fn_with_state},
    response::Response,
};
use mcp_cancel_on_disconnect::{CancelReason::ServicePanicked, Outcome};
use serde_json::json;
use tower_http::catch_panic::CatchPanicLayer;

use super::{text, whole_answer};
use crate::{
    log::number,
    stack::{Bench, SessionMode},
    support::*,
};

/// Adds a middleware that panics once, after the inner response, if a request asks it to.
fn fragile(app: Router) -> Router {
    async fn panic_once(
        State(has_panicked): State<Arc<AtomicBool>>,
        request: Request,
        next: Next,
    ) -> Response {
        let panics = request.headers().contains_key("x-panic");
        let response = next.run(request).await;
        // Panic only once, because a replayed cancellation has its call's headers.
        if panics && !has_panicked.swap(true, Ordering::Relaxed) {
            panic!("a middleware panics on purpose");
        }
        response
    }
    app.layer(from_fn_with_state(Arc::default(), panic_once))
}

/// Returns the reply to a call during which a middleware inside the layer panics.
async fn call_with_panic(bench: &Bench) -> (Mcp, Reply) {
    let mcp = bench.client(&[]).await;
    let panicking = mcp.clone().header("x-panic", "1");
    let mut call = panicking.call(1, "hold", json!({ "label": "a" })).await;
    let reply = call.reply().await;
    (mcp, reply)
}

async fn assert_session_works(mcp: &Mcp) {
    let mut echo = mcp.call(2, "echo", json!({ "text": "again" })).await;
    assert_eq!(text(&whole_answer(&mut echo).await), "again");
}

#[tokio::test]
async fn a_panic_that_is_caught_outside_cancels_the_call() {
    for mode in SessionMode::ALL {
        let bench = Bench::new(mode, |rmcp, cancel| {
            fragile(rmcp).layer(cancel).layer(CatchPanicLayer::new())
        })
        .await;
        let (mcp, reply) = call_with_panic(&bench).await;
        assert_eq!(reply.status, 500, "{mode:?}");
        let expected = match mode {
            // No handler has asked for its token yet, and there is no session.
            SessionMode::Stateless => Outcome::Abandoned(ServicePanicked),
            SessionMode::Wrapped | SessionMode::LayerOnly => Outcome::Cancelled(ServicePanicked),
        };
        assert_eq!(bench.log.ends(&number(1)), [expected], "{mode:?}");
        assert_session_works(&mcp).await;
        assert!(bench.layer.calls().is_empty(), "{mode:?}");
        // The handler might not have started.
        if bench.witness.starts("a") > 0 {
            assert!(bench.witness.ended("a").await.is_cancelled(), "{mode:?}");
        }
    }
}

#[tokio::test]
async fn a_panic_that_is_caught_inside_cancels_the_call_if_it_was_bound() {
    let bench = Bench::new(SessionMode::Wrapped, |rmcp, cancel| {
        fragile(rmcp).layer(CatchPanicLayer::new()).layer(cancel)
    })
    .await;
    let (mcp, reply) = call_with_panic(&bench).await;
    assert_eq!(reply.status, 500);
    assert_eq!(bench.log.cancelled(), [(number(1), ServicePanicked)]);
    assert_session_works(&mcp).await;
}
