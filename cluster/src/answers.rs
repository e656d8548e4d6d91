//! Answers of calls that ended without their client, kept in the directory so that they survive this instance.
//!
//! 1. A call becomes pending when a stream of it ends without the answer, and is not pending any more once its client is back. When it ends, its
//!    answer is kept as a client would get it here that comes back for this very stream.
//! 2. It is marked pending first, and then looked for: one that has ended meanwhile is found by the thread that takes it, and only one does.
//! 3. A stream that ends late, after its client is back on another one, marks its call pending too: then an answer is kept that nobody
//!    misses. One that has brought its answer, and goes before anybody saw that it ended, may not have been read: its answer is
//!    kept, too. What a client's connection took is not kept, except by an instance that leaves: its memory goes with it.
//! 4. An answer is kept under the generation of its session and the number of its call. Request ids are used again.
//! 5. As many are pending as may have no client in the library by default. What is beyond is left to this instance's own memory.
//! 6. The answer of a call that has ended is in the [`queue`], whatever becomes of its session. The [`writer`] writes it, and writes
//!    it again after the directory lost what it knew.

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

/// Maximum number of pending calls: 65,536.
const MAX_PENDING: usize = 64 * 1024;

/// A call of this instance: its session, the id of its request, and its number.
#[derive(Clone)]
pub(crate) struct Call {
    session: SessionId,
    request: RequestId,
    number: CallNumber,
}

/// A call whose client has disconnected.
pub(crate) struct DetachedCall {
    pub(crate) call: Call,
    /// The generation of its session in which it runs.
    pub(crate) generation: Incarnation,
    /// An event of its stream, by which its client can come back, as the session manager names it.
    pub(crate) event: String,
    pub(crate) source: Weak<dyn AnswerSource>,
}

/// What knows the answers of calls that have ended: the session manager.
pub(crate) trait AnswerSource: Send + Sync {
    /// The answer for a client that comes back with this event.
    fn answer(&self, session: &str, event: &str) -> Option<Arc<ServerJsonRpcMessage>>;
}

/// The calls whose clients have disconnected, and what becomes of their answers.
pub(crate) struct Answers {
    writer: Arc<AnswerWriter>,
    pending: Mutex<HashMap<CallId, DetachedCall>>,
    /// Of the layers, which say whether a call goes on.
    calls: Mutex<Vec<Calls>>,
    /// How many are pending: nearly always none, and then nobody takes the lock.
    count: AtomicUsize,
    /// The number of the next call.
    next: AtomicU64,
    /// Whether also what was read is kept, because the instance leaves.
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

    /// Reads a call as an event id names it. `None` if it is none.
    pub(crate) fn read(session: SessionId, named: &NamedCall) -> Option<Self> {
        let request: NumberOrString = serde_json::from_str(named.request.as_deref()?).ok()?;
        Some(Self::new(session, &request, named.number))
    }

    /// As an event id names it.
    fn named(&self) -> NamedCall {
        let request = match &self.request {
            RequestId::Number(number) => number.to_string(),
            RequestId::String(string) => serde_json::Value::from(string.as_ref()).to_string(),
        };
        NamedCall {
            number: self.number,
            request: Some(request),
        }
    }

    /// Its number and the id of its request, if that is a number that needs no encoding.
    fn numbers(&self) -> Option<(CallNumber, u64)> {
        match self.request {
            RequestId::Number(request) => Some((self.number, request.try_into().ok()?)),
            RequestId::String(_) => None,
        }
    }

    /// Whether a message is its answer.
    pub(crate) fn is_answered(&self, message: &ServerJsonRpcMessage) -> bool {
        let answered = match message {
            ServerJsonRpcMessage::Response(response) => Some(&response.id),
            ServerJsonRpcMessage::Error(error) => error.id.as_ref(),
            ServerJsonRpcMessage::Request(_) | ServerJsonRpcMessage::Notification(_) => None,
        };
        match (&self.request, answered) {
            (RequestId::Number(its), Some(NumberOrString::Number(number))) => its == number,
            (RequestId::String(its), Some(NumberOrString::String(string))) => its == string,
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
            count: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            retains_all: AtomicBool::new(false),
        })
    }

    /// Writes answers to the directory for as long as it is polled. It is to be run once.
    pub(crate) fn write(&self) -> impl Future<Output = ()> + Send + use<> {
        self.writer.clone().run()
    }

    /// The directory may have lost what was written there.
    pub(crate) fn write_again(&self) {
        self.writer.write_again();
    }

    /// Whether answers are still to be written that the directory has refused, or may have lost.
    pub(crate) fn are_late(&self) -> bool {
        self.writer.is_late()
    }

    /// A number for a new call.
    pub(crate) fn next_number(&self) -> CallNumber {
        CallNumber::new(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// The suffix of the ids of the events of a stream: of which generation of its session it is, and of which call.
    pub(crate) fn event_suffix(generation: Incarnation, call: Option<&Call>) -> String {
        match call.map(|call| (call.numbers(), call)) {
            None => ClusterEventId::suffix(generation, None),
            Some((Some(numbers), _)) => ClusterEventId::suffix(generation, Some(numbers)),
            Some((None, call)) => {
                ClusterEventId::new("", generation, Some(call.named())).to_string()
            }
        }
    }

    /// Asks these whether a call goes on.
    pub(crate) fn watch(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    /// A stream of a call has ended, and its client may not have read the answer.
    pub(crate) fn on_detached(&self, detached: DetachedCall) {
        let Some(id) = self.in_flight(&detached.call) else {
            return enqueue(detached, self.writer.reserve());
        };
        let call = detached.call.clone();
        if let Some(rejected) = self.mark_pending(id, detached) {
            enqueue(rejected, self.writer.reserve());
        }
        // It may have ended before it was marked pending. Otherwise it is told when it does.
        self.enqueue_if_ended(id, &call);
    }

    /// Keeps the answers of the calls that have ended and were not told of yet. Those that have not stay pending.
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

    /// The client of a call is back.
    pub(crate) fn on_resumed(&self, call: &Call) {
        if self.has_pending()
            && let Some(id) = self.in_flight(call)
        {
            self.take_pending(id, Some(call.number));
        }
    }

    /// A call has ended.
    pub(crate) fn on_call_ended(&self, call: &CallInfo) {
        if self.has_pending()
            && let Some((detached, place)) = self.take_pending(call.id(), None)
        {
            enqueue(detached, place);
        }
    }

    /// The call in flight that has the session and the request id of this one.
    fn in_flight(&self, call: &Call) -> Option<CallId> {
        let layers = lock(&self.calls).clone();
        let mut found = layers
            .iter()
            .filter_map(|calls| calls.find(&call.session, &call.request));
        found.next()
    }

    /// A session has closed. Of its calls only those have answers that have ended.
    pub(crate) fn on_session_closed(&self, session: &str) {
        if self.has_pending() {
            let mut pending = self.pending();
            pending.retain(|_, detached| *detached.call.session != *session);
            self.count.store(pending.len(), Ordering::Release);
        }
    }

    /// From now on every answer is kept.
    pub(crate) fn retain_all(&self) {
        self.retains_all.store(true, Ordering::Release);
    }

    /// Whether also the answers are kept that clients have read.
    pub(crate) fn retains_all(&self) -> bool {
        self.retains_all.load(Ordering::Acquire)
    }

    /// Returns when the answers of all calls that have ended are written, or at `until`, and whether they are.
    pub(crate) async fn flush(&self, until: Option<Instant>) -> bool {
        self.enqueue_ended();
        self.writer.flush(until).await
    }

    /// Marks a call pending. Of two that had one request id the later is in flight: the other is returned, or this one if there is no room.
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
        self.count.store(pending.len(), Ordering::Release);
        rejected
    }

    /// Takes a pending call: this one, or whichever is pending.
    fn take_pending(
        &self,
        id: CallId,
        number: Option<CallNumber>,
    ) -> Option<(DetachedCall, ReservedPlace)> {
        let mut pending = self.pending();
        let its = pending.get(&id).map(|detached| detached.call.number);
        let is_it = number.is_none_or(|number| its == Some(number));
        let detached = is_it.then(|| pending.remove(&id)).flatten();
        self.count.store(pending.len(), Ordering::Release);
        // Under the lock of `pending`, so that `flush` finds a call pending, or its place reserved.
        detached.map(|detached| (detached, self.writer.reserve()))
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.pending().len()
    }

    fn has_pending(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    fn pending(&self) -> MutexGuard<'_, HashMap<CallId, DetachedCall>> {
        lock(&self.pending)
    }
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers")
            .field("noted", &self.count)
            .finish_non_exhaustive()
    }
}

/// Keeps the answer of a call that has ended, if it has one.
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
