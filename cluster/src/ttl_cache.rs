//! A bounded cache whose entries expire.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use tokio::time::Instant;

use crate::ids::SessionHash;

/// Caches one value per session, all with the same time to live. Once the cache is full, the oldest entry is evicted.
#[derive(Debug)]
pub(crate) struct TtlCache<V> {
    capacity: usize,
    ttl: Duration,
    entries: HashMap<SessionHash, CacheEntry<V>>,
    /// Insertion order, oldest first. Some of the numbers may belong to entries that have since been removed or replaced.
    order: VecDeque<(u64, SessionHash)>,
    next_number: u64,
}

#[derive(Debug)]
struct CacheEntry<V> {
    value: V,
    number: u64,
    expires: Instant,
}

// === impl TtlCache ===

impl<V> TtlCache<V> {
    pub(crate) fn new(capacity: usize, ttl: Duration) -> Self {
        Self {
            capacity,
            ttl,
            entries: HashMap::new(),
            order: VecDeque::new(),
            next_number: 0,
        }
    }

    /// Returns a session's value, or `None` if it has none or the value has expired.
    pub(crate) fn get(&self, session: SessionHash, now: Instant) -> Option<&V> {
        let entry = self.entries.get(&session)?;
        (entry.expires > now).then_some(&entry.value)
    }

    /// Inserts or replaces a session's value, evicting the oldest entry if the cache is full.
    pub(crate) fn insert(&mut self, session: SessionHash, value: V, now: Instant) {
        let number = self.next_number;
        self.next_number += 1;
        let expires = now + self.ttl;
        self.entries.insert(
            session,
            CacheEntry {
                value,
                number,
                expires,
            },
        );
        self.order.push_back((number, session));
        while let Some((number, oldest)) = self.order.front().copied() {
            let must_evict = match self.entries.get(&oldest) {
                Some(entry) if entry.number == number => {
                    entry.expires <= now || self.entries.len() > self.capacity
                }
                // The entry has been removed, or replaced under a later number.
                _ => {
                    self.order.pop_front();
                    continue;
                }
            };
            if !must_evict {
                break;
            }
            self.entries.remove(&oldest);
            self.order.pop_front();
        }
        // Entries removed or replaced leave outdated numbers behind, which the loop above only drops from the front.
        if self.order.len() > 2 * self.capacity {
            let entries = &self.entries;
            let is_current = |(number, session): &(u64, SessionHash)| {
                entries
                    .get(session)
                    .is_some_and(|entry| entry.number == *number)
            };
            self.order.retain(is_current);
        }
    }

    pub(crate) fn remove(&mut self, session: SessionHash) -> Option<V> {
        self.entries.remove(&session).map(|entry| entry.value)
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    fn session(number: u8) -> SessionHash {
        SessionHash::of(&number.to_string())
    }

    proptest! {
        /// Compares the cache with a plain list of the entries it should have.
        #[test]
        fn get_returns_the_latest_unexpired_insert(steps in vec((0..4_u8, 0..8_u8, 0..4_u64), 0..80)) {
            const CAPACITY: usize = 3;
            const TTL: u64 = 10;
            let start = Instant::now();
            let mut cache = TtlCache::new(CAPACITY, Duration::from_secs(TTL));
            let mut inserted: Vec<(u8, usize, u64)> = Vec::new();
            let mut time = 0;
            for (index, (action, key, elapsed)) in steps.into_iter().enumerate() {
                time += elapsed;
                let now = start + Duration::from_secs(time);
                inserted.retain(|(_, _, since)| since + TTL > time);
                if action == 0 {
                    cache.remove(session(key));
                    inserted.retain(|(entry, _, _)| *entry != key);
                } else {
                    cache.insert(session(key), index, now);
                    inserted.retain(|(entry, _, _)| *entry != key);
                    inserted.push((key, index, time));
                    if inserted.len() > CAPACITY {
                        inserted.remove(0);
                    }
                }
                for key in 0..8 {
                    let expected = inserted.iter().find(|(entry, _, _)| *entry == key).map(|(_, index, _)| index);
                    prop_assert_eq!(cache.get(session(key), now), expected);
                }
                prop_assert!(cache.len() <= CAPACITY && cache.order.len() <= 2 * CAPACITY);
            }
        }
    }
}
