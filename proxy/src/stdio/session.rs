//! The state shared by a session's requests and its task.

use std::{
    fmt,
    ops::Deref,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use bytes::Bytes;
use tokio::{sync::Notify, time::Instant};

use super::{
    input::{self, Backpressure, Input, InputWriter, Stopped, TryReserveError},
    routing::{Refused, Routes},
    stderr_log::SessionLogId,
};
use crate::{
    event_store::{self, Stream},
    lock::lock,
    message::{IdKey, Kind, Message},
    refusal::SERVER_ERROR,
};

/// Maximum length of an id or a token. There has to be a limit, because both are stored for as long as the call lasts.
const MAX_ID: usize = 1024;

/// A session, shared by its requests and its task.
pub(super) struct Session {
    pub(super) log_id: SessionLogId,
    /// The session in the event store, which holds the streams.
    pub(super) streams: event_store::Session,
    /// The stream for messages that don't belong to a call.
    pub(super) standalone: Stream,
    input: Input,
    pub(super) backpressure: Backpressure,
    pub(super) started_at: Instant,
    state: Mutex<State>,
    /// Notified when a deadline may have become earlier.
    pub(super) changed: Notify,
    /// Notified when the session must end.
    pub(super) stop: Notify,
    pub(super) timeouts: Timeouts,
}

/// How long a session may be unused.
#[derive(Debug, Clone, Copy)]
pub(super) struct Timeouts {
    /// Applies to every session.
    pub(super) idle: Duration,
    /// Applies to a session whose client has disconnected, if it is shorter than `idle`.
    pub(super) lost: Duration,
}

/// Marks a session as in use by a request, until this guard is dropped.
///
/// A request uses its session from before its body arrives until its message has been sent or refused.
pub(super) struct SessionUse {
    session: Arc<Session>,
    /// Whether the client sent the request. Otherwise, it is a cancellation from the layer.
    is_from_client: bool,
}

/// The part of a session's state that changes, protected by a lock.
pub(super) struct State {
    pub(super) routes: Routes<Stream>,
    pub(super) last_used: Instant,
    /// Number of requests currently using the session.
    requests: usize,
    /// The standalone stream's disconnect count when the client's last request ended.
    disconnects: u64,
    /// Whether the client has sent anything after `initialize`.
    pub(super) was_used: bool,
    /// Whether the server has answered any request.
    pub(super) has_answered: bool,
    /// The reason the session is ending, once that has been decided.
    pub(super) stopped: Option<EndReason>,
}

/// The reason a session ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EndReason {
    /// The client has deleted the session.
    Deleted,
    /// The session was idle for too long.
    Idle,
    /// The session's client disconnected and did not reconnect in time.
    Lost,
    /// The session was unused, and was evicted to make room for a new one.
    Evicted,
    /// The proxy is shutting down. The process has this long to exit after its stdin has been closed, and again after SIGTERM.
    Shutdown(Duration),
    /// The leader of the process group has exited.
    Exited,
    /// The process has closed its stdin or its stdout.
    Closed,
    /// The process is not reading its stdin.
    Stuck,
    /// A cancelled call was not answered in time.
    Overdue,
}

/// The reason a message was not sent to the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SendError {
    /// The id is missing, too long, or of the wrong type.
    BadId,
    /// An unanswered request has this id, or one that the server might confuse with it.
    IdInUse,
    /// The queue is full, or too many calls are open.
    Busy,
    /// The event store has no room for another stream.
    NoRoom,
    /// The session has ended.
    SessionEnded,
}

// === impl Session ===

impl Session {
    pub(super) fn new(
        log_id: SessionLogId,
        streams: event_store::Session,
        standalone: Stream,
        kill_after: Option<Duration>,
        timeouts: Timeouts,
    ) -> (Self, InputWriter) {
        let (input, input_writer) = input::queue();
        let state = State {
            routes: Routes::new(kill_after),
            last_used: Instant::now(),
            requests: 0,
            disconnects: 0,
            was_used: false,
            has_answered: false,
            stopped: None,
        };
        let session = Self {
            log_id,
            streams,
            standalone,
            input,
            backpressure: Backpressure::default(),
            started_at: Instant::now(),
            state: Mutex::new(state),
            changed: Notify::new(),
            stop: Notify::new(),
            timeouts,
        };
        (session, input_writer)
    }

    /// Queues a request for the server, and returns its stream.
    ///
    /// The stream is primed, except for `initialize`.
    pub(super) fn request(
        &self,
        message: &Message<'_>,
        call: event_store::Call,
        line: Bytes,
    ) -> Result<Stream, SendError> {
        let id = message.id.and_then(key).ok_or(SendError::BadId)?;
        let is_initialize = message.method.as_deref() == Some("initialize");
        let token = message.params().progress_token.and_then(key);
        let permit = self.input.try_reserve(line.len(), false)?;
        let mut state = self.state();
        let open = || self.streams.open(call).ok_or(SendError::NoRoom);
        let stream = state.routes.begin(id, token, open)?;
        // The client can't resume an `initialize`, because it does not have a session id yet.
        if !is_initialize {
            self.prime(&stream);
        }
        // Send this under the lock that registers the call, so that a cancellation can't find the call before its request has
        // been queued.
        permit.send(line);
        drop(state);
        Ok(stream)
    }

    /// Queues a notification or an answer for the server.
    ///
    /// A cancellation is also recorded, which may end the stream of an older cancelled call.
    pub(super) fn notify(&self, message: &Message<'_>, line: Bytes) -> Result<(), SendError> {
        let is_cancel = message.kind == Kind::Notification
            && message.method.as_deref() == Some("notifications/cancelled");
        let permit = self.input.try_reserve(line.len(), is_cancel)?;
        let evicted = {
            let mut state = self.state();
            if state.stopped.is_some() {
                return Err(SendError::SessionEnded);
            }
            let cancelled = message
                .params()
                .request_id
                .filter(|_| is_cancel)
                .and_then(key);
            let evicted = cancelled.and_then(|id| state.routes.on_cancelled(&id, Instant::now()));
            // Send this under the lock. If a request then reuses the id, it is queued after the cancellation.
            permit.send(line);
            drop(state);
            evicted
        };
        if is_cancel {
            self.changed.notify_one();
        }
        if let Some(stream) = evicted {
            stream.end_cancelled();
        }
        Ok(())
    }

    /// Returns the line to send for a notification or an answer.
    ///
    /// In the layer's cancellation, this restores the id exactly as the client wrote it, because a server may distinguish `1`
    /// from `1.0`.
    pub(super) fn notification_line(
        &self,
        message: &Message<'_>,
        line: &Bytes,
        is_from_layer: bool,
    ) -> Bytes {
        let id = message.params().request_id.filter(|_| is_from_layer);
        let call = id.and_then(key).and_then(|id| self.streams.find(&id));
        let rewritten = call.and_then(|call| message.with_request_id(line, call.call_text()?));
        rewritten.unwrap_or_else(|| line.clone())
    }

    /// Marks the session as in use by a request. Returns `None` if the session has ended.
    pub(super) fn begin_use(self: Arc<Self>, is_from_client: bool) -> Option<SessionUse> {
        {
            let mut state = self.state();
            if state.stopped.is_some() {
                return None;
            }
            state.requests += 1;
            state.was_used |= is_from_client;
        }
        Some(SessionUse {
            session: self,
            is_from_client,
        })
    }

    /// Returns `true` if the client has disconnected, judging by its standalone stream.
    ///
    /// That is, the client had a standalone stream when its last request ended or later, but has none now.
    pub(super) fn is_lost(&self, state: &State) -> bool {
        self.standalone.disconnects() > state.disconnects && !self.standalone.is_attached()
    }

    /// Returns `true` during a request, while a call is open, or while the process is blocked.
    pub(super) fn is_working(&self, state: &State) -> bool {
        // Until the session has been used, check whether a client is attached, because an `initialize` is not cancelled when its
        // client disconnects.
        let has_open_call = if state.was_used {
            !state.routes.is_idle()
        } else {
            state.routes.streams().any(Stream::is_attached)
        };
        // A call whose answer is waiting for its client to read it is no longer open, and only shows up as backpressure.
        state.requests > 0 || has_open_call || self.backpressure.is_on()
    }

    /// Returns when a request or a stream last used the session, or `None` if it is still in use.
    pub(super) fn unused_since_in(&self, state: &State) -> Option<Instant> {
        if self.is_working(state) {
            return None;
        }
        let detached = self.streams.unread_since()?;
        Some(detached.map_or(state.last_used, |detached| detached.max(state.last_used)))
    }

    /// Sends the priming event if the client supports it.
    pub(super) fn prime(&self, stream: &Stream) {
        if self.streams.primes() {
            stream.prime();
        }
    }

    /// Starts ending the session, unless it is already ending.
    ///
    /// Open calls end with an error, and no call can be started afterwards.
    pub(super) fn stop(&self, reason: EndReason) {
        let open = {
            let mut state = self.state();
            if state.stopped.is_some() {
                return;
            }
            state.stopped = Some(reason);
            state.routes.end()
        };
        self.end_streams(open, reason.text());
        self.stop.notify_one();
    }

    /// Ends all open streams, with `text` as the error for calls.
    ///
    /// If the session is already ending for another reason, that reason is kept.
    pub(super) fn finish(&self, reason: EndReason, text: &str) {
        let open = {
            let mut state = self.state();
            state.stopped.get_or_insert(reason);
            state.routes.end()
        };
        self.end_streams(open, text);
    }

    fn end_streams(&self, open: Vec<Stream>, text: &str) {
        for stream in open {
            stream.end_with_error(SERVER_ERROR, text);
        }
        self.standalone.end();
    }

    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

/// Returns an id or a token as a key compared by value.
///
/// Returns `None` if it is too long to be stored, or if it is neither a string nor a number.
pub(super) fn key(text: &str) -> Option<IdKey> {
    let is_short = text.len() <= MAX_ID;
    is_short.then(|| IdKey::of(text))?
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Session({})", self.log_id)
    }
}

// === impl SessionUse ===

impl Deref for SessionUse {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.session
    }
}

impl Drop for SessionUse {
    fn drop(&mut self) {
        let mut state = self.state();
        state.requests -= 1;
        // A cancellation from the layer does not mean that the client is still connected.
        if self.is_from_client {
            state.last_used = Instant::now();
            state.disconnects = self.standalone.disconnects();
        }
    }
}

// === impl EndReason ===

impl EndReason {
    /// Returns the error message for the clients of open calls.
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Deleted => "the session was deleted",
            Self::Idle => "the session was idle for too long",
            Self::Lost => "the session's client was disconnected for too long",
            Self::Evicted => "the session was unused, and was evicted to make room for a new one",
            Self::Shutdown(_) => "the proxy is shutting down",
            Self::Exited => "the MCP server has exited",
            Self::Closed => "the MCP server has closed its stdin or stdout",
            Self::Stuck => "the MCP server did not read its stdin for 30s and was killed",
            Self::Overdue => {
                "the MCP server did not answer a cancelled call in time and was killed"
            }
        }
    }
}

impl From<Stopped> for EndReason {
    fn from(stopped: Stopped) -> Self {
        match stopped {
            Stopped::Closed => Self::Closed,
            Stopped::Stuck => Self::Stuck,
        }
    }
}

// === impl SendError ===

impl From<Refused> for SendError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::IdInUse => Self::IdInUse,
            Refused::TooMany => Self::Busy,
            Refused::Ended => Self::SessionEnded,
        }
    }
}

impl From<TryReserveError> for SendError {
    fn from(error: TryReserveError) -> Self {
        match error {
            TryReserveError::Full => Self::Busy,
            TryReserveError::Closed => Self::SessionEnded,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;
    use crate::event_store::{EventStore, Limits};

    fn text(message: &Message<'_>) -> &'static str {
        match message.kind {
            Kind::Request => "request",
            _ => "cancel",
        }
    }

    /// Returns what is written for a request, and a cancellation sent once the call is registered.
    async fn written() -> String {
        let store = EventStore::new(Limits::default());
        let streams = store.begin("s", Some("2025-11-25")).unwrap();
        let standalone = streams.open_standalone().unwrap();
        let (session, input_writer) = Session::new(
            SessionLogId::new("s"),
            streams,
            standalone,
            None,
            Timeouts {
                idle: Duration::MAX,
                lost: Duration::MAX,
            },
        );
        let request = Message::read(br#"{"id":1,"method":"tools/call"}"#).unwrap();
        let cancel = br#"{"method":"notifications/cancelled","params":{"requestId":1}}"#.as_slice();
        let cancel = Message::read(cancel).unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                while session.state().routes.is_idle() {
                    std::hint::spin_loop();
                }
                session.notify(&cancel, text(&cancel).into()).unwrap();
            });
            let call = event_store::Call::new("1").unwrap();
            session
                .request(&request, call, text(&request).into())
                .unwrap();
        });
        drop(session);
        let mut written = Vec::new();
        input_writer
            .write(&mut written, &Backpressure::default())
            .await;
        String::from_utf8(written).unwrap()
    }

    #[tokio::test]
    async fn no_cancel_is_written_before_the_request_that_it_cancels() {
        for _ in 0..1_000 {
            assert_eq!(written().await, "request\ncancel\n");
        }
    }
}
