//! The entry of one call in flight.

use std::mem;

use tokio::time::Instant;

use super::{
    generation::{FIRST, Generation},
    index::NameHash,
    streams::Streams,
    times::{Clock, Times, Wait},
};
use crate::call::{Detachment, RequestId};

#[derive(Debug)]
pub(crate) struct Entry<T> {
    pub(crate) call: T,
    pub(super) place: Option<Place>,
    pub(super) streams: Streams,
    /// The stream that was accepted last.
    newest: Generation,
    /// The stream of its POST lives.
    posted: bool,
    /// Boxed, because most calls have no deadline and end attached.
    pub(super) times: Option<Box<Times>>,
}

/// What a session call is found by among those whose session has the same id.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) session: NameHash,
    pub(super) request: RequestId,
    pub(super) owns_id: bool,
    /// Number of requests on their way that are not tracked and have this id.
    pub(super) contests: u32,
}

/// A call that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Whether a cancel may be sent to the server under its JSON-RPC id (invariant 2).
    pub(crate) injectable: bool,
    /// Its time without a client, if it had none.
    pub(crate) detachment: Option<Detachment>,
    /// Whether the memory is fuller than it may be, or something was [dropped](super::Core::take_dropped) from it.
    pub(crate) is_too_much: bool,
}

/// Which time of a call is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Expired {
    /// The one its client had to come back.
    Grace,
    /// The same, and nobody is to be asked any more.
    Confirmed,
    /// The one it may last.
    Deadline,
    /// The one for which it is kept unseen: it is forgotten already.
    Unseen(Finished),
}

// === impl Place ===

impl Place {
    pub(super) fn new(session: NameHash, request: RequestId) -> Self {
        Self {
            session,
            request,
            owns_id: false,
            contests: 0,
        }
    }
}

// === impl Entry ===

impl<T> Entry<T> {
    pub(super) fn new(call: T, place: Option<Place>, deadline: Option<Instant>) -> Self {
        let times = deadline.map(Times::lasting_to);
        Self {
            call,
            place,
            streams: Streams::default(),
            newest: FIRST,
            posted: true,
            times: times.map(Box::new),
        }
    }

    /// Adds a stream to those that live.
    pub(super) fn add_stream(&mut self) -> Generation {
        self.newest = self.newest.next();
        let newest = self.newest;
        self.times_mut().resumed.push(newest);
        newest
    }

    /// Takes a stream out of those that live. `false` if it was not among them.
    pub(super) fn remove_stream(&mut self, stream: Generation) -> bool {
        if stream == FIRST {
            return mem::take(&mut self.posted);
        }
        let resumed = self.times.as_mut().map(|times| &mut times.resumed);
        let found = resumed.and_then(|resumed| {
            let at = resumed.iter().position(|other| *other == stream)?;
            Some(resumed.swap_remove(at))
        });
        found.is_some()
    }

    /// Whether a stream of it lives.
    pub(super) fn has_stream(&self) -> bool {
        let resumed = self.times.as_ref().map(|times| &times.resumed);
        self.posted || resumed.is_some_and(|resumed| !resumed.is_empty())
    }

    /// Whether it is the call of this session with this JSON-RPC id.
    pub(super) fn is(&self, session: NameHash, request: &RequestId) -> bool {
        let place = self.place.as_ref();
        place.is_some_and(|place| place.session == session && place.request == *request)
    }

    pub(super) fn session(&self) -> Option<NameHash> {
        self.place.as_ref().map(|place| place.session)
    }

    pub(super) fn clock(&self) -> Option<&Clock> {
        self.times.as_ref()?.clock.as_ref()
    }

    pub(super) fn detachment(&self) -> Option<Detachment> {
        self.clock().map(|clock| clock.detachment)
    }

    /// Since when it has no client.
    pub(crate) fn detached_at(&self) -> Option<Instant> {
        self.detachment().map(|detachment| detachment.since())
    }

    /// When it is cancelled if its client does not come back.
    pub(crate) fn waits_to(&self) -> Option<Instant> {
        match self.clock()?.wait {
            Wait::Until { .. } => self.times.as_ref()?.grace_ends(),
            Wait::ForItsEnd { .. } | Wait::Unseen { .. } => None,
        }
    }

    /// When it is cancelled at the latest, attached or not.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        self.times.as_ref()?.deadline
    }

    pub(super) fn times_mut(&mut self) -> &mut Times {
        self.times.get_or_insert_default()
    }
}
