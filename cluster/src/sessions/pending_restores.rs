//! Sessions that are about to be restored here.
//!
//! 1. For a peer such a session is already here. Otherwise the peer would claim a session that this instance has just claimed, and both
//!    would restore it.
//! 2. One request at a time restores a session. When the client of that request disconnects, rmcp answers 404 to the requests that wait
//!    (`aborted_restore` in ARCHITECTURE.md, Workarounds). Aborted restores are therefore recorded.

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

/// How long an aborted restore is recorded: 1 s.
///
/// Chosen because rmcp discards the result of an aborted restore once a task of its own has run.
const ABORTED_TTL: Duration = Duration::from_secs(1);

/// Maximum number of sessions with a recorded aborted restore: 4,096.
const MAX_ABORTED: usize = 4 * 1024;

/// The pending restores. Clones share their state.
#[derive(Debug, Clone, Default)]
pub(crate) struct PendingRestores(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    restoring: Mutex<HashMap<SessionHash, RestoreStatus>>,
    /// Sessions whose client disconnected during the restore.
    aborted: Mutex<TtlCache<()>>,
    /// Number of sessions with a pending restore. While it is zero, the routing of a request does not take the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct RestoreStatus {
    /// Number of requests that take part in the restore.
    requests: usize,
    turn: Arc<sync::Mutex<()>>,
}

/// Keeps the restore of a session pending until dropped.
#[derive(Debug)]
pub(crate) struct PendingRestore {
    pending_restores: PendingRestores,
    session: SessionHash,
    turn: Arc<sync::Mutex<()>>,
}

/// While this exists, no other request restores the session.
pub(crate) type RestoreTurn = sync::OwnedMutexGuard<()>;

/// A running restore. If dropped before [`complete`](Self::complete), its client has disconnected.
pub(crate) struct RestoreGuard<'a>(Option<&'a PendingRestore>);

// === impl PendingRestores ===

impl PendingRestores {
    /// Marks a session as about to be restored.
    pub(crate) fn add(&self, session: SessionHash) -> PendingRestore {
        let mut restoring = self.restoring();
        let restore = self.count_request(session, restoring.entry(session).or_default());
        self.0.count.store(restoring.len(), Ordering::Release);
        restore
    }

    /// Joins a restore that is pending. Returns `None` if there is none.
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

    /// Calls `act` if no restore of a session is pending. The lock keeps restores from beginning meanwhile.
    pub(crate) fn unless_restoring(&self, session: SessionHash, act: impl FnOnce()) {
        let restoring = self.restoring();
        if !restoring.contains_key(&session) {
            act();
        }
    }

    pub(crate) fn contains(&self, session: SessionHash) -> bool {
        self.restoring().contains_key(&session)
    }

    /// Returns the number of requests that wait for a session.
    #[cfg(test)]
    pub(crate) fn requests(&self, session: SessionHash) -> usize {
        self.restoring().get(&session).map_or(0, |its| its.requests)
    }

    /// Returns `true` if no restore is pending.
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

    /// Begins the restore, for the request whose turn it is.
    pub(crate) fn begin_attempt(&self) -> RestoreGuard<'_> {
        RestoreGuard(Some(self))
    }

    /// Returns `true` if a client has aborted the restore within [`ABORTED_TTL`].
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
    /// Ends the restore, successful or not, with its client still connected.
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
