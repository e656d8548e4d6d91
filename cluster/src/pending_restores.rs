//! Sessions that are about to be restored here: this instance is their owner, and the request that restores them is being served.
//!
//! 1. To a peer they are here already. If they were not, it would claim a session that was claimed a moment ago, and two instances
//!    would restore it.
//! 2. One request at a time restores a session. rmcp says "no such session" to all that wait for one whose client hangs up, and for a
//!    moment after that to everybody. So it is remembered which restores were aborted.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync, time::Instant};

use crate::{ids::SessionHash, lock::lock, ttl_cache::TtlCache};

/// For how long it is remembered that a client aborted the restore: 1 s. rmcp forgets it as soon as a task of its own was run.
const ABORTED_TTL: Duration = Duration::from_secs(1);

/// Of how many sessions that is remembered: 4,096.
const MAX_ABORTED: usize = 4 * 1024;

/// The restores that are pending. It is a handle: clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingRestores(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    restoring: Mutex<HashMap<SessionHash, RestoreStatus>>,
    /// Sessions whose client hung up while they were restored.
    aborted: Mutex<TtlCache<()>>,
    /// How many sessions are about to be restored: nearly always none, and then nobody takes the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct RestoreStatus {
    /// How many requests wait for it.
    requests: usize,
    turn: Arc<sync::Mutex<()>>,
}

/// The restore of a session is pending until this is dropped.
#[derive(Debug)]
pub(crate) struct PendingRestore {
    pending_restores: PendingRestores,
    session: SessionHash,
    turn: Arc<sync::Mutex<()>>,
}

/// As long as this exists, no other request restores the session.
pub(crate) type RestoreTurn = sync::OwnedMutexGuard<()>;

/// A session is being restored. Dropped before [`complete`](Self::complete), its client has hung up.
pub(crate) struct RestoreGuard<'a>(Option<&'a PendingRestore>);

// === impl PendingRestores ===

impl PendingRestores {
    /// A session is about to be restored.
    pub(crate) fn add(&self, session: SessionHash) -> PendingRestore {
        let mut restoring = self.restoring();
        let restore = self.count_request(session, restoring.entry(session).or_default());
        self.0.count.store(restoring.len(), Ordering::Release);
        restore
    }

    /// The same, if it is already.
    pub(crate) fn join(&self, session: SessionHash) -> Option<PendingRestore> {
        let mut restoring = self.restoring();
        let its = restoring.get_mut(&session)?;
        Some(self.count_request(session, its))
    }

    fn count_request(&self, session: SessionHash, its: &mut RestoreStatus) -> PendingRestore {
        its.requests += 1;
        PendingRestore {
            pending_restores: self.clone(),
            session,
            turn: its.turn.clone(),
        }
    }

    /// Does something unless the restore of a session is pending, and before it can be.
    pub(crate) fn unless_restoring(&self, session: SessionHash, act: impl FnOnce()) {
        let restoring = self.restoring();
        if !restoring.contains_key(&session) {
            act();
        }
    }

    pub(crate) fn contains(&self, session: SessionHash) -> bool {
        self.restoring().contains_key(&session)
    }

    /// How many requests wait for a session.
    #[cfg(test)]
    pub(crate) fn requests(&self, session: SessionHash) -> usize {
        self.restoring().get(&session).map_or(0, |its| its.requests)
    }

    /// Whether no restore is pending.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    fn restoring(&self) -> MutexGuard<'_, HashMap<SessionHash, RestoreStatus>> {
        lock(&self.0.restoring)
    }

    fn aborted(&self) -> MutexGuard<'_, TtlCache<()>> {
        lock(&self.0.aborted)
    }
}

// === impl Inner ===

impl Default for Inner {
    fn default() -> Self {
        Self {
            restoring: Mutex::default(),
            aborted: Mutex::new(TtlCache::new(MAX_ABORTED, ABORTED_TTL)),
            count: AtomicUsize::new(0),
        }
    }
}

// === impl PendingRestore ===

impl PendingRestore {
    /// Waits until no other request restores the session.
    pub(crate) async fn turn(&self) -> RestoreTurn {
        self.turn.clone().lock_owned().await
    }

    /// The request whose turn it is restores the session from here on.
    pub(crate) fn begin_attempt(&self) -> RestoreGuard<'_> {
        RestoreGuard(Some(self))
    }

    /// Whether a client aborted the restore in the last moment.
    pub(crate) fn was_aborted(&self) -> bool {
        let aborted = self.pending_restores.aborted();
        aborted.get(self.session, Instant::now()).is_some()
    }
}

impl Drop for PendingRestore {
    fn drop(&mut self) {
        let mut restoring = self.pending_restores.restoring();
        if let Entry::Occupied(mut its) = restoring.entry(self.session) {
            match its.get().requests.checked_sub(1) {
                Some(left @ 1..) => its.get_mut().requests = left,
                _ => drop(its.remove()),
            }
        }
        self.pending_restores
            .0
            .count
            .store(restoring.len(), Ordering::Release);
    }
}

// === impl RestoreGuard ===

impl RestoreGuard<'_> {
    /// It is restored, or cannot be, and its client was there.
    pub(crate) fn complete(mut self) {
        self.0 = None;
    }
}

impl Drop for RestoreGuard<'_> {
    fn drop(&mut self) {
        if let Some(restore) = self.0 {
            let mut aborted = restore.pending_restores.aborted();
            aborted.insert(restore.session, (), Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_restore_is_pending_until_no_request_waits_for_it_any_more() {
        let pending_restores = PendingRestores::default();
        let (session, other) = (SessionHash::of("a"), SessionHash::of("b"));
        let first = pending_restores.add(session);
        let second = pending_restores.add(session);
        drop(first);
        assert!(pending_restores.contains(session) && !pending_restores.contains(other));
        drop(second);
        assert!(!pending_restores.contains(session) && pending_restores.is_empty());
    }

    #[tokio::test]
    async fn one_request_at_a_time_restores_a_session() {
        let pending_restores = PendingRestores::default();
        let [first, second] = [(); 2].map(|()| pending_restores.add(SessionHash::of("a")));
        let other = pending_restores.add(SessionHash::of("b"));
        let turn = first.turn().await;
        assert!(second.turn().now_or_never().is_none());
        assert!(other.turn().now_or_never().is_some());
        drop((turn, first));
        assert!(second.turn().now_or_never().is_some());
    }
}
