//! The calls in flight of a session and all their names.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Core,
    entry::{Entry, Place},
    index::{self, EventId, NameHash, SessionsOfId, StreamId},
    records::End,
    streams::{Form, Streams},
};
use crate::call::{CallId, DetachCause, Detachment, RequestId, Scope};

/// What an event id names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Named<T, A> {
    Nothing,
    /// A stream of a call in flight.
    Call(CallId, T),
    /// Perhaps one of these: not all of their streams are known by name, or several have it.
    OneOf(Vec<(CallId, T)>),
    /// A stream of a call that has ended.
    Ended(End<A>),
}

// === impl Named ===

impl<T, A> Named<T, A> {
    /// The calls in flight that may be meant.
    pub(crate) fn in_flight(self) -> Vec<(CallId, T)> {
        match self {
            Self::Call(id, call) => vec![(id, call)],
            Self::OneOf(calls) => calls,
            Self::Nothing | Self::Ended(_) => Vec::new(),
        }
    }
}

// === impl Core ===

impl<T: Clone, A: Clone> Core<T, A> {
    /// Notes an event id of a call's stream.
    pub(crate) fn name(&mut self, id: CallId, event_id: &[u8], form: Form) {
        let session = self.calls.get(id).and_then(Entry::session);
        let Some(session) = session else {
            return;
        };
        let stream = match (form, index::numbers(event_id)) {
            (Form::Rmcp, Some((_, stream))) => StreamId::Numbered(stream),
            (_, numbers) => match self.name_of_any(id, session, event_id, numbers) {
                Some(stream) => stream,
                None => return,
            },
        };
        let entry = self.calls.get_mut(id);
        let Some(forgotten) = entry.and_then(|entry| entry.streams.add(stream)) else {
            return;
        };
        let slot = self.common.names.stream(session, stream);
        self.index.insert(slot, id);
        if let Some(forgotten) = forgotten {
            self.has_blurred = true;
            self.unname(session, forgotten, id);
        }
    }

    /// What an event of any server is entered under. `None` if it counts up from the last one, or from nothing, and no
    /// other call of the session counts so.
    fn name_of_any(
        &mut self,
        id: CallId,
        session: NameHash,
        event_id: &[u8],
        numbers: Option<(u64, u64)>,
    ) -> Option<StreamId> {
        let entry = self.calls.get_mut(id)?;
        if numbers.is_some_and(|(index, stream)| entry.streams.continue_run(index, stream)) {
            return None;
        }
        let event = EventId {
            numbers,
            hash: self.common.names.event(event_id),
        };
        let mut owners = event.streams().filter_map(|name| self.owner(session, name));
        let has_rival = owners.any(|(owner, _)| owner != id);
        self.has_rivals |= has_rival;
        let entry = self.calls.get_mut(id)?;
        if let Some((index, stream)) = numbers.filter(|_| !has_rival)
            && entry.streams.start_run(index, stream)
        {
            let slot = self
                .common
                .names
                .stream(session, StreamId::Numbered(stream));
            self.index.insert(slot, id);
            return None;
        }
        Some(StreamId::Opaque(event.hash))
    }

    /// Notes that a call's event ids are not all known, because its stream cannot be read.
    pub(crate) fn blur(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(id) {
            entry.streams.blur();
            self.has_blurred = true;
        }
    }

    pub(super) fn forget_streams(&mut self, id: CallId, session: NameHash, streams: &Streams) {
        for stream in streams.iter() {
            self.unname(session, stream, id);
        }
    }

    fn unname(&mut self, session: NameHash, stream: StreamId, id: CallId) {
        let slot = self.common.names.stream(session, stream);
        self.free(slot, id);
    }

    /// Frees a name if it is a call's own, and says whether it was. `None` if it is nobody's.
    fn free(&mut self, slot: NameHash, id: CallId) -> Option<bool> {
        let is_owner = *self.index.get(slot)? == id;
        if is_owner {
            self.index.remove(slot);
        }
        Some(is_owner)
    }

    /// Gives up the id of a call that left. `false` if another call may be meant by it.
    pub(super) fn free_id(&mut self, id: CallId, place: &Place) -> bool {
        let slot = self.common.names.request(place.session, &place.request);
        if let Some(was_its_own) = self.free(slot, id) {
            return was_its_own;
        }
        let mut others = self.calls().filter(|(other, _)| *other != id);
        !others.any(|(_, other)| other.is(place.session, &place.request))
    }

    /// What an event id of a session names.
    pub(crate) fn named(&self, scope: &Scope, event_id: &[u8]) -> Named<T, A> {
        match self.session(scope) {
            Some(session) => self.named_in(session, event_id),
            None => Named::Nothing,
        }
    }

    fn named_in(&self, session: NameHash, event_id: &[u8]) -> Named<T, A> {
        let is_its = |entry: &Entry<T>| entry.session() == Some(session);
        let event = self.common.names.event_id(event_id);
        let mut calls = if self.has_rivals {
            self.calls_that(|entry| is_its(entry) && entry.streams.have(event))
        } else {
            self.on(session, event).into_iter().collect()
        };
        if let Some((id, call)) = calls.pop() {
            if calls.is_empty() {
                return Named::Call(id, call);
            }
            calls.push((id, call));
            return Named::OneOf(calls);
        }
        if let Some(end) = self.memory.end_of(session, event) {
            return Named::Ended(end.clone());
        }
        // A late client asks for what is forgotten: that must not take longer the more calls there are.
        let blurred = if self.has_blurred {
            self.calls_that(|entry| is_its(entry) && entry.streams.are_blurred())
        } else {
            Vec::new()
        };
        if blurred.is_empty() {
            Named::Nothing
        } else {
            Named::OneOf(blurred)
        }
    }

    /// The call in flight that an event was seen on, if no two have the same.
    fn on(&self, session: NameHash, event: EventId) -> Option<(CallId, T)> {
        let mut owners = event.streams().filter_map(|name| self.owner(session, name));
        let is_it =
            |entry: &Entry<T>| entry.session() == Some(session) && entry.streams.have(event);
        let (id, entry) = owners.find(|(_, entry)| is_it(entry))?;
        Some((id, entry.call.clone()))
    }

    /// The call that a stream is entered for.
    fn owner(&self, session: NameHash, stream: StreamId) -> Option<(CallId, &Entry<T>)> {
        let id = *self.index.get(self.common.names.stream(session, stream))?;
        Some((id, self.calls.get(id)?))
    }

    /// The session with this id in a scope.
    pub(super) fn session(&self, scope: &Scope) -> Option<NameHash> {
        let (_, id) = self.session_id.as_ref()?;
        Some(self.common.names.session(*id, scope))
    }

    /// The call of a session with this JSON-RPC id, if its request was accepted.
    pub(crate) fn find(&self, scope: &Scope, request: &RequestId) -> Option<(CallId, T)> {
        self.accepted(self.session(scope)?, request)
    }

    fn accepted(&self, session: NameHash, request: &RequestId) -> Option<(CallId, T)> {
        let slot = self.common.names.request(session, request);
        let id = *self.index.get(slot)?;
        let entry = self.calls.get(id)?;
        let is_it = entry.is(session, request);
        is_it.then(|| (id, entry.call.clone()))
    }

    /// The same, also if its request is not accepted yet.
    pub(crate) fn find_any(&self, scope: &Scope, request: &RequestId) -> Option<(CallId, T)> {
        self.find(scope, request).or_else(|| {
            let session = self.session(scope)?;
            let mut calls = self.calls();
            let (id, entry) = calls.find(|(_, entry)| entry.is(session, request))?;
            Some((id, entry.call.clone()))
        })
    }

    /// The call with this JSON-RPC id, in whatever scope. `None` if there is none, or one in more than one scope.
    pub(crate) fn find_in_any(&self, request: &RequestId) -> Option<CallId> {
        if let SessionsOfId::One(session) = self.sessions
            && let Some((id, _)) = self.accepted(session, request)
        {
            return Some(id);
        }
        let places = self
            .calls()
            .filter_map(|(id, entry)| Some((id, entry.place.as_ref()?)));
        let its = places.filter(|(_, place)| place.request == *request);
        let mut its: Vec<_> = its
            .map(|(id, place)| (place.session, !place.owns_id, id))
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
    pub(crate) fn that_may_have(&self, event_id: &[u8]) -> Vec<(CallId, T)> {
        match self.sessions {
            SessionsOfId::None => return Vec::new(),
            SessionsOfId::One(session) => return self.named_in(session, event_id).in_flight(),
            SessionsOfId::Several => {}
        }
        let event = self.common.names.event_id(event_id);
        let has_it = |entry: &Entry<T>| entry.place.is_some() && entry.streams.have(event);
        let having = self.calls().filter(|(_, entry)| has_it(entry));
        let known: Vec<_> = having.map(|(_, entry)| entry.session()).collect();
        // In a session where one call has it, no other is meant.
        let may =
            |entry: &Entry<T>| entry.streams.are_blurred() && !known.contains(&entry.session());
        self.calls_that(|entry| has_it(entry) || may(entry))
    }

    /// The call in flight that an event was seen on, in whatever scope. `None` if several have it.
    pub(crate) fn sole_with(&self, event_id: &[u8]) -> Option<(CallId, T)> {
        let named = match self.sessions {
            SessionsOfId::None => return None,
            SessionsOfId::One(session) => self.named_in(session, event_id),
            SessionsOfId::Several => {
                let event = self.common.names.event_id(event_id);
                let mut having = self.calls_that(|entry| entry.streams.have(event));
                return having.pop().filter(|_| having.is_empty());
            }
        };
        match named {
            Named::Call(id, call) => Some((id, call)),
            Named::Nothing | Named::OneOf(_) | Named::Ended(_) => None,
        }
    }

    /// Whether calls in flight are of sessions in more than one scope.
    pub(crate) fn has_several_sessions(&self) -> bool {
        let mut sessions = self.calls().filter_map(|(_, entry)| entry.session());
        let first = sessions.next();
        self.sessions == SessionsOfId::Several && sessions.any(|other| Some(other) != first)
    }

    /// Whether anything is known of a session.
    pub(crate) fn has(&self, scope: &Scope) -> bool {
        self.session(scope).is_some_and(|session| {
            let mut calls = self.calls();
            calls.any(|(_, entry)| entry.session() == Some(session)) || self.memory.has(session)
        })
    }

    /// The calls of a session whose requests are not accepted yet.
    pub(crate) fn unaccepted(&self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.calls_that(|entry| {
            let place = entry.place.as_ref();
            place.is_some_and(|place| place.session == session && !place.owns_id)
        })
    }

    /// Whether a session call is in flight whose request is not accepted yet.
    pub(crate) fn is_undecided(&self, id: CallId) -> bool {
        let entry = self.calls.get(id);
        let place = entry.and_then(|entry| entry.place.as_ref());
        place.is_some_and(|place| !place.owns_id)
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
        Some(self.calls.get(id)?.clock()?.patience)
    }

    /// Returns why a detached call lost its client, if the call has no grace. A hold was all that kept it.
    pub(crate) fn ungraced(&self, id: CallId) -> Option<DetachCause> {
        let clock = self.calls.get(id)?.clock()?;
        clock.patience.is_zero().then(|| clock.detachment.cause())
    }

    /// Whether a client that is away may come for something to a session: for a call in flight, or for an answer.
    pub(crate) fn is_awaited(&self, scope: &Scope, now: Instant) -> bool {
        self.session(scope).is_some_and(|session| {
            let is_away =
                |entry: &Entry<T>| entry.session() == Some(session) && entry.clock().is_some();
            let mut calls = self.calls();
            calls.any(|(_, entry)| is_away(entry)) || self.memory.owes_answers(session, now)
        })
    }

    /// The calls of a session that have no client.
    pub(crate) fn detached(&self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.calls_that(|entry| entry.session() == Some(session) && entry.clock().is_some())
    }

    pub(super) fn calls_that(&self, are: impl Fn(&Entry<T>) -> bool) -> Vec<(CallId, T)> {
        let calls = self.calls().filter(|(_, entry)| are(entry));
        calls.map(|(id, entry)| (id, entry.call.clone())).collect()
    }
}
