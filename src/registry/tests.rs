use std::{
    sync::{Barrier, OnceLock},
    thread,
    time::Duration,
};

use tokio::time::Instant;

use super::{
    core::DeliveryState,
    session_map::{EXPIRY_BATCH, SCAN_BATCH},
    *,
};
use crate::{
    call::{CancelReason, DetachCause, Detachment, RequestId},
    timer::{LatenessTracker, OnDeadline, Timeliness},
};

const SECOND: Duration = Duration::from_secs(1);

const FOR_ITS_END: DetachedState = DetachedState::UntilComplete {
    resume_window: Duration::ZERO,
};

/// What a registry tracks here. It notes what it hears.
#[derive(Default)]
struct Call {
    home: OnceLock<Arc<SessionEntry<Call>>>,
    heard: Mutex<Vec<Heard>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    Left,
    Expired(CancelReason),
}

impl Tracked for Call {
    fn on_untracked(&self, _id: CallId, _finished: Finished) {
        self.heard.lock().unwrap().push(Heard::Left);
    }

    fn on_grace_expired(self: &Arc<Self>, id: CallId) {
        self.on_expired(id, CancelReason::Orphaned);
    }

    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        self.heard.lock().unwrap().push(Heard::Expired(reason));
        self.with(|core| core.finish(id, None));
    }
}

impl Call {
    fn with<R>(&self, operation: impl FnOnce(&mut Core<Call>) -> R) -> R {
        self.home.get().unwrap().with(operation)
    }

    fn heard(&self) -> Vec<Heard> {
        self.heard.lock().unwrap().clone()
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

/// Starts a call and claims its id.
fn accepted(registry: &Registry<Call>, key: &Key) -> (CallId, Arc<Call>) {
    let (id, call) = (CallId::next(), Arc::new(Call::default()));
    let name = (key.session.scope.clone(), key.request.clone());
    let (left, later, is_too_late) = registry.start(id, Some(&key.session.id), |home, core| {
        call.home.set(home.clone()).ok();
        core.start(id, Some(name), call.clone(), None);
        core.accept(id)
    });
    later.run();
    report(left);
    assert!(!is_too_late);
    (id, call)
}

/// Ends a call with an answer of so many bytes, which its client may still come for if it is `owed`.
fn end_with(registry: &Registry<Call>, key: &Key, bytes: usize, owed: bool) -> CallId {
    let (id, call) = accepted(registry, key);
    let now = Instant::now();
    call.with(|core| {
        core.record_event_id(id, b"event", EventIdFormat::Any);
        if owed {
            let gone = Detachment::new(DetachCause::Disconnected, now);
            core.detach(id, POST_GENERATION, FOR_ITS_END, false, gone);
        }
        let ended = Completion {
            outcome: RetainedOutcome::Cancelled(key.request.clone(), CancelReason::Orphaned),
            weight: bytes,
            at: now,
            until: now + SECOND,
        };
        core.finish(id, Some(ended))
    });
    id
}

fn has_home(registry: &Registry<Call>, id: &str) -> bool {
    registry.sessions.find(id).is_some()
}

#[test]
fn a_session_has_a_home_as_long_as_something_is_known_of_it() {
    let registry = Registry::new();
    let key = key("s", 1);
    for _again in 0..2 {
        assert!(!has_home(&registry, "s"));
        assert!(registry.find(&key).is_none() && registry.find_unaccepted_too(&key).is_none());
        let (id, call) = accepted(&registry, &key);
        assert_eq!(registry.find(&key).unwrap().0, id);
        assert_eq!((has_home(&registry, "s"), registry.len()), (true, 1));
        assert!(call.with(|core| core.finish(id, None)).is_some());
        assert!(call.with(|core| core.finish(id, None)).is_none(), "once");
    }
    assert_eq!((has_home(&registry, "s"), registry.len()), (false, 0));
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
        .with(|core| core.record_event_id(one.0, b"0/0", EventIdFormat::Rmcp));
    let named = |key: &Key| registry.match_event(&key.session, b"0/0").in_flight().len();
    assert_eq!((named(&here), named(&there)), (1, 0));
    assert_eq!(registry.begin_close(&there.session).len(), 1);
    assert!(one.1.heard().is_empty() && other.1.heard().is_empty());
}

#[test]
fn invariant_9_who_leaves_for_a_call_with_its_id_hears_of_it_once() {
    let registry = Registry::new();
    let (_, older) = accepted(&registry, &key("s", 7));
    let (_, elsewhere) = accepted(&registry, &key("t", 7));
    let (id, _newer) = accepted(&registry, &key("s", 7));
    assert_eq!(older.heard(), [Heard::Left]);
    assert_eq!(elsewhere.heard(), []);
    assert_eq!(registry.find(&key("s", 7)).unwrap().0, id);
}

/// As if the hashes of two names were the same in all 64 bits, which nobody can bring about.
#[test]
fn a_full_collision_of_two_sessions_leaves_the_calls_of_the_second_where_nobody_finds_them() {
    let registry = Registry::new();
    let (victim, stranger) = (key("victim", 7), key("stranger", 7));
    let (id, call) = accepted(&registry, &victim);
    registry.sessions.pretend_collision("victim", "stranger");

    let (second, other) = accepted(&registry, &stranger);
    assert!(registry.find_unaccepted_too(&stranger).is_none());
    assert!(registry.begin_close(&stranger.session).is_empty());
    other.with(|core| core.record_event_id(second, b"0/0", EventIdFormat::Rmcp));
    let named = registry.match_event(&stranger.session, b"0/0");
    assert!(named.in_flight().is_empty());
    assert!(
        !other
            .with(|core| core.finish(second, None))
            .unwrap()
            .may_cancel_server
    );
    assert!(call.heard().is_empty() && call.with(|core| core.is_in_flight(id)));
}

/// Homes come and go all the time while calls are entered: each is found from then on until it ends.
#[test]
fn no_call_is_entered_where_nobody_looks() {
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
                    assert!(call.with(|core| core.finish(id, None)).is_some());
                }
            });
        }
    });
    assert_eq!((has_home(&registry, "s"), registry.len()), (false, 0));
}

#[tokio::test(start_paused = true)]
async fn the_graces_of_all_sessions_end_when_they_are_over() {
    let registry = Registry::new();
    let now = Instant::now();
    let calls = [3_u32, 1, 2].map(|seconds| {
        let (id, call) = accepted(&registry, &key(&seconds.to_string(), 1));
        let wait = DetachedState::GraceUntil {
            deadline: now + seconds * SECOND,
            retry: SECOND,
        };
        let gone = Detachment::new(DetachCause::Disconnected, now);
        let detached = call.with(|core| core.detach(id, POST_GENERATION, wait, false, gone));
        assert_eq!(detached, DetachOutcome::Waiting);
        (seconds, call)
    });
    for second in 0..4 {
        let left = calls.iter().filter(|(ends, _)| *ends > second).count();
        assert_eq!((registry.len(), registry.detached()), (left, left));
        tokio::time::sleep(SECOND + Duration::from_millis(u64::from(second == 0))).await;
    }
    for (_, call) in &calls {
        assert_eq!(call.heard(), [Heard::Expired(CancelReason::Orphaned)]);
    }
}

#[test]
fn the_sessions_that_hold_the_most_forget_first() {
    let registry = Registry::new();
    registry.limit(Limits::default().retained(100_000));
    let mut dropped = Vec::new();
    end_with(&registry, &key("small", 1), 1_000, true);
    for request in 0..40 {
        end_with(&registry, &key("large", request), 5_000, true);
        dropped.extend(registry.evict());
    }
    let totals = &registry.sessions.common.totals;
    assert!(totals.bytes() <= 100_000, "{}", totals.bytes());
    assert!(totals.bytes() > 80_000, "{}", totals.bytes());
    let of = |id: &str| {
        let bytes = |core: &mut Core<Call>| core.bytes_of(DeliveryState::Undelivered);
        registry.with_session(id, bytes).unwrap()
    };
    assert!(of("small") >= 1_000);
    assert!(!dropped.is_empty());
    assert!(dropped.iter().all(|dropped| &*dropped.session == "large"));
}

/// The oldest of sessions that hold the same, as those of clients have that open one for each call.
#[tokio::test(start_paused = true)]
async fn of_sessions_that_hold_the_same_the_oldest_forget() {
    let registry = Registry::new();
    registry.limit(Limits::default().retained(100_000));
    let mut dropped = Vec::new();
    for n in 100..200 {
        end_with(&registry, &key(&n.to_string(), 1), 2_000, true);
        dropped.extend(registry.evict().into_iter().map(|it| it.session));
        tokio::time::advance(Duration::from_micros(1)).await;
    }
    let expected = (100..).map(|n: u32| n.to_string()).take(dropped.len());
    dropped.sort();
    assert!(
        dropped
            .iter()
            .map(|session| session.to_string())
            .eq(expected)
    );
}

#[test]
fn whoever_drains_and_who_starts_see_each_other() {
    for _round in 0..2_000 {
        let registry = Registry::new();
        let barrier = Barrier::new(2);
        let (is_too_late, taken) = thread::scope(|scope| {
            let starts = scope.spawn(|| {
                barrier.wait();
                let (id, call) = (CallId::next(), Arc::new(Call::default()));
                let start = |_: &Arc<SessionEntry<Call>>, core: &mut Core<Call>| {
                    core.start(id, None, call.clone(), None);
                };
                let (_, later, is_too_late) = registry.start(id, Some(&"s".into()), start);
                later.run();
                is_too_late
            });
            barrier.wait();
            let (taken, _) = registry.close();
            (starts.join().unwrap(), taken.len())
        });
        assert!(is_too_late || taken == 1);
    }
}

/// As `Exchange::report_dropped` does: who has ended a call makes room, if that is too much.
#[test]
fn when_all_have_made_room_no_more_is_remembered_than_may_be() {
    const MOST: usize = 1_000_000;
    for round in 0..500 {
        let registry = Registry::new();
        registry.limit(Limits::default().retained(MOST));
        for n in 0..300 {
            end_with(&registry, &key(&format!("small-{n}"), 1), 2_000, true);
        }
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                end_with(&registry, &key("one", 1), 600_000, true);
                registry.evict();
                is_over.store(true, Ordering::Release);
            });
            // While the other one makes room.
            while registry.pending_evictions.load(Ordering::Acquire) == 0
                && !is_over.load(Ordering::Acquire)
            {
                std::hint::spin_loop();
            }
            end_with(&registry, &key("other", 1), 600_000, true);
            registry.evict();
        });
        let bytes = registry.sessions.common.totals.bytes();
        assert!(bytes <= MOST, "round {round}: {bytes} bytes are remembered");
    }
}

/// Calls that lose their clients, get them back, end, are looked at and remembered, all at the same time: nothing of
/// them is left.
#[test]
fn whatever_happens_to_calls_at_the_same_time_nothing_of_them_is_counted_in_the_end() {
    const CALLS: usize = 400;
    const THREADS: usize = 3;
    for round in 0..10_u64 {
        let registry = Registry::new();
        registry.limit(
            Limits::default()
                .detached(40)
                .detached_of_session(9)
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
                    let mut dice = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(round * 8 + thread + 1);
                    barrier.wait();
                    for _ in 0..4_000 {
                        dice ^= dice << 13;
                        dice ^= dice >> 7;
                        dice ^= dice << 17;
                        let n = (dice >> 8) as usize % CALLS;
                        let (id, call) = &calls[n];
                        match dice % 7 {
                            0 => drop(call.with(|core| core.attach(*id))),
                            1 | 2 => {
                                let wait = match dice & 64 {
                                    0 => FOR_ITS_END,
                                    _ => DetachedState::GraceUntil {
                                        deadline: now,
                                        retry: SECOND,
                                    },
                                };
                                let gone = Detachment::new(DetachCause::Disconnected, now);
                                let _done = call.with(|core| {
                                    core.detach(*id, POST_GENERATION, wait, false, gone)
                                });
                            }
                            3 => {
                                let held = call.with(|core| core.begin_resume(*id, now));
                                if held {
                                    call.with(|core| core.end_resume(*id, now));
                                }
                            }
                            4 => {
                                let ended = Completion {
                                    outcome: RetainedOutcome::Cancelled(
                                        RequestId::Number(1),
                                        CancelReason::Orphaned,
                                    ),
                                    weight: (dice >> 40) as usize % 4_000,
                                    at: now,
                                    until: now + SECOND,
                                };
                                call.with(|core| {
                                    core.record_event_id(*id, b"0/0", EventIdFormat::Any)
                                });
                                call.with(|core| core.finish(*id, Some(ended)));
                                call.with(Core::take_evicted);
                                registry.evict();
                            }
                            5 => {
                                if let Some(home) = registry.sessions.find(&keys(n).session.id) {
                                    home.on_deadline(
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
            call.with(|core| core.finish(*id, None));
        }
        assert_eq!(
            (registry.len(), registry.detached()),
            (0, 0),
            "round {round}"
        );
        for n in 0..CALLS {
            registry.begin_close(&keys(n).session);
        }
        let bytes = registry.sessions.common.totals.bytes();
        assert_eq!(bytes, 0, "round {round}");
        assert_eq!(registry.sessions.entries().count(), 16, "round {round}");
    }
}

/// Clocks start, stop and end while several keepers look.
#[test]
fn no_deadline_is_left_at_which_nobody_looks() {
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
                    let mut dice = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(round * 8 + thread + 1);
                    barrier.wait();
                    for step in 0..2_000 {
                        dice ^= dice << 13;
                        dice ^= dice >> 7;
                        dice ^= dice << 17;
                        let now = start + step * Duration::from_millis(1);
                        let (id, call) = &calls[(dice >> 8) as usize % CALLS];
                        match dice % 4 {
                            0 => drop(registry.sessions.timer.run_expired_now(now)),
                            1 => {
                                let stream = call.with(|core| core.attach(*id));
                                let wait = DetachedState::GraceUntil {
                                    deadline: now + Duration::from_millis(dice >> 40 & 31),
                                    retry: SECOND,
                                };
                                let gone = Detachment::new(DetachCause::Disconnected, now);
                                call.with(|core| {
                                    core.detach(*id, POST_GENERATION, wait, false, gone);
                                    stream.map(|it| core.detach(*id, it, wait, false, gone))
                                });
                            }
                            2 => {
                                if call.with(|core| core.begin_resume(*id, now)) {
                                    call.with(|core| core.end_resume(*id, now));
                                }
                            }
                            _ => drop(call.with(|core| core.attach(*id))),
                        }
                    }
                });
            }
        });
        for home in registry.sessions.entries() {
            assert!(!home.has_unscheduled_deadline(), "round {round}");
        }
    }
}

/// Detaches a call at `now`, with its deadline then.
fn let_go((id, call): &(CallId, Arc<Call>), now: Instant) {
    let wait = DetachedState::GraceUntil {
        deadline: now + SECOND,
        retry: SECOND,
    };
    let gone = Detachment::new(DetachCause::Disconnected, now);
    call.with(|core| core.detach(*id, POST_GENERATION, wait, false, gone));
}

/// Other calls of the session are served in between.
#[test]
fn what_is_due_in_a_home_is_done_in_portions() {
    const PORTIONS: usize = 5;
    let registry = Registry::new();
    let calls: Vec<_> = (0..EXPIRY_BATCH * PORTIONS)
        .map(|n| accepted(&registry, &key("s", n as i64)))
        .collect();
    let now = Instant::now();
    calls.iter().for_each(|call| let_go(call, now));
    let watch = LatenessTracker::new(now + SECOND, Timeliness::OnTime);
    let home = registry.sessions.find("s").unwrap();
    for portions in 1..=PORTIONS {
        home.on_deadline(&watch, Timeliness::OnTime);
        let over = calls.iter().filter(|(_, call)| !call.heard().is_empty());
        assert_eq!(over.count(), portions * EXPIRY_BATCH);
        assert!(!home.has_unscheduled_deadline());
    }
    assert_eq!((has_home(&registry, "s"), registry.len()), (false, 0));
}

/// Whoever looks at all calls has no lock while it does something with one of them.
#[test]
fn calls_are_looked_at_page_by_page() {
    let registry = Registry::new();
    let ids: Vec<_> = (0..2 * SCAN_BATCH + 1)
        .map(|n| accepted(&registry, &key("s", n as i64)).0)
        .collect();
    let mut seen = Vec::new();
    for id in registry.scan_calls(|id, _| Some(id)) {
        // One that comes meanwhile does not make it endless.
        accepted(&registry, &key("s", 100_000 + seen.len() as i64));
        seen.push(id);
    }
    assert_eq!(seen, ids);
}

#[test]
fn a_call_in_flight_is_seen_once_whatever_comes_and_goes() {
    const STAY: usize = 3 * SCAN_BATCH;
    let registry = Registry::new();
    let start = |n: usize| accepted(&registry, &key(&format!("s{}", n % 2), n as i64));
    let mut stay = Vec::new();
    let mut go = Vec::new();
    for n in 0..STAY {
        stay.push(start(2 * n).0);
        go.push(start(2 * n + 1));
    }
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            for (n, (id, call)) in go.into_iter().enumerate() {
                call.with(|core| core.finish(id, None));
                start(2 * STAY + n);
            }
        });
        barrier.wait();
        for _ in 0..20 {
            let mut seen: Vec<_> = registry.scan_calls(|id, _| Some(id)).collect();
            seen.sort_unstable();
            let all = seen.len();
            seen.dedup();
            assert_eq!(seen.len(), all, "none twice");
            seen.retain(|id| stay.binary_search(id).is_ok());
            assert_eq!(seen, stay);
        }
    });
}

/// Much is due, and whenever the tasks of the runtime have a turn they take 9 ms. A client resumes a millisecond before its
/// call's grace ends, and its resume needs a few of these turns to get through.
#[tokio::test(start_paused = true)]
async fn a_client_that_was_in_time_is_heard_while_much_is_due() {
    const TURN: Duration = Duration::from_millis(9);
    let registry = Arc::new(Registry::new());
    let now = Instant::now();
    let others: Vec<_> = (0..200)
        .map(|n| accepted(&registry, &key(&format!("s{n}"), 1)))
        .collect();
    others.iter().for_each(|call| let_go(call, now));
    let (id, call) = accepted(&registry, &key("late", 1));
    let_go(&(id, call.clone()), now + Duration::from_millis(1));
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
    assert!(others.iter().all(|(_, call)| !call.heard().is_empty()));
    assert_eq!(call.heard(), []);
    assert!(call.with(|core| core.begin_resume(id, Instant::now())));
}
