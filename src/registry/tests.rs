use std::{
    cell::Cell,
    sync::{Barrier, OnceLock},
    thread,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    session_map::{EXPIRY_BATCH, SCAN_BATCH},
    *,
};
use crate::{
    call::{CancelReason, DetachCause, Detachment, RequestId},
    timer::{LatenessTracker, OnDeadline, Timeliness},
};

const SECOND: Duration = Duration::from_secs(1);

const UNTIL_COMPLETE: DetachedState = DetachedState::UntilComplete {
    resume_window: Duration::ZERO,
};

/// A call for tests, which records its notifications.
#[derive(Default)]
struct Call {
    entry: OnceLock<Arc<SessionEntry<Call>>>,
    events: Mutex<Vec<Notification>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notification {
    Untracked,
    Expired(CancelReason),
}

impl Tracked for Call {
    fn on_untracked(&self, _id: CallId, _finished: Finished) {
        self.events.lock().unwrap().push(Notification::Untracked);
    }

    fn on_grace_expired(self: &Arc<Self>, id: CallId) {
        self.on_expired(id, CancelReason::Orphaned);
    }

    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        self.events
            .lock()
            .unwrap()
            .push(Notification::Expired(reason));
        self.with(|session| session.finish(id, None));
    }
}

impl Call {
    fn with<R>(&self, operation: impl FnOnce(&mut SessionState<Call>) -> R) -> R {
        self.entry.get().unwrap().with(operation)
    }

    fn events(&self) -> Vec<Notification> {
        self.events.lock().unwrap().clone()
    }
}

fn session(path: &str, id: &str) -> SessionKey {
    SessionKey {
        scope: Scope::Path(path.into()),
        id: id.into(),
    }
}

fn key(id: &str, request: i64) -> Key {
    Key {
        session: session("/mcp", id),
        request: RequestId::Number(request),
    }
}

/// Starts a call and accepts it.
fn accepted(registry: &Registry<Call>, key: &Key) -> (CallId, Arc<Call>) {
    let (id, call) = (CallId::next(), Arc::new(Call::default()));
    let call_key = (key.session.scope.clone(), key.request.clone());
    let (untracked, deferred, is_drained) =
        registry.start(id, Some(&key.session.id), |entry, session| {
            call.entry.set(entry.clone()).ok();
            session.start(id, Some(call_key), call.clone(), None);
            session.accept(id)
        });
    deferred.run();
    notify_untracked(untracked);
    assert!(!is_drained);
    (id, call)
}

/// Ends a call with an outcome of `bytes` bytes. The client may still resume if it `is_undelivered`.
fn end_with(registry: &Registry<Call>, key: &Key, bytes: usize, is_undelivered: bool) -> CallId {
    let (id, call) = accepted(registry, key);
    let now = Instant::now();
    call.with(|session| {
        session.record_event_id(id, b"event", EventIdFormat::Other);
        if is_undelivered {
            let detachment = Detachment::new(DetachCause::Disconnected, now);
            session.detach(id, POST_GENERATION, UNTIL_COMPLETE, false, detachment);
        }
        let ended = Completion {
            outcome: RetainedOutcome::Cancelled(key.request.clone(), CancelReason::Orphaned),
            weight: bytes,
            at: now,
            until: now + SECOND,
        };
        session.finish(id, Some(ended))
    });
    id
}

fn has_entry(registry: &Registry<Call>, id: &str) -> bool {
    registry.sessions.find(id).is_some()
}

#[test]
fn a_session_has_an_entry_while_it_has_calls() {
    let registry = Registry::new();
    let key = key("s", 1);
    for _ in 0..2 {
        assert!(!has_entry(&registry, "s"));
        assert!(
            registry.find(&key).is_none() && registry.find_including_unaccepted(&key).is_none()
        );
        let (id, call) = accepted(&registry, &key);
        assert_eq!(registry.find(&key).unwrap().0, id);
        assert_eq!((has_entry(&registry, "s"), registry.len()), (true, 1));
        assert!(call.with(|session| session.finish(id, None)).is_some());
        assert!(
            call.with(|session| session.finish(id, None)).is_none(),
            "the call ended twice"
        );
    }
    assert_eq!((has_entry(&registry, "s"), registry.len()), (false, 0));
}

#[test]
fn invariant_8_the_same_id_in_another_scope_is_another_session() {
    let registry = Registry::new();
    let [here, there] = ["/mcp", "/other"].map(|path| Key {
        session: session(path, "s"),
        request: RequestId::Number(7),
    });
    let [one, other] = [&here, &there].map(|key| accepted(&registry, key));
    assert_eq!(registry.find(&here).unwrap().0, one.0);
    assert_eq!(registry.find(&there).unwrap().0, other.0);
    one.1
        .with(|session| session.record_event_id(one.0, b"0/0", EventIdFormat::Rmcp));
    let matched = |key: &Key| registry.match_event(&key.session, b"0/0").in_flight().len();
    assert_eq!((matched(&here), matched(&there)), (1, 0));
    assert_eq!(registry.begin_close(&there.session).len(), 1);
    assert!(one.1.events().is_empty() && other.1.events().is_empty());
}

#[test]
fn invariant_9_a_call_untracked_by_a_reused_id_is_notified_once() {
    let registry = Registry::new();
    let (_, older) = accepted(&registry, &key("s", 7));
    let (_, elsewhere) = accepted(&registry, &key("t", 7));
    let (id, _newer) = accepted(&registry, &key("s", 7));
    assert_eq!(older.events(), [Notification::Untracked]);
    assert_eq!(elsewhere.events(), []);
    assert_eq!(registry.find(&key("s", 7)).unwrap().0, id);
}

/// Simulates two keys with the same 64-bit hash, which no client can bring about.
#[test]
fn after_a_full_collision_of_two_sessions_the_calls_of_the_second_are_not_found() {
    let registry = Registry::new();
    let (victim, colliding) = (key("victim", 7), key("colliding", 7));
    let (id, call) = accepted(&registry, &victim);
    registry.sessions.pretend_collision("victim", "colliding");

    let (second, other) = accepted(&registry, &colliding);
    assert!(registry.find_including_unaccepted(&colliding).is_none());
    assert!(registry.begin_close(&colliding.session).is_empty());
    other.with(|session| session.record_event_id(second, b"0/0", EventIdFormat::Rmcp));
    let matched = registry.match_event(&colliding.session, b"0/0");
    assert!(matched.in_flight().is_empty());
    assert!(
        !other
            .with(|session| session.finish(second, None))
            .unwrap()
            .may_cancel_server
    );
    assert!(call.events().is_empty() && call.with(|session| session.is_in_flight(id)));
}

/// Entries are added and removed while calls start. Each call can be found from its start to its end.
#[test]
fn no_call_is_registered_in_a_removed_entry() {
    const THREADS: usize = 4;
    let registry = Registry::new();
    let barrier = Barrier::new(THREADS);
    thread::scope(|scope| {
        for thread in 0..THREADS as i64 {
            let (registry, barrier) = (&registry, &barrier);
            scope.spawn(move || {
                barrier.wait();
                for _ in 0..20_000 {
                    let key = key("s", thread);
                    let (id, call) = accepted(registry, &key);
                    assert_eq!(registry.find(&key).map(|(id, _)| id), Some(id));
                    assert!(call.with(|session| session.finish(id, None)).is_some());
                }
            });
        }
    });
    assert_eq!((has_entry(&registry, "s"), registry.len()), (false, 0));
}

#[tokio::test(start_paused = true)]
async fn the_graces_of_all_sessions_expire_on_time() {
    let registry = Registry::new();
    let now = Instant::now();
    let calls = [3_u32, 1, 2].map(|seconds| {
        let (id, call) = accepted(&registry, &key(&seconds.to_string(), 1));
        let wait = DetachedState::GraceUntil {
            deadline: now + seconds * SECOND,
            retry: SECOND,
        };
        let detachment = Detachment::new(DetachCause::Disconnected, now);
        let detached =
            call.with(|session| session.detach(id, POST_GENERATION, wait, false, detachment));
        assert_eq!(detached, DetachOutcome::Waiting);
        (seconds, call)
    });
    for second in 0..4 {
        let remaining = calls
            .iter()
            .filter(|(deadline, _)| *deadline > second)
            .count();
        assert_eq!(
            (registry.len(), registry.detached()),
            (remaining, remaining)
        );
        tokio::time::sleep(SECOND + Duration::from_millis(u64::from(second == 0))).await;
    }
    for (_, call) in &calls {
        assert_eq!(
            call.events(),
            [Notification::Expired(CancelReason::Orphaned)]
        );
    }
}

#[test]
fn a_call_that_starts_during_a_drain_is_found_or_ended() {
    for _ in 0..2_000 {
        let registry = Registry::new();
        let barrier = Barrier::new(2);
        let (is_drained, taken) = thread::scope(|scope| {
            let starting = scope.spawn(|| {
                barrier.wait();
                let (id, call) = (CallId::next(), Arc::new(Call::default()));
                let start = |_: &Arc<SessionEntry<Call>>, session: &mut SessionState<Call>| {
                    session.start(id, None, call.clone(), None);
                };
                let (_, deferred, is_drained) = registry.start(id, Some(&"s".into()), start);
                deferred.run();
                is_drained
            });
            barrier.wait();
            let (taken, _) = registry.close();
            (starting.join().unwrap(), taken.len())
        });
        assert!(is_drained || taken == 1);
    }
}

#[test]
fn calls_that_are_retained_at_the_same_time_never_exceed_the_limit() {
    const MAX_CALLS: usize = 1_000_000;
    for round in 0..500 {
        let registry = Registry::new();
        registry.set_limits(Limits::default().retained(MAX_CALLS));
        let barrier = Barrier::new(2);
        thread::scope(|scope| {
            for id in ["one", "other"] {
                let (registry, barrier) = (&registry, &barrier);
                scope.spawn(move || {
                    barrier.wait();
                    end_with(registry, &key(id, 1), 300_000, true);
                });
            }
        });
        let bytes = registry.sessions.shared.totals.bytes();
        assert!(bytes > 300_000, "round {round}: neither answer is retained");
        assert!(bytes < 600_000, "round {round}: {bytes} bytes are retained");
    }
}

/// Calls are detached, attached, ended, checked and retained concurrently. In the end, no state is left.
#[test]
fn after_concurrent_operations_all_counters_are_zero() {
    const CALLS: usize = 400;
    const THREADS: usize = 3;
    for round in 0..10_u64 {
        let registry = Registry::new();
        registry.set_limits(
            Limits::default()
                .detached(40)
                .detached_per_session(9)
                .retained(30_000),
        );
        let keys = |n: usize| key(&format!("s{}", n % 7), (n / 7) as i64 % 5);
        let calls: Vec<_> = (0..CALLS).map(|n| accepted(&registry, &keys(n))).collect();
        let barrier = Barrier::new(THREADS);
        let now = Instant::now();
        thread::scope(|scope| {
            for thread in 0..THREADS as u64 {
                let (registry, barrier, calls, keys) = (&registry, &barrier, &calls, &keys);
                scope.spawn(move || {
                    let mut rng = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(round * 8 + thread + 1);
                    barrier.wait();
                    for _ in 0..4_000 {
                        rng ^= rng << 13;
                        rng ^= rng >> 7;
                        rng ^= rng << 17;
                        let n = (rng >> 8) as usize % CALLS;
                        let (id, call) = &calls[n];
                        match rng % 7 {
                            0 => drop(call.with(|session| session.attach(*id))),
                            1 | 2 => {
                                let wait = match rng & 64 {
                                    0 => UNTIL_COMPLETE,
                                    _ => DetachedState::GraceUntil {
                                        deadline: now,
                                        retry: SECOND,
                                    },
                                };
                                let detachment = Detachment::new(DetachCause::Disconnected, now);
                                let _ = call.with(|session| {
                                    session.detach(*id, POST_GENERATION, wait, false, detachment)
                                });
                            }
                            3 => {
                                let has_started =
                                    call.with(|session| session.begin_resume(*id, now));
                                if has_started {
                                    call.with(|session| session.end_resume(*id, now));
                                }
                            }
                            4 => {
                                let ended = Completion {
                                    outcome: RetainedOutcome::Cancelled(
                                        RequestId::Number(1),
                                        CancelReason::Orphaned,
                                    ),
                                    weight: (rng >> 40) as usize % 4_000,
                                    at: now,
                                    until: now + SECOND,
                                };
                                call.with(|session| {
                                    session.record_event_id(*id, b"0/0", EventIdFormat::Other)
                                });
                                call.with(|session| session.finish(*id, Some(ended)));
                                call.with(SessionState::take_evicted);
                            }
                            5 => {
                                if let Some(entry) = registry.sessions.find(&keys(n).session.id) {
                                    entry.on_deadline(
                                        &LatenessTracker::new(now, Timeliness::OnTime),
                                        Timeliness::OnTime,
                                    );
                                }
                            }
                            _ => drop(registry.find(&keys(n))),
                        }
                    }
                });
            }
        });
        for (id, call) in &calls {
            call.with(|session| session.finish(*id, None));
        }
        assert_eq!(
            (registry.len(), registry.detached()),
            (0, 0),
            "round {round}"
        );
        for n in 0..CALLS {
            registry.begin_close(&keys(n).session);
        }
        let bytes = registry.sessions.shared.totals.bytes();
        assert_eq!(bytes, 0, "round {round}");
        assert_eq!(registry.sessions.entries().count(), 16, "round {round}");
    }
}

/// Timers start, stop and expire while several timer tasks are checking them.
#[test]
fn no_deadline_is_left_without_a_timer() {
    const CALLS: usize = 24;
    const THREADS: u64 = 3;
    let start = Instant::now();
    for round in 0..60_u64 {
        let registry = Registry::new();
        let keys = |n: usize| key(&format!("s{}", n % 3), n as i64);
        let calls: Vec<_> = (0..CALLS).map(|n| accepted(&registry, &keys(n))).collect();
        let barrier = Barrier::new(THREADS as usize);
        thread::scope(|scope| {
            for thread in 0..THREADS {
                let (registry, barrier, calls) = (&registry, &barrier, &calls);
                scope.spawn(move || {
                    let mut rng = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(round * 8 + thread + 1);
                    barrier.wait();
                    for step in 0..2_000 {
                        rng ^= rng << 13;
                        rng ^= rng >> 7;
                        rng ^= rng << 17;
                        let now = start + step * Duration::from_millis(1);
                        let (id, call) = &calls[(rng >> 8) as usize % CALLS];
                        match rng % 4 {
                            0 => drop(registry.sessions.timer.run_expired_now(now)),
                            1 => {
                                let stream = call.with(|session| session.attach(*id));
                                let wait = DetachedState::GraceUntil {
                                    deadline: now + Duration::from_millis(rng >> 40 & 31),
                                    retry: SECOND,
                                };
                                let detachment = Detachment::new(DetachCause::Disconnected, now);
                                call.with(|session| {
                                    session.detach(*id, POST_GENERATION, wait, false, detachment);
                                    stream.map(|stream| {
                                        session.detach(*id, stream, wait, false, detachment)
                                    })
                                });
                            }
                            2 => {
                                if call.with(|session| session.begin_resume(*id, now)) {
                                    call.with(|session| session.end_resume(*id, now));
                                }
                            }
                            _ => drop(call.with(|session| session.attach(*id))),
                        }
                    }
                });
            }
        });
        for entry in registry.sessions.entries() {
            assert!(!entry.has_unscheduled_deadline(), "round {round}");
        }
    }
}

/// Detaches a call at `now`, with its deadline a second later.
fn detach((id, call): &(CallId, Arc<Call>), now: Instant) {
    let wait = DetachedState::GraceUntil {
        deadline: now + SECOND,
        retry: SECOND,
    };
    let detachment = Detachment::new(DetachCause::Disconnected, now);
    call.with(|session| session.detach(*id, POST_GENERATION, wait, false, detachment));
}

/// The session's other calls are served between two batches.
#[test]
fn expired_deadlines_of_a_session_are_handled_in_batches() {
    const BATCHES: usize = 5;
    let registry = Registry::new();
    let calls: Vec<_> = (0..EXPIRY_BATCH * BATCHES)
        .map(|n| accepted(&registry, &key("s", n as i64)))
        .collect();
    let now = Instant::now();
    calls.iter().for_each(|call| detach(call, now));
    let tracker = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    let entry = registry.sessions.find("s").unwrap();
    for batches in 1..=BATCHES {
        entry.on_deadline(&tracker, Timeliness::OnTime);
        let expired = calls.iter().filter(|(_, call)| !call.events().is_empty());
        assert_eq!(expired.count(), batches * EXPIRY_BATCH);
        assert!(!entry.has_unscheduled_deadline());
    }
    assert_eq!((has_entry(&registry, "s"), registry.len()), (false, 0));
}

/// A scan holds no lock while the caller handles one of the calls.
#[test]
fn calls_are_scanned_in_batches() {
    let registry = Registry::new();
    let ids: Vec<_> = (0..2 * SCAN_BATCH + 1)
        .map(|n| accepted(&registry, &key("s", n as i64)).0)
        .collect();
    let mut seen = Vec::new();
    for id in registry.scan_calls(|id, _| Some(id)) {
        // A call that starts in the meantime must not extend the scan.
        accepted(&registry, &key("s", 100_000 + seen.len() as i64));
        seen.push(id);
    }
    assert_eq!(seen, ids);
}

/// Otherwise ending all of a session's calls would take quadratic time.
#[test]
fn only_a_batch_of_newer_calls_is_checked() {
    let registry = Registry::new();
    let ids: Vec<_> = (0..SCAN_BATCH + 2)
        .map(|n| accepted(&registry, &key("s", n as i64)).0)
        .collect();
    let checked = Cell::new(0);
    let any_newer = |after: usize, wanted: Option<usize>| {
        checked.set(0);
        registry.any_newer("s", ids[after], |id, _| {
            checked.set(checked.get() + 1);
            wanted.is_some_and(|wanted| ids[wanted] == id)
        })
    };
    assert_eq!(any_newer(0, None), None);
    assert_eq!(checked.get(), SCAN_BATCH);
    assert_eq!(any_newer(0, Some(0)), None, "it is not newer than itself");
    assert_eq!(any_newer(0, Some(2)), Some(true));
    assert_eq!(any_newer(1, None), Some(false));
    assert_eq!(any_newer(1, Some(SCAN_BATCH + 1)), Some(true));
    assert_eq!(registry.any_newer("t", ids[0], |_, _| true), Some(false));
}

#[test]
fn a_scan_returns_each_in_flight_call_once_while_others_start_and_end() {
    const PERMANENT_CALLS: usize = 3 * SCAN_BATCH;
    let registry = Registry::new();
    let start = |n: usize| accepted(&registry, &key(&format!("s{}", n % 2), n as i64));
    let mut permanent = Vec::new();
    let mut ending = Vec::new();
    for n in 0..PERMANENT_CALLS {
        permanent.push(start(2 * n).0);
        ending.push(start(2 * n + 1));
    }
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            for (n, (id, call)) in ending.into_iter().enumerate() {
                call.with(|session| session.finish(id, None));
                start(2 * PERMANENT_CALLS + n);
            }
        });
        barrier.wait();
        for _ in 0..20 {
            let mut seen: Vec<_> = registry.scan_calls(|id, _| Some(id)).collect();
            seen.sort_unstable();
            let all = seen.len();
            seen.dedup();
            assert_eq!(seen.len(), all, "a call was returned twice");
            seen.retain(|id| permanent.binary_search(id).is_ok());
            assert_eq!(seen, permanent);
        }
    });
}

/// Many deadlines expire, and each of the runtime's turns takes 9 ms. A client resumes a millisecond before its call's grace period ends,
/// and the resume is only served a few turns later.
#[tokio::test(start_paused = true)]
async fn a_timely_resume_is_served_while_many_deadlines_expire() {
    const TURN: Duration = Duration::from_millis(9);
    let registry = Arc::new(Registry::new());
    let now = Instant::now();
    let others: Vec<_> = (0..200)
        .map(|n| accepted(&registry, &key(&format!("s{n}"), 1)))
        .collect();
    others.iter().for_each(|call| detach(call, now));
    let (id, call) = accepted(&registry, &key("late", 1));
    detach(&(id, call.clone()), now + Duration::from_millis(1));
    tokio::time::sleep_until(now + SECOND).await;
    let mut busy = tokio::task::JoinSet::new();
    busy.spawn(async {
        loop {
            tokio::time::advance(TURN).await;
        }
    });
    for _ in 0..6 {
        tokio::task::yield_now().await;
    }
    assert!(others.iter().all(|(_, call)| !call.events().is_empty()));
    assert_eq!(call.events(), []);
    assert!(call.with(|session| session.begin_resume(id, Instant::now())));
}
