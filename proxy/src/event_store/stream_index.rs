//! The streams of each session, and those of all that have ended.
//!
//! What stands here knows nothing of a stream but its number and its call. So a stream may know the [`StreamIndex`] that it stands
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
    budget::{Budget, Reservation},
    event::StreamName,
};
use crate::{lock::lock, message::IdKey};

/// The streams of one session.
#[derive(Debug)]
pub(super) struct StreamIndex<S> {
    /// What they may keep.
    budget: Arc<Budget>,
    ended_streams: Weak<EndedStreams<S>>,
    state: Mutex<IndexState<S>>,
}

#[derive(Debug)]
struct IndexState<S> {
    streams: HashMap<u64, Entry<S>>,
    /// What their event ids call them.
    names: HashMap<StreamName, u64>,
    /// The newest stream of each id.
    calls: HashMap<Arc<IdKey>, u64>,
    /// Streams that have ended and whose client has all of them.
    evictable: BTreeSet<u64>,
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
pub(super) struct EndedStreams<S> {
    state: Mutex<EndedState<S>>,
    gaps: AtomicU64,
}

#[derive(Debug)]
struct EndedState<S> {
    by_deadline: BTreeMap<(Instant, u64), Weak<StreamIndex<S>>>,
    /// Those of them whose client has all of them.
    evictable: BTreeSet<(Instant, u64)>,
    /// The task that forgets them, while there are any.
    sweeper: Option<AbortHandle>,
}

/// Which stream is forgotten next.
pub(super) enum NextExpiry<S> {
    /// This one, and now. It is known here no longer.
    Due(Weak<StreamIndex<S>>, u64),
    /// One whose time is not over. Somebody is to ask again then.
    At(Instant),
    /// None. Nobody need ask again.
    None,
}

// === impl StreamIndex ===

impl<S: Clone> StreamIndex<S> {
    pub(super) fn new(budget: Arc<Budget>, ended_streams: &Arc<EndedStreams<S>>) -> Self {
        Self {
            budget,
            ended_streams: Arc::downgrade(ended_streams),
            state: Mutex::new(IndexState {
                streams: HashMap::new(),
                names: HashMap::new(),
                calls: HashMap::new(),
                evictable: BTreeSet::new(),
                closed: false,
                used: Instant::now(),
            }),
        }
    }

    /// Room for what one of its streams keeps.
    pub(super) fn reservation(&self) -> Reservation {
        self.budget.reservation()
    }

    /// Room for what a stream itself costs, which no session has a share of.
    pub(super) fn global_reservation(&self) -> Reservation {
        self.budget.global_reservation()
    }

    /// Where those go that have ended, as long as the event store lives.
    pub(super) fn ended_streams(&self) -> Option<Arc<EndedStreams<S>>> {
        self.ended_streams.upgrade()
    }

    /// Enters a stream. `false` if nothing can be entered any more.
    pub(super) fn insert(
        &self,
        number: u64,
        name: StreamName,
        stream: S,
        call: Option<IdKey>,
    ) -> bool {
        let mut state = self.state();
        if state.closed {
            return false;
        }
        state.used = Instant::now();
        let call = call.map(Arc::new);
        if let Some(call) = &call {
            state.calls.insert(call.clone(), number);
        }
        state.names.insert(name, number);
        state.streams.insert(number, Entry { stream, name, call });
        true
    }

    /// The newest stream of the call with this id.
    pub(super) fn find(&self, call: &IdKey) -> Option<S> {
        let state = self.state();
        let entry = state.streams.get(state.calls.get(call)?)?;
        Some(entry.stream.clone())
    }

    /// The stream with this name.
    pub(super) fn get(&self, name: StreamName) -> Option<S> {
        let mut state = self.state();
        state.used = Instant::now();
        let entry = state.streams.get(state.names.get(&name)?)?;
        Some(entry.stream.clone())
    }

    /// A stream has ended, and is forgotten at that time.
    pub(super) fn add_ended(self: &Arc<Self>, number: u64, until: Instant) {
        self.state().used = Instant::now();
        if let Some(ended_streams) = self.ended_streams() {
            let index = Arc::downgrade(self);
            ended_streams
                .state()
                .by_deadline
                .insert((until, number), index);
        }
    }

    /// The client of a stream that has ended has all of it.
    pub(super) fn mark_evictable(&self, number: u64, until: Instant) {
        {
            let mut state = self.state();
            if state.streams.contains_key(&number) {
                state.evictable.insert(number);
            }
        }
        if let Some(ended_streams) = self.ended_streams() {
            let mut state = ended_streams.state();
            if state.by_deadline.contains_key(&(until, number)) {
                state.evictable.insert((until, number));
            }
        }
    }

    /// Takes a stream out.
    pub(super) fn remove(&self, number: u64) -> Option<S> {
        let mut state = self.state();
        let entry = state.streams.remove(&number)?;
        state.evictable.remove(&number);
        state.names.remove(&entry.name);
        if let Some(call) = entry.call
            && state.calls.get(&call) == Some(&number)
        {
            state.calls.remove(&call);
        }
        Some(entry.stream)
    }

    /// Takes the oldest stream out whose client has all of it.
    pub(super) fn take_evictable(&self) -> Option<S> {
        loop {
            let number = self.state().evictable.pop_first()?;
            if let Some(stream) = self.remove(number) {
                return Some(stream);
            }
        }
    }

    /// Takes all streams out. None can be entered from here on.
    pub(super) fn take_all(&self) -> Vec<S> {
        let mut state = self.state();
        state.closed = true;
        state.names.clear();
        state.calls.clear();
        state.evictable.clear();
        let streams = std::mem::take(&mut state.streams);
        streams.into_values().map(|entry| entry.stream).collect()
    }

    /// When it was last used, if it has no stream.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        state.streams.is_empty().then_some(state.used)
    }

    /// Its streams as they are now.
    pub(super) fn all(&self) -> Vec<S> {
        let state = self.state();
        let entries = state.streams.values();
        entries.map(|entry| entry.stream.clone()).collect()
    }

    /// How many streams it has.
    pub(super) fn len(&self) -> usize {
        self.state().streams.len()
    }
}

impl<S> StreamIndex<S> {
    fn state(&self) -> MutexGuard<'_, IndexState<S>> {
        lock(&self.state)
    }
}

// === impl EndedStreams ===

impl<S> EndedStreams<S> {
    pub(super) fn new() -> Self {
        Self {
            state: Mutex::new(EndedState {
                by_deadline: BTreeMap::new(),
                evictable: BTreeSet::new(),
                sweeper: None,
            }),
            gaps: AtomicU64::new(0),
        }
    }

    /// A stream is closed whose clients were told so often that events are missing. It would have been forgotten at that
    /// time, if it had ended.
    pub(super) fn on_closed(&self, number: u64, until: Option<Instant>, gaps: u64) {
        self.gaps.fetch_add(gaps, Ordering::Relaxed);
        if let Some(until) = until {
            let mut state = self.state();
            state.by_deadline.remove(&(until, number));
            state.evictable.remove(&(until, number));
        }
    }

    /// How often clients were told that events are missing, on streams that are closed.
    pub(super) fn gaps(&self) -> u64 {
        self.gaps.load(Ordering::Relaxed)
    }

    /// The oldest of all whose client has all of it. It is known here no longer.
    pub(super) fn take_evictable(&self) -> Option<(Weak<StreamIndex<S>>, u64)> {
        let mut state = self.state();
        loop {
            let key = state.evictable.pop_first()?;
            if let Some(index) = state.by_deadline.remove(&key) {
                return Some((index, key.1));
            }
        }
    }

    /// Which stream is forgotten next.
    pub(super) fn next_expiry(&self, now: Instant) -> NextExpiry<S> {
        let mut state = self.state();
        let Some(first) = state.by_deadline.first_entry() else {
            // Under the same lock: who adds one after this starts another.
            state.sweeper = None;
            return NextExpiry::None;
        };
        let (until, number) = *first.key();
        if until > now {
            return NextExpiry::At(until);
        }
        let index = first.remove();
        state.evictable.remove(&(until, number));
        NextExpiry::Due(index, number)
    }

    /// Starts the task that forgets them, if there is none.
    pub(super) fn start_sweeper(&self, open_stream: impl FnOnce() -> AbortHandle) {
        let mut state = self.state();
        if state.sweeper.is_none() && !state.by_deadline.is_empty() {
            state.sweeper = Some(open_stream());
        }
    }

    fn state(&self) -> MutexGuard<'_, EndedState<S>> {
        lock(&self.state)
    }
}

impl<S> Drop for EndedStreams<S> {
    fn drop(&mut self) {
        let sweeper = self.state().sweeper.take();
        if let Some(sweeper) = sweeper {
            sweeper.abort();
        }
    }
}
