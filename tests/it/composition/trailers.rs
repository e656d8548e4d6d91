//! Bodies with trailers over real sockets.
//!
//! hyper drops a body after its trailers without polling for its end.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Request as HttpRequest, State},
    http::{HeaderMap, HeaderValue, Method, Response},
    routing::any,
};
use futures_util::{StreamExt as _, stream};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer};

use crate::{
    setup::{EXCHANGE, Exchanges},
    support::*,
};

type Tokens = Arc<Mutex<Vec<CallToken>>>;

/// Answers with data, followed by a checksum in the trailers.
async fn answer(State(tokens): State<Tokens>, request: HttpRequest) -> Response<Body> {
    let token = request.extensions().get::<CallToken>().cloned();
    tokens
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .extend(token);
    let is_get = *request.method() == Method::GET;
    request.into_body().collect().await.expect("a whole body");
    let data = "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{}}\n\n";
    let checksum = HeaderMap::from_iter([(
        http::HeaderName::from_static("x-checksum"),
        HeaderValue::from_static("7"),
    )]);
    let frames = [Frame::data(Bytes::from(data)), Frame::trailers(checksum)];
    let frames = stream::iter(frames.map(Ok::<_, Infallible>));
    // A poll for the end would wait forever.
    let body = Body::new(StreamBody::new(frames.chain(stream::pending())));
    let response = Response::builder().header("trailer", "x-checksum");
    let content_type = if is_get {
        "text/html"
    } else {
        "text/event-stream"
    };
    let response = response.header("content-type", content_type);
    response.body(body).expect("a response")
}

#[tokio::test]
async fn a_client_that_received_data_and_trailers_did_not_disconnect() {
    let layer = CancelOnDisconnectLayer::new();
    let tokens = Tokens::default();
    let app = Router::new()
        .route("/mcp", any(answer))
        .with_state(tokens.clone())
        .layer(layer.clone());
    let exchanges = Exchanges::default();
    let served = serve(exchanges.watch(app)).await;
    let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"t"}}"#;
    let post = |name: &str| {
        let post = Request::new("POST", "/mcp").header("content-type", "application/json");
        post.header("te", "trailers")
            .header(EXCHANGE, name)
            .body(call)
    };
    let get = |name: &str| {
        let get = Request::new("GET", "/mcp").header("te", "trailers");
        get.header(EXCHANGE, name)
    };

    for (name, request) in [("call", post("call")), ("plain", get("plain"))] {
        let reply = Connection::fetch(served.addr, &request).await;
        assert!(!reply.body.is_empty());
        exchanges.over_for(name).await;
    }
    let mut h2 = H2::open(served.addr).await;
    for (name, request) in [("call-2", post("call-2")), ("plain-2", get("plain-2"))] {
        let mut stream = h2.send(&request).await;
        assert!(!stream.body_to_end().await.is_empty());
        exchanges.over_for(name).await;
    }

    let tokens = tokens.lock().unwrap_or_else(PoisonError::into_inner);
    let reasons: Vec<_> = tokens.iter().map(CallToken::reason).collect();
    assert_eq!(reasons, [None; 4]);
    assert!(layer.calls().is_empty());
}
