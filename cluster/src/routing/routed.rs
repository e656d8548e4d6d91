//! The results of routing requests.

use axum::body::Body;
use http::{Request, Response};

use crate::{
    membership::turned_away::Waiting,
    refusals::Refusal,
    relay::replayable_request::ReplayableRequest,
    sessions::{drain_gate::InFlightGuard, pending_restores::PendingRestore},
};

/// The result of routing a request.
pub(crate) enum Routed {
    /// The request must be served here.
    ///
    /// If it may restore its session, the restore stays pending until the request has been answered.
    Local(Request<Body>, Option<PendingRestore>),
    Answered(Response<Body>),
}

/// The outcome of a peer's request while sessions are being transferred.
pub(crate) enum TransferOutcome {
    ServedHere(Request<Body>, Presence),
    /// The peer must claim the session.
    Moved(Request<Body>),
    Answered(Response<Body>),
}

/// Whether and how the session of a peer's request is present on this instance.
#[derive(Default)]
pub(crate) struct Presence {
    /// Set if the session is about to be restored here. The request takes part in the restore.
    pub(crate) restore: Option<PendingRestore>,
    /// Set if the session is open here. The request has entered the session's gate.
    pub(crate) guard: Option<InFlightGuard>,
}

/// The result of reclaiming one of this instance's own sessions before restoring it.
pub(crate) enum Reclaimed {
    /// The request is served here: the session has been reclaimed, or provably does not exist.
    Local,
    /// Another instance now owns the session.
    Moved,
    Refused(Refusal),
}

// === impl Routed ===

impl Routed {
    pub(crate) fn local(replayable: ReplayableRequest, restore: Option<PendingRestore>) -> Self {
        match replayable.into_request() {
            Some(request) => Self::Local(request, restore),
            // `RoutingPlan` serves a request here only if it is still complete.
            None => Self::Answered(Refusal::SessionMoved.into()),
        }
    }
}

/// Marks the client as served if it was waiting for an owner, and returns `routed`.
pub(crate) fn end_wait(waiting: Option<Waiting>, routed: Routed) -> Routed {
    if let Some(waiting) = waiting {
        waiting.mark_served();
    }
    routed
}
