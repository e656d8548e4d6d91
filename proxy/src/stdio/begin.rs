//! Starts a session: creates its id and its streams, and starts its process and its task.

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
    input::InputWriter,
    process::{Group, Pipes},
    service::{Inner, Stdio, send_error_response, send_request},
    session::{EndReason, SendError, Session, Timeouts, key},
    stderr_log::SessionLogId,
    stop::STOP_TIMEOUT,
};
use crate::{
    headers::SESSION_ID,
    lock::lock,
    message::Message,
    refusal::{self, RETRY_AFTER, SERVER_ERROR},
};

/// How long a session's streams are retained after the session has ended.
///
/// During this time, a client can still resume them. A deleted session's streams are not retained.
const RETENTION: Duration = Duration::from_secs(60);

/// Minimum time between two log lines about refused sessions.
const REFUSAL_LOG_INTERVAL: Duration = Duration::from_secs(10);

/// The session timeout used if there is no limit: about 136 years.
const UNLIMITED: Duration = Duration::from_secs(u32::MAX as u64);

/// A running session. Dropping this ends the session, no matter how its task ended.
struct RunningSession {
    stdio: Weak<Inner>,
    id: Arc<str>,
    session: Arc<Session>,
    _permit: OwnedSemaphorePermit,
}

// === impl Stdio ===

impl Stdio {
    /// Starts a session with an `initialize` request.
    ///
    /// If the session limit has been reached, another session may be evicted to make room.
    ///
    /// # Errors
    ///
    /// Returns an error response if the request's id is invalid, if there is no room, or if the process can't be started.
    /// During the backoff and the shutdown, every request is refused this way.
    pub(super) async fn begin(
        &self,
        message: &Message<'_>,
        parts: &request::Parts,
        line: Bytes,
    ) -> Result<Response<Body>, Box<Response<Body>>> {
        let inner = &self.0;
        let id = message.id;
        // Check this before starting anything for the session.
        if id.and_then(key).is_none() {
            return Err(Box::new(send_error_response(None, SendError::BadId)));
        }
        let backoff = inner.restart_backoff().delay(Instant::now());
        if let Some(backoff) = backoff {
            let text = "the MCP server crashed several times at startup, so new sessions are refused for now";
            return Err(Box::new(refusal::busy(id, text, backoff)));
        }
        let no_room = |text: &str| Box::new(refusal::busy(id, text, RETRY_AFTER));
        let permit = inner.acquire_permit().await.ok_or_else(|| {
            inner.log_refused();
            no_room("the proxy's session limit has been reached")
        })?;
        let start_failed = |text: &str| {
            Box::new(refusal::error(
                StatusCode::BAD_GATEWAY,
                id,
                SERVER_ERROR,
                text,
            ))
        };
        let session_id = new_id()
            .map_err(|_| start_failed("the system could not generate a random session id"))?;
        let requested_revision = message.params().protocol_version;
        let streams = inner.store.begin(
            &session_id,
            Some(requested_revision.as_deref().unwrap_or_default()),
        );
        let streams = streams.ok_or_else(|| no_room("there is no room for another session"))?;
        let start = || -> Result<_, Box<Response<Body>>> {
            let standalone = streams.open_standalone();
            let standalone =
                standalone.ok_or_else(|| no_room("there is no room for another session"))?;
            let (group, pipes) = Group::spawn(&inner.options.program).map_err(|error| {
                if is_resource_exhausted(&error) {
                    tracing::error!("cannot start a session process because the system is out of resources: {error}");
                    return no_room("the proxy cannot start another process right now");
                }
                inner.restart_backoff().record_crash(Instant::now());
                tracing::error!("cannot start `{}`: {error}", inner.options.program);
                start_failed(&format!("the MCP server cannot be started: {error}"))
            })?;
            let timeouts = Timeouts {
                idle: inner.options.session_timeout.unwrap_or(UNLIMITED),
                lost: inner.options.lost_timeout.unwrap_or(UNLIMITED),
            };
            let kill_after = inner.options.kill_after;
            let log_id = SessionLogId::new(&session_id);
            let (session, input_writer) =
                Session::new(log_id, streams.clone(), standalone, kill_after, timeouts);
            session.prime(&session.standalone);
            let response = send_request(&session, message, parts, line)
                .map_err(|reason| Box::new(send_error_response(id, reason)))?;
            Ok((Arc::new(session), (group, pipes, input_writer), response))
        };
        let (session, process, mut response) =
            start().inspect_err(|_| inner.store.close(&session_id))?;
        inner.children.fetch_add(1, Ordering::Relaxed);
        let running_session = RunningSession {
            stdio: Arc::downgrade(inner),
            id: session_id.clone(),
            session: session.clone(),
            _permit: permit,
        };
        {
            let mut live = inner.live();
            if live.is_shutting_down {
                // Returning drops `running_session`, which ends the session.
                drop(live);
                inner.store.close(&session_id);
                let text = EndReason::Shutdown(STOP_TIMEOUT).text();
                // Returning drops `running_session`, which ends the session.
                return Err(Box::new(refusal::busy(id, text, RETRY_AFTER)));
            }
            live.sessions.insert(session_id.clone(), session);
        }
        tokio::spawn(running_session.run(process));
        if let Ok(value) = HeaderValue::from_str(&session_id) {
            response.headers_mut().insert(SESSION_ID, value);
        }
        Ok(response)
    }
}

// === impl Inner ===

impl Inner {
    /// Logs that the session limit caused a refusal, at most once per [`REFUSAL_LOG_INTERVAL`].
    fn log_refused(&self) {
        let now = Instant::now();
        let mut last = lock(&self.last_refusal_log);
        if last.is_some_and(|last| now < last + REFUSAL_LOG_INTERVAL) {
            return;
        }
        *last = Some(now);
        drop(last);
        let max_sessions = self.options.max_sessions;
        tracing::warn!(
            "session limit reached (--max-sessions {max_sessions}), refused a client with 503"
        );
    }
}

// === impl RunningSession ===

impl RunningSession {
    /// Runs the session until it ends.
    ///
    /// Unless the client has deleted the session, its streams are then retained for [`RETENTION`].
    async fn run(self, (group, pipes, input_writer): (Group, Pipes, InputWriter)) {
        let end = self.session.run(group, pipes, input_writer).await;
        let store = self.stdio.upgrade().map(|stdio| {
            stdio.record_end(&end);
            stdio.store.clone()
        });
        let (id, reason) = (self.id.clone(), end.reason);
        // Release the session's permit before the wait below.
        drop(self);
        // Retain the streams, in case a client resumes late.
        if let Some(store) = store.filter(|_| reason != EndReason::Deleted) {
            sleep(RETENTION).await;
            store.close(&id);
        }
    }
}

impl Drop for RunningSession {
    fn drop(&mut self) {
        self.session
            .finish(EndReason::Exited, EndReason::Exited.text());
        if let Some(stdio) = self.stdio.upgrade() {
            stdio.live().sessions.remove(&self.id);
            stdio.children.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Returns `true` if the system has run out of descriptors, processes or memory.
///
/// This kind of error does not count as a server crash.
fn is_resource_exhausted(error: &io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    errno.is_some_and(|errno| {
        [Errno::MFILE, Errno::NFILE, Errno::AGAIN, Errno::NOMEM].contains(&errno)
    })
}

/// Returns an id with 128 random bits.
fn new_id() -> Result<Arc<str>, getrandom::Error> {
    let mut bits = [0; 16];
    getrandom::fill(&mut bits)?;
    let mut id = String::with_capacity(32);
    for byte in bits {
        // Writing to a `String` never fails.
        let _ = write!(id, "{byte:02x}");
    }
    Ok(id.into())
}
