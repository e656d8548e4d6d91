//! One stream of events: its writer puts them in, and the response that its client reads takes them out.

use std::{
    fmt,
    future::pending,
    sync::{Arc, Mutex, MutexGuard, Weak, atomic::AtomicUsize},
    task::Waker,
    time::Duration,
};

use axum::body::Body;
use http::Response;
use mcp_cancel_on_disconnect::CallToken;
use tokio::{sync::Notify, task::AbortHandle, time::Instant};

use super::{
    call::Call,
    credentials::Credentials,
    event::{Event, answer_with, error},
    ring::{Pushed, Ring, Start},
    stream_index::StreamIndex,
};
use crate::{lock::lock, message::IdKey};

mod authorization;
mod bypass;
mod eviction;
mod queries;
mod reader_body;

/// JSON-RPC's code for an error of the server's own.
pub(super) const INTERNAL_ERROR: i32 = -32603;

const NO_ROOM: &str = "the proxy has no room for the events of a client that is away";
const ANSWER_NOT_RETAINED: &str =
    "the answer was sent once, and was too large for the proxy to keep";

/// How long a call that was cancelled, or answered, may still have its server's stream: 1 s. Some servers never end it.
pub const UPSTREAM_LINGER: Duration = Duration::from_secs(1);

/// A stream of events that outlives its clients.
///
/// It is a handle: clones are the same stream. Whoever writes it ends it.
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
/// let stream = session.open(call).expect("reservation for sibling stream");
/// let answer = Event::message(br#"{"jsonrpc":"2.0","id":7,"result":{}}"#, stream.call());
/// stream.push(answer).await.unwrap();
/// stream.end();
///
/// // Its client reads it from the start; one that comes back reads what is after the event that it names.
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

/// The event did not go on the stream: it has ended, or there was no room. A stream for a call has ended in both cases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Refused;

struct Inner {
    number: u64,
    /// The id of its call, as JSON text and by its value.
    call: Option<(Box<str>, IdKey)>,
    /// Where it stands, with the others of its session.
    index: Weak<StreamIndex<Stream>>,
    /// For how long after its end.
    retention: Duration,
    state: Mutex<State>,
    /// The reader took something, came or left.
    reader_progress: Notify,
    /// The time changed when the stream is to be let go.
    close_due: Notify,
    /// The server has accepted other credentials.
    credentials_renewed: Notify,
    /// How many questions to the server are open about who came back.
    pending_checks: AtomicUsize,
}

struct State {
    ring: Ring,
    reader: Option<Waker>,
    token: Option<CallToken>,
    /// The latest with which the server accepted a request for its call.
    credentials: Option<Arc<Credentials>>,
    /// The server has refused them since.
    credentials_refused: bool,
    is_cancelled: bool,
    close_soon: Option<Instant>,
    /// Whether it was told that the answer is here.
    answered: bool,
    writer: Option<AbortHandle>,
    /// When it is forgotten, once it has ended.
    until: Option<Instant>,
    /// Whether it was reported that its reader has everything.
    is_evictable: bool,
    /// Whether it was logged that there was no room.
    logged_full: bool,
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
                token,
                credentials,
                credentials_refused: false,
                is_cancelled: false,
                close_soon: None,
                answered: false,
                writer: None,
                until: None,
                is_evictable: false,
                logged_full: false,
            }),
            reader_progress: Notify::new(),
            close_due: Notify::new(),
            credentials_renewed: Notify::new(),
            pending_checks: AtomicUsize::new(0),
        }))
    }

    /// The id of the call that it is for, by its value.
    pub fn call(&self) -> Option<&IdKey> {
        self.0.call.as_ref().map(|(_, key)| key)
    }

    /// The id of that call, as it was written.
    pub(crate) fn call_text(&self) -> Option<&str> {
        self.0.call.as_ref().map(|(text, _)| &**text)
    }

    /// Sends the event that gives the client a place to resume from before there is any message. Only for clients whose
    /// session says so ([`Session::primes`](super::Session::primes)). There is always room for one.
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

    /// Sends an event. Waits while there is no room for one that must be kept and a client is there to make some by
    /// reading. If there is none, the call ends with an error, and so does this.
    ///
    /// An event that no room can be made for goes straight through to a client that reads, and cannot be resumed.
    ///
    /// # Errors
    ///
    /// [`Refused`], if the stream has ended, or does because of this.
    ///
    /// # Cancel safety
    ///
    /// If this is dropped while it waits, the event may be lost. The stream is to be ended then.
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

    /// The same without waiting: an event that must be kept and for which there is no room ends the call with an error,
    /// also when a client is there. For a writer that others wait behind.
    ///
    /// # Errors
    ///
    /// [`Refused`], if the stream has ended, or does because of this.
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

    /// Answers the call with an error of the proxy's own, for which there is always room, and ends the stream. Its server
    /// may still be at it: the call counts as answered only once its client has read that.
    pub fn end_with_error(&self, code: i32, message: &str) {
        let call = self.0.call.as_ref();
        self.finish(call.map(|(id, _)| error(id, code, message)));
    }

    /// Answers the call with an error in place of the answer, which came and cannot be handed on, and ends the stream.
    pub(crate) fn replace_answer(&self, code: i32, message: &str) {
        if let Some((id, _)) = &self.0.call
            && self.push_now(error(id, code, message)).is_ok()
        {
            self.end();
        }
    }

    /// Answers the call with an error of the server's, which is JSON text, and ends the stream.
    pub(super) fn end_with(&self, error: &str) {
        if let Some((id, _)) = &self.0.call
            && self.push_now(answer_with(id, error)).is_ok()
        {
            self.end();
        }
    }

    /// Nothing more comes. Its events are kept for a while, for a client that resumes.
    pub fn end(&self) {
        self.finish(None);
    }

    /// The same of a call that was cancelled. Its client does not want what it has, so it makes room for others.
    pub(crate) fn end_cancelled(&self) {
        self.state().is_cancelled = true;
        self.end();
    }

    fn finish(&self, error: Option<Event>) {
        let until = Instant::now() + self.0.retention;
        let (reader, token, first, is_evictable) = {
            let mut state = self.state();
            let is_cancelled =
                state.is_cancelled || state.token.as_ref().is_some_and(CallToken::is_cancelled);
            let is_evictable = is_cancelled && !state.ring.is_answered();
            if let Some(error) = error {
                state.ring.push_paid(error);
            }
            state.ring.end();
            let first = state.until.is_none();
            state.until.get_or_insert(until);
            let is_evictable =
                is_evictable && !std::mem::replace(&mut state.is_evictable, is_evictable);
            (state.reader.take(), state.token.take(), first, is_evictable)
        };
        drop(token);
        self.0.reader_progress.notify_waiters();
        if let Some(reader) = reader {
            reader.wake();
        }
        if first {
            self.expire_at(until);
            if is_evictable {
                self.mark_evictable(until);
            }
        }
    }

    /// The response that reads it from the start.
    pub fn respond(&self) -> Response<Body> {
        self.read(Start::Beginning, false).unwrap_or_default()
    }

    /// The response that reads what no client has taken yet. If it is `with_position` it begins with an event that names where
    /// that is.
    pub(super) fn respond_unread(&self, with_position: bool) -> Response<Body> {
        self.read(Start::Unread, with_position).unwrap_or_default()
    }

    /// The response that reads what comes after event `after`. `None` if there was no such event.
    pub(super) fn respond_after(&self, after: u64) -> Option<Response<Body>> {
        self.read(Start::After(after), false)
    }

    /// Has [`close_due`](Self::released) return [soon](LET_GO_AFTER): the call was cancelled, or answered.
    pub fn close_soon(&self) {
        let until = Instant::now() + UPSTREAM_LINGER;
        {
            let mut state = self.state();
            state.is_cancelled |= !state.ring.is_answered();
            state.close_soon.get_or_insert(until);
        }
        self.0.close_due.notify_waiters();
    }

    /// Waits until its server has had its time after the call was cancelled, or answered. That the call was cancelled its
    /// token says, whatever the server makes of the cancel.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost when this is dropped.
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
            let until = self.state().close_soon;
            match until {
                Some(until) => return tokio::time::sleep_until(until).await,
                None => tokio::select! {
                    () = close_due => {}
                    () = &mut cancelled => self.close_soon(),
                },
            }
        }
    }

    /// How much it takes without its events.
    #[cfg(test)]
    pub(super) const SIZE: usize = size_of::<Inner>();

    /// A task writes it, which ends when the stream is closed.
    pub(super) fn written_by(&self, writer: AbortHandle) {
        let mut state = self.state();
        // It may have been closed meanwhile, or the task may be through.
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

    /// Drops its oldest event that may be dropped. `false` if there is none.
    fn drop_droppable(&self) -> bool {
        self.state().ring.drop_droppable()
    }

    /// Says once that the answer is here, as soon as it is.
    fn notify_answered(&self) {
        let (first, token) = {
            let mut state = self.state();
            let first = state.ring.is_answered() && !std::mem::replace(&mut state.answered, true);
            (first, state.token.take_if(|_| first))
        };
        if first {
            self.close_soon();
        }
        if let Some(token) = token {
            token.answered();
        }
    }

    fn fail(&self, message: &str) -> Result<(), Refused> {
        // A stream that is for no call goes on, and its server may say a lot.
        let first = !std::mem::replace(&mut self.state().logged_full, true);
        if first {
            tracing::warn!(
                stream = self.0.number,
                "no room for the events of a client that is away (--buffer)"
            );
        }
        if self.0.call.is_some() {
            self.end_with_error(INTERNAL_ERROR, message);
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
        f.write_str("the stream has ended, or has no room")
    }
}

impl std::error::Error for Refused {}
