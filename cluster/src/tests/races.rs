//! Claims, restores, deletions and answers that coincide.

use std::time::Duration;

use axum::body::Body;
use futures_util::{FutureExt as _, future::join};
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use test_support::{Connection, Mcp};
use tokio::task::yield_now;
use tower_service::Service as _;

use super::{
    node::{Node, SECRET, hash, pass},
    steps::{
        assert_refused, directory, post, post_echo, run_other_tasks, status, unreachable_owner,
        until_requested,
    },
};
use crate::{
    directory::{
        Claim,
        contract::{self, claim_from},
        faulty::{Fault, Faulty},
    },
    ids::Owner,
};

async fn owner_of(directory: &Faulty, mcp: &Mcp) -> Option<Owner> {
    contract::owner_of(&directory.memory, hash(mcp)).await
}

/// Has another instance claim a session, `node` close its copy, and `node` claim the session back.
async fn close_and_claim_back(directory: &Faulty, node: &Node, mcp: &Mcp) {
    let other = unreachable_owner();
    let (session, memory) = (hash(mcp), &directory.memory);
    let claimed = claim_from(memory, session, node.me, other).await;
    assert_eq!(claimed, Claim::Won);
    node.routing().sessions.relinquish_to_owner(session, other);
    run_other_tasks().await;
    let claimed = claim_from(memory, session, other, node.me).await;
    assert_eq!(claimed, Claim::Won);
}

/// Makes a call and returns its response body, of which nothing has been read yet.
async fn unread_call(a: &mut Node, mcp: &Mcp) -> Body {
    let message = mcp.call_message(1, "hold", json!({ "label": "a" }));
    let answered = a.app.call(post(mcp, &message)).await.unwrap();
    assert_eq!(answered.status(), 200);
    answered.into_body()
}

/// Returns the next event, skipping rmcp's keep-alives.
///
/// Those follow the machine's clock, which lags behind one that has been advanced.
async fn event(body: &mut Body) -> String {
    loop {
        let event = body.frame().await.unwrap().unwrap().into_data().unwrap();
        let event = String::from_utf8(event.to_vec()).unwrap();
        if !event.starts_with(':') {
            return event;
        }
    }
}

/// Returns the next event's id.
async fn event_id(body: &mut Body) -> String {
    let event = event(body).await;
    let id = event.lines().find_map(|line| line.strip_prefix("id: "));
    id.unwrap().to_owned()
}

/// Makes a call whose client disconnects after the answer has been sent, but before it has been read.
///
/// Returns the id of the last event that the client received.
async fn unread_answer(a: &mut Node, mcp: &Mcp) -> String {
    let mut body = unread_call(a, mcp).await;
    let last_event_id = event_id(&mut body).await;
    a.witness.started("a").await;
    a.witness.release("a");
    a.witness.ended("a").await;
    run_other_tasks().await;
    drop(body);
    a.until_calls_end().await;
    run_other_tasks().await;
    last_event_id
}

/// The client lists its session header in `connection`. If a relay removed the header, the owner would answer 421.
#[tokio::test]
async fn no_client_can_have_a_session_claimed_from_a_running_owner() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    let client = b.client_of(&mcp).header("connection", "mcp-session-id");
    let status = status(&client, 1).await;
    assert_eq!(owner_of(&directory, &mcp).await, Some(a.me));
    assert!(a.has(&mcp) && !b.has(&mcp));
    assert_eq!(status, 200);
}

/// An instance that claimed a session and has since lost it relies on the directory rather than on its own claim.
#[tokio::test]
async fn a_session_that_this_instance_owned_is_found_at_its_new_owner() {
    let (directory, [mut a, b, c], mcp) = Node::with_session().await;
    let (at_b, at_c) = (b.client_of(&mcp), c.client_of(&mcp));
    a.kill_and_expire().await;
    assert_eq!(status(&at_b, 1).await, 200);
    assert!(b.has(&mcp));
    // As if `b` had stalled, and `c` had claimed the session in the meantime.
    let claimed = claim_from(&directory.memory, hash(&mcp), b.me, c.me).await;
    assert_eq!(claimed, Claim::Won);
    assert_eq!(status(&at_c, 2).await, 200);
    b.routing().sessions.relinquish_to_owner(hash(&mcp), c.me);
    while b.has(&mcp) {
        yield_now().await;
    }
    run_other_tasks().await;
    assert_eq!(status(&at_b, 3).await, 200);
}

#[tokio::test]
async fn a_client_that_disconnects_during_a_restore_does_not_affect_other_clients() {
    let (directory, [mut a, b], mcp) = Node::with_session().await;
    a.kill_and_expire().await;
    let at_b = b.client_of(&mcp);
    directory.set(Fault::SlowAt("load", Duration::from_millis(400)));
    let first = at_b.call(1, "echo", json!({ "text": "x" })).await;
    until_requested(&directory, "load").await;
    let mut second = at_b.call(2, "echo", json!({ "text": "x" })).await;
    while b.received_heads.lock().unwrap().len() < 2 {
        yield_now().await;
    }
    for _ in 0..20 {
        yield_now().await;
    }
    first.fin();
    assert_eq!(second.head().await.status, 200);
}

/// The client disconnects at a different step of the restore in each round.
#[tokio::test]
async fn a_session_that_is_half_restored_serves_the_next_request() {
    let (directory, [mut a], mcp) = Node::with_session().await;
    for polls in 0..40 {
        close_and_claim_back(&directory, &a, &mcp).await;
        assert!(!a.has(&mcp), "{polls}");
        let mut first = Box::pin(a.app.call(post_echo(&mcp, 1)));
        for _ in 0..polls {
            if (&mut first).now_or_never().is_some() {
                break;
            }
            yield_now().await;
        }
        drop(first);
        assert_eq!(status(&mcp, 2).await, 200, "{polls}");
    }
}

#[tokio::test]
async fn a_session_that_cannot_be_loaded_now_is_not_reported_missing() {
    let (directory, [mut a, b], mcp) = Node::with_session().await;
    a.kill_and_expire().await;
    let at_b = b.client_of(&mcp);
    directory.set(Fault::SlowAt("load", Duration::from_millis(700)));
    let statuses = join(status(&at_b, 1), status(&at_b, 2)).await;
    assert_eq!(statuses, (503, 503));
    directory.set(Fault::None);
    assert_eq!(status(&at_b, 3).await, 200);
}

/// A restored session numbers its streams from 0 again, even in the same process.
#[tokio::test]
async fn an_event_from_before_a_restore_does_not_refer_to_another_call_of_the_same_incarnation() {
    let (directory, [a], mcp) = Node::with_session().await;
    let last_event_id = a.detach(&mcp, 7, "seventh").await;
    a.witness.release("seventh");
    a.until_calls_end().await;
    close_and_claim_back(&directory, &a, &mcp).await;
    let mut eighth = a.start_call(&mcp, 8, "eighth").await;

    let mut resumed = mcp.resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    a.witness.release("eighth");
    let answered: Vec<Value> = resumed.messages().await;
    assert!(
        answered.iter().all(|message| message["id"] != 8),
        "{answered:?}"
    );
    assert_eq!(eighth.answer().await.unwrap()["id"], 8);
}

#[tokio::test]
async fn a_stored_answer_survives_a_restore_on_the_same_instance() {
    let (directory, [a], mcp) = Node::with_session().await;
    let last_event_id = a.detach(&mcp, 7, "seventh").await;
    a.witness.release("seventh");
    a.until_stored(&directory, &mcp, &last_event_id).await;
    close_and_claim_back(&directory, &a, &mcp).await;

    let answered = mcp.resume(&last_event_id).await.messages().await;
    assert_eq!(answered.len(), 1);
    assert!(answered[0]["result"].is_object(), "{answered:?}");
}

#[tokio::test]
async fn a_stored_answer_is_not_that_of_a_later_call_with_its_id() {
    let (directory, [mut a, b], mcp) = Node::with_session().await;
    let last_event_id = a.detach(&mcp, 1, "first").await;
    a.witness.release("first");
    a.until_stored(&directory, &mcp, &last_event_id).await;
    a.until_calls_end().await;
    assert_eq!(
        mcp.resume(&last_event_id).await.answer().await.unwrap()["id"],
        1
    );
    let last_event_id = a.detach(&mcp, 1, "second").await;
    a.kill_and_expire().await;

    let answered = b
        .client_of(&mcp)
        .resume(&last_event_id)
        .await
        .messages()
        .await;
    assert_eq!(answered[0]["error"]["code"], -32603, "{answered:?}");
}

/// An instance that is shutting down does not answer 421 until its answers are in the directory.
#[tokio::test]
async fn no_answer_in_transfer_is_lost_when_its_instance_shuts_down() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    directory.set(Fault::FailsAt("keep_answer"));
    a.witness.release("a");
    a.until_calls_end().await;
    until_requested(&directory, "keep_answer").await;
    directory.set(Fault::None);

    let at_b = b.client_of(&mcp);
    let (answered, _) = join(
        async { at_b.resume(&last_event_id).await.messages().await },
        a.cluster.leave(Duration::ZERO),
    )
    .await;
    assert_eq!(answered.len(), 1);
    assert!(answered[0]["result"].is_object(), "{answered:?}");
}

/// The answer has been sent, but the client disconnects before reading it from its buffer.
#[tokio::test]
async fn an_answer_that_was_sent_before_the_disconnect_is_stored() {
    let (_directory, [mut a, b], mcp) = Node::with_session().await;
    let last_event_id = unread_answer(&mut a, &mcp).await;
    a.kill_and_expire().await;

    let answered = b
        .client_of(&mcp)
        .resume(&last_event_id)
        .await
        .messages()
        .await;
    assert!(answered[0]["result"].is_object(), "{answered:?}");
}

/// The answer has been taken off the stream, but the client might disconnect before reading it, as when the rest of a large answer is still
/// buffered by this server.
#[tokio::test]
async fn an_answer_whose_stream_was_not_read_to_its_end_is_stored() {
    for is_read in [true, false] {
        let (directory, [mut a, b], mcp) = Node::with_session().await;
        let mut body = unread_call(&mut a, &mcp).await;
        let last_event_id = event_id(&mut body).await;
        a.witness.started("a").await;
        a.witness.release("a");
        assert!(event(&mut body).await.contains("result"));
        if is_read {
            assert!(body.frame().await.is_none());
        }
        drop(body);
        run_other_tasks().await;
        assert_eq!(
            directory.request_count("keep_answer"),
            usize::from(!is_read)
        );
        a.kill_and_expire().await;

        let answered = b
            .client_of(&mcp)
            .resume(&last_event_id)
            .await
            .messages()
            .await;
        assert_eq!(answered[0]["result"].is_object(), !is_read, "{answered:?}");
    }
}

/// The owner decides to answer 421 to a request that arrives slowly, but before that answer is sent, it has restored the session.
#[tokio::test]
async fn a_session_that_returned_while_it_was_reported_missing_is_not_claimed() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    close_and_claim_back(&directory, &a, &mcp).await;
    assert!(!a.has(&mcp));
    let peer = b.client_of(&mcp).header("mcp-cluster", SECRET);
    let mut slow = Connection::open(a.me.address).await;
    slow.send_cut(&peer.post_request("{"), 100_000).await;
    // By now the owner has decided.
    for _ in 0..1_000 {
        yield_now().await;
    }
    let mut call = a.start_call(&mcp, 1, "a").await;
    assert_eq!(slow.head().await.status, 503);
    assert_eq!(owner_of(&directory, &mcp).await, Some(a.me));
    a.witness.release("a");
    assert_eq!(call.answer().await.unwrap()["id"], 1);
}

/// An instance does not ask for a request's body if it does not have the session.
#[tokio::test]
async fn a_very_long_request_to_a_session_that_has_moved_is_served_at_once() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    close_and_claim_back(&directory, &a, &mcp).await;
    let at_b = b.client_of(&mcp);
    let text = "x".repeat(3_000_000);
    let mut call = at_b.call(1, "echo", json!({ "text": text })).await;
    assert_eq!(call.head().await.status, 200);
    assert!(b.has(&mcp));
}

/// A deletion is not written to the directory until the session has been closed. No instance may restore the session in between.
#[tokio::test]
async fn a_session_that_is_being_deleted_is_restored_nowhere() {
    for at_owner in [true, false] {
        let (directory, [a, b], mcp) = Node::with_session().await;
        directory.set(Fault::SlowAt("delete", Duration::from_millis(300)));
        let late = async {
            until_requested(&directory, "delete").await;
            let node = if at_owner { &a } else { &b };
            status(&node.client_of(&mcp), 1).await
        };
        let (deleted, late) = join(mcp.delete(), late).await;
        assert_eq!(deleted, 202);
        assert_eq!((late, a.has(&mcp), b.has(&mcp)), (404, false, false));
        assert_eq!(owner_of(&directory, &mcp).await, None);
        assert_eq!(status(&mcp, 2).await, 404);
    }
}

/// A session is opened while its instance is cut off from the directory. To the other instances the directory looks consistent, so they
/// would answer 404.
#[tokio::test]
async fn no_client_is_given_a_session_that_the_directory_does_not_have() {
    for fault in [Fault::Fails, Fault::NoReply, Fault::Stopped] {
        let link_a = directory();
        let link_b = Faulty::new(link_a.memory.clone());
        let a = Node::start(&link_a).await;
        let b = Node::start(&link_b).await;
        a.until_settled().await;
        b.until_settled().await;
        link_a.set(fault);
        let mut refused = a.initialize().await;
        let head = assert_refused(&mut refused).await;
        assert_eq!(head.header("mcp-session-id"), None);
        let error: Value = serde_json::from_slice(&refused.body_to_end().await).unwrap();
        assert_eq!(
            (&error["id"], &error["error"]["code"]),
            (&Value::Null, &json!(-32000))
        );

        link_a.set(Fault::None);
        // A record that did reach the directory is removed again.
        pass(Duration::from_secs(3)).await;
        assert_eq!(
            (a.routing().sessions.len(), link_a.memory.sessions()),
            (0, 0)
        );
        let mcp = a.session().await;
        assert_eq!(status(&b.client_of(&mcp), 1).await, 200, "{fault:?}");
    }
}

/// The directory is slow, but answers within `DIRECTORY_TIMEOUT`.
#[tokio::test]
async fn a_session_is_given_to_its_client_once_the_directory_has_it() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    directory.set(Fault::SlowAt("register", Duration::from_millis(200)));
    let mcp = a.session().await;
    assert_eq!(owner_of(&directory, &mcp).await, Some(a.me));
    assert_eq!(status(&b.client_of(&mcp), 1).await, 200);
}

/// The answer was sent before the client disconnected.
#[tokio::test]
async fn a_call_that_has_ended_is_no_longer_pending() {
    let (_directory, [mut a], mcp) = Node::with_session().await;
    unread_answer(&mut a, &mcp).await;
    assert_eq!(a.cluster.pending_answers(), 0);
}
