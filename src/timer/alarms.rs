//! What is looked at when its time comes.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Weak},
    time::Duration,
};

use tokio::time::Instant;

/// How late something may be noticed before the runtime counts as starved: 1 s.
pub(crate) const LATE: Duration = Duration::from_secs(1);

/// When to look again at what was noticed late: after 100 ms, in which a runtime that is back hears its clients.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);

/// How late such a second look may come itself: 20 ms.
pub(crate) const ON_TIME: Duration = Duration::from_millis(20);

/// How often it is looked at again at most: 10 times, so that a machine that is never on time takes about a second
/// longer to end an orphan, an idle session, or a stream that is not read.
pub(crate) const MAX_GLANCES: u8 = 10;

/// Something that has a time.
pub(crate) trait Timed: Send + Sync {
    /// Looks at it at `now`. Says when to look again, if at all. Looks may overlap if its ticket was told an
    /// [earlier](super::Ticket::by) time meanwhile.
    fn look(&self, now: Instant, noticed: Noticed) -> Option<NextLook>;

    /// Whether it stands for several times and judges by each how late it was noticed. It then hears only whether its
    /// runtime stood still.
    fn judges_lateness(&self) -> bool {
        false
    }
}

/// How it was noticed that a time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Noticed {
    /// By the keeper that was to notice it, unless that one slept too long.
    InTime,
    /// By the same one, but some time after: clients that were in time may not be heard yet.
    Delayed,
    /// The runtime that was to notice it stands still. Clients may wait there to be heard.
    Late,
}

/// When something is to be looked at again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextLook {
    /// It is not over before this time.
    At(Instant),
    /// It seems to be over, and the look was [delayed](Noticed::Delayed): a moment later, but not often in a row.
    Soon,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct AlarmId(u64);

/// Who is to be looked at when.
///
/// A `Weak` keeps the memory of what it points to, so none is kept longer than the [`Ticket`](super::Ticket).
#[derive(Default)]
pub(super) struct Alarms {
    due: BTreeSet<(Instant, AlarmId)>,
    /// All that have a ticket.
    all: BTreeMap<AlarmId, Alarm>,
    added: u64,
    /// When somebody looks next, as far as those who keep time were told.
    awake_at: Option<Instant>,
}

struct Alarm {
    timed: Weak<dyn Timed>,
    /// `None`: it is being looked at, or needs no look as yet.
    at: Option<Instant>,
    /// How many looks in a row were delayed and found that it seems to be over.
    glances: u8,
}

/// Something whose time has come.
pub(super) struct Due {
    at: Instant,
    timed: Arc<dyn Timed>,
    glances: u8,
}

/// When to look at something again.
pub(super) struct Again {
    at: Option<Instant>,
    glances: u8,
}

// === impl Alarms ===

impl Alarms {
    pub(super) fn add(&mut self, at: Instant, timed: Weak<dyn Timed>) -> AlarmId {
        self.added += 1;
        let id = AlarmId(self.added);
        let alarm = Alarm {
            timed,
            at: Some(at),
            glances: 0,
        };
        self.all.insert(id, alarm);
        self.due.insert((at, id));
        id
    }

    #[cfg(test)]
    pub(super) fn at(&self, id: AlarmId) -> Option<Instant> {
        self.all.get(&id)?.at
    }

    /// Its ticket is gone.
    pub(super) fn remove(&mut self, id: AlarmId) -> Option<Weak<dyn Timed>> {
        let alarm = self.all.remove(&id)?;
        if let Some(at) = alarm.at {
            self.due.remove(&(at, id));
        }
        Some(alarm.timed)
    }

    /// It is looked at no later than this.
    pub(super) fn by(&mut self, id: AlarmId, at: Instant) {
        if let Some(alarm) = self.all.get_mut(&id)
            && alarm.at.is_none_or(|later| at < later)
        {
            if let Some(later) = alarm.at.replace(at) {
                self.due.remove(&(later, id));
            }
            self.due.insert((at, id));
        }
    }

    /// What is to be looked at now.
    pub(super) fn due(&self, now: Instant) -> Vec<AlarmId> {
        let due = self.due.iter().take_while(|(at, _)| *at <= now);
        due.map(|(_, id)| *id).collect()
    }

    /// Takes out what is still to be looked at now. It is the caller's to drop, who has no lock then.
    pub(super) fn take(&mut self, id: AlarmId, now: Instant) -> Option<Due> {
        let alarm = self.all.get_mut(&id)?;
        let at = alarm.at.take_if(|at| *at <= now)?;
        self.due.remove(&(at, id));
        Some(Due {
            at,
            timed: alarm.timed.upgrade()?,
            glances: alarm.glances,
        })
    }

    /// Has it looked at again, if its ticket was not dropped meanwhile.
    pub(super) fn again(&mut self, id: AlarmId, again: &Again) {
        if let Some(alarm) = self.all.get_mut(&id) {
            alarm.glances = again.glances;
        }
        if let Some(at) = again.at {
            self.by(id, at);
        }
    }

    fn next(&self) -> Option<Instant> {
        self.due.first().map(|(at, _)| *at)
    }

    /// When somebody looks next.
    pub(super) fn awake_at(&self) -> Option<Instant> {
        self.awake_at
    }

    /// Whether those who keep time must be told that there is an earlier time. Then they are.
    pub(super) fn must_tell(&mut self) -> bool {
        let next = self.next();
        let is_news = next.is_some_and(|next| self.awake_at.is_none_or(|at| next < at));
        if is_news {
            self.awake_at = next;
        }
        is_news
    }

    /// Somebody has looked at all that was due, and comes back for the next.
    pub(super) fn come_back(&mut self) -> Option<Instant> {
        self.awake_at = self.next();
        self.awake_at
    }
}

// === impl Due ===

impl Due {
    pub(super) fn look(self, now: Instant, noticed: Noticed) -> Again {
        let noticed = match now.saturating_duration_since(self.at) {
            _ if self.timed.judges_lateness() => noticed,
            late if late > LATE => Noticed::Late,
            // A machine that is never on time ends it all the same.
            late if late > ON_TIME && noticed == Noticed::InTime && self.glances < MAX_GLANCES => {
                Noticed::Delayed
            }
            _ => noticed,
        };
        let (at, glances) = match self.timed.look(now, noticed) {
            Some(NextLook::At(at)) => (Some(at), 0),
            Some(NextLook::Soon) => (now.checked_add(GLANCE), self.glances.saturating_add(1)),
            None => (None, 0),
        };
        Again { at, glances }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, OnceLock, PoisonError},
        time::Duration,
    };

    use tokio::time::sleep;

    use super::{
        super::{Ticket, Timer},
        *,
    };

    const MINUTE: Duration = Duration::from_secs(60);

    /// Is looked at again every minute, and lets go of what it was told to keep when it is looked at.
    #[derive(Default)]
    struct Stream {
        ticket: OnceLock<Ticket>,
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

    impl Timed for Stream {
        fn look(&self, now: Instant, _noticed: Noticed) -> Option<NextLook> {
            let mut keeps = self.keeps.lock().unwrap_or_else(PoisonError::into_inner);
            drop(keeps.take());
            Some(NextLook::At(now + MINUTE))
        }
    }

    fn counts(timer: &Timer) -> (usize, usize) {
        let alarms = timer.alarms();
        (alarms.due.len(), alarms.all.len())
    }

    fn next(timer: &Timer) -> Option<Instant> {
        timer.alarms().next()
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
        assert_eq!(timer.look(now, Noticed::InTime), Some(now + MINUTE));
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
        let due = timer.alarms().due(now);
        let [id, next] = due[..] else {
            panic!("two are due: {due:?}")
        };
        let taken = timer.alarms().take(id, now).expect("due");
        drop(first);
        let again = taken.look(now, Noticed::InTime);
        assert_eq!(weak.strong_count(), 0);
        assert!(timer.alarms().take(next, now).is_none());
        timer.alarms().again(id, &again);
        assert_eq!(counts(&timer), (0, 0));
    }

    /// Two runtimes may keep time at once, and one of them sleeps by what the other has taken out.
    #[test]
    fn two_that_look_at_once_forget_nothing() {
        struct Looking(Arc<Timer>, OnceLock<Ticket>);
        impl Timed for Looking {
            fn look(&self, now: Instant, _noticed: Noticed) -> Option<NextLook> {
                let other = self.0.look(now, Noticed::Late);
                assert_eq!(other, None, "it is taken out");
                Some(NextLook::At(now + MINUTE))
            }
        }
        let timer = Arc::new(Timer::new());
        let now = Instant::now();
        let looking = Arc::new(Looking(timer.clone(), OnceLock::new()));
        let weak: Weak<Looking> = Arc::downgrade(&looking);
        assert!(looking.1.set(timer.set(now, weak)).is_ok());
        assert_eq!(timer.look(now, Noticed::InTime), Some(now + MINUTE));
        assert_eq!(timer.due(), Some(now + MINUTE));
        drop(looking);
        assert_eq!(counts(&timer), (0, 0));
    }

    /// A look that does not return holds up no others: they are not taken out yet.
    #[test]
    fn what_is_behind_a_look_that_lasts_is_left_to_others() {
        struct Lasts(Arc<Timer>, OnceLock<Ticket>);
        impl Timed for Lasts {
            fn look(&self, now: Instant, _noticed: Noticed) -> Option<NextLook> {
                let other = self.0.look(now, Noticed::Late);
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
        assert_eq!(timer.look(now, Noticed::InTime), Some(now + MINUTE));
        assert_eq!(counts(&timer), (1, 2));
    }

    #[test]
    fn a_look_that_panics_harms_no_other() {
        struct Panics(OnceLock<Ticket>);
        impl Timed for Panics {
            fn look(&self, _now: Instant, _noticed: Noticed) -> Option<NextLook> {
                std::panic::panic_any("on purpose");
            }
        }
        let timer = Arc::new(Timer::new());
        let now = Instant::now();
        let panics = Arc::new(Panics(OnceLock::new()));
        let weak: Weak<Panics> = Arc::downgrade(&panics);
        assert!(panics.0.set(timer.set(now, weak)).is_ok());
        let _other = Stream::timed(&timer, now);
        assert_eq!(timer.look(now, Noticed::InTime), Some(now + MINUTE));
        assert_eq!(counts(&timer), (1, 2));
    }

    /// It is used now and then, so a look that finds it unused must not count what an earlier one has found.
    #[test]
    fn what_was_used_meanwhile_is_looked_at_again_as_often_as_at_first() {
        #[derive(Default)]
        struct Used(Mutex<(bool, Vec<Noticed>)>, OnceLock<Ticket>);
        impl Timed for Used {
            fn look(&self, now: Instant, noticed: Noticed) -> Option<NextLook> {
                let (used, looks) = &mut *self.0.lock().expect("no panic");
                looks.push(noticed);
                match noticed {
                    _ if *used => Some(NextLook::At(now + MINUTE)),
                    Noticed::InTime => None,
                    Noticed::Late | Noticed::Delayed => Some(NextLook::Soon),
                }
            }
        }
        let timer = Arc::new(Timer::new());
        let mut now = Instant::now();
        let stream = Arc::new(Used::default());
        let weak: Weak<Used> = Arc::downgrade(&stream);
        assert!(stream.1.set(timer.set(now, weak)).is_ok());
        let uses = [(5, false), (20, true), (MAX_GLANCES + 1, false)];
        for (looks, used) in uses {
            for _ in 0..looks {
                stream.0.lock().expect("no panic").0 = used;
                now = next(&timer).expect("not over") + 2 * ON_TIME;
                timer.look(now, Noticed::InTime);
            }
        }
        assert_eq!(next(&timer), None);
        let looks = &stream.0.lock().expect("no panic").1;
        let delayed = looks.iter().take_while(|look| **look == Noticed::Delayed);
        assert_eq!(delayed.count(), 5 + 20 + usize::from(MAX_GLANCES));
        assert_eq!(looks.last(), Some(&Noticed::InTime));
    }

    /// Has times of its own, as a registry has.
    struct Several {
        judges: bool,
        ticket: OnceLock<Ticket>,
        noticed: Mutex<Vec<(Instant, Noticed)>>,
        /// What its ticket is told within the next look, and what that look says.
        next: Mutex<(Vec<Instant>, Option<NextLook>)>,
    }

    impl Several {
        fn timed(timer: &Arc<Timer>, at: Instant, judges: bool) -> Arc<Self> {
            let several = Arc::new(Self {
                judges,
                ticket: OnceLock::new(),
                noticed: Mutex::default(),
                next: Mutex::default(),
            });
            let weak: Weak<Self> = Arc::downgrade(&several);
            assert!(several.ticket.set(timer.set(at, weak)).is_ok());
            several
        }

        fn by(&self, at: Instant) {
            self.ticket.get().expect("a ticket").by(at);
        }

        fn looks(&self) -> Vec<Instant> {
            let noticed = self.noticed.lock().expect("no panic");
            noticed.iter().map(|(at, _)| *at).collect()
        }

        fn say(&self, within: &[Instant], next: Option<Instant>) {
            *self.next.lock().expect("no panic") = (within.to_vec(), next.map(NextLook::At));
        }
    }

    impl Timed for Several {
        fn look(&self, now: Instant, noticed: Noticed) -> Option<NextLook> {
            self.noticed.lock().expect("no panic").push((now, noticed));
            let (within, next) = std::mem::take(&mut *self.next.lock().expect("no panic"));
            for at in within {
                self.by(at);
            }
            next
        }

        fn judges_lateness(&self) -> bool {
            self.judges
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_earlier_time_counts() {
        let timer = Arc::new(Timer::new());
        let start = Instant::now();
        let [early, late] = [start + MINUTE, start + 2 * MINUTE];
        let several = Several::timed(&timer, late, true);
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
            let several = Several::timed(&timer, at(&1), true);
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
        let several = Several::timed(&timer, now, true);
        let due = timer.alarms().take(AlarmId(1), now).expect("due");
        several.by(now + MINUTE);
        let other = timer.look(now + MINUTE, Noticed::Late);
        assert_eq!((several.looks(), other), (vec![now + MINUTE], None));
        several.say(&[], Some(now + 2 * MINUTE));
        let again = due.look(now, Noticed::InTime);
        timer.change(|alarms| alarms.again(AlarmId(1), &again));
        assert_eq!(timer.due(), Some(now + 2 * MINUTE));
    }

    #[test]
    fn who_judges_lateness_hears_only_what_the_runtime_noticed() {
        let (now, late) = (Instant::now(), 2 * LATE);
        for (judges, told, heard) in [
            (false, Noticed::InTime, Noticed::Late),
            (true, Noticed::InTime, Noticed::InTime),
            (true, Noticed::Late, Noticed::Late),
        ] {
            let timer = Arc::new(Timer::new());
            let several = Several::timed(&timer, now, judges);
            timer.look(now + late, told);
            let noticed = several.noticed.lock().expect("no panic");
            assert_eq!(*noticed, [(now + late, heard)]);
        }
    }
}
