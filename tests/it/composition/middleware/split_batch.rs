//! A middleware inside the layer that splits batches, which rmcp does not accept.
//!
//! It sends the messages to rmcp one by one and collects their answers.
//!
//! A batch's calls share one response, so the layer does not cancel any of them.

use std::time::Duration;

use axum::{
    Json, Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
};
use futures_util::future::join_all;
use http::header::CONTENT_LENGTH;
use mcp_cancel_on_disconnect::{Outcome, Policy};
use serde_json::{Value, json};

use crate::setup::{EXCHANGE, EventKind, GRACE, Plan, Server, arguments};

fn split(router: Router) -> Router {
    router.layer(from_fn(async |request: Request, next: Next| {
        let (head, body) = request.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("a body");
        let Ok(Value::Array(messages)) = serde_json::from_slice(&body) else {
            return next.run(Request::from_parts(head, Body::from(body))).await;
        };
        let answers = messages.into_iter().map(|message| {
            let (mut head, next) = (head.clone(), next.clone());
            head.headers.remove(CONTENT_LENGTH);
            let request = Request::from_parts(head, Body::from(message.to_string()));
            async move { answer(next.run(request).await).await }
        });
        Json(join_all(answers).await).into_response()
    }))
}

/// Returns the JSON-RPC answer in an event stream.
async fn answer(response: Response) -> Value {
    let body = to_bytes(response.into_body(), usize::MAX).await;
    let body = body.expect("a body");
    let text = String::from_utf8_lossy(&body);
    let messages = text.lines().filter_map(|line| line.strip_prefix("data:"));
    let mut messages = messages.filter_map(|text| serde_json::from_str::<Value>(text).ok());
    let is_answer =
        |message: &Value| message.get("id").is_some() && message.get("method").is_none();
    messages.find(is_answer).unwrap_or_default()
}

#[tokio::test]
async fn the_timeout_of_one_call_of_a_split_batch_loses_no_answer() {
    let limit = Duration::from_secs(10);
    let plan = Plan::of(Server::Wrapped).inside(split).layer(|layer| {
        layer.policy(move |call| match call.tool() {
            Some("hold") => Policy::new().call_timeout(limit),
            _ => Policy::new(),
        })
    });
    let (clock, setup, mcp) = plan.stopped().await;
    let batch = json!([
        mcp.call_message(1, "hold", arguments("a")),
        mcp.call_message(2, "echo", json!({ "text": "two" })),
    ]);
    let mut client = mcp.send(&mcp.post_request(batch.to_string())).await;
    setup.witness.started("a").await;
    setup.assert_usable(&mcp).await;

    clock.advance(limit + Duration::from_secs(1)).await;

    setup.witness.release("a");
    let reply = client.reply().await;
    let answers: Value = serde_json::from_slice(&reply.body).expect("JSON");
    for (answer, id) in answers.as_array().expect("a batch").iter().zip([1, 2]) {
        assert_eq!(answer["id"], id, "{answers}");
        assert!(answer["result"].is_object(), "{answers}");
    }
}

#[tokio::test]
async fn a_disconnect_from_a_split_batch_does_not_cancel_one_of_its_calls_alone() {
    let plan = Plan::with_grace(Server::Wrapped).inside(split);
    let (clock, setup, mcp) = plan.stopped().await;
    let batch = json!([
        mcp.call_message(1, "hold", arguments("a")),
        mcp.call_message(2, "hold", arguments("b")),
    ]);
    let named = mcp.clone().header(EXCHANGE, "batch");
    let client = named.send(&named.post_request(batch.to_string())).await;
    setup.witness.started("a").await;
    setup.witness.started("b").await;

    client.fin();

    setup.exchanges.over_for("batch").await;
    clock.advance(GRACE * 3).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a") && setup.witness.is_running("b"));
    assert!(setup.calls.is_empty());
    let [EventKind::Started, EventKind::Ended(outcome)] = setup.events.of(&mcp, 1)[..] else {
        panic!("{:?}", setup.events.of(&mcp, 1));
    };
    assert_eq!(outcome, Outcome::Unknown);
}
