//! Thousands of calls whose clients disconnect within the same second and do not resume.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use futures_util::future::join_all;
use mcp_cancel_on_disconnect::Confirmation;
use tokio::{
    sync::Mutex,
    time::{Instant, pause, resume, sleep, timeout},
};

use super::{
    node::{Node, hash, pass},
    steps::{MS, SECOND, directory},
};
use crate::{
    directory::faulty::{ErasedRequest, Gate},
    ids::SessionHash,
    orphan_confirmation::{OrphanWait, confirm},
    routing::router::Router,
};

const CALLS: u32 = 20_000;

const GRACE: Duration = Duration::from_secs(20);

/// How long the library waits for a confirmation.
const CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);

/// How late a cancellation may be: the delay that the README promises, plus a second for the library's rechecks.
const MAX_DELAY: Duration = Duration::from_secs(6);

/// A directory that executes requests one at a time, 40 per millisecond, as Redis does.
#[derive(Debug, Clone, Default)]
struct Sequential(Arc<Mutex<u32>>);

impl Gate for Sequential {
    fn pass(&self, _command: &'static str, request: ErasedRequest) -> ErasedRequest {
        let executed = self.0.clone();
        Box::pin(async move {
            let mut executed = executed.lock().await;
            *executed += 1;
            if executed.is_multiple_of(40) {
                sleep(MS).await;
            }
            request.await
        })
    }
}

/// Requests confirmations for an orphan as the library does.
///
/// Returns how long after the end of its grace period the call is cancelled.
async fn delay_of_cancel(router: &Router, session: SessionHash) -> Duration {
    let disconnected = Instant::now();
    sleep(GRACE).await;
    loop {
        let wait = OrphanWait::new(GRACE, disconnected.elapsed(), router.turned_away.backoff);
        let confirmed = timeout(CONFIRM_TIMEOUT, confirm(router, session, wait)).await;
        match confirmed.unwrap_or(Confirmation::Postpone(GRACE)) {
            Confirmation::Postpone(time) => sleep(time.max(100 * MS)).await,
            _ => return disconnected.elapsed() - GRACE,
        }
    }
}

#[tokio::test]
async fn thousands_of_orphans_of_one_second_are_cancelled_in_time_without_delaying_heartbeats() {
    let directory = directory();
    let gate = Sequential::default();
    let (link_a, link_b) = (directory.behind(gate.clone()), directory.behind(gate));
    let nodes = [Node::start(&link_a).await, Node::start(&link_b).await];
    for node in &nodes {
        node.until_settled().await;
    }
    let sessions = [nodes[0].session().await, nodes[1].session().await];
    pass(SECOND).await;
    pause();

    let was_consistent = Arc::new(AtomicBool::new(true));
    let (observed, member) = (was_consistent.clone(), nodes[0].cluster.clone());
    let watcher = tokio::spawn(async move {
        while member.router().heartbeat.consistent_since().is_some() {
            sleep(10 * MS).await;
        }
        observed.store(false, SeqCst);
    });
    let calls = (0..CALLS).map(|index| {
        let node = index as usize % 2;
        let (cluster, session) = (nodes[node].cluster.clone(), hash(&sessions[node]));
        tokio::spawn(async move {
            sleep(SECOND * index / CALLS).await;
            delay_of_cancel(cluster.router(), session).await
        })
    });
    let delays = join_all(calls.collect::<Vec<_>>()).await.into_iter();
    let longest = delays.map(Result::unwrap).max().unwrap();
    watcher.abort();
    resume();

    assert!(longest <= MAX_DELAY, "{longest:?}");
    assert!(was_consistent.load(SeqCst));
}
