//! What is looked at when its time comes, beside the calls.

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use tokio::time::Instant;

/// Something that may be over without anybody saying so.
pub(crate) trait Watched: Send + Sync {
    /// Looks at it at `now`, as was wanted for `at`. Says when to look again, if at all.
    fn look(&self, at: Instant, now: Instant) -> Option<Instant>;
}

/// Who is to be looked at when. Whoever is gone by then is forgotten.
#[derive(Default)]
pub(super) struct Watches {
    due: BTreeMap<(Instant, u64), Weak<dyn Watched>>,
    added: u64,
}

// === impl Watches ===

impl Watches {
    pub(super) fn add(&mut self, at: Instant, watched: Weak<dyn Watched>) {
        self.added += 1;
        self.due.insert((at, self.added), watched);
    }

    pub(super) fn take_due(&mut self, now: Instant) -> Vec<(Instant, Arc<dyn Watched>)> {
        let mut due = Vec::new();
        while let Some(first) = self.due.first_entry()
            && first.key().0 <= now
        {
            let ((at, _), watched) = first.remove_entry();
            due.extend(watched.upgrade().map(|watched| (at, watched)));
        }
        due
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.due.first_key_value().map(|((at, _), _)| *at)
    }
}
