//! A map that is a list while it is small, as nearly every session's is: most have one call at a time.

use std::{
    collections::HashMap,
    hash::{BuildHasherDefault, Hash},
};

use super::{give_back::GiveBack, index::AsIs};

/// How many entries a list has at most: 8. To look through so many takes no longer than to hash.
const FEW: usize = 8;

/// Keys are hashed as they are: they are hashes, or they count up.
#[derive(Debug)]
pub(super) enum SmallMap<K, V> {
    List(Vec<(K, V)>),
    Map(HashMap<K, V, BuildHasherDefault<AsIs>>),
}

// === impl SmallMap ===

impl<K: Copy + Eq + Hash, V> SmallMap<K, V> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Map(map) => map.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    #[cfg(test)]
    pub(super) fn capacity(&self) -> usize {
        match self {
            Self::List(list) => list.capacity(),
            Self::Map(map) => map.capacity(),
        }
    }

    pub(super) fn get(&self, key: K) -> Option<&V> {
        match self {
            Self::List(list) => list.iter().find(|(k, _)| *k == key).map(|(_, v)| v),
            Self::Map(map) => map.get(&key),
        }
    }

    pub(super) fn get_mut(&mut self, key: K) -> Option<&mut V> {
        match self {
            Self::List(list) => list.iter_mut().find(|(k, _)| *k == key).map(|(_, v)| v),
            Self::Map(map) => map.get_mut(&key),
        }
    }

    /// Gives back what the key had before.
    pub(super) fn insert(&mut self, key: K, value: V) -> Option<V> {
        let list = match self {
            Self::Map(map) => return map.insert(key, value),
            Self::List(list) => list,
        };
        if let Some((_, former)) = list.iter_mut().find(|(k, _)| *k == key) {
            return Some(std::mem::replace(former, value));
        }
        if list.len() == FEW {
            let mut map: HashMap<_, _, _> = list.drain(..).collect();
            map.insert(key, value);
            *self = Self::Map(map);
            return None;
        }
        if list.len() == list.capacity() {
            // Most have one entry and never a second one.
            list.reserve_exact(list.len().max(1));
        }
        list.push((key, value));
        None
    }

    pub(super) fn remove(&mut self, key: K) -> Option<V> {
        match self {
            Self::List(list) => {
                let at = list.iter().position(|(k, _)| *k == key)?;
                Some(list.swap_remove(at).1)
            }
            Self::Map(map) => {
                let removed = map.remove(&key);
                map.give_back();
                if map.len() <= FEW / 2 {
                    *self = Self::List(map.drain().collect());
                }
                removed
            }
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (K, &V)> {
        let (list, map) = match self {
            Self::List(list) => (Some(list), None),
            Self::Map(map) => (None, Some(map)),
        };
        let list = list.into_iter().flatten().map(|(k, v)| (*k, v));
        let map = map.into_iter().flatten().map(|(k, v)| (*k, v));
        list.chain(map)
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
        fn it_is_a_map_while_it_grows_and_shrinks(steps in vec((0..24_u64, any::<bool>()), 0..200)) {
            let (mut small, mut map) = (SmallMap::default(), HashMap::new());
            for (step, (key, inserts)) in steps.into_iter().enumerate() {
                match inserts {
                    true => prop_assert_eq!(small.insert(key, step), map.insert(key, step)),
                    false => prop_assert_eq!(small.remove(key), map.remove(&key)),
                }
                prop_assert_eq!(small.len(), map.len());
                prop_assert_eq!(small.is_empty(), map.is_empty());
                prop_assert_eq!(small.get(key), map.get(&key));
                let listed: HashMap<_, _> = small.iter().map(|(k, v)| (k, *v)).collect();
                prop_assert_eq!(&listed, &map);
            }
        }
    }

    #[test]
    fn the_first_entry_takes_the_room_of_one() {
        let mut small = SmallMap::default();
        small.insert(1, "one");
        assert!(matches!(&small, SmallMap::List(list) if list.capacity() == 1));
    }

    #[test]
    fn what_was_large_is_a_list_again() {
        let mut small = SmallMap::default();
        for key in 0..100 {
            small.insert(key, key);
        }
        assert!(matches!(small, SmallMap::Map(_)));
        for key in 0..96 {
            assert_eq!(small.remove(key), Some(key));
        }
        assert!(matches!(small, SmallMap::List(_)));
        *small.get_mut(99).unwrap() += 1;
        assert_eq!(small.get(99), Some(&100));
    }
}
