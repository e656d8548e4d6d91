//! Room that a peak leaves behind, and that is given back when it is over.

use std::{
    collections::{HashMap, VecDeque},
    hash::{BuildHasher, Hash},
};

/// Room for so many is always kept: 64. A peak's room is given back when less than an eighth of it is used.
const KEPT: usize = 64;

/// What keeps its room when it empties. To be asked after a removal: it gives so much back at a time that as many must
/// go or come before it moves again.
pub(crate) trait GiveBack {
    fn give_back(&mut self);
}

impl<K: Eq + Hash, V, S: BuildHasher> GiveBack for HashMap<K, V, S> {
    fn give_back(&mut self) {
        if is_much(self.len(), self.capacity()) {
            self.shrink_to(2 * self.len());
        }
    }
}

impl<T> GiveBack for VecDeque<T> {
    fn give_back(&mut self) {
        if is_much(self.len(), self.capacity()) {
            self.shrink_to(2 * self.len());
        }
    }
}

/// Whether less than an eighth is used.
fn is_much(len: usize, capacity: usize) -> bool {
    capacity > KEPT && len < capacity / 8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_empties_gives_its_room_back_a_few_times_only() {
        let mut numbers: VecDeque<usize> = (0..100_000).collect();
        let mut capacities = vec![numbers.capacity()];
        while numbers.pop_front().is_some() {
            numbers.give_back();
            capacities.push(numbers.capacity());
        }
        capacities.dedup();
        assert!(capacities.len() < 9, "{capacities:?}");
        assert!(capacities.last() <= Some(&KEPT), "{capacities:?}");
    }
}
