//! The Streamable HTTP service in front of a command's sessions.

use std::{
    collections::HashMap,
    convert::Infallible,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use mcp_cancel_on_disconnect::CallToken;
use tokio::{
    sync::Semaphore,
    time::{Instant, timeout},
};
use tower_service::Service;

use super::{
    Options, Program,
    end_counts::EndCounts,
    restart_backoff::RestartBackoff,
    session::{EndReason, SendError, Session, SessionUse},
    stop::{STOP_TIMEOUT, SessionEnd},
};
use crate::{
    event_store::{Call, EventStore},
    headers::{
        EVENT_STREAM, FIRST_WITHOUT_SESSIONS, JSON, LAST_EVENT_ID, PROTOCOL_VERSION, SESSION_ID,
        accepts, has_content_type, single,
    },
    lock::lock,
    message::{Kind, MAX_BODY, Message, single_line},
    refusal::{self, INVALID_REQUEST, PARSE_ERROR, RETRY_AFTER, SERVER_ERROR, SESSION_NOT_FOUND},
};

/// Maximum number of processes. No system can run this many.
const MAX_PERMITS: usize = 1 << 24;

/// A stdio server, as a service. Clones share the server.
#[derive(Clone, Debug)]
pub struct Stdio(pub(super) Arc<Inner>);

/// Current statistics, for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Number of sessions that clients can use.
    pub sessions: usize,
    /// Number of processes, including stopping ones.
    pub children: usize,
    /// Number of processes that had to be killed.
    pub kills: u64,
}

/// The session id and the revision in a request's headers.
#[derive(Clone, Copy)]
struct Head<'a> {
    session: Option<&'a str>,
    revision: Option<&'a str>,
}

#[derive(Debug)]
pub(super) struct Inner {
    pub(super) options: Options,
    pub(super) store: EventStore,
    live: Mutex<Live>,
    /// One permit per process.
    pub(super) permits: Arc<Semaphore>,
    restart_backoff: Mutex<RestartBackoff>,
    /// When we last logged that the session limit caused a refusal.
    pub(super) last_refusal_log: Mutex<Option<Instant>>,
    /// Number of processes. Can't be derived from `permits`, because a shutdown acquires all of them.
    pub(super) children: AtomicUsize,
    kills: AtomicU64,
    end_counts: EndCounts,
}

/// The sessions that clients can use.
#[derive(Debug, Default)]
pub(super) struct Live {
    pub(super) sessions: HashMap<Arc<str>, Arc<Session>>,
    pub(super) is_shutting_down: bool,
    /// Number of new sessions waiting for a process to exit.
    pub(super) waiting: usize,
}

// === impl Stdio ===

impl Stdio {
    /// Creates the service. Each `initialize` starts a session with its own process.
    ///
    /// # Errors
    ///
    /// Returns an error if the program or its working directory can't be found.
    pub fn new(options: Options, store: EventStore) -> io::Result<Self> {
        options.program.check()?;
        Ok(Self(Arc::new(Inner {
            permits: Arc::new(Semaphore::new(options.max_sessions.min(MAX_PERMITS))),
            options,
            store,
            live: Mutex::default(),
            restart_backoff: Mutex::default(),
            last_refusal_log: Mutex::default(),
            children: AtomicUsize::new(0),
            kills: AtomicU64::new(0),
            end_counts: EndCounts::default(),
        })))
    }

    /// Returns the program started for each session.
    #[must_use]
    pub fn program(&self) -> &Program {
        &self.0.options.program
    }

    /// Returns the event store that holds the sessions' streams.
    #[must_use]
    pub fn event_store(&self) -> &EventStore {
        &self.0.store
    }

    /// Returns the current statistics.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let inner = &self.0;
        Stats {
            sessions: inner.live().sessions.len(),
            children: inner.children(),
            kills: inner.kills.load(Ordering::Relaxed),
        }
    }

    /// Returns how many sessions have ended, by reason.
    #[must_use]
    pub fn ended_sessions(&self) -> Vec<(&'static str, u64)> {
        self.0.end_counts.by_label()
    }

    /// Ends all sessions and waits for their processes to exit, for up to `limit`.
    ///
    /// No session can be started afterwards. Each process has a third of the limit to exit after its stdin has been closed, and
    /// another third after SIGTERM, each capped at 2 s.
    pub async fn shutdown(&self, limit: Duration) {
        let inner = &self.0;
        let sessions = {
            let mut live = inner.live();
            live.is_shutting_down = true;
            std::mem::take(&mut live.sessions)
        };
        let stop_timeout = STOP_TIMEOUT.min(limit / 3);
        for session in sessions.values() {
            session.stop(EndReason::Shutdown(stop_timeout));
        }
        let all_permits = inner.options.max_sessions.min(MAX_PERMITS).try_into();
        let all_permits = all_permits.unwrap_or(u32::MAX);
        let _ = timeout(limit, inner.permits.acquire_many(all_permits)).await;
    }

    async fn respond(self, request: Request<Body>) -> Response<Body> {
        match *request.method() {
            Method::POST => self.post(request).await,
            Method::GET => self.get(request.headers()),
            Method::DELETE => self.delete(request.headers()),
            _ => {
                let mut response = refusal::empty(StatusCode::METHOD_NOT_ALLOWED);
                let allowed = HeaderValue::from_static("GET, POST, DELETE");
                response.headers_mut().insert(header::ALLOW, allowed);
                response
            }
        }
    }

    async fn post(&self, request: Request<Body>) -> Response<Body> {
        let (parts, body) = request.into_parts();
        // The layer marks the cancellations it sends. Without a layer, requests have no token.
        let token = parts.extensions.get::<CallToken>();
        let is_from_client = token.is_none_or(|token| !token.is_replay());
        let head = Head::from_headers(&parts.headers);
        // Mark the session as in use before the body arrives, which may take a long time.
        let session = head
            .ok()
            .and_then(|head| self.0.use_session(head.session?, is_from_client));
        if !accepts(&parts.headers, JSON) || !accepts(&parts.headers, EVENT_STREAM) {
            let text = "the client must accept both application/json and text/event-stream";
            return refusal::error(StatusCode::NOT_ACCEPTABLE, None, SERVER_ERROR, text);
        }
        if !has_content_type(&parts.headers, JSON) {
            let text = "the content type must be application/json";
            return refusal::error(StatusCode::UNSUPPORTED_MEDIA_TYPE, None, SERVER_ERROR, text);
        }
        let body = match Limited::new(body, MAX_BODY).collect().await {
            Ok(body) => body.to_bytes(),
            // The frontend may already have refused the body.
            Err(error) => {
                let incomplete = || {
                    let text = "the body is incomplete";
                    refusal::error(StatusCode::BAD_REQUEST, None, PARSE_ERROR, text)
                };
                return refusal::for_body_error(&*error).unwrap_or_else(incomplete);
            }
        };
        let line = single_line(trim(&body));
        let message = str::from_utf8(&line)
            .ok()
            .and_then(|text| Message::read(text.as_bytes()));
        let Some(message) = message else {
            return not_a_message(&line);
        };
        let id = message.id.filter(|_| message.kind == Kind::Request);
        let head = match head {
            Ok(head) => head,
            Err(text) => return refusal::error(StatusCode::BAD_REQUEST, id, INVALID_REQUEST, text),
        };
        if let Some(revision) = head
            .revision
            .filter(|revision| *revision >= FIRST_WITHOUT_SESSIONS)
        {
            return refusal::unsupported_revision(id, revision);
        }
        let is_initialize =
            message.kind == Kind::Request && message.method.as_deref() == Some("initialize");
        let session = match (head.session, session) {
            (None, _) if is_initialize => {
                return self
                    .begin(&message, &parts, line.clone())
                    .await
                    .unwrap_or_else(|refused| *refused);
            }
            (None, _) => {
                let text = "the request has no session: send initialize first, then include the Mcp-Session-Id from its response";
                return refusal::error(StatusCode::BAD_REQUEST, id, INVALID_REQUEST, text);
            }
            (_, Some(session)) => session,
            (_, None) => return not_found(id),
        };
        if is_initialize {
            let text = "the session is already initialized";
            return refusal::error(StatusCode::BAD_REQUEST, id, INVALID_REQUEST, text);
        }
        let is_from_layer = token.is_none_or(CallToken::is_replay);
        let sent = match message.kind {
            Kind::Request => send_request(&session, &message, &parts, line.clone()),
            Kind::Notification | Kind::Response => session
                .notify(
                    &message,
                    session.notification_line(&message, &line, is_from_layer),
                )
                .map(|()| refusal::empty(StatusCode::ACCEPTED)),
        };
        sent.unwrap_or_else(|reason| send_error_response(id, reason))
    }

    fn get(&self, headers: &HeaderMap) -> Response<Body> {
        if !accepts(headers, EVENT_STREAM) {
            let text = "the client must accept text/event-stream";
            return refusal::error(StatusCode::NOT_ACCEPTABLE, None, SERVER_ERROR, text);
        }
        let bad = |text: &str| refusal::error(StatusCode::BAD_REQUEST, None, INVALID_REQUEST, text);
        let id = match Head::required_session(headers) {
            Ok(id) => id,
            Err(text) => return bad(text),
        };
        let session = self.0.use_session(id, true);
        // An empty id is treated like a missing one (WHATWG HTML, section 9.2.6).
        let last = headers.get(LAST_EVENT_ID).filter(|last| !last.is_empty());
        let Some(last) = last else {
            return session.map_or_else(
                || not_found(None),
                |session| session.streams.listen(&session.standalone),
            );
        };
        // A session's streams outlive its process, so that clients can still get the events they have not received yet.
        let has_more = || {
            let last = last.to_str().ok();
            last.is_some_and(|last| self.0.store.has_more(id, last))
        };
        if session.is_none() && !has_more() {
            return not_found(None);
        }
        let resumed = last
            .to_str()
            .ok()
            .and_then(|last| self.0.store.resume(id, last));
        resumed.unwrap_or_else(|| bad("Last-Event-ID does not refer to an event in this session"))
    }

    fn delete(&self, headers: &HeaderMap) -> Response<Body> {
        let id = match Head::required_session(headers) {
            Ok(id) => id,
            Err(text) => {
                return refusal::error(StatusCode::BAD_REQUEST, None, INVALID_REQUEST, text);
            }
        };
        let session = self.0.live().sessions.remove(id);
        let Some(session) = session else {
            return not_found(None);
        };
        session.stop(EndReason::Deleted);
        self.0.store.close(id);
        refusal::empty(StatusCode::NO_CONTENT)
    }
}

impl Service<Request<Body>> for Stdio {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let response = self.clone().respond(request);
        Box::pin(async { Ok(response.await) })
    }
}

// === impl Inner ===

impl Inner {
    fn use_session(&self, id: &str, is_from_client: bool) -> Option<SessionUse> {
        let session = self.live().sessions.get(id).cloned();
        session?.begin_use(is_from_client)
    }

    pub(super) fn live(&self) -> MutexGuard<'_, Live> {
        lock(&self.live)
    }

    /// Returns the number of processes, including stopping ones.
    pub(super) fn children(&self) -> usize {
        self.children.load(Ordering::Relaxed)
    }

    pub(super) fn restart_backoff(&self) -> MutexGuard<'_, RestartBackoff> {
        lock(&self.restart_backoff)
    }

    /// Records that a session's process has ended.
    pub(super) fn record_end(&self, end: &SessionEnd) {
        self.end_counts.record(end.reason);
        if end.failed_to_start {
            self.restart_backoff().record_crash(Instant::now());
        }
        if end.was_killed {
            self.kills.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Ends the sessions when the last handle is dropped.
impl Drop for Inner {
    fn drop(&mut self) {
        let sessions = std::mem::take(&mut self.live().sessions);
        for session in sessions.values() {
            session.stop(EndReason::Shutdown(STOP_TIMEOUT));
        }
    }
}

// === impl Head ===

impl<'a> Head<'a> {
    fn from_headers(headers: &'a HeaderMap) -> Result<Self, &'static str> {
        Ok(Self {
            session: single(headers, &SESSION_ID)
                .map_err(|_| "the request has a repeated or invalid Mcp-Session-Id")?,
            revision: single(headers, &PROTOCOL_VERSION)
                .map_err(|_| "the request has a repeated or invalid MCP-Protocol-Version")?,
        })
    }

    /// Returns the request's session id, which is required.
    fn required_session(headers: &'a HeaderMap) -> Result<&'a str, &'static str> {
        let session = Self::from_headers(headers)?.session;
        session.ok_or("the request has no session")
    }
}

fn trim(body: &Bytes) -> Bytes {
    body.slice_ref(body.trim_ascii())
}

pub(super) fn send_request(
    session: &Session,
    message: &Message<'_>,
    parts: &http::request::Parts,
    line: Bytes,
) -> Result<Response<Body>, SendError> {
    let call = message.id.and_then(Call::new).ok_or(SendError::BadId)?;
    let call = call.token(parts.extensions.get::<CallToken>().cloned());
    session
        .request(message, call, line)
        .map(|stream| stream.respond())
}

pub(super) fn send_error_response(id: Option<&str>, reason: SendError) -> Response<Body> {
    let bad = |id, text| refusal::error(StatusCode::BAD_REQUEST, id, INVALID_REQUEST, text);
    match reason {
        // Don't repeat the id, which can be arbitrarily long.
        SendError::BadId => bad(None, "the id must be a string or a number of at most 1 KiB"),
        SendError::IdInUse => bad(
            id,
            "the id is in use: the server has not yet answered an earlier request with the same id",
        ),
        SendError::Busy => refusal::busy(
            id,
            "the MCP server is busy: too many calls or messages are pending",
            RETRY_AFTER,
        ),
        SendError::NoRoom => refusal::busy(id, "there is no room for another call", RETRY_AFTER),
        SendError::SessionEnded => not_found(id),
    }
}

fn not_found(id: Option<&str>) -> Response<Body> {
    refusal::error(
        StatusCode::NOT_FOUND,
        id,
        SESSION_NOT_FOUND,
        "the session does not exist, or has ended",
    )
}

fn not_a_message(line: &[u8]) -> Response<Body> {
    let bad = |code, text| refusal::error(StatusCode::BAD_REQUEST, None, code, text);
    let json = str::from_utf8(line)
        .ok()
        .map(serde_json::from_str::<&serde_json::value::RawValue>);
    match json {
        Some(Ok(json)) if json.get().starts_with('[') => {
            bad(INVALID_REQUEST, "batches are not supported")
        }
        Some(Ok(_)) => bad(INVALID_REQUEST, "the body is not a JSON-RPC message"),
        Some(Err(_)) | None => bad(PARSE_ERROR, "the body is not valid UTF-8 JSON"),
    }
}
