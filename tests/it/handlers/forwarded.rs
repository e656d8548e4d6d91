//! A tool that passes its call on to another MCP service in the same process.
//!
//! It uses the head that rmcp gives to handlers.

use std::time::Duration;

use axum::body::{Body, to_bytes};
use http::{HeaderValue, Request, header::CONTENT_LENGTH, request::Parts};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use serde_json::json;
use tokio::time::timeout;
use tower::ServiceExt as _;

use crate::{
    setup::{Plan, Scripted, Server},
    stack::wrapped,
    support::*,
};

async fn assert_inner_call_stops(keeps_extensions: bool) {
    let witness = Witness::new();
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    let calls = layer.calls();
    let backend = router(Tools::new(&witness).service(Mode::Session, wrapped())).layer(layer);
    let served = serve(backend.clone()).await;
    let inner = Mcp::session(served.addr, PATH).await;
    let session = HeaderValue::from_str(inner.session_id().expect("a session"));
    let session = session.expect("a value");
    let message = inner.call_message(1, "hold", json!({ "label": "inner" }));
    let message = message.to_string();
    let front = Scripted::new(move |context| {
        let (backend, session, message) = (backend.clone(), session.clone(), message.clone());
        async move {
            let head = context.extensions.get::<Parts>().expect("the head").clone();
            let mut request = Request::from_parts(head, Body::from(message));
            *request.uri_mut() = PATH.parse().expect("a path");
            request.headers_mut().remove(CONTENT_LENGTH);
            request.headers_mut().insert("mcp-session-id", session);
            if !keeps_extensions {
                *request.extensions_mut() = http::Extensions::default();
            }
            let Ok(response) = backend.oneshot(request).await;
            let answer = to_bytes(response.into_body(), usize::MAX).await;
            Ok(String::from_utf8_lossy(&answer.expect("a body")).into_owned())
        }
    });
    let plan = Plan::of(Server::Wrapped).abort_after(Duration::ZERO);
    let setup = plan.start_scripted(front).await;
    let mcp = setup.mcp().await;
    let call = setup.start_call(&mcp, 7, "hold", "outer").await;
    witness.started("inner").await;
    let known = calls.len();

    call.fin();

    setup.witness.ended("outer").await;
    let ended = timeout(Duration::from_secs(3), witness.ended("inner")).await;
    assert!(
        ended.is_ok(),
        "the inner handler is still running; its layer knew of {known} calls"
    );
}

#[tokio::test]
async fn a_call_that_a_tool_passes_on_stops_with_it() {
    assert_inner_call_stops(false).await;
}

#[tokio::test]
async fn a_call_that_a_tool_passes_on_with_the_extensions_of_its_request_stops_with_it() {
    assert_inner_call_stops(true).await;
}
