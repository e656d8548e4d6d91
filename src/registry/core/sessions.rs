//! The sessions that have calls, in flight or remembered.

use std::collections::hash_map::Entry;

use tokio::time::Instant;

use super::{
    entry::Place,
    index::{Slot, Slots},
    memory::{Memory, Turns, Why},
    remembered::{Leaving, Rank},
    room::GiveBack,
    session::Session,
};
use crate::call::{CallId, SessionKey};

#[derive(Debug)]
pub(super) struct Sessions<A> {
    pub(super) by_slot: Slots<Session<A>>,
    pub(super) memory: Memory,
}

// === impl Sessions ===

impl<A: Clone> Sessions<A> {
    pub(super) fn new() -> Self {
        Self {
            by_slot: Slots::default(),
            memory: Memory::new(),
        }
    }

    pub(super) fn get(&self, slot: Slot, key: &SessionKey) -> Option<&Session<A>> {
        let session = self.by_slot.get(&slot);
        session.filter(|session| session.key == *key)
    }

    /// A call comes. Returns its seat. `None` if another session has this slot: its calls and those of this one could
    /// not be told apart, so this one's have no key.
    pub(super) fn enter(&mut self, slot: Slot, key: SessionKey, id: CallId) -> Option<u32> {
        let session = match self.by_slot.entry(slot) {
            Entry::Occupied(session) if session.get().key != key => return None,
            Entry::Occupied(session) => session.into_mut(),
            Entry::Vacant(vacant) => vacant.insert(Session::new(key)),
        };
        let seat = u32::try_from(session.in_flight.len()).ok()?;
        session.in_flight.push(id);
        Some(seat)
    }

    /// A call goes. Returns who has its seat now.
    pub(super) fn leave(&mut self, place: &Place, remember: Option<Leaving<A>>) -> Option<CallId> {
        let session = self.by_slot.get_mut(&place.session)?;
        let seat = place.seat as usize;
        if seat < session.in_flight.len() {
            session.in_flight.swap_remove(seat);
            session.in_flight.give_back();
        }
        let follows = session.in_flight.get(seat).copied();
        let keeps = remember.is_some();
        if let Some(leaving) = remember {
            self.memory.keep(place.session, session, leaving);
        }
        if session.is_empty() {
            self.by_slot.remove(&place.session);
            self.by_slot.give_back();
        }
        if keeps {
            self.make_room();
        }
        follows
    }

    /// Forgets those whose time is over by `now`.
    pub(super) fn forget_due(&mut self, now: Instant) {
        for rank in Rank::ALL {
            let is_due = |at: Instant| at <= now;
            while self.memory.turns.of(rank).next_end().is_some_and(is_due) {
                self.forget_oldest(rank, Why::Over);
                self.drop_gone(rank);
            }
        }
    }

    /// Forgets what is remembered of a session.
    pub(super) fn forget_all_of(&mut self, slot: Slot) {
        for rank in Rank::ALL {
            let has_some = |session: &Session<A>| session.kept.oldest(rank).is_some();
            self.forget_in(slot, rank, Why::Over, has_some);
            self.drop_gone(rank);
        }
    }

    /// Forgets what is too much for all sessions.
    pub(super) fn make_room(&mut self) {
        for rank in Rank::ALL {
            while self.memory.turns.bytes() > self.memory.limits.total
                && self.forget_oldest(rank, Why::NoRoom)
            {}
            self.drop_gone(rank);
        }
    }

    /// `false` if there is none.
    fn forget_oldest(&mut self, rank: Rank, why: Why) -> bool {
        let Some(turn) = self.memory.turns.of_mut(rank).queue.pop_front() else {
            return false;
        };
        self.forget_in(turn.session, rank, why, |session| turn.is_of(session, rank));
        true
    }

    /// Forgets the oldest of a session and a rank as long as it is to go.
    fn forget_in(
        &mut self,
        slot: Slot,
        rank: Rank,
        why: Why,
        is_to_go: impl Fn(&Session<A>) -> bool,
    ) {
        let Entry::Occupied(mut session) = self.by_slot.entry(slot) else {
            return;
        };
        while is_to_go(session.get()) {
            self.memory.forget_oldest_of(session.get_mut(), rank, why);
        }
        if session.get().is_empty() {
            session.remove();
            self.by_slot.give_back();
        }
    }

    /// Drops the turns at the head whose records are gone, and all such when they are more than the others: so they do
    /// not add up behind a record that is kept for long.
    fn drop_gone(&mut self, rank: Rank) {
        let Turns { queue, records, .. } = self.memory.turns.of_mut(rank);
        while queue.len() > *records
            && let Some(turn) = queue.front()
            && !turn.is_kept(&self.by_slot, rank)
        {
            queue.pop_front();
        }
        if queue.len() > 2 * *records {
            queue.retain(|turn| turn.is_kept(&self.by_slot, rank));
        }
        queue.give_back();
    }
}

#[cfg(test)]
mod tests;
