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
    book::{Book, Over},
    budget::{Budget, Grant, Limits, Short},
    call::Call,
    event::{Origin, StreamName},
    ring::{Most, Ring},
    stream::Stream,
};
use crate::message::IdKey;

/// What the events of a stream may take while they are read, without asking for room: 4 KiB. So progress can be read, and
/// dropped, where there is none.
pub(super) const READ_ALLOWANCE: usize = 4 * 1024;

/// What a stream costs besides its events: itself, the task that writes it, its places in the maps, and its first event
/// and its error, for which there is always room.
pub(super) const STREAM_OVERHEAD: usize = 4 * 1024 + READ_ALLOWANCE;

/// What a session costs besides its streams.
pub(super) const SESSION_OVERHEAD: usize = 1024;

/// A session of the server behind the proxy. Clones are the same session.
#[derive(Clone)]
pub struct Session(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    id: Arc<str>,
    /// Its client primes: it asked for a revision that has priming events.
    primes: AtomicBool,
    book: Arc<Book<Stream>>,
    common: Arc<Common>,
    /// For what the session itself costs.
    _room: Grant,
}

/// What the sessions of a hub have in common.
#[derive(Debug)]
pub(super) struct Common {
    pub(super) origin: Origin,
    pub(super) limits: Limits,
    next_stream: AtomicU64,
}

// === impl Session ===

impl Session {
    pub(super) fn new(
        id: Arc<str>,
        budget: Arc<Budget>,
        over: &Arc<Over<Stream>>,
        common: Arc<Common>,
        room: Grant,
    ) -> Self {
        Self(Arc::new(Inner {
            id,
            primes: AtomicBool::new(false),
            book: Arc::new(Book::new(budget, over)),
            common,
            _room: room,
        }))
    }

    /// Its id.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// Whether its streams may be [primed](Stream::prime). Clients that are older than revision 2025-11-25 break at events
    /// without a message.
    pub fn primes(&self) -> bool {
        self.0.primes.load(Ordering::Relaxed)
    }

    pub(super) fn set_primes(&self, primes: bool) {
        self.0.primes.store(primes, Ordering::Relaxed);
    }

    /// Opens a stream for a call. `None` if there is no room, or the session was closed.
    pub fn open(&self, call: Call) -> Option<Stream> {
        self.start(Some(call))
    }

    /// Opens a stream that is for no call.
    pub fn open_standalone(&self) -> Option<Stream> {
        self.start(None)
    }

    /// The response to a client that listens to one of its streams and does not say what it has: it gets what no client has
    /// taken yet. One that may be primed, and is not the first, also gets the place from which it could come back.
    pub fn listen(&self, stream: &Stream) -> Response<Body> {
        stream.respond_unread(self.primes())
    }

    /// The stream of the call with this id, by its value: the newest, if an id was used again.
    pub fn find(&self, call: &IdKey) -> Option<Stream> {
        self.0.book.find(call)
    }

    fn start(&self, call: Option<Call>) -> Option<Stream> {
        let Inner { book, common, .. } = &*self.0;
        let names = call
            .as_ref()
            .map_or(0, |call| 4 * call.id.len() + call.besides);
        while book.len() >= common.limits.streams {
            if !book.make_room(Short::Session) {
                return None;
            }
        }
        let mut room = book.grant_of_all();
        while let Err(short) = room.grow(STREAM_OVERHEAD + names) {
            if !book.make_room(short) {
                return None;
            }
        }
        let most = Most {
            events: common.limits.events,
            bytes: common.limits.stream_bytes,
            retry: common.limits.retry,
        };
        let name = StreamName::random()?;
        let number = common.next_stream.fetch_add(1, Ordering::Relaxed);
        let key = call.as_ref().map(|call| call.key.clone());
        let ring = Ring::new(common.origin.prefix(name), most, room, book.grant());
        let kept_for = common.limits.kept_for;
        let stream = Stream::new(number, call, Arc::downgrade(book), kept_for, ring);
        book.enter(number, name, stream.clone(), key)
            .then_some(stream)
    }

    pub(super) fn stream(&self, name: StreamName) -> Option<Stream> {
        self.0.book.get(name)
    }

    /// Ends all its streams. None can be opened from here on.
    pub(super) fn close(&self) {
        self.0.book.close();
    }

    /// When it was last used, if it has no stream.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        self.0.book.idle_since()
    }

    pub(super) fn is_under_way(&self) -> bool {
        self.0.book.all().iter().any(Stream::is_under_way)
    }

    pub(super) fn streams(&self) -> usize {
        self.0.book.len()
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Who knows the id of a session can use it.
        f.debug_struct("Session")
            .field("primes", &self.primes())
            .field("streams", &self.streams())
            .finish_non_exhaustive()
    }
}

// === impl Common ===

impl Common {
    pub(super) fn new(server: &str, limits: Limits) -> Self {
        Self {
            origin: Origin::of(server),
            limits,
            next_stream: AtomicU64::new(0),
        }
    }
}
