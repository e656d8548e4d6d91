//! A client disconnects mid-call. The call is cancelled exactly once, and no other call is.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering},
};

use axum::{
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
};
use http::StatusCode;
use mcp_cancel_on_disconnect::{CallToken, CancelReason, Outcome};
use rmcp::model::NumberOrString;
use serde_json::json;
use tokio::sync::mpsc;

use crate::{
    setup::{DISCONNECTED, EXCHANGE, EventKind, Plan, Scripted, Server, Setup, for_servers},
    support::*,
};

/// How much of the response the client has received.
#[derive(Clone, Copy, Debug)]
enum When {
    /// The server is holding the head back.
    HeadHeld,
    /// The client has not read anything.
    NothingRead,
    /// The client has read an event.
    EventRead,
}

#[derive(Clone, Copy, Debug)]
enum How {
    Fin,
    Rst,
    HalfClose,
}

for_servers!(all {
    a_fin_before_the_head_is_produced_cancels_the_call,
    a_reset_before_the_head_is_produced_cancels_the_call,
    a_half_close_before_the_head_is_produced_cancels_the_call,
    a_fin_before_anything_is_read_cancels_the_call,
    a_reset_before_anything_is_read_cancels_the_call,
    a_fin_after_an_event_cancels_the_call,
    a_reset_after_an_event_cancels_the_call,
    a_half_close_after_an_event_cancels_the_call,
    a_disconnect_within_the_request_body_does_not_start_a_call,
    a_stream_reset_before_the_head_is_produced_cancels_its_call_and_no_other,
    a_stream_reset_before_anything_is_read_cancels_its_call_and_no_other,
    a_stream_reset_after_an_event_cancels_its_call_and_no_other,
    losing_an_h2_connection_cancels_all_its_calls,
    a_completed_call_ends_once_and_never_fires_its_token,
    a_handler_can_read_why_its_call_is_cancelled,
    the_id_of_a_cancelled_call_can_be_used_again,
} sessions {
    the_server_receives_one_cancel_with_the_id_and_the_reason,
    a_disconnect_from_the_standalone_stream_cancels_nothing,
});

async fn a_fin_before_the_head_is_produced_cancels_the_call(server: Server) {
    hang_up(server, When::HeadHeld, How::Fin).await;
}

async fn a_reset_before_the_head_is_produced_cancels_the_call(server: Server) {
    hang_up(server, When::HeadHeld, How::Rst).await;
}

async fn a_half_close_before_the_head_is_produced_cancels_the_call(server: Server) {
    hang_up(server, When::HeadHeld, How::HalfClose).await;
}

async fn a_fin_before_anything_is_read_cancels_the_call(server: Server) {
    hang_up(server, When::NothingRead, How::Fin).await;
}

async fn a_reset_before_anything_is_read_cancels_the_call(server: Server) {
    hang_up(server, When::NothingRead, How::Rst).await;
}

async fn a_fin_after_an_event_cancels_the_call(server: Server) {
    hang_up(server, When::EventRead, How::Fin).await;
}

async fn a_reset_after_an_event_cancels_the_call(server: Server) {
    hang_up(server, When::EventRead, How::Rst).await;
}

/// A half-close counts as a disconnect, since hyper treats it as one and drops the response.
async fn a_half_close_after_an_event_cancels_the_call(server: Server) {
    hang_up(server, When::EventRead, How::HalfClose).await;
}

async fn a_disconnect_within_the_request_body_does_not_start_a_call(server: Server) {
    let (setup, mcp) = server.client().await;
    let marked = mcp.clone().header(EXCHANGE, "cut");
    let whole = marked.call_request(1, "hold", json!({ "label": "cut" }));
    let length = whole.body.len();
    let half = whole.body.slice(..length / 2);
    let mut connection = Connection::open(setup.served.addr).await;
    connection.send_cut(&whole.body(half), length).await;
    setup.exchanges.started_for("cut").await;

    connection.fin();

    setup.exchanges.over_for("cut").await;
    assert_eq!(setup.events.of(&mcp, 1), []);
    assert!(setup.calls.is_empty());
    assert_eq!(setup.witness.starts("cut"), 0);
    setup.assert_usable(&mcp).await;
}

async fn a_stream_reset_before_the_head_is_produced_cancels_its_call_and_no_other(server: Server) {
    reset(server, When::HeadHeld).await;
}

async fn a_stream_reset_before_anything_is_read_cancels_its_call_and_no_other(server: Server) {
    reset(server, When::NothingRead).await;
}

async fn a_stream_reset_after_an_event_cancels_its_call_and_no_other(server: Server) {
    reset(server, When::EventRead).await;
}

async fn losing_an_h2_connection_cancels_all_its_calls(server: Server) {
    let (setup, mcp) = server.client().await;
    let mut connection = H2::open(setup.served.addr).await;
    let mut streams = Vec::new();
    for (id, label) in [(1, "a"), (2, "b"), (3, "c")] {
        let stream = setup.start_on_h2(&mut connection, &mcp, id, "hold", label);
        streams.push(stream.await);
    }
    assert_eq!(setup.calls.len(), 3);

    connection.hang_up();

    for (id, label) in [(1, "a"), (2, "b"), (3, "c")] {
        assert_cancelled(&setup, &mcp, id, label).await;
    }
    assert!(setup.calls.is_empty());
}

async fn a_completed_call_ends_once_and_never_fires_its_token(server: Server) {
    let (setup, mcp) = server.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.assert_completes("a", &mut call).await;
    setup.exchanges.over_for("a").await;

    call.fin();

    setup.assert_usable(&mcp).await;
    let token = setup.tokens.of("a");
    assert!(!token.is_cancelled());
    assert!(!token.child_token().is_cancelled());
    let expected = [EventKind::Started, EventKind::Ended(Outcome::Completed)];
    assert_eq!(setup.events.of(&mcp, 1), expected);
    assert!(setup.calls.is_empty());
}

async fn a_handler_can_read_why_its_call_is_cancelled(server: Server) {
    let (reasons, mut read) = mpsc::unbounded_channel();
    let handler = Scripted::new(move |context| {
        let reasons = reasons.clone();
        async move {
            let token = CallToken::of(&context).expect("the layer's token");
            let before = token.reason();
            token.cancelled().await;
            reasons
                .send((before, token.reason()))
                .expect("the test is waiting");
            Ok("unread".to_owned())
        }
    });
    let setup = Plan::of(server).start_scripted(handler).await;
    let mcp = setup.mcp().await;

    setup.start_call(&mcp, 1, "any", "a").await.fin();

    let reason = within("the handler's reason", read.recv()).await;
    let expected = (None, Some(CancelReason::ClientDisconnected));
    assert_eq!(reason, Some(expected));
}

async fn the_id_of_a_cancelled_call_can_be_used_again(server: Server) {
    let (setup, mcp) = server.client().await;
    setup.start_call(&mcp, 1, "hold", "first").await.fin();
    assert!(setup.witness.ended("first").await.is_cancelled());
    assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);

    let mut second = setup.start_call(&mcp, 1, "hold", "second").await;

    setup.assert_completes("second", &mut second).await;
}

async fn the_server_receives_one_cancel_with_the_id_and_the_reason(server: Server) {
    let (cancels, mut received) = mpsc::unbounded_channel();
    let handler = Scripted::new(|context| async move {
        if context.id.to_string() != "echo" {
            context.ct.cancelled().await;
        }
        Ok("answered".to_owned())
    });
    let plan = Plan::of(server);
    let setup = plan.start_scripted(handler.on_cancelled(cancels)).await;
    let mcp = setup.mcp().await;

    setup.start_call(&mcp, "x-7", "any", "a").await.fin();

    let cancelled = within("notifications/cancelled", received.recv()).await;
    let cancelled = cancelled.expect("the server is running");
    let request = NumberOrString::String("x-7".into());
    assert_eq!(cancelled.request_id, Some(request));
    assert_eq!(cancelled.reason.as_deref(), Some("client disconnected"));
    let mut echo = mcp.call("echo", "any", json!({ "label": "echo" })).await;
    assert!(echo.answer().await.is_some());
    assert!(received.try_recv().is_err(), "cancelled twice");
}

async fn a_disconnect_from_the_standalone_stream_cancels_nothing(server: Server) {
    let (setup, mcp) = server.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    let marked = mcp.clone().header(EXCHANGE, "standalone");
    let mut standalone = marked.listen().await;
    assert_eq!(standalone.head().await.status, 200);

    standalone.fin();

    setup.exchanges.over_for("standalone").await;
    setup.assert_usable(&mcp).await;
    assert_eq!(setup.events.of(&mcp, 1), [EventKind::Started]);
    setup.assert_completes("a", &mut call).await;
}

/// The control, which shows what the layer is for and that these tests can fail.
#[tokio::test]
async fn bare_rmcp_keeps_running_a_session_call_without_a_client() {
    let (setup, mcp) = Server::Bare.client().await;

    setup.start_call(&mcp, 1, "hold", "a").await.fin();

    setup.exchanges.over_for("a").await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
}

/// Makes a call, disconnects its client, and asserts everything that must be true afterwards.
async fn hang_up(server: Server, when: When, how: How) {
    let setup = when.start(server).await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, when.tool(), "a").await;
    if let When::EventRead = when {
        call.head().await;
        // Skip any priming event, and read the progress.
        while call.event().await.expect("an event").is_priming() {}
    }
    assert_eq!(setup.calls.len(), 1);
    assert!(!setup.tokens.of("a").is_cancelled());

    let half_closed = match how {
        How::Fin => {
            call.fin();
            None
        }
        How::Rst => {
            call.rst();
            None
        }
        How::HalfClose => {
            call.half_close().await;
            Some(call)
        }
    };

    assert_cancelled(&setup, &mcp, 1, "a").await;
    assert!(setup.calls.is_empty());
    drop(half_closed);
}

/// Opens three streams on one connection and resets the first.
async fn reset(server: Server, when: When) {
    let setup = when.start(server).await;
    let mcp = setup.mcp().await;
    let mut connection = H2::open(setup.served.addr).await;
    let mut streams = Vec::new();
    for (id, label) in [(1, "a"), (2, "b"), (3, "c")] {
        let stream = setup.start_on_h2(&mut connection, &mcp, id, when.tool(), label);
        streams.push(stream.await);
    }
    if let When::EventRead = when {
        for stream in &mut streams {
            assert!(stream.event().await.is_some());
        }
    }

    streams.remove(0).reset();

    assert_cancelled(&setup, &mcp, 1, "a").await;
    for (stream, (id, label)) in streams.iter_mut().zip([(2, "b"), (3, "c")]) {
        assert_eq!(setup.events.of(&mcp, id), [EventKind::Started]);
        setup.witness.release(label);
        let answer = stream.answer().await.expect("the sibling's answer");
        let text = &answer["result"]["content"][0]["text"];
        assert_eq!(*text, format!("done:{label}"));
        assert!(!setup.tokens.of(label).is_cancelled());
    }
}

/// A server that holds back the head of the first named exchange forever.
fn holding_the_head(server: Server) -> Plan {
    let held = std::sync::Arc::new(AtomicBool::new(false));
    Plan::of(server).inside(|router| {
        router.layer(from_fn(move |request: Request, next: Next| {
            // Hold only the call, not the cancellation that the layer replays with the same headers.
            let named = request.headers().contains_key(EXCHANGE);
            let hold = named && !held.swap(true, Ordering::Relaxed);
            async move {
                let response = next.run(request).await;
                if hold {
                    std::future::pending::<()>().await;
                }
                response
            }
        }))
    })
}

/// Asserts that the handler, its token, the reports and the session agree.
///
/// This call must have been cancelled, and only once.
async fn assert_cancelled(setup: &Setup, mcp: &Mcp, id: i32, label: &str) {
    assert!(setup.witness.ended(label).await.is_cancelled());
    assert_eq!(setup.events.ended(mcp, id).await, DISCONNECTED);
    let token = setup.tokens.of(label);
    assert_eq!(token.reason(), Some(CancelReason::ClientDisconnected));
    assert!(token.child_token().is_cancelled());
    setup.exchanges.over_for(label).await;
    setup.assert_usable(mcp).await;
    let expected = [EventKind::Started, EventKind::Ended(DISCONNECTED)];
    assert_eq!(setup.events.of(mcp, id), expected);
}

// === impl When ===

impl When {
    async fn start(self, server: Server) -> Setup {
        match self {
            Self::HeadHeld => holding_the_head(server).start().await,
            Self::NothingRead | Self::EventRead => server.start().await,
        }
    }

    /// The tool whose response gets that far.
    fn tool(self) -> &'static str {
        match self {
            Self::EventRead => "chatty",
            Self::HeadHeld | Self::NothingRead => "hold",
        }
    }
}

/// The server briefly sheds load, and a gateway cannot reach it.
#[tokio::test]
async fn a_replayed_cancel_that_is_refused_temporarily_is_sent_again() {
    static REFUSALS: [StatusCode; 2] = [StatusCode::SERVICE_UNAVAILABLE, StatusCode::BAD_GATEWAY];
    let refused = Arc::new(AtomicUsize::new(0));
    let count = refused.clone();
    let plan = Plan::of(Server::LayerOnly).inside(move |router| {
        router.layer(from_fn(move |request: Request, next: Next| {
            let token = request.extensions().get::<CallToken>();
            let is_replay = token.is_none_or(CallToken::is_replay);
            let attempt = is_replay.then(|| count.fetch_add(1, Ordering::Relaxed));
            async move {
                match attempt.and_then(|attempt| REFUSALS.get(attempt)) {
                    Some(status) => status.into_response(),
                    None => next.run(request).await,
                }
            }
        }))
    });
    let (setup, mcp) = plan.client().await;

    setup.start_call(&mcp, 1, "hold", "a").await.fin();

    assert!(setup.witness.ended("a").await.is_cancelled());
    assert_eq!(refused.load(Ordering::Relaxed), 3);
    let failed = |kind: EventKind| matches!(kind, EventKind::CancelFailed(_));
    assert!(!setup.events.of(&mcp, 1).into_iter().any(failed));
}
