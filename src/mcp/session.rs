//! The sessions of a manager, and their uses.
//!
//! A request uses its session from when the manager is given it until it is answered. A stream uses it for as long as the
//! stream lives, even if only a task reads it. The registry knows the calls without a stream, and the answers that are kept
//! for clients that were away.

use std::{
    collections::HashMap,
    hash::BuildHasherDefault,
    mem,
    ops::Deref,
    sync::{Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak},
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use rmcp::{model::ServerJsonRpcMessage, transport::streamable_http_server::session::SessionId};
use tokio::{sync::watch, time::Instant};

use super::{
    answers,
    id_hash::{self, IdHasher},
    kept::Shelf,
    life::Life,
    mute::Muted,
    passing::EarlyEnds,
};
use crate::{
    call::{CallId, RequestId},
    catch_panic::catch_panic,
    exchange::Exchange,
    lock::lock,
    observe::SessionEvent,
    shards::Shards,
    timer::{
        LatenessTracker, OnDeadline, Rearm, STALL_THRESHOLD, Timeliness, Timer, TimerHandle,
        migrating_timeout,
    },
};

/// The least idle timeout: 100 ms. The timer looks this often at a session that is in use.
const MIN_IDLE_TIMEOUT: Duration = Duration::from_millis(100);

/// The open sessions of a manager.
#[derive(Default)]
pub(super) struct Sessions(Shards<RwLock<ById>>);

/// Somebody who wants to know of sessions.
pub(super) type Watcher = Arc<dyn Fn(&SessionEvent<'_>) + Send + Sync>;

type ById = HashMap<SessionId, Arc<Session>, BuildHasherDefault<IdHasher>>;

/// What is known of a session.
pub(super) struct Session {
    id: SessionId,
    pub(super) muted: Muted,
    pub(super) early_ends: EarlyEnds,
    pub(super) shelf: Shelf,
    life: Life,
    /// The ids of the cancels that are on their way into it.
    injections: watch::Sender<Vec<RequestId>>,
    /// How long it may be idle.
    idle_timeout: Option<Duration>,
    ticket: OnceLock<TimerHandle>,
    owner: Weak<dyn Owner>,
    watchers: Arc<[Watcher]>,
    told: Mutex<Told>,
    /// Set when it was closed for being idle, and the manager inside no longer knows it.
    closed: OnceLock<Shared<BoxFuture<'static, ()>>>,
}

/// What was told of a session last. It can be found, and closed, before it is told that it has opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Nothing,
    Opened,
    /// It has closed. If that came first, whoever opened it tells both.
    Closed,
}

/// A use of a session. As long as it lives, the session is not idle.
pub(super) struct InUse(Arc<Session>);

/// A cancel on its way into a session.
pub(super) struct Injecting {
    session: Arc<Session>,
    request: RequestId,
}

/// What knows the calls of a session, and can close it: the session manager.
pub(super) trait Owner: Send + Sync {
    /// Whether a client that is away may come back for something: a call of the session goes on without a stream, or its
    /// answer is kept.
    fn is_awaited(&self, session: &SessionId, now: Instant) -> bool;

    /// The call in flight with this JSON-RPC id.
    fn call(&self, session: &SessionId, request: RequestId) -> Option<(CallId, Arc<Exchange>)>;

    /// The session is idle, and takes no request from now on.
    fn close_idle(self: Arc<Self>, session: SessionId);
}

// === impl Sessions ===

impl Sessions {
    /// Enters a session, in place of an older one with its id.
    pub(super) fn add(&self, session: Arc<Session>) {
        let id = session.id.clone();
        let former = self.write(&id).insert(id.clone(), session);
        // When nothing is locked any more.
        if let Some(former) = former {
            former.tell_closed();
        }
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.read(id).contains_key(id)
    }

    pub(super) fn find(&self, id: &str) -> Option<Arc<Session>> {
        self.read(id).get(id).cloned()
    }

    /// Notes that a request for a session came. Gives the session if it comes too late.
    pub(super) fn touch(&self, id: &str) -> Option<Arc<Session>> {
        let sessions = self.read(id);
        let session = sessions.get(id)?;
        if session.life.touch(Instant::now()) {
            None
        } else {
            Some(session.clone())
        }
    }

    pub(super) fn begin_use(&self, id: &str) -> Option<InUse> {
        let session = self.find(id)?;
        session.life.begin();
        Some(InUse(session))
    }

    /// Removes a session, which is to be [reported](Session::tell_closed) once the manager inside has closed it.
    #[must_use]
    pub(super) fn remove(&self, id: &str) -> Option<Arc<Session>> {
        self.write(id).remove(id)
    }

    /// Adds a session again that the manager inside did not close, unless another one has its id now.
    #[cold]
    pub(super) fn put_back(&self, session: Arc<Session>) {
        let id = session.id.clone();
        self.write(&id).entry(id).or_insert(session);
    }

    /// Whether a session is open still, and no other has its id.
    pub(super) fn is_current(&self, session: &Arc<Session>) -> bool {
        let found = self.find(&session.id);
        found.is_some_and(|found| Arc::ptr_eq(&found, session))
    }

    /// Forgets a session, unless another one has its id now.
    pub(super) fn remove_this(&self, session: &Arc<Session>) {
        let removed = {
            let mut sessions = self.write(&session.id);
            let found = sessions.get(&session.id);
            let is_it = found.is_some_and(|found| Arc::ptr_eq(found, session));
            is_it.then(|| sessions.remove(&session.id)).flatten()
        };
        if let Some(session) = removed {
            session.tell_closed();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.0.iter().map(|shard| read(shard).len()).sum()
    }

    fn read(&self, id: &str) -> RwLockReadGuard<'_, ById> {
        read(self.shard(id))
    }

    fn write(&self, id: &str) -> RwLockWriteGuard<'_, ById> {
        let shard = self.shard(id).write();
        shard.unwrap_or_else(PoisonError::into_inner)
    }

    fn shard(&self, id: &str) -> &RwLock<ById> {
        self.0.of(id_hash::of_ends(id))
    }
}

fn read(shard: &RwLock<ById>) -> RwLockReadGuard<'_, ById> {
    shard.read().unwrap_or_else(PoisonError::into_inner)
}

// === impl Session ===

impl Session {
    pub(super) fn new(
        id: SessionId,
        idle_timeout: Option<Duration>,
        owner: Weak<dyn Owner>,
        early_ends: EarlyEnds,
        watchers: Arc<[Watcher]>,
    ) -> Self {
        Self {
            id,
            muted: Muted::default(),
            early_ends,
            shelf: Shelf::default(),
            life: Life::new(Instant::now()),
            injections: watch::Sender::new(Vec::new()),
            idle_timeout: idle_timeout.map(|timeout| timeout.max(MIN_IDLE_TIMEOUT)),
            ticket: OnceLock::new(),
            owner,
            watchers,
            told: Mutex::new(Told::Nothing),
            closed: OnceLock::new(),
        }
    }

    /// The session's own id, and not a copy that came with a request: what is kept of its calls keeps no copy alive.
    pub(super) fn id(&self) -> &SessionId {
        &self.id
    }

    /// It has opened, and may have closed again since it can be found.
    pub(super) fn tell_opened(&self, restored: bool) {
        let session = &self.id;
        self.tell(&SessionEvent::Opened { session, restored });
        if self.was_told(Told::Opened) == Told::Closed {
            self.tell(&SessionEvent::Closed { session });
        }
    }

    /// No request finds it any more.
    pub(super) fn tell_closed(&self) {
        if self.was_told(Told::Closed) == Told::Opened {
            let session = &self.id;
            self.tell(&SessionEvent::Closed { session });
        }
    }

    fn tell(&self, event: &SessionEvent<'_>) {
        for watcher in &*self.watchers {
            catch_panic(|| watcher(event));
        }
    }

    /// Notes what is told of it now. Returns what was told before.
    fn was_told(&self, now: Told) -> Told {
        let mut told = lock(&self.told);
        mem::replace(&mut *told, now)
    }

    /// Has the timer look at it when it may have been idle for too long.
    pub(super) fn watch(self: &Arc<Self>, timer: &Arc<Timer>) {
        let timeout = self.idle_timeout;
        if let Some(at) = timeout.and_then(|timeout| Instant::now().checked_add(timeout)) {
            let this: Weak<Self> = Arc::downgrade(self);
            // A session is watched once.
            let _first = self.ticket.set(timer.set(at, this));
        }
    }

    /// Whether it is closed because it was idle for too long.
    pub(super) fn is_over(&self) -> bool {
        self.life.is_closed()
    }

    /// Runs what `close` returns to its end once. Every caller waits for that end and polls it: the runtime of another caller may
    /// not be driven.
    pub(super) async fn close_once(&self, close: impl FnOnce() -> BoxFuture<'static, ()>) {
        self.closed.get_or_init(|| close().shared()).clone().await;
    }

    /// Notes an answer that comes by on its way to the client.
    pub(super) fn pass(&self, message: &ServerJsonRpcMessage) {
        if self.early_ends.are_possible()
            && let Some(request) = answers(message)
            && let Some(owner) = self.owner.upgrade()
            && let Some((id, exchange)) = owner.call(&self.id, request.into())
        {
            exchange.answer_passes(id, message);
        }
    }

    /// Announces a cancel, until what this returns is dropped.
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
        let _arrived = migrating_timeout(limit, under_way.wait_for(none)).await;
    }
}

impl OnDeadline for Session {
    fn on_deadline(&self, watch: &LatenessTracker, noticed: Timeliness) -> Option<Rearm> {
        let now = watch.now();
        let owner = self.owner.upgrade()?;
        let idle_timeout = self.idle_timeout?;
        if owner.is_awaited(&self.id, now) {
            // Nobody may see when that ends.
            self.life.touch(now);
        }
        let left = match noticed {
            Timeliness::Late | Timeliness::Delayed => self.life.left(now, idle_timeout),
            Timeliness::OnTime => self.life.close_if_idle(now, idle_timeout),
        };
        match (left, noticed) {
            (Some(left), _) => now.checked_add(left).map(Rearm::At),
            // The runtime stood still: requests may wait in the accept queue.
            (None, Timeliness::Late) => now.checked_add(STALL_THRESHOLD).map(Rearm::At),
            (None, Timeliness::Delayed) => Some(Rearm::Soon),
            (None, Timeliness::OnTime) => {
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
}

impl Deref for InUse {
    type Target = Session;

    fn deref(&self) -> &Session {
        &self.0
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        self.life.end(Instant::now());
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
