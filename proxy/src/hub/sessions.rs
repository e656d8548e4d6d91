//! All sessions, and what is asked of them from outside.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use axum::body::Body;
use http::{Response, StatusCode};
use mcp_cancel_on_disconnect::{Confirmation, Orphan};
use tokio::time::Instant;

use super::{
    book::Over,
    budget::{Budget, Limits},
    session::{Common, SESSION_OVERHEAD, Session},
    stream::Stream,
};
use crate::{
    head::FIRST_PRIMED,
    lock::lock,
    message::IdKey,
    refusal::{self, SERVER_ERROR},
};

/// How long a call is put off while its server is asked who came back: 1 s. Then it is looked at again.
const UNTIL_ASKED_AGAIN: Duration = Duration::from_secs(1);

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
pub(super) enum Lookup {
    /// The event of that number, if the stream ever had one.
    Stream(Stream, u64),
    Unknown,
}

#[derive(Debug)]
struct Shared {
    common: Arc<Common>,
    budget: Arc<Budget>,
    sessions: Mutex<HashMap<Arc<str>, Session>>,
    over: Arc<Over<Stream>>,
    resumes: AtomicU64,
}

// === impl Hub ===

impl Hub {
    /// A hub without a session.
    pub fn new(limits: Limits) -> Self {
        Self::in_front_of("", limits)
    }

    /// The same, for a server of this name. An event id of another hub in front of that server, such as one before a
    /// restart, is [unknown](Self::resume), and is not taken for an id of the server.
    pub fn in_front_of(server: &str, limits: Limits) -> Self {
        Self(Arc::new(Shared {
            common: Arc::new(Common::new(server, limits)),
            budget: Budget::new(limits.bytes),
            sessions: Mutex::default(),
            over: Arc::new(Over::new()),
            resumes: AtomicU64::new(0),
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

    /// Forgets a session that has no stream.
    pub(super) fn forget_unused(&self, id: &str) {
        let mut sessions = self.0.sessions();
        let is_unused = |session: &Session| session.idle_since().is_some();
        if sessions.get(id).is_some_and(is_unused) {
            sessions.remove(id);
        }
    }

    /// The response to a client that resumes for what is after an event. `None` if the id is not one of this hub's,
    /// and the server may know it.
    pub fn resume(&self, session: &str, last_event_id: &str) -> Option<Response<Body>> {
        let is_ours = self.owns(last_event_id);
        is_ours.then(|| match self.look_up(session, last_event_id) {
            Lookup::Stream(stream, seq) => self.respond_after(&stream, seq),
            Lookup::Unknown => unknown_event(),
        })
    }

    /// Whether there is an event after this one.
    pub(crate) fn has_more(&self, session: &str, last_event_id: &str) -> bool {
        match self.look_up(session, last_event_id) {
            Lookup::Stream(stream, seq) => stream.has_more(seq),
            Lookup::Unknown => false,
        }
    }

    /// Whether the answer of any call is still to come, or to be read by a client that is there.
    pub fn is_under_way(&self) -> bool {
        self.all().iter().any(Session::is_under_way)
    }

    /// Whether an orphan may be cancelled, for the layer's
    /// [`confirm`](mcp_cancel_on_disconnect::CancelOnDisconnectLayer::confirm): not while the server is asked whether the client
    /// that came back may have its stream.
    pub fn judge(&self, orphan: &Orphan<'_>) -> Confirmation {
        let call = orphan.call();
        let stream = call.session().and_then(|id| {
            let session = self.session(id)?;
            session.find(&IdKey::of_call(call.request_id()))
        });
        if stream.is_some_and(|stream| stream.is_in_question()) {
            Confirmation::Postpone(UNTIL_ASKED_AGAIN)
        } else {
            Confirmation::Cancel
        }
    }

    /// How much there is.
    pub fn stats(&self) -> Stats {
        let sessions = self.all();
        Stats {
            sessions: sessions.len(),
            streams: sessions.iter().map(Session::streams).sum(),
            buffer_bytes: self.0.budget.used(),
            resumes: self.0.resumes.load(Ordering::Relaxed),
            gaps: self.0.over.gaps(),
        }
    }

    fn all(&self) -> Vec<Session> {
        self.0.sessions().values().cloned().collect()
    }

    /// Returns `true` if an event id is of this hub, or of another one in front of the same server.
    pub(super) fn owns(&self, event_id: &str) -> bool {
        self.0.common.origin.read(event_id).is_some()
    }

    pub(super) fn look_up(&self, session: &str, event_id: &str) -> Lookup {
        let id = self.0.common.origin.read(event_id).flatten();
        let found = id.and_then(|(name, seq)| {
            let stream = self.session(session)?.stream(name)?;
            Some(Lookup::Stream(stream, seq))
        });
        found.unwrap_or(Lookup::Unknown)
    }

    pub(super) fn respond_after(&self, stream: &Stream, seq: u64) -> Response<Body> {
        let Some(response) = stream.respond_after(seq) else {
            return unknown_event();
        };
        self.0.resumes.fetch_add(1, Ordering::Relaxed);
        response
    }
}

/// Says that an event id is not of this session, or no longer.
pub(super) fn unknown_event() -> Response<Body> {
    let text = "Last-Event-ID names no event that this session has, or still has";
    refusal::error(StatusCode::BAD_REQUEST, None, SERVER_ERROR, text)
}

// === impl Shared ===

impl Shared {
    fn enter(&self, id: &str) -> Option<Session> {
        let mut sessions = self.sessions();
        if let Some(session) = sessions.get(id) {
            return Some(session.clone());
        }
        let most = self.common.limits.sessions;
        if sessions.len() >= most {
            thin(&mut sessions);
        }
        if sessions.len() >= most {
            return None;
        }
        let mut room = self.budget.grant();
        room.grow(SESSION_OVERHEAD + 2 * id.len()).ok()?;
        let id: Arc<str> = id.into();
        let budget = self.budget.part(self.common.limits.session_bytes);
        let session = Session::new(id.clone(), budget, &self.over, self.common.clone(), room);
        sessions.insert(id, session.clone());
        Some(session)
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
