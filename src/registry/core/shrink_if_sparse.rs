//! Releases capacity that a collection no longer needs after a peak.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, Hash},
};

/// Capacity up to which a collection is never shrunk. A larger collection is shrunk when less than an eighth of its capacity is
/// in use.
const MIN_CAPACITY: usize = 64;

/// A collection that retains its capacity when elements are removed.
pub(crate) trait ShrinkIfSparse {
    /// Releases capacity if less than an eighth of it is used. Must be called after each removal.
    ///
    /// Half of the remaining capacity stays free, so that many insertions or removals can follow before the next reallocation.
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

fn is_sparse(len: usize, capacity: usize) -> bool {
    capacity > MIN_CAPACITY && len < capacity / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collection_that_empties_shrinks_only_a_few_times() {
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
