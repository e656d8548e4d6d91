//! What comes of routing a request.

use axum::body::Body;
use http::{Request, Response};

use crate::{
    drain_gate::InFlightGuard, pending_restores::PendingRestore,
    replayable_request::ReplayableRequest, routing_plan::Refusal, turned_away::Waiting,
};

/// Where a request came to.
pub(crate) enum Routed {
    /// It is to be served here. The restore of the session is pending until that has begun.
    Local(Request<Body>, Option<PendingRestore>),
    Answered(Response<Body>),
}

/// What becomes of a peer's request while sessions are transferred.
pub(crate) enum TransferOutcome {
    /// It is served here.
    ServedHere(Request<Body>, Presence),
    /// The peer is to claim the session.
    Moved(Request<Body>),
    Answered(Response<Body>),
}

/// What a peer's request finds of its session.
#[derive(Default)]
pub(crate) struct Presence {
    /// It is about to be restored here, and the request takes part in that.
    pub(crate) restore: Option<PendingRestore>,
    /// It is here, and the request has entered its gate.
    pub(crate) guard: Option<InFlightGuard>,
}

/// Whether a session of this instance can be restored here.
pub(crate) enum Reclaimed {
    Local,
    /// It is another's by now.
    Moved,
    Refused(Refusal),
}

// === impl Routed ===

impl Routed {
    pub(crate) fn local(replayable: ReplayableRequest, restore: Option<PendingRestore>) -> Self {
        match replayable.into_request() {
            Some(request) => Self::Local(request, restore),
            // `RoutingPlan` does not serve a request here that is not whole.
            None => Self::Answered(Refusal::Again.into()),
        }
    }
}

/// Its client does not wait for an owner any more.
pub(crate) fn served(waiting: Option<Waiting>, routed: Routed) -> Routed {
    if let Some(waiting) = waiting {
        waiting.served();
    }
    routed
}
