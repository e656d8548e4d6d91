//! A stream of events, filled by a writer and read by a client's response.

use std::{
    fmt,
    future::pending,
    mem,
    sync::{Arc, Mutex, MutexGuard, Weak, atomic::AtomicUsize},
    task::Waker,
    time::Duration,
};

use axum::body::Body;
use http::Response;
use mcp_cancel_on_disconnect::CallToken;
use tokio::{sync::Notify, task::AbortHandle, time::Instant};

pub(super) use self::end::PendingEndGuard;
use super::{
    call::Call,
    credentials::Credentials,
    event::Event,
    ring::{Pushed, Ring, Start},
    stream_index::StreamIndex,
};
use crate::{lock::lock, message::IdKey};

mod authorization;
mod bypass;
mod end;
mod eviction;
mod queries;
mod reader_body;

/// JSON-RPC's code for an internal error.
pub(super) const INTERNAL_ERROR: i32 = -32603;

const NO_ROOM: &str = "the proxy has no room for events that the client has not read yet";
const ANSWER_NOT_RETAINED: &str =
    "the answer was sent once but was too large for the proxy to store";

/// How long the proxy keeps reading from the server once a call is cancelled or answered.
///
/// This is limited because some servers never end the stream themselves.
pub const UPSTREAM_LINGER: Duration = Duration::from_secs(1);

/// A stream of events that outlives its clients.
///
/// Clones share the stream. Its writer must end it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use http_body_util::BodyExt;
/// use mcp_cancel_proxy::event_store::{Call, Event, EventStore, Limits};
///
/// let store = EventStore::new(Limits::default());
/// let session = store.begin("s", Some("2025-11-25")).unwrap();
/// let call = Call::new("7").unwrap();
/// let stream = session.open(call).expect("room for a stream");
/// let answer = Event::message(br#"{"jsonrpc":"2.0","id":7,"result":{}}"#, stream.call());
/// stream.push(answer).await.unwrap();
/// stream.end();
///
/// // The client reads from the start. If it resumes, it continues after the event that it specifies.
/// let body = stream.respond().into_body().collect().await.unwrap().to_bytes();
/// let text = String::from_utf8(body.into()).unwrap();
/// let (_, id) = text.trim_end().rsplit_once("id: ").unwrap();
/// let first = id.replace(".1", ".0");
/// let resume = store.resume("s", &first).unwrap().into_body().collect().await.unwrap();
/// assert!(text.ends_with(std::str::from_utf8(&resume.to_bytes()).unwrap()));
/// # }
/// ```
#[derive(Clone)]
pub struct Stream(Arc<Inner>);

/// The event was refused because the stream had ended or had no room for it.
///
/// A call's stream also ends when it has no room for an event. A standalone stream continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

struct Inner {
    number: u64,
    /// The id of the stream's call: as the client wrote it, and as a key that compares by value.
    call: Option<(Box<str>, IdKey)>,
    index: Weak<StreamIndex<Stream>>,
    /// How long the stream is retained after it ends.
    retention: Duration,
    state: Mutex<State>,
    /// Notified when a reader attaches, takes data, or detaches, and when the stream ends.
    reader_progress: Notify,
    /// Notified when `State::close_at` is set.
    close_due: Notify,
    /// Notified when the server accepts credentials again.
    credentials_renewed: Notify,
    /// Number of clients whose credentials the server is currently checking.
    pending_checks: AtomicUsize,
    /// Number of in-flight requests by the client to end the call.
    pending_ends: AtomicUsize,
}

struct State {
    ring: Ring,
    reader: Option<Waker>,
    /// When a client last stopped reading.
    detached_at: Option<Instant>,
    token: Option<CallToken>,
    /// The latest credentials accepted by the server in a request for this call.
    credentials: Option<Arc<Credentials>>,
    /// Whether the server has refused `credentials` since accepting them.
    has_refused_credentials: bool,
    is_cancelled: bool,
    close_at: Option<Instant>,
    /// Whether `notify_answered` has already handled the answer.
    is_notified: bool,
    writer: Option<AbortHandle>,
    /// When the stream expires, or `None` if it has not ended yet.
    until: Option<Instant>,
    /// Whether the stream is marked as evictable or has been closed. Reset when a client attaches that still has events to
    /// read.
    is_evictable: bool,
    /// Whether a lack of room has already been logged.
    has_logged_full: bool,
}

// === impl Stream ===

impl Stream {
    pub(super) fn new(
        number: u64,
        call: Option<Call>,
        index: Weak<StreamIndex<Self>>,
        retention: Duration,
        ring: Ring,
    ) -> Self {
        let (call, credentials, token) = match call {
            Some(call) => (Some((call.id, call.key)), call.credentials, call.token),
            None => (None, None, None),
        };
        Self(Arc::new(Inner {
            number,
            call,
            index,
            retention,
            state: Mutex::new(State {
                ring,
                reader: None,
                detached_at: None,
                token,
                credentials,
                has_refused_credentials: false,
                is_cancelled: false,
                close_at: None,
                is_notified: false,
                writer: None,
                until: None,
                is_evictable: false,
                has_logged_full: false,
            }),
            reader_progress: Notify::new(),
            close_due: Notify::new(),
            credentials_renewed: Notify::new(),
            pending_checks: AtomicUsize::new(0),
            pending_ends: AtomicUsize::new(0),
        }))
    }

    /// Returns the id of the stream's call, as a key that compares by value (`1` equals `1.0`).
    pub fn call(&self) -> Option<&IdKey> {
        self.0.call.as_ref().map(|(_, key)| key)
    }

    /// Returns the id of the stream's call, as the client wrote it.
    pub(crate) fn call_text(&self) -> Option<&str> {
        self.0.call.as_ref().map(|(text, _)| &**text)
    }

    /// Adds the priming event, which carries no message, just an id to resume from.
    ///
    /// Only call this if the session allows it ([`Session::primes`](super::Session::primes)). There is always room for one
    /// priming event.
    pub fn prime(&self) {
        let reader = {
            let mut state = self.state();
            state.ring.prime();
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// Adds an event. If there is no room, waits until the attached client has read enough.
    ///
    /// Before it waits, this makes room by dropping droppable events (possibly the new one), and then events that have already
    /// been sent to the client. If there is still no room and no client is attached, the call ends with an error. An event that
    /// exceeds the budget is passed directly to the client without being stored.
    ///
    /// # Errors
    ///
    /// Returns [`Refused`] if the stream has ended or has no room. In the latter case, a call's stream ends too.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while it is waiting, the event may be lost. The stream should then be ended.
    pub async fn push(&self, mut event: Event) -> Result<(), Refused> {
        loop {
            let reader_progress = self.0.reader_progress.notified();
            tokio::pin!(reader_progress);
            reader_progress.as_mut().enable();
            event = match self.offer(event) {
                Pushed::Done => return Ok(()),
                Pushed::Ended => return Err(Refused),
                Pushed::Full => return self.fail(NO_ROOM),
                Pushed::Exhausted(event, exhausted) if self.evict_for(exhausted) => event,
                Pushed::Exhausted(event, _) => return self.push_bypassing(event).await,
                Pushed::Wait(event) => {
                    reader_progress.await;
                    event
                }
            };
        }
    }

    /// Adds an event without waiting.
    ///
    /// If there is no room, the call ends with an error, even if a client is attached. Use this where a waiting writer would
    /// hold up other work.
    ///
    /// # Errors
    ///
    /// Returns [`Refused`] if the stream has ended or has no room. In the latter case, a call's stream ends too.
    pub fn push_now(&self, mut event: Event) -> Result<(), Refused> {
        loop {
            event = match self.offer(event) {
                Pushed::Done => return Ok(()),
                Pushed::Ended => return Err(Refused),
                Pushed::Exhausted(event, exhausted) if self.evict_for(exhausted) => event,
                Pushed::Exhausted(..) | Pushed::Full | Pushed::Wait(_) => {
                    return self.fail(NO_ROOM);
                }
            };
        }
    }

    /// Returns a response whose body reads the stream from the start.
    pub fn respond(&self) -> Response<Body> {
        self.read(Start::Beginning, false).unwrap_or_default()
    }

    /// Returns a response whose body starts at the first event that no client has received.
    ///
    /// If `with_position` is set and there have been earlier events, the body begins with an event that carries no message,
    /// just an id to resume from.
    pub(super) fn respond_unread(&self, with_position: bool) -> Response<Body> {
        self.read(Start::Unread, with_position).unwrap_or_default()
    }

    /// Returns a response whose body starts after event `after`.
    ///
    /// Returns `None` if there is no such event.
    pub(super) fn respond_after(&self, after: u64) -> Option<Response<Body>> {
        self.read(Start::After(after), false)
    }

    /// Makes [`close_due`](Self::close_due) return after [`UPSTREAM_LINGER`].
    ///
    /// Use this once the call has been cancelled or answered. If there is no answer yet, the stream treats the call as
    /// cancelled from now on. Calling this again does not postpone the deadline.
    pub fn close_soon(&self) {
        let until = Instant::now() + UPSTREAM_LINGER;
        {
            let mut state = self.state();
            state.is_cancelled |= !state.ring.is_answered();
            state.close_at.get_or_insert(until);
        }
        self.0.close_due.notify_waiters();
    }

    /// Waits for the call to be cancelled or answered, and then for another [`UPSTREAM_LINGER`].
    ///
    /// As soon as its token fires, a call is considered cancelled, whether or not the server accepts the cancellation.
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe: dropping the future loses nothing.
    pub async fn close_due(&self) {
        let token = self.state().token.clone();
        let cancelled = async {
            match token {
                Some(token) => token.cancelled().await,
                None => pending().await,
            }
        };
        let mut cancelled = std::pin::pin!(cancelled);
        loop {
            let close_due = self.0.close_due.notified();
            tokio::pin!(close_due);
            close_due.as_mut().enable();
            let until = self.state().close_at;
            match until {
                Some(until) => return tokio::time::sleep_until(until).await,
                None => tokio::select! {
                    () = close_due => {}
                    () = &mut cancelled => self.close_soon(),
                },
            }
        }
    }

    /// The size of a stream, excluding its events.
    #[cfg(test)]
    pub(super) const SIZE: usize = size_of::<Inner>();

    /// Registers the task that writes to the stream.
    ///
    /// The task is aborted when the stream is closed, or right away if the stream has already ended.
    pub(super) fn set_writer(&self, writer: AbortHandle) {
        let mut state = self.state();
        // By now, the stream may have been closed, or the task may already have ended it.
        match state.until {
            None => state.writer = Some(writer),
            Some(_) => {
                drop(state);
                writer.abort();
            }
        }
    }

    fn offer(&self, event: Event) -> Pushed {
        let (pushed, reader) = {
            let mut state = self.state();
            (state.ring.push(event), state.reader.take())
        };
        if let Some(reader) = reader {
            reader.wake();
        }
        self.notify_answered();
        pushed
    }

    /// Drops the oldest droppable event. Returns `false` if there is none.
    fn drop_droppable(&self) -> bool {
        self.state().ring.drop_droppable()
    }

    /// If the call has been answered, notifies its token and schedules the close, but only once.
    fn notify_answered(&self) {
        let (is_first, token) = {
            let mut state = self.state();
            let is_first = state.ring.is_answered() && !mem::replace(&mut state.is_notified, true);
            (is_first, state.token.take_if(|_| is_first))
        };
        if is_first {
            self.close_soon();
        }
        if let Some(token) = token {
            token.answered();
        }
    }

    /// Refuses an event for which there is no room.
    ///
    /// If the stream belongs to a call, it ends with `message` as its error. A standalone stream continues.
    fn fail(&self, message: &str) -> Result<(), Refused> {
        // Log this only once: a standalone stream continues, and its server may send many more events.
        let is_first = !mem::replace(&mut self.state().has_logged_full, true);
        if is_first {
            tracing::warn!(
                stream = self.0.number,
                "no room for events that a client has not read (--buffer)"
            );
        }
        if self.0.call.is_some() {
            self.end_without_answer(INTERNAL_ERROR, message);
        }
        Err(Refused)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0.state)
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stream")
            .field("number", &self.0.number)
            .finish_non_exhaustive()
    }
}

// === impl Refused ===

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the stream has ended or is full")
    }
}

impl std::error::Error for Refused {}
