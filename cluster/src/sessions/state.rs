//! The sessions that live here, from their beginning to their end.

use std::{
    collections::{HashMap, hash_map::Entry},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard, atomic::AtomicUsize},
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc},
    time::Instant,
};

use super::{
    local_session::LocalSession,
    queues::{Deleted, MAX_DELETED, Queues},
    relinquished::{Relinquished, RelinquishedSessions, RelinquishedTo},
    session_index::SessionIndex,
};
use crate::{
    drain_gate::{DrainGate, InFlightGuard},
    ids::{Epoch, Incarnation, Owner, SessionHash},
    lock::lock,
    ttl_cache::TtlCache,
    wait_until::wait_until,
};

/// Over how many locks the sessions are spread: 64.
const SHARDS: usize = 64;

/// How long a session may be loaded and not open: 60 s. Then its restoring has failed.
pub(super) const RESTORE_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of times that a session is restored in vain: 3. Then it counts as one that cannot be.
const RESTORE_ATTEMPTS: u32 = 3;

/// Of how many sessions it is remembered how often they were to be restored, and for how long: 4,096, 10 min.
const MAX_RESTORES: usize = 4 * 1024;
const RESTORES_TTL: Duration = Duration::from_secs(10 * 60);

/// The sessions that live here.
pub(crate) struct Sessions {
    pub(super) session_index: Arc<SessionIndex>,
    pub(super) shards: Box<[Mutex<HashMap<SessionHash, LocalSession>>]>,
    pub(super) me: Incarnation,
    /// How often sessions were to be restored that are not.
    restores: Mutex<TtlCache<u32>>,
    pub(super) work: Mutex<Queues>,
    /// How many sessions are contested: nearly always none.
    pub(super) contested: Arc<AtomicUsize>,
    /// How many sessions are to be written again before the directory counts as consistent.
    pub(super) unconfirmed: Arc<AtomicUsize>,
    /// There is something to be written.
    pub(super) wake: Notify,
    /// Something was written.
    pub(super) written: Notify,
    /// A session became contested.
    pub(super) contest: Notify,
    pub(crate) relinquished: RelinquishedSessions,
}

// === impl Sessions ===

impl Sessions {
    /// None yet, and where those are received that are relinquished.
    pub(crate) fn new(me: Incarnation) -> (Arc<Self>, mpsc::UnboundedReceiver<Relinquished>) {
        let (relinquished, receiver) = RelinquishedSessions::new();
        let sessions = Self {
            session_index: SessionIndex::new(),
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            me,
            restores: Mutex::new(TtlCache::new(MAX_RESTORES, RESTORES_TTL)),
            work: Mutex::default(),
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

    /// Whether a session lives here, and is not only loaded to be restored.
    pub(crate) fn is_open(&self, session: SessionHash) -> bool {
        let shard = self.shard(session);
        shard
            .get(&session)
            .is_some_and(|local| local.loaded.is_none())
    }

    /// Whether the parameters of a session that is open here are known. Without them the directory never knows it.
    pub(crate) fn has_params(&self, id: &str) -> Option<bool> {
        let session = SessionHash::of(id);
        let shard = self.shard(session);
        shard.get(&session).map(|local| local.params.is_some())
    }

    /// Enters the gate of a session that lives here: every request does. `None` if none does, or if its gate is closed.
    pub(crate) fn enter(&self, id: &str) -> Option<InFlightGuard> {
        self.session_index.enter(id)
    }

    pub(crate) fn gate(&self, id: &str) -> Option<Arc<DrainGate>> {
        self.session_index.gate(id)
    }

    /// Closes all gates, also those of sessions that come yet.
    pub(crate) fn close_gates(&self) {
        self.session_index.close_all();
    }

    /// Whether a session lives here, and its gate is not closed.
    pub(crate) fn has(&self, id: &str) -> bool {
        self.gate(id).is_some_and(|gate| !gate.is_closed())
    }

    /// All ids.
    pub(crate) fn ids(&self) -> Vec<Arc<str>> {
        let shards = self.shards.iter().map(lock);
        let ids =
            shards.flat_map(|shard| Vec::from_iter(shard.values().map(|local| local.id.clone())));
        ids.collect()
    }

    pub(crate) fn len(&self) -> usize {
        self.shards.iter().map(|shard| lock(shard).len()).sum()
    }

    /// A session was opened or restored.
    pub(crate) fn on_opened(&self, id: &str) {
        let session = SessionHash::of(id);
        {
            let mut shard = self.shard(session);
            let local = shard
                .entry(session)
                .or_insert_with(|| LocalSession::new(id, &self.session_index));
            local.loaded = None;
        }
        self.write_if_new(session);
    }

    /// The client's parameters are known, as JSON, and the directory is to know the session. A session that has closed
    /// meanwhile, because the handler refused it, is not known.
    pub(crate) fn on_initialized(&self, id: &str, params: Arc<[u8]>) {
        let session = SessionHash::of(id);
        if let Some(local) = self.shard(session).get_mut(&session) {
            local.loaded = None;
            local.params = Some(params);
        }
        self.write_if_new(session);
    }

    /// Has a session written that the directory is to know, and that was not written.
    fn write_if_new(&self, session: SessionHash) {
        let is_new = self.shard(session).get_mut(&session).is_some_and(|local| {
            local.is_unknown() && !std::mem::replace(&mut local.is_queued, true)
        });
        if is_new {
            self.work().fresh.push_back(session);
            self.wake.notify_one();
        }
    }

    /// A session was opened, and its client's parameters are known.
    #[cfg(test)]
    pub(crate) fn begin(&self, id: &str, params: Arc<[u8]>) {
        self.on_opened(id);
        self.on_initialized(id, params);
    }

    /// Whether a session that has just opened may be given to its client: the directory knows it, or is not to know it, and its gate
    /// is not closed. If not, it is relinquished, to be closed.
    pub(crate) fn admit_new_session(&self, id: &str) -> bool {
        let session = SessionHash::of(id);
        let is_closed = self.gate(id).is_some_and(|gate| gate.is_closed());
        let local = match self.shard(session).entry(session) {
            Entry::Occupied(local) if is_closed || local.get().is_unknown() => local.remove(),
            _ => return true,
        };
        self.work().fresh.retain(|fresh| *fresh != session);
        if local.is_sent {
            // It may become known yet.
            self.delete_later(session, local.epoch);
        }
        self.relinquished
            .notify(local.into_relinquished(session, RelinquishedTo::NoClient));
        false
    }

    /// A session of this instance was found in the directory, and is to be restored.
    pub(crate) fn record_restore_attempt(&self, session: SessionHash) {
        let (now, mut restores) = (Instant::now(), lock(&self.restores));
        let attempts = restores.get(session, now).copied().unwrap_or_default();
        restores.insert(session, attempts + 1, now);
    }

    /// A request of a session that was restored was served.
    pub(crate) fn clear_restore_attempts(&self, id: &str) {
        lock(&self.restores).remove(SessionHash::of(id));
    }

    /// Whether it was tried so often to restore a session that it cannot be.
    pub(crate) fn is_unrestorable(&self, id: &str) -> bool {
        let restores = lock(&self.restores);
        let attempts = restores.get(SessionHash::of(id), Instant::now());
        attempts.is_some_and(|attempts| *attempts >= RESTORE_ATTEMPTS)
    }

    /// A session was opened to be restored, and has no handler that serves it. It is closed unless another request is in flight.
    pub(crate) fn on_restore_failed(&self, id: &str) {
        let is_closed = |gate: Arc<DrainGate>| gate.close_if_idle(|| true);
        if self.gate(id).is_some_and(is_closed) {
            self.relinquish_to(SessionHash::of(id), RelinquishedTo::RestoreRetry);
        }
    }

    /// The parameters of a session were read, and it is about to be restored here.
    pub(crate) fn on_loaded(&self, id: &str, epoch: Epoch, params: Arc<[u8]>) {
        let session = SessionHash::of(id);
        let mut shard = self.shard(session);
        let local = shard
            .entry(session)
            .or_insert_with(|| LocalSession::loaded(id, epoch, &self.session_index));
        local.epoch = local.epoch.max(epoch);
        local.params.get_or_insert(params);
    }

    /// A session that was loaded and is not open is not about to be restored any more.
    pub(crate) fn discard_unopened(&self, session: SessionHash) {
        if let Entry::Occupied(local) = self.shard(session).entry(session)
            && local.get().loaded.is_some()
        {
            local.remove();
        }
    }

    /// A session was closed. The directory knows it as long as it knows one of which it hears nothing more.
    pub(crate) fn on_closed(&self, id: &str) {
        self.remove(SessionHash::of(id));
    }

    /// Nothing of a session is here any more.
    fn remove(&self, session: SessionHash) -> Option<LocalSession> {
        self.shard(session).remove(&session)
    }

    /// The client ended its session. Nobody is to find it any more.
    pub(crate) fn on_deleted(&self, id: &str) {
        let session = SessionHash::of(id);
        // Where it has closed already, the record itself has the epoch that ends.
        let epoch = self
            .remove(session)
            .map_or_else(Epoch::now, |local| local.epoch);
        self.delete_later(session, epoch);
    }

    /// The directory is to have a tombstone of a session.
    fn delete_later(&self, session: SessionHash, epoch: Epoch) {
        {
            let mut work = self.work();
            work.deleted.push_back(Deleted {
                session,
                epoch,
                is_in_flight: false,
                is_again: false,
            });
            if work.deleted.len() > MAX_DELETED {
                work.deleted.pop_front();
            }
        }
        self.wake.notify_one();
    }

    /// Returns when the directory knows a session, or does not live here any more.
    pub(crate) async fn until_written(&self, session: SessionHash) {
        self.until(|| {
            self.shard(session)
                .get(&session)
                .is_none_or(|local| local.written.is_some())
        })
        .await;
    }

    /// Whether a session was deleted of which the directory is still to be told so.
    pub(crate) fn is_deleted(&self, session: SessionHash) -> bool {
        let work = self.work();
        work.deleted
            .iter()
            .any(|deleted| deleted.session == session)
    }

    /// Returns when the directory is not to be told any more that a session was deleted.
    pub(crate) async fn until_removed(&self, session: SessionHash) {
        self.until(|| !self.is_deleted(session)).await;
    }

    /// Returns when the directory has a tombstone of each session that was deleted.
    pub(crate) async fn until_all_removed(&self) {
        self.until(|| self.work().deleted.is_empty()).await;
    }

    /// Returns when something is so, which is looked at whenever something was written or lost, and after each heartbeat.
    pub(crate) async fn until(&self, is_so: impl Fn() -> bool) {
        wait_until(&self.written, is_so).await;
    }

    /// A session is another's now.
    pub(crate) fn relinquish_to_owner(&self, session: SessionHash, owner: Owner) {
        self.relinquish_to(session, RelinquishedTo::Owner(owner));
    }

    /// A session whose gate is closed is relinquished: the next instance that asks for it claims it.
    pub(crate) fn relinquish(&self, session: SessionHash) {
        let id = self
            .shard(session)
            .get(&session)
            .map(|local| local.id.clone());
        let gate = id.and_then(|id| self.gate(&id));
        // One that has come back has another.
        if gate.is_some_and(|gate| gate.is_closed()) {
            self.relinquish_to(session, RelinquishedTo::AnyClaimer);
        }
    }

    pub(super) fn relinquish_to(&self, session: SessionHash, to: RelinquishedTo) {
        let mut shard = self.shard(session);
        if let Some(local) = shard.remove(&session) {
            // Under the lock: a request that does not find it here any more finds that it is being closed.
            self.relinquished
                .notify(local.into_relinquished(session, to));
            self.changed();
        }
    }

    /// Has those look again who wait [`until`](Self::until) something is so.
    pub(crate) fn changed(&self) {
        self.written.notify_waiters();
    }

    pub(super) fn shard(
        &self,
        session: SessionHash,
    ) -> MutexGuard<'_, HashMap<SessionHash, LocalSession>> {
        let at = session.spread() % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "there are so many")]
        lock(&self.shards[at])
    }

    pub(super) fn work(&self) -> MutexGuard<'_, Queues> {
        lock(&self.work)
    }
}

impl Debug for Sessions {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sessions")
            .field("len", &self.len())
            .finish_non_exhaustive()
    }
}
