use super::{
    call_timers::{MAX_EMPTY_RESUMES, MAX_RESUME_WAIT},
    model::{assert_empty, scope_of, session_id, unobserved},
    streams::MAX_EVENT_IDS,
    *,
};
use crate::{
    call::{CancelReason, DetachCause, Outcome, RequestId},
    limits::Limits,
    timer::{LatenessTracker, RECHECK_DELAY, RECHECK_TOLERANCE, STALL_THRESHOLD, Timeliness},
};

type TestCore = SessionState<&'static str, &'static str>;

const SECOND: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_secs(3);

const UNTIL_COMPLETE: DetachedState = DetachedState::UntilComplete {
    resume_window: Duration::ZERO,
};

/// The core of a session.
fn core() -> TestCore {
    limited(Limits::default())
}

fn limited(limits: Limits) -> TestCore {
    let shared = Arc::new(RegistryShared::default());
    shared.totals.limit(limits);
    SessionState::new(shared.clone(), Some(session_id(&shared)))
}

fn here() -> Scope {
    scope_of(0)
}

fn request(id: i64) -> Option<(Scope, RequestId)> {
    Some((here(), RequestId::Number(id)))
}

/// Starts and accepts a call, as an exchange does.
fn accepted(core: &mut TestCore, name: Option<(Scope, RequestId)>, call: &'static str) -> CallId {
    accepted_until(core, name, call, None)
}

/// The same, with the deadline of the call.
fn accepted_until(
    core: &mut TestCore,
    name: Option<(Scope, RequestId)>,
    call: &'static str,
    deadline: Option<Instant>,
) -> CallId {
    let id = CallId::next();
    core.start(id, name, call, deadline);
    core.accept(id);
    id
}

fn until(deadline: Instant) -> DetachedState {
    DetachedState::GraceUntil {
        deadline,
        retry: RETRY,
    }
}

fn detachment(at: Instant) -> Detachment {
    Detachment::new(DetachCause::Disconnected, at)
}

/// Detaches the first stream of a call at `now`, with its deadline a second later.
fn detach(core: &mut TestCore, id: CallId, now: Instant) -> DetachOutcome {
    core.detach(
        id,
        POST_GENERATION,
        until(now + SECOND),
        false,
        detachment(now),
    )
}

/// Returns a session with an accepted call, and the time.
fn with_call(call: &'static str) -> (TestCore, CallId, Instant) {
    let mut core = core();
    let id = accepted(&mut core, request(1), call);
    (core, id, Instant::now())
}

/// Does the same, and detaches the call.
fn with_detached_call(call: &'static str) -> (TestCore, CallId, Instant) {
    let (mut core, id, now) = with_call(call);
    detach(&mut core, id, now);
    (core, id, now)
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
    let mut core = core();
    let victim = accepted(&mut core, request(7), "victim");
    let other = CallId::next();
    core.start(other, request(7), "other", None);

    assert!(!core.finish(other, None).unwrap().may_cancel_server);
    assert_eq!(
        core.find(&here(), &RequestId::Number(7)),
        Some((victim, "victim"))
    );
    assert!(core.finish(victim, None).unwrap().may_cancel_server);
    assert_empty(&core);
}

#[test]
fn invariant_2_a_call_ends_once() {
    let now = Instant::now();
    let mut core = core();
    let id = accepted(&mut core, request(7), "call");
    assert!(core.finish(id, None).is_some());
    assert!(core.finish(id, None).is_none());
    assert_eq!(detach(&mut core, id, now), DetachOutcome::Ignored);
    assert_eq!(core.attach(id), None);
    assert!(!core.begin_resume(id, now));
    assert_empty(&core);
}

#[test]
fn invariant_2_a_call_without_a_key_is_never_injected() {
    let mut core = core();
    let id = accepted(&mut core, None, "stateless");
    assert!(!core.finish(id, None).unwrap().may_cancel_server);
    assert_empty(&core);
}

#[test]
fn invariant_3_a_deadline_ends_attached_and_detached_calls() {
    let (mut core, now) = (core(), Instant::now());
    let deadline = Some(now + SECOND);
    let attached = accepted_until(&mut core, request(1), "attached", deadline);
    let detached = accepted_until(&mut core, request(2), "detached", deadline);
    core.detach(
        detached,
        POST_GENERATION,
        until(now + 9 * SECOND),
        false,
        detachment(now),
    );
    assert_eq!(core.next_deadline(), deadline);
    assert!(core.expire(now).is_empty());
    let mut expired = core.expire(now + SECOND);
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
fn a_call_that_was_resumed_in_its_grace_keeps_its_deadline() {
    let (mut core, now) = (core(), Instant::now());
    let id = accepted_until(&mut core, request(1), "call", Some(now + 9 * SECOND));
    core.detach(
        id,
        POST_GENERATION,
        until(now + SECOND),
        false,
        detachment(now),
    );
    assert_eq!(core.expire(now + SECOND), [(id, "call", Expired::Grace)]);
    core.attach(id);
    assert_eq!(
        core.expire(now + 9 * SECOND),
        [(id, "call", Expired::Deadline)]
    );
}

#[test]
fn invariant_3_a_deadline_of_now_is_due_at_once() {
    let (mut core, id, now) = with_call("call");
    assert_eq!(
        core.detach(id, POST_GENERATION, until(now), false, detachment(now)),
        DetachOutcome::CancelNow
    );
    core.finish(id, None);
    assert_empty(&core);
}

#[test]
fn invariant_4_the_late_drop_of_an_older_stream_has_no_effect() {
    let (mut core, id, now) = with_call("call");
    let second = core.attach(id).unwrap();
    assert_eq!(detach(&mut core, id, now), DetachOutcome::Ignored);
    assert!(!core.is_detached(id));

    let third = core.attach(id).unwrap();
    assert!(second < third);
    assert_eq!(
        core.detach(id, second, until(now), false, detachment(now)),
        DetachOutcome::Ignored
    );
    assert_eq!(
        core.detach(id, third, until(now + SECOND), false, detachment(now)),
        DetachOutcome::Waiting
    );
    assert!(core.is_detached(id));
}

#[test]
fn invariant_6_a_confirmation_counts_only_for_its_own_expiry() {
    let (mut core, id, now) = with_detached_call("call");
    assert_eq!(core.expiry(id), None, "its grace has not expired");
    core.expire(now + SECOND);
    let due = core.expiry(id).unwrap();
    // The client resumes and disconnects again, and the new grace expires as well.
    let second = core.attach(id).unwrap();
    let later = now + 2 * SECOND;
    core.detach(id, second, until(later), false, detachment(now + SECOND));
    assert_eq!(core.expire(later), [(id, "call", Expired::Grace)]);
    assert!(!core.confirm(id, due, later), "that was another expiry");
    assert!(!core.postpone(id, due, later + SECOND));

    let due = core.expiry(id).unwrap();
    assert!(core.postpone(id, due, later + SECOND));
    assert_eq!(core.expiry(id), None);
    assert_eq!(core.expire(later + SECOND / 2), []);
    assert_eq!(core.expire(later + SECOND), [(id, "call", Expired::Grace)]);
    let due = core.expiry(id).unwrap();
    assert!(core.confirm(id, due, later + SECOND));
    let ended = answered("", now).unwrap();
    assert_eq!(core.finish_due(id, ended), None, "it is checked once more");
    let recheck = later + SECOND + RECHECK_DELAY;
    assert_eq!(
        core.expire(recheck),
        [(id, "call", Expired::GraceConfirmed)]
    );
    assert!(core.finish_due(id, answered("", now).unwrap()).is_some());
}

#[test]
fn invariant_7_a_runtime_that_stalled_during_a_confirmation_is_noticed() {
    let (mut core, id, now) = with_detached_call("call");
    core.expire(now + SECOND);
    let due = core.expiry(id).unwrap();
    assert!(core.confirm(id, due, now + SECOND));
    // The resume of the client waits in the accept queue.
    let resumed_at = now + 60 * SECOND;
    assert_eq!(core.expire(resumed_at), []);
    assert!(core.begin_resume(id, resumed_at));
    core.end_resume(id, resumed_at);
    let expired = core.expire(resumed_at + 2 * RETRY);
    assert_eq!(
        expired,
        [(id, "call", Expired::Grace)],
        "the confirmation is requested again"
    );
}

/// A confirmation from before a stall may be outdated: for example, a lease may have expired meanwhile.
#[test]
fn invariant_7_a_confirmation_from_before_a_stall_is_requested_again() {
    let (mut core, id, now) = with_detached_call("call");
    core.expire(now + SECOND);
    let due = core.expiry(id).unwrap();
    assert!(core.confirm(id, due, now + SECOND));
    let resumed_at = now + 60 * SECOND;
    assert_eq!(core.expire(resumed_at), []);
    let expired = core.expire(resumed_at + MAX_RESUME_WAIT.max(2 * RETRY));
    assert_eq!(expired, [(id, "call", Expired::Grace)]);
}

#[test]
fn invariant_5_a_pending_resume_lets_the_deadline_pass_but_not_without_limit() {
    let (mut core, id, now) = with_detached_call("call");
    assert!(core.begin_resume(id, now) && core.begin_resume(id, now));

    assert!(
        core.expire(now + SECOND + MAX_RESUME_WAIT - SECOND / 10)
            .is_empty()
    );
    assert_eq!(core.expire(now + SECOND + MAX_RESUME_WAIT).len(), 1);
}

#[test]
fn invariant_5_a_late_refusal_does_not_end_a_later_resume() {
    let (mut core, id, now) = with_detached_call("call");
    core.begin_resume(id, now);
    let second = core.attach(id).unwrap();
    core.detach(id, second, until(now + SECOND), false, detachment(now));
    core.begin_resume(id, now);

    core.end_resume(id, now);

    assert!(
        core.expire(now + SECOND).is_empty(),
        "the third resume is pending"
    );
}

#[test]
fn invariant_6_every_detach_starts_the_grace_in_full() {
    let (mut core, id, start) = with_call("polled");
    let mut generation = POST_GENERATION;
    for poll in 0..100 {
        let now = start + poll * SECOND;
        let deadline = until(now + 2 * SECOND);
        assert_eq!(
            core.detach(id, generation, deadline, false, detachment(now)),
            DetachOutcome::Waiting
        );
        assert_eq!(core.next_deadline(), Some(now + 2 * SECOND));
        generation = core.attach(id).unwrap();
    }
}

#[test]
fn invariant_6_empty_resumes_renew_it_a_few_times_only() {
    let (mut core, id, start) = with_detached_call("polled in vain");
    let mut renewals = 0;
    loop {
        let now = start + (renewals + 1) * SECOND;
        let generation = core.attach(id).unwrap();
        match core.detach(id, generation, until(now + SECOND), true, detachment(now)) {
            DetachOutcome::Waiting => renewals += 1,
            _ => break,
        }
    }
    assert_eq!(renewals, MAX_EMPTY_RESUMES);
}

/// Expires the next deadline, `late` after its time.
fn expire_next(core: &mut TestCore, late: Duration) -> Vec<(CallId, &'static str, Expired)> {
    let at = core.next_deadline().unwrap();
    core.expire(at + late)
}

#[test]
fn invariant_7_a_stalled_runtime_postpones_a_deadline_once() {
    let (mut core, id, now) = with_detached_call("call");
    let handled_at = now + SECOND + 12 * SECOND;
    assert!(core.expire(handled_at).is_empty());
    assert_eq!(core.next_deadline(), Some(handled_at + 2 * RETRY));
    let recheck = handled_at + 60 * SECOND;
    assert!(core.expire(recheck).is_empty());
    assert_eq!(
        core.next_deadline(),
        Some(recheck + RECHECK_DELAY),
        "not as long"
    );
    assert_eq!(
        expire_next(&mut core, Duration::ZERO),
        [(id, "call", Expired::Grace)]
    );
}

#[test]
fn invariant_7_a_deadline_that_another_runtime_handles_is_postponed_once() {
    let (mut core, id, now) = with_detached_call("call");
    let handled_at = now + SECOND;
    assert!(
        core.expire_some(&LatenessTracker::new(handled_at, Timeliness::Late), 9)
            .is_empty()
    );
    let postponed = handled_at + 2 * RETRY;
    assert_eq!(core.next_deadline(), Some(postponed));
    assert!(
        core.expire_some(&LatenessTracker::new(postponed, Timeliness::Late), 9)
            .is_empty()
    );
    assert_eq!(
        core.next_deadline(),
        Some(postponed + RECHECK_DELAY),
        "not as long"
    );
    let expired = expire_next(&mut core, Duration::ZERO);
    assert_eq!(expired, [(id, "call", Expired::Grace)]);
}

#[test]
fn invariant_7_a_deadline_behind_a_backlog_of_the_timer_task_is_not_late() {
    let now = Instant::now();
    let mut core = core();
    let ids: Vec<_> = (0..8)
        .map(|n| accepted(&mut core, request(n), "call"))
        .collect();
    for (id, n) in ids.iter().zip(0..) {
        detach(&mut core, *id, now + n * SECOND / 1_000);
    }
    let mut tracker = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    let turn = |n: u32| now + SECOND + n * SECOND / 100;
    for n in 1..=20 {
        tracker.next_turn(turn(n));
    }
    for (id, n) in ids.iter().zip(21..) {
        tracker.next_turn(turn(n));
        let expired = core.expire_some(&tracker, 1);
        assert_eq!(expired, [(*id, "call", Expired::Grace)]);
    }
}

#[test]
fn invariant_7_a_deadline_between_two_turns_that_runs_a_little_late_is_checked_again() {
    let (mut core, id, now) = with_call("call");
    detach(&mut core, id, now + SECOND / 1_000);
    let mut tracker = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    tracker.next_turn(now + SECOND + SECOND / 100);
    tracker.next_turn(now + SECOND + SECOND / 50);
    assert_eq!(core.expire_some(&tracker, 9), []);
    assert_eq!(core.next_deadline(), Some(tracker.now() + RECHECK_DELAY));
    let expired = expire_next(&mut core, Duration::ZERO);
    assert_eq!(expired, [(id, "call", Expired::Grace)]);
}

#[test]
fn invariant_7_a_deadline_during_a_stall_between_two_turns_is_late() {
    let now = Instant::now();
    let mut core = core();
    let ids = [1, 2].map(|n| accepted(&mut core, request(n), "call"));
    detach(&mut core, ids[0], now);
    detach(&mut core, ids[1], now + SECOND);
    let mut tracker = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    tracker.next_turn(now + SECOND + SECOND / 100);
    tracker.next_turn(now + 12 * SECOND);
    tracker.next_turn(now + 12 * SECOND + SECOND / 100);
    let expired = core.expire_some(&tracker, 9);
    assert_eq!(expired, [(ids[0], "call", Expired::Grace)]);
    assert_eq!(core.next_deadline(), Some(tracker.now() + 2 * RETRY));
}

#[test]
fn invariant_7_a_postponed_call_is_not_cancelled_by_the_next_empty_resume() {
    for (late, postponed) in [(2 * SECOND, 2 * RETRY), (SECOND / 2, RECHECK_DELAY)] {
        let mut now = Instant::now();
        let mut core = core();
        let id = accepted(&mut core, request(1), "polled in vain");
        detach(&mut core, id, now);
        for _ in 0..MAX_EMPTY_RESUMES {
            let generation = core.attach(id).unwrap();
            now += SECOND / 2;
            core.detach(id, generation, until(now + SECOND), true, detachment(now));
        }
        now += SECOND + late;
        assert!(core.expire(now).is_empty(), "the runtime was stalled");
        let postponed = now + postponed;

        let generation = core.attach(id).unwrap();
        now += RECHECK_DELAY / 2;
        let detached = core.detach(
            id,
            generation,
            until(now + 60 * SECOND),
            true,
            detachment(now),
        );
        assert_eq!(detached, DetachOutcome::Waiting);
        assert_eq!(core.next_deadline(), Some(postponed), "nor renewed by it");
    }
}

#[test]
fn invariant_7_a_resume_that_is_refused_meanwhile_does_not_shorten_the_time_of_others() {
    let now = Instant::now();
    let handled_at = now + SECOND + 3 * SECOND / 10;
    let refused = handled_at + RECHECK_DELAY / 2;
    for handled_by in ["the timer", "the resume"] {
        let mut core = core();
        let id = accepted(&mut core, request(1), "call");
        detach(&mut core, id, now);
        if handled_by == "the timer" {
            assert!(core.expire(handled_at).is_empty());
        }
        core.begin_resume(id, handled_at);
        core.end_resume(id, refused);
        let next = core.next_deadline();
        assert_eq!(next, Some(handled_at + RECHECK_DELAY), "{handled_by}");
        assert_eq!(expire_next(&mut core, RECHECK_TOLERANCE).len(), 1);
    }
}

#[test]
fn invariant_7_a_resume_out_of_the_accept_queue_does_not_hide_that_the_deadline_was_late() {
    let (mut core, id, now) = with_detached_call("call");
    let handled_at = now + SECOND + MAX_RESUME_WAIT + STALL_THRESHOLD / 2;
    assert!(core.begin_resume(id, handled_at));
    assert!(core.expire(handled_at).is_empty());
    core.end_resume(id, handled_at);
    assert_eq!(core.next_deadline(), Some(handled_at + 2 * RETRY));
    assert_eq!(expire_next(&mut core, Duration::ZERO).len(), 1, "once");
}

#[test]
fn invariant_8_ids_in_the_format_of_rmcp_are_not_taken_for_those_of_rmcp_if_any_server_may_have_issued_them()
 {
    for ids in [
        // A counter and a constant, a stream and its counter, and counters that continue from call to call.
        [["1/7", "2/7"], ["3/7", "4/7"]],
        [["1/0", "1/1"], ["2/0", "2/1"]],
        [["0/0", "1/0"], ["2/1", "3/1"]],
        [["9/7", "5/7"], ["1/7", "6/7"]],
    ] {
        let mut core = core();
        let calls = [1, 2].map(|id| accepted(&mut core, request(id), "call"));
        for nth in [0, 1] {
            for (id, names) in calls.iter().zip(ids) {
                core.record_event_id(*id, names[nth].as_bytes(), EventIdFormat::Any);
            }
        }
        for (id, names) in calls.iter().zip(ids) {
            for name in names {
                let matched = core.match_event(&here(), name.as_bytes());
                assert_eq!(matched, EventMatch::Call(*id, "call"), "{name} of {ids:?}");
            }
        }
        assert_eq!(core.match_event(&here(), b"99/7"), EventMatch::Nothing);
        for id in calls {
            core.finish(id, None);
        }
        assert_empty(&core);
    }
}

#[test]
fn invariant_8_opaque_ids_are_known_first_and_latest() {
    let mut core = core();
    let id = accepted(&mut core, request(1), "call");
    let event = |n: usize| format!("event-{n}").into_bytes();
    for n in 0..3 * MAX_EVENT_IDS {
        core.record_event_id(id, &event(n), EventIdFormat::Rmcp);
    }
    for n in [0, 2 * MAX_EVENT_IDS, 3 * MAX_EVENT_IDS - 1] {
        assert_eq!(
            core.match_event(&here(), &event(n)),
            EventMatch::Call(id, "call"),
            "{n}"
        );
    }
    for n in [1, 2 * MAX_EVENT_IDS - 1] {
        let removed = core.match_event(&here(), &event(n));
        assert_eq!(removed, EventMatch::Ambiguous(vec![(id, "call")]));
    }
    core.finish(id, None);
    assert_empty(&core);
}

#[test]
fn invariant_8_a_call_whose_stream_cannot_be_read_may_match_any_unknown_id() {
    let mut core = core();
    let known = accepted(&mut core, request(1), "known");
    core.record_event_id(known, b"0/1", EventIdFormat::Rmcp);
    let blurred = accepted(&mut core, request(2), "blurred");
    core.mark_event_ids_incomplete(blurred);
    assert_eq!(
        core.match_event(&here(), b"0/1"),
        EventMatch::Call(known, "known")
    );
    for unknown in [&b"0/2"[..], b"7", b"opaque"] {
        assert_eq!(
            core.match_event(&here(), unknown),
            EventMatch::Ambiguous(vec![(blurred, "blurred")])
        );
    }
}

#[test]
fn invariant_9_a_reused_id_untracks_the_older_call_and_does_not_cancel_it() {
    let now = Instant::now();
    let mut core = core();
    let older = accepted(&mut core, request(7), "older");
    core.record_event_id(older, b"0/0", EventIdFormat::Rmcp);
    detach(&mut core, older, now);
    let newer = CallId::next();
    core.start(newer, request(7), "newer", None);

    let untracked = Finished {
        may_cancel_server: false,
        detachment: Some(detachment(now)),
        has_evicted: false,
    };
    assert_eq!(core.accept(newer), Some((older, "older", untracked)));
    assert_eq!(core.match_event(&here(), b"0/0"), EventMatch::Nothing);
    assert!(core.expire(now + UNOBSERVED_TTL).is_empty());
    assert!(core.finish(older, None).is_none());
    assert!(core.finish(newer, None).unwrap().may_cancel_server);
    assert_empty(&core);
}

#[test]
fn invariant_11_an_ended_call_is_retained_under_its_streams() {
    let now = Instant::now();
    let mut core = core();
    let id = accepted(&mut core, request(7), "call");
    core.record_event_id(id, b"0/0", EventIdFormat::Rmcp);
    core.finish(id, answered("42", now + SECOND));

    for _ in 0..3 {
        let matched = core.match_event(&here(), b"1/0");
        assert_eq!(matched, EventMatch::Ended(RetainedOutcome::Answered("42")));
    }
    assert_eq!(core.len(), 0);
    core.expire(now + SECOND);
    assert_eq!(core.match_event(&here(), b"1/0"), EventMatch::Nothing);
    assert_empty(&core);
}

/// Simulates two keys with the same 64-bit hash, which no client can cause.
#[test]
fn a_full_collision_of_two_keys_finds_nothing_and_affects_neither_call() {
    let now = Instant::now();
    let mut core = core();
    let victim = accepted(&mut core, request(7), "victim");
    core.record_event_id(victim, b"0/0", EventIdFormat::Rmcp);
    detach(&mut core, victim, now);
    accepted(&mut core, request(1), "other");
    let names = &core.shared.hasher;
    let slot = core.session(&here()).unwrap();
    let colliding = names.request(slot, &RequestId::Number(9));
    core.by_request.insert(colliding, victim);

    let request = request(9);
    assert!(core.find(&here(), &RequestId::Number(9)).is_none());
    let call = CallId::next();
    core.start(call, request, "other", None);
    assert!(core.accept(call).is_none(), "the victim is still tracked");
    core.record_event_id(call, b"0/5", EventIdFormat::Rmcp);
    assert!(core.finish(call, None).unwrap().may_cancel_server);
    assert_untouched(&core, victim);
}

/// Asserts that the call is found, and that its client can resume.
fn assert_untouched(core: &TestCore, victim: CallId) {
    assert_eq!(
        core.match_event(&here(), b"0/0"),
        EventMatch::Call(victim, "victim")
    );
    let found = core.find(&here(), &RequestId::Number(7));
    assert_eq!(found, Some((victim, "victim")));
    assert!(core.is_detached(victim));
}

/// Ends a call with an answer of `weight` bytes, on a stream that no other call has.
fn end_with(
    core: &mut TestCore,
    now: Instant,
    stream: i64,
    is_detached: bool,
    weight: usize,
) -> CallId {
    let id = accepted(core, request(stream), "call");
    core.record_event_id(id, format!("0/{stream}").as_bytes(), EventIdFormat::Rmcp);
    if is_detached {
        detach(core, id, now);
    }
    let ended = Completion {
        weight,
        ..answered("42", now + SECOND).unwrap()
    };
    core.finish(id, Some(ended));
    id
}

fn is_retained(core: &TestCore, stream: i64) -> bool {
    core.match_event(&here(), format!("0/{stream}").as_bytes()) != EventMatch::Nothing
}

#[test]
fn invariant_11_an_answer_that_is_too_large_is_not_retained_and_evicts_none() {
    let now = Instant::now();
    let mut core = core();
    end_with(&mut core, now, 1, true, 2);
    end_with(&mut core, now, 2, false, 2);
    for is_detached in [false, true] {
        let large = end_with(&mut core, now, 3, is_detached, usize::MAX / 2);
        assert!(!is_retained(&core, 3));
        let evicted: Vec<_> = core
            .take_evicted()
            .iter()
            .map(|evicted| evicted.call)
            .collect();
        assert_eq!(evicted.contains(&large), is_detached);
    }
    assert!(is_retained(&core, 1) && is_retained(&core, 2));
    core.expire(now + SECOND);
    assert_empty(&core);
}

#[test]
fn invariant_11_no_delivered_answer_is_retained_in_place_of_an_undelivered_one() {
    let now = Instant::now();
    let mut core = limited(Limits::default().retained_of_session(4_332));
    end_with(&mut core, now, 0, true, 488);
    for stream in 1..9 {
        end_with(&mut core, now, stream, false, 488);
    }
    assert!(is_retained(&core, 0), "the oldest of its session");
    assert_eq!(
        [7, 8].map(|stream| is_retained(&core, stream)),
        [true, true]
    );
    end_with(&mut core, now, 9, false, 2_600);
    assert!(
        !is_retained(&core, 9),
        "it would not fit beside undelivered ones"
    );
    assert!(is_retained(&core, 8), "so nothing was evicted for it");
    assert!(
        core.take_evicted().is_empty(),
        "of these nothing is reported"
    );
    core.expire(now + SECOND);
    assert_empty(&core);
}

#[test]
fn invariant_11_of_the_delivered_answers_the_latest_64_are_retained() {
    let now = Instant::now();
    let mut core = core();
    end_with(&mut core, now, 100, true, 2);
    for stream in 0..66 {
        end_with(&mut core, now, stream, false, 2);
    }
    let kept = [0, 1, 2, 65, 100].map(|stream| is_retained(&core, stream));
    assert_eq!(kept, [false, false, true, true, true]);
    assert!(core.take_evicted().is_empty());
    core.expire(now + SECOND);
    assert_empty(&core);
}

fn sessions<const N: usize>(retained: usize) -> [TestCore; N] {
    let shared = Arc::new(RegistryShared::default());
    shared.totals.limit(Limits::default().retained(retained));
    [(); N].map(|()| TestCore::new(shared.clone(), Some(session_id(&shared))))
}

#[test]
fn invariant_11_delivered_answers_of_all_sessions_deny_retention_to_no_undelivered_one() {
    let now = Instant::now();
    let mut cores = sessions::<40>(40_000);
    for core in &mut cores[1..] {
        end_with(core, now, 0, false, 488);
    }
    assert!(!is_retained(&cores[39], 0), "they have reached their limit");
    let totals = &cores[0].shared.totals;
    let delivered = totals.bytes_of(DeliveryState::Delivered);
    assert!((5_000..=10_000).contains(&delivered), "{delivered}");

    for stream in 0..8 {
        end_with(&mut cores[0], now, stream, true, 488);
    }
    assert!((0..8).all(|stream| is_retained(&cores[0], stream)));
    assert!(cores[0].take_evicted().is_empty());
}

#[test]
fn invariant_11_a_session_retains_no_more_than_remains_for_all_others() {
    let now = Instant::now();
    let [mut greedy, mut modest] = sessions(40_000);
    for stream in 0..30 {
        end_with(&mut greedy, now, stream, true, 1_488);
    }
    let bytes = greedy.shared.totals.bytes_of(DeliveryState::Undelivered);
    assert!((12_000..=15_000).contains(&bytes), "{bytes}");
    assert!(is_retained(&greedy, 29), "the latest");
    assert!(!is_retained(&greedy, 0) && !greedy.take_evicted().is_empty());

    end_with(&mut modest, now, 0, true, 4_000);
    assert!(is_retained(&modest, 0));
    end_with(&mut modest, now, 1, true, 8_000);
    assert!(
        !is_retained(&modest, 1) && is_retained(&modest, 0),
        "it evicts none"
    );
    assert_eq!(modest.take_evicted().len(), 1);
}

#[test]
fn invariant_11_an_evicted_undelivered_answer_is_reported_once() {
    let now = Instant::now();
    let mut core = limited(Limits::default().retained_of_session(3_000));
    let answer = end_with(&mut core, now, 0, true, 488);
    let cancelled = accepted(&mut core, request(1), "call");
    core.record_event_id(cancelled, b"0/1", EventIdFormat::Rmcp);
    let ended = Completion {
        outcome: RetainedOutcome::Cancelled(RequestId::Number(1), CancelReason::Orphaned),
        weight: 0,
        at: now,
        until: now + SECOND,
    };
    core.finish(cancelled, Some(ended));
    let last = end_with(&mut core, now, 2, true, 2_400);

    let evicted = core.take_evicted();
    let evicted: Vec<_> = evicted
        .iter()
        .map(|it| (it.call, &*it.session, it.outcome))
        .collect();
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    let expected = [
        (answer, "s", Outcome::Completed),
        (cancelled, "s", orphaned),
    ];
    assert_eq!(evicted, expected);
    assert!(core.take_evicted().is_empty());
    core.begin_close(&here());
    let evicted = core.take_evicted();
    assert!(evicted.is_empty(), "{last:?} was removed with its session");
    assert_empty(&core);
}

/// An event id matches the call that had its stream last.
#[test]
fn invariant_11_the_latest_of_two_outcomes_counts_delivered_or_not() {
    let now = Instant::now();
    for [first, second] in [[true, false], [false, true]] {
        let mut core = core();
        for (is_detached, answer) in [(first, "first"), (second, "second")] {
            let id = accepted(&mut core, request(0), "call");
            core.record_event_id(id, b"0/0", EventIdFormat::Rmcp);
            if is_detached {
                detach(&mut core, id, now);
            }
            core.finish(id, answered(answer, now + SECOND));
        }
        let matched = core.match_event(&here(), b"0/0");
        assert_eq!(
            matched,
            EventMatch::Ended(RetainedOutcome::Answered("second"))
        );
    }
}

#[test]
fn invariant_12_the_end_of_a_session_returns_its_calls_and_removes_retained_ones() {
    let now = Instant::now();
    let mut core = core();
    let live = accepted(&mut core, request(1), "live");
    let ended = accepted(&mut core, request(2), "ended");
    core.record_event_id(ended, b"0/2", EventIdFormat::Rmcp);
    core.finish(ended, answered("42", now + SECOND));

    assert_eq!(core.begin_close(&here()), [(live, "live")]);
    assert_eq!(core.match_event(&here(), b"0/2"), EventMatch::Nothing);
    assert!(core.finish(live, None).is_some());
    assert_empty(&core);
}

#[test]
fn invariant_12_a_session_that_starts_anew_finds_nothing_of_its_former_calls() {
    let (mut core, id, now) = with_call("call");
    core.record_event_id(id, b"0/0", EventIdFormat::Rmcp);
    core.begin_close(&here());
    assert_eq!(core.match_event(&here(), b"0/0"), EventMatch::Nothing);
    core.finish(id, answered("cancelled", now + SECOND));
    assert_eq!(core.match_event(&here(), b"0/0"), EventMatch::Nothing);
    assert_empty(&core);
}

/// Asserts that the call was removed as unobserved since `since`, and that this is reported once.
fn assert_forgotten(core: &mut TestCore, id: CallId, since: Instant) {
    let expired = core.expire(since + UNOBSERVED_TTL);
    let [(removed, _, Expired::Forgotten(finished))] = &*expired else {
        panic!("{expired:?}");
    };
    assert_eq!(*removed, id);
    assert_eq!(finished.detachment, Some(detachment(since)));
    assert!(core.finish(id, None).is_none());
    assert_empty(core);
}

#[test]
fn invariant_13_an_unobserved_call_is_removed_and_not_cancelled() {
    let now = Instant::now();
    let mut core = core();
    let id = accepted(&mut core, request(7), "unobserved");
    core.detach(id, POST_GENERATION, unobserved(now), false, detachment(now));
    assert_forgotten(&mut core, id, now);
}

#[test]
fn invariant_13_a_call_without_a_background_reader_is_removed() {
    let now = Instant::now();
    let mut core = core();
    let id = accepted(&mut core, request(7), "call");
    core.add_background_reader(id);
    core.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_eq!(
        core.next_deadline(),
        None,
        "an attached call is watched by its client"
    );
    core.add_background_reader(id);
    core.add_background_reader(id);
    core.detach(id, POST_GENERATION, UNTIL_COMPLETE, false, detachment(now));
    core.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_eq!(core.next_deadline(), None, "another task reads on");
    core.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_eq!(core.next_deadline(), Some(now + UNOBSERVED_TTL));
    core.add_background_reader(id);
    assert_eq!(core.next_deadline(), None, "a background reader was added");
    core.remove_background_reader(id, Some(now + UNOBSERVED_TTL));
    assert_forgotten(&mut core, id, now);
}

#[test]
fn invariant_14_a_call_that_is_maybe_resumed_keeps_running() {
    let (mut core, id, now) = with_detached_call("call");
    core.set_maybe_resumed(id, unobserved(now));
    assert!(core.expire(now + 60 * SECOND).is_empty());
    assert_eq!(core.len(), 1);
}

#[test]
fn invariant_11_an_answer_is_retained_for_the_resume_window() {
    const HOUR: Duration = Duration::from_secs(3_600);
    let now = Instant::now();
    let later = now + 60 * SECOND;
    for (wait, expected) in [
        (until(now + HOUR), later + HOUR),
        (
            DetachedState::UntilComplete {
                resume_window: HOUR,
            },
            later + HOUR,
        ),
        (UNTIL_COMPLETE, later + SECOND),
    ] {
        let mut core = core();
        let id = accepted(&mut core, request(1), "call");
        core.record_event_id(id, b"0/1", EventIdFormat::Rmcp);
        core.detach(id, POST_GENERATION, wait, false, detachment(now));
        let ended = Completion {
            outcome: RetainedOutcome::Answered("done"),
            weight: 4,
            at: later,
            until: later + SECOND,
        };
        core.finish(id, Some(ended));
        assert_eq!(core.next_deadline(), Some(expected), "{wait:?}");
        assert!(core.is_awaited(&here(), expected - SECOND / 2));
        assert!(!core.is_awaited(&here(), expected));
    }
}

#[test]
fn a_detachment_ends_with_a_resume() {
    let now = Instant::now();
    let mut core = core();
    let id = accepted(&mut core, request(7), "call");
    detach(&mut core, id, now);
    assert_eq!(core.detachment(id), Some(detachment(now)));
    core.attach(id);
    assert_eq!(core.detachment(id), None);
    assert_eq!(core.finish(id, None).unwrap().detachment, None);
}

#[test]
fn after_a_peak_capacity_is_released() {
    let mut core = core();
    let calls = (0..6_000).map(|n| {
        let id = accepted(&mut core, request(n), "call");
        core.record_event_id(id, format!("0/{n}").as_bytes(), EventIdFormat::Rmcp);
        id
    });
    let mut calls: Vec<_> = calls.collect();
    let last = calls.pop().unwrap();
    for id in calls {
        core.finish(id, None);
    }
    let (in_flight, requests) = (core.calls.capacity(), core.by_request.capacity());
    assert!(in_flight < 200 && requests < 200, "{in_flight}, {requests}");
    core.finish(last, None);
    assert_empty(&core);
}

#[test]
fn invariant_8_an_event_id_names_its_stream() {
    let mut core = core();
    let id = accepted(&mut core, request(1), "call");
    core.record_event_id(id, b"0/4", EventIdFormat::Rmcp);
    for its in [&b"0/4"[..], b"17/4"] {
        assert_eq!(core.match_event(&here(), its), EventMatch::Call(id, "call"));
    }
    for other in [&b"0/5"[..], b"0"] {
        assert_eq!(core.match_event(&here(), other), EventMatch::Nothing);
    }
    core.record_event_id(CallId::next(), b"0/5", EventIdFormat::Rmcp);
    core.finish(id, None);
    assert_empty(&core);
}

#[test]
fn a_number_and_a_text_are_two_ids() {
    let mut core = core();
    let number = accepted(&mut core, request(7), "number");
    let text = RequestId::String("7".into());
    let id = accepted(&mut core, Some((here(), text.clone())), "text");
    assert_eq!(core.find(&here(), &text), Some((id, "text")));
    for id in [number, id] {
        assert!(core.finish(id, None).is_some());
    }
    assert_empty(&core);
}

#[test]
fn calls_without_a_session_have_no_keys() {
    let now = Instant::now();
    let mut core = TestCore::new(Arc::default(), None);
    let ids = [(); 2].map(|()| accepted(&mut core, request(7), "call"));
    core.record_event_id(ids[0], b"0/0", EventIdFormat::Rmcp);
    assert_eq!(core.match_event(&here(), b"0/0"), EventMatch::Nothing);
    assert!(
        core.find_unaccepted_too(&here(), &RequestId::Number(7))
            .is_none()
    );
    for id in ids {
        let finished = core.finish(id, answered("42", now)).unwrap();
        assert!(!finished.may_cancel_server);
    }
    assert_empty(&core);
}

#[test]
fn a_call_that_is_rekeyed_changes_in_nothing_but_its_keys() {
    let now = Instant::now();
    let mut core = core();
    let id = CallId::next();
    core.start(id, None, "call", None);
    core.record_event_id(id, b"0/0", EventIdFormat::Any);
    assert!(
        core.find_unaccepted_too(&here(), &RequestId::Number(7))
            .is_none()
    );
    detach(&mut core, id, now);
    let older = accepted(&mut core, request(7), "older");

    let untracked = core.rekey(id, &here(), RequestId::Number(7));
    assert_eq!(untracked.map(|(id, ..)| id), Some(older));
    assert_eq!(
        core.find(&here(), &RequestId::Number(7)),
        Some((id, "call"))
    );
    core.record_event_id(id, b"0/1", EventIdFormat::Any);

    core.rekey(id, &scope_of(1), RequestId::Number(8));
    assert!(
        core.find_unaccepted_too(&here(), &RequestId::Number(7))
            .is_none()
    );
    assert_eq!(core.match_event(&here(), b"0/1"), EventMatch::Nothing);
    assert_eq!(core.match_event(&scope_of(1), b"0/1"), EventMatch::Nothing);
    assert_eq!(core.find_unique(&RequestId::Number(8)), Some(id));
    assert_eq!(core.detachment(id), Some(detachment(now)));
    assert_eq!(core.expire(now + SECOND), [(id, "call", Expired::Grace)]);
    assert_eq!(
        core.finish(id, None).unwrap().detachment,
        Some(detachment(now))
    );
    assert_empty(&core);
}

#[test]
fn invariant_8_the_same_id_in_another_scope_is_another_session() {
    let mut core = core();
    let there = scope_of(1);
    let one = accepted(&mut core, request(7), "one");
    let name = (there.clone(), RequestId::Number(7));
    let other = accepted(&mut core, Some(name), "other");
    core.record_event_id(one, b"0/0", EventIdFormat::Rmcp);
    assert_eq!(
        core.match_event(&here(), b"0/0"),
        EventMatch::Call(one, "one")
    );
    assert_eq!(core.match_event(&there, b"0/0"), EventMatch::Nothing);
    assert_eq!(
        core.find_unique(&RequestId::Number(7)),
        None,
        "two sessions"
    );
    assert_eq!(core.candidates_for_event(b"0/0"), [(one, "one")]);
    assert_eq!(core.begin_close(&there), [(other, "other")]);
    core.finish(other, None);
    let undecided = CallId::next();
    core.start(undecided, request(7), "undecided", None);
    assert_eq!(core.find_unique(&RequestId::Number(7)), Some(one));
    core.finish(undecided, None);
    assert!(core.has_session(&here()));
    for id in [one, other] {
        core.finish(id, None);
    }
    assert!(!core.has_session(&here()));
    assert_empty(&core);
}

/// The event ids of servers that number the events of each response from the start.
#[test]
fn invariant_8_an_event_id_that_two_calls_have_is_ambiguous() {
    for ids in [["7", "7"], ["0/7", "0/7"], ["7/0", "7/0"]] {
        let mut core = core();
        let calls = [1, 2].map(|id| accepted(&mut core, request(id), "call"));
        for (id, event) in calls.iter().zip(ids) {
            core.record_event_id(*id, event.as_bytes(), EventIdFormat::Any);
        }
        let matched = core.match_event(&here(), ids[0].as_bytes());
        assert_eq!(matched.in_flight().len(), 2, "{ids:?}");
        core.finish(calls[1], None);
        assert_eq!(
            core.match_event(&here(), ids[0].as_bytes()),
            EventMatch::Call(calls[0], "call")
        );
        core.finish(calls[0], None);
        assert_empty(&core);
    }
}

/// Two calls have an event id. One of them ends, and a third call gets the same id.
#[test]
fn an_event_of_two_calls_in_flight_matches_both_also_if_an_ended_third_had_it() {
    let (mut core, now) = (core(), Instant::now());
    let first = accepted(&mut core, request(1), "first");
    let second = accepted(&mut core, request(2), "second");
    core.record_event_id(first, b"x", EventIdFormat::Any);
    core.record_event_id(second, b"x", EventIdFormat::Any);
    core.finish(second, None);
    let third = accepted(&mut core, request(3), "third");
    core.record_event_id(third, b"x", EventIdFormat::Any);

    detach(&mut core, first, now);
    let mut matched = core.match_event(&here(), b"x").in_flight();
    matched.sort_unstable();
    // A resume stops the timers of all calls that its event id may match.
    for (id, _) in &matched {
        core.begin_resume(*id, now);
    }
    assert_eq!(matched, [(first, "first"), (third, "third")]);
    assert_eq!(core.expire(now + SECOND), [], "its client has resumed");
}

/// The client has resumed elsewhere. It is unknown in which of the two sessions.
#[test]
fn an_event_that_a_call_with_incomplete_ids_of_another_scope_may_have_matches_that_call_too() {
    let mut core = core();
    let known = accepted(&mut core, request(7), "known");
    core.record_event_id(known, b"x", EventIdFormat::Any);
    let there = Some((scope_of(1), RequestId::Number(7)));
    let blurred = accepted(&mut core, there, "blurred");
    core.mark_event_ids_incomplete(blurred);
    assert_eq!(core.match_event(&scope_of(1), b"x").in_flight().len(), 1);
    assert_eq!(core.candidates_for_event(b"x").len(), 2);
}

#[test]
fn calls_of_another_scope_do_not_count_for_the_limit_of_a_session() {
    let now = Instant::now();
    let mut core = limited(Limits::default().detached_of_session(1));
    let here = accepted(&mut core, request(7), "here");
    let there = Some((scope_of(1), RequestId::Number(7)));
    let there = accepted(&mut core, there, "there");
    assert_eq!(detach(&mut core, here, now), DetachOutcome::Waiting);
    assert_eq!(detach(&mut core, there, now), DetachOutcome::Waiting);
}
