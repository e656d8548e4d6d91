//! A `tracing` subscriber that panics.

use std::{convert::Infallible, io, time::Duration};

use axum::body::{Body, to_bytes};
use http::{Request, Response};
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, Grace, body::TeeBody};
use tokio::sync::mpsc;
use tower::{Layer as _, ServiceExt as _, service_fn};
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::{
    Layer as _,
    filter::{LevelFilter, Targets},
    fmt,
    layer::SubscriberExt as _,
};

use crate::setup::{Plan, Server, for_servers};

for_servers!(sessions {
    a_subscriber_that_panics_does_not_prevent_a_cancel_after_a_grace,
});

async fn a_subscriber_that_panics_does_not_prevent_a_cancel_after_a_grace(server: Server) {
    const GRACE: Duration = Duration::from_secs(20);
    let _panics = panicking_subscriber();
    let (clock, setup, mcp) = Plan::of(server).grace(Grace::After(GRACE)).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE + Duration::from_millis(1)).await;
    assert!(setup.witness.ended("a").await.is_cancelled());
}

#[tokio::test]
async fn a_subscriber_that_panics_does_not_prevent_a_cancel_at_once() {
    let _panics = panicking_subscriber();
    let (hand_out, mut tokens) = mpsc::unbounded_channel();
    let layer = CancelOnDisconnectLayer::new();
    let server = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
        let token = request.extensions().get::<CallToken>().cloned();
        let _taken = hand_out.send(token);
        async {
            to_bytes(Body::new(request.into_body()), 1024)
                .await
                .unwrap();
            let events = futures_util::stream::pending::<Result<&str, Infallible>>();
            let head = Response::builder().header("content-type", "text/event-stream");
            Ok::<_, Infallible>(head.body(Body::from_stream(events)).unwrap())
        }
    }));
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"report"}}"#;
    let request = Request::post("/mcp").header("content-type", "application/json");
    let response = server
        .oneshot(request.body(Body::from(call)).unwrap())
        .await;
    let token = tokens.recv().await.unwrap().unwrap();
    drop(response);
    assert!(token.is_cancelled());
    assert!(layer.calls().is_empty());
}

/// Makes each of the layer's lines panic, like a subscriber that prints to a closed stderr.
fn panicking_subscriber() -> DefaultGuard {
    let panics = fmt::layer().with_writer(|| -> io::Stderr { panic!("on purpose") });
    let of_layer = Targets::new().with_target("mcp_cancel_on_disconnect", LevelFilter::TRACE);
    let log = tracing_subscriber::registry().with(panics.with_filter(of_layer));
    tracing::subscriber::set_default(log)
}
