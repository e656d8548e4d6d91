//! Recognises resumed standalone streams by the most recent event ids sent on them.
//!
//! This is needed where an event id does not show which stream it belongs to: with an event store, or with a session manager
//! other than rmcp's own. A stream resumed after an older event is not recognised and is treated as an untracked call's stream.

use std::{collections::VecDeque, sync::Mutex};

use super::id_hash;
use crate::lock::lock;

/// Maximum number of ids to remember.
///
/// Most clients miss fewer events than this while disconnected. If one misses more, its session merely stays open longer.
const MAX_RECENT: usize = 64;

/// Stores hashes of event ids, because an id can have any length. A client sending a colliding id affects only its own session.
#[derive(Default)]
pub(super) struct StandaloneIds(Mutex<VecDeque<u64>>);

// === impl StandaloneIds ===

impl StandaloneIds {
    pub(super) fn record(&self, event_id: &str) {
        let mut recent = lock(&self.0);
        if recent.len() == MAX_RECENT {
            recent.pop_front();
        }
        recent.push_back(id_hash::hash(event_id));
    }

    pub(super) fn contains(&self, event_id: &str) -> bool {
        lock(&self.0).contains(&id_hash::hash(event_id))
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
