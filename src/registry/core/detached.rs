//! How many calls have no client, in all and of each session.

use std::collections::hash_map::Entry;

use super::{
    index::{Slot, Slots},
    room::GiveBack,
};
use crate::limits::{Limit, Limits};

#[derive(Debug, Default)]
pub(super) struct Detached {
    pub(super) limits: Limits,
    total: usize,
    by_session: Slots<usize>,
}

// === impl Detached ===

impl Detached {
    /// The limit that keeps another call out, if one does. That of the session comes first.
    pub(super) fn full(&self, session: Option<Slot>) -> Option<Limit> {
        let of_session = session.and_then(|session| self.by_session.get(&session));
        let met = |limit, count| (count >= self.limits.most(limit)).then_some(limit);
        session
            .and_then(|_| met(Limit::DetachedOfSession, of_session.copied().unwrap_or(0)))
            .or_else(|| met(Limit::Detached, self.total))
    }

    pub(super) fn enter(&mut self, session: Option<Slot>) {
        self.total += 1;
        if let Some(session) = session {
            *self.by_session.entry(session).or_default() += 1;
        }
    }

    pub(super) fn leave(&mut self, session: Option<Slot>) {
        self.total = self.total.saturating_sub(1);
        if let Some(session) = session
            && let Entry::Occupied(mut count) = self.by_session.entry(session)
        {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
                self.by_session.give_back();
            }
        }
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn count(&self) -> usize {
        self.total
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn is_empty(&self) -> bool {
        self.total == 0 && self.by_session.is_empty()
    }
}
