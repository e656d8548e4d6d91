//! The layer in places where it does not belong. Even there, no client cancels another's call.
//!
//! `middleware` shows that clients can still cancel their own calls in most of these orders.

use axum::Router;
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use serde_json::json;
use tower_http::compression::CompressionLayer;

use crate::stack::{Bench, SessionMode};

type Build = fn(Router, CancelOnDisconnectLayer) -> Router;

/// Orders that the documentation advises against.
const ORDERS: [(&str, Build); 5] = [
    ("two separate layers", |rmcp, cancel| {
        rmcp.layer(CancelOnDisconnectLayer::new()).layer(cancel)
    }),
    ("the same layer twice", |rmcp, cancel| {
        rmcp.layer(cancel.clone()).layer(cancel)
    }),
    ("a route layer", |rmcp, cancel| rmcp.route_layer(cancel)),
    ("a route layer inside another", |rmcp, cancel| {
        rmcp.route_layer(CancelOnDisconnectLayer::new())
            .layer(cancel)
    }),
    ("compression inside", |rmcp, cancel| {
        rmcp.layer(CompressionLayer::new()).layer(cancel)
    }),
];

#[tokio::test]
async fn no_order_of_layers_lets_a_client_cancel_the_call_of_another() {
    for (order, build) in ORDERS {
        for mode in SessionMode::ALL {
            let bench = Bench::new(mode, build).await;
            let accepts = [("accept-encoding", "gzip")];
            let (victim, attacker) = (bench.client(&accepts).await, bench.client(&accepts).await);
            let mut call = victim.call(7, "hold", json!({ "label": "victim" })).await;
            bench.witness.started("victim").await;

            let same = attacker.call(7, "hold", json!({ "label": "same" })).await;
            bench.witness.started("same").await;
            same.fin();
            attacker.cancel(7).await;
            attacker.resume("0/0").await.rst();
            attacker.delete().await;
            let mut echo = victim.call("echo", "echo", json!({ "text": "hi" })).await;
            echo.reply().await;

            assert!(bench.witness.is_running("victim"), "{order}, {mode:?}");
            bench.witness.release("victim");
            let reply = call.reply().await;
            assert_eq!(reply.status, 200, "{order}, {mode:?}");
            let ended = bench.witness.ended("victim").await;
            assert!(ended.is_completed(), "{order}, {mode:?}");
        }
    }
}
