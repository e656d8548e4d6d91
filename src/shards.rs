//! A fixed set of locks, shared by entries according to their hashes.

use std::slice;

/// Enough that concurrent lookups of different entries rarely contend.
const SHARDS: usize = 64;

pub(crate) struct Shards<L>(Box<[L]>);

// === impl Shards ===

impl<L> Shards<L> {
    /// Returns the lock for a hash.
    ///
    /// The lock is chosen using hash bits that the map behind it does not use.
    pub(crate) fn get(&self, hash: u64) -> &L {
        let index = (hash >> 32) as usize % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "`index` is below `SHARDS`")]
        &self.0[index]
    }

    pub(crate) fn iter(&self) -> slice::Iter<'_, L> {
        self.0.iter()
    }
}

impl<L: Default> Default for Shards<L> {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| L::default()).collect())
    }
}
