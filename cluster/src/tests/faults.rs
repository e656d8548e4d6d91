//! What becomes of sessions and calls when an instance stands still, or the directory comes back empty or with older data.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde_json::json;
use test_support::{Connection, Mcp, within};
use tokio::{spawn, task::JoinHandle};

use super::{
    node::{Node, Setup, hash, pass},
    steps::{all_else, directory, echo, status},
};
use crate::{
    directory::{
        LEASE, MemoryDirectory,
        contract::owner_of,
        faulty::{Fault, Faulty},
    },
    filter::PeersFilter,
    heart::{BEAT, SETTLED},
};

const SECOND: Duration = Duration::from_secs(1);

/// An instance, and one that reaches no other, nor is reached, until that is said.
struct Island {
    a: Node,
    b: Node,
    is_reached: Arc<AtomicBool>,
}

impl Island {
    async fn start(directory: &Faulty) -> Self {
        let a = Node::start(directory).await;
        let is_reached = Arc::<AtomicBool>::default();
        let reached = is_reached.clone();
        let island = Setup {
            filter: PeersFilter::new(move |_| reached.load(Ordering::Relaxed)),
            ..Setup::default()
        };
        let b = island.start(directory).await;
        a.settles().await;
        b.settles().await;
        pass(BEAT).await;
        Self { a, b, is_reached }
    }
}

/// A call of this session, which is in flight when this returns.
async fn held(node: &Node, mcp: &Mcp, id: u32, label: &str) -> Connection {
    let mut call = mcp.call(id, "hold", json!({ "label": label })).await;
    call.head().await;
    node.witness.started(label).await;
    call
}

/// Its heart stands still until its lease is over, and with it what others see of the instance.
async fn stands_still(node: &Node) {
    node.cluster.stop_heart();
    pass(LEASE + BEAT).await;
}

fn goes_on(node: &Node) -> JoinHandle<()> {
    spawn(node.routing().heart.clone().run())
}

#[tokio::test]
async fn an_owner_that_stood_still_begins_nothing_of_a_session_that_another_instance_has() {
    let directory = directory();
    let Island { a, b, is_reached } = Island::start(&directory).await;
    let mcp = a.session().await;
    stands_still(&a).await;
    assert_eq!(echo(&b.client_of(&mcp), 1).await, 1);
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, Some(b.me));

    // What waited at its door goes where the session is.
    is_reached.store(true, Ordering::Relaxed);
    let call = mcp.call(2, "hold", json!({ "label": "late" }));
    let mut call = within("a call", call).await;
    assert_eq!(within("a head", call.head()).await.status, 200);
    b.witness.started("late").await;
    assert_eq!(a.witness.starts("late"), 0);
    let heart = goes_on(&a);
    pass(2 * BEAT).await;
    assert!(!a.has(&mcp) && b.has(&mcp));
    b.witness.release("late");
    assert_eq!(call.answer().await.unwrap()["id"], 2);
    heart.abort();
}

#[tokio::test]
async fn an_owner_that_stood_still_keeps_what_no_other_instance_has_taken() {
    let directory = directory();
    let Island { a, b: _b, .. } = Island::start(&directory).await;
    let mcp = a.session().await;
    let mut call = held(&a, &mcp, 1, "kept").await;
    stands_still(&a).await;
    let heart = goes_on(&a);
    all_else().await;
    assert_eq!(echo(&mcp, 2).await, 2);
    a.witness.release("kept");
    assert_eq!(call.answer().await.unwrap()["id"], 1);
    heart.abort();
}

/// It is in time to renew its lease.
#[tokio::test]
async fn an_owner_that_stood_still_for_less_than_its_lease_goes_on() {
    let directory = directory();
    let Island { a, b, is_reached } = Island::start(&directory).await;
    is_reached.store(true, Ordering::Relaxed);
    let mcp = a.session().await;
    a.cluster.stop_heart();
    pass(LEASE - SECOND / 2).await;
    let heart = goes_on(&a);
    all_else().await;
    assert!(a.routing().heart.may_serve(mcp.session_id().unwrap()));
    assert_eq!(echo(&b.client_of(&mcp), 1).await, 1);
    heart.abort();
}

#[tokio::test]
async fn a_session_that_was_ended_while_its_owner_stood_still_stays_ended() {
    let directory = directory();
    let Island { a, b, .. } = Island::start(&directory).await;
    let mcp = a.session().await;
    let _call = held(&a, &mcp, 1, "ended").await;
    stands_still(&a).await;
    assert_eq!(b.client_of(&mcp).delete().await, 202);

    let heart = goes_on(&a);
    pass(2 * BEAT).await;
    assert!(a.witness.ended("ended").await.is_cancelled());
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, None);
    assert_eq!(
        [status(&mcp, 2).await, status(&b.client_of(&mcp), 3).await],
        [404; 2]
    );
    heart.abort();
}

/// What its client ended through another instance is open at the owner until it has written its sessions again.
#[tokio::test]
async fn a_call_that_waited_at_an_owner_that_stood_still_does_not_begin_in_a_session_that_was_ended()
 {
    let directory = directory();
    let Island { a, b, .. } = Island::start(&directory).await;
    let mcp = a.session().await;
    stands_still(&a).await;
    assert_eq!(b.client_of(&mcp).delete().await, 202);
    let mut late = mcp.call(1, "hold", json!({ "label": "late" })).await;
    assert_eq!(within("a head", late.head()).await.status, 503);

    let heart = goes_on(&a);
    pass(2 * BEAT).await;
    assert_eq!(status(&mcp, 2).await, 404);
    assert_eq!(a.witness.starts("late"), 0);
    heart.abort();
}

/// The owner in the snapshot is gone by now, and the one that claimed the session since then is not in it.
#[tokio::test]
async fn a_directory_with_older_data_ends_no_session_of_a_living_owner() {
    let directory = directory();
    let Island { a, b, .. } = Island::start(&directory).await;
    let mcp = a.session().await;
    let older = directory.memory.take_snapshot();
    stands_still(&a).await;
    let at_b = b.client_of(&mcp);
    let mut call = held(&b, &at_b, 1, "living").await;

    directory.memory.load_snapshot(&older);
    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, Some(a.me));
    pass(2 * SETTLED).await;

    assert_eq!(owner_of(&directory.memory, hash(&mcp)).await, Some(b.me));
    assert_eq!(echo(&at_b, 2).await, 2);
    b.witness.release("living");
    assert_eq!(call.answer().await.unwrap()["id"], 1);
}

#[tokio::test]
async fn what_is_unknown_is_denied_only_when_every_instance_has_written() {
    let memory = MemoryDirectory::default();
    let [of_a, of_b] = [(); 2].map(|()| Faulty::new(memory.clone()));
    let (a, b) = (Node::start(&of_a).await, Node::start(&of_b).await);
    a.settles().await;
    b.settles().await;
    let mcp = a.session().await;
    of_a.set(Fault::FailsAt("enter"));
    memory.restart();
    for _ in 0..30 {
        pass(SECOND).await;
        assert_eq!(status(&b.client_of(&mcp), 1).await, 503);
    }
    of_a.set(Fault::None);
    pass(2 * BEAT).await;
    assert_eq!(echo(&b.client_of(&mcp), 2).await, 2);
    assert_eq!(status(&b.client("unknown"), 3).await, 404);
}
