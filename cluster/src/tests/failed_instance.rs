//! A session's owner is dead or has relinquished it, and exactly one instance claims it.

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body, routing::any};
use futures_util::future::join;
use serde_json::{Value, json};
use test_support::{Mcp, within};
use tokio::{sync::Notify, time::sleep};

use super::{
    fake_owner::FakeOwner,
    node::{Node, call_app, hash, pass},
    steps::{assert_refused, directory, run_other_tasks, unreachable_owner},
};
use crate::{
    directory::{
        LEASE_TTL, contract,
        faulty::{Fault, Faulty},
    },
    ids::Owner,
    membership::heartbeat::HEARTBEAT_INTERVAL,
    relay::client::UNSTARTED_TIMEOUT,
    routing::{plan::Action, router::OWNER_RECHECK_INTERVAL},
};

/// Calls `echo`.
///
/// The request id is the start of `text`, because concurrent calls in one session need different ids.
async fn echo(mcp: &Mcp, text: &str) -> Value {
    let mut call = mcp
        .call(
            text.get(..9).unwrap_or(text),
            "echo",
            json!({ "text": text }),
        )
        .await;
    let head = call.head().await;
    assert_eq!(head.status, 200);
    let answer = call.answer().await.unwrap();
    answer["result"]["content"][0]["text"].clone()
}

async fn owner_of(directory: &Faulty, mcp: &Mcp) -> Owner {
    let owner = contract::owner_of(&directory.memory, hash(mcp)).await;
    owner.expect("the directory does not have the session")
}

/// Until every instance has written its sessions, the record might be older than a claim that the directory has lost.
#[tokio::test]
async fn an_owners_reply_counts_only_if_the_directory_has_lost_nothing() {
    let directory = directory();
    let [b] = Node::several(&directory).await;
    directory.memory.restart();
    pass(2 * HEARTBEAT_INTERVAL).await;
    let mut owner = FakeOwner::new(&directory).await;
    let mcp = owner.session(&b).await;
    let mut early = mcp.call(1, "echo", json!({ "text": "x" })).await;
    owner.head().await.answer_moved(owner.me).await;
    assert_eq!(early.head().await.status, 503);
    assert_eq!(directory.request_count("claim"), 0);
    b.until_settled().await;
    owner.renew_lease().await;
    let mut call = mcp.call(2, "echo", json!({ "text": "x" })).await;
    owner.head().await.answer_moved(owner.me).await;
    assert_eq!(call.head().await.status, 200);
    assert_eq!(owner_of(&directory, &mcp).await, b.me);
}

/// The call may have started at the former owner, which no longer serves the session.
#[tokio::test]
async fn a_call_does_not_wait_for_an_owner_that_has_lost_its_session() {
    let (directory, _b, mut owner, mcp) = FakeOwner::with_session().await;
    let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
    let hanging = owner.request().await;
    pass(2 * OWNER_RECHECK_INTERVAL).await;
    contract::claim_from(&directory.memory, hash(&mcp), owner.me, unreachable_owner()).await;
    pass(OWNER_RECHECK_INTERVAL).await;
    assert_eq!(call.head().await.status, 502);
    hanging.until_closed().await;
}

/// The backend has evicted the record, and the owner has yet to write it again.
#[tokio::test]
async fn a_call_waits_for_a_running_owner_that_the_directory_has_lost() {
    let (directory, _b, mut owner, mcp) = FakeOwner::with_session().await;
    let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
    let hanging = owner.request().await;
    directory.memory.evict(hash(&mcp));
    for _ in 0..2 * UNSTARTED_TIMEOUT.as_secs() / HEARTBEAT_INTERVAL.as_secs() {
        owner.renew_lease().await;
        pass(HEARTBEAT_INTERVAL).await;
    }
    hanging.answer("200 OK", owner.me, "an answer").await;
    assert_eq!(within("a response head", call.head()).await.status, 200);
}

/// A proxy between two instances answers in place of an owner that already has the call's body.
#[tokio::test]
async fn a_call_that_may_have_started_is_not_started_again() {
    let mut answered = Vec::new();
    for has_ended in [false, true] {
        let (_directory, b, mut owner, mcp) = FakeOwner::with_session().await;
        let mut call = mcp.call(1, "hold", json!({ "label": "twice" })).await;
        // The owner already has the whole call.
        let mut relayed = owner.request().await;
        assert!(!relayed.body.is_empty());
        if has_ended {
            owner.release_lease().await;
        }
        relayed
            .write("HTTP/1.1 503 Service Unavailable\r\nserver: envoy\r\ncontent-length: 0\r\n\r\n")
            .await;
        let head = within("a response head", call.head()).await;
        run_other_tasks().await;
        answered.push((head.status, b.witness.starts("twice")));
    }
    assert_eq!(answered, [(502, 0), (502, 0)]);
}

/// The owner has not asked for the body. By the time the relay gives up on it, another instance owns the session.
#[tokio::test]
async fn a_call_that_has_not_started_is_routed_to_the_new_owner() {
    for round in 0..20 {
        let (directory, b, mut owner, mcp) = FakeOwner::with_session().await;
        let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
        let unasked = owner.head().await;
        let ms = Duration::from_millis(1);
        // Well before the check, at which this instance would claim the session itself.
        pass(OWNER_RECHECK_INTERVAL - 500 * ms).await;
        contract::claim_from(&directory.memory, hash(&mcp), owner.me, b.me).await;
        pass(450 * ms).await;
        // Both timeouts expire during this sleep, a millisecond apart.
        sleep(100 * ms).await;
        assert_eq!(call.head().await.status, 200, "round {round}");
        drop(unasked);
    }
}

/// Several instances detect the owner's death at the same time. Exactly one wins, and the others relay to it.
#[tokio::test]
async fn a_session_whose_owner_has_ended_has_one_new_owner() {
    for round in 0..20 {
        let (directory, [mut a, b, c], mcp) = Node::with_session().await;
        let (at_b, at_c) = (b.client_of(&mcp), c.client_of(&mcp));
        // Both instances know the owner, and detect its death at the same time.
        assert_eq!(
            (echo(&at_b, "x").await, echo(&at_c, "x").await),
            (json!("x"), json!("x"))
        );
        a.kill_and_expire().await;

        let answers = join(
            join(echo(&at_b, "first"), echo(&at_c, "second")),
            join(echo(&at_c, "third"), echo(&at_b, "fourth")),
        );
        let ((first, second), (third, fourth)) = answers.await;
        assert_eq!(
            [first, second, third, fourth],
            ["first", "second", "third", "fourth"]
        );
        assert_ne!(b.has(&mcp), c.has(&mcp), "round {round}");
        let owner = owner_of(&directory, &mcp).await;
        let expected = if b.has(&mcp) { b.me } else { c.me };
        assert_eq!(owner, expected, "round {round}");
    }
}

/// A refused connection proves nothing: a firewall may have rejected it, or only the owner's listener may have closed.
#[tokio::test]
async fn an_owner_that_refuses_connections_keeps_its_session_until_its_lease_ends() {
    let directory = directory();
    let [mut a, b] = Node::several(&directory).await;
    let mcp = b.client_of(&a.session().await);
    a.kill().await;
    for is_call in [true, false] {
        let mut refused = if is_call {
            mcp.call(1, "echo", json!({ "text": "x" })).await
        } else {
            mcp.listen().await
        };
        assert_refused(&mut refused).await;
    }
    assert_eq!(directory.request_count("claim"), 0);
    pass(LEASE_TTL).await;
    assert_eq!(echo(&mcp, "x").await, "x");
    assert_eq!(owner_of(&directory, &mcp).await, b.me);
}

#[tokio::test]
async fn the_body_of_a_request_whose_owner_has_ended_is_whole() {
    for length in [0, 10, 60_000, 70_000, 1_000_000] {
        let (_directory, b, mut owner, mcp) = FakeOwner::with_session().await;
        owner.close();
        owner.release_lease().await;
        let text = "x".repeat(length);
        assert!(echo(&mcp, &text).await == text, "{length}");
        assert!(b.has(&mcp));
    }
}

#[tokio::test]
async fn a_session_that_has_moved_is_claimed_and_the_request_served() {
    let (_directory, b, mut owner, mcp) = FakeOwner::with_session().await;
    let (text, relayed) = join(echo(&mcp, "hello"), async {
        let request = owner.request().await;
        let body = request.body.clone();
        request.answer_moved(owner.me).await;
        body
    })
    .await;
    assert_eq!(text, "hello");
    let relayed: Value = serde_json::from_slice(&relayed).unwrap();
    assert_eq!(relayed["params"]["arguments"]["text"], "hello");
    assert!(b.has(&mcp));
}

/// Two instances share an advertised address, or one has been restarted at it. A 421 from the other incarnation does not count as the
/// owner's.
#[tokio::test]
async fn a_session_is_not_claimed_because_another_instance_does_not_have_it() {
    let (directory, b, mut owner, mcp) = FakeOwner::with_session().await;
    for is_body_requested in [true, false] {
        let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
        let request = if is_body_requested {
            owner.request().await
        } else {
            owner.head().await
        };
        request.answer_moved(unreachable_owner()).await;
        assert_refused(&mut call).await;
    }
    assert_eq!(directory.request_count("claim"), 0);
    assert_eq!(owner_of(&directory, &mcp).await, owner.me);

    owner.release_lease().await;
    let other = async {
        owner
            .request()
            .await
            .answer_moved(unreachable_owner())
            .await
    };
    let (text, ()) = join(echo(&mcp, "x"), other).await;
    assert_eq!(text, "x");
    assert_eq!(owner_of(&directory, &mcp).await, b.me);
}

/// A long body was in transit when the owner answered 421. It cannot be sent again, but by the next attempt the session has moved.
#[tokio::test]
async fn a_long_request_to_a_session_that_has_moved_is_served_the_second_time() {
    let (_directory, _b, mut owner, mcp) = FakeOwner::with_session().await;
    let text = "x".repeat(100_000);
    let mut call = mcp.call(1, "echo", json!({ "text": text })).await;
    owner.request().await.answer_moved(owner.me).await;
    assert_refused(&mut call).await;
    assert!(echo(&mcp, &text).await == text);
}

/// An owner that has not asked for a call's body has not started the call. The body is complete, so another instance can serve the call.
#[tokio::test]
async fn a_call_that_has_not_started_runs_on_another_instance() {
    for length in [10, 100_000] {
        let directory = directory();
        let [b] = Node::several(&directory).await;
        let mut owner = FakeOwner::new(&directory).await;
        let text = "x".repeat(length);
        let mcp = owner.session(&b).await;
        let moves = async { owner.head().await.answer_moved(owner.me).await };
        let (answered, ()) = join(echo(&mcp, &text), moves).await;
        assert!(answered == text, "relinquished, {length}");

        // The connection ends like one that was not accepted before its listener closed.
        let mcp = owner.session(&b).await;
        owner.release_lease().await;
        let breaks = async { drop(owner.head().await) };
        let (answered, ()) = join(echo(&mcp, &text), breaks).await;
        assert!(answered == text, "connection broken, {length}");
        assert!(b.has(&mcp));
    }
}

/// Two instances answer each other's requests with 421, and each is the owner in the directory. Requests must not circulate.
#[tokio::test]
async fn a_request_that_is_moved_again_and_again_is_refused() {
    let (directory, b, mut owner, mcp) = FakeOwner::with_session().await;
    directory.set(Fault::WrongOwner(owner.me));
    let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
    for _ in 0..4 {
        owner.request().await.answer_moved(owner.me).await;
    }
    assert_refused(&mut call).await;
    directory.set(Fault::None);
    assert!(!b.has(&mcp));
}

#[tokio::test]
async fn an_unreachable_owner_keeps_its_session_until_its_lease_ends() {
    let (directory, b, mut owner, mcp) = FakeOwner::with_session().await;

    // The owner ends the connection before sending a response head.
    let call = mcp.call(1, "echo", json!({ "text": "x" }));
    let (mut call, broken) = join(call, owner.request()).await;
    drop(broken);
    assert_eq!(call.head().await.status, 502, "the call may have started");
    let (mut listening, mut broken) = join(mcp.listen(), owner.request()).await;
    broken.write("HTTP/1.1 200 OK\r\nmcp-clu").await;
    drop(broken);
    assert_refused(&mut listening).await;
    assert_eq!(owner_of(&directory, &mcp).await, owner.me);

    owner.release_lease().await;
    let (mut listening, broken) = join(mcp.listen(), owner.request()).await;
    drop(broken);
    assert_eq!(listening.head().await.status, 200);
    assert_eq!(owner_of(&directory, &mcp).await, b.me);
}

#[tokio::test]
async fn only_calls_wait_for_an_owner_that_does_not_answer() {
    let (directory, _b, mut owner, mcp) = FakeOwner::with_session().await;
    let (mut call, unanswered) = join(mcp.call(1, "hold", json!({})), owner.request()).await;
    let (mut listening, silent) = join(mcp.listen(), owner.request()).await;
    tokio::time::pause();
    tokio::time::advance(Duration::from_secs(11)).await;
    tokio::time::resume();
    assert_refused(&mut listening).await;
    silent.until_closed().await;

    // The call is still waiting and receives its answer.
    unanswered.answer("200 OK", owner.me, "late").await;
    let reply = call.reply().await;
    assert_eq!((reply.status, reply.text()), (200, "late"));
    assert_eq!(owner_of(&directory, &mcp).await, owner.me);
}

/// Until its body has been asked for, a call waits for 10 s like any other request. After that, the lease decides.
#[tokio::test]
async fn a_call_whose_body_was_not_requested_does_not_wait_for_a_hung_owner() {
    for (length, is_alive) in [(10, true), (10, false), (100_000, true), (100_000, false)] {
        let (directory, b, mut owner, mcp) = FakeOwner::with_session().await;
        let text = "x".repeat(length);
        let mut call = mcp.call(1, "echo", json!({ "text": text })).await;
        let hanging = owner.head().await;
        pass(Duration::from_millis(9_900)).await;
        if is_alive {
            owner.renew_lease().await;
        }
        pass(Duration::from_millis(200)).await;
        let head = call.head().await;
        hanging.until_closed().await;
        if is_alive {
            assert_eq!((head.status, head.header("retry-after")), (503, Some("1")));
            assert_eq!(owner_of(&directory, &mcp).await, owner.me);
        } else {
            assert_eq!(head.status, 200);
            let answer = call.answer().await.unwrap();
            assert!(answer["result"]["content"][0]["text"] == text, "{length}");
            assert_eq!(owner_of(&directory, &mcp).await, b.me);
        }
    }
}

/// The owner does not ask for the body of a POST that has none, so the POST may have started and is not sent to another instance.
#[tokio::test]
async fn a_post_without_a_body_is_not_sent_again() {
    let directory = directory();
    let [b] = Node::several(&directory).await;
    for hangs in [true, false] {
        let mut owner = FakeOwner::new(&directory).await;
        let mcp = owner.session(&b).await;
        owner.release_lease().await;
        let mut call = mcp.send(&mcp.post_request("")).await;
        let request = owner.request().await;
        if hangs {
            pass(Duration::from_millis(10_100)).await;
            request.until_closed().await;
        } else {
            drop(request);
        }
        assert_eq!(call.head().await.status, 502);
        assert!(!b.has(&mcp));
    }
    // Only later requests in a session whose owner has died are served by this instance.
    assert_eq!(directory.request_count("claim"), 2);
    let mut live = FakeOwner::new(&directory).await;
    let mcp = live.session(&b).await;
    let mut call = mcp.send(&mcp.post_request("")).await;
    drop(live.request().await);
    assert_eq!(call.head().await.status, 502);
    assert_eq!(directory.request_count("claim"), 2);
}

#[tokio::test]
async fn a_stream_that_breaks_at_the_owner_breaks_at_the_client() {
    let (_directory, _b, mut owner, mcp) = FakeOwner::with_session().await;
    let (mut listening, mut request) = join(mcp.listen(), owner.request()).await;
    let incarnation = owner.me.incarnation;
    let head =
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n";
    request
        .write(&format!("{head}mcp-cluster: {incarnation}\r\n\r\n"))
        .await;
    assert_eq!(listening.head().await.status, 200);
    request.write("b\r\ndata: one\n\n\r\n").await;
    assert_eq!(listening.event().await.unwrap().data, "one", "at once");
    request.write("8\r\ndata: tw\r\n").await;
    drop(request);
    assert_eq!(listening.event().await, None);
    assert!(
        !listening.is_complete(),
        "the client must not mistake the break for the end"
    );
}

#[tokio::test]
async fn only_a_consistent_directory_proves_that_a_session_does_not_exist() {
    let directory = directory();
    let new_instance = Node::start(&directory).await;
    let reply = new_instance.client("unknown").post_raw("{}", &[]).await;
    assert_eq!(
        (reply.status, reply.headers["retry-after"].as_bytes()),
        (503, &b"1"[..])
    );

    let [b] = Node::several(&directory).await;
    let ping = json!({ "jsonrpc": "2.0", "id": 1, "method": "ping" }).to_string();
    assert_eq!(
        b.client("unknown").post_raw(ping.clone(), &[]).await.status,
        404
    );
    directory.memory.flush();
    assert_eq!(
        b.client("another").post_raw(ping.clone(), &[]).await.status,
        503
    );
    directory.set(Fault::Fails);
    assert_eq!(
        b.client("a third").post_raw(ping.clone(), &[]).await.status,
        503
    );
}

/// Between its claim and its restore a session is not open on any instance. A peer that got a 421 at that moment would claim it again.
#[tokio::test]
async fn a_session_that_is_being_reclaimed_is_local_for_peers() {
    let (_directory, b, mut owner, mcp) = FakeOwner::with_session().await;
    owner.close();
    owner.release_lease().await;
    let id = mcp.session_id().unwrap();
    let (entered, released) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (on_entered, on_released) = (entered.clone(), released.clone());
    let app = Router::new().route(
        "/mcp",
        any(async move || {
            on_entered.notify_one();
            on_released.notified().await;
        }),
    );
    let request = http::Request::get("/mcp").header("mcp-session-id", id);
    let request = request.body(Body::empty()).unwrap();
    let check = async {
        entered.notified().await;
        assert_eq!(b.routing().classify_from_peer(Some(id)).0, Action::Serve);
        released.notify_one();
    };
    let (response, ()) = join(call_app(&b, app, request), check).await;
    assert_eq!(response.status(), 200);
    assert_eq!(b.routing().classify_from_peer(Some(id)).0, Action::Moved);
}
