//! The beginning of a session: its id, its streams, its process, and the task that owns them.

use std::{
    fmt::Write as _,
    io,
    sync::{Arc, Weak, atomic::Ordering},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Response, StatusCode, request};
use rustix::io::Errno;
use tokio::{
    sync::OwnedSemaphorePermit,
    time::{Instant, sleep},
};

use super::{
    input::Waiting,
    process::{Group, Pipes},
    said::Name,
    service::{Inner, Stdio, not_sent, request_in},
    session::{NotSent, Session, Why, key},
    task::PATIENCE,
};
use crate::{
    headers::SESSION_ID,
    lock::lock,
    message::Message,
    refusal::{self, BUSY, SERVER_ERROR},
};

/// How long a late client still gets what a session has sent, after its end: 60 s.
const KEPT_FOR: Duration = Duration::from_secs(60);

/// Time for which no second line says that sessions are refused: 10 s.
const REFUSED_AGAIN: Duration = Duration::from_secs(10);

/// How long a session may be unused that may be so for ever.
const FOR_EVER: Duration = Duration::from_secs(u32::MAX as u64);

/// A session that runs. Dropped, however its task ended, nothing of it is left open.
struct Running {
    stdio: Weak<Inner>,
    id: Arc<str>,
    session: Arc<Session>,
    _place: OwnedSemaphorePermit,
}

// === impl Stdio ===

impl Stdio {
    /// Begins a session with the request `initialize`.
    pub(super) fn begin(
        &self,
        message: &Message<'_>,
        parts: &request::Parts,
        line: Bytes,
    ) -> Result<Response<Body>, Box<Response<Body>>> {
        let inner = &self.0;
        let id = message.id;
        // Before anything is started for it.
        if id.and_then(key).is_none() {
            return Err(Box::new(not_sent(None, NotSent::BadId)));
        }
        let wait = inner.crashes().wait(Instant::now());
        if let Some(wait) = wait {
            let text =
                "the MCP server failed to start several times, and is not started for a while";
            return Err(Box::new(refusal::busy(id, text, wait)));
        }
        let no_room = |text: &str| Box::new(refusal::busy(id, text, BUSY));
        let place = inner.places.clone().try_acquire_owned();
        let place = place.map_err(|_| {
            inner.refused();
            no_room("there are as many sessions as there may be")
        })?;
        let failed = |text: &str| {
            Box::new(refusal::error(
                StatusCode::BAD_GATEWAY,
                id,
                SERVER_ERROR,
                text,
            ))
        };
        let session_id =
            new_id().map_err(|_| failed("there are no random numbers for a session id"))?;
        let requested_revision = message.params().protocol_version;
        let streams = inner.store.begin(
            &session_id,
            Some(requested_revision.as_deref().unwrap_or_default()),
        );
        let streams = streams.ok_or_else(|| no_room("there is no room for another session"))?;
        let begun = || -> Result<_, Box<Response<Body>>> {
            let standalone = streams.open_standalone();
            let standalone =
                standalone.ok_or_else(|| no_room("there is no room for another session"))?;
            let (group, pipes) = Group::spawn(&inner.options.program).map_err(|error| {
                if is_want(&error) {
                    tracing::error!("no process can be started now: {error}");
                    return no_room("the proxy cannot start another process now");
                }
                inner.crashes().add(Instant::now());
                tracing::error!("cannot start `{}`: {error}", inner.options.program);
                failed(&format!("the MCP server cannot be started: {error}"))
            })?;
            let timeout = inner.options.session_timeout.unwrap_or(FOR_EVER);
            let kill_after = inner.options.kill_after;
            let name = Name::of(&session_id);
            let (session, waiting) =
                Session::new(name, streams.clone(), standalone, kill_after, timeout);
            session.prime(&session.standalone);
            let response = request_in(&session, message, parts, line)
                .map_err(|why| Box::new(not_sent(id, why)))?;
            Ok((Arc::new(session), (group, pipes, waiting), response))
        };
        let (session, process, mut response) =
            begun().inspect_err(|_| inner.store.close(&session_id))?;
        inner.children.fetch_add(1, Ordering::Relaxed);
        let running = Running {
            stdio: Arc::downgrade(inner),
            id: session_id.clone(),
            session: session.clone(),
            _place: place,
        };
        {
            let mut live = inner.live();
            if live.shuts_down {
                drop(live);
                inner.store.close(&session_id);
                let text = Why::Shutdown(PATIENCE).in_words();
                return Err(Box::new(refusal::busy(id, text, BUSY)));
            }
            live.sessions.insert(session_id.clone(), session);
        }
        tokio::spawn(running.run(process));
        if let Ok(value) = HeaderValue::from_str(&session_id) {
            response.headers_mut().insert(SESSION_ID, value);
        }
        Ok(response)
    }
}

// === impl Inner ===

impl Inner {
    /// A session was refused for want of a place. It is logged every 10 s at most.
    fn refused(&self) {
        let now = Instant::now();
        let mut last = lock(&self.refused);
        if last.is_some_and(|last| now < last + REFUSED_AGAIN) {
            return;
        }
        *last = Some(now);
        drop(last);
        let max_sessions = self.options.max_sessions;
        tracing::warn!(
            max_sessions,
            "a client got 503: there are as many sessions as --max-sessions allows"
        );
    }
}

// === impl Running ===

impl Running {
    async fn run(self, (group, pipes, waiting): (Group, Pipes, Waiting)) {
        let end = self.session.run(group, pipes, waiting).await;
        let store = self.stdio.upgrade().map(|stdio| {
            stdio.ended(&end);
            stdio.store.clone()
        });
        let (id, why) = (self.id.clone(), end.why);
        drop(self);
        // What was sent before is kept for a client that comes late, but not longer than its streams.
        if let Some(store) = store.filter(|_| why != Why::Deleted) {
            sleep(KEPT_FOR).await;
            store.close(&id);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.session.finish(Why::Exited, Why::Exited.in_words());
        if let Some(stdio) = self.stdio.upgrade() {
            stdio.live().sessions.remove(&self.id);
            stdio.children.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Returns `true` if the system has no descriptor, process or memory left. That is no crash of the server.
fn is_want(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| {
        [Errno::MFILE, Errno::NFILE, Errno::AGAIN, Errno::NOMEM].contains(&errno)
    })
}

/// An id of 128 random bits.
fn new_id() -> Result<Arc<str>, getrandom::Error> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)?;
    let mut id = String::with_capacity(32);
    for byte in bits {
        // Writing to a string does not fail.
        let _written = write!(id, "{byte:02x}");
    }
    Ok(id.into())
}
