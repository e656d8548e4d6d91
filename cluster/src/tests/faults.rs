//! Sessions and calls while an instance stalls, or the directory returns empty or with older data.

use std::{
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use serde_json::json;
use test_support::{Connection, Mcp, within};
use tokio::{
    spawn,
    task::{JoinHandle, yield_now},
    time::Instant,
};
use tracing_subscriber::{
    Layer as _,
    filter::{LevelFilter, Targets},
    fmt,
    layer::SubscriberExt as _,
};

use super::{
    log_lines::Warnings,
    node::{Node, Setup, hash, pass},
    steps::{SECOND, directory, echo, run_other_tasks, status},
};
use crate::{
    cluster::Options,
    directory::{
        LEASE_TTL,
        contract::owner_of,
        faulty::{Fault, Faulty},
    },
    membership::heartbeat::{HEARTBEAT_INTERVAL, MIN_LEASE, SETTLE_PERIOD},
    relay::filter::PeersFilter,
};

/// Two instances, of which `b` has no connections to peers until `is_connected` is set.
struct PartitionedPair {
    a: Node,
    b: Node,
    is_connected: Arc<AtomicBool>,
}

impl PartitionedPair {
    async fn start(directory: &Faulty) -> Self {
        let a = Node::start(directory).await;
        let is_connected = Arc::<AtomicBool>::default();
        let connected = is_connected.clone();
        let setup = Setup {
            filter: PeersFilter::new(move |_| connected.load(Ordering::Relaxed)),
            ..Setup::default()
        };
        let b = setup.start(directory).await;
        a.until_settled().await;
        b.until_settled().await;
        pass(HEARTBEAT_INTERVAL).await;
        Self { a, b, is_connected }
    }
}

/// Starts a call without sending its body yet, and waits until the instance has the head.
async fn send_head(node: &Node, mcp: &Mcp) -> Connection {
    let mut call = Connection::open(node.public.as_ref().unwrap().addr).await;
    let heads = node.received_heads.lock().unwrap().len();
    let request = mcp.call_request(7, "hold", json!({ "label": "late" }));
    call.send_chunked_head(&request).await;
    while node.received_heads.lock().unwrap().len() == heads {
        yield_now().await;
    }
    call
}

/// Sends the body of the call started by `send_head`.
async fn send_body(call: &mut Connection, mcp: &Mcp) {
    let message = mcp.call_message(7, "hold", json!({ "label": "late" }));
    call.chunk(message.to_string().as_bytes()).await;
    call.end_chunks().await;
}

/// Stops the heartbeat, and waits until the lease has expired and the others have noticed.
async fn stall(node: &Node) {
    node.cluster.stop_heartbeat();
    pass(LEASE_TTL + HEARTBEAT_INTERVAL).await;
}

fn resume_heartbeat(node: &Node) -> JoinHandle<()> {
    spawn(node.routing().heartbeat.clone().run())
}

#[tokio::test]
async fn a_suspended_owner_starts_nothing_in_a_session_that_another_instance_owns() {
    let directory = directory();
    let PartitionedPair { a, b, is_connected } = PartitionedPair::start(&directory).await;
    let mcp = a.session().await;
    stall(&a).await;
    assert_eq!(echo(&b.client_of(&mcp), 1).await, 1);
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, Some(b.me));

    // A request that was waiting at the former owner is relayed to the new one.
    is_connected.store(true, Ordering::Relaxed);
    let call = mcp.call(2, "hold", json!({ "label": "late" }));
    let mut call = within("a call", call).await;
    assert_eq!(within("a response head", call.head()).await.status, 200);
    b.witness.started("late").await;
    assert_eq!(a.witness.starts("late"), 0);
    let heartbeat = resume_heartbeat(&a);
    pass(2 * HEARTBEAT_INTERVAL).await;
    assert!(!a.has(&mcp) && b.has(&mcp));
    b.witness.release("late");
    assert_eq!(call.answer().await.unwrap()["id"], 2);
    heartbeat.abort();
}

#[tokio::test]
async fn a_suspended_owner_keeps_sessions_that_no_other_instance_has_claimed() {
    let directory = directory();
    let PartitionedPair { a, b: _b, .. } = PartitionedPair::start(&directory).await;
    let mcp = a.session().await;
    let mut call = a.start_call(&mcp, 1, "kept").await;
    stall(&a).await;
    let heartbeat = resume_heartbeat(&a);
    run_other_tasks().await;
    assert_eq!(echo(&mcp, 2).await, 2);
    a.witness.release("kept");
    assert_eq!(call.answer().await.unwrap()["id"], 1);
    heartbeat.abort();
}

/// The owner renews its lease in time.
#[tokio::test]
async fn an_owner_that_was_suspended_for_less_than_its_lease_stays_the_owner() {
    let directory = directory();
    let PartitionedPair { a, b, is_connected } = PartitionedPair::start(&directory).await;
    is_connected.store(true, Ordering::Relaxed);
    let mcp = a.session().await;
    a.cluster.stop_heartbeat();
    pass(LEASE_TTL - SECOND / 2).await;
    let heartbeat = resume_heartbeat(&a);
    run_other_tasks().await;
    assert!(a.routing().heartbeat.may_serve(mcp.session_id().unwrap()));
    assert_eq!(echo(&b.client_of(&mcp), 1).await, 1);
    heartbeat.abort();
}

/// The directory is down for longer than a lease lasts.
#[tokio::test]
async fn an_owner_without_a_directory_serves_its_sessions_unless_the_lease_is_required() {
    for requires_lease in [false, true] {
        let directory = directory();
        let options = Options {
            requires_lease,
            ..Options::default()
        };
        let setup = Setup {
            options,
            ..Setup::default()
        };
        let a = setup.start(&directory).await;
        a.until_settled().await;
        let mcp = a.session().await;
        let mut call = a.start_call(&mcp, 1, "begun").await;
        directory.set(Fault::Fails);
        pass(MIN_LEASE - HEARTBEAT_INTERVAL).await;
        assert_eq!(status(&mcp, 2).await, 200);
        pass(2 * HEARTBEAT_INTERVAL).await;
        let expected = if requires_lease { 503 } else { 200 };
        assert_eq!(status(&mcp, 3).await, expected);
        a.witness.release("begun");
        assert_eq!(call.answer().await.unwrap()["id"], 1);
        directory.set(Fault::None);
        pass(2 * HEARTBEAT_INTERVAL).await;
        assert_eq!(echo(&mcp, 4).await, 4);
    }
}

#[tokio::test]
async fn a_session_that_was_ended_while_its_owner_was_suspended_stays_ended() {
    let directory = directory();
    let PartitionedPair { a, b, .. } = PartitionedPair::start(&directory).await;
    let mcp = a.session().await;
    let _call = a.start_call(&mcp, 1, "ended").await;
    stall(&a).await;
    assert_eq!(b.client_of(&mcp).delete().await, 202);
    // The session stays open at the owner until the owner has written its sessions again.
    let mut late = mcp.call(4, "hold", json!({ "label": "late" })).await;
    assert_eq!(within("a response head", late.head()).await.status, 503);

    let heartbeat = resume_heartbeat(&a);
    pass(2 * HEARTBEAT_INTERVAL).await;
    assert!(a.witness.ended("ended").await.is_cancelled());
    assert_eq!(a.witness.starts("late"), 0);
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, None);
    assert_eq!(
        [status(&mcp, 2).await, status(&b.client_of(&mcp), 3).await],
        [404; 2]
    );
    heartbeat.abort();
}

/// The directory returns with data from before the other instance had the session.
#[tokio::test]
async fn a_session_that_was_ended_elsewhere_stays_ended_although_the_directory_lost_its_tombstone()
{
    let directory = directory();
    let PartitionedPair { a, b, .. } = PartitionedPair::start(&directory).await;
    let mcp = a.session().await;
    let older = directory.memory.take_snapshot();
    stall(&a).await;
    let at_b = b.client_of(&mcp);
    assert_eq!(echo(&at_b, 1).await, 1);
    assert_eq!(at_b.delete().await, 202);
    pass(HEARTBEAT_INTERVAL).await;
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, None);

    directory.memory.load_snapshot(&older);
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, Some(a.me));
    let mut late = mcp.call(2, "hold", json!({ "label": "late" })).await;
    let heartbeat = resume_heartbeat(&a);
    pass(2 * SETTLE_PERIOD).await;
    assert_eq!(late.head().await.status, 503);
    assert_eq!(a.witness.starts("late"), 0);
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, None);
    assert_eq!(status(&mcp, 3).await, 404);
    heartbeat.abort();
}

/// A call's head arrives before a stall, and its body after it.
#[tokio::test]
async fn a_call_whose_body_arrives_after_a_suspension_does_not_begin_before_its_owner_is_known() {
    let directory = directory();
    let PartitionedPair { a, b, .. } = PartitionedPair::start(&directory).await;
    let mcp = a.session().await;
    let mut call = send_head(&a, &mcp).await;
    stall(&a).await;
    assert_eq!(echo(&b.client_of(&mcp), 1).await, 1);

    send_body(&mut call, &mcp).await;
    pass(SECOND).await;
    let heartbeat = resume_heartbeat(&a);
    let head = within("a response head", call.head()).await;
    assert_eq!((head.status, a.witness.starts("late")), (503, 0));
    // The client counts as turned away.
    assert!(a.routing().turned_away.age(Instant::now()).is_some());
    heartbeat.abort();
}

/// A call's head arrives before a stall, and its body after it. After the stall, the directory is down.
#[tokio::test]
async fn a_call_whose_body_arrives_after_a_suspension_waits_for_a_directory_for_a_limited_time() {
    let directory = directory();
    let a = Node::start(&directory).await;
    a.until_settled().await;
    let mcp = a.session().await;
    let mut call = send_head(&a, &mcp).await;
    stall(&a).await;
    directory.set(Fault::Fails);
    let heartbeat = resume_heartbeat(&a);
    send_body(&mut call, &mcp).await;
    run_other_tasks().await;
    pass(10 * SECOND).await;
    let answer = within("an answer", call.answer()).await.unwrap();
    assert_eq!(
        (&answer["id"], &answer["error"]["code"]),
        (&json!(7), &json!(-32603))
    );
    assert_eq!(a.witness.starts("late"), 0);
    heartbeat.abort();
}

/// The directory has lost a later claim that the new instance never knew of.
#[tokio::test]
async fn a_new_instance_claims_nothing_because_of_the_reply_of_a_former_owner() {
    let (directory, [mut a, b], mcp) = Node::with_session().await;
    // While this call is running, the former owner does not exit.
    let other = a.session().await;
    let _keeps = a.start_call(&other, 1, "keeps").await;
    let older = directory.memory.take_snapshot();
    drop(a.public.take());
    let cluster = a.cluster.clone();
    let shutdown = spawn(async move { cluster.leave(300 * SECOND).await });
    let at_b = b.client_of(&mcp);
    assert_eq!(echo(&at_b, 2).await, 2);
    let mut living = b.start_call(&at_b, 3, "living").await;
    pass(10 * SECOND).await;

    directory.memory.load_snapshot(&older);
    let c = Node::start(&directory).await;
    while c.routing().heartbeat.consistent_since().is_none() {
        yield_now().await;
    }
    assert_eq!(status(&c.client_of(&mcp), 4).await, 503);
    pass(5 * SECOND).await;
    assert!(b.has(&mcp) && b.witness.is_running("living"));
    b.witness.release("living");
    assert_eq!(living.answer().await.unwrap()["id"], 3);
    shutdown.abort();
}

/// A flushed backend keeps its run, and an evicted record has no owner.
#[tokio::test]
async fn an_owner_that_was_cut_off_does_not_supersede_a_claim_that_was_lost() {
    for is_flushed in [true, false] {
        let (memory, [link_a, _link_b], [a, b]) = Node::two_on_links().await;
        let mcp = a.session().await;
        let at_b = b.client_of(&mcp);
        drop(a.public);
        link_a.set(Fault::Fails);
        a.peers.abort();
        pass(2 * LEASE_TTL).await;
        let _living = b.start_call(&at_b, 1, "living").await;
        if is_flushed {
            memory.flush();
        } else {
            memory.evict(hash(&mcp));
        }
        link_a.set(Fault::None);
        pass(75 * SECOND).await;
        assert!(b.witness.is_running("living"), "{is_flushed}");
        assert_eq!(owner_of(&memory, hash(&mcp)).await, Some(b.me));
    }
}

/// The owner in the snapshot has lost its lease. The instance that has claimed the session since then is not in the snapshot.
#[tokio::test]
async fn a_directory_with_older_data_does_not_end_sessions_of_a_running_owner() {
    let directory = directory();
    let PartitionedPair { a, b, .. } = PartitionedPair::start(&directory).await;
    let mcp = a.session().await;
    let older = directory.memory.take_snapshot();
    stall(&a).await;
    let at_b = b.client_of(&mcp);
    let mut call = b.start_call(&at_b, 1, "living").await;

    directory.memory.load_snapshot(&older);
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, Some(a.me));
    pass(2 * SETTLE_PERIOD).await;

    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, Some(b.me));
    assert_eq!(echo(&at_b, 2).await, 2);
    b.witness.release("living");
    assert_eq!(call.answer().await.unwrap()["id"], 1);
}

/// The directory returns empty and accepts no answers for longer than a lease lasts.
#[tokio::test]
async fn no_answer_that_is_still_to_be_written_again_is_reported_missing() {
    let (memory, [link_a, _link_b], [a, b]) = Node::two_on_links().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "ended").await;
    let _shutdown = a.routing().shutdown.begin();
    a.witness.release("ended");
    let at_b = b.client_of(&mcp);
    assert_eq!(echo(&at_b, 2).await, 2);

    link_a.set(Fault::FailsAt("keep_answer"));
    memory.restart();
    pass(LEASE_TTL + SETTLE_PERIOD).await;
    for _ in 0..3 {
        assert_eq!(at_b.resume(&last_event_id).await.head().await.status, 503);
        pass(HEARTBEAT_INTERVAL).await;
    }
    link_a.set(Fault::None);
    pass(2 * HEARTBEAT_INTERVAL).await;
    let answered = at_b.resume(&last_event_id).await.messages().await;
    assert!(answered[0]["result"].is_object(), "{answered:?}");
}

/// `tracing_subscriber::fmt` panics like this if its stderr is closed.
#[tokio::test]
async fn a_panicking_log_stops_neither_the_heartbeats_nor_the_closing_of_sessions() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let (lost, kept) = (a.session().await, a.session().await);
    // Makes `tracing` check on each thread whether a line is wanted.
    let _first = Warnings::watch();
    let panics = fmt::layer().with_writer(|| -> io::Stderr { panic!("on purpose") });
    let of_cluster = Targets::new().with_target("mcp_cancel_cluster", LevelFilter::INFO);
    let log = tracing_subscriber::registry().with(panics.with_filter(of_cluster));
    let _broken = tracing::subscriber::set_default(log);
    directory.set(Fault::Fails);
    pass(LEASE_TTL).await;
    directory.set(Fault::None);
    pass(2 * SETTLE_PERIOD).await;
    assert_eq!(echo(&kept, 1).await, 1);
    a.routing().sessions.relinquish_to_owner(hash(&lost), b.me);
    let closed = a
        .routing()
        .sessions
        .relinquished
        .wait_until_closed(hash(&lost));
    within("the session to close", closed).await;
    assert_eq!(
        within("a response head", a.initialize().await.head())
            .await
            .status,
        200
    );
}

#[tokio::test]
async fn a_session_is_reported_missing_only_when_every_instance_has_written_its_sessions() {
    let (memory, [link_a, _link_b], [a, b]) = Node::two_on_links().await;
    let mcp = a.session().await;
    link_a.set(Fault::FailsAt("register"));
    memory.restart();
    for _ in 0..30 {
        pass(SECOND).await;
        assert_eq!(status(&b.client_of(&mcp), 1).await, 503);
    }
    link_a.set(Fault::None);
    pass(2 * HEARTBEAT_INTERVAL).await;
    assert_eq!(echo(&b.client_of(&mcp), 2).await, 2);
    assert_eq!(status(&b.client("unknown"), 3).await, 404);
}
