//! Clients that return through an instance that cannot reach their session's owner.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::Grace;
use serde_json::json;
use test_support::{Connection, Mcp, PATH, within};
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
    time::Instant,
};

use super::{
    node::{GRACE, Node, Setup, hash, pass},
    steps::{SECOND, directory},
};
use crate::{
    cluster::Options,
    directory::{
        LEASE_TTL,
        faulty::{Fault, Faulty},
        memory::faults::Kind,
    },
    ids::{Owner, Ownership},
    membership::{heartbeat::HEARTBEAT_INTERVAL, turned_away::CLIENT_BACKOFF},
    relay::filter::PeersFilter,
};

/// Starts an owner with a grace period, and an instance that can reach it if `can_reach_owner`.
async fn start_pair(directory: &Faulty, can_reach_owner: bool) -> [Node; 2] {
    let a = Setup::with_grace().start(directory).await;
    let b = Setup {
        filter: PeersFilter::new(move |_| can_reach_owner),
        ..Setup::default()
    };
    let b = b.start(directory).await;
    a.until_settled().await;
    b.until_settled().await;
    [a, b]
}

/// Starts such a pair on a new directory and opens a session at the owner.
async fn start_pair_with_session(can_reach_owner: bool) -> (Faulty, [Node; 2], Mcp) {
    let directory = directory();
    let nodes = start_pair(&directory, can_reach_owner).await;
    let mcp = nodes[0].session().await;
    (directory, nodes, mcp)
}

/// Waits until the peer closes a connection, without a reset.
async fn until_closed(mut stream: TcpStream) {
    let mut sent = Vec::new();
    within("the relay to disconnect", stream.read_to_end(&mut sent))
        .await
        .unwrap();
}

#[tokio::test]
async fn a_client_that_resumes_at_an_instance_without_a_route_to_the_owner_keeps_its_call() {
    let (_directory, [a, b], mcp) = start_pair_with_session(false).await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    for _ in 0..6 {
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        assert_eq!(resumed.head().await.status, 503);
        pass(SECOND).await;
    }
    assert!(a.witness.is_running("a"));
    // Nor is the call cancelled later, while its client may be on its way back.
    pass(CLIENT_BACKOFF - 3 * SECOND).await;
    assert!(a.witness.is_running("a"));

    let mut resumed = mcp.resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    a.witness.release("a");
    assert_eq!(resumed.answer().await.unwrap()["id"], 1);
}

#[tokio::test]
async fn a_call_whose_client_was_turned_away_and_does_not_return_is_cancelled() {
    let (_directory, [a, b], mcp) = start_pair_with_session(false).await;
    a.detach(&mcp, 1, "a").await;
    // Any request in the session shows that its client is still there.
    let mut call = b.client_of(&mcp).call(2, "echo", json!({})).await;
    assert_eq!(call.head().await.status, 503);
    pass(CLIENT_BACKOFF - 2 * SECOND).await;
    assert!(a.witness.is_running("a"));

    pass(2 * GRACE).await;

    assert!(a.witness.ended("a").await.is_cancelled());
}

/// Looking up the owner has failed, and the directory recovers before the grace period ends.
#[tokio::test]
async fn a_client_turned_away_because_of_a_failed_lookup_keeps_its_call() {
    let (directory, [a, b], mcp) = start_pair_with_session(true).await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    directory.set(Fault::FailsAt("look_up"));
    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 503);
    directory.set(Fault::None);
    pass(CLIENT_BACKOFF - 2 * SECOND).await;
    assert!(a.witness.is_running("a"));

    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    a.witness.release("a");
    assert_eq!(resumed.answer().await.unwrap()["id"], 1);
}

/// The end of a resume's empty body arrives 10 s late, for example because a proxy ends an HTTP/2 stream with a separate frame. The owner
/// itself does not wait for that body.
#[tokio::test]
async fn a_client_whose_resume_has_a_body_that_ends_late_keeps_its_call() {
    let directory = directory();
    let nodes = start_pair(&directory, true).await;
    let a = &nodes[0];
    for (id, node) in nodes.iter().enumerate() {
        let (mcp, label) = (a.session().await, format!("{id}"));
        let last_event_id = a.detach(&mcp, 1, &label).await;
        pass(GRACE - SECOND).await;
        let resume = node.client_of(&mcp).resume_request(&last_event_id);
        let mut resumed = Connection::open(node.public.as_ref().unwrap().addr).await;
        resumed.send_chunked_head(&resume).await;
        pass(10 * SECOND).await;
        resumed.end_chunks().await;
        let status = within("a response head", resumed.head()).await.status;
        assert_eq!((status, a.witness.is_running(&label)), (200, true));
    }
}

/// The backend evicts the leases, and with them the report of a turned-away client, at four phases between two heartbeats.
#[tokio::test]
async fn a_client_that_was_turned_away_keeps_its_call_if_the_leases_are_lost() {
    for phase in 0..4 {
        let (directory, [a, b], mcp) = start_pair_with_session(false).await;
        pass(phase * SECOND / 2).await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        assert_eq!(resumed.head().await.status, 503);
        pass(GRACE - SECOND / 5).await;
        directory.memory.evict_any(Kind::Lease, 0).unwrap();
        pass(3 * GRACE).await;
        assert!(a.witness.is_running("a"), "{phase}");
    }
}

/// An instance's earlier heartbeat proves nothing about the last moment of the grace period.
#[tokio::test]
async fn a_call_waits_for_a_heartbeat_of_each_instance_after_its_grace() {
    let (_directory, [a, b], mcp) = start_pair_with_session(true).await;
    a.detach(&mcp, 1, "a").await;
    pass(GRACE - HEARTBEAT_INTERVAL).await;
    b.cluster.stop_heartbeat();
    pass(HEARTBEAT_INTERVAL + SECOND).await;
    assert!(a.witness.is_running("a"));

    // By then `b`'s lease has lapsed, and `b` may have turned clients away before that.
    pass(LEASE_TTL + HEARTBEAT_INTERVAL).await;
    assert!(a.witness.is_running("a"));
    pass(CLIENT_BACKOFF).await;
    assert!(a.witness.ended("a").await.is_cancelled());
}

/// The relay's connection is established, but carries no response.
#[tokio::test]
async fn a_client_that_waits_for_an_owner_that_does_not_answer_keeps_its_call() {
    let (_directory, [a, b], mcp) = start_pair_with_session(true).await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let owner = Owner {
        address: silent.local_addr().unwrap(),
        incarnation: a.me.incarnation,
    };
    b.routing()
        .owners
        .insert(hash(&mcp), Ownership::begin(owner));
    let waiting = b.client_of(&mcp).resume(&last_event_id).await;
    let (relay, _) = silent.accept().await.unwrap();
    // Less than a relay may wait for a response head.
    pass(GRACE + Duration::from_secs(2)).await;
    assert!(a.witness.is_running("a"));

    // The client gives up, and with it the relay.
    waiting.fin();
    until_closed(relay).await;
    pass(CLIENT_BACKOFF + GRACE).await;
    assert!(a.witness.ended("a").await.is_cancelled());
}

#[tokio::test]
async fn a_client_whose_owner_answers_is_not_turned_away() {
    let (_directory, [a, b], mcp) = start_pair_with_session(true).await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 200);
    a.witness.release("a");
    assert_eq!(resumed.answer().await.unwrap()["id"], 1);
    assert_eq!(b.routing().turned_away.age(Instant::now()), None);
}

/// The path to the owner breaks, and the owner does not detect that the old connection has ended until the client has been turned away.
#[tokio::test]
async fn a_client_that_was_turned_away_before_its_disconnect_was_detected_keeps_its_call() {
    let directory = directory();
    let a = Setup::with_grace().start(&directory).await;
    let is_connected = Arc::new(AtomicBool::new(true));
    let connected = is_connected.clone();
    let b = Setup {
        filter: PeersFilter::new(move |_| connected.load(Ordering::Relaxed)),
        ..Setup::default()
    };
    let b = b.start(&directory).await;
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let at_b = b.client_of(&mcp);
    let mut call = at_b.call(1, "hold", json!({ "label": "a" })).await;
    call.head().await;
    let last_event_id = call.event().await.unwrap().id.unwrap();
    a.witness.started("a").await;

    is_connected.store(false, Ordering::Relaxed);
    let mut resumed = at_b.resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 503);
    pass(2 * SECOND).await;
    call.fin();
    a.until_detached().await;
    for second in 3..35 {
        assert!(a.witness.is_running("a"), "{second} s after the 503");
        pass(SECOND).await;
    }
}

/// The client waits a little less than `client_backoff` each time, at every phase of the heartbeats.
#[tokio::test]
async fn a_client_that_retries_in_time_keeps_its_call() {
    let backoff = 5 * SECOND;
    let options = Options {
        client_backoff: backoff,
        ..Options::default()
    };
    for phase in 0..8 {
        let directory = directory();
        let a = Setup {
            grace: Grace::After(GRACE),
            options,
            ..Setup::default()
        };
        let a = a.start(&directory).await;
        pass(phase * SECOND / 4).await;
        let b = Setup {
            filter: PeersFilter::new(|_| false),
            options,
            ..Setup::default()
        };
        let b = b.start(&directory).await;
        a.until_settled().await;
        b.until_settled().await;
        let mcp = a.session().await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        for attempt in 0..10 {
            let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
            assert_eq!(resumed.head().await.status, 503);
            pass(backoff - SECOND / 4).await;
            assert!(
                a.witness.is_running("a"),
                "phase {phase}, attempt {attempt}"
            );
        }
    }
}

/// Adds a layer that answers the first resume with 503, as if shedding load.
///
/// It is between the cluster's layer and the library's.
fn shed_first_resume(app: Router) -> Router {
    let shed = AtomicBool::new(false);
    let shed = Arc::new(shed);
    app.layer(from_fn(move |request: Request, next: Next| {
        let is_resume = request.headers().contains_key("last-event-id");
        let is_shed = is_resume && !shed.swap(true, Ordering::Relaxed);
        async move {
            if is_shed {
                return (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "4")]).into_response();
            }
            next.run(request).await
        }
    }))
}

/// The client resumes 1 s before its grace period ends and returns later than it was asked to.
#[tokio::test]
async fn a_client_that_an_inner_layer_turned_away_keeps_its_call() {
    for is_relayed in [true, false] {
        let directory = directory();
        let a = Setup {
            inner_layers: shed_first_resume,
            ..Setup::with_grace()
        };
        let a = a.start(&directory).await;
        let b = Node::start(&directory).await;
        a.until_settled().await;
        b.until_settled().await;
        let mcp = a.session().await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        pass(GRACE - SECOND).await;
        let client = if is_relayed { &b } else { &a }.client_of(&mcp);
        let turned_away = client.resume(&last_event_id).await.head().await.status;
        pass(7 * SECOND).await;
        let is_running = a.witness.is_running("a");
        assert_eq!(
            (is_relayed, turned_away, is_running),
            (is_relayed, 503, true)
        );
        let mut resumed = client.resume(&last_event_id).await;
        assert_eq!(resumed.head().await.status, 200);
        a.witness.release("a");
        assert_eq!(resumed.answer().await.unwrap()["id"], 1);
    }
}

/// A response to a made-up event id, or in a made-up session, concerns no local call, so it does not postpone a cancellation.
#[tokio::test]
async fn a_resume_turned_away_by_an_inner_layer_does_not_count_without_a_local_call() {
    let directory = directory();
    let a = Setup {
        inner_layers: |app| {
            app.layer(from_fn(async |request: Request, next: Next| {
                if request.headers().contains_key("last-event-id") {
                    return StatusCode::TOO_MANY_REQUESTS.into_response();
                }
                next.run(request).await
            }))
        },
        ..Setup::with_grace()
    };
    let a = a.start(&directory).await;
    a.until_settled().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    let made_up = Mcp::stateless(a.public.as_ref().unwrap().addr, PATH).in_session("made-up");
    for (client, event_id) in [
        (&mcp, "0/0"),
        (&mcp, "0/0~0123456789abcdef~0~1"),
        (&made_up, &*last_event_id),
    ] {
        assert_eq!(client.resume(event_id).await.head().await.status, 429);
        assert_eq!(a.routing().turned_away.age(Instant::now()), None);
    }
    assert_eq!(mcp.resume(&last_event_id).await.head().await.status, 429);
    assert!(a.routing().turned_away.age(Instant::now()).is_some());
}

/// The server asks its clients to wait for 60 s before they resume (`retry`), and the grace period is longer. After a 503 the client waits
/// just as long, as the TypeScript SDK does.
#[tokio::test]
async fn a_client_that_waits_for_the_servers_retry_after_a_503_keeps_its_call() {
    let directory = directory();
    let a = Setup {
        grace: Grace::After(65 * SECOND),
        ..Setup::default()
    };
    let a = a.start(&directory).await;
    let b = Setup::without_peers().start(&directory).await;
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    pass(60 * SECOND).await;
    let turned_away = b.client_of(&mcp).resume(&last_event_id).await.head().await;
    assert_eq!(turned_away.status, 503);
    pass(60 * SECOND).await;
    assert!(a.witness.is_running("a"));
    pass(15 * SECOND).await;
    assert!(a.witness.ended("a").await.is_cancelled());
}
