//! Locks over which entries are spread by a hash.

use std::slice;

/// How many they are: 64, so that two entries that are looked for at the same time seldom meet at one.
const SHARDS: usize = 64;

pub(crate) struct Shards<L>(Box<[L]>);

// === impl Shards ===

impl<L> Shards<L> {
    /// The lock for this hash, by bits that a map behind it does not take.
    pub(crate) fn of(&self, hash: u64) -> &L {
        let at = (hash >> 32) as usize % SHARDS;
        #[expect(clippy::indexing_slicing, reason = "there are so many")]
        &self.0[at]
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
