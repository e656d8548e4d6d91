//! Isolation.
//!
//! No action by one client changes another's call, however similar the two are.

use std::{
    convert::Infallible,
    future::pending,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::{
    Router,
    body::{Body, Bytes, to_bytes},
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse,
    routing::post,
};
use futures_util::stream;
use http::{StatusCode, header::AUTHORIZATION};
use mcp_cancel_on_disconnect::{CancelReason, Outcome, observe::ParseFailure};
use serde_json::{Value, json};
use tokio::sync::Notify;
use tower_http::validate_request::ValidateRequestHeaderLayer;

use crate::{
    setup::{
        DISCONNECTED, EXCHANGE, EventKind, Gate, Held, Plan, Server, Setup, arguments, for_servers,
    },
    support::*,
};

/// How a call ends whose id has been used again.
const ENDED_UNKNOWN: EventKind = EventKind::Ended(Outcome::Unknown);

for_servers!(all {
    a_disconnect_does_not_affect_the_call_of_another_client_with_the_same_id,
    a_cancel_notification_of_another_client_changes_nothing,
} sessions {
    a_cancel_notification_from_another_session_changes_nothing,
    a_disconnect_from_a_number_does_not_affect_the_string_with_the_same_digits,
    a_disconnect_from_a_string_does_not_affect_the_number_with_the_same_digits,
    a_sessionless_request_with_a_session_header_is_not_a_call_of_the_session,
    a_disconnect_from_a_sessionless_request_does_not_affect_the_call_whose_session_it_names,
    a_request_with_two_session_headers_is_served_and_never_cancelled,
    a_request_refused_unread_changes_nothing,
    a_request_refused_after_it_was_read_changes_nothing,
    a_disconnect_before_the_refusal_changes_nothing,
    a_disconnect_is_not_lost_because_of_a_request_that_is_refused_later,
    a_disconnect_does_not_affect_a_call_with_its_id_that_is_accepted_later,
    a_cancel_that_is_acknowledged_late_does_not_affect_the_next_call_with_its_id,
    a_disconnect_from_the_older_call_of_a_reused_id_cancels_nothing,
    a_disconnect_from_the_newer_call_of_a_reused_id_does_not_affect_the_older,
    a_disconnect_from_a_reused_id_that_was_never_accepted_cancels_nothing,
});

async fn a_disconnect_does_not_affect_the_call_of_another_client_with_the_same_id(server: Server) {
    let setup = server.start().await;
    let (first_client, second_client) = (setup.mcp().await, setup.mcp().await);
    let disconnected = setup.start_call(&first_client, 7, "hold", "leaving").await;
    let mut connected = setup.start_call(&second_client, 7, "hold", "staying").await;
    assert_eq!(setup.calls.len(), 2);

    disconnected.fin();

    assert!(setup.witness.ended("leaving").await.is_cancelled());
    setup.exchanges.over_for("leaving").await;
    setup.assert_usable(&second_client).await;
    assert_eq!(setup.calls.len(), 1);
    let expected = if server.has_sessions() {
        vec![EventKind::Started]
    } else {
        // Neither client has a session, so `of` finds the calls of both.
        vec![
            EventKind::Started,
            EventKind::Started,
            EventKind::Ended(DISCONNECTED),
        ]
    };
    assert_eq!(setup.events.of(&second_client, 7), expected);
    setup.assert_completes("staying", &mut connected).await;
}

async fn a_cancel_notification_of_another_client_changes_nothing(server: Server) {
    let (setup, mcp) = server.client().await;
    let call = setup.start_call(&mcp, 7, "hold", "victim").await;
    let attacker = Mcp::stateless(setup.served.addr, PATH);

    let status = attacker.cancel(7).await;

    // A server with sessions requires one. A server without sessions ignores notifications.
    assert_eq!(status, if server.has_sessions() { 400 } else { 202 });
    assert_untouched(&setup, &mcp, call).await;
}

async fn a_cancel_notification_from_another_session_changes_nothing(server: Server) {
    let (setup, mcp) = server.client().await;
    let call = setup.start_call(&mcp, 7, "hold", "victim").await;
    let attacker = setup.mcp().await;

    assert_eq!(attacker.cancel(7).await, 202);

    setup.assert_usable(&attacker).await;
    assert_untouched(&setup, &mcp, call).await;
}

async fn a_disconnect_from_a_number_does_not_affect_the_string_with_the_same_digits(
    server: Server,
) {
    assert_similar_id_is_unaffected(server, json!(7), json!("7")).await;
}

async fn a_disconnect_from_a_string_does_not_affect_the_number_with_the_same_digits(
    server: Server,
) {
    assert_similar_id_is_unaffected(server, json!("7"), json!(7)).await;
}

async fn a_sessionless_request_with_a_session_header_is_not_a_call_of_the_session(server: Server) {
    let (setup, mcp) = server.client().await;
    let call = setup.start_call(&mcp, 7, "hold", "victim").await;
    let attacker = sessionless_beside(&mcp, &setup);
    let mut other = setup.start_call(&attacker, 7, "hold", "other").await;
    assert_eq!(setup.calls.len(), 2);

    setup.assert_completes("other", &mut other).await;

    assert_untouched(&setup, &mcp, call).await;
}

async fn a_disconnect_from_a_sessionless_request_does_not_affect_the_call_whose_session_it_names(
    server: Server,
) {
    let (setup, mcp) = server.client().await;
    let call = setup.start_call(&mcp, 7, "hold", "victim").await;
    let attacker = sessionless_beside(&mcp, &setup);
    let other = setup.start_call(&attacker, 7, "hold", "other").await;

    other.fin();

    assert_eq!(setup.events.ended(&attacker, 7).await, DISCONNECTED);
    assert!(setup.witness.ended("other").await.is_cancelled());
    assert_untouched(&setup, &mcp, call).await;
}

async fn a_request_with_two_session_headers_is_served_and_never_cancelled(server: Server) {
    let (setup, mcp) = server.client().await;
    let doubled = with_session_of(mcp.clone(), &mcp);
    let call = setup.start_call(&doubled, 7, "hold", "a").await;

    call.fin();

    setup.exchanges.over_for("a").await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    assert!(!setup.tokens.of("a").is_cancelled());
    assert_eq!(setup.events.of(&mcp, 7), []);
}

async fn a_request_refused_unread_changes_nothing(server: Server) {
    let setup = Plan::of(server).inside(refusing_unread).start().await;
    let mcp = authorized(&setup).await;
    let call = setup.start_call(&mcp, 7, "hold", "victim").await;

    let mut refused = send_unauthorized(&setup, &mcp).await;

    assert_eq!(refused.head().await.status, 401);
    setup.exchanges.over_for("attacker").await;
    let unread = EventKind::UnparsedBody(ParseFailure::NotRead);
    assert!(
        !setup.events.all().contains(&unread),
        "a refused body is not reported as unparsed"
    );
    assert_untouched(&setup, &mcp, call).await;
}

async fn a_request_refused_after_it_was_read_changes_nothing(server: Server) {
    let (gate, setup, mcp, call, mut refused) = refusing_after_reading(server).await;
    assert_eq!(setup.calls.len(), 2, "the layer has read the request, too");

    gate.open();

    assert_eq!(refused.head().await.status, 401);
    setup.exchanges.over_for("attacker").await;
    let of_attacker = [EventKind::Started, EventKind::Ended(Outcome::Failed)];
    assert_untouched_beside(&setup, &mcp, call, &of_attacker).await;
}

/// The call has never reached its session's manager, so no cancellation is sent.
#[tokio::test]
async fn a_call_of_a_managers_session_that_another_route_answers_is_reported_as_abandoned() {
    let other = |router: Router| {
        let events = || Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
        let answer = async move |_: Bytes| ([("content-type", "text/event-stream")], events());
        router.route("/other", post(answer))
    };
    let (setup, mcp) = Plan::of(Server::Wrapped).inside(other).client().await;
    let session = mcp.session_id().expect("a session").to_owned();
    let elsewhere = Mcp::stateless(setup.served.addr, "/other").in_session(&session);
    let mut call = elsewhere.call(7, "hold", arguments("a")).await;
    assert_eq!(call.head().await.status, 200);

    call.fin();

    let abandoned = Outcome::Abandoned(CancelReason::ClientDisconnected);
    assert_eq!(setup.events.ended(&mcp, 7).await, abandoned);
}

async fn a_disconnect_before_the_refusal_changes_nothing(server: Server) {
    let (_gate, setup, mcp, call, refused) = refusing_after_reading(server).await;

    refused.fin();

    setup.exchanges.over_for("attacker").await;
    let of_attacker = [
        EventKind::Started,
        EventKind::Ended(outcome_if_never_accepted(server)),
    ];
    assert_untouched_beside(&setup, &mcp, call, &of_attacker).await;
}

/// The attacker's request could become a call that the cancellation would hit.
async fn a_disconnect_is_not_lost_because_of_a_request_that_is_refused_later(server: Server) {
    let (gate, setup, mcp, call, mut refused) = refusing_after_reading(server).await;

    call.fin();
    setup.exchanges.over_for("victim").await;
    setup.assert_usable(&mcp).await;
    gate.open();

    assert_eq!(refused.head().await.status, 401);
    assert!(setup.witness.ended("victim").await.is_cancelled());
    let failed = |kind: &EventKind| matches!(kind, EventKind::CancelFailed(_));
    assert!(!setup.events.all().iter().any(failed));
}

/// The specification forbids reusing an id.
///
/// A client that does so must still keep its new call.
async fn a_disconnect_does_not_affect_a_call_with_its_id_that_is_accepted_later(server: Server) {
    let (mut gate, holding_back) = Gate::for_exchange(Held::ReadRequest, "newer");
    let (setup, mcp) = Plan::of(server).inside(holding_back).client().await;
    let older = setup.start_call(&mcp, 7, "hold", "older").await;
    let newer = mcp.clone().header(EXCHANGE, "newer");
    let mut newer = newer.call(7, "hold", json!({ "label": "newer" })).await;
    gate.entered().await;

    older.fin();
    setup.exchanges.over_for("older").await;
    setup.assert_usable(&mcp).await;
    gate.open();

    setup.witness.started("newer").await;
    setup.assert_usable(&mcp).await;
    setup.assert_completes("newer", &mut newer).await;
}

/// A service inside the layer holds back the 202, and in the meantime the id is used again.
async fn a_cancel_that_is_acknowledged_late_does_not_affect_the_next_call_with_its_id(
    server: Server,
) {
    let (mut gate, answering_late) = Gate::for_exchange(Held::Response, "cancel");
    let (setup, mcp) = Plan::of(server).inside(answering_late).client().await;
    let _older = setup.start_call(&mcp, 7, "hold", "older").await;
    let cancelling = mcp.clone().header(EXCHANGE, "cancel");
    let cancelled = cancelling.cancel(7);
    let reusing = async {
        gate.entered().await;
        assert!(setup.witness.ended("older").await.is_cancelled());
        let newer = setup.start_primed(&mcp, 7, "hold", "newer").await;
        gate.open();
        newer
    };

    let (status, mut newer) = tokio::join!(cancelled, reusing);

    assert_eq!(status, 202);
    setup.exchanges.over_for("cancel").await;
    setup.assert_completes("newer", &mut newer).await;
}

async fn a_disconnect_from_the_older_call_of_a_reused_id_cancels_nothing(server: Server) {
    let (setup, mcp) = server.client().await;
    let older = setup.start_call(&mcp, 7, "hold", "older").await;
    let mut newer = setup.start_call(&mcp, 7, "hold", "newer").await;

    older.fin();

    setup.exchanges.over_for("older").await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("older"));
    assert!(!setup.tokens.of("older").is_cancelled());
    let mut events = setup.events.of(&mcp, 7);
    // The older call becomes untracked when the newer one is accepted, which a session manager notices earlier.
    let position = events.iter().position(|kind| *kind == ENDED_UNKNOWN);
    events.remove(position.expect("the older call was reported as untracked"));
    assert_eq!(events, [EventKind::Started, EventKind::Started]);
    setup.assert_completes("newer", &mut newer).await;
    setup.exchanges.over_for("newer").await;
    assert!(setup.calls.is_empty());
}

async fn a_disconnect_from_the_newer_call_of_a_reused_id_does_not_affect_the_older(server: Server) {
    let (setup, mcp) = server.client().await;
    let _older = setup.start_call(&mcp, 7, "hold", "older").await;
    let newer = setup.start_call(&mcp, 7, "hold", "newer").await;

    newer.fin();

    assert!(setup.witness.ended("newer").await.is_cancelled());
    let is_end = |kind| kind == EventKind::Ended(DISCONNECTED);
    setup.events.count(&mcp, 7, 1, is_end).await;
    setup.assert_usable(&mcp).await;
    let ends = setup.events.of(&mcp, 7).into_iter();
    let ends: Vec<_> = ends.filter(|kind| *kind != EventKind::Started).collect();
    assert_eq!(ends, [ENDED_UNKNOWN, EventKind::Ended(DISCONNECTED)]);
    assert!(setup.witness.is_running("older"));
    assert!(!setup.tokens.of("older").is_cancelled());
    assert!(setup.calls.is_empty());
}

/// It is as if the call had waited in a queue.
///
/// The server never received the call, but would receive its cancellation.
async fn a_disconnect_from_a_reused_id_that_was_never_accepted_cancels_nothing(server: Server) {
    let queued = Arc::new(Notify::new());
    let plan = Plan::of(server).inside(queueing("queued", queued.clone()));
    let (setup, mcp) = plan.client().await;
    let call = setup.start_call(&mcp, 7, "hold", "victim").await;
    let marked = mcp.clone().header(EXCHANGE, "queued");
    let second = marked.call(7, "hold", json!({ "label": "queued" })).await;
    within("the second call to be queued", queued.notified()).await;

    second.fin();

    setup.exchanges.over_for("queued").await;
    assert_eq!(setup.witness.starts("queued"), 0);
    let ended = outcome_if_never_accepted(server);
    let queued = [EventKind::Started, EventKind::Ended(ended)];
    assert_untouched_beside(&setup, &mcp, call, &queued).await;
}

/// Returns the outcome of a call whose client disconnects before the server accepts it.
///
/// Meanwhile, another call has its id. The layer does not send a cancellation that would hit the other call, whereas a
/// session manager would send it only after the request.
fn outcome_if_never_accepted(server: Server) -> Outcome {
    match server {
        Server::Wrapped => DISCONNECTED,
        _ => Outcome::Abandoned(CancelReason::ClientDisconnected),
    }
}

/// Starts two calls from one client whose ids look alike, and disconnects from the first.
///
/// Asserts that the second is unaffected.
async fn assert_similar_id_is_unaffected(server: Server, disconnected: Value, connected: Value) {
    let (setup, mcp) = server.client().await;
    let first = setup.start_call(&mcp, disconnected.clone(), "hold", "leaving");
    let first = first.await;
    let second = setup.start_call(&mcp, connected.clone(), "hold", "staying");
    let mut second = second.await;

    first.fin();

    assert_eq!(setup.events.ended(&mcp, disconnected).await, DISCONNECTED);
    assert!(setup.witness.ended("leaving").await.is_cancelled());
    setup.assert_usable(&mcp).await;
    assert_eq!(setup.events.of(&mcp, connected), [EventKind::Started]);
    setup.assert_completes("staying", &mut second).await;
}

/// Asserts that the call `victim` with id 7 is untouched.
async fn assert_untouched(setup: &Setup, mcp: &Mcp, call: Connection) {
    let untouched = if setup.server.has_sessions() {
        setup.events.of(mcp, 7)
    } else {
        // This would also find the attackers' calls, but there must not be any.
        setup.events.all()
    };
    assert_eq!(untouched, [EventKind::Started]);
    assert_untouched_beside(setup, mcp, call, &[]).await;
}

/// Asserts that the call `victim` is untouched beside an attacker's call.
///
/// Both calls have id 7 in the same session, and the attacker's has had `attacker_events`.
///
/// The victim's handler is running, its token has not fired, and the call is still tracked, as its own client can still
/// disconnect.
async fn assert_untouched_beside(
    setup: &Setup,
    mcp: &Mcp,
    call: Connection,
    attacker_events: &[EventKind],
) {
    setup.assert_usable(mcp).await;
    assert!(setup.witness.is_running("victim"));
    assert!(!setup.tokens.of("victim").is_cancelled());
    assert_eq!(setup.calls.len(), 1);
    let before = [&[EventKind::Started], attacker_events].concat();
    assert_eq!(setup.events.of(mcp, 7), before);

    call.fin();

    assert!(setup.witness.ended("victim").await.is_cancelled());
    setup.exchanges.over_for("victim").await;
    let after = [&before, &[EventKind::Ended(DISCONNECTED)][..]].concat();
    assert_eq!(setup.events.of(mcp, 7), after);
    assert!(setup.calls.is_empty());
}

/// Returns a client without a session that still sends another client's session header.
fn sessionless_beside(mcp: &Mcp, setup: &Setup) -> Mcp {
    with_session_of(Mcp::sessionless(setup.served.addr, PATH), mcp)
}

fn with_session_of(client: Mcp, owner: &Mcp) -> Mcp {
    let session = owner.session_id().expect("a session");
    client.header("mcp-session-id", session)
}

/// Returns a client in its own session that the refusals below accept.
async fn authorized(setup: &Setup) -> Mcp {
    let mcp = Mcp::stateless(setup.served.addr, PATH);
    mcp.header("authorization", "Bearer owner").connect().await
}

/// Sends an attacker's call with the session and the id of the call `victim`.
async fn send_unauthorized(setup: &Setup, victim: &Mcp) -> Connection {
    let attacker = with_session_of(Mcp::stateless(setup.served.addr, PATH), victim);
    let attacker = attacker.header(EXCHANGE, "attacker");
    attacker
        .call(7, "hold", json!({ "label": "attacker" }))
        .await
}

/// Refuses requests at once, by their headers alone.
#[allow(clippy::result_large_err, reason = "the signature is tower-http's")]
fn refusing_unread(router: Router) -> Router {
    router.layer(ValidateRequestHeaderLayer::custom(
        |request: &mut Request| {
            if request.headers().contains_key(AUTHORIZATION) {
                Ok(())
            } else {
                Err(StatusCode::UNAUTHORIZED.into_response())
            }
        },
    ))
}

/// Starts the victim's call, and a request with the same id that waits at the gate.
///
/// That request has been read and will be refused.
async fn refusing_after_reading(server: Server) -> (Gate, Setup, Mcp, Connection, Connection) {
    let is_refused = |request: &Request| !request.headers().contains_key(AUTHORIZATION);
    let (mut gate, holding_back) = Gate::new(Held::ReadRequest, is_refused);
    let refusing = |router| holding_back(refusing_unread(router));
    let setup = Plan::of(server).inside(refusing).start().await;
    let mcp = authorized(&setup).await;
    let call = setup.start_call(&mcp, 7, "hold", "victim").await;
    let refused = send_unauthorized(&setup, &mcp).await;
    gate.entered().await;
    (gate, setup, mcp, call, refused)
}

/// Reads the first exchange with this name but never lets it pass.
fn queueing(name: &'static str, queued: Arc<Notify>) -> impl FnOnce(Router) -> Router {
    let full = Arc::new(AtomicBool::new(true));
    move |router| {
        router.layer(from_fn(move |request: Request, next: Next| {
            let named = request.headers().get(EXCHANGE);
            let is_first =
                named.is_some_and(|named| named == name) && full.swap(false, Ordering::Relaxed);
            let queued = queued.clone();
            async move {
                if is_first {
                    let read = to_bytes(request.into_body(), usize::MAX).await;
                    read.expect("a whole request");
                    queued.notify_one();
                    return pending().await;
                }
                next.run(request).await
            }
        }))
    }
}
