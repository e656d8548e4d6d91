//! Sessions whose records differ from what their instance holds, and late writes.

use std::time::Duration;

use serde_json::json;
use test_support::within;
use tokio::{spawn, time::sleep};

use super::{
    node::{Node, Setup, hash, pass},
    steps::{SECOND, directory, echo, run_other_tasks, status},
};
use crate::{
    directory::{
        DirectoryError, LEASE_TTL, MemoryDirectory,
        contract::owner_of,
        faulty::{ErasedRequest, Fault, Faulty, Gate},
    },
    membership::heartbeat::HEARTBEAT_INTERVAL,
};

/// Delays every request by this long and makes deletions fail.
#[derive(Debug)]
struct NoDeletions(Duration);

impl Gate for NoDeletions {
    fn pass(&self, command: &'static str, request: ErasedRequest) -> ErasedRequest {
        let time = self.0;
        Box::pin(async move {
            sleep(time).await;
            if command == "delete" {
                return Err(DirectoryError::timed_out());
            }
            request.await
        })
    }
}

/// The first write of a restored session fails, and then the directory returns empty.
#[tokio::test]
async fn a_restored_session_that_is_not_written_is_not_reported_missing() {
    let memory = MemoryDirectory::default();
    let [link_a, link_b, link_c] = [(); 3].map(|()| Faulty::new(memory.clone()));
    let mut a = Node::start(&link_a).await;
    let (b, c) = (Node::start(&link_b).await, Node::start(&link_c).await);
    for node in [&a, &b, &c] {
        node.until_settled().await;
    }
    let mcp = a.session().await;
    a.kill_and_expire().await;
    let at_b = b.client_of(&mcp);
    link_b.set(Fault::FailsAt("register"));
    assert_eq!(echo(&at_b, 1).await, 1);
    assert_eq!(owner_of(&memory, hash(&mcp)).await, Some(b.me));
    pass(3 * SECOND).await;
    memory.restart();
    for second in 0..40 {
        pass(SECOND).await;
        let answered = status(&c.client_of(&mcp), 10 + second).await;
        assert_eq!(answered, 503, "{second} s later");
        assert!(b.has(&mcp));
    }
}

/// The first write of a restored session fails, and then the directory is unreachable for longer than the lease, so another instance claims
/// the session.
#[tokio::test]
async fn a_restored_session_is_written_before_it_serves_anything_new_after_a_lapse() {
    let memory = MemoryDirectory::default();
    let [link_a, link_b, link_c] = [(); 3].map(|()| Faulty::new(memory.clone()));
    let mut a = Node::start(&link_a).await;
    let b = Node::start(&link_b).await;
    let c = Setup::without_peers().start(&link_c).await;
    for node in [&a, &b, &c] {
        node.until_settled().await;
    }
    pass(HEARTBEAT_INTERVAL).await;
    let mcp = a.session().await;
    a.kill_and_expire().await;
    let at_b = b.client_of(&mcp);
    link_b.set(Fault::FailsAt("register"));
    assert_eq!(echo(&at_b, 1).await, 1);
    link_b.set(Fault::Fails);
    pass(2 * LEASE_TTL).await;
    assert_eq!(echo(&c.client_of(&mcp), 2).await, 2);
    assert_eq!(owner_of(&memory, hash(&mcp)).await, Some(c.me));
    // The directory answers again, taking 450 ms for each `register`.
    link_b.set(Fault::SlowAt("register", Duration::from_millis(450)));
    while b.routing().heartbeat.consistent_since().is_none() {
        sleep(Duration::from_millis(5)).await;
    }
    let mut call = at_b.call(3, "hold", json!({ "label": "late" })).await;
    let head = within("a response head", call.head()).await.status;
    run_other_tasks().await;
    assert_eq!(b.witness.starts("late"), 0, "{head}");
}

/// The directory returns empty, or has evicted a record, while the owner is shutting down.
#[tokio::test]
async fn a_session_that_is_transferred_while_the_directory_is_empty_is_not_lost() {
    let mut results = Vec::new();
    for is_evicted in [false, true] {
        let (directory, [a, b], mcp) = Node::with_session().await;
        let at_b = b.client_of(&mcp);
        assert_eq!(echo(&at_b, 1).await, 1);
        let cluster = a.cluster.clone();
        let shutdown = spawn(async move { cluster.leave(300 * SECOND).await });
        // A detached call keeps the instance from leaving at once.
        let other = a.session().await;
        a.detach(&other, 1, "keeps").await;
        if is_evicted {
            directory.memory.evict(hash(&mcp));
        } else {
            directory.memory.restart();
        }
        let first = status(&at_b, 2).await;
        let mut last_status = 0;
        for second in 0..30 {
            pass(SECOND).await;
            last_status = status(&at_b, 10 + second).await;
            if last_status != 503 {
                break;
            }
        }
        results.push((first, last_status));
        shutdown.abort();
    }
    assert_eq!(
        results
            .iter()
            .map(|(_, last_status)| *last_status)
            .collect::<Vec<_>>(),
        [200; 2],
        "{results:?}"
    );
}

#[tokio::test]
async fn new_sessions_begin_although_a_deletion_fails() {
    for time in [0, 5, 50, 200] {
        let directory = directory().behind(NoDeletions(Duration::from_millis(time)));
        let a = Node::start(&directory).await;
        a.until_settled().await;
        let mcp = a.session().await;
        mcp.delete().await;
        let mut statuses = Vec::new();
        for _ in 0..5 {
            let mut opened = a.initialize().await;
            statuses.push(within("a response head", opened.head()).await.status);
        }
        assert!(a.routing().heartbeat.consistent_since().is_some());
        assert_eq!(statuses, [200; 5], "{time} ms");
    }
}
