//! The calls in flight of a session and all their names.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    SessionState,
    entry::{CallKey, Entry},
    index::{self, EventId, KeyHash, ScopeSet, StreamId},
    retained_call::RetainedOutcome,
    streams::{EventIdFormat, Streams},
};
use crate::call::{CallId, DetachCause, Detachment, RequestId, Scope};

/// What an event id names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EventMatch<T, A> {
    Nothing,
    /// A stream of a call in flight.
    Call(CallId, T),
    /// Perhaps one of these: not all of their streams are known by name, or several have it.
    Ambiguous(Vec<(CallId, T)>),
    /// A stream of a call that has ended.
    Ended(RetainedOutcome<A>),
}

// === impl Named ===

impl<T, A> EventMatch<T, A> {
    /// The calls in flight that may be meant.
    pub(crate) fn in_flight(self) -> Vec<(CallId, T)> {
        match self {
            Self::Call(id, call) => vec![(id, call)],
            Self::Ambiguous(calls) => calls,
            Self::Nothing | Self::Ended(_) => Vec::new(),
        }
    }
}

// === impl Core ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// Notes an event id of a call's stream.
    pub(crate) fn record_event_id(&mut self, id: CallId, event_id: &[u8], format: EventIdFormat) {
        let session = self.calls.get(id).and_then(Entry::session);
        let Some(session) = session else {
            return;
        };
        let stream = match (format, index::numbers(event_id)) {
            (EventIdFormat::Rmcp, Some((_, stream))) => StreamId::Numbered(stream),
            (_, numbers) => match self.record_opaque_event_id(id, session, event_id, numbers) {
                Some(stream) => stream,
                None => return,
            },
        };
        let entry = self.calls.get_mut(id);
        let Some(forgotten) = entry.and_then(|entry| entry.streams.add(stream)) else {
            return;
        };
        let slot = self.shared.hasher.stream(session, stream);
        self.index.insert(slot, id);
        if let Some(forgotten) = forgotten {
            self.has_incomplete_event_ids = true;
            self.unindex_stream(session, forgotten, id);
        }
    }

    /// What an event of any server is entered under. `None` if it counts up from the last one, or from nothing, and no
    /// other call of the session counts so.
    fn record_opaque_event_id(
        &mut self,
        id: CallId,
        session: KeyHash,
        event_id: &[u8],
        numbers: Option<(u64, u64)>,
    ) -> Option<StreamId> {
        let entry = self.calls.get_mut(id)?;
        if numbers.is_some_and(|(index, stream)| entry.streams.continue_run(index, stream)) {
            return None;
        }
        let event = EventId {
            numbers,
            hash: self.shared.hasher.event(event_id),
        };
        let mut owners = event
            .streams()
            .filter_map(|name| self.call_of_stream(session, name));
        let has_rival = owners.any(|(owner, _)| owner != id);
        self.has_shared_event_ids |= has_rival;
        let entry = self.calls.get_mut(id)?;
        if let Some((index, stream)) = numbers.filter(|_| !has_rival)
            && entry.streams.start_run(index, stream)
        {
            let slot = self
                .shared
                .hasher
                .stream(session, StreamId::Numbered(stream));
            self.index.insert(slot, id);
            return None;
        }
        Some(StreamId::Opaque(event.hash))
    }

    /// Notes that a call's event ids are not all known, because its stream cannot be read.
    pub(crate) fn mark_event_ids_incomplete(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(id) {
            entry.streams.mark_incomplete();
            self.has_incomplete_event_ids = true;
        }
    }

    pub(super) fn unindex_streams(&mut self, id: CallId, session: KeyHash, streams: &Streams) {
        for stream in streams.iter() {
            self.unindex_stream(session, stream, id);
        }
    }

    fn unindex_stream(&mut self, session: KeyHash, stream: StreamId, id: CallId) {
        let slot = self.shared.hasher.stream(session, stream);
        self.unindex(slot, id);
    }

    /// Frees a name if it is a call's own, and says whether it was. `None` if it is nobody's.
    fn unindex(&mut self, slot: KeyHash, id: CallId) -> Option<bool> {
        let is_owner = *self.index.get(slot)? == id;
        if is_owner {
            self.index.remove(slot);
        }
        Some(is_owner)
    }

    /// Gives up the id of a call that left. `false` if another call may be meant by it.
    pub(super) fn unindex_request(&mut self, id: CallId, place: &CallKey) -> bool {
        let slot = self.shared.hasher.request(place.session, &place.request);
        if let Some(was_its_own) = self.unindex(slot, id) {
            return was_its_own;
        }
        let mut others = self.calls().filter(|(other, _)| *other != id);
        !others.any(|(_, other)| other.has_key(place.session, &place.request))
    }

    /// What an event id of a session names.
    pub(crate) fn match_event(&self, scope: &Scope, event_id: &[u8]) -> EventMatch<T, A> {
        match self.session(scope) {
            Some(session) => self.match_event_in(session, event_id),
            None => EventMatch::Nothing,
        }
    }

    fn match_event_in(&self, session: KeyHash, event_id: &[u8]) -> EventMatch<T, A> {
        let is_its = |entry: &Entry<T>| entry.session() == Some(session);
        let event = self.shared.hasher.event_id(event_id);
        let mut calls = if self.has_shared_event_ids {
            self.calls_where(|entry| is_its(entry) && entry.streams.contains(event))
        } else {
            self.call_with_event(session, event).into_iter().collect()
        };
        if let Some((id, call)) = calls.pop() {
            if calls.is_empty() {
                return EventMatch::Call(id, call);
            }
            calls.push((id, call));
            return EventMatch::Ambiguous(calls);
        }
        if let Some(end) = self.retained.outcome_of(session, event) {
            return EventMatch::Ended(end.clone());
        }
        // A late client asks for what is forgotten: that must not take longer the more calls there are.
        let blurred = if self.has_incomplete_event_ids {
            self.calls_where(|entry| is_its(entry) && entry.streams.is_incomplete())
        } else {
            Vec::new()
        };
        if blurred.is_empty() {
            EventMatch::Nothing
        } else {
            EventMatch::Ambiguous(blurred)
        }
    }

    /// The call in flight that an event was seen on, if no two have the same.
    fn call_with_event(&self, session: KeyHash, event: EventId) -> Option<(CallId, T)> {
        let mut owners = event
            .streams()
            .filter_map(|name| self.call_of_stream(session, name));
        let is_it =
            |entry: &Entry<T>| entry.session() == Some(session) && entry.streams.contains(event);
        let (id, entry) = owners.find(|(_, entry)| is_it(entry))?;
        Some((id, entry.call.clone()))
    }

    /// The call that a stream is entered for.
    fn call_of_stream(&self, session: KeyHash, stream: StreamId) -> Option<(CallId, &Entry<T>)> {
        let id = *self.index.get(self.shared.hasher.stream(session, stream))?;
        Some((id, self.calls.get(id)?))
    }

    /// The session with this id in a scope.
    pub(super) fn session(&self, scope: &Scope) -> Option<KeyHash> {
        let (_, id) = self.session_id.as_ref()?;
        Some(self.shared.hasher.session(*id, scope))
    }

    /// The call of a session with this JSON-RPC id, if its request was accepted.
    pub(crate) fn find(&self, scope: &Scope, request: &RequestId) -> Option<(CallId, T)> {
        self.accepted(self.session(scope)?, request)
    }

    fn accepted(&self, session: KeyHash, request: &RequestId) -> Option<(CallId, T)> {
        let slot = self.shared.hasher.request(session, request);
        let id = *self.index.get(slot)?;
        let entry = self.calls.get(id)?;
        let is_it = entry.has_key(session, request);
        is_it.then(|| (id, entry.call.clone()))
    }

    /// The same, also if its request is not accepted yet.
    pub(crate) fn find_unaccepted_too(
        &self,
        scope: &Scope,
        request: &RequestId,
    ) -> Option<(CallId, T)> {
        self.find(scope, request).or_else(|| {
            let session = self.session(scope)?;
            let mut calls = self.calls();
            let (id, entry) = calls.find(|(_, entry)| entry.has_key(session, request))?;
            Some((id, entry.call.clone()))
        })
    }

    /// The call with this JSON-RPC id, in whatever scope. `None` if there is none, or one in more than one scope.
    pub(crate) fn find_unique(&self, request: &RequestId) -> Option<CallId> {
        if let ScopeSet::One(session) = self.scopes
            && let Some((id, _)) = self.accepted(session, request)
        {
            return Some(id);
        }
        let places = self
            .calls()
            .filter_map(|(id, entry)| Some((id, entry.key.as_ref()?)));
        let its = places.filter(|(_, place)| place.request == *request);
        let mut its: Vec<_> = its
            .map(|(id, place)| (place.session, !place.is_accepted, id))
            .collect();
        // Of each session the one that was accepted, if one was.
        its.sort_unstable();
        its.dedup_by_key(|(session, ..)| *session);
        match *its {
            [(.., id)] => Some(id),
            _ => None,
        }
    }

    /// The calls in flight that an event id may name, of the sessions of all scopes.
    pub(crate) fn candidates_for_event(&self, event_id: &[u8]) -> Vec<(CallId, T)> {
        match self.scopes {
            ScopeSet::None => return Vec::new(),
            ScopeSet::One(session) => return self.match_event_in(session, event_id).in_flight(),
            ScopeSet::Several => {}
        }
        let event = self.shared.hasher.event_id(event_id);
        let has_it = |entry: &Entry<T>| entry.key.is_some() && entry.streams.contains(event);
        let having = self.calls().filter(|(_, entry)| has_it(entry));
        let known: Vec<_> = having.map(|(_, entry)| entry.session()).collect();
        // In a session where one call has it, no other is meant.
        let may =
            |entry: &Entry<T>| entry.streams.is_incomplete() && !known.contains(&entry.session());
        self.calls_where(|entry| has_it(entry) || may(entry))
    }

    /// The call in flight that an event was seen on, in whatever scope. `None` if several have it.
    pub(crate) fn unique_match_for_event(&self, event_id: &[u8]) -> Option<(CallId, T)> {
        let named = match self.scopes {
            ScopeSet::None => return None,
            ScopeSet::One(session) => self.match_event_in(session, event_id),
            ScopeSet::Several => {
                let event = self.shared.hasher.event_id(event_id);
                let mut having = self.calls_where(|entry| entry.streams.contains(event));
                return having.pop().filter(|_| having.is_empty());
            }
        };
        match named {
            EventMatch::Call(id, call) => Some((id, call)),
            EventMatch::Nothing | EventMatch::Ambiguous(_) | EventMatch::Ended(_) => None,
        }
    }

    /// Whether calls in flight are of sessions in more than one scope.
    pub(crate) fn has_several_sessions(&self) -> bool {
        let mut sessions = self.calls().filter_map(|(_, entry)| entry.session());
        let first = sessions.next();
        self.scopes == ScopeSet::Several && sessions.any(|other| Some(other) != first)
    }

    /// Whether anything is known of a session.
    pub(crate) fn has_session(&self, scope: &Scope) -> bool {
        self.session(scope).is_some_and(|session| {
            let mut calls = self.calls();
            calls.any(|(_, entry)| entry.session() == Some(session))
                || self.retained.has_session(session)
        })
    }

    /// The calls of a session whose requests are not accepted yet.
    pub(crate) fn unaccepted(&self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.calls_where(|entry| {
            let place = entry.key.as_ref();
            place.is_some_and(|place| place.session == session && !place.is_accepted)
        })
    }

    /// Whether a session call is in flight whose request is not accepted yet.
    pub(crate) fn is_unaccepted(&self, id: CallId) -> bool {
        let entry = self.calls.get(id);
        let place = entry.and_then(|entry| entry.key.as_ref());
        place.is_some_and(|place| !place.is_accepted)
    }

    pub(crate) fn call(&self, id: CallId) -> Option<&T> {
        self.calls.get(id).map(|entry| &entry.call)
    }

    pub(crate) fn is_in_flight(&self, id: CallId) -> bool {
        self.calls.get(id).is_some()
    }

    pub(crate) fn is_detached(&self, id: CallId) -> bool {
        self.detachment(id).is_some()
    }

    /// Since when and how a call has no client.
    pub(crate) fn detachment(&self, id: CallId) -> Option<Detachment> {
        self.calls.get(id)?.detachment()
    }

    /// How long the client of a detached call may stay away, as was decided when it went.
    pub(crate) fn grace(&self, id: CallId) -> Option<Duration> {
        Some(self.calls.get(id)?.grace_timer()?.resume_window)
    }

    /// Returns why a detached call lost its client, if the call has no grace. A hold was all that kept it.
    pub(crate) fn cause_without_grace(&self, id: CallId) -> Option<DetachCause> {
        let clock = self.calls.get(id)?.grace_timer()?;
        clock
            .resume_window
            .is_zero()
            .then(|| clock.detachment.cause())
    }

    /// Whether a client that is away may come for something to a session: for a call in flight, or for an answer.
    pub(crate) fn is_awaited(&self, scope: &Scope, now: Instant) -> bool {
        self.session(scope).is_some_and(|session| {
            let is_away = |entry: &Entry<T>| {
                entry.session() == Some(session) && entry.grace_timer().is_some()
            };
            let mut calls = self.calls();
            calls.any(|(_, entry)| is_away(entry))
                || self.retained.has_undelivered_answers(session, now)
        })
    }

    /// The calls of a session that have no client.
    pub(crate) fn detached(&self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.calls_where(|entry| entry.session() == Some(session) && entry.grace_timer().is_some())
    }

    pub(super) fn calls_where(&self, are: impl Fn(&Entry<T>) -> bool) -> Vec<(CallId, T)> {
        let calls = self.calls().filter(|(_, entry)| are(entry));
        calls.map(|(id, entry)| (id, entry.call.clone())).collect()
    }
}
