//! Calls that end neither with their answer nor with a disconnect.
//!
//! Instead, the client cancels them, closes their session, or sends them again.

use std::{future::pending, time::Duration};

use axum::{
    Router,
    body::{Body, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::Response,
};
use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome, Policy};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CustomRequest, CustomResult,
        GetPromptRequestParams, GetPromptResponse, ListToolsResult, PaginatedRequestParams,
        ReadResourceRequestParams, ReadResourceResponse,
    },
    service::RequestContext,
    transport::streamable_http_server::session::SessionManager,
};
use serde_json::json;
use tokio::time::Instant;

use crate::{
    setup::{
        EventKind, GRACE, Plan, SavedSessions, Server, Sessions, Setup, StoppedClock, TICK,
        arguments, for_servers,
    },
    support::*,
};

/// How long rmcp lets handlers keep running after a DELETE.
const DRAIN: Duration = Duration::from_secs(5);

const CLOSED: Outcome = Outcome::Cancelled(CancelReason::SessionClosed);
const SUPERSEDED: Outcome = Outcome::Cancelled(CancelReason::Superseded);

/// A server that never answers a call.
#[derive(Clone)]
struct Silent;

impl ServerHandler for Silent {
    async fn call_tool(
        &self,
        _request: CallToolRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        pending().await
    }

    async fn read_resource(
        &self,
        _request: ReadResourceRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<ReadResourceResponse, ErrorData> {
        pending().await
    }

    async fn get_prompt(
        &self,
        _request: GetPromptRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<GetPromptResponse, ErrorData> {
        pending().await
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        pending().await
    }

    async fn on_custom_request(
        &self,
        _request: CustomRequest,
        _context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        pending().await
    }
}

for_servers!(sessions {
    the_clients_own_cancel_ends_an_attached_call,
    the_clients_own_cancel_ends_a_detached_call,
    a_cancel_of_a_completed_call_changes_nothing,
    an_answer_that_coincides_with_the_clients_cancel_ends_the_call_once,
    a_delete_ends_all_calls_of_its_session_and_no_other,
    a_delete_that_is_refused_ends_nothing,
});

async fn the_clients_own_cancel_ends_an_attached_call(server: Server) {
    let (setup, mcp) = Plan::with_grace(server).client().await;
    let _call = setup.start_call(&mcp, 1, "hold", "a").await;

    assert_eq!(mcp.cancel(1).await, 202);

    assert_client_cancelled(&setup, &mcp).await;
    let expected = [
        EventKind::Started,
        EventKind::Ended(Outcome::ClientCancelled),
    ];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

async fn the_clients_own_cancel_ends_a_detached_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;

    assert_eq!(mcp.cancel(1).await, 202);

    assert_client_cancelled(&setup, &mcp).await;
    clock.advance(GRACE * 2).await;
    setup.assert_usable(&mcp).await;
    let expected = [
        EventKind::Started,
        EventKind::Detached(Some(GRACE)),
        EventKind::Ended(Outcome::ClientCancelled),
    ];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

async fn a_cancel_of_a_completed_call_changes_nothing(server: Server) {
    let (setup, mcp) = Plan::with_grace(server).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.assert_completes("a", &mut call).await;
    setup.exchanges.over_for("a").await;

    assert_eq!(mcp.cancel(1).await, 202);

    setup.assert_usable(&mcp).await;
    assert!(!setup.tokens.of("a").is_cancelled());
    let expected = [EventKind::Started, EventKind::Ended(Outcome::Completed)];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

async fn an_answer_that_coincides_with_the_clients_cancel_ends_the_call_once(server: Server) {
    for _ in 0..20 {
        let (setup, mcp) = Plan::with_grace(server).client().await;
        let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
        call.head().await;

        let (status, answer) = tokio::join!(mcp.cancel(1), async {
            setup.witness.release("a");
            call.answer().await
        });

        assert_eq!(status, 202);
        let outcome = setup.events.ended(&mcp, 1).await;
        match answer {
            Some(_) => assert_eq!(outcome, Outcome::Completed),
            None => assert_eq!(outcome, Outcome::ClientCancelled),
        }
        let fired = setup.tokens.of("a").is_cancelled();
        assert_eq!(fired, outcome == Outcome::ClientCancelled);
        setup.assert_usable(&mcp).await;
        let expected = [EventKind::Started, EventKind::Ended(outcome)];
        assert_eq!(setup.events.of(&mcp, 1), expected);
        assert!(setup.calls.is_empty());
    }
}

async fn a_delete_ends_all_calls_of_its_session_and_no_other(server: Server) {
    let clock = StoppedClock::stop();
    let setup = Plan::with_grace(server).start().await;
    let (mcp, other) = (setup.mcp().await, setup.mcp().await);
    let _attached = setup.start_call(&mcp, 1, "hold", "attached").await;
    setup.cut(&mcp, 2, "detached").await;
    let mut unaffected = setup.start_call(&other, 1, "hold", "spared").await;
    let before = Instant::now();

    assert_eq!(mcp.delete().await, 202);

    for (id, label) in [(1, "attached"), (2, "detached")] {
        let (outcome, at) = setup.events.end(&mcp, id).await;
        assert_eq!(outcome, CLOSED);
        assert_eq!(at, before, "no time has passed");
        let token = setup.tokens.of(label);
        assert_eq!(token.reason(), Some(CancelReason::SessionClosed));
    }
    if server == Server::LayerOnly {
        // The layer's own token has fired, but rmcp's waits until the session has drained.
        clock.advance(DRAIN + TICK).await;
    }
    for label in ["attached", "detached"] {
        let end = setup.witness.ended(label).await;
        assert!(end.is_cancelled(), "{end:?}");
        let drained = match server {
            Server::Wrapped => Duration::ZERO,
            _ => DRAIN,
        };
        let waited = end.at() - before;
        assert!((drained..=drained + TICK).contains(&waited), "{waited:?}");
    }
    assert_eq!(setup.calls.len(), 1);
    setup.assert_completes("spared", &mut unaffected).await;
    let failed = |kind: &EventKind| matches!(kind, EventKind::CancelFailed(_));
    assert!(!setup.events.all().iter().any(failed));
}

async fn a_delete_that_is_refused_ends_nothing(server: Server) {
    let (setup, mcp) = Plan::with_grace(server).client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    // rmcp refuses an unknown version.
    let refused = mcp.clone().version("1999-01-01").delete().await;

    assert_eq!(refused, 400);

    setup.assert_usable(&mcp).await;
    assert_eq!(setup.events.of(&mcp, 1), [EventKind::Started]);
    setup.assert_completes("a", &mut call).await;
}

/// The session is restored under its old id, so its streams are numbered from 0 again.
#[tokio::test]
async fn no_retained_answer_reaches_a_restored_session() {
    let (setup, mcp) = Plan::with_grace(Server::Wrapped)
        .saving(SavedSessions::default())
        .client()
        .await;
    setup.cut(&mcp, 1, "old").await;
    setup.witness.release("old");
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    setup.cut(&mcp, 2, "lost").await;
    let Sessions::Wrapped(sessions) = &setup.sessions else {
        panic!("the server is wrapped");
    };
    // Bypasses the wrapper, as an idle timer in the inner manager or a crash would.
    let session = mcp.session_id().expect("a session").into();
    sessions
        .inner()
        .close_session(&session)
        .await
        .expect("closed");

    let mut call = setup.start_call(&mcp, 1, "hold", "new").await;

    assert_eq!(setup.events.ended(&mcp, 2).await, CLOSED);
    call.head().await;
    let first = call.event().await.expect("the priming event");
    assert_eq!(
        first.id.as_deref(),
        Some("0/0"),
        "the same id as the old call's event"
    );
    call.fin();
    let mut resumed = mcp.resume("0/0").await;
    resumed.head().await;
    setup.assert_completes("new", &mut resumed).await;
    // The next stream does not deliver the newer of the old calls either.
    let mut next = setup.start_call(&mcp, 2, "hold", "next").await;
    next.head().await;
    next.fin();
    let mut resumed = mcp.resume("0/1").await;
    setup.assert_completes("next", &mut resumed).await;
}

#[tokio::test]
async fn a_call_that_is_sent_again_supersedes_the_one_that_has_no_client() {
    let (setup, mcp) = superseding(Server::Wrapped).client().await;
    setup.cut(&mcp, 1, "same").await;

    let mut again = mcp.call(2, "hold", arguments("same")).await;

    assert_eq!(setup.events.ended(&mcp, 1).await, SUPERSEDED);
    again.head().await;
    setup.assert_usable(&mcp).await;
    assert_eq!(setup.calls.len(), 1);
    assert_eq!(setup.witness.starts("same"), 2);
    assert_eq!(setup.events.of(&mcp, 2), [EventKind::Started]);
    setup.witness.release("same");
    let answer = again.answer().await.expect("an answer");
    assert_eq!(answer["id"], 2);
}

#[tokio::test]
async fn the_token_of_a_superseded_call_has_the_reason() {
    let (setup, mcp) = superseding(Server::Wrapped).client().await;
    let mut first = mcp
        .call(1, "chatty", json!({ "label": "a", "events": 0 }))
        .await;
    setup.witness.started("a").await;
    let token = setup.tokens.of("a");
    first.head().await;
    first.fin();
    setup.events.detached(&mcp, 1).await;

    let _again = mcp
        .call(2, "chatty", json!({ "events": 0, "label": "a" }))
        .await;

    token.cancelled().await;
    assert_eq!(token.reason(), Some(CancelReason::Superseded));
    assert_eq!(setup.events.ended(&mcp, 1).await, SUPERSEDED);
}

#[tokio::test]
async fn a_call_of_another_method_supersedes_only_what_has_the_same_parameters() {
    let read = |uri: &str| json!({ "uri": uri, "_meta": { "progressToken": uri } });
    let prompt = |b: &str| json!({ "name": "p", "arguments": { "a": "1", "b": b } });
    let more = |key: &str, value: serde_json::Value| {
        let mut more = json!({ "name": "hold", "arguments": { "label": "same" } });
        more[key] = value;
        more
    };
    let state = |state: &str| more("requestState", json!(state));
    let input = |answer: &str| more("inputResponses", json!({ "who": { "action": answer } }));
    for (method, older, other) in [
        ("resources/read", read("file:///a"), read("file:///b")),
        ("prompts/get", prompt("1"), prompt("2")),
        ("tools/call", state("x"), state("y")),
        ("tools/call", input("accept"), input("decline")),
        (
            "tools/list",
            json!({ "cursor": "1" }),
            json!({ "cursor": "2" }),
        ),
        ("custom/method", json!({ "x": 1 }), json!({ "x": 2 })),
    ] {
        let setup = superseding(Server::Wrapped);
        let setup = setup.start_handler(Silent).await;
        let mcp = setup.mcp().await;
        let mut first = mcp.request(1, method, older.clone()).await;
        first.head().await;
        first.event().await.expect("the priming event");
        first.fin();
        setup.events.detached(&mcp, 1).await;

        let mut second = mcp.request(2, method, other).await;
        second.head().await;
        let so_far = [EventKind::Started, EventKind::Detached(Some(GRACE))];
        assert_eq!(setup.events.of(&mcp, 1), so_far, "{method}");

        let mut again = older;
        again["_meta"] = json!({ "progressToken": "another" });
        let mut third = mcp.request(3, method, again).await;
        third.head().await;
        assert_eq!(setup.events.ended(&mcp, 1).await, SUPERSEDED, "{method}");
    }
}

#[tokio::test]
async fn only_the_same_call_of_the_same_session_supersedes() {
    let setup = superseding(Server::Wrapped).start().await;
    let (mcp, other) = (setup.mcp().await, setup.mcp().await);
    setup.cut(&mcp, 1, "a").await;

    let mut others = vec![
        mcp.call(2, "hold", arguments("b")).await,
        mcp.call(3, "stubborn", arguments("a")).await,
        other.call(1, "hold", arguments("a")).await,
    ];

    for call in &mut others {
        call.head().await;
    }
    setup.assert_usable(&mcp).await;
    setup.assert_usable(&other).await;
    let expected = [EventKind::Started, EventKind::Detached(Some(GRACE))];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

#[tokio::test]
async fn an_attached_call_is_never_superseded() {
    let (setup, mcp) = superseding(Server::Wrapped).client().await;
    let mut first = setup.start_call(&mcp, 1, "hold", "same").await;
    let mut second = mcp.call(2, "hold", arguments("same")).await;
    second.head().await;
    setup.assert_usable(&mcp).await;
    assert_eq!(setup.events.of(&mcp, 1), [EventKind::Started]);

    setup.witness.release("same");

    assert!(first.answer().await.is_some());
    assert!(second.answer().await.is_some());
}

/// A call whose client has resumed is attached.
#[tokio::test]
async fn a_resumed_call_is_not_superseded() {
    let (setup, mcp) = superseding(Server::Wrapped).client().await;
    setup.cut(&mcp, 1, "same").await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;

    let _second = mcp.call(2, "hold", arguments("same")).await;

    setup.assert_usable(&mcp).await;
    setup.witness.release("same");
    assert!(resumed.answer().await.is_some());
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
}

/// Its client is reading the call on the other server.
#[tokio::test]
async fn a_call_that_was_resumed_elsewhere_is_not_superseded() {
    let (setup, mcp) = superseding(Server::Wrapped).stored().client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "same").await;
    call.head().await;
    let first = call.event().await.expect("the priming event");
    call.fin();
    setup.events.detached(&mcp, 1).await;
    let session = mcp.session_id().expect("a session");
    let event = first.id.expect("an id");
    assert!(setup.calls.resumed_elsewhere(session, &event));

    let mut again = mcp.call(2, "hold", arguments("same")).await;
    again.head().await;
    setup.assert_usable(&mcp).await;

    let expected = [EventKind::Started, EventKind::Detached(Some(GRACE))];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

/// The older call's handler answers with an error, under an id that both calls share.
#[tokio::test]
async fn a_call_that_is_sent_again_under_its_id_gets_its_own_answer() {
    let setup = superseding(Server::Wrapped).abort_after(Duration::ZERO);
    let (setup, mcp) = setup.client().await;
    setup.cut(&mcp, 1, "same").await;

    let mut again = mcp.call(1, "hold", arguments("same")).await;
    again.head().await;
    setup.assert_usable(&mcp).await;

    assert_eq!(setup.witness.starts("same"), 2);
    setup.witness.release("same");
    again.assert_done("same").await;
}

#[tokio::test]
async fn an_exempt_call_is_not_superseded() {
    let plan = superseding(Server::Wrapped);
    let plan = plan.layer(|layer| layer.exempt(|call| call.tool() == Some("hold")));
    let (setup, mcp) = plan.client().await;
    setup.cut(&mcp, 1, "same").await;

    let mut second = mcp.call(2, "hold", arguments("same")).await;

    second.head().await;
    setup.assert_usable(&mcp).await;
    assert!(!setup.tokens.of("same").is_cancelled());
    let runs_on = [EventKind::Started, EventKind::Detached(None)];
    assert_eq!(setup.events.of(&mcp, 1), runs_on);
    setup.witness.release("same");
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert!(second.answer().await.is_some());
}

#[tokio::test]
async fn without_the_option_nothing_is_superseded() {
    let clock = StoppedClock::stop();
    for plan in [
        Plan::with_grace(Server::Wrapped),
        superseding(Server::LayerOnly),
    ] {
        let (setup, mcp) = plan.client().await;
        setup.cut(&mcp, 1, "same").await;

        let mut second = mcp.call(2, "hold", arguments("same")).await;

        second.head().await;
        setup.assert_usable(&mcp).await;
        let expected = [EventKind::Started, EventKind::Detached(Some(GRACE))];
        assert_eq!(setup.events.of(&mcp, 1), expected);
        clock.advance(GRACE + TICK).await;
        let outcome = setup.events.ended(&mcp, 1).await;
        assert_eq!(outcome, Outcome::Cancelled(CancelReason::Orphaned));
    }
}

fn superseding(server: Server) -> Plan {
    Plan::of(server)
        .layer(|layer| layer.policy(|_| Policy::new().grace(Grace::After(GRACE)).supersede()))
}

async fn assert_client_cancelled(setup: &Setup, mcp: &Mcp) {
    let outcome = setup.events.ended(mcp, 1).await;
    assert_eq!(outcome, Outcome::ClientCancelled);
    assert!(setup.witness.ended("a").await.is_cancelled());
    let token = setup.tokens.of("a");
    assert_eq!(token.reason(), Some(CancelReason::ClientCancelled));
    setup.assert_usable(mcp).await;
    assert!(setup.calls.is_empty());
}

#[tokio::test]
async fn a_cancel_whose_delivery_panics_is_reported_as_failed() {
    async fn break_on_a_cancel(request: Request, next: Next) -> Response {
        let (head, body) = request.into_parts();
        let body = to_bytes(body, usize::MAX).await.expect("a whole body");
        let is_cancel = String::from_utf8_lossy(&body).contains("notifications/cancelled");
        assert!(!is_cancel, "a middleware panics on purpose");
        next.run(Request::from_parts(head, Body::from(body))).await
    }
    let fragile = |router: Router| router.layer(from_fn(break_on_a_cancel));
    let plan = Plan::of(Server::LayerOnly).grace(Grace::Immediate);
    let (setup, mcp) = plan.inside(fragile).client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;

    call.fin();

    let failed = |kind: EventKind| kind == EventKind::CancelFailed(None);
    setup.events.count(&mcp, 1, 1, failed).await;
    assert!(setup.tokens.of("a").is_cancelled());
    assert!(setup.witness.is_running("a"));
}
