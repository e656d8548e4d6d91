//! Room that a peak leaves behind, and that is given back when it is over.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, Hash},
};

/// Room for so many is always kept: 64. A peak's room is given back when less than an eighth of it is used.
const MIN_CAPACITY: usize = 64;

/// What keeps its room when it empties. To be asked after a removal: it gives so much back at a time that as many must
/// go or come before it moves again.
pub(crate) trait ShrinkIfSparse {
    fn shrink_if_sparse(&mut self);
}

impl<K: Eq + Hash, V, S: BuildHasher> ShrinkIfSparse for HashMap<K, V, S> {
    fn shrink_if_sparse(&mut self) {
        if is_sparse(self.len(), self.capacity()) {
            self.shrink_to(2 * self.len());
        }
    }
}

impl<T> ShrinkIfSparse for VecDeque<T> {
    fn shrink_if_sparse(&mut self) {
        if is_sparse(self.len(), self.capacity()) {
            self.shrink_to(2 * self.len());
        }
    }
}

/// Whether less than an eighth is used.
fn is_sparse(len: usize, capacity: usize) -> bool {
    capacity > MIN_CAPACITY && len < capacity / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_empties_gives_its_room_back_a_few_times_only() {
        let mut numbers: VecDeque<usize> = (0..100_000).collect();
        let mut capacities = vec![numbers.capacity()];
        while numbers.pop_front().is_some() {
            numbers.shrink_if_sparse();
            capacities.push(numbers.capacity());
        }
        capacities.dedup();
        assert!(capacities.len() < 9, "{capacities:?}");
        assert!(capacities.last() <= Some(&MIN_CAPACITY), "{capacities:?}");
    }
}
