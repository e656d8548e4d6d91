//! Servers with one runtime per core.
//!
//! A session is served on one runtime, while its clients' connections can be on any.

use std::{
    sync::{Arc, mpsc},
    time::Duration,
};

use axum::Router;
use mcp_cancel_on_disconnect::{
    Calls, CancelOnDisconnectLayer, CancellableSessionManager, Grace, Outcome,
    observe::{CallSnapshot, CallState},
};
use rmcp::transport::streamable_http_server::{
    SessionManager as _,
    session::local::{LocalSessionManager, SessionConfig},
};
use tokio::runtime::{Builder, Runtime};

use crate::{
    setup::{Events, Server, arguments, paused_runtime},
    support::*,
};

const SOON: Duration = Duration::from_millis(300);

/// One server on two single-threaded runtimes.
struct Cores {
    /// The runtime that the layer uses first.
    first: Core,
    second: Core,
    calls: Calls,
    events: Events,
    witness: Witness,
}

struct Core {
    runtime: Runtime,
    served: Served,
}

/// Keeps a runtime's thread computing until this is dropped.
struct Computing(#[expect(dead_code, reason = "only exists to be dropped")] mpsc::Sender<()>);

macro_rules! for_servers {
    ($($test:ident,)+) => {
        mod wrapped {
            $(#[test] fn $test() { super::$test(super::Server::Wrapped); })+
        }
        mod layer_only {
            $(#[test] fn $test() { super::$test(super::Server::LayerOnly); })+
        }
    };
}

for_servers! {
    a_call_is_cancelled_at_a_disconnect_while_the_thread_of_the_first_runtime_computes,
    a_grace_ends_while_the_thread_of_the_first_runtime_computes,
    a_client_that_waits_on_a_runtime_that_computes_keeps_its_call,
    when_a_runtime_ends_another_one_sends_its_cancels,
}

fn a_call_is_cancelled_at_a_disconnect_while_the_thread_of_the_first_runtime_computes(
    server: Server,
) {
    assert_cancelled_while_the_first_runtime_computes(server, Grace::Immediate);
}

fn a_grace_ends_while_the_thread_of_the_first_runtime_computes(server: Server) {
    assert_cancelled_while_the_first_runtime_computes(server, Grace::After(SOON));
}

fn assert_cancelled_while_the_first_runtime_computes(server: Server, grace: Grace) {
    clients().block_on(async {
        let cores = Cores::of(server, grace).await;
        let mcp = Mcp::session(cores.second.addr(), PATH).await;
        let call = cores.start_call(&mcp, "a").await;
        let computing = cores.first.compute();

        call.fin();

        assert!(cores.witness.ended("a").await.is_cancelled());
        drop(computing);
        cores.end();
    });
}

/// The runtime only reads the resume once the grace period has expired.
fn a_client_that_waits_on_a_runtime_that_computes_keeps_its_call(server: Server) {
    clients().block_on(async {
        let cores = Cores::of(server, Grace::After(SOON)).await;
        let mcp = Mcp::session(cores.second.addr(), PATH).await;
        let through_first = elsewhere(&mcp, &cores.first);
        let call = cores.start_call(&through_first, "a").await;
        call.fin();
        cores.events.detached(&mcp, 1).await;
        let computing = cores.first.compute();
        let mut resumed = through_first.resume("0/0").await;

        within("the deadline to be postponed", cores.until_postponed()).await;
        drop(computing);

        assert_eq!(resumed.head().await.status, 200);
        cores.witness.release("a");
        assert!(resumed.answer().await.is_some());
        assert!(cores.witness.ended("a").await.is_completed());
        cores.end();
    });
}

fn when_a_runtime_ends_another_one_sends_its_cancels(server: Server) {
    clients().block_on(async {
        let cores = Cores::of(server, Grace::Immediate).await;
        // The session and its handler run on the second runtime.
        let mcp = Mcp::session(cores.second.addr(), PATH).await;
        let through_first = elsewhere(&mcp, &cores.first);
        let call = cores.start_call(&through_first, "a").await;

        cores.first.runtime.shutdown_background();

        assert!(cores.witness.ended("a").await.is_cancelled());
        drop(call);
        cores.second.runtime.shutdown_background();
    });
}

/// The client disconnects either along with its connection's runtime or before that.
#[test]
fn when_a_runtime_ends_another_one_reads_its_streams() {
    for leaves_before in [true, false] {
        clients().block_on(async {
            let cores = Cores::of(Server::Wrapped, Grace::Never).await;
            let mcp = Mcp::session(cores.second.addr(), PATH).await;
            let through_first = elsewhere(&mcp, &cores.first);
            let call = cores.start_call(&through_first, "a").await;
            if leaves_before {
                call.fin();
                cores.events.detached(&mcp, 1).await;
                cores.first.runtime.shutdown_background();
            } else {
                cores.first.runtime.shutdown_background();
                cores.events.detached(&mcp, 1).await;
                drop(call);
            }

            cores.witness.release("a");

            assert_eq!(cores.events.ended(&mcp, 1).await, Outcome::Completed);
            let mut resumed = mcp.resume("0/0").await;
            resumed.assert_done("a").await;
            cores.second.runtime.shutdown_background();
        });
    }
}

#[test]
fn an_idle_session_is_closed_though_its_runtime_is_no_longer_driven() {
    let manager = LocalSessionManager::default();
    let sessions = CancellableSessionManager::new(manager).idle_timeout(Duration::from_secs(300));
    let (first, second) = (paused_runtime(), paused_runtime());
    let (id, _transport) = first
        .block_on(sessions.create_session())
        .expect("a session");
    second.block_on(async {
        let (other, _transport) = sessions.create_session().await.expect("a session");
        let closed = async {
            while sessions.inner().sessions.read().await.contains_key(&id) {
                sessions.has_session(&other).await.expect("an answer");
                tokio::time::sleep(Duration::from_secs(1)).await;
            }
        };
        within("the session to be closed", closed).await;
        assert!(sessions.has_session(&other).await.expect("an answer"));
    });
    drop(first);
}

fn clients() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().build().expect("a runtime")
}

/// Returns the same client with its connections on another runtime.
fn elsewhere(mcp: &Mcp, core: &Core) -> Mcp {
    let session = mcp.session_id().expect("a session");
    Mcp::stateless(core.addr(), PATH).in_session(session)
}

// === impl Cores ===

impl Cores {
    async fn of(server: Server, grace: Grace) -> Self {
        let witness = Witness::new();
        let tools = Tools::new(&witness);
        let events = Events::default();
        let layer = CancelOnDisconnectLayer::new().grace(grace);
        let layer = layer.observe(events.observer());
        let calls = layer.calls();
        let mut config = SessionConfig::default();
        // A grace period is never shorter than the `retry` that the server sends.
        config.sse_retry = Some(SOON / 2);
        let router = match server {
            Server::Wrapped => {
                let sessions = CancellableSessionManager::local(config);
                router(tools.service(Mode::Session, Arc::new(sessions)))
            }
            _ => {
                let mut sessions = LocalSessionManager::default();
                sessions.session_config = config;
                router(tools.service(Mode::Session, Arc::new(sessions)))
            }
        };
        let router = router.layer(layer);
        let (first, second) = (Core::of(router.clone()), Core::of(router));
        // Makes the layer use the first runtime first. This session is not used again.
        let _session = Mcp::session(first.addr(), PATH).await;
        Self {
            first,
            second,
            calls,
            events,
            witness,
        }
    }

    /// Starts a call and reads its first event.
    async fn start_call(&self, mcp: &Mcp, label: &str) -> Connection {
        let mut call = mcp.call(1, "hold", arguments(label)).await;
        self.witness.started(label).await;
        call.head().await;
        call.event().await.expect("the priming event");
        call
    }

    /// Waits until the only call has more time left than its grace period.
    async fn until_postponed(&self) {
        let has_time = |call: &CallSnapshot| match call.state() {
            CallState::Detached { grace_left, .. } => grace_left.is_some_and(|left| left > SOON),
            _ => false,
        };
        while !self.calls.snapshot().iter().any(has_time) {
            tokio::task::yield_now().await;
        }
    }

    /// Shuts both runtimes down, because a runtime must not be dropped inside another.
    fn end(self) {
        self.first.runtime.shutdown_background();
        self.second.runtime.shutdown_background();
    }
}

// === impl Core ===

impl Core {
    fn of(router: Router) -> Self {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(1).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let (sender, served) = mpsc::channel();
        runtime.spawn(async move {
            sender
                .send(serve(router).await)
                .expect("the test is listening");
        });
        Self {
            runtime,
            served: served.recv().expect("the server has started"),
        }
    }

    fn addr(&self) -> std::net::SocketAddr {
        self.served.addr
    }

    /// Returns once the thread is doing nothing else.
    fn compute(&self) -> Computing {
        let (start, started) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        self.runtime.spawn(async move {
            start.send(()).expect("the test is listening");
            let (Ok(()) | Err(_)) = ended.recv();
        });
        started.recv().expect("the thread is computing");
        Computing(end)
    }
}
