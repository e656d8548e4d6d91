//! The latest event ids of the standalone streams of a session, so that the resume of such a stream is known.
//!
//! Needed where event ids do not show their stream: with an event store, or another session manager than rmcp's own. A client that
//! resumes from an older event is not recognised, and its stream counts as one of an untracked call.

use std::{collections::VecDeque, sync::Mutex};

use super::id_hash;
use crate::lock::lock;

/// Maximum number of recorded ids: 64. A client that has disconnected has missed fewer events, or is treated with more caution.
const MAX_RECENT: usize = 64;

/// Hashes of event ids, because an id may have any length. A client that names a colliding id affects only its own session.
#[derive(Default)]
pub(super) struct StandaloneIds(Mutex<VecDeque<u64>>);

// === impl StandaloneIds ===

impl StandaloneIds {
    pub(super) fn record(&self, event_id: &str) {
        let mut recent = lock(&self.0);
        if recent.len() == MAX_RECENT {
            recent.pop_front();
        }
        recent.push_back(id_hash::of(event_id));
    }

    pub(super) fn contains(&self, event_id: &str) -> bool {
        lock(&self.0).contains(&id_hash::of(event_id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_ids_are_known() {
        let ids = StandaloneIds::default();
        let event = |number: usize| format!("event-{number}");
        (0..=MAX_RECENT).for_each(|number| ids.record(&event(number)));
        assert!(!ids.contains(&event(0)));
        assert!((1..=MAX_RECENT).all(|number| ids.contains(&event(number))));
        assert!(!ids.contains("0/0"));
    }
}
