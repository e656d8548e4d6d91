//! Resumes with a `last-event-id`.

use axum::{Router, body::Body, http::StatusCode, response::IntoResponse, routing::any};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use serde_json::json;

use super::node::{Node, call_app, hash};
use crate::{
    directory::{ANSWER_TTL, Directory as _, faulty::Fault},
    ids::{CallNumber, ClusterEventId, Incarnation, NamedCall},
    routing::request_context::on_resumed,
};

fn event_id(incarnation: Incarnation, number: u64, request: &str) -> String {
    let call = NamedCall {
        number: CallNumber::new(number),
        request: Some(request.to_owned()),
    };
    ClusterEventId::new("0/0", incarnation, Some(call)).to_string()
}

#[tokio::test]
async fn a_client_resumes_from_an_event_of_a_live_incarnation_through_any_instance() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    call.head().await;
    let last_event_id = call.event().await.unwrap().id.unwrap();
    let event_id = ClusterEventId::parse(&last_event_id).unwrap();
    assert_eq!(
        (
            event_id.incarnation,
            event_id.call.unwrap().request.as_deref()
        ),
        (a.me.incarnation, Some("1"))
    );
    a.witness.started("a").await;
    call.fin();

    for node in [&a, &b] {
        let mut resumed = node.client_of(&mcp).resume(&last_event_id).await;
        assert_eq!(resumed.head().await.status, 200);
        if node.me == b.me {
            a.witness.release("a");
            let answer = resumed.answer_event().await.unwrap();
            assert_eq!(answer.json()["id"], 1);
            let event_id = answer
                .id
                .as_deref()
                .and_then(ClusterEventId::parse)
                .unwrap();
            assert_eq!(
                (
                    event_id.incarnation,
                    event_id.call.unwrap().request.as_deref()
                ),
                (a.me.incarnation, Some("1"))
            );
        }
    }
}

#[tokio::test]
async fn a_resume_of_a_call_that_ended_with_its_instance_gets_the_stored_answer_or_an_error() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    let ended_incarnation = Incarnation::random();
    let answer = Bytes::from_static(br#"{"jsonrpc":"2.0","id":"x 7","result":{"kept":true}}"#);
    let session = hash(&mcp);
    directory
        .memory
        .keep_answer(
            session,
            ended_incarnation,
            CallNumber::new(3),
            answer,
            ANSWER_TTL,
        )
        .await
        .unwrap();
    // A call of this incarnation has the same plain event id, but none of its events may be sent.
    let _other = mcp.call(1, "hold", json!({ "label": "other" })).await;
    a.witness.started("other").await;

    for node in [&a, &b] {
        let last_event_id = event_id(ended_incarnation, 3, "\"x 7\"");
        let mut resumed = node.client_of(&mcp).resume(&last_event_id).await;
        assert_eq!(resumed.head().await.status, 200);
        let first = resumed.event().await.unwrap();
        assert_eq!(
            (first.id.as_deref(), first.is_priming()),
            (Some(&*last_event_id), true)
        );
        let event = resumed.event().await.unwrap();
        assert_eq!(
            (event.json()["result"]["kept"].clone(), event.id),
            (json!(true), None)
        );
        assert_eq!(resumed.event().await, None);
        assert!(resumed.is_complete());

        let last_event_id = event_id(ended_incarnation, 4, "8");
        let mut resumed = node.client_of(&mcp).resume(&last_event_id).await;
        let messages = resumed.messages().await;
        assert_eq!(messages.len(), 1);
        assert_eq!(
            (&messages[0]["id"], &messages[0]["error"]["code"]),
            (&json!(8), &json!(-32603))
        );
    }
    assert!(a.witness.is_running("other"));
}

#[tokio::test]
async fn a_resume_of_a_standalone_stream_that_ended_with_its_instance_opens_a_new_stream() {
    let (_directory, [a], mcp) = Node::with_session().await;
    let last_event_id = ClusterEventId::new("5", Incarnation::random(), None).to_string();
    let mut listening = mcp.resume(&last_event_id).await;
    assert_eq!(listening.head().await.status, 200);
    assert!(listening.event().await.unwrap().is_priming());
    let seen = a.received_heads.lock().unwrap();
    assert_eq!(seen.last().unwrap().get("last-event-id"), None);
}

/// It is up to the application whether a client may have an answer, even one that is in the directory.
#[tokio::test]
async fn an_answer_from_the_directory_is_only_for_clients_that_the_application_accepts() {
    let (directory, [a], mcp) = Node::with_session().await;
    let ended_incarnation = Incarnation::random();
    let answer = Bytes::from_static(b"{\"secret\":1}");
    directory
        .memory
        .keep_answer(
            hash(&mcp),
            ended_incarnation,
            CallNumber::new(3),
            answer,
            ANSWER_TTL,
        )
        .await
        .unwrap();
    let last_event_id = event_id(ended_incarnation, 3, "7");
    let request = |token: &str| {
        let request = http::Request::get("/mcp")
            .header("mcp-session-id", mcp.session_id().unwrap())
            .header("last-event-id", &last_event_id)
            .header("authorization", token);
        request.body(Body::empty()).unwrap()
    };
    let app = Router::new().route(
        "/mcp",
        any(async |headers: http::HeaderMap| {
            assert_eq!(headers["last-event-id"], "~");
            match headers["authorization"].as_bytes() {
                b"right" => {
                    // As the session manager does.
                    on_resumed();
                    ([("content-type", "text/event-stream")], ": inside\n\n").into_response()
                }
                _ => StatusCode::UNAUTHORIZED.into_response(),
            }
        }),
    );
    let refused = call_app(&a, app.clone(), request("wrong")).await;
    assert_eq!(refused.status(), 401);
    assert_eq!(refused.into_body().collect().await.unwrap().to_bytes(), "");
    let accepted = call_app(&a, app.clone(), request("right")).await;
    let body = accepted.into_body().collect().await.unwrap().to_bytes();
    assert_eq!(
        body,
        format!("id: {last_event_id}\ndata:\n\ndata: {{\"secret\":1}}\n\n")
    );

    // While the directory is failing, the answer might exist, so the client is asked to retry.
    directory.set(Fault::Fails);
    let refused = call_app(&a, app, request("right")).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (503, &"1".parse().unwrap())
    );
}
