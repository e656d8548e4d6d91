//! Which calls a name names: a request, an event id, a session.

use std::collections::HashSet;

use super::{
    Core,
    entry::Entry,
    index::{Key, SessionKey, Slot, StreamId},
    memory::End,
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
        let slot = self.names.session(session);
        let stream = self.names.stream_id(event_id);
        if let Some(id) = self.index.get(&self.names.stream(slot, stream)) {
            if let Some(entry) = self.calls.get(id) {
                if entry.is_of(session) && entry.streams.contains(stream) {
                    return match entry.streams.shared {
                        true => Named::Batch(self.on_stream(slot, session, stream)),
                        false => Named::Call(*id),
                    };
                }
            } else if let Some(end) = self.memory.end_of(*id, session, stream) {
                return Named::Ended(end);
            }
        }
        let overflowed: Vec<CallId> = self
            .calls_of(slot, session)
            .filter(|(_, entry)| entry.streams.overflowed)
            .map(|(id, _)| id)
            .collect();
        match overflowed.is_empty() {
            true => Named::Nothing,
            false => Named::OneOf(overflowed),
        }
    }

    /// The session call with this key, if its request was accepted.
    pub(crate) fn find(&self, key: &Key) -> Option<(CallId, T)> {
        let slot = self
            .names
            .request(self.names.session(&key.session), &key.request);
        let id = *self.index.get(&slot)?;
        let entry = self.calls.get(&id)?;
        (entry.key.as_ref() == Some(key)).then(|| (id, entry.call.clone()))
    }

    /// The session call with this key, also if its request is not accepted yet.
    pub(crate) fn find_any(&self, key: &Key) -> Option<CallId> {
        let accepted = self.find(key).map(|(id, _)| id);
        accepted.or_else(|| {
            let mut calls = self.calls_of(self.names.session(&key.session), &key.session);
            let found = calls.find(|(_, entry)| entry.key.as_ref() == Some(key));
            found.map(|(id, _)| id)
        })
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
            let of_calls = self.calls.values().filter_map(Entry::session);
            let named: HashSet<&SessionKey> = of_calls.filter(|key| *key.id == *id).collect();
            return named.into_iter().cloned().collect();
        };
        let has_calls = |key: &SessionKey| self.sessions.contains_key(&self.names.session(key));
        sessions.filter(has_calls).collect()
    }

    /// The detached calls of a session.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn detached_in(&self, session: &SessionKey) -> Vec<(CallId, T)> {
        self.calls_of(self.names.session(session), session)
            .filter(|(_, entry)| entry.detached.is_some())
            .map(|(id, entry)| (id, entry.call.clone()))
            .collect()
    }

    pub(super) fn calls_of(
        &self,
        slot: Slot,
        session: &SessionKey,
    ) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        let ids = self.sessions.get(&slot).into_iter().flatten();
        ids.filter_map(move |id| {
            let entry = self.calls.get(id).filter(|entry| entry.is_of(session))?;
            Some((*id, entry))
        })
    }

    /// The calls of a batch that have this stream.
    pub(super) fn on_stream(
        &self,
        slot: Slot,
        session: &SessionKey,
        stream: StreamId,
    ) -> Vec<CallId> {
        self.calls_of(slot, session)
            .filter(|(_, entry)| entry.streams.shared && entry.streams.contains(stream))
            .map(|(id, _)| id)
            .collect()
    }
}
