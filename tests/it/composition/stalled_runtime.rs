//! A server whose threads were all busy when its calls' deadlines passed.
//!
//! In the meantime, its clients' resumes have been waiting in its accept queue.
//!
//! These tests run in real time, because they are about the order in which a runtime works off its backlog. The clients
//! have a runtime of their own.

use std::{
    sync::{Arc, Barrier, mpsc},
    thread,
    time::Duration,
};

use mcp_cancel_on_disconnect::{Grace, Outcome};
use tokio::runtime::{Builder, Runtime};

use crate::setup::{EventKind, Plan, Server};

const GRACE: Duration = Duration::from_secs(2);

/// Deadlines are processed 2 s late. A runtime counts as stalled from 1 s.
const LONG: Duration = Duration::from_secs(4);

/// Deadlines are processed 0.4 s late.
const SHORT: Duration = Duration::from_millis(2_400);

const WORKERS: usize = 2;

const CALLS: u64 = 8;

#[test]
fn resumes_that_queue_while_all_threads_are_busy_keep_their_calls_with_the_wrapper() {
    resumes_that_queue_keep_their_calls(Server::Wrapped, LONG);
}

#[test]
fn resumes_that_queue_while_all_threads_are_busy_keep_their_calls_with_the_layer_alone() {
    resumes_that_queue_keep_their_calls(Server::LayerOnly, LONG);
}

#[test]
fn resumes_that_queue_while_all_threads_are_busy_for_a_moment_keep_their_calls_with_the_wrapper() {
    resumes_that_queue_keep_their_calls(Server::Wrapped, SHORT);
}

#[test]
fn resumes_that_queue_while_all_threads_are_busy_for_a_moment_keep_their_calls_with_the_layer_alone()
 {
    resumes_that_queue_keep_their_calls(Server::LayerOnly, SHORT);
}

fn resumes_that_queue_keep_their_calls(server: Server, busy: Duration) {
    let serving = Builder::new_multi_thread()
        .worker_threads(WORKERS)
        .enable_all()
        .build()
        .expect("a runtime for the server");
    let clients = Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime for the clients");
    let plan = Plan::of(server).grace(Grace::After(GRACE));
    let plan = plan.sessions(|mut local| {
        // A grace period is never shorter than the `retry` that the server sends.
        local.session_config.sse_retry = Some(GRACE / 2);
        local
    });
    let setup = serving.block_on(plan.start());
    let mcp = clients.block_on(async {
        let mcp = setup.mcp().await;
        let mut calls = Vec::new();
        for id in 0..CALLS {
            let call = setup
                .start_primed(&mcp, id, "hold", &format!("a{id}"))
                .await;
            calls.push(call);
        }
        for call in calls {
            call.fin();
        }
        for id in 0..CALLS {
            setup.events.detached(&mcp, id).await;
        }
        mcp
    });

    let busy = Busy::keep(&serving, busy);

    clients.block_on(async {
        let mut resumed = Vec::new();
        for id in 0..CALLS {
            resumed.push(mcp.resume(&format!("0/{id}")).await);
        }
        busy.clients_have_sent();
        for (id, mut connection) in (0..CALLS).zip(resumed) {
            assert_eq!(connection.head().await.status, 200);
            setup
                .assert_completes(&format!("a{id}"), &mut connection)
                .await;
            let expected = [
                EventKind::Started,
                EventKind::Detached(Some(GRACE)),
                EventKind::Resumed,
                EventKind::Ended(Outcome::Completed),
            ];
            assert_eq!(setup.events.of(&mcp, id), expected);
        }
    });
    assert!(setup.calls.is_empty());
}

/// Keeps all of a runtime's threads busy until clients have sent their requests.
///
/// They are kept busy for a minimum time, too.
struct Busy(Vec<mpsc::Sender<()>>);

impl Busy {
    /// Returns once all threads are busy.
    #[allow(
        clippy::disallowed_methods,
        reason = "this is meant to block the runtime"
    )]
    fn keep(runtime: &Runtime, time: Duration) -> Self {
        let all = Arc::new(Barrier::new(WORKERS + 1));
        let each = |_| {
            let all = all.clone();
            let (sent, is_sent) = mpsc::channel();
            runtime.spawn(async move {
                all.wait();
                thread::sleep(time);
                // Continue even if the test has failed.
                let _ = is_sent.recv();
            });
            sent
        };
        let waiting = (0..WORKERS).map(each).collect();
        all.wait();
        Self(waiting)
    }

    /// Lets the threads continue. On a busy machine, sending can take longer than the minimum time.
    fn clients_have_sent(self) {
        drop(self.0);
    }
}
