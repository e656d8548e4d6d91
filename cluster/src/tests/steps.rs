//! What nearly every story here does.

use axum::body::Body;
use serde_json::{Value, json};
use test_support::{Mcp, within};
use tokio::task::yield_now;

use super::node::{Node, hash};
use crate::{
    directory::{MemoryDirectory, faulty::Faulty},
    ids::{Incarnation, Owner},
};

pub(super) fn directory() -> Faulty {
    Faulty::new(MemoryDirectory::default())
}

/// Long enough for everything else to come to where it waits.
pub(super) async fn run_other_tasks() {
    for _ in 0..1_000 {
        yield_now().await;
    }
}

/// With what a call is answered at first.
pub(super) async fn status(mcp: &Mcp, id: u32) -> u16 {
    let mut call = mcp.call(id, "echo", json!({ "text": "x" })).await;
    within("a head", call.head()).await.status
}

/// Makes a call, and gives the id in its answer.
pub(super) async fn echo(mcp: &Mcp, id: u32) -> Value {
    let mut call = mcp.call(id, "echo", json!({ "text": "x" })).await;
    let answer = within("an answer", call.answer()).await;
    answer.unwrap()["id"].clone()
}

/// A message as a request that no connection carries.
pub(super) fn post(mcp: &Mcp, message: &Value) -> http::Request<Body> {
    http::Request::post("/mcp")
        .header("host", "localhost")
        .header("mcp-session-id", mcp.session_id().unwrap())
        .header("accept", "application/json, text/event-stream")
        .header("content-type", "application/json")
        .body(Body::from(message.to_string()))
        .unwrap()
}

/// A call as a request that no connection carries.
pub(super) fn post_echo(mcp: &Mcp, id: u32) -> http::Request<Body> {
    post(mcp, &mcp.call_message(id, "echo", json!({ "text": "x" })))
}

/// An owner who does not listen.
pub(super) fn unreachable_owner() -> Owner {
    Owner {
        address: "127.0.0.1:1".parse().unwrap(),
        incarnation: Incarnation::random(),
    }
}

/// A session goes from an instance to nowhere: it is closed there, and the directory says that it is still that instance's.
pub(super) async fn close_session(node: &Node, mcp: &Mcp) {
    node.routing()
        .sessions
        .relinquish_to_owner(hash(mcp), unreachable_owner());
    run_other_tasks().await;
    assert!(!node.has(mcp));
}
