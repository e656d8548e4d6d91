//! Generations distinguish the events of a session before and after a restore.
//!
//! A restored session numbers its events from 0 again, even in the same process. Its event ids therefore carry their own generation.
//! The event ids of other sessions carry the incarnation of their instance.

use std::{
    collections::HashMap,
    sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use crate::ids::Incarnation;

/// Map from session to its generation.
#[derive(Debug)]
pub(crate) struct Generations {
    me: Incarnation,
    /// The generations of the sessions that were restored here.
    restored: RwLock<HashMap<Box<str>, Incarnation>>,
}

// === impl Generations ===

impl Generations {
    pub(crate) fn new(me: Incarnation) -> Self {
        Self {
            me,
            restored: RwLock::default(),
        }
    }

    /// Called when a session was opened. A restored session gets a new generation.
    pub(crate) fn begin(&self, session: &str, is_restored: bool) {
        if is_restored {
            self.write().insert(session.into(), Incarnation::random());
        }
    }

    /// Called when a session was closed.
    pub(crate) fn end(&self, session: &str) {
        self.write().remove(session);
    }

    /// Returns the generation of a session: the incarnation of this instance, unless the session was restored here and is open.
    pub(crate) fn of(&self, session: &str) -> Incarnation {
        self.read().get(session).copied().unwrap_or(self.me)
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
        assert_eq!(generations.of("a"), me);
        generations.end("a");
        generations.begin("a", true);
        let second = generations.of("a");
        generations.end("a");
        generations.begin("a", true);
        assert!(second != me && generations.of("a") != me && generations.of("a") != second);
        assert_eq!(generations.of("b"), me);
        generations.end("a");
        assert!(generations.read().is_empty());
    }
}
