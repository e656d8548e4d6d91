//! An unkeyed hash of ids that the server issues.
//!
//! It is fast, because every request looks up its session several times. The server issues the ids, so no client can fill a map
//! with ids that collide. A client gains nothing from a collision either: a map look-up compares the id itself. Where only hashes are
//! compared (`replay::has_answer`), they decide whether a client already has its own answer.

use std::hash::{BuildHasher, BuildHasherDefault, Hasher};

#[derive(Default)]
pub(super) struct IdHasher(u64);

/// The hash of an id.
pub(super) fn of(id: &str) -> u64 {
    BuildHasherDefault::<IdHasher>::default().hash_one(id)
}

/// A hash of the first and the last eight bytes of an id, which is enough to spread ids.
pub(super) fn of_ends(id: &str) -> u64 {
    let id = id.as_bytes();
    let mut hasher = IdHasher::default();
    for end in [id.first_chunk(), id.last_chunk()].into_iter().flatten() {
        hasher.write_u64(u64::from_le_bytes(*end));
    }
    hasher.finish()
}

// === impl IdHasher ===

impl Hasher for IdHasher {
    fn write(&mut self, bytes: &[u8]) {
        // Without the length, `1` repeated 9 to 16 times would have one hash, because the last word overlaps the one before.
        self.0 ^= bytes.len() as u64;
        let (words, rest) = bytes.as_chunks();
        for word in words {
            self.write_u64(u64::from_le_bytes(*word));
        }
        // The last eight bytes, which overlap the last word: cheaper than the rest byte by byte.
        match bytes.last_chunk() {
            Some(word) if !rest.is_empty() => self.write_u64(u64::from_le_bytes(*word)),
            Some(_) => {}
            None => rest.iter().for_each(|byte| self.write_u64((*byte).into())),
        }
    }

    /// Ignores the terminator of a string, because nothing else is hashed with it.
    fn write_u8(&mut self, _end: u8) {}

    fn write_u64(&mut self, word: u64) {
        // An odd number without a pattern: 2^64 divided by the golden ratio.
        self.0 = (self.0.rotate_left(5) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }

    fn finish(&self) -> u64 {
        // A map uses the lowest and the highest bits. Folding the 128-bit product makes both depend on the whole word.
        let product = u128::from(self.0) * 0x9e37_79b9_7f4a_7c15;
        (product as u64) ^ (product >> 64) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn ids_that_differ_little_differ_in_the_bits_that_a_map_takes() {
        for prefix in ["", "session-", "0c0ffee0-0000-4000-8000-00000000"] {
            let ids = (0..4096).map(|n| format!("{prefix}{n:04x}"));
            let low: HashSet<u64> = ids.map(|id| of(&id) & 0xffff).collect();
            assert!(low.len() > 3_000, "{prefix:?}: {}", low.len());
        }
    }

    #[test]
    fn ids_that_differ_at_an_end_are_spread() {
        let counted = (0..4096).map(|n| format!("0c0ffee0-0000-4000-8000-00000000{n:04x}"));
        let led = (0..4096).map(|n| format!("{n:04x}ee0-0000-4000-8000-000000000000"));
        let sets: [Vec<String>; 2] = [counted.collect(), led.collect()];
        for ids in sets {
            let low: HashSet<u64> = ids.iter().map(|id| of_ends(id) & 0xffff).collect();
            assert!(low.len() > 3_000, "{}: {}", ids[0], low.len());
        }
    }

    /// An event id whose hash equals that of an answer's own id counts as proof that the client has the answer.
    #[test]
    fn ids_that_repeat_themselves_differ_by_their_length() {
        let all = (1..64).map(|n| of(&"1".repeat(n)));
        assert_eq!(all.collect::<HashSet<_>>().len(), 63);
    }
}
