//! Idle sessions are closed, and no others are.
//!
//! Except in the last test, the clock is stopped and only moves when a test advances it. To check whether a session is
//! open, the tests ask rmcp's manager, because a request would count as use.

use std::{sync::Arc, time::Duration};

use mcp_cancel_on_disconnect::{CancelReason, CancellableSessionManager, Grace, Outcome};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use serde_json::json;
use tokio::time::Instant;

use crate::{
    setup::{Plan, SavedSessions, Server, Sessions, Setup, StoppedClock},
    support::*,
};

/// The default in both rmcp and this crate.
pub(super) const IDLE: Duration = SessionConfig::DEFAULT_KEEP_ALIVE;

/// The resolution to which tokio rounds timers up.
pub(super) const TICK: Duration = Duration::from_millis(1);

/// A session's first stream, and the first event on it.
const STREAM: u64 = 0;
pub(super) const FIRST_EVENT: &str = "0/0";

/// How long rmcp lets handlers keep running in a session that is ending.
const DRAIN: Duration = Duration::from_secs(5);

#[tokio::test]
async fn an_idle_session_is_closed_at_its_timeout_and_not_before() {
    let (clock, setup, mcp) = default_plan().stopped().await;

    clock.advance(IDLE - TICK).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await);
    clock.advance(2 * TICK).await;

    until_closed(&setup, &mcp).await;
    assert_eq!(
        mcp.notify("notifications/initialized", json!({})).await,
        404
    );
}

/// A runtime that has stalled for a moment serves its timers before the accept queue.
#[tokio::test]
async fn a_request_that_waits_at_the_timeout_keeps_its_session_open() {
    let (clock, setup, mcp) = default_plan().stopped().await;

    clock.jump(IDLE + Duration::from_millis(300)).await;

    setup.assert_usable(&mcp).await;
    clock.advance(IDLE - TICK).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await, "the session counts as used");
    clock.advance_past(Duration::from_millis(500)).await;
    until_closed(&setup, &mcp).await;
}

#[tokio::test]
async fn a_closed_session_leaves_no_state() {
    let clock = StoppedClock::stop();
    let setup = default_plan().start().await;
    for _ in 0..3 {
        let mcp = setup.mcp().await;
        setup.assert_usable(&mcp).await;
    }
    assert_eq!(known_sessions(&setup), 3);

    clock.advance(IDLE + TICK).await;

    known_reaches(&setup, 0).await;
    assert!(setup.sessions.local().sessions.read().await.is_empty());
    assert!(setup.calls.is_empty());
}

#[tokio::test]
async fn a_request_restarts_the_idle_timeout() {
    let (clock, setup, mcp) = default_plan().stopped().await;
    clock.advance(IDLE / 2).await;
    assert_eq!(
        mcp.notify("notifications/roots/list_changed", json!({}))
            .await,
        202
    );

    clock.advance(IDLE - TICK).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await);
    clock.advance(2 * TICK).await;

    until_closed(&setup, &mcp).await;
}

/// rmcp only looks up the session once it has the body.
#[tokio::test]
async fn a_request_whose_body_arrives_slowly_keeps_its_session_open() {
    let (clock, setup, mcp) = default_plan().stopped().await;
    let request = mcp.call_request(1, "echo", json!({ "text": "slow" }));
    let mut upload = Connection::open(setup.served.addr).await;
    upload.send_chunked_head(&request).await;
    let half = request.body.len() / 2;
    upload.chunk(&request.body[..half]).await;
    settle(&setup).await;

    clock.advance(2 * IDLE).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await);

    upload.chunk(&request.body[half..]).await;
    upload.end_chunks().await;
    let answer = upload.answer().await.expect("an answer");
    assert_eq!(answer["result"]["content"][0]["text"], "slow");
}

#[tokio::test]
async fn an_incomplete_body_of_a_disconnected_client_does_not_keep_its_session_open() {
    let (clock, setup, mcp) = default_plan().stopped().await;
    let request = mcp.call_request(1, "echo", json!({ "text": "slow" }));
    let mut upload = Connection::open(setup.served.addr).await;
    upload.send_chunked_head(&request).await;
    upload.chunk(&request.body[..10]).await;
    settle(&setup).await;
    clock.advance(IDLE).await;
    settle(&setup).await;

    drop(upload);
    settle(&setup).await;
    clock.advance(IDLE + TICK).await;

    until_closed(&setup, &mcp).await;
}

#[tokio::test]
async fn a_request_of_another_session_does_not_restart_the_idle_timeout() {
    let clock = StoppedClock::stop();
    let setup = default_plan().start().await;
    let (mcp, other) = (setup.mcp().await, setup.mcp().await);
    clock.advance(IDLE / 2).await;
    setup.assert_usable(&other).await;

    clock.advance(IDLE / 2 + TICK).await;

    until_closed(&setup, &mcp).await;
    assert!(is_open(&setup, &other).await);
}

#[tokio::test]
async fn a_silent_call_of_a_connected_client_gets_its_answer_after_any_time() {
    let (clock, setup, mcp) = default_plan().stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;

    for _ in 0..3 {
        clock.advance(IDLE + TICK).await;
        settle(&setup).await;
    }

    setup.assert_completes("a", &mut call).await;
    setup.assert_usable(&mcp).await;
}

/// The control. Bare rmcp fails the previous test.
#[tokio::test]
async fn bare_rmcp_loses_the_answer_of_such_a_call() {
    let (clock, setup, mcp) = Plan::of(Server::Bare).stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    call.head().await;

    clock.advance(IDLE + TICK).await;

    assert_eq!(
        call.answer().await,
        None,
        "the stream ends without the answer"
    );
}

#[tokio::test]
async fn the_idle_timeout_starts_when_the_last_stream_ends() {
    let (clock, setup, mcp) = default_plan().stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    clock.advance(IDLE / 2).await;
    setup.assert_completes("a", &mut call).await;

    clock.advance(IDLE - TICK).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await);
    clock.advance(2 * TICK).await;

    until_closed(&setup, &mcp).await;
}

#[tokio::test]
async fn a_call_in_its_grace_keeps_its_session() {
    let (clock, setup, mcp) = default_plan().grace(Grace::After(4 * IDLE)).stopped().await;
    detach(&setup, &mcp).await;

    for _ in 0..3 {
        clock.advance(IDLE + TICK).await;
        settle(&setup).await;
    }

    let mut resumed = mcp.resume(FIRST_EVENT).await;
    assert_eq!(resumed.head().await.status, 200);
    setup.assert_completes("a", &mut resumed).await;
}

#[tokio::test]
async fn a_session_is_closed_after_its_last_call_was_orphaned() {
    let (clock, setup, mcp) = default_plan().grace(Grace::After(IDLE / 2)).stopped().await;
    detach(&setup, &mcp).await;

    clock.advance(IDLE / 2 + TICK).await;
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    assert_eq!(setup.events.ended(&mcp, 1).await, orphaned);
    clock.advance(IDLE - TICK).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await);
    clock.advance(2 * TICK).await;

    until_closed(&setup, &mcp).await;
}

#[tokio::test]
async fn a_call_without_a_client_that_runs_on_keeps_its_session_open() {
    let (clock, setup, mcp) = default_plan().grace(Grace::Never).stopped().await;
    detach(&setup, &mcp).await;

    for _ in 0..3 {
        clock.advance(IDLE + TICK).await;
        settle(&setup).await;
    }

    assert!(setup.witness.is_running("a"));
    setup.witness.release("a");
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    assert!(is_open(&setup, &mcp).await);
}

/// The call's stream has ended, so only the registry knows that the call is still running.
#[tokio::test]
async fn a_call_whose_stream_the_server_ended_keeps_its_session() {
    let (clock, setup, mcp) = default_plan().grace(Grace::After(4 * IDLE)).stopped().await;
    let mut call = setup.start_call(&mcp, 1, "hold", "a").await;
    setup.sessions.end_stream(&mcp, STREAM, None).await;
    call.body_to_end().await;
    setup.events.detached(&mcp, 1).await;

    for _ in 0..3 {
        clock.advance(IDLE + TICK).await;
        settle(&setup).await;
    }

    let mut resumed = mcp.resume(FIRST_EVENT).await;
    assert_eq!(resumed.head().await.status, 200);
    setup.assert_completes("a", &mut resumed).await;
}

/// rmcp sends both answers to the newer call.
///
/// The older call's stream gets no events and does not end.
#[tokio::test]
async fn a_call_whose_id_was_used_again_does_not_keep_its_session() {
    let clock = StoppedClock::stop();
    for leaves_first in [true, false] {
        let (setup, mcp) = default_plan().client().await;
        let mut older = setup.start_call(&mcp, 1, "hold", "older").await;
        older.head().await;
        let mut older = Some(older);
        if leaves_first {
            disconnect(&setup, &mut older).await;
        }
        let mut newer = setup.start_call(&mcp, 1, "hold", "newer").await;
        newer.head().await;
        disconnect(&setup, &mut older).await;
        setup.witness.release("older");
        setup.witness.release("newer");
        setup.witness.ended("older").await;
        setup.witness.ended("newer").await;
        assert!(newer.answer().await.is_some());
        newer.fin();

        settle(&setup).await;
        let mut waited = Duration::ZERO;
        while waited < 2 * IDLE && is_open(&setup, &mcp).await {
            clock.advance_past(Duration::from_millis(500)).await;
            waited += Duration::from_millis(500);
        }
        assert!(!is_open(&setup, &mcp).await, "{leaves_first}");
    }
}

#[tokio::test]
async fn a_standalone_stream_keeps_its_session_open_until_it_ends() {
    let (clock, setup, mcp) = default_plan().stopped().await;
    let mut standalone = mcp.listen().await;
    assert_eq!(standalone.head().await.status, 200);

    for _ in 0..3 {
        clock.advance(IDLE + TICK).await;
        settle(&setup).await;
        assert!(is_open(&setup, &mcp).await);
    }
    standalone.fin();

    // The server takes a while to notice the disconnect, and only then does the idle time start, in full.
    eventually("the session to be closed", async || {
        clock.advance_past(Duration::from_millis(500)).await;
        !is_open(&setup, &mcp).await
    })
    .await;
}

#[tokio::test]
async fn a_configured_idle_timeout_applies() {
    let wrap =
        |local: LocalSessionManager| CancellableSessionManager::new(local).idle_timeout(IDLE / 10);
    let (clock, setup, mcp) = Plan::of(Server::Wrapped).wrap(wrap).stopped().await;

    clock.advance(IDLE / 10 + TICK).await;

    until_closed(&setup, &mcp).await;
    known_reaches(&setup, 0).await;
}

#[tokio::test]
async fn idle_sessions_may_stay_open() {
    let wrap = |_| CancellableSessionManager::local(SessionConfig::default()).no_idle_timeout();
    let (clock, setup, mcp) = Plan::of(Server::Wrapped).wrap(wrap).stopped().await;

    for _ in 0..3 {
        clock.advance(10 * IDLE).await;
        settle(&setup).await;
    }

    setup.assert_usable(&mcp).await;
}

/// The wrapper's idle time is the longer one.
///
/// In `a_configured_idle_timeout_applies` it is the shorter one.
#[tokio::test]
async fn the_inner_managers_own_timer_still_works_and_leaves_no_state() {
    let short = |mut local: LocalSessionManager| {
        local.session_config.keep_alive = Some(IDLE / 10);
        local
    };
    let wrap =
        |local: LocalSessionManager| CancellableSessionManager::new(local).idle_timeout(IDLE);
    let (clock, setup, mcp) = Plan::of(Server::Wrapped)
        .sessions(short)
        .wrap(wrap)
        .stopped()
        .await;

    clock.advance(IDLE / 10 + TICK).await;

    until_closed(&setup, &mcp).await;
    known_reaches(&setup, 0).await;
    clock.advance(IDLE + TICK).await;
    let other = setup.mcp().await;
    setup.assert_usable(&other).await;
}

/// A proxy may hold the connection of a client that has disconnected.
#[tokio::test]
async fn a_standalone_stream_keeps_its_session_unless_it_is_ignored() {
    let clock = StoppedClock::stop();
    for is_ignored in [false, true] {
        let wrap = move |_| {
            let sessions = CancellableSessionManager::local(SessionConfig::default());
            if is_ignored {
                sessions.ignore_standalone_streams()
            } else {
                sessions
            }
        };
        let setup = Plan::of(Server::Wrapped).wrap(wrap).start().await;
        let (restored, busy) = (setup.mcp().await, setup.mcp().await);
        let mut former = restored.listen().await;
        former.head().await;
        let event = former.event().await.expect("the priming event");
        let mut standalone = restored.resume(&event.id.expect("an event id")).await;
        standalone.head().await;
        let mut listening = busy.listen().await;
        listening.head().await;
        let mut call = setup.start_call(&busy, 1, "hold", "a").await;

        clock.advance(IDLE - TICK).await;
        settle(&setup).await;
        assert!(is_open(&setup, &restored).await);
        clock.advance_past(Duration::from_secs(1)).await;
        settle(&setup).await;

        if is_ignored {
            until_closed(&setup, &restored).await;
            standalone.body_to_end().await;
        } else {
            assert!(is_open(&setup, &restored).await);
        }
        setup.assert_completes("a", &mut call).await;
        assert!(is_open(&setup, &busy).await, "its call was running");
    }
}

/// Streams and requests count without a layer, too, but calls are not known.
#[tokio::test]
async fn sessions_are_closed_without_a_layer_too() {
    let clock = StoppedClock::stop();
    let manager = Arc::new(CancellableSessionManager::local(SessionConfig::default()));
    let witness = Witness::new();
    let sessions = Sessions::Wrapped(manager);
    let router = sessions.router(Tools::new(&witness), Mode::Session.config());
    let served = serve(router).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    let other = Mcp::session(served.addr, PATH).await;
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    witness.started("a").await;
    let open = || async { sessions.local().sessions.read().await.len() };
    assert_eq!(open().await, 2);

    clock.advance(IDLE + TICK).await;

    eventually("the session without a call to be closed", async || {
        open().await == 1
    })
    .await;
    assert_eq!(
        other.notify("notifications/initialized", json!({})).await,
        404
    );
    witness.release("a");
    assert!(call.answer().await.is_some());
}

#[tokio::test]
async fn a_restored_session_has_a_full_idle_timeout() {
    let clock = StoppedClock::stop();
    let (setup, mcp) = default_plan()
        .saving(SavedSessions::default())
        .client()
        .await;
    clock.advance(IDLE + TICK).await;
    until_closed(&setup, &mcp).await;
    known_reaches(&setup, 0).await;

    setup.assert_usable(&mcp).await;

    clock.advance(IDLE - TICK).await;
    settle(&setup).await;
    assert!(is_open(&setup, &mcp).await);
    clock.advance(2 * TICK).await;
    until_closed(&setup, &mcp).await;
}

/// rmcp gives a closed session's handlers 5 s.
///
/// After that it closes the session again, by its id.
#[tokio::test]
async fn the_late_end_of_a_session_does_not_end_the_one_that_was_restored_under_its_id() {
    let clock = StoppedClock::stop();
    let (setup, mcp) = default_plan()
        .grace(Grace::Immediate)
        .saving(SavedSessions::default())
        .client()
        .await;
    setup.start_call(&mcp, 1, "stubborn", "old").await.fin();
    setup.witness.token_fired("old").await;
    setup.events.ended(&mcp, 1).await;
    clock.advance(IDLE + TICK).await;
    until_closed(&setup, &mcp).await;
    known_reaches(&setup, 0).await;
    let mut call = setup.start_call(&mcp, 2, "hold", "new").await;

    clock.advance(DRAIN / 2).await;
    settle(&setup).await;
    clock.advance(DRAIN).await;
    setup.witness.release("old");
    settle(&setup).await;

    setup.assert_usable(&mcp).await;
    assert!(setup.witness.is_running("new"));
    setup.assert_completes("new", &mut call).await;
    assert_eq!(setup.events.ended(&mcp, 2).await, Outcome::Completed);
}

/// In real time, the delay that a client may see after a DELETE.
#[tokio::test]
async fn a_delete_stops_handlers_at_once_where_rmcp_takes_5_seconds() {
    let (ours, bare) = tokio::join!(
        from_delete_to_token(Server::Wrapped),
        from_delete_to_token(Server::Bare)
    );

    println!("from the DELETE to the handler's token: {ours:.1?}, bare rmcp {bare:.1?}");
    assert!(ours < Duration::from_secs(2), "{ours:?}");
    assert!(bare >= DRAIN, "{bare:?}");
}

async fn from_delete_to_token(server: Server) -> Duration {
    let (setup, mcp) = Plan::of(server).grace(Grace::Auto).client().await;
    let _call = setup.start_call(&mcp, 1, "hold", "a").await;
    let before = Instant::now();
    assert_eq!(mcp.delete().await, 202);
    setup.witness.token_fired("a").await - before
}

/// Plans the setup of a user who does not configure anything.
pub(super) fn default_plan() -> Plan {
    let wrap = |_| CancellableSessionManager::local(SessionConfig::default());
    Plan::of(Server::Wrapped).wrap(wrap)
}

/// Starts call 1 and disconnects its client, which may resume.
pub(super) async fn detach(setup: &Setup, mcp: &Mcp) {
    setup.cut(mcp, 1, "a").await;
}

/// Disconnects the client unless it is already disconnected.
async fn disconnect(setup: &Setup, call: &mut Option<Connection>) {
    if let Some(call) = call.take() {
        call.fin();
        setup.exchanges.over_for("older").await;
    }
}

/// Gives the timer time to run, by making a whole exchange in another session.
pub(super) async fn settle(setup: &Setup) {
    let other = setup.mcp().await;
    setup.assert_usable(&other).await;
    assert_eq!(other.delete().await, 202);
}

pub(super) async fn is_open(setup: &Setup, mcp: &Mcp) -> bool {
    let id = mcp.session_id().expect("a session");
    setup
        .sessions
        .local()
        .sessions
        .read()
        .await
        .contains_key(id)
}

pub(super) async fn until_closed(setup: &Setup, mcp: &Mcp) {
    eventually("the session to be closed", async || {
        !is_open(setup, mcp).await
    })
    .await;
}

/// Returns the number of sessions that the wrapper knows.
fn known_sessions(setup: &Setup) -> usize {
    let debug = format!("{:?}", setup.sessions);
    let (_, count) = debug
        .split_once("sessions: ")
        .expect("a number of sessions");
    let count: String = count.chars().take_while(char::is_ascii_digit).collect();
    count.parse().expect("a number")
}

async fn known_reaches(setup: &Setup, count: usize) {
    eventually("the wrapper to know that many sessions", async || {
        known_sessions(setup) == count
    })
    .await;
}

/// Waits without the clock, which is stopped.
pub(super) async fn eventually(what: &str, is_so: impl AsyncFn() -> bool) {
    for _ in 0..1_000_000 {
        if is_so().await {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("waited in vain for {what}");
}
