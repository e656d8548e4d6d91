//! The server shuts down. Calls get time to complete, and then everything ends.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    middleware::map_response,
    response::Response,
};
use futures_util::StreamExt as _;
use mcp_cancel_on_disconnect::{
    Calls, CancelOnDisconnectLayer, CancelReason, CancellableSessionManager, Grace, Outcome,
};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{Instant, timeout},
};

use crate::{
    setup::{Plan, Server, arguments, for_servers},
    support::*,
};

const LIMIT: Duration = Duration::from_secs(2);

/// How much a busy machine may add.
const MARGIN: Duration = Duration::from_secs(8);

const SHUT_DOWN: Outcome = Outcome::Cancelled(CancelReason::ShuttingDown);

/// An axum server that the test can shut down.
struct StoppableServer {
    addr: std::net::SocketAddr,
    end: oneshot::Sender<()>,
    served: JoinHandle<()>,
}

for_servers!(all {
    a_drain_waits_for_calls_and_cancels_the_rest,
    a_drain_without_calls_ends_at_once,
    a_call_that_arrives_after_the_drain_ends_at_once,
} sessions {
    a_drain_ends_standalone_streams_and_all_later_ones,
    a_drain_ends_the_streams_of_calls_that_ended_elsewhere,
    a_drain_waits_for_an_answer_that_an_inner_layer_buffers,
    a_drain_closes_a_stream_whose_answer_is_buffered_for_too_long,
});

async fn a_drain_waits_for_calls_and_cancels_the_rest(server: Server) {
    let (setup, mcp) = Plan::of(server).grace(Grace::Never).client().await;
    let mut ends = setup.start_call(&mcp, 1, "hold", "ends").await;
    let mut stays = setup.start_call(&mcp, 2, "hold", "stays").await;
    setup.events.started(&mcp, 1).await;
    setup.events.started(&mcp, 2).await;

    let (report, ()) = tokio::join!(setup.calls.drain(LIMIT), async {
        setup.assert_completes("ends", &mut ends).await;
    });

    assert_eq!((report.ended, report.cancelled), (1, 1));
    let error = json!({ "code": -32800, "message": "Request cancelled: server shutting down" });
    let message = json!({ "jsonrpc": "2.0", "id": 2, "error": error });
    assert_eq!(stays.messages().await, [message]);
    assert_eq!(setup.events.ended(&mcp, 2).await, SHUT_DOWN);
    assert!(!setup.witness.ended("stays").await.is_completed());
    assert!(setup.calls.is_empty());
}

async fn a_drain_without_calls_ends_at_once(server: Server) {
    let setup = server.start().await;
    let never = setup.calls.drain(Duration::MAX);
    let report = within("the drain to end", never).await;
    assert_eq!((report.ended, report.cancelled), (0, 0));
}

async fn a_call_that_arrives_after_the_drain_ends_at_once(server: Server) {
    let (setup, mcp) = server.client().await;
    setup.calls.drain(LIMIT).await;

    let mut late = mcp.call(1, "stubborn", arguments("late")).await;

    let expected = if server.has_sessions() {
        SHUT_DOWN
    } else {
        // The handler has never had its token.
        Outcome::Abandoned(CancelReason::ShuttingDown)
    };
    assert_eq!(setup.events.ended(&mcp, 1).await, expected);
    let messages = late.messages().await;
    assert_eq!(messages[0]["error"]["code"], -32800);
    assert!(setup.calls.is_empty());
    setup.witness.release("late");
}

async fn a_drain_ends_standalone_streams_and_all_later_ones(server: Server) {
    let (setup, mcp) = server.client().await;
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);

    setup.calls.drain(LIMIT).await;

    assert_eq!(standalone.messages().await, Vec::<serde_json::Value>::new());
    let mut late = mcp.listen().await;
    assert_eq!(late.messages().await, Vec::<serde_json::Value>::new());
}

/// Covers a call whose id has been used again, and a call that its client has cancelled.
async fn a_drain_ends_the_streams_of_calls_that_ended_elsewhere(server: Server) {
    let (setup, mcp) = Plan::of(server).grace(Grace::Never).client().await;
    let mut older = setup.start_call(&mcp, 1, "hold", "older").await;
    older.head().await;
    let mut newer = setup.start_call(&mcp, 1, "hold", "newer").await;
    newer.head().await;
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Unknown);
    let mut cancelled = setup.start_call(&mcp, 2, "stubborn", "cancelled").await;
    cancelled.head().await;
    assert_eq!(mcp.cancel(2).await, 202);
    assert_eq!(setup.events.ended(&mcp, 2).await, Outcome::ClientCancelled);

    let report = setup.calls.drain(LIMIT).await;

    assert_eq!(report.cancelled, 1);
    assert_eq!(older.messages().await, Vec::<serde_json::Value>::new());
    assert_eq!(newer.messages().await[0]["error"]["code"], -32800);
    assert_eq!(cancelled.messages().await, Vec::<serde_json::Value>::new());
    setup.witness.release("cancelled");
}

/// Returns a middleware that holds back calls' answers until the test lets them through.
fn holding_answers(release: watch::Receiver<bool>) -> impl FnOnce(Router) -> Router {
    move |router| {
        router.layer(map_response(move |response: Response| {
            let release = release.clone();
            async move {
                let (parts, body) = response.into_parts();
                let held = body.into_data_stream().then(move |frame| {
                    let mut release = release.clone();
                    async move {
                        let is_answer =
                            |frame: &Bytes| frame.windows(5).any(|text| text == b"done:");
                        if frame.as_ref().is_ok_and(is_answer) {
                            release
                                .wait_for(|on| *on)
                                .await
                                .expect("the test is still running");
                        }
                        frame
                    }
                });
                Response::from_parts(parts, Body::from_stream(held))
            }
        }))
    }
}

async fn a_drain_waits_for_an_answer_that_an_inner_layer_buffers(server: Server) {
    for is_resumed in [false, true] {
        let (release, held) = watch::channel(false);
        let plan = Plan::of(server).grace(Grace::Never);
        let (setup, mcp) = plan.inside(holding_answers(held)).client().await;
        let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
        if is_resumed {
            call.head().await;
            let id = call.event().await.expect("an event").id.expect("an id");
            call.fin();
            setup.events.detached(&mcp, 1).await;
            call = mcp.resume(&id).await;
            call.head().await;
            setup.events.resumed(&mcp, 1, 1).await;
        }
        let mut drain = Box::pin(setup.calls.drain(MARGIN));
        assert!(futures_util::poll!(&mut drain).is_pending());
        setup.witness.release("a");
        if server == Server::Wrapped {
            assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
        }

        let waits = timeout(Duration::from_millis(200), &mut drain).await;

        assert!(waits.is_err(), "the answer is still being sent: {waits:?}");
        release.send(true).expect("the answer is held back");
        let (answer, report) = tokio::join!(call.answer(), drain);
        assert_eq!(answer.expect("the answer")["id"], 1, "{is_resumed}");
        assert_eq!((report.ended, report.cancelled), (1, 0), "{is_resumed}");
    }
}

async fn a_drain_closes_a_stream_whose_answer_is_buffered_for_too_long(server: Server) {
    let (release, held) = watch::channel(false);
    let plan = Plan::of(server).grace(Grace::Never);
    let (setup, mcp) = plan.inside(holding_answers(held)).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.witness.release("a");

    setup.calls.drain(Duration::from_millis(200)).await;

    call.head().await;
    call.body_to_end().await;
    drop(release);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_graceful_shutdown_of_axum_ends_with_the_drain() {
    let witness = Witness::new();
    let tools = Tools::new(&witness);
    let layer = CancelOnDisconnectLayer::new();
    let sessions = Arc::new(CancellableSessionManager::local(SessionConfig::default()));
    let app = router(tools.service(Mode::Session, sessions)).layer(layer.clone());
    let server = StoppableServer::serve(app).await;
    let (open, calls) = start_five_hundred(&server, &witness).await;

    let started = Instant::now();
    let report = end(server, &witness, layer.calls()).await;

    assert!(started.elapsed() <= LIMIT + Duration::from_secs(1) + MARGIN);
    assert_eq!((report.ended, report.cancelled), (250, 250));
    witness.running_reaches(0).await;
    assert_eq!((witness.completed(), witness.cancelled()), (250, 250));
    drop((open, calls));
}

/// The control. Without the drain, the same server never ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_graceful_shutdown_of_axum_alone_waits_for_streams_without_a_limit() {
    let witness = Witness::new();
    let sessions = Arc::new(LocalSessionManager::default());
    let app = router(Tools::new(&witness).service(Mode::Session, sessions));
    let server = StoppableServer::serve(app).await;
    let mcp = Mcp::session(server.addr, PATH).await;
    let mut standalone = mcp.listen().await;
    standalone.head().await;
    server.end.send(()).expect("the server is running");
    let ended = timeout(Duration::from_secs(3), server.served).await;
    assert!(ended.is_err(), "the shutdown ended on its own");
}

/// Starts 500 calls in ten sessions, and a standalone stream in each session.
///
/// Tasks read all of the answers.
async fn start_five_hundred(
    server: &StoppableServer,
    witness: &Witness,
) -> (Vec<Connection>, Vec<JoinHandle<()>>) {
    let mut standalone = Vec::new();
    let mut calls = Vec::new();
    for session in 0..10 {
        let mcp = Mcp::session(server.addr, PATH).await;
        standalone.push(mcp.listen().await);
        for call in 0..50 {
            let label = format!("{session}-{call}");
            let mut call = mcp.call(call, "hold", arguments(&label)).await;
            witness.started(&label).await;
            calls.push(spawn(async move {
                call.answer().await.expect("an answer or an error");
            }));
        }
    }
    (standalone, calls)
}

/// Shuts the server down and lets half of the calls complete during the drain.
async fn end(
    server: StoppableServer,
    witness: &Witness,
    calls: Calls,
) -> mcp_cancel_on_disconnect::DrainReport {
    server.end.send(()).expect("the server is running");
    let (report, ()) = tokio::join!(calls.drain(LIMIT), async {
        for session in 0..10 {
            for call in (0..50).step_by(2) {
                witness.release(&format!("{session}-{call}"));
            }
        }
    });
    within("the server to end", server.served)
        .await
        .expect("the server ends without a panic");
    report
}

#[allow(clippy::disallowed_methods, reason = "the test needs its own tasks")]
fn spawn(task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
    tokio::spawn(task)
}

// === impl StoppableServer ===

impl StoppableServer {
    async fn serve(app: Router) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bind");
        let addr = listener.local_addr().expect("bound");
        let (end, ended) = oneshot::channel();
        let served = spawn(async move {
            let shutdown = async {
                // The server also shuts down if the sender is dropped.
                let _ended = ended.await;
            };
            let server = axum::serve(listener, app).with_graceful_shutdown(shutdown);
            server.await.expect("the server does not fail");
        });
        Self { addr, end, served }
    }
}
