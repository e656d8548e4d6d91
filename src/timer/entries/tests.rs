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

/// Is looked at again every minute, and lets go of what it was told to keep when it is looked at.
#[derive(Default)]
struct Stream {
    ticket: OnceLock<TimerHandle>,
    keeps: Mutex<Option<Arc<Stream>>>,
}

impl Stream {
    fn timed(timer: &Arc<Timer>, at: Instant) -> Arc<Self> {
        let stream = Arc::new(Self::default());
        let weak: Weak<Self> = Arc::downgrade(&stream);
        let first = stream.ticket.set(timer.set(at, weak));
        assert!(first.is_ok());
        stream
    }
}

impl OnDeadline for Stream {
    fn on_deadline(&self, watch: &LatenessTracker, _noticed: Timeliness) -> Option<Rearm> {
        let now = watch.now();
        let mut keeps = self.keeps.lock().unwrap_or_else(PoisonError::into_inner);
        drop(keeps.take());
        Some(Rearm::At(now + MINUTE))
    }
}

fn counts(timer: &Timer) -> (usize, usize) {
    let alarms = timer.entries();
    (alarms.due.len(), alarms.entries.len())
}

fn next(timer: &Timer) -> Option<Instant> {
    timer.entries().next()
}

#[test]
fn what_is_gone_leaves_no_alarm() {
    let timer = Arc::new(Timer::new());
    let at = Instant::now() + MINUTE;
    let streams: Vec<_> = (0..100).map(|_| Stream::timed(&timer, at)).collect();
    assert_eq!(counts(&timer), (100, 100));
    let memory: Vec<_> = streams.iter().map(Arc::downgrade).collect();
    drop(streams);
    assert_eq!(counts(&timer), (0, 0));
    assert!(memory.iter().all(|weak| weak.weak_count() == 0));
    assert_eq!(next(&timer), None);
}

#[test]
fn what_stays_is_looked_at_again() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let stream = Stream::timed(&timer, now);
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(counts(&timer), (1, 1));
    drop(stream);
    assert_eq!(counts(&timer), (0, 0));
}

/// The timer may hold the last reference to it, or drop another stream that is looked at next.
#[test]
fn what_goes_while_it_is_looked_at_leaves_no_alarm() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let first = Stream::timed(&timer, now);
    let next = Stream::timed(&timer, now);
    let later = Stream::timed(&timer, now + MINUTE);
    *next.keeps.lock().expect("no panic") = Some(later);
    *first.keeps.lock().expect("no panic") = Some(next);
    let weak = Arc::downgrade(&first);
    let (id, taken) = timer.take_expired(now).expect("due");
    drop(first);
    let again = taken.run(&LatenessTracker::new(now, Timeliness::OnTime));
    assert_eq!(weak.strong_count(), 0);
    assert!(timer.take_expired(now).is_none());
    timer.entries().requeue(id, &again);
    assert_eq!(counts(&timer), (0, 0));
}

/// Two runtimes may keep time at once, and one of them sleeps by what the other has taken out.
#[test]
fn two_that_look_at_once_forget_nothing() {
    struct Looking(Arc<Timer>, OnceLock<TimerHandle>);
    impl OnDeadline for Looking {
        fn on_deadline(&self, watch: &LatenessTracker, _noticed: Timeliness) -> Option<Rearm> {
            let now = watch.now();
            let other = self
                .0
                .run_all_expired(&LatenessTracker::new(now, Timeliness::Late));
            assert_eq!(other, None, "it is taken out");
            Some(Rearm::At(now + MINUTE))
        }
    }
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let looking = Arc::new(Looking(timer.clone(), OnceLock::new()));
    let weak: Weak<Looking> = Arc::downgrade(&looking);
    assert!(looking.1.set(timer.set(now, weak)).is_ok());
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(timer.entries().next_wake, Some(now + MINUTE));
    drop(looking);
    assert_eq!(counts(&timer), (0, 0));
}

/// A look that does not return holds up no others: they are not taken out yet.
#[test]
fn what_is_behind_a_look_that_lasts_is_left_to_others() {
    struct Lasts(Arc<Timer>, OnceLock<TimerHandle>);
    impl OnDeadline for Lasts {
        fn on_deadline(&self, watch: &LatenessTracker, _noticed: Timeliness) -> Option<Rearm> {
            let now = watch.now();
            let other = self
                .0
                .run_all_expired(&LatenessTracker::new(now, Timeliness::Late));
            assert_eq!(other, Some(now + MINUTE));
            None
        }
    }
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let lasts = Arc::new(Lasts(timer.clone(), OnceLock::new()));
    let weak: Weak<Lasts> = Arc::downgrade(&lasts);
    assert!(lasts.1.set(timer.set(now, weak)).is_ok());
    let _behind = Stream::timed(&timer, now);
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(counts(&timer), (1, 2));
}

#[test]
fn a_look_that_panics_harms_no_other() {
    struct Panics(OnceLock<TimerHandle>);
    impl OnDeadline for Panics {
        fn on_deadline(&self, _watch: &LatenessTracker, _noticed: Timeliness) -> Option<Rearm> {
            std::panic::panic_any("on purpose");
        }
    }
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let panics = Arc::new(Panics(OnceLock::new()));
    let weak: Weak<Panics> = Arc::downgrade(&panics);
    assert!(panics.0.set(timer.set(now, weak)).is_ok());
    let _other = Stream::timed(&timer, now);
    assert_eq!(timer.run_expired_now(now), Some(now + MINUTE));
    assert_eq!(counts(&timer), (1, 2));
}

/// It is used now and then, so a look that finds it unused must not count what an earlier one has found.
#[test]
fn what_was_used_meanwhile_is_looked_at_again_as_often_as_at_first() {
    #[derive(Default)]
    struct Used(Mutex<(bool, Vec<Timeliness>)>, OnceLock<TimerHandle>);
    impl OnDeadline for Used {
        fn on_deadline(&self, watch: &LatenessTracker, noticed: Timeliness) -> Option<Rearm> {
            let now = watch.now();
            let (used, looks) = &mut *self.0.lock().expect("no panic");
            looks.push(noticed);
            match noticed {
                _ if *used => Some(Rearm::At(now + MINUTE)),
                Timeliness::OnTime => None,
                Timeliness::Late | Timeliness::Delayed => Some(Rearm::Soon),
            }
        }
    }
    let timer = Arc::new(Timer::new());
    let mut now = Instant::now();
    let stream = Arc::new(Used::default());
    let weak: Weak<Used> = Arc::downgrade(&stream);
    assert!(stream.1.set(timer.set(now, weak)).is_ok());
    let uses = [(5, false), (20, true), (MAX_RECHECKS + 1, false)];
    for (looks, used) in uses {
        for _ in 0..looks {
            stream.0.lock().expect("no panic").0 = used;
            now = next(&timer).expect("not over") + 2 * RECHECK_TOLERANCE;
            timer.run_expired_now(now);
        }
    }
    assert_eq!(next(&timer), None);
    let looks = &stream.0.lock().expect("no panic").1;
    let delayed = looks
        .iter()
        .take_while(|look| **look == Timeliness::Delayed);
    assert_eq!(delayed.count(), 5 + 20 + usize::from(MAX_RECHECKS));
    assert_eq!(looks.last(), Some(&Timeliness::OnTime));
}

/// Has times of its own, as a registry has.
struct Several {
    ticket: OnceLock<TimerHandle>,
    noticed: Mutex<Vec<(Instant, Timeliness)>>,
    /// What its ticket is told within the next look, and what that look says.
    next: Mutex<(Vec<Instant>, Option<Rearm>)>,
}

impl Several {
    fn timed(timer: &Arc<Timer>, at: Instant) -> Arc<Self> {
        let several = Arc::new(Self {
            ticket: OnceLock::new(),
            noticed: Mutex::default(),
            next: Mutex::default(),
        });
        let weak: Weak<Self> = Arc::downgrade(&several);
        assert!(several.ticket.set(timer.set(at, weak)).is_ok());
        several
    }

    fn by(&self, at: Instant) {
        self.ticket.get().expect("a ticket").reset_earlier(at);
    }

    fn looks(&self) -> Vec<Instant> {
        let noticed = self.noticed.lock().expect("no panic");
        noticed.iter().map(|(at, _)| *at).collect()
    }

    fn say(&self, within: &[Instant], next: Option<Instant>) {
        *self.next.lock().expect("no panic") = (within.to_vec(), next.map(Rearm::At));
    }
}

impl OnDeadline for Several {
    fn on_deadline(&self, watch: &LatenessTracker, noticed: Timeliness) -> Option<Rearm> {
        let now = watch.now();
        self.noticed.lock().expect("no panic").push((now, noticed));
        let (within, next) = std::mem::take(&mut *self.next.lock().expect("no panic"));
        for at in within {
            self.by(at);
        }
        next
    }
}

#[tokio::test(start_paused = true)]
async fn the_earlier_time_counts() {
    let timer = Arc::new(Timer::new());
    let start = Instant::now();
    let [early, late] = [start + MINUTE, start + 2 * MINUTE];
    let several = Several::timed(&timer, late);
    sleep(MINUTE / 2).await;
    several.by(early);
    several.by(late);
    several.by(early);
    assert_eq!(counts(&timer), (1, 1));
    sleep(10 * MINUTE).await;
    assert_eq!(several.looks(), [early]);
    // Nobody looks at it any more, until it says so.
    let again = Instant::now() + MINUTE;
    several.by(again);
    sleep(10 * MINUTE).await;
    assert_eq!(several.looks(), [early, again]);
    several.by(Instant::now());
    sleep(MINUTE).await;
    assert_eq!(several.looks().len(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_time_that_comes_up_during_a_look_is_not_lost() {
    let timer = Arc::new(Timer::new());
    // In minutes: what its ticket is told within the first look, what that says, and when it is looked at.
    for (within, says, looks) in [
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
        let several = Several::timed(&timer, at(&1));
        let within: Vec<_> = within.iter().map(at).collect();
        several.say(&within, says.as_ref().map(at));
        sleep(10 * MINUTE).await;
        let looks: Vec<_> = looks.iter().map(at).collect();
        assert_eq!(several.looks(), looks);
    }
    assert_eq!(counts(&timer), (0, 0));
}

/// While one look lasts, a second runtime serves what it was told of.
#[test]
fn a_time_beside_a_look_that_lasts_is_seen_by_others() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let several = Several::timed(&timer, now);
    let (id, due) = timer.take_expired(now).expect("due");
    several.by(now + MINUTE);
    let other = timer.run_all_expired(&LatenessTracker::new(now + MINUTE, Timeliness::Late));
    assert_eq!((several.looks(), other), (vec![now + MINUTE], None));
    several.say(&[], Some(now + 2 * MINUTE));
    let again = due.run(&LatenessTracker::new(now, Timeliness::OnTime));
    timer.update(|alarms| alarms.requeue(id, &again));
    assert_eq!(timer.entries().next_wake, Some(now + 2 * MINUTE));
}

#[test]
fn it_is_told_how_late_it_was_noticed() {
    let now = Instant::now();
    for (late, noticed, told) in [
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
        let several = Several::timed(&timer, now);
        timer.run_all_expired(&LatenessTracker::new(now + late, noticed));
        let heard = several.noticed.lock().expect("no panic");
        assert_eq!(*heard, [(now + late, told)]);
    }
}

/// However much is due, a keeper stops in between, and knows that it has not done all.
#[test]
fn what_is_due_is_looked_at_in_turns() {
    let timer = Arc::new(Timer::new());
    let now = Instant::now();
    let all: Vec<_> = (0..3 * MAX_PER_POLL)
        .map(|_| Several::timed(&timer, now))
        .collect();
    let looked_at = || all.iter().filter(|it| !it.looks().is_empty()).count();
    let watch = LatenessTracker::new(now + MINUTE, Timeliness::OnTime);
    let mut turns = 0;
    while timer.run_expired(&watch).is_some() {
        turns += 1;
        assert!(looked_at() <= turns * MAX_PER_POLL);
        let looked_at_by = timer.entries().turn_due_at();
        assert_eq!(looked_at_by, Some(now + MINUTE), "nobody takes over");
    }
    assert!(turns >= 2);
    assert_eq!(looked_at(), all.len());
}
