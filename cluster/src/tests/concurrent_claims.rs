//! Events that coincide with a change of a session's owner.

use std::time::Duration;

use futures_util::{
    FutureExt as _,
    future::{join, join_all},
};
use http_body_util::BodyExt as _;
use serde_json::json;
use test_support::within;
use tokio::task::yield_now;
use tower_service::Service as _;

use super::{
    node::{Node, hash},
    steps::{
        close_session, directory, echo, post, run_other_tasks, status, unreachable_owner,
        until_requested,
    },
};
use crate::{
    directory::{
        Claim, Directory as _,
        contract::{claim_from, ownership},
        faulty::Fault,
    },
    ids::Record,
};

/// A shutdown limit that is longer than any test takes.
const LIMIT: Duration = Duration::from_secs(60);

#[tokio::test]
async fn no_session_begins_on_an_instance_that_has_stopped_serving() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let shutdown = a.routing().shutdown.begin();
    // A session can still be opened during the shutdown.
    let before = a.session().await;
    shutdown.stop_serving();
    let mut refused = a.initialize().await;
    assert_eq!(within("a response head", refused.head()).await.status, 503);
    run_other_tasks().await;
    assert_eq!(a.routing().sessions.len(), 1);
    assert_eq!(status(&before, 1).await, 503);
    assert_eq!(echo(&b.client_of(&before), 2).await, 2);
    assert_eq!(echo(&before, 3).await, 3);
    assert!(b.has(&before) && !a.has(&before));
}

/// A call is waiting for one whose client has disconnected. Their session is then closed, because another instance owns it.
#[tokio::test]
async fn a_call_that_waits_for_a_session_that_ends_runs_on_another_instance() {
    let (directory, [a, b, c], mcp) = Node::with_session().await;
    a.detach(&mcp, 1, "first").await;
    let _shutdown = a.routing().shutdown.begin();
    let mut second = b
        .client_of(&mcp)
        .call(2, "echo", json!({ "text": "x" }))
        .await;
    run_other_tasks().await;
    assert!(a.has(&mcp));
    let memory = &directory.memory;
    let claimed = claim_from(memory, hash(&mcp), a.me, c.me).await;
    assert_eq!(claimed, Claim::Won);
    a.routing().sessions.relinquish_to_owner(hash(&mcp), c.me);
    let answer = within("an answer", second.answer()).await;
    assert_eq!(answer.unwrap()["id"], 2);
    assert!(!a.has(&mcp) && b.has(&mcp) != c.has(&mcp));
}

/// The client disconnects while its session is being restored on an instance that is shutting down.
#[tokio::test]
async fn a_shutdown_does_not_wait_for_a_restore_whose_client_has_disconnected() {
    let (_directory, [mut a, mut b], mcp) = Node::with_session().await;
    a.kill_and_expire().await;
    let at_b = b.client_of(&mcp);
    let message = json!({ "jsonrpc": "2.0", "method": "notifications/roots/list_changed" });
    let cluster = b.cluster.clone();
    let _shutdown = cluster.router().shutdown.begin();
    let mut waited = 0;
    for polls in 0..40 {
        let mut first = Box::pin(b.app.call(post(&at_b, &message)));
        for _ in 0..polls {
            if (&mut first).now_or_never().is_some() {
                break;
            }
            yield_now().await;
        }
        let routing = b.cluster.router();
        let session = at_b.session_id().unwrap();
        if let Some(gate) = routing.sessions.gate(session) {
            let is_idle = || !routing.restores.contains(hash(&at_b));
            let mut idle = Box::pin(gate.wait_until_idle(is_idle));
            let is_waiting = (&mut idle).now_or_never().is_none();
            drop(first);
            run_other_tasks().await;
            assert!(!is_waiting || idle.now_or_never().is_some(), "{polls}");
            waited += usize::from(is_waiting);
        }
    }
    assert!(waited > 0);
}

/// A session is closed at its owner, as happens to idle ones. Another instance gets 421 and is about to claim it.
#[tokio::test]
async fn a_session_that_was_reported_missing_to_a_peer_is_not_restored_here() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    close_session(&a, &mcp).await;
    directory.set(Fault::SlowAt("claim", Duration::from_millis(400)));
    let at_b = b.client_of(&mcp);
    let restore = async {
        until_requested(&directory, "claim").await;
        let mut call = mcp.call(2, "hold", json!({ "label": "second" })).await;
        within("a response head", call.head()).await;
        call
    };
    let (first, mut second) = join(echo(&at_b, 1), restore).await;
    assert_eq!(first, 1);
    run_other_tasks().await;
    assert!(b.has(&mcp));
    assert!(!a.has(&mcp), "the session is open on both instances");
    b.witness.started("second").await;
    b.witness.release("second");
    assert_eq!(second.answer().await.unwrap()["id"], 2);
}

/// The peer stalls before its claim, and in the meantime the client carries on at the owner. The claim is late because the peer has read an
/// ownership that has since been replaced.
#[tokio::test]
async fn a_late_claim_does_not_take_a_session_that_is_open_again() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let (mcp, memory) = (a.session().await, &directory.memory);
    close_session(&a, &mcp).await;
    let read_by_b = ownership(memory, hash(&mcp)).await.unwrap();
    directory.set(Fault::FailsAt("claim"));
    assert_eq!(status(&b.client_of(&mcp), 1).await, 503);
    directory.set(Fault::None);

    let mut call = mcp.call(2, "hold", json!({ "label": "second" })).await;
    within("a response head", call.head()).await;
    a.witness.started("second").await;
    let late = read_by_b.claimed_by(b.me);
    let late = memory.claim(hash(&mcp), read_by_b, late).await.unwrap();
    assert!(
        matches!(late, Claim::Lost(Record::Owned(ownership)) if ownership.owner == a.me),
        "{late:?}"
    );
    // The client now uses the other instance.
    assert_eq!(echo(&b.client_of(&mcp), 3).await, 3);
    assert!(
        a.has(&mcp) && !b.has(&mcp),
        "the session is open on both instances"
    );
    a.witness.release("second");
    assert_eq!(call.answer().await.unwrap()["id"], 2);
}

/// Only one of the requests claims the session. They do not claim it from each other.
#[tokio::test]
async fn all_requests_that_arrive_at_once_for_a_session_that_was_closed_are_served() {
    let (directory, [a], mcp) = Node::with_session().await;
    close_session(&a, &mcp).await;
    let calls = (1..=20).map(|id| echo(&mcp, id));
    let answered = join_all(calls).await;
    assert_eq!(answered, Vec::from_iter(1..=20));
    assert_eq!(directory.request_count("claim"), 1);
}

/// 100 calls end at once, and each answer takes 100 ms to write.
#[tokio::test]
async fn a_shutdown_stores_the_answers_of_any_number_of_calls() {
    const CALLS: u32 = 100;
    let (directory, [a, b], mcp) = Node::with_session().await;
    let mut last_event_ids = Vec::new();
    for id in 1..=CALLS {
        last_event_ids.push(a.detach(&mcp, id, &id.to_string()).await);
    }
    directory.set(Fault::SlowAt("keep_answer", Duration::from_millis(100)));
    let shutdown = a.cluster.leave(LIMIT);
    let calls = async {
        run_other_tasks().await;
        for id in 1..=CALLS {
            a.witness.release(&id.to_string());
        }
    };
    let (cancelled, ()) = within("the shutdown", join(shutdown, calls)).await;
    assert_eq!(cancelled, 0);
    let mut lost = 0;
    for last_event_id in &last_event_ids {
        let answered = b
            .client_of(&mcp)
            .resume(last_event_id)
            .await
            .messages()
            .await;
        lost += usize::from(!answered[0]["result"].is_object());
    }
    assert_eq!(lost, 0, "of {CALLS} calls");
}

/// A session is relinquished and claimed back before its old copy has been closed.
#[tokio::test]
async fn a_session_that_returns_before_its_previous_copy_is_closed_keeps_its_call() {
    let (directory, [mut a], mcp) = Node::with_session().await;
    let other = unreachable_owner();
    let (session, memory) = (hash(&mcp), &directory.memory);
    // The task that closes the session cannot run until this test awaits.
    let claimed = claim_from(memory, session, a.me, other).await;
    a.routing().sessions.relinquish_to_owner(session, other);
    let claimed_back = claim_from(memory, session, other, a.me).await;
    assert_eq!((claimed, claimed_back), (Claim::Won, Claim::Won));
    let message = mcp.call_message(1, "hold", json!({ "label": "first" }));
    let answered = a.app.call(post(&mcp, &message)).await.unwrap();
    assert_eq!(answered.status(), 200);
    a.witness.started("first").await;
    run_other_tasks().await;
    assert!(a.witness.is_running("first"), "the call was cancelled");
    a.witness.release("first");
    let body = within("the answer", answered.into_body().collect()).await;
    let body = String::from_utf8(body.unwrap().to_bytes().to_vec()).unwrap();
    assert!(body.contains("\"result\""), "{body}");
    assert!(a.has(&mcp));
}

/// The request id does not fit into an event id.
#[tokio::test]
async fn a_client_with_a_very_long_request_id_does_not_wait_for_a_lost_call() {
    let (directory, [mut a, b], mcp) = Node::with_session().await;
    let id = "x".repeat(300);
    let mut call = mcp.call(id, "hold", json!({ "label": "a" })).await;
    call.head().await;
    let last_event_id = call.event().await.unwrap().id.unwrap();
    a.witness.started("a").await;
    call.fin();
    a.until_detached().await;
    a.witness.release("a");
    until_requested(&directory, "keep_answer").await;
    a.kill_and_expire().await;
    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    let answered = within("the answer", resumed.messages()).await;
    assert_eq!(answered.len(), 1, "{answered:?}");
}
