//! Panics in services around a call in flight.

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
    stack::{Bench, Way},
    support::*,
};

/// Adds a middleware that panics once after the inner response, if a request asks for it.
fn fragile(app: Router) -> Router {
    async fn fall(State(fallen): State<Arc<AtomicBool>>, request: Request, next: Next) -> Response {
        let falls = request.headers().contains_key("x-panic");
        let response = next.run(request).await;
        // Only once, because the replay of a cancel has the headers of its call.
        if falls && !fallen.swap(true, Ordering::Relaxed) {
            panic!("a middleware panics on purpose");
        }
        response
    }
    app.layer(from_fn_with_state(Arc::default(), fall))
}

/// Returns the reply to a call during which a middleware inside the layer panics.
async fn fall(bench: &Bench) -> (Mcp, Reply) {
    let mcp = bench.client(&[]).await;
    let falling = mcp.clone().header("x-panic", "1");
    let mut call = falling.call(1, "hold", json!({ "label": "a" })).await;
    let reply = call.reply().await;
    (mcp, reply)
}

async fn assert_session_works(mcp: &Mcp) {
    let mut echo = mcp.call(2, "echo", json!({ "text": "again" })).await;
    assert_eq!(text(&whole_answer(&mut echo).await), "again");
}

#[tokio::test]
async fn a_panic_that_is_caught_outside_cancels_the_call() {
    for way in Way::ALL {
        let bench = Bench::new(way, |rmcp, cancel| {
            fragile(rmcp).layer(cancel).layer(CatchPanicLayer::new())
        })
        .await;
        let (mcp, reply) = fall(&bench).await;
        assert_eq!(reply.status, 500, "{way:?}");
        let expected = match way {
            // No handler had its token yet, and it has no session.
            Way::Stateless => Outcome::Abandoned(ServicePanicked),
            Way::Wrapped | Way::LayerOnly => Outcome::Cancelled(ServicePanicked),
        };
        assert_eq!(bench.log.ends(&number(1)), [expected], "{way:?}");
        assert_session_works(&mcp).await;
        assert!(bench.layer.calls().is_empty(), "{way:?}");
        // The handler may not have started.
        if bench.witness.starts("a") > 0 {
            assert!(bench.witness.ended("a").await.is_cancelled(), "{way:?}");
        }
    }
}

#[tokio::test]
async fn a_panic_that_is_caught_inside_cancels_the_call_if_it_was_bound() {
    let bench = Bench::new(Way::Wrapped, |rmcp, cancel| {
        fragile(rmcp).layer(CatchPanicLayer::new()).layer(cancel)
    })
    .await;
    let (mcp, reply) = fall(&bench).await;
    assert_eq!(reply.status, 500);
    assert_eq!(bench.log.cancelled(), [(number(1), ServicePanicked)]);
    assert_session_works(&mcp).await;
}
