//! [`Grace::Auto`]: how long a detached call waits for its client.
//!
//! The wait depends on how the client can resume.

use std::time::Duration;

use mcp_cancel_on_disconnect::{Grace, MIN_GRACE, Outcome};

use crate::{
    setup::{
        DISCONNECTED, EventKind, ORPHANED, Plan, Server, Setup, StoppedClock, TICK, for_servers,
    },
    support::*,
};

for_servers!(sessions {
    a_call_with_event_ids_waits_for_its_client,
    a_server_that_sends_a_longer_retry_gives_its_clients_more_time,
    a_server_that_sends_an_endless_retry_gives_its_clients_the_longest_countable_grace,
    a_client_may_wait_for_the_retry_of_another_stream_of_its_session,
    a_call_without_event_ids_is_cancelled_at_once,
});

async fn a_call_with_event_ids_waits_for_its_client(server: Server) {
    let (clock, setup, mcp) = Plan::of(server).grace(Grace::Auto).stopped().await;
    let grace = cut(&setup, &mcp).await;
    assert_eq!(grace, Some(MIN_GRACE));

    clock.advance(MIN_GRACE - TICK).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));

    clock.advance(TICK * 2).await;
    assert_eq!(setup.events.ended(&mcp, 1).await, ORPHANED);
    assert!(setup.witness.ended("a").await.is_cancelled());
}

async fn a_server_that_sends_a_longer_retry_gives_its_clients_more_time(server: Server) {
    let retry = Some(Duration::from_secs(8));
    let setup = Plan::of(server).grace(Grace::Auto).sessions(|mut local| {
        local.session_config.sse_retry = retry;
        local
    });
    let (setup, mcp) = setup.client().await;

    let grace = cut(&setup, &mcp).await;

    assert_eq!(grace, Some(Duration::from_secs(45)));
}

/// The server has ended a long job's stream, whose client is to poll once a minute. Then the network breaks another
/// call's stream.
///
/// The TypeScript SDK waits for as long as the last `retry` it has received on any stream.
async fn a_client_may_wait_for_the_retry_of_another_stream_of_its_session(server: Server) {
    let retry = Duration::from_secs(60);
    let (clock, setup, mcp) = Plan::of(server).grace(Grace::Auto).stopped().await;
    let mut job = setup.start_primed(&mcp, 1, "hold", "job").await;
    let call = setup.start_primed(&mcp, 2, "hold", "call").await;
    setup.sessions.end_stream(&mcp, 0, Some(retry)).await;
    job.body_to_end().await;
    setup.events.detached(&mcp, 1).await;

    call.fin();

    setup.events.detached(&mcp, 2).await;
    clock.advance(retry).await;
    let mut resumed = mcp.resume("0/1").await;
    assert_eq!(resumed.head().await.status, 200);
    setup.assert_completes("call", &mut resumed).await;
}

async fn a_server_that_sends_an_endless_retry_gives_its_clients_the_longest_countable_grace(
    server: Server,
) {
    for retry in [1 << 31, (1 << 31) + 1, (1 << 32) + 7, u64::MAX] {
        let retry = Some(Duration::from_millis(retry));
        let setup = Plan::of(server).grace(Grace::Auto).sessions(|mut local| {
            local.session_config.sse_retry = retry;
            local
        });
        let (setup, mcp) = setup.client().await;

        let grace = cut(&setup, &mcp).await;

        let most = Duration::from_millis((1 << 31) - 1);
        assert_eq!(grace, Some(most + Duration::from_secs(5)), "{retry:?}");
    }
}

async fn a_call_without_event_ids_is_cancelled_at_once(server: Server) {
    let setup = Plan::of(server).grace(Grace::Auto).sessions(|mut local| {
        // Without a retry, rmcp sends no first event.
        local.session_config.sse_retry = None;
        local
    });
    let (setup, mcp) = setup.client().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    assert_eq!(call.head().await.status, 200);

    call.fin();

    assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
    assert!(setup.witness.ended("a").await.is_cancelled());
    let expected = [EventKind::Started, EventKind::Ended(DISCONNECTED)];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

/// The client might resume on another server that shares the store.
#[tokio::test]
async fn a_call_whose_events_are_stored_runs_to_its_end() {
    let clock = StoppedClock::stop();
    let setup = stored(Plan::of(Server::Wrapped).grace(Grace::Auto)).await;
    let mcp = setup.mcp().await;
    assert_eq!(cut(&setup, &mcp).await, None);

    // Less than the 5 minutes after which rmcp closes a session that has no messages.
    clock.advance(Duration::from_secs(4 * 60)).await;

    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    setup.witness.release("a");
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert!(!setup.tokens.of("a").is_cancelled());
    assert!(setup.calls.is_empty());
}

/// A store replays its events and then ends the stream.
///
/// The call is still running, so the client polls. The TypeScript SDK polls with the last event id from the resumed
/// stream, and stops polling if there was none.
#[tokio::test]
async fn a_client_of_a_store_that_polls_gets_its_answer() {
    let setup = stored(Plan::of(Server::Wrapped).grace(Grace::Auto)).await;
    let mcp = setup.mcp().await;
    let mut last_event_id = setup.cut(&mcp, 1, "a").await;
    for _ in 0..3 {
        let mut polled = mcp.resume(&last_event_id).await;
        assert_eq!(polled.head().await.status, 200);
        let priming = polled.event().await.expect("an event with an id");
        assert!(
            priming.is_priming() && priming.retry == Some(3_000),
            "{priming:?}"
        );
        last_event_id = priming.id.expect("an id");
        assert_eq!(polled.answer_event().await, None);
    }
    setup.witness.release("a");
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);

    let mut polled = mcp.resume(&last_event_id).await;

    polled.assert_done("a").await;
}

#[tokio::test]
async fn an_explicit_grace_holds_for_stored_calls_too() {
    let grace = Duration::from_secs(7);
    let clock = StoppedClock::stop();
    let setup = stored(Plan::of(Server::Wrapped).grace(Grace::After(grace))).await;
    let mcp = setup.mcp().await;
    assert_eq!(cut(&setup, &mcp).await, Some(grace));

    clock.advance(grace + TICK).await;

    assert_eq!(setup.events.ended(&mcp, 1).await, ORPHANED);
    assert!(setup.witness.ended("a").await.is_cancelled());
}

/// The client's GETs do not name a session in which the layer could look up the call.
#[tokio::test]
async fn a_client_without_a_session_that_polls_a_store_keeps_its_call_if_the_grace_is_automatic() {
    let clock = StoppedClock::stop();
    let grace = Grace::AutoAfter(Duration::from_secs(7));
    let setup = stored(Plan::of(Server::StatelessSse).grace(grace)).await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    let id = call
        .event()
        .await
        .and_then(|event| event.id)
        .expect("an id");
    call.fin();
    let is_disconnect = |kind| matches!(kind, EventKind::Detached(_) | EventKind::Ended(_));
    setup.events.count(&mcp, 1, 1, is_disconnect).await;

    for _ in 0..5 {
        clock.advance(Duration::from_secs(3)).await;
        let mut resumed = mcp.resume(&id).await;
        assert_eq!(resumed.head().await.status, 200);
    }

    assert!(setup.witness.is_running("a"));
}

async fn stored(plan: Plan) -> Setup {
    plan.stored().start().await
}

/// Disconnects call 1's client after its first event, and returns the call's grace period.
async fn cut(setup: &Setup, mcp: &Mcp) -> Option<Duration> {
    setup.cut(mcp, 1, "a").await;
    setup.events.detached(mcp, 1).await.0
}
