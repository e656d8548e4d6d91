use std::{
    sync::{Mutex, OnceLock, PoisonError},
    time::Duration,
};

use tokio::time::sleep;

use super::{
    super::{MAX_PER_POLL, Timer, TimerHandle},
    *,
};

const MINUTE: Duration = Duration::from_secs(60);

/// A target that is rearmed every minute, and whose callback drops the stream that it keeps.
#[derive(Default)]
struct Stream {
    handle: OnceLock<TimerHandle>,
    keeps: Mutex<Option<Arc<Stream>>>,
}

impl Stream {
    fn with_deadline(timer: &Arc<Timer>, at: Instant) -> Arc<Self> {
        let stream = Arc::new(Self::default());
        let weak: Weak<Self> = Arc::downgrade(&stream);
        let first = stream.handle.set(timer.set(at, weak));
        assert!(first.is_ok());
        stream
    }
}

impl OnDeadline for Stream {
    fn on_deadline(&self, lateness: &LatenessTracker, _timeliness: Timeliness) -> Option<Rearm> {
        let now = lateness.now();
        let mut keeps = self.keeps.lock().unwrap_or_else(PoisonError::into_inner);
        drop(keeps.take());
        Some(Rearm::At(now + MINUTE))
    }
}

fn counts(timer: &Timer) -> (usize, usize) {
    let entries = timer.entries();
    (entries.due.len(), entries.entries.len())
}

fn next(timer: &Timer) -> Option<Instant> {
    timer.entries().next()
}

#[test]
fn a_dropped_target_leaves_no_entry() {
    let timer = Arc::new(Timer::new());
    let at = Instant::now() + MINUTE;
    let streams: Vec<_> = (0..100)
        .map(|_| Stream::with_deadline(&timer, at))
        .collect();
    assert_eq!(counts(&timer), (100, 100));
    let weak_streams: Vec<_> = streams.iter().map(Arc::downgrade).collect();
    drop(streams);
    assert_eq!(counts(&timer), (0, 0));
    assert!(weak_streams.iter().all(|weak| weak.weak_count() == 0));
    assert_eq!(next(&timer), None);
}

#[test]
fn a_target_that_rearms_is_called_again() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let stream = Stream::with_deadline(&timer, now);
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(counts(&timer), (1, 1));
    drop(stream);
    assert_eq!(counts(&timer), (0, 0));
}

/// The timer may hold the last reference to a target, or drop a target that expires next.
#[test]
fn a_target_dropped_in_its_callback_leaves_no_entry() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let first = Stream::with_deadline(&timer, now);
    let next = Stream::with_deadline(&timer, now);
    let later = Stream::with_deadline(&timer, now + MINUTE);
    *next.keeps.lock().expect("no panic") = Some(later);
    *first.keeps.lock().expect("no panic") = Some(next);
    let weak = Arc::downgrade(&first);
    let (id, expired) = timer.take_expired(now).expect("due");
    drop(first);
    let requeue = expired.run(&LatenessTracker::new(now, Timeliness::OnTime));
    assert_eq!(weak.strong_count(), 0);
    assert!(timer.take_expired(now).is_none());
    timer.entries().requeue(id, &requeue);
    assert_eq!(counts(&timer), (0, 0));
}

/// A target that calls `at_deadline` at its deadline, and removes its entry when dropped.
struct CallbackTarget {
    at_deadline: Box<dyn Fn(Instant) -> Option<Rearm> + Send + Sync>,
    handle: OnceLock<TimerHandle>,
}

impl CallbackTarget {
    fn set(
        timer: &Arc<Timer>,
        deadline: Instant,
        at_deadline: impl Fn(Instant) -> Option<Rearm> + Send + Sync + 'static,
    ) -> Arc<Self> {
        let target = Arc::new(Self {
            at_deadline: Box::new(at_deadline),
            handle: OnceLock::new(),
        });
        let weak: Weak<Self> = Arc::downgrade(&target);
        assert!(target.handle.set(timer.set(deadline, weak)).is_ok());
        target
    }
}

impl OnDeadline for CallbackTarget {
    fn on_deadline(&self, lateness: &LatenessTracker, _timeliness: Timeliness) -> Option<Rearm> {
        (self.at_deadline)(lateness.now())
    }
}

/// Handles expired entries as another timer task would. Returns when that task would wake.
fn run_elsewhere(timer: &Arc<Timer>, now: Instant) -> Option<Instant> {
    timer.run_all_expired(&LatenessTracker::new(now, Timeliness::Late))
}

/// Two timer tasks can run at once. One may sleep without the entry that the other has taken out.
#[test]
fn two_timer_tasks_at_once_lose_no_entry() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let others = timer.clone();
    let target = CallbackTarget::set(&timer, now, move |now| {
        assert_eq!(
            run_elsewhere(&others, now),
            None,
            "the entry has been taken out"
        );
        Some(Rearm::At(now + MINUTE))
    });
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(timer.entries().next_wake, Some(now + MINUTE));
    drop(target);
    assert_eq!(counts(&timer), (0, 0));
}

/// Until a callback returns, another timer task handles the other entries.
#[test]
fn entries_behind_a_slow_callback_run_on_other_timer_tasks() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let others = timer.clone();
    let _slow = CallbackTarget::set(&timer, now, move |now| {
        assert_eq!(run_elsewhere(&others, now), Some(now + MINUTE));
        None
    });
    let _behind = Stream::with_deadline(&timer, now);
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(counts(&timer), (1, 2));
}

#[test]
fn a_callback_that_panics_affects_no_other_entry() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let _panics = CallbackTarget::set(&timer, now, |_| std::panic::panic_any("on purpose"));
    let _other = Stream::with_deadline(&timer, now);
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(counts(&timer), (1, 2));
}

/// A target that has been used in the meantime starts a new series of rechecks.
#[test]
fn the_count_of_rechecks_restarts_after_a_use() {
    #[derive(Default)]
    struct RearmedTarget(Mutex<(bool, Vec<Timeliness>)>, OnceLock<TimerHandle>);
    impl OnDeadline for RearmedTarget {
        fn on_deadline(&self, lateness: &LatenessTracker, timeliness: Timeliness) -> Option<Rearm> {
            let now = lateness.now();
            let (is_used, callbacks) = &mut *self.0.lock().expect("no panic");
            callbacks.push(timeliness);
            match timeliness {
                _ if *is_used => Some(Rearm::At(now + MINUTE)),
                Timeliness::OnTime => None,
                Timeliness::Late | Timeliness::Delayed => Some(Rearm::Soon),
            }
        }
    }
    let timer = Arc::new(Timer::new());
    let mut now = Instant::now();
    let target = Arc::new(RearmedTarget::default());
    let weak: Weak<RearmedTarget> = Arc::downgrade(&target);
    assert!(target.1.set(timer.set(now, weak)).is_ok());
    let uses = [(5, false), (20, true), (MAX_RECHECKS + 1, false)];
    for (callbacks, is_used) in uses {
        for _ in 0..callbacks {
            target.0.lock().expect("no panic").0 = is_used;
            now = next(&timer).expect("an armed entry") + 2 * RECHECK_TOLERANCE;
            timer.run_expired_now(now);
        }
    }
    assert_eq!(next(&timer), None);
    let callbacks = &target.0.lock().expect("no panic").1;
    let delayed = callbacks
        .iter()
        .take_while(|callback| **callback == Timeliness::Delayed);
    assert_eq!(delayed.count(), 5 + 20 + usize::from(MAX_RECHECKS));
    assert_eq!(callbacks.last(), Some(&Timeliness::OnTime));
}

/// A target that has several deadlines, as a registry does.
struct SeveralDeadlines {
    handle: OnceLock<TimerHandle>,
    observed: Mutex<Vec<(Instant, Timeliness)>>,
    /// The deadlines that the next callback sets, and the one that it returns.
    next: Mutex<(Vec<Instant>, Option<Rearm>)>,
}

impl SeveralDeadlines {
    fn new(timer: &Arc<Timer>, at: Instant) -> Arc<Self> {
        let several = Arc::new(Self {
            handle: OnceLock::new(),
            observed: Mutex::default(),
            next: Mutex::default(),
        });
        let weak: Weak<Self> = Arc::downgrade(&several);
        assert!(several.handle.set(timer.set(at, weak)).is_ok());
        several
    }

    fn reset_earlier(&self, at: Instant) {
        self.handle.get().expect("a handle").reset_earlier(at);
    }

    fn callbacks(&self) -> Vec<Instant> {
        let observed = self.observed.lock().expect("no panic");
        observed.iter().map(|(at, _)| *at).collect()
    }

    fn set_next(&self, within: &[Instant], next: Option<Instant>) {
        *self.next.lock().expect("no panic") = (within.to_vec(), next.map(Rearm::At));
    }
}

impl OnDeadline for SeveralDeadlines {
    fn on_deadline(&self, lateness: &LatenessTracker, timeliness: Timeliness) -> Option<Rearm> {
        let now = lateness.now();
        self.observed
            .lock()
            .expect("no panic")
            .push((now, timeliness));
        let (within, next) = std::mem::take(&mut *self.next.lock().expect("no panic"));
        for at in within {
            self.reset_earlier(at);
        }
        next
    }
}

#[tokio::test(start_paused = true)]
async fn a_reset_moves_a_deadline_only_to_an_earlier_time() {
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let [early, late] = [start + MINUTE, start + 2 * MINUTE];
    let several = SeveralDeadlines::new(&timer, late);
    sleep(MINUTE / 2).await;
    several.reset_earlier(early);
    several.reset_earlier(late);
    several.reset_earlier(early);
    assert_eq!(counts(&timer), (1, 1));
    sleep(10 * MINUTE).await;
    assert_eq!(several.callbacks(), [early]);
    // The entry stays disarmed until it is reset.
    let requeue = Instant::now() + MINUTE;
    several.reset_earlier(requeue);
    sleep(10 * MINUTE).await;
    assert_eq!(several.callbacks(), [early, requeue]);
    several.reset_earlier(Instant::now());
    sleep(MINUTE).await;
    assert_eq!(several.callbacks().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_is_set_during_the_callback_is_not_lost() {
    let timer = Arc::new(Timer::new());
    // In minutes: the deadlines set during the first callback, the one that it returns, and the times of all callbacks.
    for (within, next, callbacks) in [
        (&[2][..], None, &[1, 2][..]),
        (&[2], Some(3), &[1, 2]),
        (&[3, 2], None, &[1, 2]),
        (&[3], Some(2), &[1, 2]),
        (&[0], Some(2), &[1, 1]),
        (&[], Some(2), &[1, 2]),
        (&[], None, &[1]),
    ] {
        let start = Instant::now();
        let at = |minutes: &u32| start + *minutes * MINUTE;
        let several = SeveralDeadlines::new(&timer, at(&1));
        let within: Vec<_> = within.iter().map(at).collect();
        several.set_next(&within, next.as_ref().map(at));
        sleep(10 * MINUTE).await;
        let callbacks: Vec<_> = callbacks.iter().map(at).collect();
        assert_eq!(several.callbacks(), callbacks);
    }
    assert_eq!(counts(&timer), (0, 0));
}

/// While a callback is slow, a second timer task handles a deadline set in the meantime.
#[test]
fn a_deadline_set_during_a_slow_callback_is_handled_by_another_timer_task() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let several = SeveralDeadlines::new(&timer, now);
    let (id, expired) = timer.take_expired(now).expect("due");
    several.reset_earlier(now + MINUTE);
    let other = timer.run_all_expired(&LatenessTracker::new(now + MINUTE, Timeliness::Late));
    assert_eq!((several.callbacks(), other), (vec![now + MINUTE], None));
    several.set_next(&[], Some(now + 2 * MINUTE));
    let requeue = expired.run(&LatenessTracker::new(now, Timeliness::OnTime));
    timer.update(|entries| entries.requeue(id, &requeue));
    assert_eq!(timer.entries().next_wake, Some(now + 2 * MINUTE));
}

#[test]
fn the_callback_gets_the_timeliness() {
    let now = Instant::now();
    for (late, tracked, expected) in [
        (Duration::ZERO, Timeliness::OnTime, Timeliness::OnTime),
        (RECHECK_TOLERANCE, Timeliness::OnTime, Timeliness::OnTime),
        (
            2 * RECHECK_TOLERANCE,
            Timeliness::OnTime,
            Timeliness::Delayed,
        ),
        (2 * STALL_THRESHOLD, Timeliness::OnTime, Timeliness::Late),
        (Duration::ZERO, Timeliness::Late, Timeliness::Late),
    ] {
        let timer = Arc::new(Timer::new());
        let several = SeveralDeadlines::new(&timer, now);
        timer.run_all_expired(&LatenessTracker::new(now + late, tracked));
        let observed = several.observed.lock().expect("no panic");
        assert_eq!(*observed, [(now + late, expected)]);
    }
}

/// A timer task stops between its turns and records that expired entries remain.
#[test]
fn expired_entries_are_handled_in_turns() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let targets: Vec<_> = (0..3 * MAX_PER_POLL)
        .map(|_| SeveralDeadlines::new(&timer, now))
        .collect();
    let handled = || {
        let handled = targets
            .iter()
            .filter(|target| !target.callbacks().is_empty());
        handled.count()
    };
    let lateness = LatenessTracker::new(now + MINUTE, Timeliness::OnTime);
    let mut turns = 0;
    while timer.run_expired(&lateness).is_some() {
        turns += 1;
        assert!(handled() <= turns * MAX_PER_POLL);
        let turn_due_at = timer.entries().turn_due_at();
        assert_eq!(turn_due_at, Some(now + MINUTE), "no other task takes over");
    }
    assert!(turns >= 2);
    assert_eq!(handled(), targets.len());
}
