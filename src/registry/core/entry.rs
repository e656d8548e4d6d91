//! The entry of one call in flight.

use std::mem;

use tokio::time::Instant;

use super::{
    call_timers::{CallTimers, DetachedState, GraceTimer},
    generation::{Generation, POST_GENERATION},
    index::KeyHash,
    streams::Streams,
};
use crate::call::{Detachment, RequestId};

#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub(crate) call: T,
    pub(super) key: Option<CallKey>,
    pub(super) streams: Streams,
    /// The stream that was accepted last.
    newest_stream: Generation,
    /// The stream of its POST lives.
    has_post_stream: bool,
    /// Boxed, because most calls have no deadline and end attached.
    pub(super) timers: Option<Box<CallTimers>>,
}

/// What a session call is found by among those whose session has the same id.
#[derive(Debug)]
pub(super) struct CallKey {
    pub(super) session: KeyHash,
    pub(super) request: RequestId,
    pub(super) is_accepted: bool,
    /// Number of requests on their way that are not tracked and have this id.
    pub(super) contests: u32,
}

/// A call that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Whether a cancel may be sent to the server under its JSON-RPC id (invariant 2).
    pub(crate) may_cancel_server: bool,
    /// Its time without a client, if it had none.
    pub(crate) detachment: Option<Detachment>,
    /// Whether the memory is fuller than it may be, or something was [dropped](super::Core::take_dropped) from it.
    pub(crate) needs_eviction: bool,
}

/// Which time of a call is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expired {
    /// The one its client had to come back.
    Grace,
    /// The same, and nobody is to be asked any more.
    GraceConfirmed,
    /// The one it may last.
    Deadline,
    /// The one for which it is kept unseen: it is forgotten already.
    Forgotten(Finished),
}

// === impl Place ===

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
    pub(super) fn new(call: T, place: Option<CallKey>, deadline: Option<Instant>) -> Self {
        let times = deadline.map(CallTimers::with_deadline);
        Self {
            call,
            key: place,
            streams: Streams::default(),
            newest_stream: POST_GENERATION,
            has_post_stream: true,
            timers: times.map(Box::new),
        }
    }

    /// Adds a stream to those that live.
    pub(super) fn add_stream(&mut self) -> Generation {
        self.newest_stream = self.newest_stream.next();
        let newest = self.newest_stream;
        self.timers_mut().resumed.push(newest);
        newest
    }

    /// Takes a stream out of those that live. `false` if it was not among them.
    pub(super) fn remove_stream(&mut self, stream: Generation) -> bool {
        if stream == POST_GENERATION {
            return mem::take(&mut self.has_post_stream);
        }
        let resumed = self.timers.as_mut().map(|times| &mut times.resumed);
        let found = resumed.and_then(|resumed| {
            let at = resumed.iter().position(|other| *other == stream)?;
            Some(resumed.swap_remove(at))
        });
        found.is_some()
    }

    /// Whether a stream of it lives.
    pub(super) fn has_stream(&self) -> bool {
        let resumed = self.timers.as_ref().map(|times| &times.resumed);
        self.has_post_stream || resumed.is_some_and(|resumed| !resumed.is_empty())
    }

    /// Whether it is the call of this session with this JSON-RPC id.
    pub(super) fn has_key(&self, session: KeyHash, request: &RequestId) -> bool {
        let place = self.key.as_ref();
        place.is_some_and(|place| place.session == session && place.request == *request)
    }

    pub(super) fn session(&self) -> Option<KeyHash> {
        self.key.as_ref().map(|place| place.session)
    }

    pub(super) fn grace_timer(&self) -> Option<&GraceTimer> {
        self.timers.as_ref()?.grace_timer.as_ref()
    }

    pub(super) fn detachment(&self) -> Option<Detachment> {
        self.grace_timer().map(|clock| clock.detachment)
    }

    /// Since when it has no client.
    pub(crate) fn detached_at(&self) -> Option<Instant> {
        self.detachment().map(|detachment| detachment.since())
    }

    /// When it is cancelled if its client does not come back.
    pub(crate) fn grace_deadline(&self) -> Option<Instant> {
        match self.grace_timer()?.state {
            DetachedState::GraceUntil { .. } => self.timers.as_ref()?.detached_deadline(),
            DetachedState::UntilComplete { .. } | DetachedState::ForgetAt { .. } => None,
        }
    }

    /// When it is cancelled at the latest, attached or not.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.timers.as_ref()?.deadline
    }

    pub(super) fn timers_mut(&mut self) -> &mut CallTimers {
        self.timers.get_or_insert_default()
    }
}
