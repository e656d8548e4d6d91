//! The event ids that a call no longer stores.
//!
//! A resume with one of these ids may refer to the call, but a resume with an id that the call never had must not keep the call running. A
//! Bloom filter distinguishes the two. It never misses a forgotten id, but occasionally mistakes another id for one, in which case the call
//! merely keeps running. Clients cannot provoke these mistakes, because the hashes are keyed.

/// Number of 64-bit words, 4 KiB in total. With 5,000 forgotten ids, 4% of all other ids are mistaken for one, with 20,000 two thirds.
const WORDS: usize = 512;

/// Number of bits set for each id.
const BITS_PER_ID: u32 = 4;

/// A Bloom filter of event id hashes.
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

/// Returns the word index and the mask for each of an id's bits.
fn bits(hash: u64) -> impl Iterator<Item = (usize, u64)> {
    (0..BITS_PER_ID).map(move |nth| {
        // Each bit's position is derived from a different 16 bits of the hash.
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
