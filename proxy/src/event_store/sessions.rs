//! The event store, which holds all of a server's sessions.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use http::{Response, StatusCode};
use mcp_cancel_on_disconnect::{Confirmation, Orphan};
use tokio::time::Instant;

use super::{
    budget::{Budget, Limits},
    session::{SESSION_OVERHEAD, Session, SharedState},
    stream::Stream,
    stream_index::{AllSessions, EndedStreams, StreamIndex},
};
use crate::{
    headers::FIRST_REVISION_WITH_PRIMING,
    lock::lock,
    message::IdKey,
    refusal::{self, SERVER_ERROR},
};

/// How long to postpone a cancellation before checking again.
///
/// A cancellation has to wait while a client is reading the stream, or while the server is checking a client that wants to resume.
const RECHECK_DELAY: Duration = Duration::from_secs(1);

/// How much later than the layer the event store may notice a disconnect.
const DETECTION_TOLERANCE: Duration = Duration::from_millis(100);

/// How long to wait before rescanning all sessions after a scan that freed nothing.
///
/// Without this, a full event store would scan the sessions for every event.
const RESCAN_INTERVAL: Duration = Duration::from_secs(1);

/// An event store, which holds all of a server's sessions. Clones share it.
#[derive(Debug, Clone)]
pub struct EventStore(Arc<Shared>);

/// An event store's current statistics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Number of known sessions.
    pub sessions: usize,
    /// Number of streams, including ended ones still retained.
    pub streams: usize,
    /// Number of bytes in use, overhead included.
    pub buffer_bytes: usize,
    /// How many times a client has resumed a stream.
    pub resumes: u64,
    /// How many times a client has been notified of missing events.
    ///
    /// A stream's gaps are only counted once the stream has been removed.
    pub gaps: u64,
}

/// The result of looking up an event id.
pub(super) enum Lookup {
    /// The id's stream and the event's number. The event might not exist.
    Stream(Stream, u64),
    Unknown,
}

/// The state shared by all clones of an event store.
#[derive(Debug)]
struct Shared {
    shared: Arc<SharedState>,
    budget: Arc<Budget>,
    sessions: Mutex<HashMap<Arc<str>, Session>>,
    ended_streams: Arc<EndedStreams<Stream>>,
    /// When the last scan of the sessions freed nothing, or `None` if it freed something.
    full_since: Mutex<Option<Instant>>,
    resumes: AtomicU64,
}

// === impl EventStore ===

impl EventStore {
    /// Creates an empty event store.
    pub fn new(limits: Limits) -> Self {
        Self::for_server("", limits)
    }

    /// Creates an event store for the server with this name.
    ///
    /// The store recognises event ids issued by an earlier store for the same server, for example before a restart. If a client
    /// [resumes](Self::resume) with one of these ids, it gets an error, and the id is never sent to the server.
    pub fn for_server(server: &str, limits: Limits) -> Self {
        Self(Arc::new_cyclic(|this: &Weak<Shared>| Shared {
            shared: Arc::new(SharedState::new(server, limits)),
            budget: Budget::new(limits.bytes),
            sessions: Mutex::default(),
            ended_streams: Arc::new(EndedStreams::new(this.clone())),
            full_since: Mutex::default(),
            resumes: AtomicU64::new(0),
        }))
    }

    /// Returns the session with this id, creating it if it does not exist yet.
    ///
    /// If the session starts with an `initialize`, `requested_revision` is the revision in that request, which shows whether
    /// the client supports priming events. If there is no room, idle sessions are removed first. Returns `None` if there is
    /// still no room after that.
    pub fn begin(&self, session: &str, requested_revision: Option<&str>) -> Option<Session> {
        let session = self.0.insert(session)?;
        if let Some(revision) = requested_revision {
            session.set_primes(revision >= FIRST_REVISION_WITH_PRIMING);
        }
        Some(session)
    }

    /// Returns the session with this id, if it is known.
    pub fn session(&self, id: &str) -> Option<Session> {
        self.0.sessions().get(id).cloned()
    }

    /// Ends all of a session's streams and removes the session.
    pub fn close(&self, session: &str) {
        let session = self.0.sessions().remove(session);
        if let Some(session) = session {
            session.close();
        }
    }

    /// Removes a session unless it has a stream or another request is using it.
    pub(super) fn remove_unused(&self, id: &str) {
        let mut sessions = self.0.sessions();
        let is_unused = |session: &Session| session.idle_since().is_some();
        if sessions.get(id).is_some_and(is_unused) {
            sessions.remove(id);
        }
    }

    /// Returns the response to a client resuming after an event.
    ///
    /// The response is an error if the event is unknown or no longer stored. Returns `None` if the id was not issued by any
    /// event store for this server, in which case it may be one of the server's own ids.
    pub fn resume(&self, session: &str, last_event_id: &str) -> Option<Response<Body>> {
        let is_known = self.owns(last_event_id);
        is_known.then(|| match self.look_up(session, last_event_id) {
            Lookup::Stream(stream, seq) => self.respond_after(&stream, seq),
            Lookup::Unknown => unknown_event(),
        })
    }

    /// Returns `true` if the id's stream is known and has a later event.
    pub(crate) fn has_more(&self, session: &str, last_event_id: &str) -> bool {
        match self.look_up(session, last_event_id) {
            Lookup::Stream(stream, seq) => stream.has_more(seq),
            Lookup::Unknown => false,
        }
    }

    /// Returns `true` if a shutdown should wait for a client.
    ///
    /// It should wait while an answer is pending or being read. It should also wait for as long as the answer's client may
    /// still resume within the reconnect delay.
    pub fn is_in_progress(&self) -> bool {
        let mut indexes = self.0.indexes().into_iter();
        indexes.any(|index| index.streams().iter().any(Stream::is_in_progress))
    }

    /// Decides for the layer whether an orphan may be cancelled.
    ///
    /// Pass this to [`confirm`](mcp_cancel_on_disconnect::CancelOnDisconnectLayer::confirm). The layer itself does not notice a
    /// client that resumes at a different path of the server, but the event store does. It postpones the cancellation while a
    /// client is reading the call's stream, and for the grace period after that. It also postpones it while the server is
    /// checking whether a client may resume the stream. A call without a stream may be cancelled immediately.
    pub fn confirm(&self, orphan: &Orphan<'_>) -> Confirmation {
        let call = orphan.call();
        let stream = call.session().and_then(|id| {
            let session = self.session(id)?;
            session.find(&IdKey::of_call(call.request_id()))
        });
        let Some(stream) = stream else {
            return Confirmation::Cancel;
        };
        let unread_since = stream
            .unread_since()
            .filter(|_| !stream.has_pending_check());
        let Some(unread_since) = unread_since else {
            return Confirmation::Postpone(RECHECK_DELAY);
        };
        let unread_for = unread_since.map_or(Duration::MAX, |since| since.elapsed());
        match orphan.grace().saturating_sub(unread_for) {
            rest if rest > DETECTION_TOLERANCE => Confirmation::Postpone(rest),
            _ => Confirmation::Cancel,
        }
    }

    /// Returns the current statistics.
    pub fn stats(&self) -> Stats {
        let indexes = self.0.indexes();
        Stats {
            sessions: indexes.len(),
            streams: indexes.iter().map(|index| index.len()).sum(),
            buffer_bytes: self.0.budget.used(),
            resumes: self.0.resumes.load(Ordering::Relaxed),
            gaps: self.0.ended_streams.gaps(),
        }
    }

    /// Returns `true` if an event id was issued by this or another store for the same server.
    pub(super) fn owns(&self, event_id: &str) -> bool {
        self.0.shared.origin.parse(event_id).is_some()
    }

    /// Looks up an event id in a session. Ids from other sessions are treated as unknown.
    pub(super) fn look_up(&self, session: &str, event_id: &str) -> Lookup {
        let id = self.0.shared.origin.parse(event_id).flatten();
        let lookup = id.and_then(|(name, seq)| {
            let stream = self.session(session)?.stream(name)?;
            Some(Lookup::Stream(stream, seq))
        });
        lookup.unwrap_or(Lookup::Unknown)
    }

    /// Returns a response that continues a stream after an event, and updates the statistics.
    ///
    /// If the event is unknown, returns an error response instead.
    pub(super) fn respond_after(&self, stream: &Stream, seq: u64) -> Response<Body> {
        let Some(response) = stream.respond_after(seq) else {
            return unknown_event();
        };
        self.0.resumes.fetch_add(1, Ordering::Relaxed);
        response
    }
}

/// Returns the error response for an unknown or expired event id.
pub(super) fn unknown_event() -> Response<Body> {
    let text =
        "Last-Event-ID does not match any event in this session, or the event is no longer stored";
    refusal::error(StatusCode::BAD_REQUEST, None, SERVER_ERROR, text)
}

// === impl Shared ===

impl Shared {
    fn insert(&self, id: &str) -> Option<Session> {
        if let Some(session) = self.sessions().get(id) {
            return Some(session.clone());
        }
        let mut reservation = self.budget.reservation();
        while reservation.grow(SESSION_OVERHEAD + 2 * id.len()).is_err() {
            if !self.ended_streams.make_room() {
                return None;
            }
        }
        let mut sessions = self.sessions();
        // Another request may have created the session in the meantime.
        if let Some(session) = sessions.get(id) {
            return Some(session.clone());
        }
        let max_sessions = self.shared.limits.sessions;
        if sessions.len() >= max_sessions {
            remove_idle(&mut sessions);
        }
        if sessions.len() >= max_sessions {
            return None;
        }
        let id: Arc<str> = id.into();
        let budget = self.budget.child(self.shared.limits.session_bytes);
        let session = Session::new(
            id.clone(),
            budget,
            &self.ended_streams,
            self.shared.clone(),
            reservation,
        );
        sessions.insert(id, session.clone());
        Some(session)
    }

    /// Drops the oldest droppable event from each stream that no client is reading.
    ///
    /// Returns `false` if nothing was dropped.
    fn drop_unread(&self) -> bool {
        let indexes = self.indexes().into_iter();
        let streams = indexes.flat_map(|index| index.streams());
        streams.filter(Stream::drop_unread).count() > 0
    }

    /// Returns every session's stream index. Cloning the sessions themselves would mark them as in use.
    fn indexes(&self) -> Vec<Arc<StreamIndex<Stream>>> {
        self.sessions().values().map(Session::index).collect()
    }

    fn sessions(&self) -> MutexGuard<'_, HashMap<Arc<str>, Session>> {
        lock(&self.sessions)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let sessions = std::mem::take(&mut *self.sessions());
        for session in sessions.values() {
            session.close();
        }
    }
}

impl AllSessions for Shared {
    fn make_room(&self) -> bool {
        let mut full_since = lock(&self.full_since);
        if full_since.is_some_and(|since| since.elapsed() < RESCAN_INTERVAL) {
            return false;
        }
        let has_made_room = remove_idle(&mut self.sessions()) || self.drop_unread();
        *full_since = (!has_made_room).then(Instant::now);
        has_made_room
    }
}

/// Removes at least half of the idle sessions, least recently used first.
///
/// Returns `false` if no session is idle.
fn remove_idle(sessions: &mut HashMap<Arc<str>, Session>) -> bool {
    let mut idle: Vec<Instant> = sessions.values().filter_map(Session::idle_since).collect();
    if idle.is_empty() {
        return false;
    }
    let middle = idle.len() / 2;
    let (_, median, _) = idle.select_nth_unstable(middle);
    let cutoff = *median;
    sessions.retain(|_, session| {
        session
            .idle_since()
            .is_none_or(|last_used| last_used > cutoff)
    });
    true
}
