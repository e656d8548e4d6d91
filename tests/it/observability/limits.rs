//! More calls than can be tracked.
//!
//! Each runs as it would without the layer, and no other call is affected.

use std::sync::{Arc, atomic::Ordering};

use mcp_cancel_on_disconnect::{CancelReason, Grace, Limits, Outcome, observe::Limit};
use serde_json::json;
use tracing::Level;

use crate::{
    setup::{
        DISCONNECTED, EventKind, Failing, GRACE, Lines, Plan, Scripted, Server, Setup,
        StoppedClock, TICK, arguments, for_servers, slow_auth,
    },
    support::*,
};

const ENDED_UNKNOWN: EventKind = EventKind::Ended(Outcome::Unknown);

for_servers!(all {
    a_call_beyond_the_limit_gets_its_answer,
    a_call_that_ends_frees_capacity,
    a_call_that_is_cancelled_at_once_needs_no_room,
} sessions {
    a_disconnect_from_a_call_over_the_limit_cancels_nothing,
    detached_calls_beyond_the_limit_of_their_session_run_on_untracked,
    detached_calls_beyond_the_limit_in_all_run_on_untracked,
    a_client_that_resumes_frees_capacity,
    a_limit_that_is_reached_is_a_warning_once,
});

async fn a_call_beyond_the_limit_gets_its_answer(server: Server) {
    let setup = limited(server, |limits| limits.calls(1)).start().await;
    let (first, second) = (setup.mcp().await, setup.mcp().await);
    let mut tracked = setup.start_call(&first, 1, "hold", "tracked").await;

    let mut beyond = setup.start_call(&second, 2, "hold", "beyond").await;

    assert_eq!(setup.calls.len(), 1);
    let expected = [EventKind::Untracked(Limit::Calls)];
    assert_eq!(setup.events.of(&second, 2), expected);
    setup.assert_completes("beyond", &mut beyond).await;
    setup.assert_completes("tracked", &mut tracked).await;
    setup.calls_reach(0).await;
    assert_eq!(setup.events.of(&second, 2), expected);
}

async fn a_call_that_ends_frees_capacity(server: Server) {
    let (setup, mcp) = limited(server, |limits| limits.calls(1)).client().await;
    let mut first = setup.start_call(&mcp, 1, "hold", "first").await;
    setup.assert_completes("first", &mut first).await;
    setup.calls_reach(0).await;

    let second = setup.start_call(&mcp, 2, "hold", "second").await;
    second.fin();

    assert_eq!(setup.events.ended(&mcp, 2).await, DISCONNECTED);
    assert!(setup.witness.ended("second").await.is_cancelled());
}

async fn a_call_that_is_cancelled_at_once_needs_no_room(server: Server) {
    let (setup, mcp) = limited(server, |limits| limits.detached(0)).client().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;

    call.fin();

    assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
    assert!(setup.witness.ended("a").await.is_cancelled());
}

async fn a_disconnect_from_a_call_over_the_limit_cancels_nothing(server: Server) {
    let setup = limited(server, |limits| limits.calls(1)).start().await;
    let (first, second) = (setup.mcp().await, setup.mcp().await);
    let mut tracked = setup.start_call(&first, 7, "hold", "tracked").await;
    let beyond = setup.start_call(&second, 7, "hold", "beyond").await;

    beyond.fin();

    setup.exchanges.over_for("beyond").await;
    setup.assert_usable(&second).await;
    assert!(setup.witness.is_running("beyond"), "as without the layer");
    assert!(!setup.tokens.of("beyond").is_cancelled());
    assert_eq!(setup.events.of(&first, 7), [EventKind::Started]);
    setup.assert_completes("tracked", &mut tracked).await;
}

async fn detached_calls_beyond_the_limit_of_their_session_run_on_untracked(server: Server) {
    let clock = StoppedClock::stop();
    let setup = with_grace(server, |limits| limits.detached_per_session(2));
    let setup = setup.start().await;
    let (flooding, other) = (setup.mcp().await, setup.mcp().await);
    for id in 0..4 {
        disconnect(&setup, &flooding, id, &format!("flood {id}")).await;
    }
    disconnect(&setup, &other, 0, "other").await;
    assert_eq!((setup.calls.len(), setup.calls.detached()), (3, 3));

    clock.advance(GRACE + TICK).await;

    let orphaned = EventKind::Ended(Outcome::Cancelled(CancelReason::Orphaned));
    let tracked = [
        EventKind::Started,
        EventKind::Detached(Some(GRACE)),
        orphaned,
    ];
    let beyond = [
        EventKind::Started,
        EventKind::Untracked(Limit::DetachedPerSession),
        ENDED_UNKNOWN,
    ];
    for (mcp, id, label) in [
        (&flooding, 0, "flood 0"),
        (&flooding, 1, "flood 1"),
        (&other, 0, "other"),
    ] {
        assert!(setup.witness.ended(label).await.is_cancelled());
        assert_eq!(setup.events.of(mcp, id), tracked, "{label}");
    }
    for (id, label) in [(2, "flood 2"), (3, "flood 3")] {
        assert_eq!(setup.events.of(&flooding, id), beyond, "{label}");
        assert!(setup.witness.is_running(label));
        assert!(!setup.tokens.of(label).is_cancelled());
    }
    assert!(setup.calls.is_empty());
}

async fn detached_calls_beyond_the_limit_in_all_run_on_untracked(server: Server) {
    let setup = with_grace(server, |limits| limits.detached(2))
        .start()
        .await;
    let sessions = [setup.mcp().await, setup.mcp().await, setup.mcp().await];
    for (session, mcp) in sessions.iter().enumerate() {
        disconnect(&setup, mcp, 7, &format!("session {session}")).await;
    }
    let [first, second, third] = &sessions;

    let detached = [EventKind::Started, EventKind::Detached(Some(GRACE))];
    assert_eq!(setup.events.of(first, 7), detached);
    assert_eq!(setup.events.of(second, 7), detached);
    let beyond = [
        EventKind::Started,
        EventKind::Untracked(Limit::Detached),
        ENDED_UNKNOWN,
    ];
    assert_eq!(setup.events.of(third, 7), beyond);
    assert!(setup.witness.is_running("session 2"));
    setup.assert_usable(third).await;
}

async fn a_client_that_resumes_frees_capacity(server: Server) {
    let (setup, mcp) = with_grace(server, |limits| limits.detached(1))
        .client()
        .await;
    disconnect(&setup, &mcp, 1, "first").await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;

    disconnect(&setup, &mcp, 2, "second").await;

    let detached = [EventKind::Started, EventKind::Detached(Some(GRACE))];
    assert_eq!(setup.events.of(&mcp, 2), detached);
    setup.witness.release("first");
    assert!(resumed.answer().await.is_some());
}

async fn a_limit_that_is_reached_is_a_warning_once(server: Server) {
    let lines = Lines::up_to(Level::WARN);
    let (setup, mcp) = limited(server, |limits| limits.calls(0)).client().await;

    for _ in 0..50 {
        setup.assert_usable(&mcp).await;
    }

    let lines = lines.of_layer();
    assert_eq!(lines.len(), 1, "{lines:#?}");
    let expected = r#"limit reached: calls keep running untracked limit="calls" calls=1"#;
    assert!(lines[0].ends_with(expected), "{lines:#?}");
}

/// A cancellation for the older call would hit the newer call, which is not tracked.
#[tokio::test]
async fn the_older_call_of_a_reused_id_is_untracked_even_at_the_limit() {
    let setup = limited(Server::Wrapped, |limits| limits.calls(1));
    let (setup, mcp) = setup.client().await;
    let older = setup.start_call(&mcp, 7, "hold", "older").await;
    let mut newer = setup.start_call(&mcp, 7, "hold", "newer").await;
    let expected = [
        EventKind::Started,
        EventKind::Untracked(Limit::Calls),
        ENDED_UNKNOWN,
    ];
    assert_eq!(setup.events.of(&mcp, 7), expected);

    older.fin();

    setup.exchanges.over_for("older").await;
    setup.assert_completes("newer", &mut newer).await;
    assert!(setup.witness.is_running("older"));
}

/// A request does not affect other calls until the manager accepts it.
#[tokio::test]
async fn a_refused_request_over_the_limit_does_not_hide_an_older_call_with_its_id() {
    let store = Arc::new(Failing::default());
    let server_store = store.clone();
    let setup = limited(Server::Wrapped, |limits| limits.calls(1));
    let setup = setup.sessions(move |local| local.with_event_store(server_store));
    let (setup, mcp) = setup.client().await;
    let mut older = setup.start_call(&mcp, 7, "hold", "older").await;
    older.head().await;
    store.rejects_streams.store(true, Ordering::Relaxed);

    let mut refused = mcp.call(7, "hold", arguments("refused")).await;
    assert_eq!(refused.head().await.status, 500);
    store.rejects_streams.store(false, Ordering::Relaxed);

    older.fin();
    assert_eq!(setup.events.ended(&mcp, 7).await, DISCONNECTED);
    assert!(setup.witness.ended("older").await.is_cancelled());
}

/// The older call's cancellation would be replayed, and both calls have the same id.
#[tokio::test]
async fn the_older_call_of_a_reused_id_is_untracked_behind_the_layer_alone_even_at_the_limit() {
    let setup = limited(Server::LayerOnly, |limits| limits.calls(1));
    let (setup, mcp) = setup.client().await;
    let mut older = setup.start_call(&mcp, 7, "hold", "older").await;
    older.head().await;
    let mut newer = setup.start_call(&mcp, 7, "hold", "newer").await;
    newer.head().await;
    let expected = [
        EventKind::Started,
        EventKind::Untracked(Limit::Calls),
        ENDED_UNKNOWN,
    ];
    assert_eq!(setup.events.of(&mcp, 7), expected);

    older.fin();

    setup.exchanges.over_for("older").await;
    for _ in 0..3 {
        setup.assert_usable(&mcp).await;
    }
    setup.assert_completes("newer", &mut newer).await;
}

/// The body is read before the session manager gets the message.
#[tokio::test]
async fn a_call_beyond_the_limit_behind_a_slow_middleware_is_reported_once() {
    let setup = limited(Server::Wrapped, |limits| limits.calls(0));
    let (setup, mcp) = setup.inside(slow_auth).client().await;

    let mut call = mcp.call(1, "echo", json!({ "text": "a" })).await;
    assert!(call.answer().await.is_some());

    let expected = [EventKind::Untracked(Limit::Calls)];
    assert_eq!(setup.events.of(&mcp, 1), expected);
}

#[tokio::test]
async fn progress_of_a_cancelled_call_is_dropped_after_hundreds_of_calls_beyond_the_limit() {
    let handler = Scripted::new(async |context| {
        context.ct.cancelled().await;
        test_support::server::report(&context, "a", 1).await;
        let _ = context.peer.notify_tool_list_changed().await;
        Ok("late".to_owned())
    });
    let setup = limited(Server::Wrapped, |limits| limits.calls(1));
    let setup = setup.start_scripted(handler).await;
    let mcp = setup.mcp().await;
    let mut listening = mcp.listen().await;
    listening.head().await;
    let call = setup.start_call(&mcp, 1, "hold", "a").await;
    for _ in 0..300 {
        setup.assert_usable(&mcp).await;
    }

    call.fin();

    assert_eq!(setup.events.ended(&mcp, 1).await, DISCONNECTED);
    let mut event = listening.event().await.expect("an event");
    while event.is_priming() {
        event = listening.event().await.expect("an event");
    }
    let method = "notifications/tools/list_changed";
    assert_eq!(
        event.json()["method"],
        method,
        "the progress was not dropped"
    );
}

/// A session's first retained answer also counts the layer's other state for the session.
#[tokio::test]
async fn the_first_answer_of_a_session_counts_what_is_known_of_the_session_too() {
    for (bytes, is_kept) in [(1_200, false), (8_192, true)] {
        let plan = with_grace(Server::Wrapped, |limits| limits.retained_per_session(bytes));
        let (setup, mcp) = plan.client().await;
        disconnect(&setup, &mcp, 1, "a").await;
        setup.witness.release("a");
        assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);

        let mut resumed = mcp.resume("0/0").await;
        resumed.head().await;
        assert_eq!(resumed.answer().await.is_some(), is_kept, "{bytes}");
    }
}

fn limited(server: Server, change: impl FnOnce(Limits) -> Limits) -> Plan {
    Plan::of(server).layer(|layer| layer.limits(change(Limits::default())))
}

fn with_grace(server: Server, change: impl FnOnce(Limits) -> Limits) -> Plan {
    limited(server, change).grace(Grace::After(GRACE))
}

/// Starts a call and disconnects its client. The call does not have to be tracked.
async fn disconnect(setup: &Setup, mcp: &Mcp, id: u64, label: &str) {
    let call = setup.start_primed(mcp, id, "hold", label).await;
    call.fin();
    setup.exchanges.over_for(label).await;
    let is_disconnect = |kind| matches!(kind, EventKind::Detached(_) | EventKind::Ended(_));
    setup.events.count(mcp, id, 1, is_disconnect).await;
}
