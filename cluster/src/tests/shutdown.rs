//! Orderly shutdowns.

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use axum::{Router, body::Body};
use futures_util::{FutureExt as _, future::join};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event};
use serde_json::{Value, json};
use test_support::{Connection, Mcp, within};
use tokio::{
    net::TcpListener,
    task::yield_now,
    time::{sleep, timeout},
};
use tower_service::Service as _;

use super::{
    node::{Node, Setup, hash, pass},
    steps::{SECOND, assert_refused, directory, echo, join_as, run_other_tasks},
};
use crate::{
    Cluster,
    directory::{contract::owner_of, faulty::Fault},
    ids::{Incarnation, Owner, SessionHash},
};

/// A shutdown limit that is longer than any test takes.
const LIMIT: Duration = Duration::from_secs(60);

async fn answered_id(call: &mut Connection) -> Value {
    let answer = within("an answer", call.answer()).await;
    answer.unwrap()["id"].clone()
}

/// The public listener closes, calls in flight complete, new calls are served elsewhere, and no answer is lost.
#[tokio::test]
async fn no_answer_is_lost_when_the_owner_shuts_down() {
    let (_directory, [mut a, b, c], mcp) = Node::with_session().await;
    let (at_b, at_c) = (b.client_of(&mcp), c.client_of(&mcp));
    let mut first = a.start_call(&at_b, 1, "first").await;
    let mut second = a.start_call(&at_c, 2, "second").await;
    let event = second.event().await.unwrap();
    second.fin();

    drop(a.public.take());
    let cluster = a.cluster.clone();
    let mut shutdown = Box::pin(cluster.leave(LIMIT));
    assert!((&mut shutdown).now_or_never().is_none());
    let requests = async {
        // A client that resumes is served where its call is running, but a new call waits.
        let mut resumed = at_b.resume(event.id.as_deref().unwrap()).await;
        assert_eq!(resumed.head().await.status, 200);
        let mut third = at_c.call(3, "echo", json!({ "text": "x" })).await;
        run_other_tasks().await;
        assert!(a.has(&mcp));
        a.witness.release("first");
        assert_eq!(answered_id(&mut first).await, 1);
        run_other_tasks().await;
        assert!(third.head().now_or_never().is_none() && a.has(&mcp));
        a.witness.release("second");
        assert_eq!(resumed.answer_event().await.unwrap().json()["id"], 2);
        assert_eq!(answered_id(&mut third).await, 3);
        assert!(c.has(&mcp) && !a.has(&mcp));
    };
    let (cancelled, ()) = within("the shutdown", join(shutdown, requests)).await;
    assert_eq!(cancelled, 0);
    within("the peer listener to close", &mut a.peers)
        .await
        .unwrap();
    assert_eq!(
        (echo(&at_b, 4).await, echo(&at_c, 5).await),
        (json!(4), json!(5))
    );
    assert!(c.has(&mcp) && !b.has(&mcp));
}

/// Two instances are waiting for a session's last call.
#[tokio::test]
async fn only_one_of_two_waiting_instances_claims_the_session() {
    for _ in 0..5 {
        let (_directory, [a, b, c], mcp) = Node::with_session().await;
        let (at_b, at_c) = (b.client_of(&mcp), c.client_of(&mcp));
        let mut first = a.start_call(&mcp, 1, "first").await;
        let _shutdown = a.routing().shutdown.begin();
        let both = join(echo(&at_b, 2), echo(&at_c, 3));
        let released = async {
            run_other_tasks().await;
            a.witness.release("first");
            answered_id(&mut first).await
        };
        let answered = join(both, released).await;
        assert_eq!(answered, ((json!(2), json!(3)), json!(1)));
        assert!(!a.has(&mcp) && b.has(&mcp) != c.has(&mcp));
    }
}

/// When another instance requests the session, the call is at a different step in each round.
#[tokio::test]
async fn a_call_in_flight_ends_on_its_instance() {
    let mut started = 0;
    for polls in 0..30 {
        let (_directory, [mut a, b], mcp) = Node::with_session().await;
        let message = mcp.call_message(1, "echo", json!({ "text": "x" }));
        let request = http::Request::post("/mcp")
            .header("host", "localhost")
            .header("mcp-session-id", mcp.session_id().unwrap())
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .body(Body::from(message.to_string()));
        let mut first = Box::pin(a.app.call(request.unwrap()));
        let mut response = None;
        for _ in 0..polls {
            response = (&mut first).now_or_never();
            if response.is_some() {
                break;
            }
            yield_now().await;
        }
        started += usize::from(response.is_none());
        let routing = a.cluster.router();
        let _shutdown = routing.shutdown.begin();
        let first = async {
            let response = match response {
                Some(response) => response,
                None => first.await,
            };
            let response = response.unwrap();
            assert_eq!(response.status(), 200);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            String::from_utf8(body.to_vec()).unwrap()
        };
        let (first, second) = join(first, echo(&b.client_of(&mcp), 2)).await;
        assert!(first.contains("\"result\""), "{polls}: {first}");
        assert_eq!(second, 2, "{polls}");
        assert!(b.has(&mcp), "{polls}");
    }
    assert!(started > 0);
}

/// A session stays on an instance that is shutting down until another instance requests it. Only then does its stream end, to be reopened
/// through the new owner.
#[tokio::test]
async fn a_listener_can_reconnect_to_the_new_owner_of_its_session() {
    let (_directory, [a, b, c], mcp) = Node::with_session().await;
    let mut listening = mcp.listen().await;
    assert_eq!(listening.head().await.status, 200);
    let _shutdown = a.routing().shutdown.begin();
    assert_eq!(echo(&mcp, 1).await, 1);
    assert!(a.has(&mcp));

    assert_eq!(echo(&c.client_of(&mcp), 2).await, 2);
    let end = async { while listening.event().await.is_some() {} };
    within("the stream to end", end).await;
    let mut listening = b.client_of(&mcp).listen().await;
    assert_eq!(listening.head().await.status, 200);
    // A request that still arrives here is relayed.
    assert_eq!(echo(&mcp, 3).await, 3);
    assert!(c.has(&mcp) && !a.has(&mcp) && !b.has(&mcp));
}

#[tokio::test]
async fn a_stream_of_a_session_without_calls_is_opened_where_it_stays() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let _shutdown = a.routing().shutdown.begin();
    let mut listening = b.client_of(&mcp).listen().await;
    assert_eq!(listening.head().await.status, 200);
    assert!(b.has(&mcp) && !a.has(&mcp));
}

/// A request that cannot be sent again is not answered with 421.
#[tokio::test]
async fn a_long_call_is_served_where_its_session_still_is() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let at_b = b.client_of(&mcp);
    let _shutdown = a.routing().shutdown.begin();
    for length in [70_000, 1_000_000] {
        let text = "x".repeat(length);
        let mut call = at_b.call(length, "echo", json!({ "text": text })).await;
        assert_eq!(answered_id(&mut call).await, length);
        assert!(a.has(&mcp));
    }
    assert_eq!(echo(&at_b, 1).await, 1);
    assert!(b.has(&mcp) && !a.has(&mcp));
    let mut call = at_b
        .call(2, "echo", json!({ "text": "x".repeat(70_000) }))
        .await;
    assert_eq!(answered_id(&mut call).await, 2);
}

#[tokio::test]
async fn calls_in_flight_at_the_limit_are_cancelled_and_waiting_calls_run_on_another_instance() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let at_b = b.client_of(&mcp);
    let mut first = a.start_call(&at_b, 1, "first").await;
    let shutdown = a.cluster.leave(Duration::from_millis(500));
    let (cancelled, second) = within("the shutdown", join(shutdown, echo(&at_b, 2))).await;
    assert_eq!((cancelled, second), (1, json!(2)));
    assert!(a.witness.ended("first").await.is_cancelled());
    assert_eq!(answered_id(&mut first).await, 1);
    assert!(b.has(&mcp));
}

/// B relays a call in one of A's sessions, and shuts down. The client might be unable to resume the call once B has exited, so B waits for
/// it. It does not wait for the stream of a GET, which the client simply reopens.
#[tokio::test]
async fn a_shutdown_waits_for_the_calls_that_the_instance_relays() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let at_b = b.client_of(&mcp);
    let mut listening = at_b.listen().await;
    assert_eq!(listening.head().await.status, 200);
    let mut call = a.start_call(&at_b, 1, "first").await;
    let own = b.session().await;
    let cluster = b.cluster.clone();
    let shutdown = tokio::spawn(async move { cluster.leave(LIMIT).await });
    pass(10 * SECOND).await;
    assert!(!shutdown.is_finished());
    assert_eq!(echo(&own, 2).await, 2, "B keeps serving its own session");
    a.witness.release("first");
    assert_eq!(answered_id(&mut call).await, 1);
    assert_eq!(within("the shutdown", shutdown).await.unwrap(), 0);
    drop(listening);
}

#[tokio::test]
async fn a_shutdown_waits_for_relayed_calls_until_its_limit() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let mut call = a.start_call(&b.client_of(&mcp), 1, "first").await;
    let cancelled = within("the shutdown", b.cluster.leave(Duration::from_millis(500))).await;
    assert_eq!(cancelled, 0);
    assert!(a.witness.is_running("first"));
    a.witness.release("first");
    assert_eq!(answered_id(&mut call).await, 1);
}

/// A call relayed by B is waiting at its owner A when both shut down. The session moves to B, which serves the call.
#[tokio::test]
async fn a_relayed_call_that_waits_for_a_transfer_is_served_by_an_instance_that_shuts_down() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let mut first = a.start_call(&mcp, 1, "first").await;
    let mut shutdowns = Vec::new();
    for node in [&a, &b] {
        let cluster = node.cluster.clone();
        shutdowns.push(tokio::spawn(async move { cluster.leave(LIMIT).await }));
    }
    run_other_tasks().await;
    let mut second = b
        .client_of(&mcp)
        .call(2, "echo", json!({ "text": "x" }))
        .await;
    pass(5 * SECOND).await;
    a.witness.release("first");
    assert_eq!(answered_id(&mut first).await, 1);
    assert_eq!(answered_id(&mut second).await, 2);
    for shutdown in shutdowns {
        assert_eq!(within("the shutdown", shutdown).await.unwrap(), 0);
    }
}

/// This way a client that resumes afterwards learns the reason, rather than that the server has exited without an answer.
#[tokio::test]
async fn the_error_of_a_call_that_is_cancelled_at_the_limit_is_stored() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let mut call = a.start_call(&mcp, 1, "first").await;
    let event = call.event().await.unwrap().id.unwrap();
    call.fin();
    let cancelled = within("the shutdown", a.cluster.leave(Duration::from_millis(500))).await;
    assert_eq!(cancelled, 1);
    let answered = b.client_of(&mcp).resume(&event).await.messages().await;
    assert_eq!(answered.len(), 1);
    assert_eq!(answered[0]["error"]["code"], -32800, "{answered:?}");
}

#[tokio::test]
async fn a_session_that_is_opened_during_a_shutdown_continues_on_another_instance() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let shutdown = a.cluster.leave(LIMIT);
    let opened = async {
        run_other_tasks().await;
        let mcp = a.session().await;
        assert_eq!(echo(&mcp, 1).await, 1);
        mcp
    };
    let (cancelled, mcp) = within("the shutdown", join(shutdown, opened)).await;
    assert_eq!(cancelled, 0);
    assert_eq!(echo(&b.client_of(&mcp), 2).await, 2);
    assert!(b.has(&mcp));
}

/// Otherwise its call would run on an instance that the client can no longer reach.
#[tokio::test]
async fn a_shutdown_waits_for_a_session_that_is_being_restored() {
    let directory = directory();
    let [a] = Node::several(&directory).await;
    let restore = a.routing().restores.add(SessionHash::of("restored"));
    let mut shutdown = Box::pin(a.cluster.leave(LIMIT));
    for _ in 0..5 {
        assert!((&mut shutdown).now_or_never().is_none());
        pass(Duration::from_secs(1)).await;
    }
    assert!(!a.routing().shutdown.has_stopped());
    drop(restore);
    assert_eq!(within("the shutdown", shutdown).await, 0);
}

/// Requests are served where their session is until the last moment. After that, clients get 503 with `retry-after`.
#[tokio::test]
async fn nothing_begins_on_an_instance_that_has_shut_down() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    within("the shutdown", a.cluster.leave(Duration::ZERO)).await;
    let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
    assert_refused(&mut call).await;
    assert_eq!(echo(&b.client_of(&mcp), 2).await, 2);
    assert_eq!(echo(&mcp, 3).await, 3);
    assert!(b.has(&mcp));
}

/// An answer that its client may not have read is in the directory.
#[tokio::test]
async fn an_unread_answer_survives_the_shutdown() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let mut call = a.start_call(&mcp, 1, "first").await;
    let event = call.event().await.unwrap().id.unwrap();
    let ends = async {
        run_other_tasks().await;
        a.witness.release("first");
        a.witness.ended("first").await;
    };
    within("the shutdown", join(a.cluster.leave(LIMIT), ends)).await;
    call.fin();
    let answered = b.client_of(&mcp).resume(&event).await.messages().await;
    assert_eq!(answered.len(), 1);
    assert!(answered[0]["result"].is_object(), "{answered:?}");
}

/// An instance that gets a 421 finds all of the session's answers in the directory, including late ones.
#[tokio::test]
async fn a_session_is_not_relinquished_before_its_answers_are_stored() {
    let (directory, [a, b, c], mcp) = Node::with_session().await;
    let mut call = a.start_call(&mcp, 1, "first").await;
    let last_event_id = call.event().await.unwrap().id.unwrap();
    call.fin();
    a.until_detached().await;
    let _shutdown = a.routing().shutdown.begin();
    directory.set(Fault::FailsAt("keep_answer"));
    a.witness.release("first");
    while directory.request_count("keep_answer") == 0 || !a.calls.is_empty() {
        yield_now().await;
    }
    directory.set(Fault::None);
    let at_b = b.client_of(&mcp);
    let resumed = async {
        while a.has(&mcp) {
            yield_now().await;
        }
        at_b.resume(&last_event_id).await.messages().await
    };
    let (next, answered) = join(echo(&c.client_of(&mcp), 2), resumed).await;
    assert_eq!((next, answered.len()), (json!(2), 1));
    assert!(answered[0]["result"].is_object(), "{answered:?}");
}

/// The call has ended, but its waiters have yet to be notified. At that moment its session is relinquished and about to be closed.
#[tokio::test]
async fn an_answer_is_stored_before_its_session_is_relinquished() {
    let directory = directory();
    let cluster: Arc<OnceLock<Cluster>> = Arc::default();
    let result: Arc<OnceLock<(bool, usize)>> = Arc::default();
    let (member, result_at_end) = (cluster.clone(), result.clone());
    let try_transfer_at_end = move |event: &Event<'_>| {
        if let Event::Ended { call, .. } = event
            && let Some(cluster) = member.get()
        {
            let session = call.session().unwrap();
            cluster.router().shutdown.try_transfer(session);
            let is_here = cluster.router().sessions.has_open_gate(session);
            result_at_end
                .set((is_here, cluster.pending_answers()))
                .unwrap();
        }
    };
    let setup = Setup {
        layer: CancelOnDisconnectLayer::new().observe_fn(try_transfer_at_end),
        ..Setup::default()
    };
    let (a, b) = (setup.start(&directory).await, Node::start(&directory).await);
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    let _shutdown = a.routing().shutdown.begin();
    cluster.set(a.cluster.clone()).unwrap();
    a.witness.release("a");

    let answered = async {
        while a.has(&mcp) {
            yield_now().await;
        }
        b.client_of(&mcp)
            .resume(&last_event_id)
            .await
            .messages()
            .await
    };
    let answered = within("the answer", answered).await;
    assert_eq!(result.get(), Some(&(false, 0)));
    assert_eq!(answered.len(), 1);
    assert!(answered[0]["result"].is_object(), "{answered:?}");
}

/// A shutdown whose future is dropped counts as completed, so the requests waiting for it are notified.
#[tokio::test]
async fn a_request_that_waits_for_a_dropped_shutdown_is_served_by_another_instance() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let _first = a.start_call(&mcp, 1, "first").await;
    let shutdown = timeout(Duration::from_millis(300), a.cluster.leave(LIMIT));
    let (shutdown, second) = join(shutdown, echo(&b.client_of(&mcp), 2)).await;
    assert!(shutdown.is_err());
    assert_eq!(second, 2);
    assert!(b.has(&mcp) && a.witness.is_running("first"));
}

/// A session that its client has ended must not be restored once the directory has recovered.
#[tokio::test]
async fn a_shutdown_waits_until_the_directory_has_the_tombstones_of_ended_sessions() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    directory.set(Fault::Fails);
    assert_eq!(mcp.delete().await, 202);
    let cluster = a.cluster.clone();
    let mut shutdown = Box::pin(cluster.leave(LIMIT));
    let early = timeout(Duration::from_secs(3), &mut shutdown).await;
    assert!(early.is_err());
    directory.set(Fault::None);
    within("the shutdown", shutdown).await;
    let session = SessionHash::of(mcp.session_id().unwrap());
    assert_eq!(owner_of(&directory.memory, session).await, None);
    drop(b);
}

#[tokio::test]
async fn a_shutdown_that_is_dropped_relinquishes_its_sessions() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let at_b = b.client_of(&a.session().await);
    let mut shutdown = Box::pin(a.cluster.leave(LIMIT));
    assert!((&mut shutdown).now_or_never().is_none());
    drop(shutdown);
    pass(Duration::from_secs(2)).await;
    assert_eq!(echo(&at_b, 1).await, 1);
    assert!(b.has(&at_b));
}

/// A session was idle and its gate is closed, but the shutdown is still waiting for a call in another session. The next owner claims the
/// first session, and its client's stream ends, because no more events can arrive on it.
#[tokio::test]
async fn a_listener_is_disconnected_when_its_idle_session_is_relinquished() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let mut sessions = Vec::new();
    for _ in 0..2 {
        sessions.push(a.session().await);
    }
    // In the order in which the shutdown checks them.
    let ids = a.routing().sessions.ids();
    sessions.sort_by_key(|mcp| ids.iter().position(|id| **id == *mcp.session_id().unwrap()));
    let [y, x] = <[Mcp; 2]>::try_from(sessions).ok().unwrap();
    let mut listening = b.client_of(&x).listen().await;
    assert_eq!(listening.head().await.status, 200);
    let mut first = a.start_call(&x, 1, "x").await;

    let cluster = a.cluster.clone();
    let shutdown = tokio::spawn(async move { cluster.leave(60 * SECOND).await });
    run_other_tasks().await;
    pass(2 * SECOND).await;
    let second = a.start_call(&y, 2, "y").await;
    a.witness.release("x");
    assert!(within("an answer", first.answer()).await.is_some());
    run_other_tasks().await;
    pass(SECOND).await;

    // X has moved.
    let at_b = b.client_of(&x);
    assert_eq!(echo(&at_b, 3).await, 3);
    assert!(b.has(&x) && a.witness.is_running("y"));
    let end = async { while listening.event().await.is_some() {} };
    let ended = timeout(5 * SECOND, end).await;
    assert!(
        ended.is_ok(),
        "the stream of a moved session is still open at the former owner, which has the session: {}",
        a.routing().sessions.is_open(hash(&x))
    );
    a.witness.release("y");
    drop((second, shutdown));
}

/// A program no longer polls `serve_peers` while shutting down, as after `select! { () = &mut serving => {}, _ = ctrl_c() => {} }`.
#[tokio::test]
async fn a_shutdown_does_not_wait_forever_for_a_listener_that_is_not_polled() {
    let directory = directory();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let me = Owner {
        address: listener.local_addr().unwrap(),
        incarnation: Incarnation::random(),
    };
    let cluster = join_as(me, &directory);
    let app: Router = Router::new().layer(cluster.layer());
    let mut serving = Box::pin(cluster.serve_peers(listener, app));
    assert!((&mut serving).now_or_never().is_none());
    let shutdown = timeout(20 * SECOND, cluster.leave(SECOND)).await;
    assert!(
        shutdown.is_ok(),
        "`leave(1 s)` has not returned within 20 s"
    );
}

/// A call is waiting for its session to be transferred when its client cancels it, so no owner starts it.
#[tokio::test]
async fn a_call_cancelled_by_its_client_while_it_waited_does_not_run() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let at_b = b.client_of(&mcp);
    let mut first = a.start_call(&at_b, 1, "first").await;
    let _shutdown = a.routing().shutdown.begin();
    let mut second = at_b.call(2, "hold", json!({ "label": "second" })).await;
    run_other_tasks().await;
    assert!(second.head().now_or_never().is_none(), "the call waits");
    assert_eq!(at_b.cancel(2).await, 202);
    run_other_tasks().await;
    a.witness.release("first");
    assert!(within("an answer", first.answer()).await.is_some());
    let head = timeout(3 * SECOND, second.head()).await;
    sleep(SECOND).await;
    assert!(
        !b.witness.is_running("second") && !a.witness.is_running("second"),
        "the cancelled call is running, with status {:?}",
        head.map(|head| head.status)
    );
}
