//! Bodies reported as [`Event::UnparsedBody`](mcp_cancel_on_disconnect::Event::UnparsedBody).
//!
//! A call can be bound after its body has ended, and some bodies are never read.

use std::convert::Infallible;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract,
    middleware::{Next, from_fn},
};
use http::{Request, Response, StatusCode, header};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, Outcome, body::TeeBody, observe::ParseFailure,
};
use serde_json::json;
use tower::{Layer as _, ServiceExt as _, service_fn};

use crate::{
    log::{Happened, Log},
    setup::{EventKind, Plan, Server, Setup, slow_auth},
    support::*,
};

/// A size above the layer's limit.
const LARGE: usize = 5 * 1024 * 1024;

/// Starts a server that gets bodies some time after they have ended.
///
/// It accepts bodies that the layer does not read.
async fn start() -> Setup {
    let plan = Plan::of(Server::Wrapped).inside(slow_auth);
    let plan = plan.config(|config| config.with_max_request_body_bytes(2 * LARGE));
    plan.start().await
}

#[tokio::test]
async fn a_call_that_the_session_manager_binds_is_not_reported() {
    let setup = start().await;
    let mcp = setup.mcp().await;
    let call = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"hold","arg\u0075ments":{"label":"a"}}}"#;

    let mut call = mcp.send(&mcp.post_request(call)).await;
    assert_eq!(call.head().await.status, 200);
    setup.witness.started("a").await;
    call.fin();

    let disconnected = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(setup.events.ended(&mcp, 1).await, disconnected);
    assert_eq!(unparsed(&setup), []);
}

#[tokio::test]
async fn a_large_call_that_the_session_manager_binds_is_not_reported() {
    let setup = start().await;
    let mcp = setup.mcp().await;
    let call = mcp.call_message(1, "hold", json!({ "label": "a" }));
    let call = format!("{call}{}", " ".repeat(LARGE));

    let mut call = mcp.send(&mcp.post_request(call)).await;
    assert_eq!(call.head().await.status, 200);
    setup.witness.started("a").await;
    setup.assert_completes("a", &mut call).await;

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert_eq!(unparsed(&setup), []);
}

#[tokio::test]
async fn a_body_that_no_session_manager_binds_is_reported_once() {
    let setup = start().await;
    let mcp = setup.mcp().await;
    let batch = r#"[{"jsonrpc":"2.0","id":1,"method":"ping"}]"#;
    let notification = r#"{"jsonrpc":"2.0","meth\u006fd":"notifications/initialized"}"#;

    let mut refused = mcp.send(&mcp.post_request(batch)).await;
    assert!(refused.head().await.status >= 400);
    assert_eq!(unparsed(&setup), [ParseFailure::Batch]);

    let mut accepted = mcp.send(&mcp.post_request(notification)).await;
    assert_eq!(accepted.head().await.status, 202);
    setup.assert_usable(&mcp).await;
    assert_eq!(unparsed(&setup).len(), 2);
}

/// An earlier disconnect makes no difference.
#[tokio::test]
async fn a_body_whose_client_disconnected_before_it_was_bound_is_reported_once() {
    let wait = |router: Router| {
        router.layer(from_fn(async |request: extract::Request, next: Next| {
            let waits = request.headers().contains_key("x-waits");
            let (head, body) = request.into_parts();
            let body = to_bytes(body, usize::MAX).await.expect("a body");
            if waits {
                std::future::pending::<()>().await;
            }
            next.run(Request::from_parts(head, body.into())).await
        }))
    };
    let (setup, mcp) = Plan::of(Server::Wrapped).inside(wait).client().await;
    let request = mcp.post_request("[]").header("x-waits", "1");
    let call = mcp.send(&request).await;
    setup.assert_usable(&mcp).await;
    assert_eq!(unparsed(&setup), []);

    drop(call);

    within("the body to be reported", async {
        while unparsed(&setup).is_empty() {
            tokio::task::yield_now().await;
        }
    })
    .await;
    setup.assert_usable(&mcp).await;
    assert_eq!(unparsed(&setup).len(), 1);
}

#[tokio::test]
async fn a_body_that_is_refused_unread_is_not_reported() {
    for (name, value) in [
        (header::CONTENT_TYPE, "application/json"),
        (header::CONTENT_ENCODING, "gzip"),
        (header::CONTENT_TYPE, "application/x-www-form-urlencoded"),
    ] {
        for (status, reports) in [(StatusCode::UNAUTHORIZED, 0), (StatusCode::ACCEPTED, 1)] {
            let (layer, log) = Log::of(CancelOnDisconnectLayer::new());
            let service = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
                drop(request);
                let response = Response::builder().status(status);
                let response = response.body(Body::empty()).expect("a response");
                async { Ok::<_, Infallible>(response) }
            }));
            let mut request = Request::post(PATH)
                .header(header::CONTENT_TYPE, "application/json")
                .body(Body::from(r#"{"jsonrpc":"2.0","id":1,"method":"ping"}"#))
                .expect("a request");
            let value = value.parse().expect("a value");
            request.headers_mut().insert(name.clone(), value);

            let Ok(response) = service.oneshot(request).await;
            drop(response);

            let events = log.events();
            let unparsed = |event: &&Happened| matches!(event, Happened::UnparsedBody(_));
            assert_eq!(events.iter().filter(unparsed).count(), reports, "{name}");
            assert_eq!(events.len(), reports, "{name}: {events:?}");
        }
    }
}

fn unparsed(setup: &Setup) -> Vec<ParseFailure> {
    let reason = |event| match event {
        EventKind::UnparsedBody(reason) => Some(reason),
        _ => None,
    };
    setup.events.all().into_iter().filter_map(reason).collect()
}
