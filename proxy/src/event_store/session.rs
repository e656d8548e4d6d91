//! The streams of one session.

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
    stream::{PendingEnd, Stream},
    stream_index::{EndedStreams, StreamIndex},
};
use crate::message::IdKey;

/// Number of bytes that the parser of a stream may use without a reservation: 4 KiB.
///
/// Chosen so that progress can be read, and dropped, when there is no room.
pub(super) const READ_ALLOWANCE: usize = 4 * 1024;

/// Cost of a stream, in addition to its events.
///
/// This covers the stream itself, the task that writes it, its entries in the maps, its first event and its error. So there
/// is always room for these two events.
pub(super) const STREAM_OVERHEAD: usize = 4 * 1024 + READ_ALLOWANCE;

/// Cost of a session, in addition to its streams.
pub(super) const SESSION_OVERHEAD: usize = 1024;

/// A session of the server behind the proxy. Clones share it.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: Arc<str>,
    /// The client supports priming events, as shown by the revision in one of its requests.
    primes: AtomicBool,
    index: Arc<StreamIndex<Stream>>,
    shared: Arc<SharedState>,
    /// Covers the cost of the session itself.
    _reservation: Reservation,
}

/// State shared by the sessions of an event store.
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
    /// Clients of revisions before 2025-11-25 fail on events without a message.
    pub fn primes(&self) -> bool {
        self.0.primes.load(Ordering::Relaxed)
    }

    pub(super) fn set_primes(&self, primes: bool) {
        self.0.primes.store(primes, Ordering::Relaxed);
    }

    /// Opens a stream for a call. To make room, evicts streams that may be evicted, removes idle sessions, and drops
    /// droppable events that no client is reading.
    ///
    /// Returns `None` if there is no room, the session was closed, or the system's random number generator fails.
    pub fn open(&self, call: Call) -> Option<Stream> {
        self.open_stream(Some(call))
    }

    /// Opens a stream that belongs to no call, in the same way as [`open`](Self::open).
    pub fn open_standalone(&self) -> Option<Stream> {
        self.open_stream(None)
    }

    /// Returns the response to a client that opens a stream of the session without an event id.
    ///
    /// The client gets the events that no client has taken yet. If earlier events have been taken and the client supports
    /// priming, it first gets an event without a message, so that it has an id to resume from.
    pub fn listen(&self, stream: &Stream) -> Response<Body> {
        stream.respond_unread(self.primes())
    }

    /// Returns the stream of the newest call with this id.
    ///
    /// Returns `None` if there is no such call, or if its stream is no longer kept.
    pub fn find(&self, call: &IdKey) -> Option<Stream> {
        self.0.index.find(call)
    }

    /// Keeps the credentials of an accepted request while the session has a stream.
    ///
    /// Does nothing if the session has no stream, if there is no room, or if the credentials of a later request are already kept.
    pub(super) fn accept_credentials(&self, sent: SentCredentials) {
        self.0.index.accept_credentials(sent);
    }

    /// Returns the credentials of the latest accepted request. Returns `None` if they are `refused`, or if there are none.
    pub(super) fn other_credentials(&self, refused: &Credentials) -> Option<Arc<Credentials>> {
        let accepted = self.0.index.accepted_credentials();
        accepted.filter(|accepted| **accepted != *refused)
    }

    fn open_stream(&self, call: Option<Call>) -> Option<Stream> {
        let Inner { index, shared, .. } = &*self.0;
        // The id is stored up to four times: as text, in two keys, and in an error.
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

    /// Returns the stream with this name. This counts as a use of the session.
    pub(super) fn stream(&self, name: StreamName) -> Option<Stream> {
        self.0.index.get(name)
    }

    /// Ends all streams of the session. No stream can be opened afterwards.
    pub(super) fn close(&self) {
        self.0.index.close();
    }

    /// Returns the index of the session's streams.
    pub(super) fn index(&self) -> Arc<StreamIndex<Stream>> {
        self.0.index.clone()
    }

    /// Marks the session's streams as being ended by a DELETE.
    ///
    /// The marks last until the returned guards are dropped.
    pub(super) fn begin_end(&self) -> Vec<PendingEnd> {
        self.0
            .index
            .streams()
            .iter()
            .map(Stream::begin_end)
            .collect()
    }

    /// Returns when the session was last used.
    ///
    /// Returns `None` if the session has a stream or another clone, such as one held by a request. While the event store is locked,
    /// an idle session stays idle, because an idle session can only be cloned from the store's entry.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let is_shared = Arc::strong_count(&self.0) > 1;
        self.0.index.idle_since().filter(|_| !is_shared)
    }

    /// Returns when a client last stopped reading one of its streams.
    ///
    /// Returns `None` if a client is reading one. The inner value is `None` if no remaining stream had a client.
    pub(crate) fn unread_since(&self) -> Option<Option<Instant>> {
        let mut latest = None;
        for stream in self.0.index.streams() {
            latest = latest.max(stream.unread_since()?);
        }
        Some(latest)
    }

    /// Returns the number of the session's streams, including ended ones that are kept.
    pub(super) fn stream_count(&self) -> usize {
        self.0.index.len()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The id is a credential, so it is not shown.
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
