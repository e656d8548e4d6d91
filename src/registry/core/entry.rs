//! What the core knows of one call in flight.

use std::{collections::VecDeque, mem, time::Duration};

use tokio::time::Instant;

use super::{
    Finished,
    index::{Key, SessionKey, Slot, StreamId},
};
use crate::detach::Detachment;

/// How long a hold may keep a call past its deadline: 5 s, far more than an inner service takes to answer
/// a GET, and little for an orphan.
pub(crate) const MAX_HOLD: Duration = Duration::from_secs(5);

/// How late a deadline may be noticed before the runtime counts as starved: 1 s.
pub(crate) const LATE: Duration = Duration::from_secs(1);

/// How many opaque event ids of a call are known by name, from the first on and up to the latest: 1,024
/// each, 16 KiB a call at most.
pub(crate) const MAX_EVENT_IDS: usize = 1_024;

/// The generation of a call's first stream.
pub(crate) const FIRST: Generation = Generation(1);

/// Which stream of its call a stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Generation(u32);

/// What becomes of a call when its client goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Cancelled at `deadline` if it is still detached then. `retry` is how long its client waits before
    /// it comes back.
    Until { deadline: Instant, retry: Duration },
    /// Runs on. Its end will be seen.
    ForItsEnd,
    /// Runs on unseen, forgotten at this time.
    Unseen(Instant),
}

#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub(crate) call: T,
    pub(super) key: Option<Key>,
    pub(super) session: Option<Slot>,
    /// The slot of its key.
    pub(super) slot: Option<Slot>,
    pub(super) owns_key: bool,
    pub(super) generation: Generation,
    /// Boxed, because most calls end attached.
    pub(super) detached: Option<Box<Clock>>,
    pub(super) held: bool,
    /// When it is cancelled at the latest, attached or not.
    pub(crate) deadline: Option<Instant>,
    /// When it is looked at next, which is what `due` holds for it.
    pub(super) due: Option<Instant>,
    pub(super) barren: u32,
    pub(super) last_deadline: Option<Instant>,
    pub(super) streams: Streams,
}

/// The clock of a detached call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    pub(super) detachment: Detachment,
    pub(super) wait: Wait,
    pub(super) put_off: bool,
    /// When the last hold ended, or could have lasted to.
    pub(super) released: Option<Instant>,
}

/// The streams of a call, as far as they are known by name.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Nearly always the only one. It needs no allocation.
    only: Option<StreamId>,
    others: Option<Box<Others>>,
    /// Not all are known by name.
    pub(super) overflowed: bool,
    /// Other calls are on some of them too: those of a batch.
    pub(super) shared: bool,
}

/// The streams of a call after its first.
#[derive(Debug, Default)]
struct Others {
    first: Vec<StreamId>,
    latest: VecDeque<StreamId>,
}

/// Which time of a call is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expired {
    /// The one its client had to come back.
    Grace,
    /// The one it may last.
    Deadline,
    /// The one for which it is kept unseen: it is forgotten already.
    Unseen(Finished),
}

/// What a look at a call whose time has come decides.
pub(super) enum Look {
    Over(Expired),
    PutOff,
    Forget,
}

// === impl Generation ===

impl Generation {
    pub(super) fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }
}

// === impl Entry ===

impl<T> Entry<T> {
    pub(super) fn new(
        call: T,
        key: Option<Key>,
        session: Option<Slot>,
        slot: Option<Slot>,
        deadline: Option<Instant>,
    ) -> Self {
        Self {
            call,
            key,
            session,
            slot,
            owns_key: false,
            generation: FIRST,
            detached: None,
            held: false,
            deadline,
            due: None,
            barren: 0,
            last_deadline: None,
            streams: Streams::default(),
        }
    }

    /// Since when it has no client.
    pub(crate) fn detached_at(&self) -> Option<Instant> {
        self.detached.as_ref().map(|clock| clock.detachment.since())
    }

    pub(super) fn detachment(&self) -> Option<Detachment> {
        self.detached.as_ref().map(|clock| clock.detachment)
    }

    /// When it is cancelled if its client does not come back.
    pub(crate) fn waits_to(&self) -> Option<Instant> {
        match self.detached.as_ref()?.wait {
            Wait::Until { .. } => self.grace_ends(),
            Wait::ForItsEnd | Wait::Unseen(_) => None,
        }
    }

    /// Gives it another key. Its streams are to be named anew.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(super) fn rekey(&mut self, key: Key, session: Slot, slot: Slot) {
        self.key = Some(key);
        self.session = Some(session);
        self.slot = Some(slot);
        self.owns_key = false;
        self.streams = Streams::default();
        self.due = None;
    }

    pub(crate) fn session(&self) -> Option<&SessionKey> {
        self.key.as_ref().map(|key| &key.session)
    }

    pub(super) fn is_of(&self, session: &SessionKey) -> bool {
        self.key.as_ref().is_some_and(|key| key.session == *session)
    }

    pub(super) fn next_look(&self) -> Option<Instant> {
        self.grace_ends().into_iter().chain(self.deadline).min()
    }

    /// When the clock of a detached call is looked at.
    pub(super) fn grace_ends(&self) -> Option<Instant> {
        let clock = self.detached.as_ref()?;
        match clock.wait {
            Wait::Until { deadline, .. } if self.held => Some(hold_ends(deadline)),
            // A deadline that passed meanwhile could not be noticed before.
            Wait::Until { deadline, .. } => Some(clock.released.unwrap_or(deadline).max(deadline)),
            Wait::Unseen(at) => Some(at),
            Wait::ForItsEnd => None,
        }
    }

    /// Stops the clock. `false` if it is stopped already.
    ///
    /// A resume may be the first to notice that the time is long over (invariant 7). It would not know
    /// that any more when the hold ends.
    pub(super) fn hold(&mut self, now: Instant) -> bool {
        if self.held {
            return false;
        }
        if let Some(at) = self.grace_ends() {
            self.put_off_if_late(now, at);
        }
        self.held = true;
        true
    }

    /// Lets a stopped clock go on. `false` if it was not stopped.
    pub(super) fn release(&mut self, now: Instant) -> bool {
        let held = mem::take(&mut self.held);
        if held
            && let Some(clock) = &mut self.detached
            && let Wait::Until { deadline, .. } = clock.wait
        {
            clock.released = Some(now.min(hold_ends(deadline)));
        }
        held
    }

    /// Looks at a call at `now` that was to be looked at at `at`.
    pub(super) fn look(&mut self, now: Instant, at: Instant) -> Look {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return Look::Over(Expired::Deadline);
        }
        match self.detached.as_ref().map(|clock| clock.wait) {
            Some(Wait::Until { .. }) if self.put_off_if_late(now, at) => Look::PutOff,
            Some(Wait::Until { .. }) => Look::Over(Expired::Grace),
            Some(Wait::Unseen(_) | Wait::ForItsEnd) => Look::Forget,
            None => Look::PutOff,
        }
    }

    fn put_off_if_late(&mut self, now: Instant, at: Instant) -> bool {
        let Some(clock) = &mut self.detached else {
            return false;
        };
        let Wait::Until { deadline, retry } = &mut clock.wait else {
            return false;
        };
        let late = now.duration_since(at) > LATE && !clock.put_off;
        if late {
            clock.put_off = true;
            *deadline = now + (2 * *retry).max(MAX_HOLD);
            self.last_deadline = Some(*deadline);
        }
        late
    }
}

fn hold_ends(deadline: Instant) -> Instant {
    deadline.checked_add(MAX_HOLD).unwrap_or(deadline)
}

// === impl Streams ===

impl Streams {
    /// Adds a stream. `None` if it is known, else which one had to be forgotten for it.
    pub(super) fn add(&mut self, stream: StreamId) -> Option<Option<StreamId>> {
        if self.only.is_none() {
            self.only = Some(stream);
            return Some(None);
        }
        if self.contains(stream) {
            return None;
        }
        let others = self.others.get_or_insert_default();
        if others.first.len() < MAX_EVENT_IDS - 1 {
            others.first.push(stream);
            return Some(None);
        }
        others.latest.push_back(stream);
        if others.latest.len() <= MAX_EVENT_IDS {
            return Some(None);
        }
        self.overflowed = true;
        Some(others.latest.pop_front())
    }

    pub(super) fn contains(&self, stream: StreamId) -> bool {
        self.iter().any(|known| known == stream)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = StreamId> {
        let others = self.others.iter();
        let others = others.flat_map(|others| others.first.iter().chain(&others.latest));
        self.only.iter().chain(others).copied()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.only.is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }
}
