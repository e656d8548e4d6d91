//! Indexes each session's streams and tracks ended streams across all sessions.
//!
//! The index is generic over its stream type, so that a stream can refer to the [`StreamIndex`] that contains it, and use it to
//! evict other streams or to make room across [all sessions](AllSessions).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::{task::AbortHandle, time::Instant};

use super::{
    budget::{Budget, Reservation},
    credentials::{Credentials, SentCredentials},
    event::StreamName,
};
use crate::{lock::lock, message::IdKey};

/// One session's streams.
#[derive(Debug)]
pub(super) struct StreamIndex<S> {
    /// The budget for the streams' events.
    budget: Arc<Budget>,
    ended_streams: Weak<EndedStreams<S>>,
    state: Mutex<IndexState<S>>,
}

#[derive(Debug)]
struct IndexState<S> {
    streams: HashMap<u64, Entry<S>>,
    /// Stream numbers, keyed by the name in the stream's event ids.
    names: HashMap<StreamName, u64>,
    /// The number of the newest stream for each call id.
    calls: HashMap<Arc<IdKey>, u64>,
    /// Ended streams whose client has read them in full, or whose call was cancelled.
    evictable: BTreeSet<u64>,
    /// Always `None` while the session has no streams.
    accepted: Option<AcceptedCredentials>,
    is_closed: bool,
    last_used: Instant,
}

/// The credentials from the session's latest accepted request.
#[derive(Debug)]
struct AcceptedCredentials {
    sent: SentCredentials,
    /// Covers the credentials.
    _reservation: Reservation,
}

#[derive(Debug)]
struct Entry<S> {
    stream: S,
    name: StreamName,
    call: Option<Arc<IdKey>>,
}

/// The ended streams of all sessions, ordered by when they expire.
#[derive(Debug)]
pub(super) struct EndedStreams<S> {
    state: Mutex<EndedState<S>>,
    gaps: AtomicU64,
    sessions: Weak<dyn AllSessions>,
}

/// All of an event store's sessions.
pub(super) trait AllSessions: fmt::Debug + Send + Sync {
    /// Removes idle sessions, or else drops droppable events that no client is reading.
    ///
    /// Returns `false` if that frees nothing.
    fn make_room(&self) -> bool;
}

#[derive(Debug)]
struct EndedState<S> {
    by_deadline: BTreeMap<(Instant, u64), Weak<StreamIndex<S>>>,
    /// The keys of the ended streams that may be evicted.
    evictable: BTreeSet<(Instant, u64)>,
    /// The task that removes expired streams. It runs as long as there are ended streams.
    sweeper: Option<AbortHandle>,
}

/// The next stream to expire.
pub(super) enum NextExpiry<S> {
    /// This stream has expired, and is no longer tracked.
    Due(Weak<StreamIndex<S>>, u64),
    /// No stream expires before this time.
    At(Instant),
    /// There are no ended streams.
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
                accepted: None,
                is_closed: false,
                last_used: Instant::now(),
            }),
        }
    }

    /// Returns an empty reservation for a stream's events.
    pub(super) fn reservation(&self) -> Reservation {
        self.budget.reservation()
    }

    /// Returns an empty reservation for a stream itself, from the budget that all sessions share.
    pub(super) fn global_reservation(&self) -> Reservation {
        self.budget.global_reservation()
    }

    /// Returns the ended streams of all sessions, or `None` if the event store has been dropped.
    pub(super) fn ended_streams(&self) -> Option<Arc<EndedStreams<S>>> {
        self.ended_streams.upgrade()
    }

    /// Inserts a stream. Returns `false` if the session has been closed.
    pub(super) fn insert(
        &self,
        number: u64,
        name: StreamName,
        stream: S,
        call: Option<IdKey>,
    ) -> bool {
        let mut state = self.state();
        if state.is_closed {
            return false;
        }
        state.last_used = Instant::now();
        let call = call.map(Arc::new);
        if let Some(call) = &call {
            state.calls.insert(call.clone(), number);
        }
        state.names.insert(name, number);
        state.streams.insert(number, Entry { stream, name, call });
        true
    }

    /// Returns the stream of the newest call with this id.
    pub(super) fn find(&self, call: &IdKey) -> Option<S> {
        let state = self.state();
        let entry = state.streams.get(state.calls.get(call)?)?;
        Some(entry.stream.clone())
    }

    /// Returns the stream with this name, and marks the session as just used.
    pub(super) fn get(&self, name: StreamName) -> Option<S> {
        let mut state = self.state();
        state.last_used = Instant::now();
        let entry = state.streams.get(state.names.get(&name)?)?;
        Some(entry.stream.clone())
    }

    /// Registers an ended stream that expires at `until`.
    pub(super) fn add_ended(self: &Arc<Self>, number: u64, until: Instant) {
        self.state().last_used = Instant::now();
        if let Some(ended_streams) = self.ended_streams() {
            let index = Arc::downgrade(self);
            ended_streams
                .state()
                .by_deadline
                .insert((until, number), index);
        }
    }

    /// Marks an ended stream as evictable.
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

    /// Stores an accepted request's credentials until the session has no streams left.
    ///
    /// Does nothing if the session has no streams, if there is no room, or if a later request's credentials are already stored.
    pub(super) fn accept_credentials(&self, sent: SentCredentials) {
        let mut reservation = self.global_reservation();
        if reservation.grow(sent.bytes).is_err() {
            return;
        }
        let mut state = self.state();
        let is_latest = state
            .accepted
            .as_ref()
            .is_none_or(|previous| previous.sent.extracted_at <= sent.extracted_at);
        if is_latest && !state.streams.is_empty() {
            let accepted = AcceptedCredentials {
                sent,
                _reservation: reservation,
            };
            // Release the lock before dropping the previous credentials.
            let _previous = state.accepted.replace(accepted);
            drop(state);
        }
    }

    /// Returns the credentials from the latest accepted request.
    pub(super) fn accepted_credentials(&self) -> Option<Arc<Credentials>> {
        let state = self.state();
        state
            .accepted
            .as_ref()
            .map(|accepted| accepted.sent.credentials.clone())
    }

    /// Removes and returns a stream. Removing the last one also removes the accepted credentials.
    pub(super) fn remove(&self, number: u64) -> Option<S> {
        let mut state = self.state();
        let entry = state.streams.remove(&number)?;
        if state.streams.is_empty() {
            state.accepted = None;
        }
        state.evictable.remove(&number);
        state.names.remove(&entry.name);
        // A newer call may have reused the request id.
        if let Some(call) = entry.call
            && state.calls.get(&call) == Some(&number)
        {
            state.calls.remove(&call);
        }
        Some(entry.stream)
    }

    /// Returns the stream with this number.
    pub(super) fn get_by_number(&self, number: u64) -> Option<S> {
        let state = self.state();
        state.streams.get(&number).map(|entry| entry.stream.clone())
    }

    /// Returns the oldest evictable stream, and clears its mark.
    pub(super) fn take_evictable(&self) -> Option<S> {
        let mut state = self.state();
        loop {
            let number = state.evictable.pop_first()?;
            if let Some(entry) = state.streams.get(&number) {
                return Some(entry.stream.clone());
            }
        }
    }

    /// Removes and returns all streams. After that, no stream can be inserted.
    pub(super) fn take_all(&self) -> Vec<S> {
        let mut state = self.state();
        state.is_closed = true;
        state.names.clear();
        state.calls.clear();
        state.evictable.clear();
        state.accepted = None;
        let streams = std::mem::take(&mut state.streams);
        streams.into_values().map(|entry| entry.stream).collect()
    }

    /// Returns when the session was last used, or `None` if it has a stream.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let state = self.state();
        state.streams.is_empty().then_some(state.last_used)
    }

    pub(super) fn streams(&self) -> Vec<S> {
        let state = self.state();
        let entries = state.streams.values();
        entries.map(|entry| entry.stream.clone()).collect()
    }

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
    pub(super) fn new(sessions: Weak<dyn AllSessions>) -> Self {
        Self {
            state: Mutex::new(EndedState {
                by_deadline: BTreeMap::new(),
                evictable: BTreeSet::new(),
                sweeper: None,
            }),
            gaps: AtomicU64::new(0),
            sessions,
        }
    }

    /// Makes room across all sessions without evicting any stream. Returns `false` if that frees nothing.
    pub(super) fn make_room_in_sessions(&self) -> bool {
        let sessions = self.sessions.upgrade();
        sessions.is_some_and(|sessions| sessions.make_room())
    }

    /// Stops tracking a closed stream, and adds its `gaps` to the total.
    ///
    /// `until` is when the stream would have expired, or `None` if it had not ended yet.
    pub(super) fn on_closed(&self, number: u64, until: Option<Instant>, gaps: u64) {
        self.gaps.fetch_add(gaps, Ordering::Relaxed);
        if let Some(until) = until {
            let mut state = self.state();
            state.by_deadline.remove(&(until, number));
            state.evictable.remove(&(until, number));
        }
    }

    /// Returns how many times clients of closed streams have been notified of missing events.
    pub(super) fn gaps(&self) -> u64 {
        self.gaps.load(Ordering::Relaxed)
    }

    /// Returns the oldest evictable stream's index and number, and clears its mark.
    pub(super) fn take_evictable(&self) -> Option<(Weak<StreamIndex<S>>, u64)> {
        let mut state = self.state();
        loop {
            let key = state.evictable.pop_first()?;
            if let Some(index) = state.by_deadline.get(&key) {
                return Some((index.clone(), key.1));
            }
        }
    }

    /// Returns the next stream to expire, removing it if it has already expired.
    pub(super) fn next_expiry(&self, now: Instant) -> NextExpiry<S> {
        let mut state = self.state();
        let Some(first) = state.by_deadline.first_entry() else {
            // `start_sweeper` takes the same lock, so a stream added from now on starts a new task.
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

    /// Starts the task that removes expired streams, unless it is already running.
    pub(super) fn start_sweeper(&self, spawn: impl FnOnce() -> AbortHandle) {
        let mut state = self.state();
        if state.sweeper.is_none() && !state.by_deadline.is_empty() {
            state.sweeper = Some(spawn());
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
