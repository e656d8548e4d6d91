//! The latest event ids of a session's standalone streams, to recognise their resumes.
//!
//! Needed where event ids do not show their stream: with an event store, or a session manager other than rmcp's own. If a client resumes
//! after an older event, its stream is not recognised and counts as the stream of an untracked call.

use std::{collections::VecDeque, sync::Mutex};

use super::id_hash;
use crate::lock::lock;

/// Maximum number of recorded ids: 64.
///
/// Chosen because most clients miss fewer events while they are disconnected. The session of any other client stays open longer.
const MAX_RECENT: usize = 64;

/// Hashes of event ids, because an id may have any length. A client that sends a colliding id affects only its own session.
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
