//! The sessions of a manager: what their cancelled calls still send, and whether they are used.
//!
//! A request is a use from when the manager is given it until it is answered, a stream for as long as it is
//! there, also if nobody but a task reads it. Calls that have no stream are asked for in the registry.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hasher},
    sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak},
    time::Duration,
};

use rmcp::{
    model::ServerJsonRpcMessage,
    transport::streamable_http_server::session::{ServerSseMessage, SessionId},
};
use tokio::{
    sync::{OnceCell, watch},
    task,
    time::Instant,
};

use super::{kept, late::Late, life::Life, owned::Owned, passing::EarlyEnds, shelf::Shelf};
use crate::{
    call::{CallId, RequestId},
    exchange::Exchange,
    timer::{LATE, NextLook, Noticed, Ticket, Timed, in_time},
};

/// All sessions that are open.
#[derive(Default)]
pub(super) struct Sessions(RwLock<ById>);

/// Which task serves which session. rmcp's closes its session when it is through, by the session's id: and that may be
/// another session's by then, which was restored while the handlers of the former one came to their end.
#[derive(Default)]
pub(super) struct Serving(Mutex<HashMap<task::Id, Served>>);

/// What a task serves, or has served: one that panicked closes nothing, so it keeps no session.
struct Served {
    id: SessionId,
    session: Weak<Session>,
}

type ById = HashMap<SessionId, Arc<Session>, BuildHasherDefault<IdHasher>>;

/// Every request asks for its session twice. Nobody can fill the map with ids of his choice, they are the
/// server's own; so their hash need not be keyed.
#[derive(Default)]
struct IdHasher(u64);

/// What is known of a session.
pub(super) struct Session {
    id: SessionId,
    /// What was cancelled; shared with the session's transport.
    pub(super) late: Arc<Late>,
    early_ends: EarlyEnds,
    shelf: Shelf,
    /// Where its events are noted as its own, if a store has them.
    owned: Option<Arc<Owned>>,
    life: Life,
    /// The ids of the cancels that are on their way into it.
    injections: watch::Sender<Vec<RequestId>>,
    /// From when its life counts.
    since: Instant,
    /// How long it may be idle.
    idle_timeout: Option<Duration>,
    ticket: OnceLock<Ticket>,
    owner: Weak<dyn Owner>,
    /// Set when it was closed for being idle, and the manager inside no longer knows it.
    closed: OnceCell<()>,
}

/// Something that uses a session: as long as it lives, the session is not idle.
pub(super) struct InUse(Arc<Session>);

/// A cancel on its way into a session.
pub(super) struct Injecting {
    session: Arc<Session>,
    request: RequestId,
}

/// Who knows the calls of a session, and can close it.
pub(super) trait Owner: Send + Sync {
    /// Whether a call of the session goes on without a stream.
    fn has_calls(&self, session: &SessionId) -> bool;

    /// The call in flight with this JSON-RPC id.
    fn call(&self, session: &SessionId, request: RequestId) -> Option<(CallId, Arc<Exchange>)>;

    /// The session is idle, and takes no request from now on.
    fn close_idle(self: Arc<Self>, session: SessionId);
}

// === impl Sessions ===

impl Sessions {
    /// A new session starts with nothing cancelled, also if an older one had its id.
    pub(super) fn add(&self, session: Arc<Session>) {
        let _former = {
            let mut sessions = self.write();
            sessions.insert(session.id.clone(), session)
        };
    }

    pub(super) fn find(&self, id: &str) -> Option<Arc<Session>> {
        self.read().get(id).cloned()
    }

    /// A request for a session came. Gives the session if it comes too late.
    pub(super) fn touch(&self, id: &str) -> Option<Arc<Session>> {
        let sessions = self.read();
        let session = sessions.get(id)?;
        match session.life.touch(session.now()) {
            true => None,
            false => Some(session.clone()),
        }
    }

    pub(super) fn begin_use(&self, id: &str) -> Option<InUse> {
        let session = self.find(id)?;
        session.life.begin();
        Some(InUse(session))
    }

    pub(super) fn remove(&self, id: &str) {
        let _session = {
            let mut sessions = self.write();
            sessions.remove(id)
        };
    }

    /// Whether a session is open still, and no other has its id.
    pub(super) fn is_current(&self, session: &Arc<Session>) -> bool {
        let found = self.find(&session.id);
        found.is_some_and(|found| Arc::ptr_eq(&found, session))
    }

    /// Forgets a session, unless another one has its id now.
    pub(super) fn remove_this(&self, session: &Arc<Session>) {
        let mut sessions = self.write();
        if let Some(found) = sessions.get(&session.id)
            && Arc::ptr_eq(found, session)
        {
            sessions.remove(&session.id);
        }
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.read().contains_key(id)
    }

    pub(super) fn len(&self) -> usize {
        self.read().len()
    }

    fn read(&self) -> RwLockReadGuard<'_, ById> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, ById> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Serving ===

impl Serving {
    /// The current task serves a session.
    pub(super) fn begin(&self, session: &Arc<Session>) {
        if let Some(task) = task::try_id() {
            let mut serving = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if serving.len() == serving.capacity() {
                // Before it grows, so that this is rare.
                serving.retain(|_, served| served.session.strong_count() > 0);
                let as_many_again = serving.len();
                serving.reserve(as_many_again);
            }
            let served = Served {
                id: session.id.clone(),
                session: Arc::downgrade(session),
            };
            serving.insert(task, served);
        }
    }

    /// The session with this id that the current task has served, if it has served one: it is through with it. What is
    /// gone was closed.
    pub(super) fn end(&self, id: &str) -> Option<Weak<Session>> {
        let task = task::try_id()?;
        let mut serving = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *serving.get(&task)?.id != *id {
            return None;
        }
        serving.remove(&task).map(|served| served.session)
    }
}

// === impl IdHasher ===

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        // The last word once more, and whole: cheaper than the rest byte by byte.
        match bytes.last_chunk() {
            Some(word) if !rest.is_empty() => self.write_u64(u64::from_le_bytes(*word)),
            Some(_) => {}
            None => rest.iter().for_each(|byte| self.write_u64((*byte).into())),
        }
    }

    /// What follows a string: nothing else is hashed with it.
    fn write_u8(&mut self, _end: u8) {}

    fn write_u64(&mut self, word: u64) {
        // An odd number without a pattern: 2^64 divided by the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        // The map takes the lowest bits and the highest: both halves of a whole product depend on all of it.
        let product = u128::from(self.0) * 0x9e37_79b9_7f4a_7c15;
        (product as u64) ^ (product >> 64) as u64
    }
}

// === impl Session ===

impl Session {
    pub(super) fn new(
        id: SessionId,
        idle_timeout: Option<Duration>,
        owner: Weak<dyn Owner>,
        owned: Option<Arc<Owned>>,
        early_ends: EarlyEnds,
    ) -> Self {
        Self {
            id,
            late: Arc::default(),
            early_ends,
            shelf: Shelf::default(),
            owned,
            life: Life::new(),
            injections: watch::Sender::new(Vec::new()),
            since: Instant::now(),
            idle_timeout,
            ticket: OnceLock::new(),
            owner,
            closed: OnceCell::new(),
        }
    }

    pub(super) fn id(&self) -> &SessionId {
        &self.id
    }

    /// It is looked at when it may be idle.
    pub(super) fn keep_ticket(&self, ticket: Ticket) {
        // A session has one.
        let _first = self.ticket.set(ticket);
    }

    /// When to look at it for the first time.
    pub(super) fn first_look(&self) -> Option<Instant> {
        self.since.checked_add(self.idle_timeout?)
    }

    /// Whether it was idle for too long.
    pub(super) fn is_over(&self) -> bool {
        self.life.is_closed()
    }

    /// Runs `close` to its end once, whoever waits for it.
    pub(super) async fn close_once(&self, close: impl Future<Output = ()>) {
        self.closed.get_or_init(|| close).await;
    }

    /// A message comes by on its way to the client.
    pub(super) fn pass(&self, message: &ServerJsonRpcMessage) {
        if self.early_ends.are_possible()
            && let Some(request) = kept::answers(message)
            && let Some(owner) = self.owner.upgrade()
            && let Some((id, exchange)) = owner.call(&self.id, request.into())
        {
            exchange.answer_passes(id, message);
        }
    }

    /// A cancel sets out.
    pub(super) fn inject(self: Arc<Self>, request: &RequestId) -> Injecting {
        self.injections
            .send_modify(|under_way| under_way.push(request.clone()));
        Injecting {
            session: self,
            request: request.clone(),
        }
    }

    /// Whether a cancel of a request with this id is on its way.
    pub(super) fn is_injecting(&self, request: &RequestId) -> bool {
        self.injections.borrow().contains(request)
    }

    /// Waits until no cancel is on its way, or none of this request, but no longer than `limit`.
    pub(super) async fn injected(&self, request: Option<&RequestId>, limit: Duration) {
        let mut under_way = self.injections.subscribe();
        let none = |under_way: &Vec<RequestId>| match request {
            Some(request) => !under_way.contains(request),
            None => under_way.is_empty(),
        };
        // It fails only without the sender, which is here.
        let _arrived = in_time(limit, under_way.wait_for(none)).await;
    }

    fn now(&self) -> u64 {
        self.millis(Instant::now())
    }

    /// Rounded up: it is never closed too early.
    fn millis(&self, now: Instant) -> u64 {
        let since = now.saturating_duration_since(self.since);
        let part = u64::from(since.subsec_nanos().div_ceil(1_000_000));
        since.as_secs().saturating_mul(1_000).saturating_add(part)
    }
}

impl Timed for Session {
    fn look(&self, now: Instant, noticed: Noticed) -> Option<NextLook> {
        let owner = self.owner.upgrade()?;
        let idle_timeout = self.idle_timeout?;
        let millis = self.millis(now);
        if owner.has_calls(&self.id) {
            // When it ends nobody may see.
            self.life.touch(millis);
        }
        let left = match noticed {
            Noticed::Late | Noticed::Delayed => self.life.left(millis, idle_timeout),
            Noticed::InTime => self.life.close_if_idle(millis, idle_timeout),
        };
        match (left, noticed) {
            (Some(left), _) => now.checked_add(left).map(NextLook::At),
            // The runtime stood still: requests may wait in the accept queue.
            (None, Noticed::Late) => now.checked_add(LATE).map(NextLook::At),
            (None, Noticed::Delayed) => Some(NextLook::Soon),
            (None, Noticed::InTime) => {
                owner.close_idle(self.id.clone());
                None
            }
        }
    }
}

// === impl InUse ===

impl InUse {
    /// Another use of the same session.
    pub(super) fn again(&self) -> Self {
        self.0.life.begin();
        Self(self.0.clone())
    }

    /// The session's own id, and not the copy that came with a request: what is kept of the request's calls
    /// keeps no copy alive.
    pub(super) fn id(&self) -> &SessionId {
        &self.0.id
    }

    /// Whether a store has its events.
    pub(super) fn is_stored(&self) -> bool {
        self.0.owned.is_some()
    }

    /// An event of the session goes out for the first time.
    pub(super) fn note(&self, event: &ServerSseMessage) {
        if let Some(owned) = &self.0.owned {
            owned.note(&self.0.id, event);
        }
    }

    pub(super) fn early_ends(&self) -> &EarlyEnds {
        &self.0.early_ends
    }

    pub(super) fn late(&self) -> &Late {
        &self.0.late
    }

    pub(super) fn shelf(&self) -> &Shelf {
        &self.0.shelf
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.life.end(self.0.now());
    }
}

// === impl Injecting ===

impl Drop for Injecting {
    fn drop(&mut self) {
        self.session.injections.send_modify(|under_way| {
            let found = under_way.iter().position(|other| *other == self.request);
            if let Some(found) = found {
                under_way.swap_remove(found);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, hash::BuildHasher};

    use tokio::runtime::Handle;

    use super::*;

    struct Nobody;

    impl Owner for Nobody {
        fn has_calls(&self, _session: &SessionId) -> bool {
            false
        }

        fn call(
            &self,
            _session: &SessionId,
            _request: RequestId,
        ) -> Option<(CallId, Arc<Exchange>)> {
            None
        }

        fn close_idle(self: Arc<Self>, _session: SessionId) {}
    }

    #[tokio::test]
    async fn tasks_that_close_nothing_do_not_pile_up() {
        let serving = Arc::new(Serving::default());
        let session = |id: &str| {
            let owner = Weak::<Nobody>::new();
            Session::new(id.into(), None, owner, None, EarlyEnds::default())
        };
        let kept = Arc::new(session("kept"));
        for _ in 0..3 {
            let (serving, kept) = (serving.clone(), kept.clone());
            let serves = async move { serving.begin(&kept) };
            Handle::current().spawn(serves).await.unwrap();
        }
        for _ in 0..1_000 {
            let serving = serving.clone();
            let gone = Arc::new(session("gone"));
            let serves = async move { serving.begin(&gone) };
            Handle::current().spawn(serves).await.unwrap();
        }
        let serving = serving.0.lock().unwrap();
        assert!(serving.len() < 20, "{}", serving.len());
        let live = serving.values().filter(|served| *served.id == *"kept");
        assert_eq!(live.count(), 3);
    }

    #[test]
    fn ids_that_differ_little_differ_in_the_bits_that_the_map_takes() {
        let hasher = BuildHasherDefault::<IdHasher>::default();
        for prefix in ["", "session-", "0c0ffee0-0000-4000-8000-00000000"] {
            let ids = (0..4096).map(|n| format!("{prefix}{n:04x}"));
            let low: HashSet<u64> = ids.map(|id| hasher.hash_one(&*id) & 0xffff).collect();
            assert!(low.len() > 3_000, "{prefix:?}: {}", low.len());
        }
    }
}
