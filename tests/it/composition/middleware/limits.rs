//! Limits that have been reached.

use axum::Router;
use http::StatusCode;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancelReason::ClientDisconnected};
use serde_json::json;
use tower::limit::ConcurrencyLimitLayer;
use tower_http::limit::RequestBodyLimitLayer;

use super::{text, whole_answer};
use crate::{
    log::number,
    stack::{Bench, SessionMode, bare, listening},
    support::*,
};

#[tokio::test]
async fn a_call_over_the_body_limit_is_refused_as_without_the_layer() {
    let builds: [fn(Router, CancelOnDisconnectLayer) -> Router; 2] = [
        |rmcp, cancel| rmcp.layer(RequestBodyLimitLayer::new(1_024)).layer(cancel),
        |rmcp, cancel| rmcp.layer(cancel).layer(RequestBodyLimitLayer::new(1_024)),
    ];
    for build in builds {
        for mode in SessionMode::ALL {
            let bench = Bench::new(mode, build).await;
            let bare = Bench::new(mode, |rmcp, _| {
                rmcp.layer(RequestBodyLimitLayer::new(1_024))
            })
            .await;
            let mut replies = Vec::new();
            for bench in [&bench, &bare] {
                let mcp = bench.client(&[]).await;
                let large = json!({ "label": "x".repeat(2_000) });
                // The request is chunked, so its length is not known in advance.
                let mut call = Connection::open(bench.addr).await;
                call.send_chunked(&mcp.call_request(1, "hold", large), &[100, 900])
                    .await;
                let reply = call.reply().await;
                replies.push((reply.status, reply.text().to_owned()));
            }
            assert_eq!(replies[0], replies[1], "{mode:?}");
            assert_eq!(bench.log.cancelled(), [], "{mode:?}");
            assert!(bench.layer.calls().is_empty(), "{mode:?}");
        }
    }
}

#[tokio::test]
async fn a_disconnect_before_the_head_releases_the_permit_for_the_next_call() {
    let builds: [fn(Router, CancelOnDisconnectLayer) -> Router; 2] = [
        |rmcp, cancel| rmcp.layer(ConcurrencyLimitLayer::new(1)).layer(cancel),
        |rmcp, cancel| rmcp.layer(cancel).layer(ConcurrencyLimitLayer::new(1)),
    ];
    for build in builds {
        let start = async |witness: &Witness, cancel: CancelOnDisconnectLayer| {
            let rmcp = router(listening(witness).service(Mode::StatelessJson, bare()));
            let served = serve(build(rmcp, cancel)).await;
            (served.addr, served)
        };
        let bench = Bench::start(SessionMode::Stateless, start).await;
        let mcp = bench.client(&[]).await;
        let cancelled = mcp.call(1, "hold", json!({ "label": "gone" })).await;
        bench.witness.started("gone").await;
        let mut next = mcp.call(2, "hold", json!({ "label": "next" })).await;
        cancelled.fin();
        let started = bench.witness.started("next").await;
        let ended = bench.witness.ended("gone").await;
        assert!(ended.is_cancelled());
        assert!(ended.at() <= started, "one at a time");
        bench.witness.release("next");
        assert_eq!(text(&whole_answer(&mut next).await), "done:next");
        let cancelled = [(number(1), ClientDisconnected)];
        assert_eq!(bench.log.cancelled(), cancelled);
    }
}

#[tokio::test]
async fn a_refused_request_leaves_no_state_in_an_outer_layer() {
    for mode in SessionMode::ALL {
        let bench = Bench::new(mode, |rmcp, cancel| {
            let refuse =
                axum::middleware::from_fn(async |request, next: axum::middleware::Next| {
                    let request: axum::extract::Request = request;
                    if request.headers().contains_key("x-refuse") {
                        Err(StatusCode::TOO_MANY_REQUESTS)
                    } else {
                        Ok(next.run(request).await)
                    }
                });
            rmcp.layer(refuse).layer(cancel)
        })
        .await;
        let mcp = bench.client(&[]).await;
        let refused = mcp.clone().header("x-refuse", "1");
        let mut call = refused.call(1, "hold", json!({ "label": "a" })).await;
        assert_eq!(call.reply().await.status, 429, "{mode:?}");
        assert_eq!(bench.log.started(), 0, "{mode:?}");
        assert!(bench.layer.calls().is_empty(), "{mode:?}");
    }
}
