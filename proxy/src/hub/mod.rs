//! Streams that outlive their clients: resumability for servers that have none.
//!
//! A server without an event store loses what it sends to a client that is away. Here a writer, mostly a task that reads
//! the server's own stream, puts events into a [`Stream`], and the client's response reads it from there. A client
//! that comes back names the last event that it has, and reads on after it.
//!
//! 1. **Bounded.** A stream keeps 256 events and 1 MiB, a session 4 MiB, all together [`Limits::bytes`]. What is counted
//!    includes what it costs to keep it. Where no room is left for a stream, there is none: its call passes without event
//!    ids, and is then one that cannot be resumed.
//! 2. **What may be dropped** are progress and log lines, the oldest first; a comment in the stream says so. Answers,
//!    errors and requests of the server are kept: their writer waits for the client to read, and where there is none the
//!    call ends with an error.
//! 3. **How long.** A stream is kept for 60 s after its end. One whose client has all of it makes room for others
//!    before that.
//! 4. **Whose.** A stream is found by an event id in its own session only. Where a server judges who may use a session,
//!    [`Resumable`] has it judge who comes back as well.
//! 5. **One reader.** Who resumes a stream takes it over. The response that read it before ends.
//!
//! The parts: [`Stream`] has a `ring` of events, which is where it is decided what stays; a [`Session`] has streams, and
//! the [`Hub`] sessions.

mod budget;
mod call;
mod event;
mod read;
mod resumable;
mod ring;
mod session;
mod stream;
mod upstream;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use http::{Response, StatusCode};
use tokio::{task::AbortHandle, time::Instant};

use self::{
    budget::Budget,
    event::Nonce,
    session::{SESSION_OVERHEAD, WeakSession},
    stream::Closed,
};
pub use self::{
    call::Call,
    event::{Event, Weight},
    resumable::{MIN_COMMIT_AFTER, Resumable},
    session::Session,
    stream::{LET_GO_AFTER, Refused, Stream},
};
use crate::{
    head::FIRST_PRIMED,
    refusal::{self, SERVER_ERROR},
};

/// How many sessions are known: 4,096. Past that, of those without a stream the half that was not used for longest is forgotten:
/// their streams are no longer primed.
const MAX_SESSIONS: usize = 4 * 1024;

/// How much a hub keeps, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How many events a stream keeps: 256.
    pub events: usize,
    /// How many bytes a stream keeps before it takes no more: 1 MiB. Its last event may go beyond.
    pub stream_bytes: usize,
    /// How many bytes the streams of a session keep: 4 MiB.
    pub session_bytes: usize,
    /// How many bytes are kept in all: 64 MiB.
    pub bytes: usize,
    /// How long a stream is kept after its end: 60 s.
    pub kept_for: Duration,
}

/// All sessions. It is a handle: clones are the same hub.
#[derive(Debug, Clone)]
pub struct Hub(Arc<Shared>);

/// How much there is, to be shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Sessions that are known.
    pub sessions: usize,
    /// Streams, those that have ended and are kept included.
    pub streams: usize,
    /// Bytes that are kept, with what it costs to keep them.
    pub buffer_bytes: usize,
    /// How often a client came back to a stream.
    pub resumes: u64,
    /// How often a client was told that events are missing, on streams that are gone.
    pub gaps: u64,
}

/// What an event id names.
enum Lookup {
    /// The event of that number, if the stream ever had one.
    Stream(Stream, u64),
    Unknown,
}

#[derive(Debug)]
struct Shared {
    nonce: Nonce,
    limits: Limits,
    budget: Arc<Budget>,
    sessions: Mutex<HashMap<Arc<str>, Session>>,
    over: Mutex<Over>,
    next_stream: AtomicU64,
    resumes: AtomicU64,
    gaps: AtomicU64,
}

/// Streams that have ended, by the time when they are forgotten.
#[derive(Debug, Default)]
struct Over {
    ended: BTreeMap<(Instant, u64), WeakSession>,
    /// Those of them whose client has all of them.
    spare: BTreeSet<(Instant, u64)>,
    /// The task that forgets them, while there are any.
    sweeper: Option<AbortHandle>,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            events: 256,
            stream_bytes: 1024 * 1024,
            session_bytes: 4 * 1024 * 1024,
            bytes: 64 * 1024 * 1024,
            kept_for: Duration::from_secs(60),
        }
    }
}

// === impl Hub ===

impl Hub {
    /// A hub without a session.
    pub fn new(limits: Limits) -> Self {
        Self(Arc::new(Shared {
            nonce: Nonce::new(),
            limits,
            budget: Budget::new(limits.bytes),
            sessions: Mutex::default(),
            over: Mutex::default(),
            next_stream: AtomicU64::new(0),
            resumes: AtomicU64::new(0),
            gaps: AtomicU64::new(0),
        }))
    }

    /// The session with this id, which is made known if it is not. `asked_for` is the revision that its client's own
    /// `initialize` asked for, if that is what begins it. `None` if there is no room for another session.
    pub fn begin(&self, session: &str, asked_for: Option<&str>) -> Option<Session> {
        let session = self.0.enter(session)?;
        if let Some(revision) = asked_for {
            session.set_primes(revision >= FIRST_PRIMED);
        }
        Some(session)
    }

    /// The session with this id, if it is known.
    pub fn session(&self, id: &str) -> Option<Session> {
        self.0.sessions().get(id).cloned()
    }

    /// Ends all streams of a session, and forgets it.
    pub fn close(&self, session: &str) {
        let session = self.0.sessions().remove(session);
        if let Some(session) = session {
            session.close();
        }
    }

    /// The response to a client that comes back for what is after an event. `None` if the id is not one of this hub's,
    /// and the server may know it.
    pub fn resume(&self, session: &str, last_event_id: &str) -> Option<Response<Body>> {
        let is_ours = self.owns(last_event_id);
        is_ours.then(|| match self.look_up(session, last_event_id) {
            Lookup::Stream(stream, seq) => self.respond_after(&stream, seq),
            Lookup::Unknown => unknown_event(),
        })
    }

    /// How much there is.
    pub fn stats(&self) -> Stats {
        let sessions: Vec<Session> = self.0.sessions().values().cloned().collect();
        Stats {
            sessions: sessions.len(),
            streams: sessions.iter().map(Session::streams).sum(),
            buffer_bytes: self.0.budget.used(),
            resumes: self.0.resumes.load(Ordering::Relaxed),
            gaps: self.0.gaps.load(Ordering::Relaxed),
        }
    }

    /// Whether an event id is one of this hub's, or looks like one.
    fn owns(&self, event_id: &str) -> bool {
        self.0.nonce.read(event_id).is_some()
    }

    fn look_up(&self, session: &str, event_id: &str) -> Lookup {
        let id = self.0.nonce.read(event_id);
        let found = id.and_then(|id| {
            let stream = self.session(session)?.stream(id.stream)?;
            Some(Lookup::Stream(stream, id.seq?))
        });
        found.unwrap_or(Lookup::Unknown)
    }

    fn respond_after(&self, stream: &Stream, seq: u64) -> Response<Body> {
        let Some(response) = stream.respond_after(seq) else {
            return unknown_event();
        };
        self.0.resumes.fetch_add(1, Ordering::Relaxed);
        response
    }
}

/// Says that an event id is not of this session, or no longer.
fn unknown_event() -> Response<Body> {
    let text = "Last-Event-ID names no event that this session has, or still has";
    refusal::error(StatusCode::BAD_REQUEST, None, SERVER_ERROR, text)
}

// === impl Shared ===

impl Shared {
    fn enter(self: &Arc<Self>, id: &str) -> Option<Session> {
        let mut sessions = self.sessions();
        if let Some(session) = sessions.get(id) {
            return Some(session.clone());
        }
        if sessions.len() >= MAX_SESSIONS {
            thin(&mut sessions);
        }
        if sessions.len() >= MAX_SESSIONS {
            return None;
        }
        let mut room = self.budget.grant();
        room.grow(SESSION_OVERHEAD + 2 * id.len()).ok()?;
        let id: Arc<str> = id.into();
        let budget = self.budget.part(self.limits.session_bytes);
        let session = Session::new(id.clone(), budget, Arc::downgrade(self), room);
        sessions.insert(id, session.clone());
        Some(session)
    }

    fn next_stream(&self) -> u64 {
        self.next_stream.fetch_add(1, Ordering::Relaxed)
    }

    /// A stream has ended.
    fn ended(self: &Arc<Self>, until: Instant, number: u64, session: WeakSession) {
        let mut over = self.over();
        over.ended.insert((until, number), session);
        if over.sweeper.is_none()
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let sweeper = runtime.spawn(sweep(Arc::downgrade(self), until));
            over.sweeper = Some(sweeper.abort_handle());
        }
    }

    /// The client of a stream that has ended has all of it.
    fn spare(&self, until: Instant, number: u64) {
        let mut over = self.over();
        if over.ended.contains_key(&(until, number)) {
            over.spare.insert((until, number));
        }
    }

    /// A stream was closed.
    fn closed(&self, closed: Closed, number: u64) {
        self.gaps.fetch_add(closed.gaps, Ordering::Relaxed);
        if let Some(until) = closed.until {
            let mut over = self.over();
            over.ended.remove(&(until, number));
            over.spare.remove(&(until, number));
        }
    }

    /// Forgets the oldest stream of all whose client has all of it. `false` if there is none.
    fn make_room(&self) -> bool {
        loop {
            let (session, number) = {
                let mut over = self.over();
                let Some(key) = over.spare.pop_first() else {
                    return false;
                };
                (over.ended.remove(&key), key.1)
            };
            let session = session.and_then(|session| session.upgrade());
            if session.is_some_and(|session| session.remove(number)) {
                return true;
            }
        }
    }

    /// Forgets the streams whose time is over. Returns when that of the next is, if there is one.
    fn sweep(&self) -> Option<Instant> {
        loop {
            let (session, number) = {
                let mut over = self.over();
                let Some(first) = over.ended.first_entry() else {
                    over.sweeper = None;
                    return None;
                };
                let (until, number) = *first.key();
                if until > Instant::now() {
                    return Some(until);
                }
                let session = first.remove();
                over.spare.remove(&(until, number));
                (session, number)
            };
            if let Some(session) = session.upgrade() {
                session.remove(number);
            }
        }
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<Arc<str>, Session>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn over(&self) -> MutexGuard<'_, Over> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let sweeper = self.over().sweeper.take();
        if let Some(sweeper) = sweeper {
            sweeper.abort();
        }
        let sessions = std::mem::take(&mut *self.sessions());
        for session in sessions.values() {
            session.close();
        }
    }
}

async fn sweep(hub: Weak<Shared>, mut next: Instant) {
    loop {
        tokio::time::sleep_until(next).await;
        let Some(until) = hub.upgrade().and_then(|hub| hub.sweep()) else {
            return;
        };
        next = until;
    }
}

/// Forgets the half of the sessions without streams that was not used for longest.
fn thin(sessions: &mut HashMap<Arc<str>, Session>) {
    let mut idle: Vec<Instant> = sessions.values().filter_map(Session::idle_since).collect();
    if idle.is_empty() {
        return;
    }
    let middle = idle.len() / 2;
    let (_, since, _) = idle.select_nth_unstable(middle);
    let since = *since;
    sessions.retain(|_, session| session.idle_since().is_none_or(|used| used > since));
}
