//! A client that resumes its call, and everything that can happen in the meantime.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse,
};
use http::{Method, StatusCode};
use mcp_cancel_on_disconnect::{Grace, Outcome};

use crate::{
    foreign::Foreign,
    log::number,
    setup::{
        EXCHANGE, EventKind, FIRST_EVENT, GRACE, Gate, Held, ORPHANED, Plan, Server, Setup,
        StoppedClock, TICK, for_servers, stalled,
    },
    support::*,
};

/// How long an unanswered resume keeps a call past its deadline.
const HOLD: Duration = Duration::from_secs(5);

for_servers!(sessions {
    a_resume_is_reported_and_its_stream_carries_the_answer,
    a_resume_that_repeats_its_header_field_is_a_resume,
    a_second_cut_starts_the_grace_in_full,
    the_late_drop_of_a_half_dead_stream_has_no_effect,
    a_resume_before_the_first_stream_is_dropped_is_the_newest_stream,
    a_pending_resume_keeps_the_call_past_its_deadline,
    a_resume_that_is_never_answered_keeps_the_call_no_longer_than_the_maximum,
    a_resume_that_disconnects_unanswered_does_not_extend_the_grace,
    an_aborted_resume_does_not_affect_the_next_pending_one,
    a_client_that_is_asked_to_return_later_has_its_whole_grace_again,
    a_client_that_is_refused_has_only_the_rest_of_its_grace,
    a_resume_in_an_unknown_session_does_not_keep_the_call,
    a_resume_that_does_not_name_a_stream_does_not_keep_the_call,
    one_session_may_resume_many_calls_at_once,
    resumes_that_wait_for_a_stalled_runtime_keep_their_calls,
});

/// A client that adds the field to headers that already have it.
async fn a_resume_that_repeats_its_header_field_is_a_resume(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;

    let resume = mcp.resume_request(FIRST_EVENT);
    let mut resumed = mcp.send(&resume.header("last-event-id", FIRST_EVENT)).await;

    assert_eq!(resumed.head().await.status, 200);
    clock.advance(GRACE * 2).await;
    setup.assert_completes("a", &mut resumed).await;
}

async fn a_resume_is_reported_and_its_stream_carries_the_answer(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE - TICK).await;

    let mut resumed = setup.resume(&mcp, 1, 1).await;

    clock.advance(GRACE * 3).await;
    setup.assert_completes("a", &mut resumed).await;
    assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    let expected = [
        EventKind::Started,
        EventKind::Detached(Some(GRACE)),
        EventKind::Resumed,
        EventKind::Ended(Outcome::Completed),
    ];
    assert_eq!(setup.events.of(&mcp, 1), expected);
    assert!(setup.calls.is_empty());
}

async fn a_second_cut_starts_the_grace_in_full(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE - TICK).await;
    let resumed = setup.resume(&mcp, 1, 1).await;
    clock.advance(GRACE).await;

    resumed.rst();

    let since = setup.events.detached_again(&mcp, 1, 2).await;
    clock.advance(GRACE - TICK).await;
    assert_still_running(&setup, &mcp).await;
    clock.advance(TICK * 2).await;
    let (outcome, ended) = setup.events.end(&mcp, 1).await;
    assert_eq!(outcome, ORPHANED);
    assert!((GRACE..=GRACE + TICK).contains(&(ended - since)));
    assert!(setup.witness.ended("a").await.is_cancelled());
}

/// The client's network has changed.
///
/// The server still holds the old connection when the resume arrives, and only notices much later that it is dead.
async fn the_late_drop_of_a_half_dead_stream_has_no_effect(server: Server) {
    // A stalled exchange keeps the layer from seeing that rmcp has ended the old stream.
    let (clock, setup, mcp) = Plan::with_grace(server).inside(stalled).stopped().await;
    let half_dead = setup.start_call(&mcp, 1, "hold", "a").await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;
    let before = setup.events.of(&mcp, 1);
    assert_eq!(before, [EventKind::Started, EventKind::Resumed]);

    half_dead.rst();

    setup.exchanges.over_for("a").await;
    setup.assert_usable(&mcp).await;
    assert_eq!(setup.events.of(&mcp, 1), before);
    clock.advance(GRACE * 2).await;
    assert_still_running(&setup, &mcp).await;
    setup.assert_completes("a", &mut resumed).await;
}

async fn a_resume_before_the_first_stream_is_dropped_is_the_newest_stream(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    let first = setup.start_primed(&mcp, 1, "hold", "a").await;
    let second = setup.resume(&mcp, 1, 1).await;
    let third = setup.resume(&mcp, 1, 2).await;
    first.fin();
    second.fin();
    clock.advance(GRACE * 2).await;
    assert_still_running(&setup, &mcp).await;
    let detaches = detaches(&setup, &mcp);

    third.fin();

    setup.events.detached_again(&mcp, 1, detaches + 1).await;
    clock.advance(GRACE + TICK).await;
    assert_eq!(setup.events.ended(&mcp, 1).await, ORPHANED);
}

async fn a_pending_resume_keeps_the_call_past_its_deadline(server: Server) {
    let (clock, setup, mcp, mut gate) = with_slow_resumes(server).await;
    clock.advance(GRACE - TICK).await;
    let mut resumed = gate.resume(&mcp, FIRST_EVENT).await;
    // The clock advances in steps, because a deadline that is noticed late is postponed.
    for _ in 0..9 {
        clock.advance(HOLD / 10).await;
        assert_still_running(&setup, &mcp).await;
    }

    gate.open();

    assert_eq!(resumed.head().await.status, 200);
    setup.events.resumed(&mcp, 1, 1).await;
    clock.advance(GRACE * 2).await;
    setup.assert_completes("a", &mut resumed).await;
}

async fn a_resume_that_is_never_answered_keeps_the_call_no_longer_than_the_maximum(server: Server) {
    let (clock, setup, mcp, mut gate) = with_slow_resumes(server).await;
    let (_, since) = setup.events.detached(&mcp, 1).await;
    clock.advance(GRACE / 2).await;
    let _first = gate.resume(&mcp, FIRST_EVENT).await;
    // A second resume neither doubles the wait nor ends it.
    let second = gate.resume(&mcp, FIRST_EVENT).await;
    second.rst();
    clock.advance(GRACE / 2 + HOLD - TICK).await;
    assert_still_running(&setup, &mcp).await;

    clock.advance(TICK * 2).await;

    let (outcome, ended) = setup.events.end(&mcp, 1).await;
    assert_eq!(outcome, ORPHANED);
    let waited = ended - since;
    assert!((GRACE + HOLD..=GRACE + HOLD + TICK).contains(&waited));
}

async fn a_resume_that_disconnects_unanswered_does_not_extend_the_grace(server: Server) {
    let (clock, setup, mcp, mut gate) = with_slow_resumes(server).await;
    clock.advance(GRACE / 2).await;
    let marked = mcp.clone().header(EXCHANGE, "resume");
    let resumed = gate.resume(&marked, FIRST_EVENT).await;
    resumed.rst();
    setup.exchanges.over_for("resume").await;

    clock.advance(GRACE / 2 + TICK).await;

    assert_eq!(setup.events.ended(&mcp, 1).await, ORPHANED);
}

/// The second resume arrives before the deadline, but the first is dropped after it.
async fn an_aborted_resume_does_not_affect_the_next_pending_one(server: Server) {
    let (clock, setup, mcp, mut gate) = with_slow_resumes(server).await;
    clock.advance(GRACE - TICK).await;
    let first = gate
        .resume(&mcp.clone().header(EXCHANGE, "first"), FIRST_EVENT)
        .await;
    let mut second = gate.resume(&mcp, FIRST_EVENT).await;
    clock.advance(HOLD / 2).await;

    first.rst();

    setup.exchanges.over_for("first").await;
    clock.advance(HOLD / 10).await;
    assert_still_running(&setup, &mcp).await;
    gate.open();
    assert_eq!(second.head().await.status, 200);
    setup.events.resumed(&mcp, 1, 1).await;
    clock.advance(GRACE * 2).await;
    setup.assert_completes("a", &mut second).await;
}

/// A layer inside this one sheds load.
async fn a_client_that_is_asked_to_return_later_has_its_whole_grace_again(server: Server) {
    let clock = StoppedClock::stop();
    for status in [408, 429, 500, 503] {
        let (setup, mcp, is_refusing) = refusing_resumes(server, status).await;
        setup.cut(&mcp, 1, "a").await;
        clock.advance(GRACE - TICK).await;
        assert_eq!(mcp.resume(FIRST_EVENT).await.head().await.status, status);
        clock.advance(GRACE - TICK).await;
        is_refusing.store(false, SeqCst);

        let mut resumed = setup.resume(&mcp, 1, 1).await;

        setup.assert_completes("a", &mut resumed).await;
        assert_eq!(setup.events.ended(&mcp, 1).await, Outcome::Completed);
    }
}

async fn a_client_that_is_refused_has_only_the_rest_of_its_grace(server: Server) {
    let clock = StoppedClock::stop();
    for status in [401, 403, 404] {
        let (setup, mcp, _) = refusing_resumes(server, status).await;
        setup.cut(&mcp, 1, "a").await;
        clock.advance(GRACE / 2).await;
        assert_eq!(mcp.resume(FIRST_EVENT).await.head().await.status, status);
        assert_orphaned_after_half_a_grace(&setup, &mcp, &clock).await;
    }
}

async fn a_resume_in_an_unknown_session_does_not_keep_the_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE / 2).await;
    let other_client =
        Mcp::stateless(setup.served.addr, PATH).header("mcp-session-id", "no such one");

    let refused = other_client.resume(FIRST_EVENT).await.head().await;

    assert_eq!(refused.status, 404);
    assert_orphaned_after_half_a_grace(&setup, &mcp, &clock).await;
}

async fn a_resume_that_does_not_name_a_stream_does_not_keep_the_call(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    clock.advance(GRACE / 2).await;

    for unknown in ["0/7", "7", "garbage", "0/0/0"] {
        // rmcp refuses the resume with an empty stream.
        let mut refused = mcp.resume(unknown).await;
        assert_eq!(refused.head().await.status, 200);
    }

    assert_eq!(detaches(&setup, &mcp), 1);
    assert_orphaned_after_half_a_grace(&setup, &mcp, &clock).await;
}

async fn one_session_may_resume_many_calls_at_once(server: Server) {
    const MANY: u64 = 20;
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    for id in 0..MANY {
        setup.cut(&mcp, id, &format!("a{id}")).await;
    }
    clock.advance(GRACE - TICK).await;
    let mut resumed = Vec::new();
    for id in (0..MANY).step_by(2) {
        resumed.push((id, mcp.resume(&format!("0/{id}")).await));
    }
    for (id, connection) in &mut resumed {
        connection.head().await;
        setup.events.resumed(&mcp, *id, 1).await;
    }

    clock.advance(TICK * 2).await;

    for id in (1..MANY).step_by(2) {
        assert_eq!(setup.events.ended(&mcp, id).await, ORPHANED);
    }
    assert_eq!(setup.calls.len(), resumed.len());
    for (id, connection) in &mut resumed {
        setup.assert_completes(&format!("a{id}"), connection).await;
        assert_eq!(setup.events.ended(&mcp, *id).await, Outcome::Completed);
    }
    assert!(setup.calls.is_empty());
}

/// The runtime stalls for 12 s, during which the deadline passes.
///
/// It then serves the timer before the resumes that are waiting in the accept queue.
/// [`crate::composition::stalled_runtime`] does the same in real time.
async fn resumes_that_wait_for_a_stalled_runtime_keep_their_calls(server: Server) {
    let (clock, setup, mcp) = Plan::with_grace(server).stopped().await;
    for id in [1, 2] {
        setup.cut(&mcp, id, &format!("a{id}")).await;
    }
    clock.advance(GRACE - TICK).await;

    clock.jump(Duration::from_secs(12)).await;
    let mut resumed = setup.resume(&mcp, 1, 1).await;

    clock.advance(Duration::from_secs(1)).await;
    assert!(
        setup.witness.is_running("a2"),
        "the other call gets the same time"
    );
    setup.assert_completes("a1", &mut resumed).await;
    // Twice the retry of 3 s, counted from when the runtime is running again.
    clock.advance(Duration::from_secs(5) + TICK).await;
    assert_eq!(setup.events.ended(&mcp, 2).await, ORPHANED);
}

/// Starts a server that answers each GET with `status` while the returned flag is set.
async fn refusing_resumes(server: Server, status: u16) -> (Setup, Mcp, Arc<AtomicBool>) {
    let is_refusing = Arc::new(AtomicBool::new(true));
    let refuses = is_refusing.clone();
    let refuse = move |request: Request, next: Next| {
        let refuses = request.method() == Method::GET && refuses.load(SeqCst);
        async move {
            if refuses {
                StatusCode::from_u16(status).unwrap().into_response()
            } else {
                next.run(request).await
            }
        }
    };
    let wrap = move |router: Router| router.layer(from_fn(refuse));
    let (setup, mcp) = Plan::with_grace(server).inside(wrap).client().await;
    (setup, mcp, is_refusing)
}

/// Returns how often call 1 has been detached.
fn detaches(setup: &Setup, mcp: &Mcp) -> usize {
    let events = setup.events.of(mcp, 1);
    let detached = events
        .iter()
        .filter(|w| matches!(w, EventKind::Detached(_)));
    detached.count()
}

async fn assert_still_running(setup: &Setup, mcp: &Mcp) {
    setup.assert_usable(mcp).await;
    assert!(setup.witness.is_running("a"));
    assert!(!setup.tokens.of("a").is_cancelled());
}

async fn assert_orphaned_after_half_a_grace(setup: &Setup, mcp: &Mcp, clock: &StoppedClock) {
    assert_still_running(setup, mcp).await;
    clock.advance(GRACE / 2 + TICK).await;
    assert_eq!(setup.events.ended(mcp, 1).await, ORPHANED);
    assert!(setup.witness.ended("a").await.is_cancelled());
}

async fn with_slow_resumes(server: Server) -> (StoppedClock, Setup, Mcp, Gate) {
    let (gate, slow) = Gate::new(Held::Request, |request| request.method() == Method::GET);
    let (clock, setup, mcp) = Plan::with_grace(server).inside(slow).stopped().await;
    setup.cut(&mcp, 1, "a").await;
    (clock, setup, mcp, gate)
}

/// A header value cannot begin or end with white space.
///
/// `fetch` sends one byte per character.
#[tokio::test(start_paused = true)]
async fn a_client_resumes_with_an_event_id_that_a_header_cannot_carry_unchanged() {
    let cases: [(&str, &[u8]); 4] = [
        ("5", b"5"),
        ("5 ", b"5"),
        (" 5", b"5"),
        ("caf\u{e9}", b"caf\xe9"),
    ];
    for (id, sent) in cases {
        let foreign = Foreign::with(Grace::After(GRACE));
        let mut stream = foreign.call(7).await;
        foreign.send_event(&format!("id: {id}\ndata:\n\n"));
        Foreign::frame(&mut stream).await;
        drop(stream);

        let _resumed = foreign.resume(sent).await;
        tokio::time::sleep(GRACE + HOLD).await;

        assert_eq!(foreign.log.ends(&number(7)), [], "{id:?}");
    }
}
