//! Looks up in-flight calls by request id or event id.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    SessionState,
    entry::{CallKey, Entry},
    event_ids::EventIdFormat,
    index::{self, KeyHash, ScopeSet, StreamId},
    retained_call::RetainedOutcome,
};
use crate::call::{CallId, DetachCause, Detachment, RequestId, Scope};

/// The calls matched by an event id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum EventMatch<T, A> {
    Nothing,
    /// A stream of an in-flight call.
    Call(CallId, T),
    /// Possibly a stream of one of these in-flight calls.
    ///
    /// Either several calls have the event id, or it may be one that they no longer store.
    Ambiguous(Vec<(CallId, T)>),
    /// A stream of an ended call.
    Ended(RetainedOutcome<A>),
}

// === impl EventMatch ===

impl<T, A> EventMatch<T, A> {
    /// Returns the in-flight calls that may match.
    pub(crate) fn in_flight(self) -> Vec<(CallId, T)> {
        match self {
            Self::Call(id, call) => vec![(id, call)],
            Self::Ambiguous(calls) => calls,
            Self::Nothing | Self::Ended(_) => Vec::new(),
        }
    }
}

// === impl SessionState ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// Records an event id of one of a call's streams. Has no effect if the call has no key or has ended.
    pub(crate) fn record_event_id(&mut self, id: CallId, event_id: &[u8], format: EventIdFormat) {
        let entry = self.calls.get_mut(id);
        let Some(entry) = entry.filter(|entry| entry.key.is_some()) else {
            return;
        };
        entry
            .event_ids
            .add(match (format, index::numbers(event_id)) {
                (EventIdFormat::Rmcp, Some((_, stream))) => StreamId::Numbered(stream),
                _ => StreamId::Opaque(self.shared.hasher.event(event_id)),
            });
    }

    /// Records that a call's known event ids are incomplete, because its stream cannot be read.
    pub(crate) fn mark_event_ids_incomplete(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(id) {
            entry.event_ids.mark_incomplete();
        }
    }

    /// Removes an ended call's request id from the index. Returns `false` if another call may have the same id.
    pub(super) fn unindex_request(&mut self, id: CallId, key: &CallKey) -> bool {
        let slot = self.shared.hasher.request(key.session, &key.request);
        match self.by_request.get(slot) {
            Some(owner) if *owner == id => {
                self.by_request.remove(slot);
                true
            }
            Some(_) => false,
            None if self.are_all_indexed() => true,
            None => {
                // The other call may not have been accepted yet.
                let mut others = self.calls().filter(|(other, _)| *other != id);
                !others.any(|(_, other)| other.has_key(key.session, &key.request))
            }
        }
    }

    /// Returns `true` if every call can be found through the index of accepted requests.
    ///
    /// This is nearly always the case, and saves a search through all of the session's calls each time one of them ends.
    fn are_all_indexed(&self) -> bool {
        self.by_request.len() == self.calls.len()
    }

    /// Returns which of a session's calls an event id matches.
    pub(crate) fn match_event(&self, scope: &Scope, event_id: &[u8]) -> EventMatch<T, A> {
        match self.session(scope) {
            Some(session) => self.match_event_in(session, event_id),
            None => EventMatch::Nothing,
        }
    }

    fn match_event_in(&self, session: KeyHash, event_id: &[u8]) -> EventMatch<T, A> {
        let is_in_session = |entry: &Entry<T>| entry.session() == Some(session);
        let event = self.shared.hasher.event_id(event_id);
        let mut calls =
            self.calls_where(|entry| is_in_session(entry) && entry.event_ids.contains(event));
        if calls.len() > 1 {
            return EventMatch::Ambiguous(calls);
        }
        if let Some((id, call)) = calls.pop() {
            return EventMatch::Call(id, call);
        }
        if let Some(end) = self.retained.outcome_of(session, event) {
            return EventMatch::Ended(end.clone());
        }
        let possible =
            self.calls_where(|entry| is_in_session(entry) && entry.event_ids.may_contain(event));
        if possible.is_empty() {
            EventMatch::Nothing
        } else {
            EventMatch::Ambiguous(possible)
        }
    }

    /// Returns the hash of the session that this session id refers to in a scope.
    ///
    /// Returns `None` for calls without a session.
    pub(super) fn session(&self, scope: &Scope) -> Option<KeyHash> {
        let (_, id) = self.session_id.as_ref()?;
        Some(self.shared.hasher.session(*id, scope))
    }

    /// Returns the session's accepted call with the JSON-RPC id `request`.
    pub(crate) fn find(&self, scope: &Scope, request: &RequestId) -> Option<(CallId, T)> {
        self.accepted(self.session(scope)?, request)
    }

    fn accepted(&self, session: KeyHash, request: &RequestId) -> Option<(CallId, T)> {
        let slot = self.shared.hasher.request(session, request);
        let id = *self.by_request.get(slot)?;
        let entry = self.calls.get(id)?;
        let is_match = entry.has_key(session, request);
        is_match.then(|| (id, entry.call.clone()))
    }

    /// Returns the session's call with this JSON-RPC id, whether or not it has been accepted.
    pub(crate) fn find_including_unaccepted(
        &self,
        scope: &Scope,
        request: &RequestId,
    ) -> Option<(CallId, T)> {
        self.find(scope, request).or_else(|| {
            if self.are_all_indexed() {
                return None;
            }
            let session = self.session(scope)?;
            let mut calls = self.calls();
            let (id, entry) = calls.find(|(_, entry)| entry.has_key(session, request))?;
            Some((id, entry.call.clone()))
        })
    }

    /// Returns the only call with this JSON-RPC id across all scopes.
    ///
    /// Returns `None` if there is no such call, or if several scopes have one.
    pub(crate) fn find_unique(&self, request: &RequestId) -> Option<CallId> {
        if let ScopeSet::One(session) = self.scopes
            && let Some((id, _)) = self.accepted(session, request)
        {
            return Some(id);
        }
        let keys = self
            .calls()
            .filter_map(|(id, entry)| Some((id, entry.key.as_ref()?)));
        let matches = keys.filter(|(_, key)| key.request == *request);
        let mut matches: Vec<_> = matches
            .map(|(id, key)| (key.session, !key.is_accepted, id))
            .collect();
        // Keep one call per session: the accepted one, if any.
        matches.sort_unstable();
        matches.dedup_by_key(|(session, ..)| *session);
        match *matches {
            [(.., id)] => Some(id),
            _ => None,
        }
    }

    /// Returns the in-flight calls that an event id may match, in any scope.
    pub(crate) fn candidates_for_event(&self, event_id: &[u8]) -> Vec<(CallId, T)> {
        match self.scopes {
            ScopeSet::None => return Vec::new(),
            ScopeSet::One(session) => return self.match_event_in(session, event_id).in_flight(),
            ScopeSet::Several => {}
        }
        let event = self.shared.hasher.event_id(event_id);
        let has_event = |entry: &Entry<T>| entry.key.is_some() && entry.event_ids.contains(event);
        let matches = self.calls().filter(|(_, entry)| has_event(entry));
        let matched_sessions: Vec<_> = matches.map(|(_, entry)| entry.session()).collect();
        // If a call in a session has the event id, the session's calls without it cannot match.
        let may_have = |entry: &Entry<T>| {
            entry.event_ids.may_contain(event) && !matched_sessions.contains(&entry.session())
        };
        self.calls_where(|entry| has_event(entry) || may_have(entry))
    }

    /// Returns the in-flight call with this event id in any scope, if exactly one has it.
    pub(crate) fn unique_match_for_event(&self, event_id: &[u8]) -> Option<(CallId, T)> {
        let event_match = match self.scopes {
            ScopeSet::None => return None,
            ScopeSet::One(session) => self.match_event_in(session, event_id),
            ScopeSet::Several => {
                let event = self.shared.hasher.event_id(event_id);
                let mut matches = self.calls_where(|entry| entry.event_ids.contains(event));
                return matches.pop().filter(|_| matches.is_empty());
            }
        };
        match event_match {
            EventMatch::Call(id, call) => Some((id, call)),
            EventMatch::Nothing | EventMatch::Ambiguous(_) | EventMatch::Ended(_) => None,
        }
    }

    /// Returns `true` if the in-flight calls belong to sessions in more than one scope.
    pub(crate) fn has_several_sessions(&self) -> bool {
        let mut sessions = self.calls().filter_map(|(_, entry)| entry.session());
        let first = sessions.next();
        self.scopes == ScopeSet::Several && sessions.any(|other| Some(other) != first)
    }

    /// Returns `true` if a session has in-flight or retained calls.
    pub(crate) fn has_session(&self, scope: &Scope) -> bool {
        self.session(scope).is_some_and(|session| {
            let mut calls = self.calls();
            calls.any(|(_, entry)| entry.session() == Some(session))
                || self.retained.has_session(session)
        })
    }

    /// Returns the session's calls whose requests have not been accepted yet.
    pub(crate) fn unaccepted(&self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.calls_where(|entry| {
            let key = entry.key.as_ref();
            key.is_some_and(|key| key.session == session && !key.is_accepted)
        })
    }

    /// Returns `true` if a session call is in flight but its request has not been accepted yet.
    pub(crate) fn is_unaccepted(&self, id: CallId) -> bool {
        let entry = self.calls.get(id);
        let key = entry.and_then(|entry| entry.key.as_ref());
        key.is_some_and(|key| !key.is_accepted)
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

    /// Returns a call's detachment, or `None` if it is attached or has ended.
    pub(crate) fn detachment(&self, id: CallId) -> Option<Detachment> {
        self.calls.get(id)?.detachment()
    }

    /// Returns a call's resume window, or `None` if it is attached or has ended.
    pub(crate) fn resume_window(&self, id: CallId) -> Option<Duration> {
        Some(self.calls.get(id)?.detached()?.resume_window)
    }

    /// Returns why a call without a grace period is detached, or `None` for any other call.
    ///
    /// Only a pending resume can have kept it running.
    pub(crate) fn cause_without_grace(&self, id: CallId) -> Option<DetachCause> {
        let detached = self.calls.get(id)?.detached()?;
        detached
            .resume_window
            .is_zero()
            .then(|| detached.detachment.cause())
    }

    /// Returns `true` if a session's client may still resume.
    ///
    /// This is the case if the session has a detached call, or an undelivered answer still retained and unexpired.
    pub(crate) fn is_awaited(&self, scope: &Scope, now: Instant) -> bool {
        self.session(scope).is_some_and(|session| {
            let is_detached =
                |entry: &Entry<T>| entry.session() == Some(session) && entry.detached().is_some();
            let mut calls = self.calls();
            calls.any(|(_, entry)| is_detached(entry))
                || self.retained.has_undelivered_answers(session, now)
        })
    }

    /// Returns a session's detached calls.
    pub(crate) fn detached(&self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.calls_where(|entry| entry.session() == Some(session) && entry.detached().is_some())
    }

    pub(super) fn calls_where(&self, is_match: impl Fn(&Entry<T>) -> bool) -> Vec<(CallId, T)> {
        let calls = self.calls().filter(|(_, entry)| is_match(entry));
        calls.map(|(id, entry)| (id, entry.call.clone())).collect()
    }
}
