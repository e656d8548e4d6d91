//! Generations, which distinguish a session's events before a restore from those after it.
//!
//! A restored session numbers its events from 0 again, even in the same process, so its event ids carry a generation of their own. The
//! event ids of all other sessions carry the instance's incarnation.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use crate::ids::Incarnation;

/// Maps each session to its generation.
#[derive(Debug)]
pub(crate) struct Generations {
    this_instance: Incarnation,
    /// The generations of sessions restored here.
    restored: RwLock<HashMap<Box<str>, Incarnation>>,
}

// === impl Generations ===

impl Generations {
    pub(crate) fn new(this_instance: Incarnation) -> Self {
        Self {
            this_instance,
            restored: RwLock::default(),
        }
    }

    /// Called when a session has been opened. A restored session gets a new generation.
    pub(crate) fn begin(&self, session: &str, is_restored: bool) {
        if is_restored {
            self.write().insert(session.into(), Incarnation::random());
        }
    }

    /// Called when a session has been closed.
    pub(crate) fn end(&self, session: &str) {
        self.write().remove(session);
    }

    /// Returns a session's generation.
    ///
    /// This is the instance's incarnation, unless the session was restored here and is still open.
    pub(crate) fn get(&self, session: &str) -> Incarnation {
        self.read()
            .get(session)
            .copied()
            .unwrap_or(self.this_instance)
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<Box<str>, Incarnation>> {
        self.restored.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<Box<str>, Incarnation>> {
        self.restored
            .write()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_that_is_restored_has_another_generation_each_time() {
        let me = Incarnation::random();
        let generations = Generations::new(me);
        generations.begin("a", false);
        assert_eq!(generations.get("a"), me);
        generations.end("a");
        generations.begin("a", true);
        let second = generations.get("a");
        generations.end("a");
        generations.begin("a", true);
        assert!(second != me && generations.get("a") != me && generations.get("a") != second);
        assert_eq!(generations.get("b"), me);
        generations.end("a");
        assert!(generations.read().is_empty());
    }
}
