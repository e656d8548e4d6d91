//! `CallToken` as an axum extractor.

use std::sync::{Arc, Mutex};

use axum::{
    Router,
    body::{Body, Bytes},
    routing::{get, post},
};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancelReason::ClientDisconnected, Event, Outcome,
};
use tokio::sync::mpsc;
use tower::ServiceExt as _;

use super::exchange::poll_once;

fn report() -> Request<Body> {
    Request::get("/report")
        .body(Body::empty())
        .expect("a request")
}

#[tokio::test]
async fn a_handler_that_extracts_the_token_detects_the_disconnect() {
    let (handed_out, mut tokens) = mpsc::unbounded_channel();
    let route = get(async move |token: CallToken| {
        handed_out.send(token).expect("the test is listening");
        std::future::pending::<()>().await
    });
    let app: Router = Router::new()
        .route("/report", route)
        .layer(CancelOnDisconnectLayer::new());
    let mut response = Box::pin(app.oneshot(report()));
    assert!(poll_once(response.as_mut()).is_pending());
    let token = tokens.recv().await.expect("the handler is running");
    assert!(!token.is_cancelled());
    drop(response);
    token.cancelled().await;
    assert_eq!(token.reason(), Some(ClientDisconnected));
}

#[tokio::test]
async fn an_optional_token_is_none_only_on_a_route_without_the_layer() {
    let token = get(async |token: Option<CallToken>| match token {
        Some(_) => "some",
        None => "none",
    });
    let layer = CancelOnDisconnectLayer::new();
    let with_layer: Router = Router::new().route("/report", token.clone()).layer(layer);
    let without: Router = Router::new().route("/report", token);
    for (app, expected) in [(with_layer, "some"), (without, "none")] {
        let response = app.oneshot(report()).await.expect("a router never fails");
        let body = response.into_body().collect().await.expect("a body");
        assert_eq!(body.to_bytes(), expected);
    }
}

#[tokio::test]
async fn a_route_without_the_layer_answers_500_with_the_reason() {
    let app: Router = Router::new().route("/report", get(async |_: CallToken| "done"));
    let response = app.oneshot(report()).await.expect("a router never fails");
    assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
    let body = response.into_body().collect().await.expect("a body");
    assert_eq!(body.to_bytes(), "the route has no CancelOnDisconnectLayer");
}

/// A handler that holds the token can check it at any time.
///
/// The cancellation therefore counts as delivered.
#[tokio::test]
async fn a_call_whose_handler_extracts_the_token_is_cancelled_and_not_abandoned() {
    let strict = post(async |_: CallToken, _: Bytes| std::future::pending::<()>().await);
    let lenient = post(async |_: Option<CallToken>, _: Bytes| std::future::pending::<()>().await);
    for route in [strict, lenient] {
        let outcomes: Arc<Mutex<Vec<Outcome>>> = Arc::default();
        let seen = outcomes.clone();
        let layer = CancelOnDisconnectLayer::new().observe(move |event: &Event<'_>| {
            if let Event::Ended { outcome, .. } = event {
                seen.lock().unwrap().push(*outcome);
            }
        });
        let app: Router = Router::new().route("/report", route).layer(layer);
        let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a"}}"#;
        let call = Request::post("/report")
            .header("content-type", "application/json")
            .body(Body::from(call));
        let mut response = Box::pin(app.oneshot(call.expect("a request")));
        assert!(poll_once(response.as_mut()).is_pending());
        drop(response);
        let cancelled = Outcome::Cancelled(ClientDisconnected);
        assert_eq!(*outcomes.lock().unwrap(), [cancelled]);
    }
}

/// A cancellation that the layer replays passes through the same extractors as a client's request.
#[tokio::test]
async fn a_server_whose_handler_takes_the_token_is_notified_of_the_cancel() {
    let (sender, mut cancels) = mpsc::unbounded_channel();
    let serve = async move |is_cancel: bool, token: Option<CallToken>| {
        if !is_cancel {
            return std::future::pending().await;
        }
        let token = token.expect("the route has the layer");
        assert!(token.is_replay() && !token.is_cancelled());
        sender.send(()).expect("the test is listening");
        StatusCode::ACCEPTED
    };
    let is_cancel = |body: &str| body.contains("notifications/cancelled");
    let (one, other, third) = (serve.clone(), serve.clone(), serve);
    let extracted =
        post(async move |token: CallToken, body: String| one(is_cancel(&body), Some(token)).await);
    let optional = post(async move |token: Option<CallToken>, body: String| {
        other(is_cancel(&body), token).await
    });
    let extension = post(
        async move |axum::Extension(token): axum::Extension<CallToken>, body: String| {
            third(is_cancel(&body), Some(token)).await
        },
    );
    for route in [extracted, optional, extension] {
        let layer = CancelOnDisconnectLayer::new();
        let app: Router = Router::new().route("/mcp", route).layer(layer);
        let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a"}}"#;
        let call = Request::post("/mcp")
            .header("content-type", "application/json")
            .header("mcp-session-id", "s")
            .body(Body::from(call));
        let mut response = Box::pin(app.oneshot(call.expect("a request")));
        assert!(poll_once(response.as_mut()).is_pending());
        drop(response);
        let cancel = crate::support::within("the cancel to arrive", cancels.recv());
        cancel.await.expect("the server receives the cancel");
    }
}
