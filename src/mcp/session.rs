//! Keeps track of the sessions opened through a manager and closes idle sessions.

use std::{
    collections::{HashMap, VecDeque},
    mem,
    sync::{
        Arc, Mutex, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures_util::{
    FutureExt as _,
    future::{BoxFuture, Shared},
};
use rmcp::{model::ServerJsonRpcMessage, transport::streamable_http_server::session::SessionId};
use tokio::{sync::watch, time::Instant};
use tracing::info;

use super::{
    answered_id,
    early_stream_end::EarlyStreamEnds,
    id_hash::{self, IdHasher},
    idle::{ClientStreamEnd, IdleTimeouts, IdleTracker},
    replay::TextArena,
    standalone_ids::StandaloneIds,
    suppress::Suppressed,
};
use crate::{
    call::{CallId, RequestId},
    catch_panic::catch_panic,
    exchange::Exchange,
    lock::lock,
    observe::{SessionEnd, SessionEvent},
    shards::Shards,
    timer::{
        LatenessTracker, OnDeadline, Rearm, STALL_THRESHOLD, Timeliness, Timer, TimerHandle,
        migrating_timeout,
    },
};

/// Lower bound for both idle timeouts, since a session in use is checked once per timeout.
const MIN_IDLE_TIMEOUT: Duration = Duration::from_millis(100);

/// A manager's open sessions.
#[derive(Default)]
pub(super) struct Sessions(Shards<RwLock<ById>>);

/// A callback for session events.
pub(super) type SessionListener = Arc<dyn Fn(&SessionEvent<'_>) + Send + Sync>;

type ById = HashMap<SessionId, Arc<Session>, IdHasher>;

/// A session opened through a manager.
pub(super) struct Session {
    id: SessionId,
    pub(super) suppressed: Suppressed,
    pub(super) early_ends: EarlyStreamEnds,
    pub(super) text_arena: TextArena,
    pub(super) standalone_ids: StandaloneIds,
    idle: IdleTracker,
    is_ending: AtomicBool,
    /// Ids of the requests whose cancellation is pending.
    pending_cancels: watch::Sender<VecDeque<RequestId>>,
    idle_timeouts: IdleTimeouts,
    timer: OnceLock<TimerHandle>,
    owner: Weak<dyn Owner>,
    listeners: Arc<[SessionListener]>,
    notified: Mutex<Notified>,
    /// Set when the session is closed for being idle. The future completes once the inner manager has closed the session, too.
    closed: OnceLock<Shared<BoxFuture<'static, ()>>>,
}

/// The last event reported for a session. A session can be found, and even closed, before its opening has been reported.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Notified {
    Nothing,
    Opened,
    /// The session has closed. If its opening had not been reported at that point, `notify_opened` reports both events.
    Closed(SessionEnd),
}

/// A session that the inner manager is closing.
///
/// Dropping this removes the session and reports that it has closed, unless it has been [reopened](Self::reopen).
pub(super) struct EndingSession {
    sessions: Arc<Sessions>,
    session: Arc<Session>,
    is_open: bool,
}

/// Keeps a cancellation pending until the guard is dropped.
pub(super) struct PendingCancelGuard {
    session: Arc<Session>,
    request: RequestId,
}

/// What a session needs from its owner, the manager: finding its calls and closing it.
pub(super) trait Owner: Send + Sync {
    /// Returns `true` if a client might still resume one of the session's calls.
    ///
    /// This is the case while a call is detached or an undelivered answer is retained.
    fn is_awaited(&self, session: &SessionId, now: Instant) -> bool;

    /// Returns the in-flight call with the JSON-RPC id `request`.
    fn call(&self, session: &SessionId, request: RequestId) -> Option<(CallId, Arc<Exchange>)>;

    /// Has the inner manager close a session marked as closed for being idle.
    fn close_idle(self: Arc<Self>, session: SessionId);
}

// === impl Sessions ===

impl Sessions {
    /// Adds a session, replacing an older one with the same id.
    pub(super) fn add(&self, session: Arc<Session>) {
        let id = session.id.clone();
        let previous = self.write(&id).insert(id.clone(), session);
        // Report this without holding the lock.
        if let Some(previous) = previous {
            let is_ending = previous.is_ending();
            previous.notify_closed(if is_ending {
                previous.end_reason()
            } else {
                SessionEnd::Replaced
            });
        }
    }

    pub(super) fn has(&self, id: &str) -> bool {
        self.read(id)
            .get(id)
            .is_some_and(|session| !session.is_ending())
    }

    /// Returns the session with the id `id`, unless it is [ending](Self::mark_ending).
    pub(super) fn find(&self, id: &str) -> Option<Arc<Session>> {
        let sessions = self.read(id);
        let session = sessions.get(id).filter(|session| !session.is_ending());
        session.cloned()
    }

    /// Records a request for a session. Returns the session if it is already closed.
    pub(super) fn touch(&self, id: &str) -> Option<Arc<Session>> {
        let sessions = self.read(id);
        let session = sessions.get(id).filter(|session| !session.is_ending())?;
        if session.idle.touch(Instant::now()) {
            None
        } else {
            Some(session.clone())
        }
    }

    /// Marks a session as ending, for as long as the inner manager takes to close it.
    ///
    /// From now on, requests no longer find the session. It stays in the map so that, if another session replaces it, its close
    /// is reported before the new session's opening. Returns `None` if there is no session with the id `id`, or if it is already
    /// ending.
    pub(super) fn mark_ending(self: &Arc<Self>, id: &str) -> Option<EndingSession> {
        let session = self.find(id)?;
        let is_first = !session.is_ending.swap(true, Ordering::Relaxed);
        is_first.then(|| EndingSession {
            sessions: self.clone(),
            session,
            is_open: false,
        })
    }

    /// Returns `true` if this session is not ending and has not been replaced.
    pub(super) fn is_current(&self, session: &Arc<Session>) -> bool {
        let current = self.find(&session.id);
        current.is_some_and(|current| Arc::ptr_eq(&current, session))
    }

    /// Removes a session and reports its close, unless another session has taken its id.
    pub(super) fn remove_this(&self, session: &Arc<Session>) {
        let removed = {
            let mut sessions = self.write(&session.id);
            let current = sessions.get(&session.id);
            let is_this = current.is_some_and(|current| Arc::ptr_eq(current, session));
            is_this.then(|| sessions.remove(&session.id)).flatten()
        };
        if let Some(session) = removed {
            session.notify_closed(session.end_reason());
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
        self.0.get(id_hash::hash(id))
    }
}

fn read(shard: &RwLock<ById>) -> RwLockReadGuard<'_, ById> {
    shard.read().unwrap_or_else(PoisonError::into_inner)
}

// === impl Session ===

impl Session {
    pub(super) fn new(
        id: SessionId,
        idle_timeouts: IdleTimeouts,
        owner: Weak<dyn Owner>,
        early_ends: EarlyStreamEnds,
        listeners: Arc<[SessionListener]>,
    ) -> Self {
        Self {
            id,
            suppressed: Suppressed::default(),
            early_ends,
            text_arena: TextArena::default(),
            standalone_ids: StandaloneIds::default(),
            idle: IdleTracker::new(Instant::now()),
            is_ending: AtomicBool::new(false),
            pending_cancels: watch::Sender::new(VecDeque::new()),
            idle_timeouts: idle_timeouts.at_least(MIN_IDLE_TIMEOUT),
            timer: OnceLock::new(),
            owner,
            listeners,
            notified: Mutex::new(Notified::Nothing),
            closed: OnceLock::new(),
        }
    }

    /// Returns the session's own copy of its id.
    ///
    /// Its calls share this copy, so that they don't each keep a separate allocation alive.
    pub(super) fn id(&self) -> &SessionId {
        &self.id
    }

    /// Reports that the session has opened and, if it has already closed, reports that too.
    pub(super) fn notify_opened(&self, restored: bool) {
        let session = &self.id;
        self.notify(&SessionEvent::Opened { session, restored });
        if let Notified::Closed(reason) = self.replace_notified(Notified::Opened) {
            self.notify(&SessionEvent::Closed { session, reason });
        }
    }

    /// Reports that the session has closed. At this point, requests can no longer find it.
    pub(super) fn notify_closed(&self, reason: SessionEnd) {
        if self.replace_notified(Notified::Closed(reason)) == Notified::Opened {
            let session = &self.id;
            self.notify(&SessionEvent::Closed { session, reason });
        }
    }

    fn notify(&self, event: &SessionEvent<'_>) {
        for listener in &*self.listeners {
            catch_panic(|| listener(event));
        }
    }

    /// Replaces the last reported event and returns the previous one.
    fn replace_notified(&self, new: Notified) -> Notified {
        let mut notified = lock(&self.notified);
        mem::replace(&mut *notified, new)
    }

    /// Starts the timer that closes the session once it is idle, if it has a timeout.
    pub(super) fn start_idle_timer(self: &Arc<Self>, timer: &Arc<Timer>) {
        let timeout = self.idle_timeouts.shortest();
        if let Some(deadline) = timeout.and_then(|timeout| Instant::now().checked_add(timeout)) {
            let this: Weak<Self> = Arc::downgrade(self);
            // Always succeeds, because this is called only once per session.
            let _ = self.timer.set(timer.set(deadline, this));
        }
    }

    pub(super) fn begin_use(&self) {
        self.idle.begin_use();
    }

    pub(super) fn end_use(&self) {
        let now = Instant::now();
        let is_abandoned = self.idle.end_use(now);
        self.start_lost_timeout(is_abandoned, now);
    }

    /// Records that the client has started reading another stream. Returns `false` if this session's streams are not counted.
    pub(super) fn begin_stream(&self) -> bool {
        let counts_streams = self.idle_timeouts.lost.is_some();
        if counts_streams {
            self.idle.begin_stream();
        }
        counts_streams
    }

    /// Records that the client has stopped reading a counted stream, which might not count as a use.
    pub(super) fn end_stream(&self, end: ClientStreamEnd) {
        let now = Instant::now();
        let is_abandoned = self.idle.end_stream(end, now);
        self.start_lost_timeout(is_abandoned, now);
    }

    /// Returns `true` if standalone streams don't count as uses of the session.
    pub(super) fn ignores_standalone_streams(&self) -> bool {
        self.idle_timeouts.ignore_standalone_streams
    }

    fn start_lost_timeout(&self, is_abandoned: bool, now: Instant) {
        if is_abandoned
            && let (Some(timer), Some(lost)) = (self.timer.get(), self.idle_timeouts.lost)
            && let Some(deadline) = now.checked_add(lost)
        {
            timer.reset_earlier(deadline);
        }
    }

    fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    /// Returns `true` if the session has been closed for being idle.
    pub(super) fn is_closed(&self) -> bool {
        self.idle.is_closed()
    }

    /// Returns why the session is ending.
    ///
    /// rmcp also ends sessions closed for being idle, but the reason reported for these is the idle close.
    pub(super) fn end_reason(&self) -> SessionEnd {
        match (self.is_closed(), self.idle.is_lost()) {
            (false, _) => SessionEnd::Ended,
            (true, false) => SessionEnd::Idle,
            (true, true) => SessionEnd::Lost,
        }
    }

    pub(super) fn log_closed(&self) {
        let reason = self.end_reason();
        info!(target: "mcp_cancel_on_disconnect", why = %reason, "session closed");
    }

    /// Runs the future returned by `close` to completion, once.
    ///
    /// All callers poll the same future, in case one caller's runtime has stalled.
    pub(super) async fn close_once(&self, close: impl FnOnce() -> BoxFuture<'static, ()>) {
        self.closed.get_or_init(|| close().shared()).clone().await;
    }

    /// Offers an answer to its call's exchange as it is being sent to the client.
    pub(super) fn observe_answer(&self, message: &ServerJsonRpcMessage) {
        if self.early_ends.are_possible()
            && let Some(request) = answered_id(message)
            && let Some(owner) = self.owner.upgrade()
            && let Some((id, exchange)) = owner.call(&self.id, request.into())
        {
            exchange.offer_answer(id, message);
        }
    }

    /// Marks a cancellation as pending until the guard is dropped.
    pub(super) fn announce_cancel(self: Arc<Self>, request: &RequestId) -> PendingCancelGuard {
        self.pending_cancels
            .send_modify(|pending| pending.push_back(request.clone()));
        PendingCancelGuard {
            session: self,
            request: request.clone(),
        }
    }

    /// Returns `true` if a cancellation for the request with the id `request` is pending.
    pub(super) fn has_pending_cancel(&self, request: &RequestId) -> bool {
        self.pending_cancels.borrow().contains(request)
    }

    /// Waits up to `limit` for pending cancellations of `request`, or for all of them if `None`.
    pub(super) async fn wait_for_cancels(&self, request: Option<&RequestId>, limit: Duration) {
        let mut pending = self.pending_cancels.subscribe();
        let none_pending = |pending: &VecDeque<RequestId>| match request {
            Some(request) => !pending.contains(request),
            None => pending.is_empty(),
        };
        // `wait_for` fails only if the sender has been dropped, and `self` owns it.
        let _ = migrating_timeout(limit, pending.wait_for(none_pending)).await;
    }
}

impl OnDeadline for Session {
    fn on_deadline(&self, lateness: &LatenessTracker, timeliness: Timeliness) -> Option<Rearm> {
        let now = lateness.now();
        let owner = self.owner.upgrade()?;
        if owner.is_awaited(&self.id, now) {
            // Restart the idle timeout now, because the end of the client's wait might go unnoticed.
            self.idle.extend(now);
        }
        let left = match timeliness {
            Timeliness::Late | Timeliness::Delayed => self.idle.time_left(now, self.idle_timeouts),
            Timeliness::OnTime => self.idle.close_if_idle(now, self.idle_timeouts),
        };
        match (left, timeliness) {
            (Some(left), _) => now.checked_add(left).map(Rearm::At),
            // The runtime has stalled, so requests might be waiting in the accept queue.
            (None, Timeliness::Late) => now.checked_add(STALL_THRESHOLD).map(Rearm::At),
            (None, Timeliness::Delayed) => Some(Rearm::Soon),
            (None, Timeliness::OnTime) => {
                owner.close_idle(self.id.clone());
                None
            }
        }
    }
}

// === impl EndingSession ===

impl EndingSession {
    /// Lets requests find the session again, because the inner manager has not closed it.
    #[cold]
    pub(super) fn reopen(mut self) {
        self.is_open = true;
        self.session.is_ending.store(false, Ordering::Relaxed);
    }
}

impl Drop for EndingSession {
    fn drop(&mut self) {
        if !self.is_open {
            self.sessions.remove_this(&self.session);
        }
    }
}

// === impl PendingCancelGuard ===

impl Drop for PendingCancelGuard {
    fn drop(&mut self) {
        self.session.pending_cancels.send_modify(|pending| {
            // Usually the first entry, because the inner manager accepts cancellations in order.
            if let Some(index) = pending.iter().position(|other| *other == self.request) {
                pending.remove(index);
            }
        });
    }
}
