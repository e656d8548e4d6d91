//! The sessions that have calls, in flight or remembered.

use std::collections::hash_map::Entry;

use super::{
    entry::Place,
    index::{EventId, Slot, Slots},
    memory::{End, Leaving, Memory, Remembered},
    room::GiveBack,
};
use crate::call::CallId;
use crate::call::SessionKey;

#[derive(Debug)]
pub(super) struct Sessions<A> {
    pub(super) by_slot: Slots<Session<A>>,
    pub(super) memory: Memory,
}

#[derive(Debug)]
pub(super) struct Session<A> {
    pub(super) key: SessionKey,
    /// In no order: each call knows its seat.
    pub(super) in_flight: Vec<CallId>,
    pub(super) kept: Remembered<A>,
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
}

// === impl Session ===

impl<A: Clone> Session<A> {
    fn new(key: SessionKey) -> Self {
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
