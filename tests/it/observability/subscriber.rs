//! A `tracing` subscriber that panics.

use std::{convert::Infallible, io};

use axum::body::{Body, to_bytes};
use http::{Request, Response};
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, body::TeeBody};
use tokio::sync::mpsc;
use tower::{Layer as _, ServiceExt as _, service_fn};

/// As one that prints to a closed stderr.
#[tokio::test]
async fn a_subscriber_that_panics_prevents_no_cancel() {
    let panics = tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE);
    let panics = panics.with_writer(|| -> io::Stderr { panic!("on purpose") });
    let _subscribed = tracing::subscriber::set_default(panics.finish());
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
