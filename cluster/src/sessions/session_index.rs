//! The ids of the local sessions, and their drain gates.
//!
//! Every request looks up its own session here. Hashing the id as the directory does would cost ten times the lookup.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use foldhash::fast::RandomState;

use crate::{
    lock::lock,
    sessions::drain_gate::{DrainGate, InFlightGuard},
};

/// Number of locks over which the ids are spread: 64.
const SHARDS: usize = 64;

/// Map from the id of each local session to its gate.
pub(super) struct SessionIndex {
    shards: Box<[Mutex<Shard>]>,
    /// Whether all gates are closed, including those of sessions that are inserted later.
    is_closed: AtomicBool,
}

/// The hasher is fast and does not resist chosen ids. An instance has generated each id in the index.
type Shard = HashMap<Arc<str>, SessionRow, RandomState>;

#[derive(Default)]
struct SessionRow {
    /// Number of times the id was inserted and not yet removed.
    count: usize,
    gate: Arc<DrainGate>,
}

/// Keeps an id in the index until dropped.
pub(super) struct IndexGuard {
    index: Arc<SessionIndex>,
    id: Arc<str>,
}

// === impl SessionIndex ===

impl SessionIndex {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            is_closed: AtomicBool::new(false),
        })
    }

    /// Enters the gate of a session. Returns `None` if the session is not local, or its gate is closed.
    pub(super) fn enter(&self, id: &str) -> Option<InFlightGuard> {
        self.shard(id).get(id)?.gate.enter()
    }

    pub(super) fn gate(&self, id: &str) -> Option<Arc<DrainGate>> {
        self.shard(id).get(id).map(|row| row.gate.clone())
    }

    /// Adds an id until the guard is dropped. The gate is closed if [`close_all`](Self::close_all) was called.
    pub(super) fn insert(self: &Arc<Self>, id: &Arc<str>) -> IndexGuard {
        {
            let mut shard = self.shard(id);
            let row = shard.entry(id.clone()).or_default();
            row.count += 1;
            if self.is_closed.load(Ordering::Acquire) {
                row.gate.close();
            }
        }
        IndexGuard {
            index: self.clone(),
            id: id.clone(),
        }
    }

    /// Closes all gates, including those of later sessions, even if requests are in flight.
    pub(super) fn close_all(&self) {
        // Stored first, so a concurrent `insert` either loads this flag as set, or its gate is closed below.
        self.is_closed.store(true, Ordering::Release);
        for shard in &self.shards {
            for row in lock(shard).values() {
                row.gate.close();
            }
        }
    }

    /// Undoes one insertion of an id. Returns its row if that was the last one.
    fn remove(&self, id: &Arc<str>) -> Option<SessionRow> {
        match self.shard(id).entry(id.clone()) {
            Entry::Occupied(mut row) => match row.get().count.checked_sub(1) {
                Some(remaining @ 1..) => {
                    row.get_mut().count = remaining;
                    None
                }
                _ => Some(row.remove()),
            },
            Entry::Vacant(_) => None,
        }
    }

    fn shard(&self, id: &str) -> MutexGuard<'_, Shard> {
        // The end of an id varies most. Ids that a client makes up can at worst contend for one of the locks.
        let end = id.as_bytes().iter().rev().take(2);
        let index = end.fold(0, |hash, byte| hash * 31 + usize::from(*byte)) % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "`index` is below `SHARDS`")]
        lock(&self.shards[index])
    }
}

// === impl IndexGuard ===

impl Drop for IndexGuard {
    fn drop(&mut self) {
        if let Some(row) = self.index.remove(&self.id) {
            // A task that waits for the gate to close must not wait for a removed session.
            row.gate.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_indexed_until_its_last_guard_is_dropped() {
        let index = SessionIndex::new();
        let (id, short): (Arc<str>, Arc<str>) = ("session".into(), "n".into());
        let (first, other) = (index.insert(&id), index.insert(&short));
        let second = index.insert(&id);
        drop(first);
        let has = |id| index.gate(id).is_some();
        assert!(has("session") && has("n") && !has("") && !has("xn"));
        drop((second, other));
        assert!(!has("session") && !has("n"));
        assert!(index.shards.iter().all(|shard| lock(shard).is_empty()));
    }
}
