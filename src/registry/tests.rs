use std::{
    sync::{Barrier, OnceLock},
    thread,
    time::Duration,
};

use super::{core::Rank, *};
use crate::call::{CancelReason, DetachCause, Detachment, RequestId};

const SECOND: Duration = Duration::from_secs(1);

/// What a registry tracks here. It notes what it hears.
#[derive(Default)]
struct Call {
    home: OnceLock<Arc<Home<Call>>>,
    heard: Mutex<Vec<Heard>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Heard {
    Left,
    Expired(CancelReason),
}

impl Tracked for Call {
    fn left(&self, _id: CallId, _finished: Finished) {
        self.heard.lock().unwrap().push(Heard::Left);
    }

    fn expired(self: &Arc<Self>, id: CallId, reason: CancelReason) {
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
    let (left, later, started) = registry.start(id, Some(&key.session.id), |home, core| {
        call.home.set(home.clone()).ok();
        core.start(id, Some(name), call.clone(), None);
        core.claim(id)
    });
    later.done();
    report(left);
    assert_eq!(started, Started::InTime);
    (id, call)
}

/// Ends a call with an answer of so many bytes, which its client may still come for if it is `owed`.
fn end_with(registry: &Registry<Call>, key: &Key, bytes: usize, owed: bool) -> CallId {
    let (id, call) = accepted(registry, key);
    let now = Instant::now();
    call.with(|core| {
        core.name(id, b"event", Form::Any);
        if owed {
            let gone = Detachment::new(DetachCause::HungUp, now);
            core.detach(id, FIRST, Wait::ForItsEnd, false, gone);
        }
        let ended = Ended {
            end: End::Cancelled(key.request.clone(), CancelReason::Orphaned),
            weight: bytes,
            until: now + SECOND,
        };
        core.finish(id, Some(ended))
    });
    id
}

fn has_home(registry: &Registry<Call>, id: &str) -> bool {
    registry.street.find(id).is_some()
}

#[test]
fn a_session_has_a_home_as_long_as_something_is_known_of_it() {
    let registry = Registry::new();
    let key = key("s", 1);
    for _again in 0..2 {
        assert!(!has_home(&registry, "s"));
        assert!(registry.find(&key).is_none() && registry.find_any(&key).is_none());
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
    one.1.with(|core| core.name(one.0, b"0/0", Form::Rmcp));
    let named = |key: &Key| registry.named(&key.session, b"0/0").in_flight().len();
    assert_eq!((named(&here), named(&there)), (1, 0));
    assert_eq!(registry.take_session(&there.session).len(), 1);
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
    registry.street.pretend_collision("victim", "stranger");

    let (second, other) = accepted(&registry, &stranger);
    assert!(registry.find_any(&stranger).is_none());
    assert!(registry.take_session(&stranger.session).is_empty());
    other.with(|core| core.name(second, b"0/0", Form::Rmcp));
    let named = registry.named(&stranger.session, b"0/0");
    assert!(named.in_flight().is_empty());
    assert!(
        !other
            .with(|core| core.finish(second, None))
            .unwrap()
            .injectable
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
        let wait = Wait::Until {
            deadline: now + seconds * SECOND,
            retry: SECOND,
        };
        let gone = Detachment::new(DetachCause::HungUp, now);
        let detached = call.with(|core| core.detach(id, FIRST, wait, false, gone));
        assert_eq!(detached, Detached::Waiting);
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
        dropped.extend(registry.make_room());
    }
    let totals = &registry.street.common.totals;
    assert!(totals.bytes() <= 100_000, "{}", totals.bytes());
    assert!(totals.bytes() > 80_000, "{}", totals.bytes());
    let of = |id: &str| {
        let bytes = |core: &mut Core<Call>| core.bytes_of(Rank::Owed);
        registry.visit(id, bytes).unwrap()
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
        dropped.extend(registry.make_room().into_iter().map(|it| it.session));
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
        let (started, taken) = thread::scope(|scope| {
            let starts = scope.spawn(|| {
                barrier.wait();
                let (id, call) = (CallId::next(), Arc::new(Call::default()));
                let start = |_: &Arc<Home<Call>>, core: &mut Core<Call>| {
                    core.start(id, None, call.clone(), None);
                };
                let (_, later, started) = registry.start(id, Some(&"s".into()), start);
                later.done();
                started
            });
            barrier.wait();
            let (taken, _) = registry.close();
            (starts.join().unwrap(), taken.len())
        });
        assert!(started == Started::TooLate || taken == 1, "{started:?}");
    }
}
