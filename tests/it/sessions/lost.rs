//! Sessions whose client has disconnected are closed after the lost timeout, and no other sessions are.

use std::time::Duration;

use mcp_cancel_on_disconnect::{CancellableSessionManager, Grace};
use rmcp::transport::streamable_http_server::session::local::SessionConfig;

use super::idle::{FIRST_EVENT, IDLE, TICK, closed, detach, is_open, settle};
use crate::setup::{Plan, Server, Setup, StoppedClock};

const LOST: Duration = Duration::from_secs(30);

/// Less than [`LOST`], and more than the server needs to notice a disconnect.
const SOME_TIME: Duration = Duration::from_secs(20);

fn plan() -> Plan {
    let wrap = |_| CancellableSessionManager::local(SessionConfig::default()).lost_timeout(LOST);
    Plan::of(Server::Wrapped).wrap(wrap)
}

/// Advances the clock in steps in which the server notices disconnects.
async fn pass(setup: &Setup, clock: &StoppedClock, time: Duration) {
    let step = Duration::from_millis(500);
    let mut passed = Duration::ZERO;
    while passed < time {
        clock.advance_past(step).await;
        settle(setup).await;
        passed += step;
    }
}

#[tokio::test]
async fn a_session_whose_client_disconnected_from_its_standalone_stream_is_closed_early() {
    let clock = StoppedClock::stop();
    let setup = plan().start().await;
    let (mcp, quiet) = (setup.mcp().await, setup.mcp().await);
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);
    pass(&setup, &clock, 2 * LOST).await;
    assert!(is_open(&setup, &mcp).await);

    standalone.fin();
    pass(&setup, &clock, SOME_TIME).await;
    assert!(is_open(&setup, &mcp).await);
    pass(&setup, &clock, SOME_TIME).await;

    closed(&setup, &mcp).await;
    assert!(is_open(&setup, &quiet).await, "this client had no stream");
    clock.advance(IDLE).await;
    closed(&setup, &quiet).await;
}

#[tokio::test]
async fn a_session_whose_client_disconnected_from_its_call_is_closed_after_the_grace_of_the_call() {
    let clock = StoppedClock::stop();
    for grace in [Grace::Immediate, Grace::After(3 * LOST)] {
        let setup = plan().grace(grace).start().await;
        let mcp = setup.mcp().await;
        let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
        call.head().await;
        call.fin();
        if let Grace::After(grace) = grace {
            setup.events.detached(&mcp, 1).await;
            pass(&setup, &clock, grace - SOME_TIME).await;
            assert!(setup.witness.is_running("a"));
            pass(&setup, &clock, SOME_TIME).await;
        }
        setup.events.ended(&mcp, 1).await;
        assert!(is_open(&setup, &mcp).await);

        pass(&setup, &clock, LOST + SOME_TIME).await;

        closed(&setup, &mcp).await;
    }
}

#[tokio::test]
async fn a_request_shows_that_the_client_is_not_lost() {
    let clock = StoppedClock::stop();
    let setup = plan().start().await;
    let mcp = setup.mcp().await;
    let mut standalone = mcp.listen().await;
    standalone.head().await;
    standalone.fin();
    pass(&setup, &clock, SOME_TIME).await;

    setup.assert_usable(&mcp).await;

    pass(&setup, &clock, 2 * LOST).await;
    assert!(is_open(&setup, &mcp).await, "the answers ended its streams");
}

/// The client resumes before the server notices that the old connection is closed.
#[tokio::test]
async fn a_client_that_resumed_a_call_is_not_lost() {
    let clock = StoppedClock::stop();
    let setup = plan().grace(Grace::After(IDLE)).start().await;
    let mcp = setup.mcp().await;
    detach(&setup, &mcp).await;
    let mut resumed = mcp.resume(FIRST_EVENT).await;
    assert_eq!(resumed.head().await.status, 200);
    let mut again = mcp.resume(FIRST_EVENT).await;
    assert_eq!(again.head().await.status, 200);
    resumed.fin();
    settle(&setup).await;
    setup.assert_completes("a", &mut again).await;

    pass(&setup, &clock, 2 * LOST).await;

    assert!(is_open(&setup, &mcp).await);
    clock.advance(IDLE + TICK).await;
    closed(&setup, &mcp).await;
}

#[tokio::test]
async fn a_client_that_resumed_its_standalone_stream_is_lost_with_that_stream() {
    let clock = StoppedClock::stop();
    let setup = plan().start().await;
    let mcp = setup.mcp().await;
    let mut standalone = mcp.listen().await;
    standalone.head().await;
    let event = standalone.event().await.expect("the priming event");
    standalone.fin();
    pass(&setup, &clock, SOME_TIME).await;
    let mut resumed = mcp.resume(&event.id.expect("an event id")).await;
    assert_eq!(resumed.head().await.status, 200);
    pass(&setup, &clock, 2 * LOST).await;
    assert!(is_open(&setup, &mcp).await);

    resumed.fin();
    pass(&setup, &clock, LOST + SOME_TIME).await;

    closed(&setup, &mcp).await;
}

/// A cancel of the client ends the stream of its call, not the client.
#[tokio::test]
async fn a_client_that_cancels_its_call_is_not_lost() {
    let clock = StoppedClock::stop();
    let setup = plan().start().await;
    let mcp = setup.mcp().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    assert_eq!(mcp.cancel(1).await, 202);
    setup.events.ended(&mcp, 1).await;

    pass(&setup, &clock, 2 * LOST).await;

    assert!(is_open(&setup, &mcp).await);
}

/// A server that ends the stream asks its client to wait before it reconnects (SEP-1699).
#[tokio::test]
async fn a_client_whose_standalone_stream_the_server_ended_is_not_lost() {
    let clock = StoppedClock::stop();
    let setup = plan().start().await;
    let mcp = setup.mcp().await;
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);
    setup
        .sessions
        .end_standalone_stream(&mcp, Some(3 * LOST))
        .await;
    standalone.body_to_end().await;

    pass(&setup, &clock, 2 * LOST).await;

    assert!(is_open(&setup, &mcp).await);
}

#[tokio::test]
async fn without_an_idle_timeout_only_lost_sessions_are_closed() {
    let clock = StoppedClock::stop();
    let wrap = |_| {
        let sessions = CancellableSessionManager::local(SessionConfig::default());
        sessions.no_idle_timeout().lost_timeout(LOST)
    };
    let setup = Plan::of(Server::Wrapped).wrap(wrap).start().await;
    let (mcp, quiet) = (setup.mcp().await, setup.mcp().await);
    let mut standalone = mcp.listen().await;
    standalone.head().await;
    standalone.fin();

    pass(&setup, &clock, LOST + SOME_TIME).await;
    closed(&setup, &mcp).await;
    clock.advance(4 * IDLE).await;
    assert!(is_open(&setup, &quiet).await);
}
