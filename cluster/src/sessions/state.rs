//! Local sessions and their lifecycle.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard, atomic::AtomicUsize},
    time::Duration,
};

use tokio::sync::{Notify, mpsc};

use super::{
    local_session::{LocalSession, Phase},
    queues::{Deleted, MAX_DELETED, Queues},
    relinquished::{Relinquished, RelinquishedSessions, RelinquishedTo},
    restore_attempts::{RestoreAttempts, RestoreStep},
    session_index::SessionIndex,
};
use crate::{
    ids::{Epoch, Incarnation, SessionHash},
    lock::lock,
    sessions::drain_gate::{DrainGate, InFlightGuard},
    wait_until::wait_until,
};

/// Number of locks the sessions are spread over.
const SHARDS: usize = 64;

/// How long a loaded session may take to be opened before it is removed.
///
/// This is also how long other requests wait for a restore.
pub(crate) const RESTORE_TIMEOUT: Duration = Duration::from_secs(60);

/// The local sessions.
pub(crate) struct Sessions {
    pub(super) session_index: Arc<SessionIndex>,
    pub(super) shards: Box<[Mutex<HashMap<SessionHash, LocalSession>>]>,
    pub(super) this_instance: Incarnation,
    pub(crate) restore_attempts: RestoreAttempts,
    pub(super) queues: Mutex<Queues>,
    /// Number of contested sessions, nearly always zero.
    pub(super) contested: Arc<AtomicUsize>,
    /// Number of sessions that must be rewritten before the directory is considered consistent.
    pub(super) unconfirmed: Arc<AtomicUsize>,
    /// Notified when there may be something to write.
    pub(super) wake: Notify,
    /// Notified when something has been written.
    ///
    /// Also notified when a condition passed to [`wait_until`](Self::wait_until) may have become true for another reason.
    pub(super) written: Notify,
    /// Notified when a session has become contested.
    pub(super) contest: Notify,
    pub(crate) relinquished: RelinquishedSessions,
}

// === impl Sessions ===

impl Sessions {
    /// Returns an empty set, along with the receiver for relinquished sessions.
    pub(crate) fn new(
        this_instance: Incarnation,
    ) -> (Arc<Self>, mpsc::UnboundedReceiver<Relinquished>) {
        let (relinquished, receiver) = RelinquishedSessions::new();
        let sessions = Self {
            session_index: SessionIndex::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            this_instance,
            restore_attempts: RestoreAttempts::default(),
            queues: Mutex::default(),
            contested: Arc::default(),
            unconfirmed: Arc::default(),
            wake: Notify::new(),
            written: Notify::new(),
            contest: Notify::new(),
            relinquished,
        };
        (Arc::new(sessions), receiver)
    }

    pub(crate) fn is_local(&self, session: SessionHash) -> bool {
        self.shard(session).contains_key(&session)
    }

    /// Returns `true` if a session is open, rather than merely loaded to be restored.
    pub(crate) fn is_open(&self, session: SessionHash) -> bool {
        let shard = self.shard(session);
        shard
            .get(&session)
            .is_some_and(|local| !matches!(local.phase, Phase::Loaded(_)))
    }

    /// Returns `true` if a session is open and its handler has accepted its `initialize`.
    pub(crate) fn is_restored(&self, session: SessionHash) -> bool {
        let shard = self.shard(session);
        let local = shard.get(&session);
        local.is_some_and(|local| local.phase == Phase::Open)
    }

    /// Returns whether a local session's parameters are known, or `None` if it is not local.
    ///
    /// A session is not written to the directory without them.
    pub(crate) fn has_params(&self, id: &str) -> Option<bool> {
        let session = SessionHash::of(id);
        let shard = self.shard(session);
        shard.get(&session).map(|local| local.params.is_some())
    }

    /// Enters a session's gate, as every request must.
    ///
    /// Returns `None` if the session is not local or its gate is closed.
    pub(crate) fn enter(&self, id: &str) -> Option<InFlightGuard> {
        self.session_index.enter(id)
    }

    pub(crate) fn gate(&self, id: &str) -> Option<Arc<DrainGate>> {
        self.session_index.gate(id)
    }

    /// Closes all gates, including those of sessions opened later.
    pub(crate) fn close_gates(&self) {
        self.session_index.close_all();
    }

    /// Returns `true` if a session is local and its gate is open.
    pub(crate) fn has_open_gate(&self, id: &str) -> bool {
        self.gate(id).is_some_and(|gate| !gate.is_closed())
    }

    pub(crate) fn ids(&self) -> Vec<Arc<str>> {
        let shards = self.shards.iter().map(lock);
        let ids =
            shards.flat_map(|shard| Vec::from_iter(shard.values().map(|local| local.id.clone())));
        ids.collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// Called when a session has been opened, either by its client or to restore it.
    ///
    /// Queues the session to be written if its parameters are known.
    pub(crate) fn on_opened(&self, id: &str, is_restored: bool) {
        let session = SessionHash::of(id);
        {
            let mut shard = self.shard(session);
            let local = shard
                .entry(session)
                .or_insert_with(|| LocalSession::new(id, &self.session_index));
            local.phase = if is_restored {
                Phase::Restoring
            } else {
                Phase::Open
            };
        }
        self.write_if_new(session);
    }

    /// Records the client's parameters (JSON) and queues the session to be written.
    ///
    /// Does nothing if the session has been closed in the meantime, for example because its handler refused it.
    pub(crate) fn on_initialized(&self, id: &str, params: Arc<[u8]>) {
        let session = SessionHash::of(id);
        if let Some(local) = self.shard(session).get_mut(&session) {
            local.phase = Phase::Open;
            local.params = Some(params);
        }
        self.write_if_new(session);
    }

    /// Queues a session with known parameters, unless it has already been written or queued.
    fn write_if_new(&self, session: SessionHash) {
        let is_new = self.shard(session).get_mut(&session).is_some_and(|local| {
            local.is_unwritten() && !std::mem::replace(&mut local.is_queued, true)
        });
        if is_new {
            self.queues().fresh.push_back(session);
            self.wake.notify_one();
        }
    }

    /// Opens a session with known parameters.
    #[cfg(test)]
    pub(crate) fn begin(&self, id: &str, params: Arc<[u8]>) {
        self.on_opened(id, false);
        self.on_initialized(id, params);
    }

    /// Returns `true` if a newly opened session may be given to its client.
    ///
    /// Its gate must be open, and the directory must have its record (a session without parameters needs none). Otherwise, the session is
    /// relinquished so that it gets closed.
    pub(crate) fn admit_new_session(&self, id: &str) -> bool {
        let session = SessionHash::of(id);
        let is_closed = self.gate(id).is_some_and(|gate| gate.is_closed());
        let local = match self.shard(session).entry(session) {
            Entry::Occupied(local) if is_closed || local.get().is_unwritten() => local.remove(),
            _ => return true,
        };
        self.queues().fresh.retain(|fresh| *fresh != session);
        if local.was_sent {
            // A write still in flight may yet succeed, so the record has to be deleted.
            self.delete_later(session, local.epoch);
        }
        self.relinquished
            .notify(local.into_relinquished(session, RelinquishedTo::NoClient));
        false
    }

    /// Called when a session's handler has accepted its `initialize`.
    pub(crate) fn on_initialize_accepted(&self, id: &str) {
        let session = SessionHash::of(id);
        if let Some(local) = self.shard(session).get_mut(&session) {
            local.phase = Phase::Open;
        }
        self.notify_changed();
        self.restore_attempts.on_restored(session);
    }

    /// Begins to replay the `initialize` of a session being restored.
    ///
    /// Returns `None` for any other session.
    pub(crate) fn begin_replay(&self, id: &str) -> Option<RestoreStep<'_>> {
        let session = SessionHash::of(id);
        let is_restoring = |local: &LocalSession| local.phase == Phase::Restoring;
        let is_replay = self.shard(session).get(&session).is_some_and(is_restoring);
        is_replay.then(|| self.restore_attempts.begin_step(session))
    }

    /// Called when a session's restore has ended.
    ///
    /// Closes the session if its handler has not accepted the `initialize`. The next request will then restore it again.
    pub(crate) fn on_restore_ended(&self, id: &str) {
        let session = SessionHash::of(id);
        let is_restoring = |local: &LocalSession| local.phase == Phase::Restoring;
        self.relinquish_if(session, RelinquishedTo::RestoreRetry, is_restoring);
    }

    /// Called when a session's parameters have been read and it is about to be restored here.
    ///
    /// An already local session keeps its own parameters, if known, and adopts the new epoch if that is higher.
    pub(crate) fn on_loaded(&self, id: &str, epoch: Epoch, params: Arc<[u8]>) {
        let session = SessionHash::of(id);
        let mut shard = self.shard(session);
        let local = shard
            .entry(session)
            .or_insert_with(|| LocalSession::loaded(id, epoch, &self.session_index));
        local.epoch = local.epoch.max(epoch);
        local.params.get_or_insert(params);
    }

    /// Removes a session that was loaded but never opened. Does nothing for any other session.
    pub(crate) fn discard_unopened(&self, session: SessionHash) {
        if let Entry::Occupied(local) = self.shard(session).entry(session)
            && matches!(local.get().phase, Phase::Loaded(_))
        {
            local.remove();
        }
    }

    /// Called when a session has been closed.
    ///
    /// If it has since been reloaded, it is retained so that it can be restored.
    ///
    /// The directory keeps its record until [`RECORD_TTL`](crate::directory::RECORD_TTL) after the last write.
    pub(crate) fn on_closed(&self, id: &str) {
        let session = SessionHash::of(id);
        if let Entry::Occupied(local) = self.shard(session).entry(session)
            && !matches!(local.get().phase, Phase::Loaded(_))
        {
            local.remove();
        }
    }

    fn remove(&self, session: SessionHash) -> Option<LocalSession> {
        self.shard(session).remove(&session)
    }

    /// Called when a client has ended its session. Queues the session's tombstone.
    pub(crate) fn on_deleted(&self, id: &str) {
        // If the session has already been closed, its epoch is no longer known here. The tombstone gets a new epoch, or the record's epoch
        // if that is higher.
        self.end(id, Epoch::now());
    }

    /// Called when a session turns out to be unrestorable, which ends it.
    ///
    /// The tombstone it queues does not replace a later claim.
    pub(crate) fn on_unrestorable(&self, id: &str, epoch: Epoch) {
        self.end(id, epoch);
    }

    /// Ends a session. The tombstone gets the session's own epoch, or `epoch` if the session is not local.
    fn end(&self, id: &str, epoch: Epoch) {
        let session = SessionHash::of(id);
        let epoch = match self.remove(session) {
            Some(local) => {
                let epoch = local.epoch;
                // The session is open at a service other than the one that received the request, and has to be closed there.
                if !matches!(local.phase, Phase::Loaded(_)) {
                    self.relinquished
                        .notify(local.into_relinquished(session, RelinquishedTo::Ended));
                }
                epoch
            }
            None => epoch,
        };
        self.delete_later(session, epoch);
    }

    fn delete_later(&self, session: SessionHash, epoch: Epoch) {
        {
            let mut queues = self.queues();
            queues.deleted.push_back(Deleted {
                session,
                epoch,
                is_in_flight: false,
                is_rewrite: false,
            });
            if queues.deleted.len() > MAX_DELETED {
                queues.deleted.pop_front();
            }
        }
        self.wake.notify_one();
    }

    /// Waits until the directory has a session, or the session is no longer local.
    pub(crate) async fn wait_until_written(&self, session: SessionHash) {
        self.wait_until(|| {
            self.shard(session)
                .get(&session)
                .is_none_or(|local| local.written_at.is_some())
        })
        .await;
    }

    /// Returns `true` if a session's tombstone has yet to be written.
    pub(crate) fn is_deleted(&self, session: SessionHash) -> bool {
        let queues = self.queues();
        queues
            .deleted
            .iter()
            .any(|deleted| deleted.session == session)
    }

    /// Waits until a session has no more tombstones to be written.
    pub(crate) async fn wait_until_removed(&self, session: SessionHash) {
        self.wait_until(|| !self.is_deleted(session)).await;
    }

    /// Waits until the directory has the tombstones of all deleted sessions.
    pub(crate) async fn wait_until_all_removed(&self) {
        self.wait_until(|| self.queues().deleted.is_empty()).await;
    }

    /// Waits until `condition` returns `true`.
    ///
    /// The condition is checked immediately, and again after each write, restore, relinquishment and heartbeat.
    pub(crate) async fn wait_until(&self, condition: impl Fn() -> bool) {
        wait_until(&self.written, condition).await;
    }

    /// Relinquishes a session that another instance now owns.
    #[cfg(test)]
    pub(crate) fn relinquish_to_owner(&self, session: SessionHash, owner: crate::ids::Owner) {
        self.relinquish_to(session, RelinquishedTo::Owner(owner));
    }

    /// Relinquishes a session to whichever instance asks for it next. Does nothing unless its gate is closed.
    pub(crate) fn relinquish(&self, session: SessionHash) {
        let id = self
            .shard(session)
            .get(&session)
            .map(|local| local.id.clone());
        let gate = id.and_then(|id| self.gate(&id));
        // A session restored in the meantime has a new gate.
        if gate.is_some_and(|gate| gate.is_closed()) {
            self.relinquish_to(session, RelinquishedTo::AnyClaimer);
        }
    }

    pub(super) fn relinquish_to(&self, session: SessionHash, to: RelinquishedTo) {
        self.relinquish_if(session, to, |_| true);
    }

    /// Removes a local session if it meets `condition`, and sends it to the task that closes it.
    pub(super) fn relinquish_if(
        &self,
        session: SessionHash,
        to: RelinquishedTo,
        condition: impl FnOnce(&LocalSession) -> bool,
    ) {
        if let Entry::Occupied(local) = self.shard(session).entry(session)
            && condition(local.get())
        {
            let mut local = local.remove();
            // Keep counting it as contested until its close is pending.
            let _contested = local.contested.take();
            // Send it while holding the lock, so that any request that no longer finds the session here will find its pending close.
            self.relinquished
                .notify(local.into_relinquished(session, to));
            self.notify_changed();
        }
    }

    /// Wakes the tasks waiting in [`wait_until`](Self::wait_until).
    pub(crate) fn notify_changed(&self) {
        self.written.notify_waiters();
    }

    pub(super) fn shard(
        &self,
        session: SessionHash,
    ) -> MutexGuard<'_, HashMap<SessionHash, LocalSession>> {
        let index = session.spread() % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "`index` is below `SHARDS`")]
        lock(&self.shards[index])
    }

    pub(super) fn queues(&self) -> MutexGuard<'_, Queues> {
        lock(&self.queues)
    }
}

impl Debug for Sessions {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
