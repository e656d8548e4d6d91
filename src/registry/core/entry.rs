//! What the core knows of one call in flight.

use std::{collections::VecDeque, mem, time::Duration};

use tokio::time::Instant;

use super::{
    Finished, MAX_BARREN,
    index::{Slot, StreamId},
};
use crate::{call::RequestId, detach::Detachment};

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
    pub(super) place: Option<Place>,
    pub(super) streams: Streams,
    pub(super) generation: Generation,
    /// Boxed, because most calls have no deadline and end attached.
    pub(super) times: Option<Box<Times>>,
}

/// What a session call is found by.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) session: Slot,
    pub(super) request: RequestId,
    /// Which one of its session's calls in flight it is.
    pub(super) seat: u32,
    pub(super) owns_key: bool,
}

/// When a call is to be looked at.
#[derive(Debug, Default)]
pub(super) struct Times {
    /// When it is cancelled at the latest, attached or not.
    pub(super) deadline: Option<Instant>,
    /// When it is looked at next, which is what `due` holds for it.
    pub(super) due: Option<Instant>,
    /// Its clock, while it is detached.
    pub(super) clock: Option<Clock>,
    pub(super) held: bool,
    barren: u32,
    last_deadline: Option<Instant>,
}

/// The clock of a detached call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Clock {
    pub(super) detachment: Detachment,
    pub(super) wait: Wait,
    put_off: bool,
    /// When the last hold ended, or could have lasted to.
    released: Option<Instant>,
}

/// The streams of a call, as far as they are known by name.
#[derive(Debug, Default)]
pub(super) struct Streams {
    /// Nearly always the only one. It needs no allocation.
    only: Option<StreamId>,
    more: Option<Box<More>>,
}

/// What is rarely to be known of the streams of a call.
#[derive(Debug, Default)]
struct More {
    /// The streams after the only one.
    first: Vec<StreamId>,
    latest: VecDeque<StreamId>,
    /// Not all are known by name.
    overflowed: bool,
    /// Other calls are on some of them too: those of a batch.
    shared: bool,
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
    pub(super) fn new(call: T, place: Option<Place>, deadline: Option<Instant>) -> Self {
        let times = deadline.map(|deadline| Times {
            deadline: Some(deadline),
            ..Times::default()
        });
        Self {
            call,
            place,
            streams: Streams::default(),
            generation: FIRST,
            times: times.map(Box::new),
        }
    }

    pub(super) fn session(&self) -> Option<Slot> {
        self.place.as_ref().map(|place| place.session)
    }

    /// Whether it is the call of this session with this JSON-RPC id.
    pub(super) fn is(&self, session: Slot, request: &RequestId) -> bool {
        let place = self.place.as_ref();
        place.is_some_and(|place| place.session == session && place.request == *request)
    }

    pub(super) fn clock(&self) -> Option<&Clock> {
        self.times.as_ref()?.clock.as_ref()
    }

    pub(super) fn detachment(&self) -> Option<Detachment> {
        self.clock().map(|clock| clock.detachment)
    }

    /// Since when it has no client.
    pub(crate) fn detached_at(&self) -> Option<Instant> {
        self.detachment().map(|detachment| detachment.since())
    }

    /// When it is cancelled if its client does not come back.
    pub(crate) fn waits_to(&self) -> Option<Instant> {
        match self.clock()?.wait {
            Wait::Until { .. } => self.times.as_ref()?.grace_ends(),
            Wait::ForItsEnd | Wait::Unseen(_) => None,
        }
    }

    /// When it is cancelled at the latest, attached or not.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.times.as_ref()?.deadline
    }

    pub(super) fn times_mut(&mut self) -> &mut Times {
        self.times.get_or_insert_default()
    }
}

// === impl Times ===

impl Times {
    /// Starts the clock. Returns when it is to be looked at.
    pub(super) fn detach(
        &mut self,
        mut wait: Wait,
        barren: bool,
        detachment: Detachment,
    ) -> Option<Instant> {
        self.barren = if barren { self.barren + 1 } else { 0 };
        if let Wait::Until { deadline, .. } = &mut wait {
            if self.barren > MAX_BARREN {
                *deadline = self.last_deadline.unwrap_or(*deadline).min(*deadline);
            }
            self.last_deadline = Some(*deadline);
        }
        self.clock = Some(Clock {
            detachment,
            wait,
            put_off: false,
            released: None,
        });
        self.grace_ends()
    }

    pub(super) fn next_look(&self) -> Option<Instant> {
        self.grace_ends().into_iter().chain(self.deadline).min()
    }

    /// When the clock of a detached call is looked at.
    fn grace_ends(&self) -> Option<Instant> {
        let clock = self.clock.as_ref()?;
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
            self.put_off_if_late(now, at, false);
        }
        self.held = true;
        true
    }

    /// Lets a stopped clock go on. `false` if it was not stopped.
    pub(super) fn release(&mut self, now: Instant) -> bool {
        let held = mem::take(&mut self.held);
        if held
            && let Some(clock) = &mut self.clock
            && let Wait::Until { deadline, .. } = clock.wait
        {
            clock.released = Some(now.min(hold_ends(deadline)));
        }
        held
    }

    /// Looks at a call at `now` that was to be looked at at `at`. `starved`: it is known that a runtime stands still.
    pub(super) fn look(&mut self, now: Instant, at: Instant, starved: bool) -> Look {
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            return Look::Over(Expired::Deadline);
        }
        match self.clock.map(|clock| clock.wait) {
            Some(Wait::Until { .. }) if self.put_off_if_late(now, at, starved) => Look::PutOff,
            Some(Wait::Until { .. }) => Look::Over(Expired::Grace),
            Some(Wait::Unseen(_) | Wait::ForItsEnd) => Look::Forget,
            None => Look::PutOff,
        }
    }

    fn put_off_if_late(&mut self, now: Instant, at: Instant, starved: bool) -> bool {
        let Some(clock) = &mut self.clock else {
            return false;
        };
        let Wait::Until { deadline, retry } = &mut clock.wait else {
            return false;
        };
        let late = (starved || now.duration_since(at) > LATE) && !clock.put_off;
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
        let more = self.more.get_or_insert_default();
        if more.first.len() < MAX_EVENT_IDS - 1 {
            more.first.push(stream);
            return Some(None);
        }
        more.latest.push_back(stream);
        if more.latest.len() <= MAX_EVENT_IDS {
            return Some(None);
        }
        more.overflowed = true;
        Some(more.latest.pop_front())
    }

    /// Notes that not all are known by name.
    pub(super) fn blur(&mut self) {
        self.more.get_or_insert_default().overflowed = true;
    }

    pub(super) fn are_blurred(&self) -> bool {
        self.more.as_ref().is_some_and(|more| more.overflowed)
    }

    /// Notes that other calls are on some of them too.
    pub(super) fn share(&mut self) {
        self.more.get_or_insert_default().shared = true;
    }

    pub(super) fn are_shared(&self) -> bool {
        self.more.as_ref().is_some_and(|more| more.shared)
    }

    pub(super) fn contains(&self, stream: StreamId) -> bool {
        self.only == Some(stream) || self.others().any(|known| *known == stream)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = StreamId> {
        self.only.iter().chain(self.others()).copied()
    }

    fn others(&self) -> impl Iterator<Item = &StreamId> {
        let more = self.more.iter();
        more.flat_map(|more| more.first.iter().chain(&more.latest))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.only.is_none()
    }

    pub(super) fn len(&self) -> usize {
        self.iter().count()
    }
}
