//! Application layers inside the cluster's layer: what they may delay, and what does not reach them.

use std::convert::Infallible;

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::{ConnectInfo, Request},
    middleware::{Next, from_fn},
    response::{IntoResponse as _, Response},
};
use futures_util::StreamExt as _;
use http::StatusCode;
use serde_json::json;
use test_support::within;
use tower_service::Service as _;

use super::{
    node::{Setup, pass},
    steps::{SECOND, directory, post_echo},
};

/// Reads each response in full before passing it on, for example to log or sign it.
fn hold_responses(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = next.run(request).await.into_parts();
        let whole = to_bytes(body, usize::MAX).await.unwrap_or_default();
        Ok::<_, Infallible>(Response::from_parts(head, Body::from(whole)))
    }))
}

/// Makes a long-running call in a session, and returns the statuses of a second call and of a cancellation.
async fn statuses_beside_a_long_call(is_restored: bool) -> [u16; 2] {
    let directory = directory();
    let [mut a, b] = Setup::start_pair(&directory, hold_responses).await;
    let mcp = if is_restored {
        let mcp = a.session().await;
        a.kill_and_expire().await;
        pass(2 * SECOND).await;
        mcp
    } else {
        b.session().await
    };
    let client = b.client_of(&mcp);
    let _long = client.call(1, "hold", json!({ "label": "long" })).await;
    within("the call", b.witness.started("long")).await;
    let mut second = client.call(2, "echo", json!({ "text": "x" })).await;
    let second = within("a response head", second.head()).await.status;
    let cancel = within("a response head", client.cancel(1)).await;
    [second, cancel]
}

/// The first request after an instance's death restores its session and is a long call. Other requests do not have to wait for its response
/// head.
#[tokio::test]
async fn a_long_call_that_restores_its_session_does_not_delay_other_requests() {
    for is_restored in [false, true] {
        let statuses = statuses_beside_a_long_call(is_restored).await;
        assert_eq!((is_restored, statuses), (is_restored, [200, 202]));
    }
}

/// The restore has ended, but the response to its call has no head yet. A shutdown waits for the call.
#[tokio::test]
async fn a_long_call_that_has_restored_its_session_is_in_flight_for_a_shutdown() {
    let directory = directory();
    let [mut a, b] = Setup::start_pair(&directory, hold_responses).await;
    let mcp = a.session().await;
    a.kill_and_expire().await;
    pass(2 * SECOND).await;
    let client = b.client_of(&mcp);
    let mut long = client.call(1, "hold", json!({ "label": "long" })).await;
    within("the call", b.witness.started("long")).await;
    assert!(b.routing().restores.is_empty(), "the restore has ended");
    let cluster = b.cluster.clone();
    let shutdown = tokio::spawn(async move { cluster.leave(60 * SECOND).await });
    pass(5 * SECOND).await;
    assert!(!shutdown.is_finished());
    b.witness.release("long");
    assert_eq!(within("an answer", long.answer()).await.unwrap()["id"], 1);
    assert_eq!(within("the shutdown", shutdown).await.unwrap(), 0);
}

/// Removes a secret from the events in all responses.
fn redact_events(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = next.run(request).await.into_parts();
        let redact = |data: Vec<u8>| String::from_utf8(data).unwrap().replace("done:a", "*****");
        let events = body.into_data_stream();
        let events = events.map(move |data| data.map(|data| redact(data.to_vec())));
        Ok::<_, Infallible>(Response::from_parts(head, Body::from_stream(events)))
    }))
}

/// README, "Limits": a kept answer is not passed through the application's layers, unlike one sent by a live owner.
#[tokio::test]
async fn a_kept_answer_does_not_pass_through_inner_layers() {
    for is_kept in [false, true] {
        let directory = directory();
        let [mut a, b] = Setup::start_pair(&directory, redact_events).await;
        let mcp = a.session().await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        a.witness.release("a");
        a.witness.ended("a").await;
        pass(2 * SECOND).await;
        if is_kept {
            a.kill_and_expire().await;
            pass(2 * SECOND).await;
        }
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        assert_eq!(resumed.head().await.status, 200);
        let answer = within("an answer", resumed.answer()).await.unwrap();
        let text = answer["result"]["content"][0]["text"].as_str().unwrap();
        let expected = if is_kept { "done:a" } else { "*****" };
        assert_eq!((is_kept, text), (is_kept, expected));
    }
}

/// What the application's acceptor knows about a connection.
#[derive(Clone)]
struct Certificate;

/// Refuses requests in a session whose client has no certificate.
fn require_certificate(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        let info: Option<&ConnectInfo<Certificate>> = request.extensions().get();
        if info.is_none() && request.headers().contains_key("mcp-session-id") {
            return StatusCode::UNAUTHORIZED.into_response();
        }
        next.run(request).await
    }))
}

/// README, "Limits": of all that the acceptor knows about a client, only the address reaches the owner through another instance.
#[tokio::test]
async fn a_client_certificate_does_not_reach_the_owner_through_another_instance() {
    let directory = directory();
    let [a, b] = Setup::start_pair(&directory, require_certificate).await;
    let mut opened = a.initialize().await;
    let head = opened.head().await;
    let session = head.header("mcp-session-id").unwrap();
    for (node, expected) in [(&a, 200), (&b, 401)] {
        let mut request = post_echo(&node.client(session), 1);
        request.extensions_mut().insert(ConnectInfo(Certificate));
        let answered = node.app.clone().call(request).await.unwrap();
        assert_eq!(answered.status(), expected);
    }
}
