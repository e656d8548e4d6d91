//! The streams of one session.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
};

use axum::body::Body;
use http::Response;
use tokio::time::Instant;

use super::{
    Call, Shared,
    budget::{Budget, Grant, Short},
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

/// The session of a stream, which does not keep it alive.
#[derive(Debug, Clone)]
pub(super) struct WeakSession(Weak<Inner>);

#[derive(Debug)]
struct Inner {
    id: Arc<str>,
    /// Its client primes: it asked for a revision that has priming events.
    primes: AtomicBool,
    budget: Arc<Budget>,
    hub: Weak<Shared>,
    book: Mutex<Book>,
    /// For what the session itself costs.
    _room: Grant,
}

#[derive(Debug)]
struct Book {
    streams: HashMap<u64, Stream>,
    /// The newest stream of each id.
    calls: HashMap<IdKey, u64>,
    /// Streams that have ended and whose client has all of them.
    spare: BTreeSet<u64>,
    closed: bool,
    used: Instant,
}

// === impl Session ===

impl Session {
    pub(super) fn new(id: Arc<str>, budget: Arc<Budget>, hub: Weak<Shared>, room: Grant) -> Self {
        Self(Arc::new(Inner {
            id,
            primes: AtomicBool::new(false),
            budget,
            hub,
            book: Mutex::new(Book {
                streams: HashMap::new(),
                calls: HashMap::new(),
                spare: BTreeSet::new(),
                closed: false,
                used: Instant::now(),
            }),
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
        let book = self.book();
        book.streams.get(book.calls.get(call)?).cloned()
    }

    fn start(&self, call: Option<Call>) -> Option<Stream> {
        let hub = self.0.hub.upgrade()?;
        let names = call.as_ref().map_or(0, |call| {
            4 * call.id.len() + call.owner.as_ref().map_or(0, |owner| owner.len()) + call.besides
        });
        let mut room = self.0.budget.grant();
        while let Err(short) = room.grow(STREAM_OVERHEAD + names) {
            if !self.make_room(short) {
                return None;
            }
        }
        let most = Most {
            events: hub.limits.events,
            bytes: hub.limits.stream_bytes,
        };
        let number = hub.next_stream();
        let key = call.as_ref().map(|call| call.key.clone());
        let ring = Ring::new(hub.nonce.prefix(number), most, room);
        let stream = Stream::new(number, call, self.downgrade(), hub.limits.kept_for, ring);
        let mut book = self.book();
        if book.closed {
            return None;
        }
        book.used = Instant::now();
        book.streams.insert(number, stream.clone());
        if let Some(key) = key {
            book.calls.insert(key, number);
        }
        Some(stream)
    }

    pub(super) fn stream(&self, number: u64) -> Option<Stream> {
        let mut book = self.book();
        book.used = Instant::now();
        book.streams.get(&number).cloned()
    }

    /// Forgets a stream. `false` if it is not there.
    pub(super) fn remove(&self, number: u64) -> bool {
        let Some(stream) = self.book().take(number) else {
            return false;
        };
        let closed = stream.close();
        if let Some(hub) = self.0.hub.upgrade() {
            hub.closed(closed, number);
        }
        true
    }

    /// Ends all its streams. None can be opened from here on.
    pub(super) fn close(&self) {
        let streams = {
            let mut book = self.book();
            book.closed = true;
            book.calls.clear();
            book.spare.clear();
            std::mem::take(&mut book.streams)
        };
        let hub = self.0.hub.upgrade();
        for (number, stream) in streams {
            let closed = stream.close();
            if let Some(hub) = &hub {
                hub.closed(closed, number);
            }
        }
    }

    /// When it was last used, if it has no stream.
    pub(super) fn idle_since(&self) -> Option<Instant> {
        let book = self.book();
        book.streams.is_empty().then_some(book.used)
    }

    pub(super) fn streams(&self) -> usize {
        self.book().streams.len()
    }

    pub(super) fn downgrade(&self) -> WeakSession {
        WeakSession(Arc::downgrade(&self.0))
    }

    /// Forgets the oldest stream whose client has all of it. `false` if there is none.
    pub(super) fn make_room(&self, short: Short) -> bool {
        match short {
            Short::Session => loop {
                let Some(number) = self.book().spare.pop_first() else {
                    return false;
                };
                if self.remove(number) {
                    return true;
                }
            },
            Short::All => self.0.hub.upgrade().is_some_and(|hub| hub.make_room()),
        }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
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

// === impl WeakSession ===

impl WeakSession {
    pub(super) fn upgrade(&self) -> Option<Session> {
        self.0.upgrade().map(Session)
    }

    pub(super) fn make_room(&self, short: Short) -> bool {
        self.upgrade()
            .is_some_and(|session| session.make_room(short))
    }

    pub(super) fn grant(&self) -> Option<Grant> {
        self.upgrade().map(|session| session.0.budget.grant())
    }

    /// A stream has ended.
    pub(super) fn ended(&self, until: Instant, number: u64) {
        let Some(session) = self.upgrade() else {
            return;
        };
        session.book().used = Instant::now();
        if let Some(hub) = session.0.hub.upgrade() {
            hub.ended(until, number, self.clone());
        }
    }

    /// The client of a stream that has ended has all of it.
    pub(super) fn spare(&self, until: Instant, number: u64) {
        let Some(session) = self.upgrade() else {
            return;
        };
        session.book().set_spare(number);
        if let Some(hub) = session.0.hub.upgrade() {
            hub.spare(until, number);
        }
    }
}

// === impl Book ===

impl Book {
    fn set_spare(&mut self, number: u64) {
        if self.streams.contains_key(&number) {
            self.spare.insert(number);
        }
    }

    fn take(&mut self, number: u64) -> Option<Stream> {
        let stream = self.streams.remove(&number)?;
        self.spare.remove(&number);
        if let Some(key) = stream.call()
            && self.calls.get(key) == Some(&number)
        {
            self.calls.remove(key);
        }
        Some(stream)
    }
}
