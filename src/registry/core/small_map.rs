//! A map stored as a list while it is small.
//!
//! Most sessions have one call at a time, so nearly every map is small. A large map is a B-tree, which only moves a few entries at a time,
//! even when it grows. A hash table would move all of them at once, making the session's other calls wait.

use std::{collections::BTreeMap, mem, ops::Bound};

/// Maximum number of entries in a list. Up to this length, a scan takes no longer than a tree search.
const MAX_LIST_LEN: usize = 8;

/// A map that is a list while it is small, and a tree otherwise. Both are ordered by key.
#[derive(Debug)]
pub(super) enum SmallMap<K, V> {
    List(Vec<(K, V)>),
    Tree(BTreeMap<K, V>),
}

// === impl SmallMap ===

impl<K: Copy + Ord, V> SmallMap<K, V> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Tree(tree) => tree.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the number of entries that fit without another allocation. A tree has no unused capacity.
    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        match self {
            Self::List(list) => list.capacity(),
            Self::Tree(tree) => tree.len(),
        }
    }

    pub(super) fn get(&self, key: K) -> Option<&V> {
        match self {
            Self::List(list) => list.iter().find(|(k, _)| *k == key).map(|(_, v)| v),
            Self::Tree(tree) => tree.get(&key),
        }
    }

    pub(super) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        match self {
            Self::List(list) => list.iter_mut().find(|(k, _)| *k == key).map(|(_, v)| v),
            Self::Tree(tree) => tree.get_mut(&key),
        }
    }

    /// Inserts a value and returns the key's previous value.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let list = match self {
            Self::Tree(tree) => return tree.insert(key, value),
            Self::List(list) => list,
        };
        let index = list.iter().take_while(|(k, _)| *k < key).count();
        if let Some((_, previous)) = list.get_mut(index).filter(|(k, _)| *k == key) {
            return Some(mem::replace(previous, value));
        }
        if list.len() == MAX_LIST_LEN {
            let entries = list.drain(..).chain([(key, value)]);
            *self = Self::Tree(entries.collect());
            return None;
        }
        if list.len() == list.capacity() {
            // Most maps never get a second entry.
            list.reserve_exact(list.len().max(1));
        }
        list.insert(index, (key, value));
        None
    }

    pub(super) fn remove(&mut self, key: K) -> Option<V> {
        match self {
            Self::List(list) => {
                let index = list.iter().position(|(k, _)| *k == key)?;
                Some(list.remove(index).1)
            }
            Self::Tree(tree) => {
                let removed = tree.remove(&key);
                // Wait until the list would be half empty, so that a map around the limit does not keep changing.
                if tree.len() <= MAX_LIST_LEN / 2 {
                    *self = Self::List(mem::take(tree).into_iter().collect());
                }
                removed
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        self.after(None)
    }

    /// Returns the entries after `key`, or all entries if `key` is `None`.
    pub(super) fn after(&self, key: Option<K>) -> impl Iterator<Item = (K, &V)> {
        let (list, tree) = match self {
            Self::List(list) => (Some(list), None),
            Self::Tree(tree) => (None, Some(tree)),
        };
        let list = list.into_iter().flatten().map(|(k, v)| (*k, v));
        let list = list.skip_while(move |(k, _)| key.is_some_and(|key| *k <= key));
        let from = key.map_or(Bound::Unbounded, Bound::Excluded);
        let tree = tree.map(|tree| tree.range((from, Bound::Unbounded)));
        let tree = tree.into_iter().flatten().map(|(k, v)| (*k, v));
        list.chain(tree)
    }
}

impl<K, V> Default for SmallMap<K, V> {
    fn default() -> Self {
        Self::List(Vec::new())
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    proptest! {
        #[test]
        fn a_small_map_is_ordered_while_it_grows_and_shrinks(
            steps in vec((0..24_u64, any::<bool>()), 0..200),
        ) {
            let (mut small, mut map) = (SmallMap::default(), BTreeMap::new());
            for (step, (key, inserts)) in steps.into_iter().enumerate() {
                if inserts { prop_assert_eq!(small.insert(key, step), map.insert(key, step)) } else { prop_assert_eq!(small.remove(key), map.remove(&key)) }
                prop_assert_eq!(small.len(), map.len());
                prop_assert_eq!(small.is_empty(), map.is_empty());
                prop_assert_eq!(small.get(key), map.get(&key));
                let all: Vec<_> = small.iter().map(|(k, v)| (k, *v)).collect();
                prop_assert_eq!(all, map.clone().into_iter().collect::<Vec<_>>());
                let after: Vec<_> = small.after(Some(key)).map(|(k, _)| k).collect();
                let expected: Vec<_> = map.range(key + 1..).map(|(k, _)| *k).collect();
                prop_assert_eq!(after, expected);
            }
        }
    }

    #[test]
    fn the_first_entry_allocates_capacity_for_one() {
        let mut small = SmallMap::default();
        small.insert(1, "one");
        assert!(matches!(&small, SmallMap::List(list) if list.capacity() == 1));
    }

    #[test]
    fn a_map_that_shrinks_becomes_a_list_again() {
        let mut small = SmallMap::default();
        for key in 0..100 {
            small.insert(key, key);
        }
        assert!(matches!(small, SmallMap::Tree(_)));
        for key in 0..96 {
            assert_eq!(small.remove(key), Some(key));
        }
        assert!(matches!(small, SmallMap::List(_)));
        *small.get_mut(99).unwrap() += 1;
        assert_eq!(small.get(99), Some(&100));
    }
}
