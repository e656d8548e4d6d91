//! The ids of the local sessions, and their drain gates.
//!
//! Every request looks up its own session here. Hashing the id as the directory does would cost ten times the look-up.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::{
    lock::lock,
    sessions::drain_gate::{DrainGate, InFlightGuard},
};

/// Number of locks over which the ids are spread: 64.
const SHARDS: usize = 64;

pub(super) struct SessionIndex {
    shards: Box<[Mutex<Shard>]>,
    /// Whether all gates are closed, also those of sessions that are inserted later.
    is_closed: AtomicBool,
}

type Shard = HashMap<Arc<str>, SessionRow, BuildHasherDefault<IdHasher>>;

#[derive(Default)]
struct SessionRow {
    /// How often the id was inserted and not removed.
    count: usize,
    gate: Arc<DrainGate>,
}

/// Mixes eight bytes at a time. Ids in the index were generated here, so no client can choose colliding ids.
#[derive(Default)]
struct IdHasher(u64);

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

    /// Enters the gate of a session. `None` if the session is not local, or the gate is closed.
    pub(super) fn enter(&self, id: &str) -> Option<InFlightGuard> {
        self.shard(id).get(id)?.gate.enter()
    }

    pub(super) fn gate(&self, id: &str) -> Option<Arc<DrainGate>> {
        self.shard(id).get(id).map(|row| row.gate.clone())
    }

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

    /// Closes all gates regardless of requests in flight, also those of later sessions.
    pub(super) fn close_all(&self) {
        // Stored first: a concurrent `insert` either sees this flag, or its gate is closed below.
        self.is_closed.store(true, Ordering::Release);
        for shard in &self.shards {
            for row in lock(shard).values() {
                row.gate.close();
            }
        }
    }

    /// Removes an id. Returns its row if the id is not in the index any more.
    fn remove(&self, id: &Arc<str>) -> Option<SessionRow> {
        match self.shard(id).entry(id.clone()) {
            Entry::Occupied(mut row) => match row.get().count.checked_sub(1) {
                Some(left @ 1..) => {
                    row.get_mut().count = left;
                    None
                }
                _ => Some(row.remove()),
            },
            Entry::Vacant(_) => None,
        }
    }

    fn shard(&self, id: &str) -> MutexGuard<'_, Shard> {
        // The end of an id varies most. A client that makes up colliding ids only contends with itself.
        let end = id.as_bytes().iter().rev().take(2);
        let at = end.fold(0, |at, byte| at * 31 + usize::from(*byte)) % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "there are so many")]
        lock(&self.shards[at])
    }
}

// === impl IdHasher ===

impl IdHasher {
    fn mix(&mut self, word: u64) {
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            self.mix(u64::from_le_bytes(*word));
        }
        let rest = rest
            .iter()
            .fold(0, |rest, byte| rest << 8 | u64::from(*byte));
        self.mix(rest);
    }

    /// Ignores the terminator of a `str`, because nothing follows it.
    fn write_u8(&mut self, _: u8) {}

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
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
    fn an_id_is_there_until_its_last_guard_is_dropped() {
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
