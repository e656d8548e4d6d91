//! Answers of calls that ended without their client, kept in the directory so that they survive this instance.
//!
//! 1. A call is noted when a stream of it goes without the answer, and not any more once its client is back, or it has
//!    ended. What comes by meanwhile for a noted call is its answer, and is kept.
//! 2. A stream that goes late, after its client is back on another one, notes its call too: then an answer is kept that nobody
//!    misses. The other way round one is lost to the directory: an answer that came by before its client went, who had not read
//!    it. It is in this instance's memory alone.
//! 3. An instance that leaves keeps every answer: its memory goes with it.
//! 4. As many are noted as may have no client in the library by default, and as much is on its way to the directory as it is
//!    given in a short while. What is beyond is left to this instance's own memory.

use std::{
    collections::HashMap,
    fmt,
    pin::pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use mcp_cancel_on_disconnect::{CallInfo, Calls, RequestId};
use rmcp::{
    model::{NumberOrString, ServerJsonRpcMessage},
    transport::streamable_http_server::session::SessionId,
};
use tokio::{
    sync::{Notify, Semaphore},
    time::{sleep, timeout},
};
use tracing::debug;

use crate::{
    directory::{Directory as _, Limited, MAX_ANSWER},
    ids::{EventName, Incarnation, SessionHash},
};

/// How many calls are noted at most: 65,536.
const MAX_NOTED: usize = 64 * 1024;

/// How many answers are on their way at most: 64, of at most 1 MiB each.
const MAX_ON_THEIR_WAY: usize = 64;

/// How often an answer is tried that the directory does not take: 10 times.
const TRIES: u32 = 10;

/// How long after a try the next comes: 1 s.
const TRY_AGAIN: Duration = Duration::from_secs(1);

/// How long an instance that leaves waits for the answers on their way: 2 s.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// A call of this instance: its session and the id of its request.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Call {
    session: SessionId,
    request: RequestId,
}

/// The calls whose clients have gone, and what becomes of their answers.
pub(crate) struct Answers {
    directory: Limited,
    /// With the life of its session in which each runs.
    noted: Mutex<HashMap<Call, Incarnation>>,
    /// Of the layers, which say whether a call goes on.
    calls: Mutex<Vec<Calls>>,
    /// How many are noted: nearly always none, and then nobody takes the lock.
    count: AtomicUsize,
    /// Whether every answer is kept, because the instance leaves.
    keeps_all: AtomicBool,
    on_their_way: Arc<Semaphore>,
    /// One is not on its way any more.
    landed: Notify,
}

// === impl Call ===

impl Call {
    pub(crate) fn new(session: SessionId, request: &NumberOrString) -> Self {
        let request = request.into();
        Self { session, request }
    }

    /// Reads a request id as it stands in an event id. `None` if it is none.
    pub(crate) fn read(session: SessionId, request: &str) -> Option<Self> {
        let request: NumberOrString = serde_json::from_str(request).ok()?;
        Some(Self::new(session, &request))
    }

    /// The id of its request, as JSON text.
    pub(crate) fn id(&self) -> String {
        match &self.request {
            RequestId::Number(number) => number.to_string(),
            RequestId::String(string) => serde_json::Value::from(string.as_ref()).to_string(),
        }
    }

    /// The same, if it is a number that needs no encoding.
    pub(crate) fn number(&self) -> Option<u64> {
        match self.request {
            RequestId::Number(number) => number.try_into().ok(),
            RequestId::String(_) => None,
        }
    }

    pub(crate) fn is(&self, request: &NumberOrString) -> bool {
        match (&self.request, request) {
            (RequestId::Number(its), NumberOrString::Number(number)) => its == number,
            (RequestId::String(its), NumberOrString::String(string)) => its == string,
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
            keeps_all: AtomicBool::new(false),
            on_their_way: Arc::new(Semaphore::new(MAX_ON_THEIR_WAY)),
            landed: Notify::new(),
        })
    }

    /// Says of an event id of which life of its session it is, and of which call.
    pub(crate) fn sign(event_id: &mut String, life: Incarnation, call: Option<&Call>) {
        match call.map(|call| (call.number(), call)) {
            None => EventName::put_behind(event_id, life, None),
            Some((Some(number), _)) => EventName::put_behind(event_id, life, Some(number)),
            Some((None, call)) => {
                *event_id = EventName::new(event_id, life, &call.id()).to_string();
            }
        }
    }

    /// Asks these whether a call goes on.
    pub(crate) fn watch(&self, calls: Calls) {
        lock(&self.calls).push(calls);
    }

    /// A stream of a call in this life of its session has gone without the answer.
    pub(crate) fn gone(&self, call: Call, life: Incarnation) {
        let calls = lock(&self.calls).clone();
        let mut goes_on = calls
            .iter()
            .map(|calls| calls.find(&call.session, &call.request));
        if goes_on.all(|found| found.is_none()) {
            return;
        }
        let mut noted = self.noted();
        if noted.len() < MAX_NOTED {
            noted.insert(call, life);
        }
        self.count.store(noted.len(), Ordering::Release);
    }

    /// The client of a call is back.
    pub(crate) fn back(&self, call: &Call) {
        self.take(call, None);
    }

    /// A call has ended. If its answer did not come by, none will that counts.
    pub(crate) fn ended(&self, call: &CallInfo) {
        if let Some(session) = call.session()
            && self.are_there()
        {
            let (session, request) = (session.into(), call.request_id().clone());
            self.take(&Call { session, request }, None);
        }
    }

    /// A message of a session in this life comes by. If it is the answer of a call whose client has gone, it is kept.
    #[allow(clippy::disallowed_methods, reason = "no request waits for it")]
    pub(crate) fn pass(
        self: &Arc<Self>,
        session: &SessionId,
        life: Incarnation,
        message: &ServerJsonRpcMessage,
    ) {
        let keeps_all = self.keeps_all.load(Ordering::Acquire);
        if !keeps_all && !self.are_there() {
            return;
        }
        let Some(request) = answered(message) else {
            return;
        };
        let call = Call::new(session.clone(), request);
        if !self.take(&call, Some(life)) && !keeps_all {
            return;
        }
        let Ok(answer) = serde_json::to_vec(message) else {
            return;
        };
        if answer.len() > MAX_ANSWER {
            debug!(target: "mcp_cancel_cluster", bytes = answer.len(), "an answer is not kept elsewhere: it is too large");
            return;
        }
        let Ok(place) = self.on_their_way.clone().try_acquire_owned() else {
            debug!(target: "mcp_cancel_cluster", "an answer is not kept elsewhere: too many are on their way");
            return;
        };
        let this = self.clone();
        tokio::spawn(async move {
            this.keep(&call, life, answer.into()).await;
            drop(place);
            this.landed.notify_waiters();
        });
    }

    async fn keep(&self, call: &Call, life: Incarnation, answer: Bytes) {
        let (session, id) = (SessionHash::of(&call.session), call.id());
        for _ in 0..TRIES {
            let kept = self
                .directory
                .keep_answer(session, life, &id, answer.clone());
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
            noted.retain(|call, _| *call.session != *session);
            self.count.store(noted.len(), Ordering::Release);
        }
    }

    /// From now on every answer is kept.
    pub(crate) fn keep_all(&self) {
        self.keeps_all.store(true, Ordering::Release);
    }

    /// Waits for the answers on their way.
    pub(crate) async fn settle(&self) {
        let all = async {
            loop {
                let mut landed = pin!(self.landed.notified());
                // Listens before it looks.
                landed.as_mut().enable();
                // It takes no place that an answer may need.
                if self.on_their_way.available_permits() == MAX_ON_THEIR_WAY {
                    return;
                }
                landed.await;
            }
        };
        // What takes longer is lost with this instance.
        let _settled = timeout(LEAVE_WITHIN, all).await;
    }

    /// Notes a call no more, if it runs in this life of its session, or in any.
    fn take(&self, call: &Call, life: Option<Incarnation>) -> bool {
        let mut noted = self.noted();
        let its = noted.get(call).copied();
        let was_there = its.is_some_and(|its| life.is_none_or(|life| life == its));
        if was_there {
            noted.remove(call);
        }
        self.count.store(noted.len(), Ordering::Release);
        was_there
    }

    #[cfg(test)]
    pub(crate) fn count(&self) -> usize {
        self.noted().len()
    }

    fn are_there(&self) -> bool {
        self.count.load(Ordering::Acquire) > 0
    }

    fn noted(&self) -> MutexGuard<'_, HashMap<Call, Incarnation>> {
        lock(&self.noted)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl fmt::Debug for Answers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Answers")
            .field("noted", &self.count)
            .finish_non_exhaustive()
    }
}

/// Which request a message answers.
pub(crate) fn answered(message: &ServerJsonRpcMessage) -> Option<&NumberOrString> {
    match message {
        ServerJsonRpcMessage::Response(response) => Some(&response.id),
        ServerJsonRpcMessage::Error(error) => error.id.as_ref(),
        ServerJsonRpcMessage::Request(_) | ServerJsonRpcMessage::Notification(_) => None,
    }
}
