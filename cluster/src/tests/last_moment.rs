//! Clients that resume at the last moment of the grace period, and instances that exit after turning one away.

use std::{
    sync::{Arc, atomic::Ordering::SeqCst},
    time::Duration,
};

use test_support::within;
use tokio::net::TcpListener;

use super::{
    node::{GRACE, Node, Setup, hash, pass},
    steps::{MS, SECOND, SlowLink, phases},
};
use crate::{
    directory::{
        Directory as _, MemoryDirectory,
        faulty::{Fault, Faulty},
    },
    ids::{Owner, Ownership},
    membership::heartbeat::HEARTBEAT_INTERVAL,
    relay::filter::PeersFilter,
};

/// Starts an owner, and an instance with its own link to the directory.
///
/// That instance can reach the owner if `can_reach_owner`.
async fn start_pair(can_reach_owner: bool) -> (Faulty, [Node; 2]) {
    let memory = MemoryDirectory::default();
    let [link_a, link_b] = [(); 2].map(|()| Faulty::new(memory.clone()));
    let a = Setup::with_grace();
    let b = Setup {
        filter: PeersFilter::new(move |_| can_reach_owner),
        ..Setup::default()
    };
    let nodes = [a.start(&link_a).await, b.start(&link_b).await];
    for node in &nodes {
        node.until_settled().await;
    }
    (link_b, nodes)
}

/// Has B answer a client of A with 503 in the last 100 ms of its grace period. Returns after the grace period.
async fn turn_away_in_the_last_moment(a: &Node, b: &Node, phase: u32) {
    let mcp = a.session().await;
    pass(phase * 100 * MS).await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    pass(GRACE - 100 * MS).await;
    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    pass(600 * MS).await;
    assert_eq!(resumed.head().await.status, 503);
    pass(6 * SECOND).await;
}

/// Asserts that a call survives if its client gets 503 in the last 100 ms of the grace period.
///
/// This is tried at up to 20 phases between two heartbeats, with each `command` taking the directory `delay`.
async fn assert_turned_away_in_time(command: &'static str, delay: Duration) {
    for phase in phases() {
        let (link_b, [a, b]) = start_pair(false).await;
        link_b.set(Fault::SlowAt(command, delay));
        pass(5 * SECOND).await;
        turn_away_in_the_last_moment(&a, &b, phase).await;
        assert!(a.witness.is_running("a"), "phase {phase}");
    }
}

/// A heartbeat that arrives after the grace period may have been sent before it ended.
#[tokio::test]
async fn a_client_that_was_turned_away_during_a_heartbeat_keeps_its_call() {
    assert_turned_away_in_time("heartbeat", 400 * MS).await;
}

/// The instance's heartbeats arrive after its own timeout for them.
#[tokio::test]
async fn a_client_that_was_turned_away_by_an_instance_whose_heartbeats_arrive_late_keeps_its_call()
{
    for (late, phase) in [600, 1_000, 3_000]
        .into_iter()
        .flat_map(|late| phases().map(move |phase| (late, phase)))
    {
        let link = SlowLink(Arc::default(), late * MS);
        let link_a = Faulty::new(MemoryDirectory::default());
        let link_b = Faulty::new(link_a.memory.clone()).behind(link.clone());
        let (a, b) = (
            Setup::with_grace().start(&link_a).await,
            Node::start(&link_b).await,
        );
        a.until_settled().await;
        b.until_settled().await;
        link.0.store(true, SeqCst);
        pass(20 * SECOND).await;
        turn_away_in_the_last_moment(&a, &b, phase).await;
        let leases = link_a.memory.leases().await.unwrap();
        assert!(leases.get(b.me.incarnation).is_some());
        assert!(a.witness.is_running("a"), "{late} ms late, phase {phase}");
    }
}

#[tokio::test]
async fn a_client_that_resumed_in_time_and_was_looked_up_after_its_grace_keeps_its_call() {
    assert_turned_away_in_time("look_up", 450 * MS).await;
}

/// The connection to the owner is established, but carries no response.
#[tokio::test]
async fn a_client_that_resumed_in_time_and_waits_for_the_owner_keeps_its_call() {
    for phase in 0..40 {
        let (_, [a, b]) = start_pair(true).await;
        let mcp = a.session().await;
        pass(phase * 50 * MS).await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let owner = Owner {
            address: silent.local_addr().unwrap(),
            incarnation: a.me.incarnation,
        };
        let owners = &b.routing().owners;
        owners.insert(hash(&mcp), Ownership::begin(owner));
        pass(GRACE - 50 * MS).await;
        let _waiting = b.client_of(&mcp).resume(&last_event_id).await;
        let _relay = silent.accept().await.unwrap();
        pass(5 * SECOND).await;
        assert!(a.witness.is_running("a"), "phase {phase}");
    }
}

#[tokio::test]
async fn a_client_counts_as_turned_away_even_if_that_instance_has_ended() {
    for is_killed in [false, true] {
        let (_, [a, mut b]) = start_pair(false).await;
        let mcp = a.session().await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        pass(3 * SECOND).await;
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        assert_eq!(resumed.head().await.status, 503);
        if is_killed {
            // By now the next heartbeat has been sent.
            pass(HEARTBEAT_INTERVAL + SECOND / 2).await;
            b.kill().await;
        } else {
            within("the shutdown", b.cluster.leave(Duration::ZERO)).await;
        }
        pass(30 * SECOND).await;
        assert!(a.witness.is_running("a"), "{is_killed}");
        pass(30 * SECOND).await;
        assert!(a.witness.ended("a").await.is_cancelled(), "{is_killed}");
    }
}
