//! Answers of calls that ended without their client, kept in the directory so that they survive this instance.
//!
//! 1. A call is noted when a stream of it goes without the answer, and not any more once its client is back. When it ends, its
//!    answer is kept as a client would get it here that comes back for this very stream.
//! 2. It is noted first, and then looked for: one that has ended meanwhile is found by whoever takes the note, and only one does.
//! 3. A stream that goes late, after its client is back on another one, notes its call too: then an answer is kept that nobody
//!    misses. One that has brought its answer, and goes before anybody saw that it ended, may not have been read: its answer is
//!    kept, too. What a client's connection took is not kept, except by an instance that leaves: its memory goes with it.
//! 4. An answer is kept under the generation of its session and the number of its call. Request ids are used again.
//! 5. As many are noted as may have no client in the library by default. What is beyond is left to this instance's own memory.
//! 6. The answer of a call that has ended is in the [`queue`], whatever becomes of its session. The [`writer`] writes it, and writes
//!    it again after the directory lost what it knew.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
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
    ids::{CallNumber, EventName, Incarnation, NamedCall, SessionHash},
};

mod queue;
mod writer;

/// How many calls are noted at most: 65,536.
const MAX_NOTED: usize = 64 * 1024;

/// A call of this instance: its session, the id of its request, and its number.
#[derive(Clone)]
pub(crate) struct Call {
    session: SessionId,
    request: RequestId,
    number: CallNumber,
}

/// A call whose client has gone.
pub(crate) struct Gone {
    pub(crate) call: Call,
    /// The generation of its session in which it runs.
    pub(crate) generation: Incarnation,
    /// An event of its stream, by which its client can come back, as the session manager names it.
    pub(crate) event: String,
    pub(crate) memory: Weak<dyn Remembers>,
}

/// What knows the answers of calls that have ended: the session manager.
pub(crate) trait Remembers: Send + Sync {
    /// The answer for a client that comes back with this event.
    fn answer(&self, session: &str, event: &str) -> Option<Arc<ServerJsonRpcMessage>>;
}

/// The calls whose clients have gone, and what becomes of their answers.
pub(crate) struct Answers {
    writer: Arc<AnswerWriter>,
    noted: Mutex<HashMap<CallId, Gone>>,
    /// Of the layers, which say whether a call goes on.
    calls: Mutex<Vec<Calls>>,
    /// How many are noted: nearly always none, and then nobody takes the lock.
    count: AtomicUsize,
    /// The number of the next call.
    next: AtomicU64,
    /// Whether also what was read is kept, because the instance leaves.
    keeps_all: AtomicBool,
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
    fn name(&self) -> NamedCall {
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
            noted: Mutex::default(),
            calls: Mutex::default(),
            count: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            keeps_all: AtomicBool::new(false),
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
    pub(crate) fn number(&self) -> CallNumber {
        CallNumber::new(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// What stands behind the ids of the events of a stream: of which generation of its session it is, and of which call.
    pub(crate) fn signature(generation: Incarnation, call: Option<&Call>) -> String {
        match call.map(|call| (call.numbers(), call)) {
            None => EventName::behind(generation, None),
            Some((Some(numbers), _)) => EventName::behind(generation, Some(numbers)),
            Some((None, call)) => EventName::new("", generation, Some(call.name())).to_string(),
        }
    }

    /// Asks these whether a call goes on.
    pub(crate) fn watch(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    /// A stream of a call has gone, and its client may not have read the answer.
    pub(crate) fn gone(&self, gone: Gone) {
        let Some(id) = self.in_flight(&gone.call) else {
            return keep(gone, self.writer.reserve());
        };
        let call = gone.call.clone();
        if let Some(not_noted) = self.note(id, gone) {
            keep(not_noted, self.writer.reserve());
        }
        // It may have ended before it was noted. Otherwise it is told when it does.
        self.keep_if_ended(id, &call);
    }

    /// Keeps the answers of the calls that have ended and were not told of yet. Those that have not stay noted.
    pub(crate) fn keep_ended(&self) {
        let noted: Vec<_> = {
            let noted = self.noted();
            let calls = noted.iter().map(|(id, gone)| (*id, gone.call.clone()));
            calls.collect()
        };
        for (id, call) in noted {
            self.keep_if_ended(id, &call);
        }
    }

    fn keep_if_ended(&self, id: CallId, call: &Call) {
        if self.in_flight(call) != Some(id)
            && let Some((gone, place)) = self.take(id, Some(call.number))
        {
            keep(gone, place);
        }
    }

    /// The client of a call is back.
    pub(crate) fn back(&self, call: &Call) {
        if self.are_there()
            && let Some(id) = self.in_flight(call)
        {
            self.take(id, Some(call.number));
        }
    }

    /// A call has ended.
    pub(crate) fn ended(&self, call: &CallInfo) {
        if self.are_there()
            && let Some((gone, place)) = self.take(call.id(), None)
        {
            keep(gone, place);
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
    pub(crate) fn closed(&self, session: &str) {
        if self.are_there() {
            let mut noted = self.noted();
            noted.retain(|_, gone| *gone.call.session != *session);
            self.count.store(noted.len(), Ordering::Release);
        }
    }

    /// From now on every answer is kept.
    pub(crate) fn keep_all(&self) {
        self.keeps_all.store(true, Ordering::Release);
    }

    /// Whether also the answers are kept that clients have read.
    pub(crate) fn keeps_all(&self) -> bool {
        self.keeps_all.load(Ordering::Acquire)
    }

    /// Returns when the answers of all calls that have ended are written, or at `until`, and whether they are.
    pub(crate) async fn flush(&self, until: Option<Instant>) -> bool {
        self.keep_ended();
        self.writer.flush(until).await
    }

    /// Notes a call. Of two that had one request id the later is in flight: the other is returned, or this one if there is no room.
    fn note(&self, id: CallId, gone: Gone) -> Option<Gone> {
        let mut noted = self.noted();
        let has_room = noted.len() < MAX_NOTED;
        let not_noted = match noted.entry(id) {
            Entry::Vacant(entry) if has_room => {
                entry.insert(gone);
                None
            }
            Entry::Occupied(mut entry) if entry.get().call.number <= gone.call.number => {
                Some(entry.insert(gone))
            }
            Entry::Vacant(_) | Entry::Occupied(_) => Some(gone),
        };
        self.count.store(noted.len(), Ordering::Release);
        not_noted
    }

    /// Notes a call no more: this one, or whichever is noted.
    fn take(&self, id: CallId, number: Option<CallNumber>) -> Option<(Gone, ReservedPlace)> {
        let mut noted = self.noted();
        let its = noted.get(&id).map(|gone| gone.call.number);
        let is_it = number.is_none_or(|number| its == Some(number));
        let gone = is_it.then(|| noted.remove(&id)).flatten();
        self.count.store(noted.len(), Ordering::Release);
        // Under the lock of `noted`, so that `flush` finds a call noted, or its place reserved.
        gone.map(|gone| (gone, self.writer.reserve()))
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.noted().len()
    }

    fn are_there(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    fn noted(&self) -> MutexGuard<'_, HashMap<CallId, Gone>> {
        lock(&self.noted)
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
fn keep(gone: Gone, place: ReservedPlace) {
    let Gone {
        call,
        generation,
        event,
        memory,
    } = gone;
    let memory = memory.upgrade();
    if let Some(answer) = memory.and_then(|memory| memory.answer(&call.session, &event)) {
        let key = AnswerKey {
            session: SessionHash::of(&call.session),
            generation,
            call: call.number,
        };
        place.put(key, &answer);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
