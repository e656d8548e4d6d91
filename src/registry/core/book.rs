//! Which calls a name names: a request, an event id, a session.

use std::collections::hash_map;

use super::{
    Core,
    entry::Entry,
    index::{self, Slot, StreamId},
    remembered::End,
    room::GiveBack,
    session::Session,
    streams::Form,
};
use crate::call::{CallId, Detachment, Key, SessionKey};

/// What an event id names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Named<A> {
    Nothing,
    /// A call in flight.
    Call(CallId),
    /// The calls in flight of a batch, which have one stream.
    Batch(Vec<CallId>),
    /// It may be one of these.
    OneOf(Vec<CallId>),
    /// A call that has ended.
    Ended(End<A>),
}

// === impl Named ===

impl<A> Named<A> {
    /// The calls in flight that it names, or may name.
    pub(crate) fn in_flight(self) -> Vec<CallId> {
        match self {
            Self::Call(id) => vec![id],
            Self::Batch(ids) | Self::OneOf(ids) => ids,
            Self::Nothing | Self::Ended(_) => Vec::new(),
        }
    }
}

// === impl Core ===

impl<T: Clone, A: Clone> Core<T, A> {
    /// Notes an event id of a call's stream.
    pub(crate) fn name(&mut self, id: CallId, event_id: &[u8], form: Form) {
        let session = self.calls.get(&id).and_then(Entry::session);
        let Some(session) = session else {
            return;
        };
        let stream = match (form, index::numbers(event_id)) {
            #[cfg(any(feature = "rmcp", test, fuzzing))]
            (Form::Rmcp, Some((_, stream))) => StreamId::Numbered(stream),
            (Form::Any, Some(numbers)) if self.name_in_run(id, session, numbers) => return,
            _ => StreamId::Opaque(self.names.event(event_id)),
        };
        let entry = self.calls.get_mut(&id);
        let Some(forgotten) = entry.and_then(|entry| entry.streams.add(stream)) else {
            return;
        };
        let former = self.index.insert(self.names.stream(session, stream), id);
        if let Some(former) = former {
            self.share(former, id, stream);
        }
        if let Some(forgotten) = forgotten {
            self.unname(session, forgotten, id);
        }
    }

    /// Notes an event that counts up from the last, or from nothing. `false` if it does not, or if another call of the
    /// session counts so.
    fn name_in_run(&mut self, id: CallId, session: Slot, (index, stream): (u64, u64)) -> bool {
        let Some(entry) = self.calls.get_mut(&id) else {
            return true;
        };
        if !entry.streams.is_empty() {
            return entry.streams.continue_run(index, stream);
        }
        let name = StreamId::Numbered(stream);
        let event = index::EventId {
            numbers: Some((index, stream)),
            hash: 0,
        };
        let other = self.owner(session, name);
        let other = other.map(|(other, entry)| (other, entry.streams.have(event)));
        if other.is_some_and(|(_, has_it)| !has_it) {
            return false;
        }
        let entry = self.calls.get_mut(&id);
        if !entry.is_some_and(|entry| entry.streams.start_run(index, stream)) {
            return false;
        }
        self.index.insert(self.names.stream(session, name), id);
        if let Some((other, _)) = other {
            self.share(other, id, name);
        }
        true
    }

    /// Notes that two calls have a stream, if the former still has it.
    fn share(&mut self, former: CallId, id: CallId, stream: StreamId) {
        if former != id
            && let Some(other) = self.calls.get_mut(&former)
            && other.streams.iter().any(|its| its == stream)
        {
            other.streams.share();
            if let Some(entry) = self.calls.get_mut(&id) {
                entry.streams.share();
            }
        }
    }

    /// Notes that a call's event ids are not all known, because its stream cannot be read.
    pub(crate) fn blur(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(&id) {
            entry.streams.blur();
        }
    }

    pub(super) fn forget_streams(&mut self, id: CallId, entry: &Entry<T>) {
        if let Some(session) = entry.session() {
            for stream in entry.streams.iter() {
                self.unname(session, stream, id);
            }
        }
    }

    pub(super) fn unname(&mut self, session: Slot, stream: StreamId, id: CallId) {
        let slot = self.names.stream(session, stream);
        self.free(slot, id);
    }

    /// Frees a name if it is a call's own, and says whether it was. `None` if it is nobody's.
    pub(super) fn free(&mut self, slot: Slot, id: CallId) -> Option<bool> {
        let hash_map::Entry::Occupied(owner) = self.index.entry(slot) else {
            return None;
        };
        let is_owner = *owner.get() == id;
        if is_owner {
            owner.remove();
            self.index.give_back();
        }
        Some(is_owner)
    }

    /// What an event id of a session names.
    pub(crate) fn named(&self, session: &SessionKey, event_id: &[u8]) -> Named<A> {
        let Some((slot, known)) = self.session(session) else {
            return Named::Nothing;
        };
        let event = self.names.event_id(event_id);
        for stream in event.streams() {
            let Some((id, entry)) = self.owner(slot, stream) else {
                continue;
            };
            if !entry.streams.are_shared() {
                if entry.streams.have(event) {
                    return Named::Call(id);
                }
                continue;
            }
            let sharing = self.calls_of(known).filter(|(_, entry)| {
                let streams = &entry.streams;
                streams.are_shared() && streams.have(event)
            });
            let mut sharing: Vec<CallId> = sharing.map(|(id, _)| id).collect();
            match (sharing.pop(), sharing.is_empty()) {
                (None, _) => {}
                (Some(id), true) => return Named::Call(id),
                (Some(id), false) => {
                    sharing.push(id);
                    return Named::Batch(sharing);
                }
            }
        }
        if let Some(end) = known.end_of(event) {
            return Named::Ended(end);
        }
        let blurred: Vec<CallId> = self
            .calls_of(known)
            .filter(|(_, entry)| entry.streams.are_blurred())
            .map(|(id, _)| id)
            .collect();
        match blurred.is_empty() {
            true => Named::Nothing,
            false => Named::OneOf(blurred),
        }
    }

    /// The session call with this key, if its request was accepted.
    pub(crate) fn find(&self, key: &Key) -> Option<(CallId, T)> {
        let (slot, _) = self.session(&key.session)?;
        let id = *self.index.get(&self.names.request(slot, &key.request))?;
        let entry = self.calls.get(&id)?;
        let is_it = entry.is(slot, &key.request);
        is_it.then(|| (id, entry.call.clone()))
    }

    /// The session call with this key, also if its request is not accepted yet.
    pub(crate) fn find_any(&self, key: &Key) -> Option<(CallId, T)> {
        self.find(key).or_else(|| {
            let (slot, known) = self.session(&key.session)?;
            let mut calls = self.calls_of(known);
            let found = calls.find(|(_, entry)| entry.is(slot, &key.request));
            found.map(|(id, entry)| (id, entry.call.clone()))
        })
    }

    /// Whether a session call is in flight whose request is not accepted yet.
    pub(crate) fn is_undecided(&self, id: CallId) -> bool {
        let entry = self.calls.get(&id);
        let place = entry.and_then(|entry| entry.place.as_ref());
        place.is_some_and(|place| !place.owns_key)
    }

    pub(crate) fn call(&self, id: CallId) -> Option<&T> {
        self.calls.get(&id).map(|entry| &entry.call)
    }

    pub(crate) fn is_detached(&self, id: CallId) -> bool {
        self.detachment(id).is_some()
    }

    /// Since when and how a call has no client.
    pub(crate) fn detachment(&self, id: CallId) -> Option<Detachment> {
        self.calls.get(&id)?.detachment()
    }

    /// The sessions with calls that an id names: one of each scope that gave it out.
    pub(crate) fn sessions_with(&self, id: &str) -> Vec<SessionKey> {
        let Some(sessions) = self.scopes.sessions(id) else {
            let known = self.sessions.by_slot.values().map(|known| &known.key);
            return known.filter(|key| *key.id == *id).cloned().collect();
        };
        sessions.filter(|key| self.session(key).is_some()).collect()
    }

    /// The detached calls of a session.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn detached_in(&self, session: &SessionKey) -> Vec<(CallId, T)> {
        let known = self.session(session).into_iter();
        known
            .flat_map(|(_, known)| self.calls_of(known))
            .filter(|(_, entry)| entry.clock().is_some())
            .map(|(id, entry)| (id, entry.call.clone()))
            .collect()
    }

    /// Whether a session has calls in flight, or some that are remembered.
    #[cfg(feature = "rmcp")]
    pub(crate) fn has_session(&self, session: &SessionKey) -> bool {
        self.session(session).is_some()
    }

    /// A session with calls. From its slot on its key needs no look any more.
    pub(super) fn session(&self, key: &SessionKey) -> Option<(Slot, &Session<A>)> {
        let slot = self.names.session(key);
        Some((slot, self.sessions.get(slot, key)?))
    }

    /// The calls in flight of a session.
    pub(super) fn calls_of(
        &self,
        session: &Session<A>,
    ) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        let ids = session.in_flight.iter();
        ids.filter_map(|id| Some((*id, self.calls.get(id)?)))
    }

    /// The same by its slot.
    pub(super) fn calls_in(&self, slot: Slot) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        let session = self.sessions.by_slot.get(&slot).into_iter();
        session.flat_map(|session| self.calls_of(session))
    }

    /// The call that a stream of a session is entered for.
    pub(super) fn owner(&self, slot: Slot, stream: StreamId) -> Option<(CallId, &Entry<T>)> {
        let id = *self.index.get(&self.names.stream(slot, stream))?;
        let entry = self.calls.get(&id)?;
        (entry.session() == Some(slot)).then_some((id, entry))
    }

    /// The calls of a batch that have this stream.
    pub(super) fn on_stream(&self, slot: Slot, stream: StreamId) -> Vec<CallId> {
        let is_on = |entry: &Entry<T>| entry.streams.iter().any(|its| its == stream);
        self.calls_in(slot)
            .filter(|(_, entry)| entry.streams.are_shared() && is_on(entry))
            .map(|(id, _)| id)
            .collect()
    }
}
