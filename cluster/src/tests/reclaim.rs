//! A session that is claimed again by the instance it was on.
//!
//! In the meantime requests for the session arrive, clients disconnect, or the instance shuts down.

use std::{
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::{
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
};
use futures_util::{FutureExt as _, future::join};
use http::StatusCode;
use mcp_cancel_on_disconnect::CancellableSessionManager;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{InitializeRequestParams, InitializeResult, ListToolsResult, PaginatedRequestParams},
    service::RequestContext,
    transport::streamable_http_server::StreamableHttpService,
};
use serde_json::json;
use test_support::{Connection, Mcp, Mode, PATH, serve, within};
use tokio::task::yield_now;
use tower_service::Service as _;

use super::{
    node::{Node, SECRET, hash, pass},
    steps::{
        assert_refused, close_session, directory, join_as, post_echo, run_other_tasks, status,
        unreachable_owner,
    },
};
use crate::{
    directory::{
        Claim, Directory as _, Registration,
        contract::{claim_from, owner_of, ownership, session},
        faulty::{Fault, Faulty},
    },
    ids::Epoch,
    membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD},
    relay::body_idle::BODY_IDLE_TIMEOUT,
};

/// Shorter than `DIRECTORY_TIMEOUT`.
const WITHIN_TIMEOUT: Duration = Duration::from_millis(400);

/// Longer than `DIRECTORY_TIMEOUT`.
const OVER_TIMEOUT: Duration = Duration::from_millis(700);

/// Waits until the directory has received `count` requests named `command`.
async fn until_requested(directory: &Faulty, command: &str, count: usize) {
    let requested = async {
        while directory.request_count(command) < count {
            yield_now().await;
        }
    };
    within("a request to the directory", requested).await;
}

/// Two requests claim a session whose owner is dead, and one of them restores it. The other one's client disconnects, or its request gets
/// no reply from the directory.
#[tokio::test]
async fn a_shutdown_does_not_wait_for_a_claim_that_restores_nothing() {
    for disconnects in [true, false] {
        let (directory, [mut a, mut b], mcp) = Node::with_session().await;
        a.kill_and_expire().await;
        let at_b = b.client_of(&mcp);
        directory.set(Fault::SlowAt("claim", OVER_TIMEOUT));
        let mut late = Box::pin(b.app.call(post_echo(&at_b, 1)));
        while directory.request_count("claim") == 0 {
            assert!((&mut late).now_or_never().is_none());
            yield_now().await;
        }
        directory.set(Fault::None);
        assert_eq!(status(&at_b, 2).await, 200);
        let routing = b.cluster.router();
        let _shutdown = routing.shutdown.begin();
        let gate = routing.sessions.gate(at_b.session_id().unwrap()).unwrap();
        let is_idle = || !routing.restores.contains(hash(&at_b));
        let mut idle = Box::pin(gate.wait_until_idle(is_idle));
        assert!((&mut idle).now_or_never().is_none());
        if disconnects {
            drop(late);
        } else {
            assert_eq!(late.await.unwrap().status(), 503);
        }
        run_other_tasks().await;
        assert!(idle.now_or_never().is_some(), "{disconnects}");
    }
}

/// From then on, other instances own this one's sessions, so a call that started here would be lost.
#[tokio::test]
async fn nothing_begins_on_an_instance_that_shuts_down_before_it_has_reclaimed_the_session() {
    let (directory, [a, b], mcp) = Node::with_session().await;
    close_session(&a, &mcp).await;
    directory.set(Fault::SlowAt("claim", WITHIN_TIMEOUT));
    let mut call = mcp.call(1, "hold", json!({ "label": "first" })).await;
    until_requested(&directory, "claim", 1).await;
    let cancelled = within("the shutdown", a.cluster.leave(Duration::ZERO)).await;
    assert_eq!(cancelled, 0);
    directory.set(Fault::None);
    assert_refused(&mut call).await;
    assert!(!a.witness.is_running("first"));
    assert_eq!(status(&b.client_of(&mcp), 2).await, 200);
    assert!(b.has(&mcp) && !a.has(&mcp));
}

/// A peer's call is waiting for earlier calls when its session is closed, and a local client's request is about to restore that session. In
/// the second round another peer claims it first.
#[tokio::test]
async fn a_waiting_call_does_not_restore_a_session_that_another_request_is_about_to_restore() {
    for is_claimed in [false, true] {
        let (directory, [mut a, b, c], mcp) = Node::with_session().await;
        a.detach(&mcp, 1, "first").await;
        let cluster = a.cluster.clone();
        let _shutdown = cluster.router().shutdown.begin();
        let at_b = b.client_of(&mcp);
        let mut second = at_b.call(2, "echo", json!({ "text": "x" })).await;
        run_other_tasks().await;
        assert!(a.has(&mcp));
        directory.set(Fault::SlowAt("claim", WITHIN_TIMEOUT));
        cluster
            .router()
            .sessions
            .relinquish_to_owner(hash(&mcp), unreachable_owner());
        let mut third = Box::pin(a.app.call(post_echo(&mcp, 3)));
        assert!((&mut third).now_or_never().is_none());
        let third = async {
            let (third, ()) = join(third, async {
                until_requested(&directory, "claim", 1).await;
                run_other_tasks().await;
                if is_claimed {
                    let memory = &directory.memory;
                    let claimed = claim_from(memory, hash(&mcp), a.me, c.me).await;
                    assert_eq!(claimed, Claim::Won);
                }
                directory.set(Fault::None);
            })
            .await;
            third.unwrap().status().as_u16()
        };
        let second = async {
            let head = within("a response head", second.head()).await.status;
            (
                head,
                second.answer().await.map(|answer| answer["id"].clone()),
            )
        };
        let (second, third) = within("both responses", join(second, third)).await;
        assert_eq!(second, (200, Some(json!(2))), "{is_claimed}");
        assert_eq!(third, 200, "{is_claimed}");
        let owner = ownership(&directory.memory, hash(&mcp))
            .await
            .unwrap()
            .owner;
        for node in [&a, &b, &c] {
            assert_eq!(node.has(&mcp), node.me == owner, "{is_claimed}");
        }
    }
}

/// A local client, or a peer on behalf of its client, sends only part of a request whose session has to be restored. Other requests do not
/// wait for the rest.
#[tokio::test]
async fn half_a_body_does_not_lock_its_session() {
    for (is_from_peer, length) in [
        (false, 1_000),
        (false, 100_000),
        (true, 1_000),
        (true, 100_000),
    ] {
        let (_directory, [a], mcp) = Node::with_session().await;
        close_session(&a, &mcp).await;
        let half = mcp.post_request("{").header("mcp-cluster", SECRET);
        let address = if is_from_peer {
            a.me.address
        } else {
            a.public.as_ref().unwrap().addr
        };
        // Marks the session as being restored. Otherwise a peer would get 421.
        let mark = a.routing().restores.add(hash(&mcp));
        let mut slow = Connection::open(address).await;
        slow.send_cut(&half, length).await;
        let until_waiting = async {
            while a.routing().restores.requests(hash(&mcp)) < 2 {
                yield_now().await;
            }
        };
        within("the half", until_waiting).await;
        drop(mark);
        assert_eq!(within("a status", status(&mcp, 1)).await, 200);
        pass(BODY_IDLE_TIMEOUT).await;
        assert_eq!(slow.head().await.status, 408, "{is_from_peer} {length}");
        run_other_tasks().await;
        assert!(a.routing().restores.is_empty());
    }
}

/// The limit is the same on an instance that relays and on one that is transferring its sessions.
#[tokio::test]
async fn the_wait_for_half_a_body_is_limited() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let at_b = b.client_of(&mcp);
    let _shutdown = a.routing().shutdown.begin();
    let peer = mcp.header("mcp-cluster", SECRET);
    let halves = [
        (b.public.as_ref().unwrap().addr, &at_b, 1_000),
        (b.public.as_ref().unwrap().addr, &at_b, 100_000),
        (a.me.address, &peer, 1_000),
    ];
    for (to, mcp, length) in halves {
        let mut slow = Connection::open(to).await;
        slow.send_cut(&mcp.post_request("{"), length).await;
        run_other_tasks().await;
        pass(BODY_IDLE_TIMEOUT + Duration::from_secs(1)).await;
        let head = within("a response head", slow.head()).await;
        assert_eq!(head.status, 408, "{to} {length}");
    }
    assert_eq!(status(&at_b, 1).await, 200);
}

/// The session is closed at its owner. One peer gets 421 and claims the session while the owner is about to claim it for its own client,
/// and for clients of other peers.
#[tokio::test]
async fn a_request_for_a_session_that_another_instance_claims_is_routed_to_it() {
    let (directory, [a, b, c, d], mcp) = Node::with_session().await;
    let at_d = d.client_of(&mcp);
    close_session(&a, &mcp).await;
    directory.set(Fault::SlowAt("claim", WITHIN_TIMEOUT));
    let first = at_d.call(1, "echo", json!({ "text": "x" })).await;
    until_requested(&directory, "claim", 1).await;
    let mut calls = vec![first];
    calls.push(mcp.call(2, "echo", json!({ "text": "x" })).await);
    until_requested(&directory, "claim", 2).await;
    directory.set(Fault::None);
    for (id, node) in [(3, &b), (4, &c), (5, &b), (6, &c)] {
        let at_node = node.client_of(&mcp);
        calls.push(at_node.call(id, "echo", json!({ "text": "x" })).await);
    }
    let mut statuses = Vec::new();
    for call in &mut calls {
        statuses.push(within("a response head", call.head()).await.status);
    }
    assert_eq!(statuses, [200; 6]);
    assert!(d.has(&mcp) && !a.has(&mcp));
}

/// An instance that is shutting down relinquishes a session and later claims it again. After that, no other instance is about to claim it.
#[tokio::test]
async fn a_session_that_was_relinquished_and_returned_is_restored_again() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    let _shutdown = a.routing().shutdown.begin();
    assert_eq!(status(&b.client_of(&mcp), 1).await, 200);
    assert!(b.has(&mcp) && !a.has(&mcp));
    close_session(&b, &mcp).await;
    assert_eq!(status(&mcp, 2).await, 200);
    assert!(a.has(&mcp));
    close_session(&a, &mcp).await;
    assert_eq!(status(&mcp, 3).await, 200);
    assert!(a.has(&mcp) && !b.has(&mcp));
}

/// rmcp holds on to the result of a failed restore for a moment and answers 404 until then, which would make clients discard their session.
#[tokio::test]
async fn no_session_is_reported_missing_because_another_client_disconnected() {
    for is_waiting in [true, false] {
        let (directory, [mut a], mcp) = Node::with_session().await;
        close_session(&a, &mcp).await;
        directory.set(Fault::SlowAt("load", WITHIN_TIMEOUT));
        let mut first = Box::pin(a.app.call(post_echo(&mcp, 1)));
        while directory.request_count("load") == 0 {
            assert!((&mut first).now_or_never().is_none());
            yield_now().await;
        }
        directory.set(Fault::None);
        let mut second = Box::pin(a.app.call(post_echo(&mcp, 2)));
        if is_waiting {
            assert!((&mut second).now_or_never().is_none());
        }
        // No other task can run in between.
        drop(first);
        let answered = match (&mut second).now_or_never() {
            Some(answered) => answered,
            None => second.await,
        };
        let answered = answered.unwrap().status().as_u16();
        assert!(matches!(answered, 200 | 503), "{is_waiting}: {answered}");
        assert_eq!(status(&mcp, 3).await, 200);
    }
}

/// The next request restores the session as if none had tried before.
#[tokio::test]
async fn a_session_that_was_loaded_for_a_disconnected_client_is_not_local() {
    let (_directory, [a], mcp) = Node::with_session().await;
    let (routing, id) = (a.routing(), mcp.session_id().unwrap());
    routing.on_request_done(id);
    assert!(a.has(&mcp), "the session is open");
    close_session(&a, &mcp).await;
    routing
        .sessions
        .on_loaded(id, Epoch::now(), (*b"{}").into());
    let other = routing.restores.add(hash(&mcp));
    routing.on_request_done(id);
    assert!(
        a.has(&mcp),
        "another request is about to restore the session"
    );
    drop(other);
    routing.on_request_done(id);
    assert!(!a.has(&mcp));
    assert_eq!(status(&mcp, 1).await, 200);
}

/// A 404 would deny the session without proof, and a 500 would mean that it is broken.
#[tokio::test]
async fn a_session_that_cannot_be_loaded_can_be_requested_again() {
    let (directory, [a], mcp) = Node::with_session().await;
    let memory = &directory.memory;
    memory.evict(hash(&mcp));
    close_session(&a, &mcp).await;
    assert_eq!(status(&mcp, 1).await, 404);
    directory.set(Fault::FailsAt("load"));
    assert_eq!(status(&mcp, 2).await, 503);
}

/// The record looks as if an instance running another version had written it.
#[tokio::test]
async fn a_session_that_cannot_be_restored_is_reported_missing_after_several_attempts() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let unreadable = Registration {
        params: (*b"{}").into(),
        ..session("unreadable")
    };
    let hash = unreadable.session;
    let superseded = directory.memory.register(a.me, &[unreadable]).await;
    assert_eq!(superseded.unwrap(), []);
    // Directory failures do not count as attempts.
    directory.set(Fault::FailsAt("load"));
    for id in 0..4 {
        assert_eq!(status(&a.client("unreadable"), id).await, 503);
    }
    directory.set(Fault::None);
    let answered = [
        status(&a.client("unreadable"), 5).await,
        status(&a.client("unreadable"), 6).await,
        status(&a.client("unreadable"), 7).await,
        status(&b.client("unreadable"), 8).await,
    ];
    assert_eq!(answered, [503, 503, 404, 404]);
    assert_eq!(owner_of(&directory.memory, hash).await, None);
}

/// How an `initialize` fails.
#[derive(Clone, Copy)]
enum InitializeFailure {
    /// The factory returns an error.
    Factory,
    FactoryPanics,
    Refused,
    Panic,
}

/// A server whose `initialize` requests fail in one of these ways each, until the list is empty.
#[derive(Clone, Default)]
struct FailingServer(Arc<Mutex<Vec<InitializeFailure>>>);

impl FailingServer {
    fn take(&self, is_wanted: impl Fn(InitializeFailure) -> bool) -> Option<InitializeFailure> {
        self.0.lock().unwrap().pop_if(|failure| is_wanted(*failure))
    }
}

impl ServerHandler for FailingServer {
    async fn initialize(
        &self,
        _request: InitializeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        match self.take(|_| true) {
            Some(InitializeFailure::Panic) => panic!("on purpose"),
            Some(_) => Err(ErrorData::internal_error("another version", None)),
            None => Ok(self.get_info()),
        }
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::default())
    }
}

/// Closes a session and restores it with these failures, and returns the statuses of its requests.
///
/// An inner layer replaces the first `errors` responses with a 500. A connection that breaks has status 0.
async fn statuses_after(failures: &[InitializeFailure], errors: usize) -> [u16; 4] {
    let directory = directory();
    let cluster = join_as(unreachable_owner(), &directory);
    let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
    let mut config = Mode::Session.config();
    config.session_store = Some(Arc::new(cluster.clone()));
    let handler = FailingServer::default();
    let handler_clone = handler.clone();
    let is_in_factory = |failure| {
        matches!(
            failure,
            InitializeFailure::Factory | InitializeFailure::FactoryPanics
        )
    };
    let make = move || match handler_clone.take(is_in_factory) {
        Some(InitializeFailure::FactoryPanics) => panic!("on purpose"),
        Some(_) => Err(io::Error::other("not now")),
        None => Ok(handler_clone.clone()),
    };
    let service = StreamableHttpService::new(make, sessions, config);
    let remaining_errors = Arc::new(AtomicUsize::new(0));
    let remaining = remaining_errors.clone();
    let replace_responses = from_fn(move |request: Request, next: Next| {
        let remaining = remaining.clone();
        async move {
            let response = next.run(request).await;
            let fewer = |count: usize| count.checked_sub(1);
            match remaining.fetch_update(Ordering::SeqCst, Ordering::SeqCst, fewer) {
                Ok(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
                Err(_) => response,
            }
        }
    });
    let app = axum::Router::new()
        .nest_service(PATH, service)
        .layer(replace_responses);
    let served = serve(app.layer(cluster.layer())).await;
    pass(SETTLE_PERIOD + 2 * HEARTBEAT_INTERVAL).await;
    let mcp = Mcp::session(served.addr, PATH).await;

    handler.0.lock().unwrap().extend(failures);
    remaining_errors.store(errors, Ordering::SeqCst);
    let router = cluster.router();
    router
        .sessions
        .relinquish_to_owner(hash(&mcp), unreachable_owner());
    router
        .sessions
        .relinquished
        .wait_until_closed(hash(&mcp))
        .await;
    assert!(!router.sessions.has_open_gate(mcp.session_id().unwrap()));
    let mut answered = [0; 4];
    for (id, answered) in (1..).zip(&mut answered) {
        let mut listed = mcp.request(id, "tools/list", json!({})).await;
        let head = within("a response head", listed.try_head()).await;
        *answered = head.map_or(0, |head| head.status);
        if *answered == 200 {
            let answer = within("an answer", listed.answer()).await;
            assert!(answer.unwrap().get("result").is_some());
        }
    }
    answered
}

#[tokio::test]
async fn a_session_that_its_handler_refuses_is_reported_missing_after_several_attempts() {
    for failure in [
        InitializeFailure::Factory,
        InitializeFailure::Refused,
        InitializeFailure::Panic,
    ] {
        let answered = statuses_after(&[failure; 3], 0).await;
        assert_eq!(answered, [503, 503, 404, 404]);
    }
}

#[tokio::test]
async fn after_a_failed_restore_the_next_request_restores_the_session() {
    for failure in [
        InitializeFailure::Factory,
        InitializeFailure::Refused,
        InitializeFailure::Panic,
    ] {
        let answered = statuses_after(&[failure], 0).await;
        assert_eq!(answered, [503, 200, 200, 200]);
    }
    let answered = statuses_after(&[InitializeFailure::FactoryPanics], 0).await;
    assert_eq!(answered, [0, 200, 200, 200]);
}

/// The call may have started, so the client is not asked to send it again, and the session is not closed.
#[tokio::test]
async fn a_500_from_a_restored_session_is_passed_through() {
    assert_eq!(statuses_after(&[], 3).await, [500, 500, 500, 200]);
}
