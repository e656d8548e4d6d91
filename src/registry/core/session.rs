//! The calls of one session, in flight or remembered.

use super::{
    index::EventId,
    remembered::{End, Remembered},
};
use crate::call::{CallId, SessionKey};

#[derive(Debug)]
pub(super) struct Session<A> {
    pub(super) key: SessionKey,
    /// In no order: each call knows its seat.
    pub(super) in_flight: Vec<CallId>,
    pub(super) kept: Remembered<A>,
}

// === impl Session ===

impl<A: Clone> Session<A> {
    pub(super) fn new(key: SessionKey) -> Self {
        Self {
            key,
            in_flight: Vec::new(),
            kept: Remembered::default(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.in_flight.is_empty() && self.kept.is_empty()
    }

    /// How the latest of its remembered calls ended that had this event.
    pub(super) fn end_of(&self, event: EventId) -> Option<End<A>> {
        self.kept.end_of(event).cloned()
    }
}
