//! Which calls a name names: a request, an event id, a session.

use super::{
    Core,
    entry::Entry,
    index::{Key, SessionKey, Slot, StreamId},
    memory::End,
    sessions::Session,
};
use crate::{call::CallId, detach::Detachment};

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
