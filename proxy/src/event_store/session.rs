//! Sessions, which open streams and look them up.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};

use axum::body::Body;
use http::Response;
use tokio::time::Instant;

use super::{
    budget::{Budget, Exhausted, Limits, Reservation},
    call::Call,
    credentials::{Credentials, SentCredentials},
    event::{Origin, StreamName},
    ring::{BufferLimits, Ring},
    stream::{PendingEndGuard, Stream},
    stream_index::{EndedStreams, StreamIndex},
};
use crate::message::IdKey;

/// Number of bytes that a stream's parser may use without a reservation.
///
/// This lets the parser read progress events, and drop them, even when there is no room.
pub(super) const READ_ALLOWANCE: usize = 4 * 1024;

/// Memory overhead of a stream, not counting its events.
///
/// This covers the stream itself, the task that writes to it, and its entries in the maps. It also covers the stream's first
/// event and its final error, so these always fit.
pub(super) const STREAM_OVERHEAD: usize = 4 * 1024 + READ_ALLOWANCE;

/// Memory overhead of a session, not counting its streams.
pub(super) const SESSION_OVERHEAD: usize = 1024;

/// A session on the server behind the proxy. Clones share it.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: Arc<str>,
    /// Whether the client supports priming events, judging by a revision it has sent.
    primes: AtomicBool,
    index: Arc<StreamIndex<Stream>>,
    shared: Arc<SharedState>,
    /// Covers the cost of the session itself.
    _reservation: Reservation,
}

/// State shared by all of an event store's sessions.
#[derive(Debug)]
pub(super) struct SharedState {
    pub(super) origin: Origin,
    pub(super) limits: Limits,
    next_stream: AtomicU64,
}

// === impl Session ===

impl Session {
    pub(super) fn new(
        id: Arc<str>,
        budget: Arc<Budget>,
        ended_streams: &Arc<EndedStreams<Stream>>,
        shared: Arc<SharedState>,
        reservation: Reservation,
    ) -> Self {
        Self(Arc::new(Inner {
            id,
            primes: AtomicBool::new(false),
            index: Arc::new(StreamIndex::new(budget, ended_streams)),
            shared,
            _reservation: reservation,
        }))
    }

    /// Returns the session's id.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Returns `true` if the session's streams may be [primed](Stream::prime).
    ///
    /// Clients on a revision before 2025-11-25 fail on an event without a message.
    pub fn primes(&self) -> bool {
        self.0.primes.load(Ordering::Relaxed)
    }

    pub(super) fn set_primes(&self, primes: bool) {
        self.0.primes.store(primes, Ordering::Relaxed);
    }

    /// Opens a stream for a call.
    ///
    /// If there is no room, evicts streams no longer needed, removes idle sessions, and drops droppable events that no client
    /// is reading. Returns `None` if there is still no room after that, if the session has been closed, or if the system's
    /// random number generator fails.
    pub fn open(&self, call: Call) -> Option<Stream> {
        self.open_stream(Some(call))
    }

    /// Like [`open`](Self::open), but for a stream that belongs to no call.
    pub fn open_standalone(&self) -> Option<Stream> {
        self.open_stream(None)
    }

    /// Returns the response to a client opening one of the streams without an event id.
    ///
    /// The client gets the events not yet received by any client. If there have been earlier events, a client that supports
    /// priming first gets an event without a message, so that it has an id to resume from.
    pub fn listen(&self, stream: &Stream) -> Response<Body> {
        stream.respond_unread(self.primes())
    }

    /// Returns the stream of the newest call with this id.
    ///
    /// Returns `None` if there is no call with this id, or if its stream has been removed.
    pub fn find(&self, call: &IdKey) -> Option<Stream> {
        self.0.index.find(call)
    }

    /// Stores an accepted request's credentials until the session has no streams left.
    ///
    /// Does nothing if the session has no streams, if there is no room, or if a later request's credentials are already stored.
    pub(super) fn accept_credentials(&self, sent: SentCredentials) {
        self.0.index.accept_credentials(sent);
    }

    /// Returns the latest accepted credentials, unless there are none or they equal `refused`.
    pub(super) fn other_credentials(&self, refused: &Credentials) -> Option<Arc<Credentials>> {
        let accepted = self.0.index.accepted_credentials();
        accepted.filter(|accepted| **accepted != *refused)
    }

    fn open_stream(&self, call: Option<Call>) -> Option<Stream> {
        let Inner { index, shared, .. } = &*self.0;
        // The id may be stored four times: as text, in two keys, and in an error.
        let call_bytes = call
            .as_ref()
            .map_or(0, |call| 4 * call.id.len() + call.extra_bytes);
        while index.len() >= shared.limits.streams {
            if !index.evict_for(Exhausted::Session) {
                return None;
            }
        }
        let mut reservation = index.global_reservation();
        while let Err(exhausted) = reservation.grow(STREAM_OVERHEAD + call_bytes) {
            if !index.evict_for(exhausted) {
                return None;
            }
        }
        let limits = BufferLimits {
            events: shared.limits.events,
            bytes: shared.limits.stream_bytes,
            retry: shared.limits.retry,
        };
        let name = StreamName::random()?;
        let number = shared.next_stream.fetch_add(1, Ordering::Relaxed);
        let key = call.as_ref().map(|call| call.key.clone());
        let ring = Ring::new(
            shared.origin.prefix(name),
            limits,
            reservation,
            index.reservation(),
        );
        let retention = shared.limits.retention;
        let stream = Stream::new(number, call, Arc::downgrade(index), retention, ring);
        index
            .insert(number, name, stream.clone(), key)
            .then_some(stream)
    }

    /// Returns the stream with this name, and marks the session as just used.
    pub(super) fn stream(&self, name: StreamName) -> Option<Stream> {
        self.0.index.get(name)
    }

    /// Ends all of the session's streams. No stream can be opened afterwards.
    pub(super) fn close(&self) {
        self.0.index.close();
    }

    pub(super) fn index(&self) -> Arc<StreamIndex<Stream>> {
        self.0.index.clone()
    }

    /// Marks the session's streams as being ended by a DELETE, until the guards are dropped.
    pub(super) fn begin_end(&self) -> Vec<PendingEndGuard> {
        self.0
            .index
            .streams()
            .iter()
            .map(Stream::begin_end)
            .collect()
    }

    /// Returns when the session was last used, or `None` if it is in use.
    ///
    /// A session is in use if it has a stream, or if there is another clone of it, such as one held by a request. While the
    /// event store is locked, an idle session stays idle, because it can only be cloned from the store's entry.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let is_shared = Arc::strong_count(&self.0) > 1;
        self.0.index.idle_since().filter(|_| !is_shared)
    }

    /// Returns when a client last stopped reading one of the session's streams.
    ///
    /// Returns `None` if a client is reading one of them now. The inner value is `None` if none of the remaining streams has
    /// ever had a client.
    pub(crate) fn unread_since(&self) -> Option<Option<Instant>> {
        let mut latest = None;
        for stream in self.0.index.streams() {
            latest = latest.max(stream.unread_since()?);
        }
        Some(latest)
    }

    /// Returns the number of streams, including ended ones still retained.
    pub(super) fn stream_count(&self) -> usize {
        self.0.index.len()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Leave out the id, which is a credential.
        f.debug_struct("Session")
            .field("primes", &self.primes())
            .field("streams", &self.stream_count())
            .finish_non_exhaustive()
    }
}

// === impl SharedState ===

impl SharedState {
    pub(super) fn new(server: &str, limits: Limits) -> Self {
        Self {
            origin: Origin::of(server),
            limits,
            next_stream: AtomicU64::new(0),
        }
    }
}
