//! Answers of calls that ended without their client, kept in the directory so that they survive this instance.
//!
//! 1. A call is noted when a stream of it goes without the answer, and not any more once its client is back. When it ends, its
//!    answer is kept as a client would get it here that comes back for this very stream.
//! 2. It is noted first, and then looked for: one that has ended meanwhile is found by whoever takes the note, and only one does.
//! 3. A stream that goes late, after its client is back on another one, notes its call too: then an answer is kept that nobody
//!    misses. One that has brought its answer, and goes before anybody saw that it ended, may not have been read: its answer is
//!    kept, too. What a client's connection took is not kept, except by an instance that leaves: its memory goes with it.
//! 4. An answer is kept under the life of its session and the number of its call. Request ids are used again.
//! 5. As many are noted as may have no client in the library by default, and as much is on its way to the directory as it is
//!    given in a short while. What is beyond is left to this instance's own memory. An instance that leaves has its answers wait
//!    for their turn instead.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use mcp_cancel_on_disconnect::{CallId, CallInfo, Calls, RequestId};
use rmcp::{
    model::{NumberOrString, ServerJsonRpcMessage},
    transport::streamable_http_server::session::SessionId,
};
use tokio::{
    runtime::Handle,
    sync::{Semaphore, watch},
    time::{sleep, timeout},
};
use tracing::debug;

use crate::{
    directory::{Directory as _, Limited, MAX_ANSWER},
    ids::{CallNumber, EventName, Incarnation, NamedCall, SessionHash},
};

/// How many calls are noted at most: 65,536.
const MAX_NOTED: usize = 64 * 1024;

/// How many answers are on their way at most: 64, of at most 1 MiB each. When the instance leaves, [`MAX_NOTED`] more may wait.
const MAX_ON_THEIR_WAY: usize = 64;

/// How often an answer is tried that the directory does not take: 10 times.
const TRIES: u32 = 10;

/// How long after a try the next comes: 1 s.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// How long an instance that leaves waits for the answers on their way: 2 s.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

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
    /// The life of its session in which it runs.
    pub(crate) life: Incarnation,
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
    directory: Limited,
    noted: Mutex<HashMap<CallId, Gone>>,
    /// Of the layers, which say whether a call goes on.
    calls: Mutex<Vec<Calls>>,
    /// How many are noted: nearly always none, and then nobody takes the lock.
    count: AtomicUsize,
    /// The number of the next call.
    next: AtomicU64,
    /// Whether also what was read is kept, because the instance leaves.
    keeps_all: AtomicBool,
    /// How many are on their way, or wait for that.
    on_their_way: watch::Sender<usize>,
    places: Semaphore,
}

/// An answer that is on its way to the directory, until this is dropped.
struct OnItsWay(Arc<Answers>);

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
            directory,
            noted: Mutex::default(),
            calls: Mutex::default(),
            count: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            keeps_all: AtomicBool::new(false),
            on_their_way: watch::Sender::new(0),
            places: Semaphore::new(MAX_ON_THEIR_WAY),
        })
    }

    /// A number for a new call.
    pub(crate) fn number(&self) -> CallNumber {
        CallNumber::new(self.next.fetch_add(1, Ordering::Relaxed))
    }

    /// What stands behind the ids of the events of a stream: of which life of its session it is, and of which call.
    pub(crate) fn signature(life: Incarnation, call: Option<&Call>) -> String {
        match call.map(|call| (call.numbers(), call)) {
            None => EventName::behind(life, None),
            Some((Some(numbers), _)) => EventName::behind(life, Some(numbers)),
            Some((None, call)) => EventName::new("", life, Some(call.name())).to_string(),
        }
    }

    /// Asks these whether a call goes on.
    pub(crate) fn watch(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    /// A stream of a call has gone, and its client may not have read the answer.
    pub(crate) fn gone(self: &Arc<Self>, gone: Gone) {
        let Some(id) = self.in_flight(&gone.call) else {
            return self.keep(gone, self.set_out());
        };
        let call = gone.call.clone();
        if let Some(not_noted) = self.note(id, gone) {
            self.keep(not_noted, self.set_out());
        }
        // It may have ended before it was noted. Otherwise it is told when it does.
        self.keep_if_ended(id, &call);
    }

    /// Keeps the answers of the calls that have ended and were not told of yet. Those that have not stay noted.
    pub(crate) fn keep_ended(self: &Arc<Self>) {
        let noted: Vec<_> = {
            let noted = self.noted();
            let calls = noted.iter().map(|(id, gone)| (*id, gone.call.clone()));
            calls.collect()
        };
        for (id, call) in noted {
            self.keep_if_ended(id, &call);
        }
    }

    fn keep_if_ended(self: &Arc<Self>, id: CallId, call: &Call) {
        if self.in_flight(call) != Some(id)
            && let Some((gone, place)) = self.take(id, Some(call.number))
        {
            self.keep(gone, place);
        }
    }

    /// The client of a call is back.
    pub(crate) fn back(self: &Arc<Self>, call: &Call) {
        if self.are_there()
            && let Some(id) = self.in_flight(call)
        {
            self.take(id, Some(call.number));
        }
    }

    /// A call has ended.
    pub(crate) fn ended(self: &Arc<Self>, call: &CallInfo) {
        if self.are_there()
            && let Some((gone, place)) = self.take(call.id(), None)
        {
            self.keep(gone, place);
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

    /// Keeps the answer of a call that has ended, if it has one.
    #[allow(clippy::disallowed_methods, reason = "no request waits for it")]
    fn keep(self: &Arc<Self>, gone: Gone, place: Option<OnItsWay>) {
        let Gone {
            call,
            life,
            event,
            memory,
        } = gone;
        let memory = memory.upgrade();
        let Some(answer) = memory.and_then(|memory| memory.answer(&call.session, &event)) else {
            return;
        };
        let Some(on_its_way) = place else {
            debug!(target: "mcp_cancel_cluster", "an answer is not kept elsewhere: too many are on their way");
            return;
        };
        // A stream can also go where its runtime ends.
        let Ok(runtime) = Handle::try_current() else {
            return;
        };
        runtime.spawn(async move {
            on_its_way.0.write(&call, life, &answer).await;
        });
    }

    async fn write(&self, call: &Call, life: Incarnation, answer: &ServerJsonRpcMessage) {
        // As many are there as text at once.
        let _place = self.places.acquire().await;
        let Ok(answer) = serde_json::to_vec(answer).map(Bytes::from) else {
            return;
        };
        if answer.len() > MAX_ANSWER {
            debug!(target: "mcp_cancel_cluster", bytes = answer.len(), "an answer is not kept elsewhere: it is too large");
            return;
        }
        let session = SessionHash::of(&call.session);
        for _ in 0..TRIES {
            let kept = self
                .directory
                .keep_answer(session, life, call.number, answer.clone());
            match kept.await {
                Ok(()) => return,
                Err(error) => {
                    debug!(target: "mcp_cancel_cluster", %error, "an answer is not kept yet")
                }
            }
            sleep(TRY_AGAIN).await;
        }
    }

    /// A session has closed. Nothing of it comes by any more.
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

    /// Waits for the answers of all calls that have ended.
    pub(crate) async fn settle(self: &Arc<Self>) {
        self.keep_ended();
        let mut on_their_way = self.on_their_way.subscribe();
        let all = on_their_way.wait_for(|on_their_way| *on_their_way == 0);
        // What takes longer is lost with this instance.
        let _settled = timeout(LEAVE_WITHIN, all).await;
    }

    /// Takes a place on the way to the directory, if there is one left.
    fn set_out(self: &Arc<Self>) -> Option<OnItsWay> {
        let wait = if self.keeps_all() { MAX_NOTED } else { 0 };
        let has_room = self.on_their_way.send_if_modified(|on_their_way| {
            let has_room = *on_their_way < MAX_ON_THEIR_WAY + wait;
            *on_their_way += usize::from(has_room);
            has_room
        });
        has_room.then(|| OnItsWay(self.clone()))
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
    fn take(
        self: &Arc<Self>,
        id: CallId,
        number: Option<CallNumber>,
    ) -> Option<(Gone, Option<OnItsWay>)> {
        let mut noted = self.noted();
        let its = noted.get(&id).map(|gone| gone.call.number);
        let is_it = number.is_none_or(|number| its == Some(number));
        let gone = is_it.then(|| noted.remove(&id)).flatten();
        self.count.store(noted.len(), Ordering::Release);
        // Under the lock: whoever settles finds it noted or on its way.
        gone.map(|gone| (gone, self.set_out()))
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

// === impl OnItsWay ===

impl Drop for OnItsWay {
    fn drop(&mut self) {
        self.0.on_their_way.send_modify(|left| *left -= 1);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
