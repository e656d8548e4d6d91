//! A memory of what was learned lately: so many entries, each for so long.

use std::{
    collections::{HashMap, VecDeque},
    time::Duration,
};

use tokio::time::Instant;

use crate::ids::SessionHash;

/// Entries that are all kept for the same time. When there is no room the oldest goes.
#[derive(Debug)]
pub(crate) struct Recent<V> {
    most: usize,
    kept_for: Duration,
    entries: HashMap<SessionHash, Known<V>>,
    /// The numbers under which entries were made, the oldest first. Those of entries that are gone may be among them.
    order: VecDeque<(u64, SessionHash)>,
    next: u64,
}

#[derive(Debug)]
struct Known<V> {
    value: V,
    number: u64,
    until: Instant,
}

// === impl Recent ===

impl<V> Recent<V> {
    pub(crate) fn new(most: usize, kept_for: Duration) -> Self {
        Self {
            most,
            kept_for,
            entries: HashMap::new(),
            order: VecDeque::new(),
            next: 0,
        }
    }

    pub(crate) fn get(&self, session: SessionHash, now: Instant) -> Option<&V> {
        let known = self.entries.get(&session)?;
        (known.until > now).then_some(&known.value)
    }

    pub(crate) fn insert(&mut self, session: SessionHash, value: V, now: Instant) {
        let number = self.next;
        self.next += 1;
        let until = now + self.kept_for;
        self.entries.insert(
            session,
            Known {
                value,
                number,
                until,
            },
        );
        self.order.push_back((number, session));
        while let Some((number, oldest)) = self.order.front().copied() {
            let is_over = match self.entries.get(&oldest) {
                Some(known) if known.number == number => {
                    known.until <= now || self.entries.len() > self.most
                }
                // It is gone, or another one stands further behind.
                _ => {
                    self.order.pop_front();
                    continue;
                }
            };
            if !is_over {
                break;
            }
            self.entries.remove(&oldest);
            self.order.pop_front();
        }
        if self.order.len() > 2 * self.most {
            let entries = &self.entries;
            let is_there = |(number, session): &(u64, SessionHash)| {
                entries
                    .get(session)
                    .is_some_and(|known| known.number == *number)
            };
            self.order.retain(is_there);
        }
    }

    pub(crate) fn remove(&mut self, session: SessionHash) -> Option<V> {
        self.entries.remove(&session).map(|known| known.value)
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
        /// Against a list of everything that was ever learned.
        #[test]
        fn what_is_known_was_learned_last_and_lately(steps in vec((0..4_u8, 0..8_u8, 0..4_u64), 0..80)) {
            const MOST: usize = 3;
            const KEPT: u64 = 10;
            let start = Instant::now();
            let mut recent = Recent::new(MOST, Duration::from_secs(KEPT));
            let mut learned: Vec<(u8, usize, u64)> = Vec::new();
            let mut time = 0;
            for (at, (what, key, passed)) in steps.into_iter().enumerate() {
                time += passed;
                let now = start + Duration::from_secs(time);
                learned.retain(|(_, _, since)| since + KEPT > time);
                if what == 0 {
                    recent.remove(session(key));
                    learned.retain(|(known, _, _)| *known != key);
                } else {
                    recent.insert(session(key), at, now);
                    learned.retain(|(known, _, _)| *known != key);
                    learned.push((key, at, time));
                    if learned.len() > MOST {
                        learned.remove(0);
                    }
                }
                for key in 0..8 {
                    let expected = learned.iter().find(|(known, _, _)| *known == key).map(|(_, at, _)| at);
                    prop_assert_eq!(recent.get(session(key), now), expected);
                }
                prop_assert!(recent.len() <= MOST && recent.order.len() <= 2 * MOST);
            }
        }
    }
}
