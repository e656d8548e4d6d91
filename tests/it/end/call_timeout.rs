//! A call takes longer than its policy allows while its client is still connected.
//!
//! The clock is stopped and only moves when a test advances it.

use std::time::Duration;

use axum::{
    extract::Request,
    middleware::{Next, from_fn},
};
use mcp_cancel_on_disconnect::{CancelReason, Grace, Outcome, Policy};
use serde_json::{Value, json};

use crate::setup::{EventKind, Plan, Server, StoppedClock, TICK, arguments, for_servers};

const TIMEOUT: Duration = Duration::from_secs(30);
const TIMED_OUT: Outcome = Outcome::Cancelled(CancelReason::TimedOut);

for_servers!(all {
    a_call_that_exceeds_its_timeout_is_cancelled_with_an_error_to_its_client,
    a_call_that_answers_in_time_is_not_affected,
    what_a_handler_answers_too_late_is_dropped,
    a_policy_sets_the_time_of_each_call,
    a_disconnect_before_the_timeout_changes_nothing,
} sessions {
    a_client_that_resumed_gets_the_error_on_its_new_stream,
    a_client_that_resumes_too_late_gets_the_error_as_well,
    the_session_continues,
    a_call_before_its_head_is_answered_as_json,
});

async fn a_call_that_exceeds_its_timeout_is_cancelled_with_an_error_to_its_client(server: Server) {
    let (clock, setup, mcp) = limited(server).stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;

    clock.advance(TIMEOUT - TICK).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));

    clock.advance(TICK * 2).await;

    assert_eq!(call.messages().await, [timed_out(json!(1))]);
    assert!(!setup.witness.ended("a").await.is_completed());
    let token = setup.tokens.of("a");
    assert_eq!(token.reason(), Some(CancelReason::TimedOut));
    assert_eq!(
        setup.events.of(&mcp, 1),
        [EventKind::Started, EventKind::Ended(TIMED_OUT)]
    );
    assert!(setup.calls.is_empty());
}

async fn a_call_that_answers_in_time_is_not_affected(server: Server) {
    let (clock, setup, mcp) = limited(server).stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    clock.advance(TIMEOUT - TICK).await;
    setup.assert_completes("a", &mut call).await;

    clock.advance(2 * TIMEOUT).await;
    setup.assert_usable(&mcp).await;

    assert!(!setup.tokens.of("a").is_cancelled());
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
}

async fn what_a_handler_answers_too_late_is_dropped(server: Server) {
    let (clock, setup, mcp) = limited(server).stopped().await;
    let mut call = setup.start_call(&mcp, 1, "stubborn", "a").await;
    setup.events.started(&mcp, 1).await;
    clock.advance(TIMEOUT + TICK).await;
    setup.events.ended(&mcp, 1).await;

    setup.witness.release("a");

    assert_eq!(call.messages().await, [timed_out(json!(1))]);
    setup.assert_usable(&mcp).await;
}

async fn a_policy_sets_the_time_of_each_call(server: Server) {
    let plan = Plan::of(server).layer(|layer| {
        layer.policy(|call| match call.tool() {
            Some("hold") => Policy::new().grace(Grace::Immediate).call_timeout(TIMEOUT),
            _ => Policy::new().grace(Grace::Immediate),
        })
    });
    let (clock, setup, mcp) = plan.stopped().await;
    let mut limited = setup.start_call(&mcp, 1, "hold", "limited").await;
    let mut free = setup.start_call(&mcp, 2, "stubborn", "free").await;
    setup.events.started(&mcp, 1).await;
    setup.events.started(&mcp, 2).await;

    clock.advance(TIMEOUT + TICK).await;

    assert_eq!(limited.messages().await, [timed_out(json!(1))]);
    setup.assert_completes("free", &mut free).await;
}

async fn a_disconnect_before_the_timeout_changes_nothing(server: Server) {
    let plan = limited(server).grace(Grace::After(2 * TIMEOUT));
    let (clock, setup, mcp) = plan.stopped().await;
    let call = setup.start_call(&mcp, 1, "stubborn", "a").await;
    setup.events.started(&mcp, 1).await;
    call.fin();
    setup.events.detached(&mcp, 1).await;

    clock.advance(TIMEOUT + TICK).await;

    assert_eq!(setup.events.ended(&mcp, 1).await, TIMED_OUT);
}

async fn a_client_that_resumed_gets_the_error_on_its_new_stream(server: Server) {
    let (clock, setup, mcp) = limited(server).grace(Grace::Auto).stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    let priming = call.event().await.expect("the priming event");
    call.fin();
    setup.events.detached(&mcp, 1).await;
    let mut resumed = mcp.resume(&priming.id.expect("an id")).await;
    setup.events.resumed(&mcp, 1, 1).await;
    assert_eq!(resumed.head().await.status, 200);

    clock.advance(TIMEOUT + TICK).await;

    assert_eq!(resumed.messages().await, [timed_out(json!(1))]);
    assert!(setup.witness.ended("a").await.is_cancelled());
}

async fn a_client_that_resumes_too_late_gets_the_error_as_well(server: Server) {
    let (clock, setup, mcp) = limited(server)
        .grace(Grace::After(2 * TIMEOUT))
        .stopped()
        .await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    let priming = call.event().await.expect("the priming event");
    call.fin();
    setup.events.detached(&mcp, 1).await;
    clock.advance(TIMEOUT + TICK).await;
    setup.events.ended(&mcp, 1).await;

    let mut resumed = mcp.resume(&priming.id.expect("an id")).await;

    assert_eq!(resumed.messages().await, [timed_out(json!(1))]);
}

async fn the_session_continues(server: Server) {
    let (clock, setup, mcp) = limited(server).stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.events.started(&mcp, 1).await;
    clock.advance(TIMEOUT + TICK).await;
    call.messages().await;

    let mut again = setup.start_call(&mcp, 1, "hold", "b").await;
    setup.assert_completes("b", &mut again).await;
}

/// A session call's head is sent at once, unless a service inside the layer holds it back.
async fn a_call_before_its_head_is_answered_as_json(server: Server) {
    let clock = StoppedClock::stop();
    let plan = limited(server).inside(|router| {
        router.layer(from_fn(|request: Request, next: Next| async {
            let holds = request.headers().contains_key("x-hold");
            let response = next.run(request).await;
            if holds {
                std::future::pending::<()>().await;
            }
            response
        }))
    });
    let (setup, mcp) = plan.client().await;
    let mut call = mcp
        .clone()
        .header("x-hold", "1")
        .call(1, "hold", arguments("a"))
        .await;
    setup.witness.started("a").await;
    setup.events.started(&mcp, 1).await;

    clock.advance(TIMEOUT + TICK).await;

    let reply = call.reply().await;
    assert_eq!(reply.status, 200);
    assert_eq!(reply.headers["content-type"], "application/json");
    assert_eq!(reply.json(), timed_out(json!(1)));
    assert!(setup.witness.ended("a").await.is_cancelled());
}

// === Helpers ===

fn limited(server: Server) -> Plan {
    Plan::of(server).layer(|layer| layer.call_timeout(TIMEOUT))
}

fn timed_out(id: Value) -> Value {
    json!({ "jsonrpc": "2.0", "id": id, "error": { "code": -32001, "message": "Request timed out" } })
}

// --- Calls that keep running without their clients ---

async fn times_out_without_its_client(plan: Plan, timeout: Duration) {
    let plan = plan.layer(|layer| layer.call_timeout(timeout));
    let plan = plan.sessions(|mut local| {
        local.session_config.keep_alive = None;
        local
    });
    let (clock, setup, mcp) = plan.abort_after(Duration::ZERO).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    assert_eq!(setup.calls.detached(), 1);

    clock.advance(timeout - TICK).await;
    assert!(setup.witness.is_running("a"));
    clock.advance(2 * TICK).await;

    assert!(setup.witness.ended("a").await.is_cancelled());
    let timed_out = EventKind::Ended(TIMED_OUT);
    let expected = [EventKind::Started, EventKind::Detached(None), timed_out];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

#[tokio::test]
async fn a_stored_call_times_out_without_its_client() {
    let plan = Plan::of(Server::Wrapped).stored().grace(Grace::Auto);
    times_out_without_its_client(plan, TIMEOUT).await;
}

#[tokio::test]
async fn a_stored_call_without_a_session_times_out_without_its_client() {
    let plan = Plan::of(Server::StatelessSse).stored().grace(Grace::Auto);
    times_out_without_its_client(plan, TIMEOUT).await;
}

#[tokio::test]
async fn an_exempt_stored_call_without_a_session_times_out_without_its_client() {
    let plan = Plan::of(Server::StatelessSse).stored();
    times_out_without_its_client(plan.layer(|layer| layer.exempt(|_| true)), TIMEOUT).await;
}

/// A call whose end cannot be observed is forgotten after an hour.
#[tokio::test]
async fn a_call_that_runs_on_behind_the_layer_alone_times_out_after_more_than_an_hour() {
    let plan = Plan::of(Server::LayerOnly).grace(Grace::Never);
    times_out_without_its_client(plan, Duration::from_secs(2 * 60 * 60)).await;
}
