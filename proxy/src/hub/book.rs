//! The streams of each session, and those of all that have ended.
//!
//! What stands here knows nothing of a stream but its number and its call. So a stream may know the [`Book`] that it stands
//! in, and ask for what needs the others: room.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{task::AbortHandle, time::Instant};

use super::{
    budget::{Budget, Grant},
    event::StreamName,
};
use crate::{lock::lock, message::IdKey};

/// The streams of one session.
#[derive(Debug)]
pub(super) struct Book<S> {
    /// What they may keep.
    budget: Arc<Budget>,
    over: Weak<Over<S>>,
    pages: Mutex<Pages<S>>,
}

#[derive(Debug)]
struct Pages<S> {
    streams: HashMap<u64, Entry<S>>,
    /// What their event ids call them.
    names: HashMap<StreamName, u64>,
    /// The newest stream of each id.
    calls: HashMap<Arc<IdKey>, u64>,
    /// Streams that have ended and whose client has all of them.
    spare: BTreeSet<u64>,
    closed: bool,
    used: Instant,
}

#[derive(Debug)]
struct Entry<S> {
    stream: S,
    name: StreamName,
    call: Option<Arc<IdKey>>,
}

/// The streams of all sessions that have ended, by the time when they are forgotten.
#[derive(Debug)]
pub(super) struct Over<S> {
    ends: Mutex<Ends<S>>,
    gaps: AtomicU64,
}

#[derive(Debug)]
struct Ends<S> {
    ended: BTreeMap<(Instant, u64), Weak<Book<S>>>,
    /// Those of them whose client has all of them.
    spare: BTreeSet<(Instant, u64)>,
    /// The task that forgets them, while there are any.
    sweeper: Option<AbortHandle>,
}

/// Which stream is forgotten next.
pub(super) enum Next<S> {
    /// This one, and now. It is known here no longer.
    Due(Weak<Book<S>>, u64),
    /// One whose time is not over. Somebody is to ask again then.
    At(Instant),
    /// None. Nobody need ask again.
    Nothing,
}

// === impl Book ===

impl<S: Clone> Book<S> {
    pub(super) fn new(budget: Arc<Budget>, over: &Arc<Over<S>>) -> Self {
        Self {
            budget,
            over: Arc::downgrade(over),
            pages: Mutex::new(Pages {
                streams: HashMap::new(),
                names: HashMap::new(),
                calls: HashMap::new(),
                spare: BTreeSet::new(),
                closed: false,
                used: Instant::now(),
            }),
        }
    }

    /// Room for what one of its streams keeps.
    pub(super) fn grant(&self) -> Grant {
        self.budget.grant()
    }

    /// Room for what a stream itself costs, which no session has a share of.
    pub(super) fn grant_of_all(&self) -> Grant {
        self.budget.grant_of_all()
    }

    /// Where those go that have ended, as long as the hub lives.
    pub(super) fn over(&self) -> Option<Arc<Over<S>>> {
        self.over.upgrade()
    }

    /// Enters a stream. `false` if nothing can be entered any more.
    pub(super) fn enter(
        &self,
        number: u64,
        name: StreamName,
        stream: S,
        call: Option<IdKey>,
    ) -> bool {
        let mut pages = self.pages();
        if pages.closed {
            return false;
        }
        pages.used = Instant::now();
        let call = call.map(Arc::new);
        if let Some(call) = &call {
            pages.calls.insert(call.clone(), number);
        }
        pages.names.insert(name, number);
        pages.streams.insert(number, Entry { stream, name, call });
        true
    }

    /// The newest stream of the call with this id.
    pub(super) fn find(&self, call: &IdKey) -> Option<S> {
        let pages = self.pages();
        let entry = pages.streams.get(pages.calls.get(call)?)?;
        Some(entry.stream.clone())
    }

    /// The stream with this name.
    pub(super) fn get(&self, name: StreamName) -> Option<S> {
        let mut pages = self.pages();
        pages.used = Instant::now();
        let entry = pages.streams.get(pages.names.get(&name)?)?;
        Some(entry.stream.clone())
    }

    /// A stream has ended, and is forgotten at that time.
    pub(super) fn end(self: &Arc<Self>, number: u64, until: Instant) {
        self.pages().used = Instant::now();
        if let Some(over) = self.over() {
            let book = Arc::downgrade(self);
            over.ends().ended.insert((until, number), book);
        }
    }

    /// The client of a stream that has ended has all of it.
    pub(super) fn spare(&self, number: u64, until: Instant) {
        {
            let mut pages = self.pages();
            if pages.streams.contains_key(&number) {
                pages.spare.insert(number);
            }
        }
        if let Some(over) = self.over() {
            let mut ends = over.ends();
            if ends.ended.contains_key(&(until, number)) {
                ends.spare.insert((until, number));
            }
        }
    }

    /// Takes a stream out.
    pub(super) fn take(&self, number: u64) -> Option<S> {
        let mut pages = self.pages();
        let entry = pages.streams.remove(&number)?;
        pages.spare.remove(&number);
        pages.names.remove(&entry.name);
        if let Some(call) = entry.call
            && pages.calls.get(&call) == Some(&number)
        {
            pages.calls.remove(&call);
        }
        Some(entry.stream)
    }

    /// Takes the oldest stream out whose client has all of it.
    pub(super) fn take_spare(&self) -> Option<S> {
        loop {
            let number = self.pages().spare.pop_first()?;
            if let Some(stream) = self.take(number) {
                return Some(stream);
            }
        }
    }

    /// Takes all streams out. None can be entered from here on.
    pub(super) fn take_all(&self) -> Vec<S> {
        let mut pages = self.pages();
        pages.closed = true;
        pages.names.clear();
        pages.calls.clear();
        pages.spare.clear();
        let streams = std::mem::take(&mut pages.streams);
        streams.into_values().map(|entry| entry.stream).collect()
    }

    /// When it was last used, if it has no stream.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let pages = self.pages();
        pages.streams.is_empty().then_some(pages.used)
    }

    /// Its streams as they are now.
    pub(super) fn all(&self) -> Vec<S> {
        let pages = self.pages();
        let entries = pages.streams.values();
        entries.map(|entry| entry.stream.clone()).collect()
    }

    /// How many streams it has.
    pub(super) fn len(&self) -> usize {
        self.pages().streams.len()
    }
}

impl<S> Book<S> {
    fn pages(&self) -> MutexGuard<'_, Pages<S>> {
        lock(&self.pages)
    }
}

// === impl Over ===

impl<S> Over<S> {
    pub(super) fn new() -> Self {
        Self {
            ends: Mutex::new(Ends {
                ended: BTreeMap::new(),
                spare: BTreeSet::new(),
                sweeper: None,
            }),
            gaps: AtomicU64::new(0),
        }
    }

    /// A stream is closed whose clients were told so often that events are missing. It would have been forgotten at that
    /// time, if it had ended.
    pub(super) fn closed(&self, number: u64, until: Option<Instant>, gaps: u64) {
        self.gaps.fetch_add(gaps, Ordering::Relaxed);
        if let Some(until) = until {
            let mut ends = self.ends();
            ends.ended.remove(&(until, number));
            ends.spare.remove(&(until, number));
        }
    }

    /// How often clients were told that events are missing, on streams that are closed.
    pub(super) fn gaps(&self) -> u64 {
        self.gaps.load(Ordering::Relaxed)
    }

    /// The oldest of all whose client has all of it. It is known here no longer.
    pub(super) fn take_spare(&self) -> Option<(Weak<Book<S>>, u64)> {
        let mut ends = self.ends();
        loop {
            let key = ends.spare.pop_first()?;
            if let Some(book) = ends.ended.remove(&key) {
                return Some((book, key.1));
            }
        }
    }

    /// Which stream is forgotten next.
    pub(super) fn next(&self, now: Instant) -> Next<S> {
        let mut ends = self.ends();
        let Some(first) = ends.ended.first_entry() else {
            // Under the same lock: who adds one after this starts another.
            ends.sweeper = None;
            return Next::Nothing;
        };
        let (until, number) = *first.key();
        if until > now {
            return Next::At(until);
        }
        let book = first.remove();
        ends.spare.remove(&(until, number));
        Next::Due(book, number)
    }

    /// Starts the task that forgets them, if there is none.
    pub(super) fn sweep_with(&self, start: impl FnOnce() -> AbortHandle) {
        let mut ends = self.ends();
        if ends.sweeper.is_none() && !ends.ended.is_empty() {
            ends.sweeper = Some(start());
        }
    }

    fn ends(&self) -> MutexGuard<'_, Ends<S>> {
        lock(&self.ends)
    }
}

impl<S> Drop for Over<S> {
    fn drop(&mut self) {
        let sweeper = self.ends().sweeper.take();
        if let Some(sweeper) = sweeper {
            sweeper.abort();
        }
    }
}
