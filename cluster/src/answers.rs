//! Stores answers for clients that were disconnected when their calls ended.
//!
//! The answers are stored in the directory, where they outlive this instance.
//!
//! 1. When one of a call's streams ends before the answer was delivered, the call is marked pending until its client resumes. If the call
//!    ends first, its answer is stored in the form that a client resuming that stream would receive.
//! 2. Once a call has been marked pending, it is looked up again, because it may have ended in the meantime. Only one thread can take an
//!    ended call, and that thread stores its answer.
//! 3. A stream may also end late, after its client has already resumed on another stream. The call is still marked pending, so an answer is
//!    stored that no client needs. If a stream is dropped after sending the answer but before its end has been polled, the client might not
//!    have read the answer, so it is stored too. Once the client's connection has taken an answer, only an instance that is shutting down
//!    stores it, because its memory is about to be lost.
//! 4. Because request ids are reused, an answer is stored under its session's generation and its call's number instead.
//! 5. At most [`MAX_PENDING`] calls can be pending, which is the library's default limit for calls without a client. The answers to any
//!    further calls exist only in this instance's memory.
//! 6. The answer to an ended call is put in the [`queue`] and stays there even after its session has closed. From there, the [`writer`]
//!    writes it to the directory, and rewrites it if the directory has lost data.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
};

use mcp_cancel_on_disconnect::{CallId, CallInfo, Calls, RequestId};
use rmcp::{
    model::{NumberOrString, ServerJsonRpcMessage},
    transport::streamable_http_server::session::SessionId,
};
use tokio::time::Instant;

use self::{
    queue::AnswerKey,
    writer::{AnswerWriter, ReservedPlace},
};
use crate::{
    directory::Limited,
    ids::{CallNumber, ClusterEventId, Incarnation, NamedCall, SessionHash},
    lock::lock,
};

mod queue;
mod writer;

/// Maximum number of pending calls.
const MAX_PENDING: usize = 64 * 1024;

/// Identifies a call on this instance by its session, request id and number.
#[derive(Clone)]
pub(crate) struct Call {
    session: SessionId,
    request: RequestId,
    number: CallNumber,
}

/// A call whose stream was lost, so its client might not have received the answer.
pub(crate) struct DetachedCall {
    pub(crate) call: Call,
    /// The session generation in which the call runs.
    pub(crate) generation: Incarnation,
    /// The plain id of the last event on its stream from which a client can resume.
    pub(crate) event: String,
    /// The session manager, which retains the answer once the call has ended.
    pub(crate) source: Weak<dyn AnswerSource>,
}

/// Provides the answers to ended calls. Implemented by the session manager.
pub(crate) trait AnswerSource: Send + Sync {
    /// Returns the answer for a client resuming from `event`, or `None` if it is not available.
    fn answer(&self, session: &str, event: &str) -> Option<Arc<ServerJsonRpcMessage>>;
}

/// Calls whose clients have disconnected, and the answers to the calls that have ended.
pub(crate) struct Answers {
    writer: Arc<AnswerWriter>,
    pending: Mutex<HashMap<CallId, DetachedCall>>,
    /// Every layer's calls, used to check whether a call is still in flight.
    calls: Mutex<Vec<Calls>>,
    /// Number of pending calls. While it is zero, ending a call takes no lock.
    pending_count: AtomicUsize,
    /// The next call's number.
    next: AtomicU64,
    /// Whether to store even answers that clients have read. Set once the instance is shutting down.
    retains_all: AtomicBool,
}

// === impl Call ===

impl Call {
    pub(crate) fn new(session: SessionId, request: &NumberOrString, number: CallNumber) -> Self {
        Self {
            session,
            request: request.into(),
            number,
        }
    }

    /// Parses the call that an event id refers to. Returns `None` if its request id is missing or invalid.
    pub(crate) fn parse(session: SessionId, named: &NamedCall) -> Option<Self> {
        let request: NumberOrString = serde_json::from_str(named.request.as_deref()?).ok()?;
        Some(Self::new(session, &request, named.number))
    }

    /// Returns the call in the form used in event ids.
    fn to_named_call(&self) -> NamedCall {
        let request = match &self.request {
            RequestId::Number(number) => number.to_string(),
            RequestId::String(string) => serde_json::Value::from(string.as_ref()).to_string(),
        };
        NamedCall {
            number: self.number,
            request: Some(request),
        }
    }

    /// Returns the call's number and request id.
    ///
    /// Returns `None` if the request id is a string or a negative number.
    fn numbers(&self) -> Option<(CallNumber, u64)> {
        match self.request {
            RequestId::Number(request) => Some((self.number, request.try_into().ok()?)),
            RequestId::String(_) => None,
        }
    }

    /// Returns `true` if a message answers the call.
    pub(crate) fn is_answered_by(&self, message: &ServerJsonRpcMessage) -> bool {
        let answered_id = match message {
            ServerJsonRpcMessage::Response(response) => Some(&response.id),
            ServerJsonRpcMessage::Error(error) => error.id.as_ref(),
            ServerJsonRpcMessage::Request(_) | ServerJsonRpcMessage::Notification(_) => None,
        };
        match (&self.request, answered_id) {
            (RequestId::Number(request), Some(NumberOrString::Number(number))) => request == number,
            (RequestId::String(request), Some(NumberOrString::String(string))) => request == string,
            _ => false,
        }
    }
}

// === impl Answers ===

impl Answers {
    pub(crate) fn new(directory: Limited) -> Arc<Self> {
        Arc::new(Self {
            writer: AnswerWriter::new(directory),
            pending: Mutex::default(),
            calls: Mutex::default(),
            pending_count: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            retains_all: AtomicBool::new(false),
        })
    }

    /// Returns the future that writes answers to the directory. Must be called at most once.
    pub(crate) fn write(&self) -> impl Future<Output = ()> + Send + use<> {
        self.writer.clone().run()
    }

    /// Rewrites all answers. Called when the directory may have lost some of them.
    pub(crate) fn write_again(&self) {
        self.writer.write_again();
    }

    /// Returns `true` if any answer is late.
    ///
    /// An answer is late if, 1 s after its call ended, it is still not known to be in the directory.
    pub(crate) fn has_late_answers(&self) -> bool {
        self.writer.has_late_answers()
    }

    /// Assigns the next call number.
    pub(crate) fn next_number(&self) -> CallNumber {
        CallNumber::new(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the suffix for a stream's event ids: its session's generation, and its call, if any.
    pub(crate) fn event_suffix(generation: Incarnation, call: Option<&Call>) -> String {
        match call.map(|call| (call.numbers(), call)) {
            None => ClusterEventId::suffix(generation, None),
            Some((Some(numbers), _)) => ClusterEventId::suffix(generation, Some(numbers)),
            Some((None, call)) => {
                ClusterEventId::new("", generation, Some(call.to_named_call())).to_string()
            }
        }
    }

    /// Adds a layer's calls, which are used to check whether a call is still in flight.
    pub(crate) fn add_calls(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    /// Called when a call's stream has ended and its client might not have read the answer.
    ///
    /// Marks the call pending if it is still in flight. If the call has already ended or cannot be marked pending, its answer is queued
    /// instead.
    pub(crate) fn on_detached(&self, detached: DetachedCall) {
        let Some(id) = self.in_flight(&detached.call) else {
            return enqueue(detached, self.writer.reserve());
        };
        let call = detached.call.clone();
        if let Some(rejected) = self.mark_pending(id, detached) {
            enqueue(rejected, self.writer.reserve());
        }
        // The call may have ended before it was marked pending. If it ends later, `on_call_ended` takes it.
        self.enqueue_if_ended(id, &call);
    }

    /// Queues the answers to pending calls whose end has not been reported yet.
    ///
    /// Calls still in flight stay pending.
    pub(crate) fn enqueue_ended(&self) {
        let pending: Vec<_> = {
            let pending = self.pending();
            let calls = pending
                .iter()
                .map(|(id, detached)| (*id, detached.call.clone()));
            calls.collect()
        };
        for (id, call) in pending {
            self.enqueue_if_ended(id, &call);
        }
    }

    fn enqueue_if_ended(&self, id: CallId, call: &Call) {
        if self.in_flight(call) != Some(id)
            && let Some((detached, place)) = self.take_pending(id, Some(call.number))
        {
            enqueue(detached, place);
        }
    }

    /// Called when a call's client has resumed. A call still in flight is then no longer pending.
    pub(crate) fn on_resumed(&self, call: &Call) {
        if self.has_pending()
            && let Some(id) = self.in_flight(call)
        {
            self.take_pending(id, Some(call.number));
        }
    }

    /// Called when a call has ended. Queues its answer if it was pending.
    pub(crate) fn on_call_ended(&self, call: &CallInfo) {
        if self.has_pending()
            && let Some((detached, place)) = self.take_pending(call.id(), None)
        {
            enqueue(detached, place);
        }
    }

    /// Returns the id of the in-flight call with the session and request id of `call`, if any.
    fn in_flight(&self, call: &Call) -> Option<CallId> {
        let layers = lock(&self.calls).clone();
        let mut ids = layers
            .iter()
            .filter_map(|calls| calls.find(&call.session, &call.request));
        ids.next()
    }

    /// Called when a session has closed. Drops its pending calls, which can no longer be answered.
    pub(crate) fn on_session_closed(&self, session: &str) {
        if self.has_pending() {
            let mut pending = self.pending();
            pending.retain(|_, detached| *detached.call.session != *session);
            self.pending_count.store(pending.len(), Ordering::Release);
        }
    }

    /// Starts storing every answer, even if its client has read it.
    pub(crate) fn retain_all(&self) {
        self.retains_all.store(true, Ordering::Release);
    }

    /// Returns `true` if even answers that clients have read are stored.
    pub(crate) fn retains_all(&self) -> bool {
        self.retains_all.load(Ordering::Acquire)
    }

    /// Waits until every answer to an ended call has been written or evicted, or has expired.
    ///
    /// Returns `true` unless `deadline` passed first.
    pub(crate) async fn flush(&self, deadline: Option<Instant>) -> bool {
        self.enqueue_ended();
        self.writer.flush(deadline).await
    }

    /// Marks a call pending, and returns the displaced or rejected call, if any.
    ///
    /// If another pending call has the same id, the call with the higher number stays pending, because that call is in flight. If there is
    /// no room, the new call is rejected.
    fn mark_pending(&self, id: CallId, detached: DetachedCall) -> Option<DetachedCall> {
        let mut pending = self.pending();
        let has_room = pending.len() < MAX_PENDING;
        let rejected = match pending.entry(id) {
            Entry::Vacant(entry) if has_room => {
                entry.insert(detached);
                None
            }
            Entry::Occupied(mut entry) if entry.get().call.number <= detached.call.number => {
                Some(entry.insert(detached))
            }
            Entry::Vacant(_) | Entry::Occupied(_) => Some(detached),
        };
        self.pending_count.store(pending.len(), Ordering::Release);
        rejected
    }

    /// Takes a pending call and reserves a place for its answer.
    ///
    /// Returns `None` if the call is not pending, or if `number` is given but differs from the call's number.
    fn take_pending(
        &self,
        id: CallId,
        number: Option<CallNumber>,
    ) -> Option<(DetachedCall, ReservedPlace)> {
        let mut pending = self.pending();
        let pending_number = pending.get(&id).map(|detached| detached.call.number);
        let is_match = number.is_none_or(|number| pending_number == Some(number));
        let detached = is_match.then(|| pending.remove(&id)).flatten();
        self.pending_count.store(pending.len(), Ordering::Release);
        // Reserve the place while `pending` is still locked, so that `flush` finds either the pending call or its place.
        detached.map(|detached| (detached, self.writer.reserve()))
    }

    #[cfg(test)]
    pub(crate) fn pending_count(&self) -> usize {
        self.pending().len()
    }

    fn has_pending(&self) -> bool {
        self.pending_count.load(Ordering::Acquire) > 0
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<CallId, DetachedCall>> {
        lock(&self.pending)
    }
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers")
            .field("pending", &self.pending_count)
            .finish_non_exhaustive()
    }
}

/// Queues the answer to an ended call.
///
/// Frees the place if the session manager does not have the answer.
fn enqueue(detached: DetachedCall, place: ReservedPlace) {
    let DetachedCall {
        call,
        generation,
        event,
        source,
    } = detached;
    let source = source.upgrade();
    if let Some(answer) = source.and_then(|source| source.answer(&call.session, &event)) {
        let key = AnswerKey {
            session: SessionHash::of(&call.session),
            generation,
            call: call.number,
        };
        place.put(key, &answer);
    }
}

#[cfg(test)]
mod tests;
