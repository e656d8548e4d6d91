use super::{
    call_timers::{MAX_EMPTY_RESUMES, MAX_RESUME_WAIT},
    event_ids::MAX_EVENT_IDS,
    model::{assert_empty, scope_of, session_id, unobserved},
    *,
};
use crate::{
    call::{CancelReason, DetachCause, Outcome, RequestId},
    limits::Limits,
    timer::{LatenessTracker, RECHECK_DELAY, RECHECK_TOLERANCE, STALL_THRESHOLD, Timeliness},
};

type TestSession = SessionState<&'static str, &'static str>;

const SECOND: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_secs(3);

const UNTIL_COMPLETE: DetachedState = DetachedState::UntilComplete {
    resume_window: Duration::ZERO,
};

/// Returns the state of a session that has no calls.
fn session() -> TestSession {
    session_with_limits(Limits::default())
}

fn session_with_limits(limits: Limits) -> TestSession {
    let shared = Arc::new(RegistryShared::default());
    shared.totals.set_limits(limits);
    SessionState::new(shared.clone(), Some(session_id(&shared)))
}

fn here() -> Scope {
    scope_of(0)
}

fn request(id: i64) -> Option<(Scope, RequestId)> {
    Some((here(), RequestId::Number(id)))
}

/// Starts and accepts a call, like an exchange does.
fn accepted(
    session: &mut TestSession,
    key: Option<(Scope, RequestId)>,
    call: &'static str,
) -> CallId {
    accepted_until(session, key, call, None)
}

/// Starts and accepts a call with a deadline.
fn accepted_until(
    session: &mut TestSession,
    key: Option<(Scope, RequestId)>,
    call: &'static str,
    deadline: Option<Instant>,
) -> CallId {
    let id = CallId::next();
    session.start(id, key, call, deadline);
    session.accept(id);
    id
}

fn grace_until(deadline: Instant) -> DetachedState {
    DetachedState::GraceUntil {
        deadline,
        retry: RETRY,
    }
}

fn detachment(at: Instant) -> Detachment {
    Detachment::new(DetachCause::Disconnected, at)
}

/// Detaches the first stream of a call at `now`, with its deadline a second later.
fn detach(session: &mut TestSession, id: CallId, now: Instant) -> DetachOutcome {
    session.detach(
        id,
        POST_GENERATION,
        grace_until(now + SECOND),
        false,
        detachment(now),
    )
}

/// Returns a session with an accepted call, and the current time.
fn session_with_call(call: &'static str) -> (TestSession, CallId, Instant) {
    let mut session = session();
    let id = accepted(&mut session, request(1), call);
    (session, id, Instant::now())
}

/// Returns a session with a detached call, and the time of the detach.
fn session_with_detached_call(call: &'static str) -> (TestSession, CallId, Instant) {
    let (mut session, id, now) = session_with_call(call);
    detach(&mut session, id, now);
    (session, id, now)
}

fn answered(answer: &'static str, until: Instant) -> Option<Completion<&'static str>> {
    Some(Completion {
        outcome: RetainedOutcome::Answered(answer),
        weight: answer.len(),
        at: until - SECOND,
        until,
    })
}

#[test]
fn invariant_1_a_call_that_was_not_accepted_never_takes_a_key() {
    let mut session = session();
    let victim = accepted(&mut session, request(7), "victim");
    let other = CallId::next();
    session.start(other, request(7), "other", None);

    assert!(!session.finish(other, None).unwrap().may_cancel_server);
    assert_eq!(
        session.find(&here(), &RequestId::Number(7)),
        Some((victim, "victim"))
    );
    assert!(session.finish(victim, None).unwrap().may_cancel_server);
    assert_empty(&session);
}

#[test]
fn invariant_2_a_call_ends_once() {
    let now = Instant::now();
    let mut session = session();
    let id = accepted(&mut session, request(7), "call");
    assert!(session.finish(id, None).is_some());
    assert!(session.finish(id, None).is_none());
    assert_eq!(detach(&mut session, id, now), DetachOutcome::Ignored);
    assert_eq!(session.attach(id), None);
    assert!(!session.begin_resume(id, now));
    assert_empty(&session);
}

#[test]
fn invariant_2_a_call_without_a_key_is_never_injected() {
    let mut session = session();
    let id = accepted(&mut session, None, "stateless");
    assert!(!session.finish(id, None).unwrap().may_cancel_server);
    assert_empty(&session);
}

#[test]
fn invariant_3_a_deadline_ends_attached_and_detached_calls() {
    let (mut session, now) = (session(), Instant::now());
    let deadline = Some(now + SECOND);
    let attached = accepted_until(&mut session, request(1), "attached", deadline);
    let detached = accepted_until(&mut session, request(2), "detached", deadline);
    session.detach(
        detached,
        POST_GENERATION,
        grace_until(now + 9 * SECOND),
        false,
        detachment(now),
    );
    assert_eq!(session.next_deadline(), deadline);
    assert!(session.expire(now).is_empty());
    let mut expired = session.expire(now + SECOND);
    expired.sort_by_key(|(id, ..)| *id);
    assert_eq!(
        expired,
        [
            (attached, "attached", Expired::Deadline),
            (detached, "detached", Expired::Deadline),
        ]
    );
}

#[test]
fn a_call_resumed_within_its_grace_keeps_its_deadline() {
    let (mut session, now) = (session(), Instant::now());
    let id = accepted_until(&mut session, request(1), "call", Some(now + 9 * SECOND));
    session.detach(
        id,
        POST_GENERATION,
        grace_until(now + SECOND),
        false,
        detachment(now),
    );
    assert_eq!(session.expire(now + SECOND), [(id, "call", Expired::Grace)]);
    session.attach(id);
    assert_eq!(
        session.expire(now + 9 * SECOND),
        [(id, "call", Expired::Deadline)]
    );
}

#[test]
fn invariant_3_a_deadline_of_now_is_due_at_once() {
    let (mut session, id, now) = session_with_call("call");
    assert_eq!(
        session.detach(
            id,
            POST_GENERATION,
            grace_until(now),
            false,
            detachment(now)
        ),
        DetachOutcome::CancelNow
    );
    session.finish(id, None);
    assert_empty(&session);
}

#[test]
fn invariant_4_dropping_an_older_stream_late_has_no_effect() {
    let (mut session, id, now) = session_with_call("call");
    let second = session.attach(id).unwrap();
    assert_eq!(detach(&mut session, id, now), DetachOutcome::Ignored);
    assert!(!session.is_detached(id));

    let third = session.attach(id).unwrap();
    assert!(second < third);
    assert_eq!(
        session.detach(id, second, grace_until(now), false, detachment(now)),
        DetachOutcome::Ignored
    );
    assert_eq!(
        session.detach(id, third, grace_until(now + SECOND), false, detachment(now)),
        DetachOutcome::Waiting
    );
    assert!(session.is_detached(id));
}

#[test]
fn invariant_6_a_confirmation_counts_only_for_its_own_expiry() {
    let (mut session, id, now) = session_with_detached_call("call");
    assert_eq!(session.expiry(id), None, "its grace has not expired");
    session.expire(now + SECOND);
    let due = session.expiry(id).unwrap();
    // The client resumes and disconnects again, and the new grace period expires as well.
    let second = session.attach(id).unwrap();
    let later = now + 2 * SECOND;
    session.detach(
        id,
        second,
        grace_until(later),
        false,
        detachment(now + SECOND),
    );
    assert_eq!(session.expire(later), [(id, "call", Expired::Grace)]);
    assert!(
        !session.confirm(id, due, later),
        "it was for another expiry"
    );
    assert!(!session.postpone(id, due, later + SECOND));

    let due = session.expiry(id).unwrap();
    assert!(session.postpone(id, due, later + SECOND));
    assert_eq!(session.expiry(id), None);
    assert_eq!(session.expire(later + SECOND / 2), []);
    assert_eq!(
        session.expire(later + SECOND),
        [(id, "call", Expired::Grace)]
    );
    let due = session.expiry(id).unwrap();
    assert!(session.confirm(id, due, later + SECOND));
    let ended = answered("", now).unwrap();
    assert_eq!(
        session.finish_due(id, ended),
        None,
        "the call is checked once more"
    );
    let recheck = later + SECOND + RECHECK_DELAY;
    assert_eq!(
        session.expire(recheck),
        [(id, "call", Expired::GraceConfirmed)]
    );
    assert!(session.finish_due(id, answered("", now).unwrap()).is_some());
}

#[test]
fn invariant_7_a_stall_during_a_confirmation_postpones_the_call() {
    let (mut session, id, now) = session_with_detached_call("call");
    session.expire(now + SECOND);
    let due = session.expiry(id).unwrap();
    assert!(session.confirm(id, due, now + SECOND));
    // The client's resume is waiting in the accept queue.
    let resumed_at = now + 60 * SECOND;
    assert_eq!(session.expire(resumed_at), []);
    assert!(session.begin_resume(id, resumed_at));
    session.end_resume(id, resumed_at);
    let expired = session.expire(resumed_at + 2 * RETRY);
    assert_eq!(
        expired,
        [(id, "call", Expired::Grace)],
        "the confirmation is requested again"
    );
}

/// A confirmation from before a stall may be outdated, for example if a lease has expired.
#[test]
fn invariant_7_a_confirmation_from_before_a_stall_is_requested_again() {
    let (mut session, id, now) = session_with_detached_call("call");
    session.expire(now + SECOND);
    let due = session.expiry(id).unwrap();
    assert!(session.confirm(id, due, now + SECOND));
    let resumed_at = now + 60 * SECOND;
    assert_eq!(session.expire(resumed_at), []);
    let expired = session.expire(resumed_at + MAX_RESUME_WAIT.max(2 * RETRY));
    assert_eq!(expired, [(id, "call", Expired::Grace)]);
}

#[test]
fn invariant_5_a_pending_resume_defers_the_expiry_but_not_indefinitely() {
    let (mut session, id, now) = session_with_detached_call("call");
    assert!(session.begin_resume(id, now) && session.begin_resume(id, now));

    assert!(
        session
            .expire(now + SECOND + MAX_RESUME_WAIT - SECOND / 10)
            .is_empty()
    );
    assert_eq!(session.expire(now + SECOND + MAX_RESUME_WAIT).len(), 1);
}

#[test]
fn invariant_5_a_late_refusal_does_not_end_a_later_resume() {
    let (mut session, id, now) = session_with_detached_call("call");
    session.begin_resume(id, now);
    let second = session.attach(id).unwrap();
    session.detach(
        id,
        second,
        grace_until(now + SECOND),
        false,
        detachment(now),
    );
    session.begin_resume(id, now);

    session.end_resume(id, now);

    assert!(
        session.expire(now + SECOND).is_empty(),
        "the third resume is pending"
    );
}

#[test]
fn invariant_6_every_detach_starts_a_full_grace() {
    let (mut session, id, start) = session_with_call("polled");
    let mut generation = POST_GENERATION;
    for poll in 0..100 {
        let now = start + poll * SECOND;
        let deadline = grace_until(now + 2 * SECOND);
        assert_eq!(
            session.detach(id, generation, deadline, false, detachment(now)),
            DetachOutcome::Waiting
        );
        assert_eq!(session.next_deadline(), Some(now + 2 * SECOND));
        generation = session.attach(id).unwrap();
    }
}

#[test]
fn invariant_6_empty_resumes_renew_the_grace_a_few_times_only() {
    let (mut session, id, start) = session_with_detached_call("polled without events");
    let mut renewals = 0;
    loop {
        let now = start + (renewals + 1) * SECOND;
        let generation = session.attach(id).unwrap();
        match session.detach(
            id,
            generation,
            grace_until(now + SECOND),
            true,
            detachment(now),
        ) {
            DetachOutcome::Waiting => renewals += 1,
            _ => break,
        }
    }
    assert_eq!(renewals, MAX_EMPTY_RESUMES);
}

#[test]
fn invariant_6_resumes_that_are_turned_away_renew_the_grace_a_few_times_only() {
    let (mut session, id, mut now) = session_with_detached_call("call");
    for _ in 0..MAX_EMPTY_RESUMES {
        now += SECOND - Duration::from_millis(1);
        assert_eq!(session.expire(now), []);
        session.begin_resume(id, now);
        session.renew_grace(id, now);
        session.end_resume(id, now);
        assert_eq!(session.next_deadline(), Some(now + SECOND));
    }
    session.begin_resume(id, now);
    session.renew_grace(id, now + SECOND / 2);
    session.end_resume(id, now + SECOND / 2);
    assert_eq!(session.next_deadline(), Some(now + SECOND));
    assert_eq!(session.expire(now + SECOND), [(id, "call", Expired::Grace)]);
}

/// Lets the next deadline expire, `late` after it is due.
fn expire_next(session: &mut TestSession, late: Duration) -> Vec<(CallId, &'static str, Expired)> {
    let at = session.next_deadline().unwrap();
    session.expire(at + late)
}

#[test]
fn invariant_7_a_stalled_runtime_postpones_a_deadline_once() {
    let (mut session, id, now) = session_with_detached_call("call");
    let handled_at = now + SECOND + 12 * SECOND;
    assert!(session.expire(handled_at).is_empty());
    assert_eq!(session.next_deadline(), Some(handled_at + 2 * RETRY));
    let recheck = handled_at + 60 * SECOND;
    assert!(session.expire(recheck).is_empty());
    assert_eq!(
        session.next_deadline(),
        Some(recheck + RECHECK_DELAY),
        "the second extension is only a recheck"
    );
    assert_eq!(
        expire_next(&mut session, Duration::ZERO),
        [(id, "call", Expired::Grace)]
    );
}

#[test]
fn invariant_7_a_deadline_that_another_runtime_handles_is_postponed_once() {
    let (mut session, id, now) = session_with_detached_call("call");
    let handled_at = now + SECOND;
    assert!(
        session
            .expire_some(&LatenessTracker::new(handled_at, Timeliness::Late), 9)
            .is_empty()
    );
    let postponed = handled_at + 2 * RETRY;
    assert_eq!(session.next_deadline(), Some(postponed));
    assert!(
        session
            .expire_some(&LatenessTracker::new(postponed, Timeliness::Late), 9)
            .is_empty()
    );
    assert_eq!(
        session.next_deadline(),
        Some(postponed + RECHECK_DELAY),
        "the second extension is only a recheck"
    );
    let expired = expire_next(&mut session, Duration::ZERO);
    assert_eq!(expired, [(id, "call", Expired::Grace)]);
}

#[test]
fn invariant_7_a_deadline_behind_a_backlog_of_the_timer_task_is_not_late() {
    let now = Instant::now();
    let mut session = session();
    let ids: Vec<_> = (0..8)
        .map(|n| accepted(&mut session, request(n), "call"))
        .collect();
    for (id, n) in ids.iter().zip(0..) {
        detach(&mut session, *id, now + n * SECOND / 1_000);
    }
    let mut tracker = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    let turn = |n: u32| now + SECOND + n * SECOND / 100;
    for n in 1..=20 {
        tracker.next_turn(turn(n));
    }
    for (id, n) in ids.iter().zip(21..) {
        tracker.next_turn(turn(n));
        let expired = session.expire_some(&tracker, 1);
        assert_eq!(expired, [(*id, "call", Expired::Grace)]);
    }
}

#[test]
fn invariant_7_a_deadline_between_two_turns_that_runs_a_little_late_is_checked_again() {
    let (mut session, id, now) = session_with_call("call");
    detach(&mut session, id, now + SECOND / 1_000);
    let mut tracker = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    tracker.next_turn(now + SECOND + SECOND / 100);
    tracker.next_turn(now + SECOND + SECOND / 50);
    assert_eq!(session.expire_some(&tracker, 9), []);
    assert_eq!(session.next_deadline(), Some(tracker.now() + RECHECK_DELAY));
    let expired = expire_next(&mut session, Duration::ZERO);
    assert_eq!(expired, [(id, "call", Expired::Grace)]);
}

#[test]
fn invariant_7_a_deadline_during_a_stall_between_two_turns_is_late() {
    let now = Instant::now();
    let mut session = session();
    let ids = [1, 2].map(|n| accepted(&mut session, request(n), "call"));
    detach(&mut session, ids[0], now);
    detach(&mut session, ids[1], now + SECOND);
    let mut tracker = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    tracker.next_turn(now + SECOND + SECOND / 100);
    tracker.next_turn(now + 12 * SECOND);
    tracker.next_turn(now + 12 * SECOND + SECOND / 100);
    let expired = session.expire_some(&tracker, 9);
    assert_eq!(expired, [(ids[0], "call", Expired::Grace)]);
    assert_eq!(session.next_deadline(), Some(tracker.now() + 2 * RETRY));
}

#[test]
fn invariant_7_a_postponed_call_is_not_cancelled_by_the_next_empty_resume() {
    for (late, postponed) in [(2 * SECOND, 2 * RETRY), (SECOND / 2, RECHECK_DELAY)] {
        let mut now = Instant::now();
        let mut session = session();
        let id = accepted(&mut session, request(1), "polled without events");
        detach(&mut session, id, now);
        for _ in 0..MAX_EMPTY_RESUMES {
            let generation = session.attach(id).unwrap();
            now += SECOND / 2;
            session.detach(
                id,
                generation,
                grace_until(now + SECOND),
                true,
                detachment(now),
            );
        }
        now += SECOND + late;
        assert!(session.expire(now).is_empty(), "the runtime was stalled");
        let postponed = now + postponed;

        let generation = session.attach(id).unwrap();
        now += RECHECK_DELAY / 2;
        let detached = session.detach(
            id,
            generation,
            grace_until(now + 60 * SECOND),
            true,
            detachment(now),
        );
        assert_eq!(detached, DetachOutcome::Waiting);
        assert_eq!(
            session.next_deadline(),
            Some(postponed),
            "the empty resume renewed the grace"
        );
    }
}

#[test]
fn invariant_7_a_resume_refused_in_the_meantime_does_not_shorten_the_recheck_delay() {
    let now = Instant::now();
    let handled_at = now + SECOND + 3 * SECOND / 10;
    let refused = handled_at + RECHECK_DELAY / 2;
    for handled_by in ["the timer", "the resume"] {
        let mut session = session();
        let id = accepted(&mut session, request(1), "call");
        detach(&mut session, id, now);
        if handled_by == "the timer" {
            assert!(session.expire(handled_at).is_empty());
        }
        session.begin_resume(id, handled_at);
        session.end_resume(id, refused);
        let next = session.next_deadline();
        assert_eq!(next, Some(handled_at + RECHECK_DELAY), "{handled_by}");
        assert_eq!(expire_next(&mut session, RECHECK_TOLERANCE).len(), 1);
    }
}

#[test]
fn invariant_7_a_resume_from_the_accept_queue_does_not_hide_a_late_deadline() {
    let (mut session, id, now) = session_with_detached_call("call");
    let handled_at = now + SECOND + MAX_RESUME_WAIT + STALL_THRESHOLD / 2;
    assert!(session.begin_resume(id, handled_at));
    assert!(session.expire(handled_at).is_empty());
    session.end_resume(id, handled_at);
    assert_eq!(session.next_deadline(), Some(handled_at + 2 * RETRY));
    assert_eq!(expire_next(&mut session, Duration::ZERO).len(), 1, "once");
}

#[test]
fn invariant_8_ids_in_rmcps_format_are_opaque_if_another_server_may_have_issued_them() {
    for ids in [
        // A counter and a constant, a stream and its counter, and counters that continue across calls.
        [["1/7", "2/7"], ["3/7", "4/7"]],
        [["1/0", "1/1"], ["2/0", "2/1"]],
        [["0/0", "1/0"], ["2/1", "3/1"]],
        [["9/7", "5/7"], ["1/7", "6/7"]],
    ] {
        let mut session = session();
        let calls = [1, 2].map(|id| accepted(&mut session, request(id), "call"));
        for nth in [0, 1] {
            for (id, event_ids) in calls.iter().zip(ids) {
                session.record_event_id(*id, event_ids[nth].as_bytes(), EventIdFormat::Other);
            }
        }
        for (id, event_ids) in calls.iter().zip(ids) {
            for event_id in event_ids {
                let matched = session.match_event(&here(), event_id.as_bytes());
                assert_eq!(
                    matched,
                    EventMatch::Call(*id, "call"),
                    "{event_id} of {ids:?}"
                );
            }
        }
        assert_eq!(session.match_event(&here(), b"99/7"), EventMatch::Nothing);
        for id in calls {
            session.finish(id, None);
        }
        assert_empty(&session);
    }
}

#[test]
fn invariant_8_the_first_and_the_latest_opaque_ids_are_known() {
    let mut session = session();
    let id = accepted(&mut session, request(1), "call");
    let event = |n: usize| format!("event-{n}").into_bytes();
    for n in 0..3 * MAX_EVENT_IDS {
        session.record_event_id(id, &event(n), EventIdFormat::Rmcp);
    }
    for n in [0, 2 * MAX_EVENT_IDS, 3 * MAX_EVENT_IDS - 1] {
        assert_eq!(
            session.match_event(&here(), &event(n)),
            EventMatch::Call(id, "call"),
            "{n}"
        );
    }
    for n in [1, 2 * MAX_EVENT_IDS - 1] {
        let removed = session.match_event(&here(), &event(n));
        assert_eq!(removed, EventMatch::Ambiguous(vec![(id, "call")]));
    }
    let others = (0..1_000).map(|n| format!("other-{n}").into_bytes());
    let mistaken =
        others.filter(|other| session.match_event(&here(), other) != EventMatch::Nothing);
    // At 512 ids, about one in 70,000 is mistaken for one of them.
    assert!(mistaken.count() < 3);
    session.finish(id, None);
    assert_empty(&session);
}

#[test]
fn invariant_8_a_call_whose_stream_cannot_be_read_may_match_any_unknown_id() {
    let mut session = session();
    let known = accepted(&mut session, request(1), "known");
    session.record_event_id(known, b"0/1", EventIdFormat::Rmcp);
    let unreadable = accepted(&mut session, request(2), "unreadable");
    session.mark_event_ids_incomplete(unreadable);
    assert_eq!(
        session.match_event(&here(), b"0/1"),
        EventMatch::Call(known, "known")
    );
    for unknown in [&b"0/2"[..], b"7", b"opaque"] {
        assert_eq!(
            session.match_event(&here(), unknown),
            EventMatch::Ambiguous(vec![(unreadable, "unreadable")])
        );
    }
}

#[test]
fn invariant_9_a_reused_id_untracks_the_older_call_and_does_not_cancel_it() {
    let now = Instant::now();
    let mut session = session();
    let older = accepted(&mut session, request(7), "older");
    session.record_event_id(older, b"0/0", EventIdFormat::Rmcp);
    detach(&mut session, older, now);
    let newer = CallId::next();
    session.start(newer, request(7), "newer", None);

    let untracked = Finished {
        may_cancel_server: false,
        detachment: Some(detachment(now)),
        has_evicted: false,
    };
    assert_eq!(session.accept(newer), Some((older, "older", untracked)));
    assert_eq!(session.match_event(&here(), b"0/0"), EventMatch::Nothing);
    assert!(session.expire(now + UNOBSERVED_TTL).is_empty());
    assert!(session.finish(older, None).is_none());
    assert!(session.finish(newer, None).unwrap().may_cancel_server);
    assert_empty(&session);
}

#[test]
fn invariant_11_an_ended_call_is_retained_under_its_streams() {
    let now = Instant::now();
    let mut session = session();
    let id = accepted(&mut session, request(7), "call");
    session.record_event_id(id, b"0/0", EventIdFormat::Rmcp);
    session.finish(id, answered("42", now + SECOND));

    for _ in 0..3 {
        let matched = session.match_event(&here(), b"1/0");
        assert_eq!(matched, EventMatch::Ended(RetainedOutcome::Answered("42")));
    }
    assert_eq!(session.len(), 0);
    session.expire(now + SECOND);
    assert_eq!(session.match_event(&here(), b"1/0"), EventMatch::Nothing);
    assert_empty(&session);
}

/// Simulates two keys with the same 64-bit hash, which no client can bring about.
#[test]
fn a_full_collision_of_two_keys_finds_nothing_and_affects_neither_call() {
    let now = Instant::now();
    let mut session = session();
    let victim = accepted(&mut session, request(7), "victim");
    session.record_event_id(victim, b"0/0", EventIdFormat::Rmcp);
    detach(&mut session, victim, now);
    accepted(&mut session, request(1), "other");
    let hasher = &session.shared.hasher;
    let slot = session.session(&here()).unwrap();
    let colliding = hasher.request(slot, &RequestId::Number(9));
    session.by_request.insert(colliding, victim);

    let request = request(9);
    assert!(session.find(&here(), &RequestId::Number(9)).is_none());
    let call = CallId::next();
    session.start(call, request, "other", None);
    assert!(
        session.accept(call).is_none(),
        "the victim is still tracked"
    );
    session.record_event_id(call, b"0/5", EventIdFormat::Rmcp);
    assert!(session.finish(call, None).unwrap().may_cancel_server);
    assert_untouched(&session, victim);
}

/// Asserts that the call can be found and that its client can resume.
fn assert_untouched(session: &TestSession, victim: CallId) {
    assert_eq!(
        session.match_event(&here(), b"0/0"),
        EventMatch::Call(victim, "victim")
    );
    let found = session.find(&here(), &RequestId::Number(7));
    assert_eq!(found, Some((victim, "victim")));
    assert!(session.is_detached(victim));
}

/// Ends a call with an answer of `weight` bytes, on a stream of its own.
fn end_with(
    session: &mut TestSession,
    now: Instant,
    stream: i64,
    is_detached: bool,
    weight: usize,
) -> CallId {
    let id = accepted(session, request(stream), "call");
    session.record_event_id(id, format!("0/{stream}").as_bytes(), EventIdFormat::Rmcp);
    if is_detached {
        detach(session, id, now);
    }
    let ended = Completion {
        weight,
        ..answered("42", now + SECOND).unwrap()
    };
    session.finish(id, Some(ended));
    id
}

fn is_retained(session: &TestSession, stream: i64) -> bool {
    session.match_event(&here(), format!("0/{stream}").as_bytes()) != EventMatch::Nothing
}

#[test]
fn invariant_11_an_answer_that_is_too_large_is_not_retained_and_evicts_none() {
    let now = Instant::now();
    let mut session = session();
    end_with(&mut session, now, 1, true, 2);
    end_with(&mut session, now, 2, false, 2);
    for is_detached in [false, true] {
        let large = end_with(&mut session, now, 3, is_detached, usize::MAX / 2);
        assert!(!is_retained(&session, 3));
        let evicted: Vec<_> = session
            .take_evicted()
            .iter()
            .map(|evicted| evicted.call)
            .collect();
        assert_eq!(evicted.contains(&large), is_detached);
    }
    assert!(is_retained(&session, 1) && is_retained(&session, 2));
    session.expire(now + SECOND);
    assert_empty(&session);
}

#[test]
fn invariant_11_no_delivered_answer_is_retained_in_place_of_an_undelivered_one() {
    let now = Instant::now();
    let mut session = session_with_limits(Limits::default().retained_per_session(4_332));
    end_with(&mut session, now, 0, true, 488);
    for stream in 1..9 {
        end_with(&mut session, now, stream, false, 488);
    }
    assert!(is_retained(&session, 0), "the oldest of its session");
    assert_eq!(
        [7, 8].map(|stream| is_retained(&session, stream)),
        [true, true]
    );
    end_with(&mut session, now, 9, false, 2_600);
    assert!(
        !is_retained(&session, 9),
        "the answer would not fit beside undelivered ones"
    );
    assert!(is_retained(&session, 8), "so nothing was evicted for it");
    assert!(
        session.take_evicted().is_empty(),
        "evicted delivered answers are not reported"
    );
    session.expire(now + SECOND);
    assert_empty(&session);
}

#[test]
fn invariant_11_the_latest_64_delivered_answers_are_retained() {
    let now = Instant::now();
    let mut session = session();
    end_with(&mut session, now, 100, true, 2);
    for stream in 0..66 {
        end_with(&mut session, now, stream, false, 2);
    }
    let are_retained = [0, 1, 2, 65, 100].map(|stream| is_retained(&session, stream));
    assert_eq!(are_retained, [false, false, true, true, true]);
    assert!(session.take_evicted().is_empty());
    session.expire(now + SECOND);
    assert_empty(&session);
}

fn sessions<const N: usize>(retained: usize) -> [TestSession; N] {
    let shared = Arc::new(RegistryShared::default());
    shared
        .totals
        .set_limits(Limits::default().retained(retained));
    [(); N].map(|()| TestSession::new(shared.clone(), Some(session_id(&shared))))
}

#[test]
fn invariant_11_delivered_answers_of_all_sessions_deny_retention_to_no_undelivered_one() {
    let now = Instant::now();
    let mut sessions = sessions::<40>(40_000);
    for session in &mut sessions[1..] {
        end_with(session, now, 0, false, 488);
    }
    assert!(
        !is_retained(&sessions[39], 0),
        "delivered answers have reached their limit"
    );
    let totals = &sessions[0].shared.totals;
    let delivered = totals.bytes_in(DeliveryState::Delivered);
    assert!((5_000..=10_000).contains(&delivered), "{delivered}");

    for stream in 0..8 {
        end_with(&mut sessions[0], now, stream, true, 488);
    }
    assert!((0..8).all(|stream| is_retained(&sessions[0], stream)));
    assert!(sessions[0].take_evicted().is_empty());
}

#[test]
fn invariant_11_a_session_retains_no_more_than_remains_for_all_others() {
    let now = Instant::now();
    let [mut greedy, mut modest] = sessions(40_000);
    for stream in 0..30 {
        end_with(&mut greedy, now, stream, true, 1_488);
    }
    let bytes = greedy.shared.totals.bytes_in(DeliveryState::Undelivered);
    assert!((12_000..=15_000).contains(&bytes), "{bytes}");
    assert!(is_retained(&greedy, 29), "the latest answer was evicted");
    assert!(!is_retained(&greedy, 0) && !greedy.take_evicted().is_empty());

    end_with(&mut modest, now, 0, true, 4_000);
    assert!(is_retained(&modest, 0));
    end_with(&mut modest, now, 1, true, 8_000);
    assert!(
        !is_retained(&modest, 1) && is_retained(&modest, 0),
        "an answer that does not fit evicts none"
    );
    assert_eq!(modest.take_evicted().len(), 1);
}

#[test]
fn invariant_11_an_evicted_undelivered_answer_is_reported_once() {
    let now = Instant::now();
    let mut session = session_with_limits(Limits::default().retained_per_session(3_000));
    let answer = end_with(&mut session, now, 0, true, 488);
    let cancelled = accepted(&mut session, request(1), "call");
    session.record_event_id(cancelled, b"0/1", EventIdFormat::Rmcp);
    let ended = Completion {
        outcome: RetainedOutcome::Cancelled(RequestId::Number(1), CancelReason::Orphaned),
        weight: 0,
        at: now,
        until: now + SECOND,
    };
    session.finish(cancelled, Some(ended));
    let last = end_with(&mut session, now, 2, true, 2_400);

    let evicted = session.take_evicted();
    let evicted: Vec<_> = evicted
        .iter()
        .map(|evicted| (evicted.call, &*evicted.session, evicted.outcome))
        .collect();
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    let expected = [
        (answer, "s", Outcome::Completed),
        (cancelled, "s", orphaned),
    ];
    assert_eq!(evicted, expected);
    assert!(session.take_evicted().is_empty());
    session.begin_close(&here());
    let evicted = session.take_evicted();
    assert!(evicted.is_empty(), "{last:?} was removed with its session");
    assert_empty(&session);
}

/// Ends a call whose client is disconnected. Its answer is retained until `until`.
fn end_until(
    session: &mut TestSession,
    now: Instant,
    stream: i64,
    weight: usize,
    until: Instant,
) -> CallId {
    let id = accepted(session, request(stream), "call");
    session.record_event_id(id, format!("0/{stream}").as_bytes(), EventIdFormat::Rmcp);
    detach(session, id, now);
    let ended = Completion {
        weight,
        at: now,
        ..answered("42", until).unwrap()
    };
    session.finish(id, Some(ended));
    id
}

#[test]
fn invariant_11_each_retained_call_expires_on_time() {
    let now = Instant::now();
    let mut session = session();
    for (stream, seconds) in [(0, 60), (1, 2), (2, 60), (3, 4), (4, 3)] {
        end_until(&mut session, now, stream, 2, now + seconds * SECOND);
    }
    for (seconds, expired) in [(2, 1), (3, 4), (4, 3)] {
        assert_eq!(session.next_deadline(), Some(now + seconds * SECOND));
        assert!(is_retained(&session, expired));
        session.expire(now + seconds * SECOND);
        assert!(!is_retained(&session, expired));
    }
    assert!(is_retained(&session, 0) && is_retained(&session, 2));
    session.expire(now + 60 * SECOND);
    assert_empty(&session);
}

#[test]
fn invariant_11_the_calls_that_expire_first_are_evicted_first() {
    let now = Instant::now();
    let mut session = session_with_limits(Limits::default().retained_per_session(6_000));
    end_until(&mut session, now, 0, 488, now + 60 * SECOND);
    let [second, first] = [3, 2].map(|n| {
        end_until(
            &mut session,
            now,
            n,
            488,
            now + u32::try_from(n).unwrap() * SECOND,
        )
    });

    end_until(&mut session, now, 4, 3_500, now + SECOND);

    let evicted = session.take_evicted().into_iter();
    let evicted: Vec<_> = evicted.map(|evicted| evicted.call).collect();
    assert_eq!(evicted, [first, second]);
    assert!(is_retained(&session, 0) && is_retained(&session, 4));
}

#[test]
fn invariant_11_expired_calls_make_room_without_being_evicted() {
    let start = Instant::now();
    let now = start + 10 * SECOND;
    for is_detached in [true, false] {
        let mut session = session_with_limits(Limits::default().retained_per_session(6_000));
        end_until(&mut session, start, 0, 488, now + 60 * SECOND);
        for stream in 1..4 {
            end_until(&mut session, start, stream, 488, now - SECOND);
        }

        let id = accepted(&mut session, request(4), "call");
        session.record_event_id(id, b"0/4", EventIdFormat::Rmcp);
        if is_detached {
            detach(&mut session, id, now);
        }
        let ended = Completion {
            weight: 3_500,
            at: now,
            ..answered("42", now + SECOND).unwrap()
        };
        session.finish(id, Some(ended));

        assert!(session.take_evicted().is_empty());
        assert!(is_retained(&session, 0) && is_retained(&session, 4));
        assert_eq!(session.retained.len(), 2);
    }
}

#[test]
fn invariant_11_a_retained_call_that_expired_during_a_stall_is_postponed_once() {
    let now = Instant::now();
    let mut session = session();
    end_until(&mut session, now, 0, 2, now + SECOND);
    end_until(&mut session, now, 1, 2, now + 60 * SECOND);

    let handled_at = now + 3 * SECOND;
    session.expire(handled_at);
    let postponed = handled_at + MAX_RESUME_WAIT;
    assert_eq!(session.next_deadline(), Some(postponed));
    assert!(is_retained(&session, 0));
    assert!(session.is_awaited(&here(), handled_at));

    session.expire(postponed + 3 * SECOND);
    assert!(!is_retained(&session, 0));
    assert_eq!(session.next_deadline(), Some(now + 60 * SECOND));

    session.expire(now + 60 * SECOND + STALL_THRESHOLD);
    assert_empty(&session);
}

/// The leader's runtime is stalled, so another one handles its deadlines.
#[test]
fn invariant_11_a_retained_call_that_another_runtime_handles_is_postponed_once() {
    let now = Instant::now();
    let mut session = session();
    end_until(&mut session, now, 0, 2, now + SECOND);
    for (at, is_kept) in [(SECOND, true), (SECOND + MAX_RESUME_WAIT, false)] {
        let tracker = LatenessTracker::new(now + at, Timeliness::Late);
        session.expire_some(&tracker, 9);
        assert_eq!(is_retained(&session, 0), is_kept);
    }
    assert_empty(&session);
}

/// If several calls have had a stream, its event ids match the last of them.
#[test]
fn invariant_11_the_latest_of_two_outcomes_counts_delivered_or_not() {
    let now = Instant::now();
    for [first, second] in [[true, false], [false, true]] {
        let mut session = session();
        // The first outcome expires last.
        for (is_detached, answer, seconds) in [(first, "first", 3), (second, "second", 2)] {
            let id = accepted(&mut session, request(0), "call");
            session.record_event_id(id, b"0/0", EventIdFormat::Rmcp);
            if is_detached {
                detach(&mut session, id, now);
            }
            session.finish(id, answered(answer, now + seconds * SECOND));
        }
        let matched = session.match_event(&here(), b"0/0");
        assert_eq!(
            matched,
            EventMatch::Ended(RetainedOutcome::Answered("second"))
        );
    }
}

#[test]
fn invariant_12_closing_a_session_returns_its_calls_and_removes_retained_ones() {
    let now = Instant::now();
    let mut session = session();
    let live = accepted(&mut session, request(1), "live");
    let ended = accepted(&mut session, request(2), "ended");
    session.record_event_id(ended, b"0/2", EventIdFormat::Rmcp);
    session.finish(ended, answered("42", now + SECOND));

    assert_eq!(session.begin_close(&here()), [(live, "live")]);
    assert_eq!(session.match_event(&here(), b"0/2"), EventMatch::Nothing);
    assert!(session.finish(live, None).is_some());
    assert_empty(&session);
}

#[test]
fn invariant_12_a_reopened_session_finds_none_of_its_old_calls() {
    let (mut session, id, now) = session_with_call("call");
    session.record_event_id(id, b"0/0", EventIdFormat::Rmcp);
    session.begin_close(&here());
    assert_eq!(session.match_event(&here(), b"0/0"), EventMatch::Nothing);
    session.finish(id, answered("cancelled", now + SECOND));
    assert_eq!(session.match_event(&here(), b"0/0"), EventMatch::Nothing);
    assert_empty(&session);
}

/// Asserts that a call unobserved since `since` is removed and reported once.
fn assert_forgotten(session: &mut TestSession, id: CallId, since: Instant) {
    let expired = session.expire(since + UNOBSERVED_TTL);
    let [(removed, _, Expired::Forgotten(finished))] = &*expired else {
        panic!("{expired:?}");
    };
    assert_eq!(*removed, id);
    assert_eq!(finished.detachment, Some(detachment(since)));
    assert!(session.finish(id, None).is_none());
    assert_empty(session);
}

#[test]
fn invariant_13_an_unobserved_call_is_removed_and_not_cancelled() {
    let now = Instant::now();
    let mut session = session();
    let id = accepted(&mut session, request(7), "unobserved");
    session.detach(id, POST_GENERATION, unobserved(now), false, detachment(now));
    assert_forgotten(&mut session, id, now);
}

#[test]
fn invariant_13_a_call_without_a_background_reader_is_removed() {
    let now = Instant::now();
    let mut session = session();
    let id = accepted(&mut session, request(7), "call");
    session.add_background_reader(id);
    session.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_eq!(
        session.next_deadline(),
        None,
        "an attached call is watched by its client"
    );
    session.add_background_reader(id);
    session.add_background_reader(id);
    session.detach(id, POST_GENERATION, UNTIL_COMPLETE, false, detachment(now));
    session.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_eq!(session.next_deadline(), None, "another task keeps reading");
    session.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_eq!(session.next_deadline(), Some(now + UNOBSERVED_TTL));
    session.add_background_reader(id);
    assert_eq!(
        session.next_deadline(),
        None,
        "a background reader was added"
    );
    session.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_forgotten(&mut session, id, now);
}

#[test]
fn invariant_14_a_call_that_is_maybe_resumed_keeps_running() {
    let (mut session, id, now) = session_with_detached_call("call");
    session.mark_maybe_resumed(id, unobserved(now));
    assert!(session.expire(now + 60 * SECOND).is_empty());
    assert_eq!(session.len(), 1);
}

#[test]
fn invariant_11_an_answer_is_retained_for_the_resume_window() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let now = Instant::now();
    let later = now + 60 * SECOND;
    for (wait, expected) in [
        (grace_until(now + HOUR), later + HOUR),
        (
            DetachedState::UntilComplete {
                resume_window: HOUR,
            },
            later + HOUR,
        ),
        (UNTIL_COMPLETE, later + SECOND),
    ] {
        let mut session = session();
        let id = accepted(&mut session, request(1), "call");
        session.record_event_id(id, b"0/1", EventIdFormat::Rmcp);
        session.detach(id, POST_GENERATION, wait, false, detachment(now));
        let ended = Completion {
            outcome: RetainedOutcome::Answered("done"),
            weight: 4,
            at: later,
            until: later + SECOND,
        };
        session.finish(id, Some(ended));
        assert_eq!(session.next_deadline(), Some(expected), "{wait:?}");
        assert!(session.is_awaited(&here(), expected - SECOND / 2));
        assert!(!session.is_awaited(&here(), expected));
    }
}

#[test]
fn a_detachment_ends_with_a_resume() {
    let now = Instant::now();
    let mut session = session();
    let id = accepted(&mut session, request(7), "call");
    detach(&mut session, id, now);
    assert_eq!(session.detachment(id), Some(detachment(now)));
    session.attach(id);
    assert_eq!(session.detachment(id), None);
    assert_eq!(session.finish(id, None).unwrap().detachment, None);
}

#[test]
fn capacity_is_released_after_a_peak() {
    let mut session = session();
    let calls = (0..6_000).map(|n| {
        let id = accepted(&mut session, request(n), "call");
        session.record_event_id(id, format!("0/{n}").as_bytes(), EventIdFormat::Rmcp);
        id
    });
    let mut calls: Vec<_> = calls.collect();
    let last = calls.pop().unwrap();
    for id in calls {
        session.finish(id, None);
    }
    let (in_flight, requests) = (session.calls.capacity(), session.by_request.capacity());
    assert!(in_flight < 200 && requests < 200, "{in_flight}, {requests}");
    session.finish(last, None);
    assert_empty(&session);
}

#[test]
fn invariant_8_an_event_id_identifies_its_stream() {
    let mut session = session();
    let id = accepted(&mut session, request(1), "call");
    session.record_event_id(id, b"0/4", EventIdFormat::Rmcp);
    for event_id in [&b"0/4"[..], b"17/4"] {
        assert_eq!(
            session.match_event(&here(), event_id),
            EventMatch::Call(id, "call")
        );
    }
    for other in [&b"0/5"[..], b"0"] {
        assert_eq!(session.match_event(&here(), other), EventMatch::Nothing);
    }
    session.record_event_id(CallId::next(), b"0/5", EventIdFormat::Rmcp);
    session.finish(id, None);
    assert_empty(&session);
}

#[test]
fn a_number_and_a_text_are_two_ids() {
    let mut session = session();
    let number = accepted(&mut session, request(7), "number");
    let text = RequestId::String("7".into());
    let id = accepted(&mut session, Some((here(), text.clone())), "text");
    assert_eq!(session.find(&here(), &text), Some((id, "text")));
    for id in [number, id] {
        assert!(session.finish(id, None).is_some());
    }
    assert_empty(&session);
}

#[test]
fn calls_without_a_session_have_no_keys() {
    let now = Instant::now();
    let mut session = TestSession::new(Arc::default(), None);
    let ids = [(); 2].map(|()| accepted(&mut session, request(7), "call"));
    session.record_event_id(ids[0], b"0/0", EventIdFormat::Rmcp);
    assert_eq!(session.match_event(&here(), b"0/0"), EventMatch::Nothing);
    assert!(
        session
            .find_including_unaccepted(&here(), &RequestId::Number(7))
            .is_none()
    );
    for id in ids {
        let finished = session.finish(id, answered("42", now)).unwrap();
        assert!(!finished.may_cancel_server);
    }
    assert_empty(&session);
}

#[test]
fn a_rekeyed_call_keeps_everything_but_its_keys() {
    let now = Instant::now();
    let mut session = session();
    let id = CallId::next();
    session.start(id, None, "call", None);
    session.record_event_id(id, b"0/0", EventIdFormat::Other);
    assert!(
        session
            .find_including_unaccepted(&here(), &RequestId::Number(7))
            .is_none()
    );
    detach(&mut session, id, now);
    let older = accepted(&mut session, request(7), "older");

    let untracked = session.rekey(id, &here(), RequestId::Number(7));
    assert_eq!(untracked.map(|(id, ..)| id), Some(older));
    assert_eq!(
        session.find(&here(), &RequestId::Number(7)),
        Some((id, "call"))
    );
    session.record_event_id(id, b"0/1", EventIdFormat::Other);

    session.rekey(id, &scope_of(1), RequestId::Number(8));
    assert!(
        session
            .find_including_unaccepted(&here(), &RequestId::Number(7))
            .is_none()
    );
    assert_eq!(session.match_event(&here(), b"0/1"), EventMatch::Nothing);
    assert_eq!(
        session.match_event(&scope_of(1), b"0/1"),
        EventMatch::Nothing
    );
    assert_eq!(session.find_unique(&RequestId::Number(8)), Some(id));
    assert_eq!(session.detachment(id), Some(detachment(now)));
    assert_eq!(session.expire(now + SECOND), [(id, "call", Expired::Grace)]);
    assert_eq!(
        session.finish(id, None).unwrap().detachment,
        Some(detachment(now))
    );
    assert_empty(&session);
}

#[test]
fn invariant_8_the_same_id_in_another_scope_is_another_session() {
    let mut session = session();
    let there = scope_of(1);
    let one = accepted(&mut session, request(7), "one");
    let key = (there.clone(), RequestId::Number(7));
    let other = accepted(&mut session, Some(key), "other");
    session.record_event_id(one, b"0/0", EventIdFormat::Rmcp);
    assert_eq!(
        session.match_event(&here(), b"0/0"),
        EventMatch::Call(one, "one")
    );
    assert_eq!(session.match_event(&there, b"0/0"), EventMatch::Nothing);
    assert_eq!(
        session.find_unique(&RequestId::Number(7)),
        None,
        "two sessions"
    );
    assert_eq!(session.candidates_for_event(b"0/0"), [(one, "one")]);
    assert_eq!(session.begin_close(&there), [(other, "other")]);
    session.finish(other, None);
    let unaccepted = CallId::next();
    session.start(unaccepted, request(7), "unaccepted", None);
    assert_eq!(session.find_unique(&RequestId::Number(7)), Some(one));
    session.finish(unaccepted, None);
    assert!(session.has_session(&here()));
    for id in [one, other] {
        session.finish(id, None);
    }
    assert!(!session.has_session(&here()));
    assert_empty(&session);
}

/// Event ids from servers that number each response's events from the start.
#[test]
fn invariant_8_an_event_id_that_two_calls_have_is_ambiguous() {
    for ids in [["7", "7"], ["0/7", "0/7"], ["7/0", "7/0"]] {
        let mut session = session();
        let calls = [1, 2].map(|id| accepted(&mut session, request(id), "call"));
        for (id, event) in calls.iter().zip(ids) {
            session.record_event_id(*id, event.as_bytes(), EventIdFormat::Other);
        }
        let matched = session.match_event(&here(), ids[0].as_bytes());
        assert_eq!(matched.in_flight().len(), 2, "{ids:?}");
        session.finish(calls[1], None);
        assert_eq!(
            session.match_event(&here(), ids[0].as_bytes()),
            EventMatch::Call(calls[0], "call")
        );
        session.finish(calls[0], None);
        assert_empty(&session);
    }
}

/// Two calls have the same event id. One of them ends, and a third call gets the id.
#[test]
fn an_event_of_two_in_flight_calls_matches_both_even_if_an_ended_third_had_it() {
    let (mut session, now) = (session(), Instant::now());
    let first = accepted(&mut session, request(1), "first");
    let second = accepted(&mut session, request(2), "second");
    session.record_event_id(first, b"x", EventIdFormat::Other);
    session.record_event_id(second, b"x", EventIdFormat::Other);
    session.finish(second, None);
    let third = accepted(&mut session, request(3), "third");
    session.record_event_id(third, b"x", EventIdFormat::Other);

    detach(&mut session, first, now);
    let mut matched = session.match_event(&here(), b"x").in_flight();
    matched.sort_unstable();
    // A resume defers the expiry of the grace period for every call that its event id may match.
    for (id, _) in &matched {
        session.begin_resume(*id, now);
    }
    assert_eq!(matched, [(first, "first"), (third, "third")]);
    assert_eq!(session.expire(now + SECOND), [], "its client has resumed");
}

/// The client has resumed elsewhere, but it is unknown in which of the two sessions.
#[test]
fn an_event_also_matches_a_call_in_another_scope_whose_ids_are_incomplete() {
    let mut session = session();
    let known = accepted(&mut session, request(7), "known");
    session.record_event_id(known, b"x", EventIdFormat::Other);
    let there = Some((scope_of(1), RequestId::Number(7)));
    let unreadable = accepted(&mut session, there, "unreadable");
    session.mark_event_ids_incomplete(unreadable);
    assert_eq!(session.match_event(&scope_of(1), b"x").in_flight().len(), 1);
    assert_eq!(session.candidates_for_event(b"x").len(), 2);
}

#[test]
fn calls_in_another_scope_do_not_count_toward_a_sessions_limit() {
    let now = Instant::now();
    let mut session = session_with_limits(Limits::default().detached_per_session(1));
    let here = accepted(&mut session, request(7), "here");
    let there = Some((scope_of(1), RequestId::Number(7)));
    let there = accepted(&mut session, there, "there");
    assert_eq!(detach(&mut session, here, now), DetachOutcome::Waiting);
    assert_eq!(detach(&mut session, there, now), DetachOutcome::Waiting);
}
