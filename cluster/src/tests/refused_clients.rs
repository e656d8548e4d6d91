//! Clients that the application refuses, which must not cancel waiting calls or get others' answers.

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
    routing::get,
};
use http::StatusCode;
use serde_json::json;
use test_support::{Mcp, PATH, within};
use tower_service::Service as _;

use super::{
    node::{Node, Setup, pass},
    steps::{SECOND, directory, post, run_other_tasks},
};

/// Adds a layer of an application that knows each session's user. Bob has no session.
fn refuse_bob(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        let user = request.headers().get("authorization");
        if user.is_some_and(|user| user == "Bearer bob") {
            return StatusCode::FORBIDDEN.into_response();
        }
        next.run(request).await
    }))
}

/// Sends a cancellation that the application refuses.
async fn refused_cancel(node: &Node, mcp: &Mcp, id: u32, change: fn(&mut Request)) {
    let cancel = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": id },
    });
    let mut refused = post(mcp, &cancel);
    change(&mut refused);
    let refused = node.app.clone().call(refused).await.unwrap();
    assert!(refused.status().is_client_error(), "{refused:?}");
    run_other_tasks().await;
}

/// Waits out a call after the application has refused a cancellation for it, and returns its answer.
///
/// The call is waiting for its session to be transferred.
async fn waiting_call_after_a_refused_cancel(change: fn(&mut Request)) -> serde_json::Value {
    let directory = directory();
    let [a, b] = Setup::start_pair(&directory, refuse_bob).await;
    let mcp = a.session().await;
    let at_b = b.client_of(&mcp);
    let first = a.start_call(&at_b, 1, "first").await;
    refused_cancel(&b, &mcp, 1, change).await;
    assert!(a.witness.is_running("first"), "control: a running call");

    let _shutdown = a.routing().shutdown.begin();
    let mut second = at_b.call(2, "echo", json!({ "text": "x" })).await;
    run_other_tasks().await;
    refused_cancel(&b, &mcp, 2, change).await;
    a.witness.release("first");
    let head = within("a response head", second.head()).await;
    assert_eq!(head.status, 200);
    let body = if head.header("content-type") == Some("application/json") {
        serde_json::from_slice(&second.body_to_end().await).unwrap()
    } else {
        within("an answer", second.answer()).await.unwrap()
    };
    drop(first);
    body
}

#[tokio::test]
async fn a_cancel_that_the_application_refuses_does_not_cancel_a_waiting_call() {
    let answer = waiting_call_after_a_refused_cancel(|request| {
        let bob = "Bearer bob".parse().unwrap();
        request.headers_mut().insert("authorization", bob);
    })
    .await;
    assert!(answer["result"].is_object(), "{answer}");
}

/// rmcp's own protection against DNS rebinding.
#[tokio::test]
async fn a_cancel_for_another_host_does_not_cancel_a_waiting_call() {
    let answer = waiting_call_after_a_refused_cancel(|request| {
        let host = "evil.example".parse().unwrap();
        request.headers_mut().insert("host", host);
    })
    .await;
    assert!(answer["result"].is_object(), "{answer}");
}

/// Adds the layers of an application that checks its MCP clients, but serves news to anyone.
fn with_public_news(app: Router) -> Router {
    let news = get(async || {
        let head = [("content-type", "text/event-stream")];
        (head, ": no news\n\n")
    });
    refuse_bob(app).merge(Router::new().route("/news", news))
}

/// Bob knows the id of a session that the MCP endpoint denies him, but another path answers him with events. He can derive the rest of the
/// event id from a session of his own, because A's incarnation is the same for all of its sessions and its calls are numbered.
#[tokio::test]
async fn a_stored_answer_is_not_sent_to_another_user_at_another_path() {
    let directory = directory();
    let [mut a, b] = Setup::start_pair(&directory, with_public_news).await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "alice's").await;
    a.witness.release("alice's");
    a.witness.ended("alice's").await;
    pass(2 * SECOND).await;
    a.kill_and_expire().await;
    pass(4 * SECOND).await;

    let bob = async |path: &str| {
        let request = http::Request::get(path)
            .header("host", "localhost")
            .header("authorization", "Bearer bob")
            .header("accept", "text/event-stream")
            .header("mcp-session-id", mcp.session_id().unwrap())
            .header("last-event-id", &last_event_id)
            .body(Body::empty());
        let response = b.app.clone().call(request.unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let body = within("a body", to_bytes(response.into_body(), 1 << 20)).await;
        (status, String::from_utf8(body.unwrap().to_vec()).unwrap())
    };
    assert_eq!(bob(PATH).await.0, 403, "control");
    let (status, body) = bob("/news").await;
    assert_eq!((status, &*body), (200, ": no news\n\n"));
}
