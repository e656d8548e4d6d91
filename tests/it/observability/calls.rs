//! Calls that are observed and ended from outside, as an operator would.

use std::{convert::Infallible, time::Duration};

use axum::{
    Router,
    body::{Body, Bytes},
    routing::post,
};
use futures_util::stream;
use http::{Request, header::CONTENT_TYPE};
use tower::ServiceExt;

use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, Grace, Outcome, RequestId, observe::CallState,
};
use serde_json::{Value, json};

use crate::setup::{GRACE, Plan, Server, for_servers};

const REQUESTED: Outcome = Outcome::Cancelled(CancelReason::Requested);

for_servers!(all {
    a_snapshot_has_each_call_and_its_start,
    a_call_that_is_cancelled_on_request_sends_the_error_to_its_client,
    what_has_ended_cannot_be_cancelled,
} sessions {
    a_snapshot_has_the_time_since_the_disconnect,
    a_call_is_found_by_its_session_and_id,
    a_session_is_cancelled_as_a_whole_and_no_other,
    a_call_that_was_resumed_elsewhere_keeps_running,
    an_id_that_was_never_issued_has_no_effect,
});

async fn a_snapshot_has_each_call_and_its_start(server: Server) {
    let timeout = Duration::from_secs(60);
    let plan = Plan::of(server).layer(|layer| layer.call_timeout(timeout));
    let (clock, setup, mcp) = plan.stopped().await;
    let _first = setup.start_call(&mcp, 1, "hold", "first").await;
    setup.events.started(&mcp, 1).await;
    clock.advance(Duration::from_secs(5)).await;
    let _second = setup.start_call(&mcp, "two", "stubborn", "second").await;
    setup.events.started(&mcp, "two").await;

    let snapshot = setup.calls.snapshot();

    let seen: Vec<_> = snapshot
        .iter()
        .map(|call| {
            let info = call.info();
            assert_eq!(info.method(), "tools/call");
            assert_eq!(info.session(), mcp.session_id());
            assert_eq!(info.protocol_version(), Some(mcp.revision()));
            assert_eq!(call.state(), CallState::Attached);
            let left = call.time_left().expect("a limit");
            assert!(
                (timeout - Duration::from_millis(100)..=timeout).contains(&(left + call.age()))
            );
            (
                info.request_id().clone(),
                info.tool().unwrap().to_owned(),
                call.age().as_secs(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            (RequestId::Number(1), "hold".to_owned(), 5),
            (RequestId::String("two".into()), "stubborn".to_owned(), 0),
        ]
    );
    assert_eq!(setup.calls.detached(), 0);
}

async fn a_call_that_is_cancelled_on_request_sends_the_error_to_its_client(server: Server) {
    let (setup, mcp) = Plan::of(server).grace(Grace::Never).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    let mut other = setup.start_call(&mcp, 2, "hold", "b").await;
    setup.events.started(&mcp, 1).await;
    setup.events.started(&mcp, 2).await;

    let id = setup.calls.snapshot()[0].info().id();
    assert!(setup.calls.cancel(id, CancelReason::Requested));

    assert_eq!(call.messages().await, [cancelled(json!(1))]);
    assert!(!setup.witness.ended("a").await.is_completed());
    assert_eq!(setup.tokens.of("a").reason(), Some(CancelReason::Requested));
    assert_eq!(setup.events.ended(&mcp, 1).await, REQUESTED);
    setup.assert_completes("b", &mut other).await;
}

async fn what_has_ended_cannot_be_cancelled(server: Server) {
    let (setup, mcp) = server.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    let id = setup.calls.snapshot()[0].info().id();
    setup.assert_completes("a", &mut call).await;
    setup.events.ended(&mcp, 1).await;

    assert!(!setup.calls.cancel(id, CancelReason::Requested));
    assert!(!setup.tokens.of("a").is_cancelled());
}

async fn a_snapshot_has_the_time_since_the_disconnect(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.fin();
    setup.events.detached(&mcp, 1).await;
    clock.advance(GRACE / 2).await;

    let snapshot = setup.calls.snapshot();

    let CallState::Detached {
        since, grace_left, ..
    } = snapshot[0].state()
    else {
        panic!("its client has disconnected: {snapshot:?}");
    };
    assert_eq!(since.as_secs(), GRACE.as_secs() / 2);
    assert!(grace_left.is_some_and(|left| left <= GRACE / 2));
    assert_eq!(setup.calls.detached(), 1);
}

async fn a_call_is_found_by_its_session_and_id(server: Server) {
    let setup = server.start().await;
    let (mcp, other_client) = (setup.mcp().await, setup.mcp().await);
    let _call = setup.start_call(&mcp, 1, "hold", "a").await;
    let _other = setup.start_call(&other_client, 1, "hold", "b").await;
    setup.events.started(&mcp, 1).await;
    setup.events.started(&other_client, 1).await;
    let (session, id) = (mcp.session_id().unwrap(), RequestId::Number(1));

    let found = setup
        .calls
        .find(session, &id)
        .expect("the call is in flight");

    assert!(setup.calls.cancel(found, CancelReason::Requested));
    assert_eq!(setup.events.ended(&mcp, 1).await, REQUESTED);
    assert!(setup.witness.is_running("b"));
    assert_eq!(setup.calls.find(session, &id), None);
    assert_eq!(
        setup.calls.find(session, &RequestId::String("1".into())),
        None
    );
    assert_eq!(setup.calls.find("another", &id), None);
}

async fn a_session_is_cancelled_as_a_whole_and_no_other(server: Server) {
    let setup = server.start().await;
    let (mcp, other_client) = (setup.mcp().await, setup.mcp().await);
    let _first = setup.start_call(&mcp, 1, "hold", "a").await;
    let _second = setup.start_call(&mcp, 2, "hold", "b").await;
    let mut other = setup.start_call(&other_client, 1, "hold", "c").await;
    setup.events.started(&mcp, 1).await;
    setup.events.started(&mcp, 2).await;

    let session = mcp.session_id().unwrap();
    let reason = CancelReason::Requested;
    assert_eq!(setup.calls.cancel_session(session, reason), 2);

    assert_eq!(setup.events.ended(&mcp, 1).await, REQUESTED);
    assert_eq!(setup.events.ended(&mcp, 2).await, REQUESTED);
    assert_eq!(setup.calls.cancel_session(session, reason), 0);
    setup.assert_completes("c", &mut other).await;
}

async fn a_call_that_was_resumed_elsewhere_keeps_running(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let primed = setup.cut(&mcp, 1, "a").await;

    let session = mcp.session_id().unwrap();
    assert!(setup.calls.resumed_elsewhere(session, &primed));
    clock.advance(2 * GRACE).await;

    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
}

async fn an_id_that_was_never_issued_has_no_effect(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let primed = setup.cut(&mcp, 1, "a").await;

    assert!(
        !setup
            .calls
            .resumed_elsewhere(mcp.session_id().unwrap(), "0/99")
    );
    assert!(!setup.calls.resumed_elsewhere("another", &primed));
    clock.advance(2 * GRACE).await;

    assert!(setup.witness.ended("a").await.is_cancelled());
}

fn cancelled(id: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "error": { "code": -32800, "message": "Request cancelled: requested by the server" } })
}

/// As with `find`, the session id alone is ambiguous in this case.
#[tokio::test]
async fn the_calls_of_two_servers_that_issued_one_session_id_are_not_cancelled_together() {
    let silent = async |body: Bytes| {
        assert!(!body.is_empty());
        let events = stream::pending::<Result<Bytes, Infallible>>();
        let head = [(CONTENT_TYPE, "text/event-stream")];
        (head, Body::from_stream(events))
    };
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    let calls = layer.calls();
    let app = Router::new()
        .route("/a", post(silent))
        .route("/b", post(silent))
        .layer(layer);
    let call = |path: &str| {
        let message =
            json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": { "name": "t" } });
        let request = Request::post(path)
            .header(CONTENT_TYPE, "application/json")
            .header("mcp-session-id", "s");
        let request = request.body(Body::from(message.to_string())).unwrap();
        app.clone().oneshot(request)
    };
    let (_a, b) = (call("/a").await.unwrap(), call("/b").await.unwrap());
    assert_eq!(calls.in_session("s"), 2);

    assert_eq!(calls.cancel_session("s", CancelReason::Requested), 0);

    assert_eq!(calls.in_session("s"), 2);
    drop(b);
    assert_eq!(calls.in_session("s"), 1);
    assert_eq!(calls.cancel_session("s", CancelReason::Requested), 1);
}
