//! Sessions about to be restored here.
//!
//! 1. As far as peers are concerned, these sessions are already local. Otherwise, a peer would claim a session that this instance has only
//!    just claimed, and both would restore it.
//! 2. Only one request at a time restores a session.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync;

use crate::{ids::SessionHash, lock::lock};

/// The pending restores. All clones share them.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingRestores(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    restoring: Mutex<HashMap<SessionHash, RestoreStatus>>,
    /// Number of sessions with a pending restore. While it is zero, requests are routed without taking the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct RestoreStatus {
    /// Number of requests taking part in the restore.
    requests: usize,
    turn: Arc<sync::Mutex<()>>,
}

/// Keeps a session's restore pending until dropped.
#[derive(Debug)]
pub(crate) struct PendingRestore {
    pending_restores: PendingRestores,
    session: SessionHash,
    turn: Arc<sync::Mutex<()>>,
}

/// A request's turn to restore a session. No other request restores it until this is dropped.
pub(crate) type RestoreTurn = sync::OwnedMutexGuard<()>;

// === impl PendingRestores ===

impl PendingRestores {
    /// Marks a session as about to be restored.
    pub(crate) fn add(&self, session: SessionHash) -> PendingRestore {
        let mut restoring = self.restoring();
        let restore = self.count_request(session, restoring.entry(session).or_default());
        self.0.count.store(restoring.len(), Ordering::Release);
        restore
    }

    /// Joins a session's pending restore, or returns `None` if there is none.
    pub(crate) fn join(&self, session: SessionHash) -> Option<PendingRestore> {
        let mut restoring = self.restoring();
        let status = restoring.get_mut(&session)?;
        Some(self.count_request(session, status))
    }

    fn count_request(&self, session: SessionHash, status: &mut RestoreStatus) -> PendingRestore {
        status.requests += 1;
        PendingRestore {
            pending_restores: self.clone(),
            session,
            turn: status.turn.clone(),
        }
    }

    /// Calls `act` unless the session is about to be restored.
    ///
    /// The lock is held during the call, so no restore can start in the meantime.
    pub(crate) fn run_unless_restoring(&self, session: SessionHash, act: impl FnOnce()) {
        let restoring = self.restoring();
        if !restoring.contains_key(&session) {
            act();
        }
    }

    pub(crate) fn contains(&self, session: SessionHash) -> bool {
        self.restoring().contains_key(&session)
    }

    /// Returns the number of requests taking part in a session's restore.
    #[cfg(test)]
    pub(crate) fn requests(&self, session: SessionHash) -> usize {
        self.restoring()
            .get(&session)
            .map_or(0, |status| status.requests)
    }

    /// Returns `true` if no restore is pending.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    fn restoring(&self) -> MutexGuard<'_, HashMap<SessionHash, RestoreStatus>> {
        lock(&self.0.restoring)
    }
}

// === impl PendingRestore ===

impl PendingRestore {
    /// Waits until no other request is restoring the session.
    pub(crate) async fn turn(&self) -> RestoreTurn {
        self.turn.clone().lock_owned().await
    }
}

impl Drop for PendingRestore {
    fn drop(&mut self) {
        let mut restoring = self.pending_restores.restoring();
        if let Entry::Occupied(mut entry) = restoring.entry(self.session) {
            match entry.get().requests.checked_sub(1) {
                Some(remaining @ 1..) => entry.get_mut().requests = remaining,
                _ => drop(entry.remove()),
            }
        }
        self.pending_restores
            .0
            .count
            .store(restoring.len(), Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_restore_is_pending_while_a_request_takes_part_in_it() {
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
