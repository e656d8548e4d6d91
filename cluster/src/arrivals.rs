//! Sessions that are on their way here: this instance is their owner, and the request that brings them is being served.
//!
//! To a peer they are here already. If they were not, he would claim a session that was claimed a moment ago, and two instances
//! would bring it to life.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use crate::ids::SessionHash;

/// What is on its way, and how many requests bring it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arrivals(Arc<Mutex<HashMap<SessionHash, usize>>>);

/// A session is on its way until this is dropped.
#[derive(Debug)]
pub(crate) struct Expected {
    arrivals: Arrivals,
    session: SessionHash,
}

// === impl Arrivals ===

impl Arrivals {
    pub(crate) fn expect(&self, session: SessionHash) -> Expected {
        *self.lock().entry(session).or_default() += 1;
        Expected {
            arrivals: self.clone(),
            session,
        }
    }

    pub(crate) fn has(&self, session: SessionHash) -> bool {
        self.lock().contains_key(&session)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<SessionHash, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Expected ===

impl Drop for Expected {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = self.arrivals.lock().entry(self.session) {
            match count.get().checked_sub(1) {
                Some(left @ 1..) => *count.get_mut() = left,
                _ => drop(count.remove()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_is_expected_until_nothing_brings_it_any_more() {
        let arrivals = Arrivals::default();
        let (session, other) = (SessionHash::of("a"), SessionHash::of("b"));
        let first = arrivals.expect(session);
        let second = arrivals.expect(session);
        drop(first);
        assert!(arrivals.has(session) && !arrivals.has(other));
        drop(second);
        assert!(!arrivals.has(session));
        assert!(arrivals.lock().is_empty());
    }
}
