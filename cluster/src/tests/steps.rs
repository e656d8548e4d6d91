//! Steps that most tests in this folder share.

use std::{
    env,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::body::Body;
use serde_json::{Value, json};
use test_support::{Connection, Head, Mcp, within};
use tokio::{
    task::yield_now,
    time::{Instant, sleep},
};

use super::node::{Node, SECRET, hash, pass};
use crate::{
    Cluster,
    cluster::{self, Options},
    directory::{
        MemoryDirectory,
        faulty::{ErasedRequest, Faulty, Gate},
    },
    ids::{Incarnation, Owner},
    relay::{filter::PeersFilter, wire::Secret},
};

pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const MS: Duration = Duration::from_millis(1);

/// A link on which each request arrives this much later while the flag is set.
#[derive(Debug, Clone)]
pub(super) struct SlowLink(pub(super) Arc<AtomicBool>, pub(super) Duration);

impl Gate for SlowLink {
    fn pass(&self, _command: &'static str, request: ErasedRequest) -> ErasedRequest {
        if !self.0.load(SeqCst) {
            return request;
        }
        let time = self.1;
        let delayed = tokio::spawn(async move {
            sleep(time).await;
            request.await
        });
        Box::pin(async move { delayed.await.unwrap() })
    }
}

/// Returns offsets within a heartbeat interval, in units of 100 ms.
///
/// Every third one, or all of them with `CLUSTER_PHASES=all`.
pub(super) fn phases() -> impl Iterator<Item = u32> {
    let is_full = env::var("CLUSTER_PHASES").is_ok_and(|phases| phases == "all");
    (0..20).step_by(if is_full { 1 } else { 3 })
}

pub(super) fn directory() -> Faulty {
    Faulty::new(MemoryDirectory::default())
}

/// Joins an instance with the options that most tests use.
pub(super) fn join_as(me: Owner, directory: &Faulty) -> Cluster {
    let secret = Secret::new(SECRET).unwrap();
    let (filter, options) = (PeersFilter::default(), Options::default());
    cluster::join(me, directory.clone(), filter, secret, options)
}

/// Yields often enough for all other tasks to get to a point where they wait.
pub(super) async fn run_other_tasks() {
    for _ in 0..1_000 {
        yield_now().await;
    }
}

/// Advances the clock until the instance has sent a heartbeat.
pub(super) async fn until_heartbeat(link: &Faulty) {
    let before = link.request_count("heartbeat");
    while link.request_count("heartbeat") == before {
        pass(50 * MS).await;
    }
}

/// Advances the clock until this long after `started`.
pub(super) async fn until(started: Instant, at: Duration) {
    while started.elapsed() < at {
        pass(50 * MS).await;
    }
}

/// Waits until the directory has received a request with the given name.
pub(super) async fn until_requested(directory: &Faulty, command: &'static str) {
    while directory.request_count(command) == 0 {
        yield_now().await;
    }
}

/// Asserts that the next response is a 503 that asks to retry after one second.
pub(super) async fn assert_refused(connection: &mut Connection) -> Head {
    let head = within("a response head", connection.head()).await;
    assert_eq!((head.status, head.header("retry-after")), (503, Some("1")));
    head
}

/// Makes a call and returns the status of its response.
pub(super) async fn status(mcp: &Mcp, id: u32) -> u16 {
    let mut call = mcp.call(id, "echo", json!({ "text": "x" })).await;
    within("a response head", call.head()).await.status
}

/// Makes a call and returns the id in its answer.
pub(super) async fn echo(mcp: &Mcp, id: u32) -> Value {
    let mut call = mcp.call(id, "echo", json!({ "text": "x" })).await;
    let answer = within("an answer", call.answer()).await;
    answer.unwrap()["id"].clone()
}

/// Turns a message into a request that does not need a connection.
pub(super) fn post(mcp: &Mcp, message: &Value) -> http::Request<Body> {
    http::Request::post("/mcp")
        .header("host", "localhost")
        .header("mcp-session-id", mcp.session_id().unwrap())
        .header("accept", "application/json, text/event-stream")
        .header("content-type", "application/json")
        .body(Body::from(message.to_string()))
        .unwrap()
}

/// Returns a call as a request that does not need a connection.
pub(super) fn post_echo(mcp: &Mcp, id: u32) -> http::Request<Body> {
    post(mcp, &mcp.call_message(id, "echo", json!({ "text": "x" })))
}

/// Returns an owner that is not listening.
pub(super) fn unreachable_owner() -> Owner {
    Owner {
        address: "127.0.0.1:1".parse().unwrap(),
        incarnation: Incarnation::random(),
    }
}

/// Closes a session on an instance that remains its owner in the directory.
pub(super) async fn close_session(node: &Node, mcp: &Mcp) {
    node.routing()
        .sessions
        .relinquish_to_owner(hash(mcp), unreachable_owner());
    run_other_tasks().await;
    assert!(!node.has(mcp));
}
