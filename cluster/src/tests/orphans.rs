//! Calls whose clients have disconnected: when they are cancelled, and where their answers are stored.

use std::time::Duration;

use serde_json::json;
use test_support::{Connection, Mcp};
use tokio::task::yield_now;

use super::{
    node::{GRACE, Node, Setup, hash, pass},
    steps::directory,
};
use crate::{
    directory::{
        Claim,
        contract::claim_from,
        faulty::{Fault, Faulty},
    },
    membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD},
};

/// How late a due cancel may be.
///
/// The library rechecks a call 100 ms after finding that its grace period has expired, and the rest is a margin.
const RECHECK_MARGIN: Duration = Duration::from_millis(150);

async fn start_with_grace(directory: &Faulty) -> Node {
    let node = Setup::with_grace().start(directory).await;
    node.until_settled().await;
    node
}

/// Starts an instance with a call whose client has disconnected.
async fn detached_call() -> (Faulty, Node, Mcp) {
    let directory = directory();
    let node = start_with_grace(&directory).await;
    let mcp = node.session().await;
    node.detach(&mcp, 1, "a").await;
    (directory, node, mcp)
}

#[tokio::test]
async fn an_orphan_of_a_local_session_is_cancelled_after_its_grace() {
    let (_directory, node, _mcp) = detached_call().await;
    pass(GRACE - RECHECK_MARGIN).await;
    assert!(node.witness.is_running("a"));

    pass(3 * RECHECK_MARGIN).await;

    assert!(node.witness.ended("a").await.is_cancelled());
    assert!(node.calls.is_empty());
}

#[tokio::test]
async fn while_the_directory_is_unreachable_no_orphan_is_cancelled() {
    let (directory, node, _mcp) = detached_call().await;
    for fault in [Fault::Fails, Fault::NoReply] {
        directory.set(fault);
        pass(4 * GRACE).await;
        assert!(node.witness.is_running("a"), "{fault:?}");
    }

    directory.set(Fault::None);

    // The call waits out its whole grace period again, starting when the directory is consistent.
    pass(GRACE - RECHECK_MARGIN).await;
    assert!(node.witness.is_running("a"));
    pass(GRACE + SETTLE_PERIOD).await;
    assert!(node.witness.ended("a").await.is_cancelled());
}

#[tokio::test]
async fn an_orphan_of_another_instances_session_ends_as_its_session_closed() {
    let directory = directory();
    let (a, b) = (
        start_with_grace(&directory).await,
        start_with_grace(&directory).await,
    );
    let mcp = a.session().await;
    a.detach(&mcp, 1, "a").await;
    let claimed = claim_from(&directory.memory, hash(&mcp), a.me, b.me).await;
    assert_eq!(claimed, Claim::Won);

    pass(GRACE + 3 * RECHECK_MARGIN).await;

    assert!(a.witness.ended("a").await.is_cancelled());
    while a.has(&mcp) {
        yield_now().await;
    }
}

#[tokio::test]
async fn an_orphan_whose_session_the_directory_has_lost_waits_until_it_is_written_again() {
    let (directory, node, mcp) = detached_call().await;
    directory.memory.evict(hash(&mcp));

    pass(GRACE + 3 * RECHECK_MARGIN).await;

    assert!(node.witness.is_running("a"));
    pass(GRACE + 3 * RECHECK_MARGIN).await;
    assert!(node.witness.ended("a").await.is_cancelled());
}

#[tokio::test]
async fn the_answer_of_a_call_that_ended_without_its_client_survives_its_instance() {
    let (directory, [mut a, b], mcp) = Node::with_session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    a.witness.release("a");
    a.until_calls_end().await;
    a.until_stored(&directory, &mcp, &last_event_id).await;
    a.kill_and_expire().await;

    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    let answer = resumed.answer().await.unwrap();
    assert_eq!(answer["id"], 1);
    assert!(answer["result"].is_object(), "{answer}");
}

#[tokio::test]
async fn the_answers_are_written_again_to_a_directory_that_returns_empty() {
    let (directory, [mut a, b], mcp) = Node::with_session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    a.witness.release("a");
    a.until_stored(&directory, &mcp, &last_event_id).await;
    directory.memory.restart();
    pass(2 * HEARTBEAT_INTERVAL).await;
    a.until_stored(&directory, &mcp, &last_event_id).await;
    a.kill_and_expire().await;
    b.until_settled().await;

    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    let answer = resumed.answer().await.unwrap();
    assert!(answer["result"].is_object(), "{answer}");
}

#[tokio::test]
async fn only_answers_without_a_client_are_stored() {
    let (directory, [a], mcp) = Node::with_session().await;
    // A call whose client stays connected.
    let mut call = mcp.call(7, "echo", json!({ "text": "x" })).await;
    assert_eq!(call.answer().await.unwrap()["id"], 7);
    // A call whose client resumes in time.
    let last_event_id = a.detach(&mcp, 1, "a").await;
    let mut resumed: Connection = mcp.resume(&last_event_id).await;
    resumed.head().await;
    while a.calls.detached() > 0 {
        yield_now().await;
    }
    a.witness.release("a");
    assert_eq!(resumed.answer().await.unwrap()["id"], 1);
    // Lastly, a call whose client stays away. By now the directory would already have any answer to an earlier call.
    let last_event_id = a.detach(&mcp, 1, "b").await;
    assert!(
        last_event_id.ends_with("~1"),
        "the request id has been reused: {last_event_id}"
    );
    a.witness.release("b");
    a.until_stored(&directory, &mcp, &last_event_id).await;
    assert_eq!(directory.request_count("keep_answer"), 1);
}
