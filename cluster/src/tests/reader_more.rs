//! What a reader found: failovers, starts, layers.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
};
use mcp_cancel_on_disconnect::Grace;
use tokio::time::{Instant, sleep};

use super::node::{Node, Setup, pass};
use crate::{
    directory::{
        MemoryDirectory,
        faulty::{Faulty, Gate, Work},
    },
    relay::filter::PeersFilter,
};

const GRACE: Duration = Duration::from_secs(6);
const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

#[derive(Debug, Clone)]
struct SlowLink(Arc<AtomicBool>, Duration);

impl Gate for SlowLink {
    fn pass(&self, _what: &'static str, work: Work) -> Work {
        if !self.0.load(SeqCst) {
            return work;
        }
        let time = self.1;
        let late = tokio::spawn(async move {
            sleep(time).await;
            work.await
        });
        Box::pin(async move { late.await.unwrap() })
    }
}

fn owner() -> Setup {
    Setup {
        grace: Grace::After(GRACE),
        ..Setup::default()
    }
}

fn without_a_route() -> Setup {
    Setup {
        filter: PeersFilter::new(|_| false),
        ..Setup::default()
    }
}

async fn until(begun: Instant, at: Duration) {
    while begun.elapsed() < at {
        pass(50 * MS).await;
    }
}

/// B starts 900 ms before the end of the grace, and turns the client away 400 ms later. It reports that at once. Then the primary fails, and
/// its replica lacks the writes of the last second. Before A's next heartbeat, the grace ends.
#[tokio::test]
async fn a_client_that_was_turned_away_by_a_new_instance_keeps_its_call_after_a_failover() {
    let mut cancelled = Vec::new();
    for (is_lost, phase) in [false, true].into_iter().flat_map(|it| (0..20).map(move |phase| (it, phase))) {
        let directory = Faulty::new(MemoryDirectory::default());
        let a = owner().start(&directory).await;
        a.until_settled().await;
        pass(10 * SECOND + phase * 100 * MS).await;
        let mcp = a.session().await;
        pass(SECOND).await;
        let named = a.detach(&mcp, 1, "a").await;
        let begun = Instant::now();
        until(begun, GRACE - 1_000 * MS).await;
        let replica = directory.memory.take_snapshot();
        until(begun, GRACE - 900 * MS).await;
        let b = without_a_route().start(&directory).await;
        until(begun, GRACE - 500 * MS).await;
        let mut resumed = b.client_of(&mcp).resume(&named).await;
        pass(100 * MS).await;
        assert_eq!(resumed.head().await.status, 503);
        until(begun, GRACE - 50 * MS).await;
        let leases = crate::directory::Directory::leases(&directory.memory).await.unwrap();
        assert!(leases.of(b.me.incarnation).is_some() && leases.turned_away.is_some(), "control");
        if is_lost {
            directory.memory.load_snapshot(&replica);
        }
        until(begun, GRACE + 5 * SECOND).await;
        if !a.witness.is_running("a") {
            cancelled.push((is_lost, phase));
        }
    }
    assert_eq!(cancelled, []);
}

/// B starts 500 ms before the end of the grace. Its requests to the directory take 450 ms. The client arrives 100 ms before the end of its
/// grace.
#[tokio::test]
async fn a_client_that_was_turned_away_by_an_instance_that_starts_keeps_its_call() {
    for is_new in [false, true] {
        let directory = Faulty::new(MemoryDirectory::default());
        let of_b = directory.behind(SlowLink(Arc::new(AtomicBool::new(true)), 450 * MS));
        let a = owner().start(&directory).await;
        a.until_settled().await;
        let mut b = None;
        if !is_new {
            b = Some(without_a_route().start(&of_b).await);
            pass(10 * SECOND).await;
        }
        let mcp = a.session().await;
        pass(SECOND).await;
        let named = a.detach(&mcp, 1, "a").await;
        let begun = Instant::now();
        until(begun, GRACE - 500 * MS).await;
        if is_new {
            b = Some(without_a_route().start(&of_b).await);
        }
        let b = b.unwrap();
        until(begun, GRACE - 100 * MS).await;
        let mut resumed = b.client_of(&mcp).resume(&named).await;
        pass(1_500 * MS).await;
        assert_eq!(resumed.head().await.status, 503);
        pass(6 * SECOND).await;
        assert!(a.witness.is_running("a"), "{is_new}");
    }
}

/// A layer between the cluster's and the library's takes 8 s for a resume, for example to ask who the client is.
fn slow(app: Router) -> Router {
    app.layer(from_fn(async |request: Request, next: Next| {
        if request.headers().contains_key("last-event-id") {
            sleep(8 * SECOND).await;
        }
        Ok::<_, Infallible>(next.run(request).await)
    }))
}

/// The client resumes 1 s before the end of its grace.
#[tokio::test]
async fn a_client_whose_resume_a_layer_delays_keeps_its_call() {
    let mut seen = Vec::new();
    for through_b in [true, false] {
        let directory = Faulty::new(MemoryDirectory::default());
        let setup = Setup {
            within: slow,
            ..owner()
        };
        let a = setup.start(&directory).await;
        let b = Node::start(&directory).await;
        a.until_settled().await;
        b.until_settled().await;
        let mcp = a.session().await;
        pass(SECOND).await;
        let named = a.detach(&mcp, 1, "a").await;
        pass(GRACE - SECOND).await;
        let client = if through_b { b.client_of(&mcp) } else { a.client_of(&mcp) };
        let mut resumed = client.resume(&named).await;
        pass(9 * SECOND).await;
        let status = resumed.head().await.status;
        seen.push((through_b, status, a.witness.is_running("a")));
    }
    assert_eq!(seen, [(true, 200, true), (false, 200, true)]);
}
