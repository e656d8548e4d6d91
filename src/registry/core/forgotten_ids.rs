//! The event ids that a call no longer stores.
//!
//! A resume with one of them may refer to the call, whereas a resume with an id that the call never had must not keep it running. A Bloom
//! filter tells the two apart: it never misses an id, but sometimes takes another id for one of them, in which case the call merely keeps
//! running. Clients cannot provoke that, because the hashes are keyed.

/// Number of 64-bit words, which is 4 KiB. At 5,000 ids, it takes 4% of other ids for one of them, at 20,000 two thirds.
const WORDS: usize = 512;

/// Number of bits that are set for each id.
const BITS_PER_ID: u32 = 4;

#[derive(Debug)]
pub(super) struct ForgottenIds([u64; WORDS]);

// === impl ForgottenIds ===

impl ForgottenIds {
    pub(super) fn add(&mut self, hash: u64) {
        for (word, mask) in bits(hash) {
            if let Some(word) = self.0.get_mut(word) {
                *word |= mask;
            }
        }
    }

    /// Returns `true` for every id that has been added, and for few others until thousands have been added.
    pub(super) fn may_contain(&self, hash: u64) -> bool {
        bits(hash).all(|(word, mask)| self.0.get(word).is_some_and(|word| word & mask != 0))
    }
}

impl Default for ForgottenIds {
    fn default() -> Self {
        Self([0; WORDS])
    }
}

/// Returns the word and the mask of each of an id's bits.
fn bits(hash: u64) -> impl Iterator<Item = (usize, u64)> {
    (0..BITS_PER_ID).map(move |nth| {
        // Each bit has 16 bits of the hash to itself.
        let bit = hash >> (16 * nth);
        ((bit / 64) as usize % WORDS, 1 << (bit % 64))
    })
}

#[cfg(test)]
mod tests {
    use std::hash::{BuildHasher as _, RandomState};

    use super::*;

    #[test]
    fn a_forgotten_id_is_always_recognised_and_another_one_seldom() {
        let hasher = RandomState::new();
        let mut forgotten = ForgottenIds::default();
        for id in 0..1_000 {
            forgotten.add(hasher.hash_one(id));
        }
        assert!((0..1_000).all(|id| forgotten.may_contain(hasher.hash_one(id))));
        let others = 1_000..101_000;
        let mistaken = others.filter(|id| forgotten.may_contain(hasher.hash_one(id)));
        // About 17 are expected.
        assert!(mistaken.count() < 100);
    }
}
