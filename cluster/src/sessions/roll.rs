//! The ids of the sessions that live here, and their doors. Every request asks for its own: the hash that the directory knows it
//! by would cost ten times as much as this.

use std::{
    collections::{HashMap, hash_map::Entry},
    hash::{BuildHasherDefault, Hasher},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use crate::door::{Door, Visit};

/// Over how many locks the ids are spread: 64.
const SHARDS: usize = 64;

pub(super) struct Roll {
    shards: Box<[Mutex<Shard>]>,
    /// Whether all doors are shut, also of what is listed later.
    is_shut: AtomicBool,
}

type Shard = HashMap<Arc<str>, Row, BuildHasherDefault<IdHasher>>;

#[derive(Default)]
struct Row {
    /// How often the id is on the list.
    times: usize,
    door: Arc<Door>,
}

/// Mixes eight bytes at a time. What is on the list was given out here: no client can choose ids that meet there.
#[derive(Default)]
struct IdHasher(u64);

/// An id is on the list until this is dropped.
pub(super) struct Listed {
    roll: Arc<Roll>,
    id: Arc<str>,
}

// === impl Roll ===

impl Roll {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            is_shut: AtomicBool::new(false),
        })
    }

    /// Goes in at the door of a session. `None` if it is not here, or shut.
    pub(super) fn enter(&self, id: &str) -> Option<Visit> {
        self.shard(id).get(id)?.door.enter()
    }

    pub(super) fn door(&self, id: &str) -> Option<Arc<Door>> {
        self.shard(id).get(id).map(|row| row.door.clone())
    }

    pub(super) fn list(self: &Arc<Self>, id: &Arc<str>) -> Listed {
        {
            let mut shard = self.shard(id);
            let row = shard.entry(id.clone()).or_default();
            row.times += 1;
            if self.is_shut.load(Ordering::Acquire) {
                row.door.shut();
            }
        }
        Listed {
            roll: self.clone(),
            id: id.clone(),
        }
    }

    /// Shuts all doors, whoever is inside, also those of sessions that come yet.
    pub(super) fn shut(&self) {
        // First: what is listed meanwhile is seen below, or sees this.
        self.is_shut.store(true, Ordering::Release);
        for shard in &self.shards {
            for row in lock(shard).values() {
                row.door.shut();
            }
        }
    }

    /// Returns the row of an id that is on the list no more.
    fn unlist(&self, id: &Arc<str>) -> Option<Row> {
        match self.shard(id).entry(id.clone()) {
            Entry::Occupied(mut row) => match row.get().times.checked_sub(1) {
                Some(left @ 1..) => {
                    row.get_mut().times = left;
                    None
                }
                _ => Some(row.remove()),
            },
            Entry::Vacant(_) => None,
        }
    }

    fn shard(&self, id: &str) -> MutexGuard<'_, Shard> {
        // The end of an id differs most. A client that makes up ids that meet only waits for itself.
        let end = id.as_bytes().iter().rev().take(2);
        let at = end.fold(0, |at, byte| at * 31 + usize::from(*byte)) % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "there are so many")]
        lock(&self.shards[at])
    }
}

fn lock(shard: &Mutex<Shard>) -> MutexGuard<'_, Shard> {
    shard.lock().unwrap_or_else(PoisonError::into_inner)
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

    /// What ends a text. There is nothing after it here.
    fn write_u8(&mut self, _: u8) {}

    fn finish(&self) -> u64 {
        self.0 ^ (self.0 >> 32)
    }
}

// === impl Listed ===

impl Drop for Listed {
    fn drop(&mut self) {
        if let Some(row) = self.roll.unlist(&self.id) {
            // Whoever waits for it to be shut does not wait for what has gone.
            row.door.shut();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_there_until_its_last_listing_is_over() {
        let roll = Roll::new();
        let (id, short): (Arc<str>, Arc<str>) = ("session".into(), "n".into());
        let (first, other) = (roll.list(&id), roll.list(&short));
        let second = roll.list(&id);
        drop(first);
        let has = |id| roll.door(id).is_some();
        assert!(has("session") && has("n") && !has("") && !has("xn"));
        drop((second, other));
        assert!(!has("session") && !has("n"));
        assert!(roll.shards.iter().all(|shard| lock(shard).is_empty()));
    }
}
