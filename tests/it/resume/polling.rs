//! Clients that poll.
//!
//! The server ends their streams on purpose and expects them to reconnect (SEP-1699).

use std::time::Duration;

use mcp_cancel_on_disconnect::{Grace, MIN_GRACE, Outcome};

use crate::{
    setup::{FIRST_EVENT, ORPHANED, Plan, Server, Setup, StoppedClock, TICK, for_servers, stalled},
    support::*,
};

/// The stream of a session's first call.
const STREAM: u64 = 0;
for_servers!(sessions {
    a_client_that_polls_keeps_its_call_for_as_long_as_it_polls,
    a_client_that_stops_polling_loses_its_call_after_a_whole_grace,
    a_stream_that_the_server_ends_is_not_a_disconnect_with_any_grace,
    the_last_retry_that_the_server_sent_is_what_counts,
});

async fn a_client_that_polls_keeps_its_call_for_as_long_as_it_polls(server: Server) {
    const POLLS: usize = 30;
    let (clock, setup, mcp) = Plan::of(server).grace(Grace::Auto).stopped().await;
    let mut stream = setup.start_call(&mcp, 1, "hold", "a").await;
    let mut last = None;
    stream.head().await;
    for poll in 1..=POLLS {
        setup.sessions.end_stream(&mcp, STREAM, None).await;
        while let Some(event) = stream.event().await {
            last = event.id;
        }
        assert!(stream.is_complete(), "the stream has ended properly");
        setup.events.detached_again(&mcp, 1, poll).await;
        // Nearly the whole grace period each time, because every grace period starts in full.
        clock.advance(MIN_GRACE - TICK).await;
        stream = mcp.resume(last.as_deref().expect("an id")).await;
        assert_eq!(stream.head().await.status, 200);
        setup.events.resumed(&mcp, 1, poll).await;
    }

    setup.assert_completes("a", &mut stream).await;
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
}

async fn a_client_that_stops_polling_loses_its_call_after_a_whole_grace(server: Server) {
    let (clock, setup, mcp) = Plan::of(server).grace(Grace::Auto).stopped().await;
    let mut stream = setup.start_call(&mcp, 1, "hold", "a").await;
    stream.head().await;
    end_stream(&setup, &mcp, &mut stream, None).await;
    clock.advance(MIN_GRACE - TICK).await;
    let mut stream = setup.resume(&mcp, 1, 1).await;

    end_stream(&setup, &mcp, &mut stream, None).await;

    let since = setup.events.detached_again(&mcp, 1, 2).await;
    clock.advance(MIN_GRACE - TICK).await;
    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("a"));
    clock.advance(TICK * 2).await;
    let (outcome, ended) = setup.events.end(&mcp, 1).await;
    assert_eq!(outcome, ORPHANED);
    assert!((MIN_GRACE..=MIN_GRACE + TICK).contains(&(ended - since)));
    assert!(setup.witness.ended("a").await.is_cancelled());
}

async fn a_stream_that_the_server_ends_is_not_a_disconnect_with_any_grace(server: Server) {
    let wait = Duration::from_secs(7);
    for (grace, expected) in [
        (Grace::Auto, Some(MIN_GRACE)),
        (Grace::Immediate, Some(MIN_GRACE)),
        (Grace::After(wait), Some(wait)),
        (Grace::Never, None),
    ] {
        let (setup, mcp) = Plan::of(server).grace(grace).client().await;
        let mut stream = setup.start_call(&mcp, 1, "hold", "a").await;
        stream.head().await;

        end_stream(&setup, &mcp, &mut stream, None).await;

        assert_eq!(setup.events.detached(&mcp, 1).await.0, expected);
        setup.assert_usable(&mcp).await;
        assert!(setup.witness.is_running("a"), "{grace:?}");
        let mut resumed = setup.resume(&mcp, 1, 1).await;
        setup.assert_completes("a", &mut resumed).await;
    }
}

/// `Grace::Auto` is five times the retry plus 5 s, but at least 20 s. A long retry counts only once.
async fn the_last_retry_that_the_server_sent_is_what_counts(server: Server) {
    let (setup, mcp) = Plan::of(server).grace(Grace::Auto).client().await;
    let second = Duration::from_secs(1);
    for (id, (retry, grace)) in [
        (second, MIN_GRACE),
        (3 * second, MIN_GRACE),
        (10 * second, 55 * second),
        (3_600 * second, 3_605 * second),
    ]
    .into_iter()
    .enumerate()
    {
        let label = format!("retry {retry:?}");
        let mut stream = setup.start_call(&mcp, id, "hold", &label).await;
        stream.head().await;
        let handle = &setup.sessions;
        handle.end_stream(&mcp, id as u64, Some(retry)).await;
        while stream.event().await.is_some() {}

        let (expected, _) = setup.events.detached(&mcp, id).await;

        assert_eq!(expected, Some(grace), "{label}");
        setup.witness.release(&label);
    }
}

/// The layer alone cannot observe that the call completes while its client is disconnected.
///
/// rmcp has lost the answer, so every resume gets an empty stream, until the client gets the error and stops polling.
#[tokio::test]
async fn a_client_that_polls_for_a_lost_answer_gets_an_error_in_the_end() {
    let poll = Duration::from_secs(3);
    let clock = StoppedClock::stop();
    let setup = Plan::of(Server::LayerOnly).grace(Grace::Auto);
    let (setup, mcp) = setup.client().await;
    setup.cut(&mcp, 1, "a").await;
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    let mut polls = 0;

    let received = loop {
        clock.advance_past(poll).await;
        polls += 1;
        assert!(polls < 40, "the client polls forever");
        let mut resumed = mcp.resume(FIRST_EVENT).await;
        resumed.head().await;
        if let Some(event) = resumed.event().await {
            break event;
        }
    };

    assert_eq!(received.id, None);
    assert_eq!(received.json()["error"]["code"], -32_800);
    // Twenty resumes without an event renew the grace period, and then it expires.
    assert!((21..=29).contains(&polls), "{polls}");
    assert!(setup.calls.is_empty());
}

/// The server ends the stream of a call whose client has already disconnected.
#[tokio::test]
async fn an_answer_after_the_server_ended_the_stream_of_a_disconnected_client_is_retained() {
    let (clock, setup, mcp) = Plan::of(Server::Wrapped).grace(Grace::Auto).stopped().await;
    setup.cut(&mcp, 1, "a").await;

    setup.sessions.end_stream(&mcp, STREAM, None).await;
    setup.assert_usable(&mcp).await;
    setup.witness.release("a");

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    clock.advance(2 * MIN_GRACE).await;
    mcp.resume(FIRST_EVENT).await.assert_done("a").await;
}

/// The server has ended the stream, but the layer has not seen that yet.
///
/// The answer therefore finds no stream.
#[tokio::test]
async fn an_answer_before_the_end_of_its_stream_was_observed_is_retained() {
    let plan = Plan::of(Server::Wrapped).grace(Grace::Auto);
    let (clock, setup, mcp) = plan.outside(stalled).stopped().await;
    let call = setup.start_primed(&mcp, 1, "hold", "a").await;

    setup.sessions.end_stream(&mcp, STREAM, None).await;
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    setup.assert_usable(&mcp).await;
    call.fin();

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    clock.advance(2 * MIN_GRACE).await;
    mcp.resume(FIRST_EVENT).await.assert_done("a").await;
}

/// rmcp closes a call's former stream even for a resume that it refuses.
#[tokio::test]
async fn an_answer_after_a_refused_resume_is_retained() {
    let (clock, setup, mcp) = Plan::of(Server::Wrapped).grace(Grace::Auto).stopped().await;
    setup.cut(&mcp, 1, "a").await;

    let mut refused = mcp.resume("99/0").await;
    clock.advance(Duration::from_secs(2)).await;
    assert_eq!(refused.answer().await, None);
    setup.witness.release("a");

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    mcp.resume(FIRST_EVENT).await.assert_done("a").await;
}

/// The handler answers while the client still holds the call's stream.
///
/// The layer has not seen the end of that stream yet.
#[tokio::test]
async fn an_answer_right_after_a_refused_resume_is_retained() {
    let plan = Plan::of(Server::Wrapped).grace(Grace::Auto);
    let (clock, setup, mcp) = plan.outside(stalled).stopped().await;
    let call = setup.start_primed(&mcp, 1, "hold", "a").await;

    let mut refused = mcp.resume("99/0").await;
    clock.advance(Duration::from_secs(2)).await;
    assert_eq!(refused.answer().await, None);
    setup.witness.release("a");
    assert!(setup.witness.ended("a").await.is_completed());
    setup.assert_usable(&mcp).await;
    call.fin();

    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    mcp.resume(FIRST_EVENT).await.assert_done("a").await;
}

async fn end_stream(setup: &Setup, mcp: &Mcp, stream: &mut Connection, retry: Option<Duration>) {
    setup.sessions.end_stream(mcp, STREAM, retry).await;
    while stream.event().await.is_some() {}
    assert!(stream.is_complete(), "the stream has ended properly");
}
