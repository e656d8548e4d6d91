//! What is looked at when its time comes, beside the calls.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use tokio::time::Instant;

use super::{
    Noticed,
    core::{GLANCE, LATE, MAX_GLANCES, ON_TIME},
};

/// Something that may be over without anybody saying so.
pub(crate) trait Watched: Send + Sync {
    /// Looks at it at `now`. Says when to look again, if at all.
    fn look(&self, now: Instant, noticed: Noticed) -> Option<NextLook>;
}

/// When something is to be looked at again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextLook {
    /// It is not over before this time.
    At(Instant),
    /// It seems to be over, and the look was [delayed](Noticed::Delayed): a moment later, but not often in a row.
    Soon,
}

/// Belongs to what is watched: once it is dropped, nothing of the watch is left.
pub(crate) struct Ticket {
    watches: Arc<dyn Unwatch>,
    id: WatchId,
}

/// Who looks at what has a ticket.
pub(super) trait Unwatch: Send + Sync {
    /// Its ticket is gone.
    fn unwatch(&self, id: WatchId);
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WatchId(u64);

/// Who is to be looked at when.
///
/// A `Weak` keeps the memory of what it points to, so none is kept longer than the [`Ticket`].
#[derive(Default)]
pub(super) struct Watches {
    due: BTreeMap<(Instant, WatchId), Waiting>,
    /// All that have a ticket. `None`: it is being looked at, or needs no look any more.
    looks: BTreeMap<WatchId, Option<Instant>>,
    added: u64,
}

/// Something whose time has not come.
pub(super) struct Waiting {
    watched: Weak<dyn Watched>,
    /// How many looks in a row were delayed and found that it seems to be over.
    glances: u8,
}

/// Something whose time has come.
pub(super) struct Due {
    id: WatchId,
    at: Instant,
    watched: Arc<dyn Watched>,
    glances: u8,
}

/// When to look at it again.
pub(super) struct Again {
    id: WatchId,
    at: Instant,
    waiting: Waiting,
}

// === impl Ticket ===

impl Ticket {
    pub(super) fn new(watches: Arc<dyn Unwatch>, id: WatchId) -> Self {
        Self { watches, id }
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.watches.unwatch(self.id);
    }
}

// === impl Watches ===

impl Watches {
    pub(super) fn add(&mut self, at: Instant, watched: Weak<dyn Watched>) -> WatchId {
        self.added += 1;
        let id = WatchId(self.added);
        self.looks.insert(id, Some(at));
        let waiting = Waiting {
            watched,
            glances: 0,
        };
        self.due.insert((at, id), waiting);
        id
    }

    /// Its ticket is gone.
    pub(super) fn remove(&mut self, id: WatchId) -> Option<Waiting> {
        let at = self.looks.remove(&id)??;
        self.due.remove(&(at, id))
    }

    /// What is to be looked at now. It is the caller's to drop, who has no lock then.
    pub(super) fn take_due(&mut self, now: Instant) -> Vec<Due> {
        let mut due = Vec::new();
        while let Some(first) = self.due.first_entry()
            && first.key().0 <= now
        {
            let ((at, id), waiting) = first.remove_entry();
            if let Some(look) = self.looks.get_mut(&id) {
                *look = None;
            }
            let Waiting { watched, glances } = waiting;
            due.extend(watched.upgrade().map(|watched| Due {
                id,
                at,
                watched,
                glances,
            }));
        }
        due
    }

    /// Has it looked at again, if its ticket was not dropped meanwhile.
    pub(super) fn again(&mut self, again: Again) {
        let Again { id, at, waiting } = again;
        if let Some(look) = self.looks.get_mut(&id) {
            *look = Some(at);
            self.due.insert((at, id), waiting);
        }
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }
}

// === impl Due ===

impl Due {
    pub(super) fn look(self, now: Instant, noticed: Noticed) -> Option<Again> {
        let noticed = match now.saturating_duration_since(self.at) {
            late if late > LATE => Noticed::Late,
            // A machine that is never on time ends it all the same.
            late if late > ON_TIME && noticed == Noticed::InTime && self.glances < MAX_GLANCES => {
                Noticed::Delayed
            }
            _ => noticed,
        };
        let (at, glances) = match self.watched.look(now, noticed)? {
            NextLook::At(at) => (at, 0),
            NextLook::Soon => (now.checked_add(GLANCE)?, self.glances.saturating_add(1)),
        };
        Some(Again {
            id: self.id,
            at,
            waiting: Waiting {
                watched: Arc::downgrade(&self.watched),
                glances,
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, OnceLock, PoisonError},
        time::Duration,
    };

    use super::{super::driver::Expire as _, *};
    use crate::exchange::Registry;

    const MINUTE: Duration = Duration::from_secs(60);

    /// Is looked at again every minute, and lets go of what it was told to keep when it is looked at.
    #[derive(Default)]
    struct Stream {
        ticket: OnceLock<Ticket>,
        keeps: Mutex<Option<Arc<Stream>>>,
    }

    impl Stream {
        fn watched(registry: &Arc<Registry>, at: Instant) -> Arc<Self> {
            let stream = Arc::new(Self::default());
            let weak: Weak<Self> = Arc::downgrade(&stream);
            let first = stream.ticket.set(registry.watch(at, weak));
            assert!(first.is_ok());
            stream
        }
    }

    impl Watched for Stream {
        fn look(&self, now: Instant, _noticed: Noticed) -> Option<NextLook> {
            let mut keeps = self.keeps.lock().unwrap_or_else(PoisonError::into_inner);
            drop(keeps.take());
            Some(NextLook::At(now + MINUTE))
        }
    }

    fn counts(registry: &Registry) -> (usize, usize) {
        let watches = &registry.state().watches;
        (watches.due.len(), watches.looks.len())
    }

    #[test]
    fn what_is_gone_leaves_no_watch() {
        let registry = Arc::new(Registry::new());
        let at = Instant::now() + MINUTE;
        let streams: Vec<_> = (0..100).map(|_| Stream::watched(&registry, at)).collect();
        assert_eq!(counts(&registry), (100, 100));
        let memory: Vec<_> = streams.iter().map(Arc::downgrade).collect();
        drop(streams);
        assert_eq!(counts(&registry), (0, 0));
        assert!(memory.iter().all(|weak| weak.weak_count() == 0));
        assert_eq!(registry.state().next_deadline(), None);
    }

    #[test]
    fn what_stays_is_looked_at_again() {
        let registry = Arc::new(Registry::new());
        let now = Instant::now();
        let stream = Stream::watched(&registry, now);
        let next = registry.clone().expire(now, Noticed::InTime);
        assert_eq!(next, Some(now + MINUTE));
        assert_eq!(counts(&registry), (1, 1));
        drop(stream);
        assert_eq!(counts(&registry), (0, 0));
    }

    /// The timer may hold the last reference to it, or drop another stream that is looked at next.
    #[test]
    fn what_goes_while_it_is_looked_at_leaves_no_watch() {
        let registry = Arc::new(Registry::new());
        let now = Instant::now();
        let first = Stream::watched(&registry, now);
        let next = Stream::watched(&registry, now);
        let later = Stream::watched(&registry, now + MINUTE);
        for stream in [next, later] {
            let former = Stream::watched(&registry, now);
            *former.keeps.lock().expect("no panic") = Some(stream);
            *first.keeps.lock().expect("no panic") = Some(former);
        }
        let weak = Arc::downgrade(&first);
        let due = registry.state().watches.take_due(now);
        drop(first);
        let again: Vec<_> = due
            .into_iter()
            .filter_map(|due| due.look(now, Noticed::InTime))
            .collect();
        assert_eq!(weak.strong_count(), 0);
        for again in again {
            registry.state().watches.again(again);
        }
        assert_eq!(counts(&registry), (0, 0));
    }

    /// Two timers may ask at the same time, and one of them sleeps by what the other has taken out.
    #[test]
    fn two_timers_that_look_at_once_forget_nothing() {
        struct Looking(Arc<Registry>, OnceLock<Ticket>);
        impl Watched for Looking {
            fn look(&self, now: Instant, _noticed: Noticed) -> Option<NextLook> {
                let other = self.0.clone().expire(now, Noticed::Late);
                assert_eq!(other, None, "it is taken out");
                Some(NextLook::At(now + MINUTE))
            }
        }
        let registry = Arc::new(Registry::new());
        let now = Instant::now();
        let looking = Arc::new(Looking(registry.clone(), OnceLock::new()));
        let weak: Weak<Looking> = Arc::downgrade(&looking);
        assert!(looking.1.set(registry.watch(now, weak)).is_ok());
        assert_eq!(
            registry.clone().expire(now, Noticed::InTime),
            Some(now + MINUTE)
        );
        assert_eq!(registry.due(), Some(now + MINUTE));
        drop(looking);
        assert_eq!(counts(&registry), (0, 0));
    }

    /// It is used now and then, so a look that finds it unused must not count what an earlier one has found.
    #[test]
    fn what_was_used_meanwhile_is_looked_at_again_as_often_as_at_first() {
        #[derive(Default)]
        struct Used(Mutex<(bool, Vec<Noticed>)>, OnceLock<Ticket>);
        impl Watched for Used {
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
        let registry = Arc::new(Registry::new());
        let mut now = Instant::now();
        let stream = Arc::new(Used::default());
        let weak: Weak<Used> = Arc::downgrade(&stream);
        assert!(stream.1.set(registry.watch(now, weak)).is_ok());
        let uses = [(5, false), (20, true), (MAX_GLANCES + 1, false)];
        for (looks, used) in uses {
            for _ in 0..looks {
                stream.0.lock().expect("no panic").0 = used;
                now = registry.due().expect("not over") + 2 * ON_TIME;
                registry.clone().expire(now, Noticed::InTime);
            }
        }
        assert_eq!(registry.due(), None);
        let looks = &stream.0.lock().expect("no panic").1;
        let delayed = looks.iter().take_while(|look| **look == Noticed::Delayed);
        assert_eq!(delayed.count(), 5 + 20 + usize::from(MAX_GLANCES));
        assert_eq!(looks.last(), Some(&Noticed::InTime));
    }
}
