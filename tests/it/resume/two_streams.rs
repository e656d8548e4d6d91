//! A call with several streams at once has a client for as long as any of them is open.

use axum::extract::Request;
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{Grace, Outcome};

use crate::{
    foreign::Foreign,
    log::number,
    setup::{
        EXCHANGE, EventKind, FIRST_EVENT, FIRST_STORED, GRACE, Gate, Held, Plan, Server, Setup,
        StoppedClock, TICK, for_servers, stalled,
    },
    support::*,
};

for_servers!(sessions {
    a_resume_that_is_answered_after_a_newer_one_does_not_end_the_call,
    two_resumes_at_once_keep_their_call,
    the_end_of_the_last_stream_starts_the_grace,
});

/// rmcp serves two resumes in order, but their heads are sent in the opposite order.
///
/// By then the first resume's stream has ended.
async fn a_resume_that_is_answered_after_a_newer_one_does_not_end_the_call(server: Server) {
    let is_late = |request: &Request| request.headers().contains_key("x-late");
    let (mut gate, late_heads) = Gate::new(Held::Response, is_late);
    let (clock, setup, mcp) = Plan::with_grace(server).inside(late_heads).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    let late = mcp.clone().header("x-late", "1");
    let mut first = gate.resume(&late, FIRST_EVENT).await;
    let mut second = mcp.resume(FIRST_EVENT).await;
    assert_eq!(second.head().await.status, 200);

    gate.open();

    assert_eq!(first.head().await.status, 200);
    while first.event().await.is_some() {}
    assert_runs_on(&setup, &mcp, &clock, "a").await;
    setup.assert_completes("a", &mut second).await;
}

async fn two_resumes_at_once_keep_their_call(server: Server) {
    let (setup, mcp) = Plan::of(server).grace(Grace::Immediate).client().await;
    for id in 0..40 {
        let label = format!("a{id}");
        let call = setup.start_primed(&mcp, id, "hold", &label).await;
        // The echo call that `assert_usable` makes has a stream as well.
        let event = format!("0/{}", 2 * id);
        let (mut one, mut other) = tokio::join!(mcp.resume(&event), mcp.resume(&event));
        tokio::join!(one.head(), other.head());
        drop(call);
        setup.assert_usable(&mcp).await;
        assert!(!setup.tokens.of(&label).is_cancelled(), "{label}");
        setup.witness.release(&label);
        // One of the two streams has the answer, and the other has ended.
        let answers = tokio::join!(one.answer(), other.answer());
        assert!(answers.0.is_some() || answers.1.is_some(), "{label}");
        assert_eq!(setup.events.ended(&mcp, id).await, Outcome::Completed);
    }
}

async fn the_end_of_the_last_stream_starts_the_grace(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).inside(stalled).stopped().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    let resumed = mcp.clone().header(EXCHANGE, "resumed");
    let mut resumed = resumed.resume(FIRST_EVENT).await;
    assert_eq!(resumed.head().await.status, 200);
    setup.events.resumed(&mcp, 1, 1).await;

    resumed.rst();
    setup.exchanges.over_for("resumed").await;
    assert_runs_on(&setup, &mcp, &clock, "a").await;
    call.rst();

    setup.events.detached(&mcp, 1).await;
    clock.advance(GRACE + TICK).await;
    assert!(setup.witness.ended("a").await.is_cancelled());
}

/// A store replays its events and then ends the stream.
#[tokio::test]
async fn a_replay_that_ends_does_not_end_a_call_whose_first_stream_is_open() {
    let (clock, setup, mcp) = Plan::with_grace(Server::Wrapped).stored().stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;
    let primed = call.event().await.expect("the priming event");
    let id = primed.id.expect("an id");
    assert!(*id >= *FIRST_STORED);

    let mut replay = mcp.resume(&id).await;
    assert_eq!(replay.head().await.status, 200);
    while replay.event().await.is_some() {}
    setup.events.resumed(&mcp, 1, 1).await;

    assert_runs_on(&setup, &mcp, &clock, "a").await;
    setup.assert_completes("a", &mut call).await;
}

#[tokio::test(start_paused = true)]
async fn a_replay_of_a_foreign_server_does_not_end_a_call_whose_first_stream_is_open() {
    let foreign = Foreign::with(Grace::After(GRACE));
    let mut stream = foreign.call(1).await;
    foreign.send_event("id: first\ndata:\n\n");
    Foreign::frame(&mut stream).await;

    let mut replay = foreign.resume("first").await;
    let progress = r#"{"jsonrpc":"2.0","method":"notifications/progress"}"#;
    foreign.send_event_to_newest(&format!("id: second\ndata: {progress}\n\n"));
    Foreign::frame(&mut replay).await;
    foreign.end_newest();
    assert!(replay.frame().await.is_none());
    drop(replay);

    tokio::time::sleep(3 * GRACE).await;
    assert_eq!(foreign.layer.calls().len(), 1);
    assert_eq!(foreign.log.ends(&number(1)), []);
    drop(stream);
    tokio::time::sleep(GRACE + TICK).await;
    assert_eq!(foreign.log.cancelled().len(), 1);
}

/// The old connections are dropped last.
///
/// Both streams have the same event ids, so the resume could be for either call.
#[tokio::test(start_paused = true)]
async fn a_resume_that_may_mean_two_calls_keeps_both_though_their_old_connections_are_missed_later()
{
    for grace in [Grace::After(GRACE), Grace::Immediate] {
        let foreign = Foreign::with(grace);
        let mut streams = Vec::new();
        for call in [1, 2] {
            let mut stream = foreign.call(call).await;
            foreign.send_event_to_newest("id: 1\ndata:\n\n");
            Foreign::frame(&mut stream).await;
            streams.push(stream);
        }

        let resumed = foreign.resume("1").await;
        drop(streams);

        tokio::time::sleep(3 * GRACE).await;
        assert_eq!(foreign.log.cancelled().len(), 0, "{grace:?}");
        assert_eq!(foreign.layer.calls().len(), 2, "{grace:?}");
        drop(resumed);
    }
}

/// The layer no longer knows all of the stream's event ids.
#[tokio::test(start_paused = true)]
async fn a_resume_in_the_middle_of_a_long_stream_keeps_its_call_though_the_old_connection_is_missed_later()
 {
    let foreign = Foreign::with(Grace::After(GRACE));
    let mut stream = foreign.call(1).await;
    for event in 0..3_000 {
        foreign.send_event_to_newest(&format!("id: event-{event}\ndata:\n\n"));
        Foreign::frame(&mut stream).await;
    }

    let resumed = foreign.resume("event-1500").await;
    drop(stream);

    tokio::time::sleep(3 * GRACE).await;
    assert_eq!(foreign.log.cancelled().len(), 0);
    assert_eq!(foreign.layer.calls().len(), 1);
    drop(resumed);
}

/// `<counter>/<constant>` looks like rmcp's format but means something else.
#[tokio::test(start_paused = true)]
async fn ids_that_only_look_like_rmcps_do_not_join_two_calls() {
    for ids in [["1/7", "2/7"], ["1/0", "1/1"], ["a/0", "b/0"]] {
        let foreign = Foreign::with(Grace::After(GRACE));
        let mut streams = Vec::new();
        for (call, id) in [1, 2].into_iter().zip(ids) {
            let mut stream = foreign.call(call).await;
            foreign.send_event_to_newest(&format!("id: {id}\ndata:\n\n"));
            Foreign::frame(&mut stream).await;
            streams.push(stream);
        }
        let connected = streams.pop();
        drop(streams);

        // The client resumes the first call and disconnects again.
        let resumed = foreign.resume(ids[0]).await;
        drop(resumed);

        tokio::time::sleep(2 * GRACE).await;
        assert_eq!(foreign.log.cancelled().len(), 1, "{ids:?}");
        assert_eq!(foreign.log.ends(&number(2)), [], "{ids:?}");
        assert_eq!(foreign.layer.calls().len(), 1, "{ids:?}");
        drop(connected);
    }
}

/// Asserts that the call keeps running, because its client is connected.
///
/// The clock stops where a grace period would end, because a deadline that is noticed late is postponed.
async fn assert_runs_on(setup: &Setup, mcp: &Mcp, clock: &StoppedClock, label: &str) {
    setup.assert_usable(mcp).await;
    let before = setup.events.of(mcp, 1);
    for _ in 0..2 {
        clock.advance(GRACE + TICK).await;
        setup.assert_usable(mcp).await;
    }
    assert!(setup.witness.is_running(label));
    assert!(!setup.tokens.of(label).is_cancelled());
    assert_eq!(setup.events.of(mcp, 1), before);
    let ended = |kind: &EventKind| matches!(kind, EventKind::Ended(_));
    assert!(!before.iter().any(ended), "{before:?}");
}
