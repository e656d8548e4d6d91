//! An in-flight call's entry.

use std::mem;

use tokio::time::Instant;

use super::{
    call_timers::{CallTimers, Detached, DetachedState},
    event_ids::EventIds,
    generation::{Generation, POST_GENERATION},
    index::KeyHash,
};
use crate::call::{Detachment, RequestId};

/// An in-flight call, along with the state tracked for it.
#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub(crate) call: T,
    pub(super) key: Option<CallKey>,
    pub(super) event_ids: EventIds,
    /// The generation of the latest stream.
    newest_stream: Generation,
    /// Whether the POST's stream is open.
    has_post_stream: bool,
    /// Boxed, because most calls have no deadline and are never detached.
    pub(super) timers: Option<Box<CallTimers>>,
}

/// A session call's lookup key among the calls with the same session id.
#[derive(Debug)]
pub(super) struct CallKey {
    pub(super) session: KeyHash,
    pub(super) request: RequestId,
    pub(super) is_accepted: bool,
    /// Number of untracked requests in progress with the same id.
    pub(super) contests: u32,
}

/// The result of ending a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Whether a cancellation may be sent to the server under the call's JSON-RPC id (invariant 2).
    pub(crate) may_cancel_server: bool,
    /// The call's detachment, or `None` if it was attached.
    pub(crate) detachment: Option<Detachment>,
    /// Whether any answers have been [evicted](super::SessionState::take_evicted).
    pub(crate) has_evicted: bool,
}

/// Which of a call's deadlines has passed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expired {
    /// The grace period.
    Grace,
    /// The grace period, with the cancellation confirmed.
    GraceConfirmed,
    /// The call timeout.
    Deadline,
    /// The call had been unobserved for at least `UNOBSERVED_TTL`, and has been removed.
    Forgotten(Finished),
}

// === impl CallKey ===

impl CallKey {
    pub(super) fn new(session: KeyHash, request: RequestId) -> Self {
        Self {
            session,
            request,
            is_accepted: false,
            contests: 0,
        }
    }
}

// === impl Entry ===

impl<T> Entry<T> {
    pub(super) fn new(call: T, key: Option<CallKey>, deadline: Option<Instant>) -> Self {
        let timers = deadline.map(CallTimers::with_deadline);
        Self {
            call,
            key,
            event_ids: EventIds::default(),
            newest_stream: POST_GENERATION,
            has_post_stream: true,
            timers: timers.map(Box::new),
        }
    }

    /// Adds an open stream and returns its generation.
    pub(super) fn add_stream(&mut self) -> Generation {
        self.newest_stream = self.newest_stream.next();
        let newest = self.newest_stream;
        self.timers_mut().resumed.push(newest);
        newest
    }

    /// Removes an open stream. Returns `false` if there is no such stream.
    pub(super) fn remove_stream(&mut self, stream: Generation) -> bool {
        if stream == POST_GENERATION {
            return mem::take(&mut self.has_post_stream);
        }
        let resumed = self.timers.as_mut().map(|timers| &mut timers.resumed);
        let removed = resumed.and_then(|resumed| {
            let position = resumed.iter().position(|other| *other == stream)?;
            Some(resumed.swap_remove(position))
        });
        removed.is_some()
    }

    /// Returns `true` if any stream is open.
    pub(super) fn has_stream(&self) -> bool {
        let resumed = self.timers.as_ref().map(|timers| &timers.resumed);
        self.has_post_stream || resumed.is_some_and(|resumed| !resumed.is_empty())
    }

    /// Returns `true` if this is the call in `session` with the JSON-RPC id `request`.
    pub(super) fn has_key(&self, session: KeyHash, request: &RequestId) -> bool {
        let key = self.key.as_ref();
        key.is_some_and(|key| key.session == session && key.request == *request)
    }

    pub(super) fn session(&self) -> Option<KeyHash> {
        self.key.as_ref().map(|key| key.session)
    }

    pub(super) fn detached(&self) -> Option<&Detached> {
        self.timers.as_ref()?.detached.as_ref()
    }

    pub(super) fn detachment(&self) -> Option<Detachment> {
        self.detached().map(|detached| detached.detachment)
    }

    /// Returns when the call was detached, or `None` if it is attached.
    pub(crate) fn detached_at(&self) -> Option<Instant> {
        self.detachment().map(|detachment| detachment.detached_at())
    }

    /// Returns when the call is cancelled unless its client resumes.
    ///
    /// Returns `None` if the call is attached or keeps running.
    pub(crate) fn grace_deadline(&self) -> Option<Instant> {
        match self.detached()?.state {
            DetachedState::GraceUntil { .. } => self.timers.as_ref()?.detached_deadline(),
            DetachedState::UntilComplete { .. } | DetachedState::ForgetAt { .. } => None,
        }
    }

    /// Returns when the call is cancelled at the latest, attached or not.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.timers.as_ref()?.deadline
    }

    pub(super) fn timers_mut(&mut self) -> &mut CallTimers {
        self.timers.get_or_insert_default()
    }
}
