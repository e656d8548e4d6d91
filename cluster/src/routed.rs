//! What comes of routing a request.

use axum::body::Body;
use http::{Request, Response};

use crate::{arrivals::Expected, drain_gate::InFlightGuard, held::Held, way::Refusal};

/// Where a request came to.
pub(crate) enum Routed {
    /// It is to be served here. The session is expected until that has begun.
    Here(Request<Body>, Option<Expected>),
    Answered(Response<Body>),
}

/// What becomes of a peer's request while sessions are handed over.
pub(crate) enum HandedOver {
    /// It is served here.
    Not(Request<Body>, Presence),
    /// The peer is to claim the session.
    Moved(Request<Body>),
    Answered(Response<Body>),
}

/// What a peer's request finds of its session.
#[derive(Default)]
pub(crate) struct Presence {
    /// It is on its way here, and the request takes part in that.
    pub(crate) joined: Option<Expected>,
    /// It is here, and the request has entered its gate.
    pub(crate) guard: Option<InFlightGuard>,
}

/// Whether a session of this instance can be brought to life here.
pub(crate) enum Taken {
    Here,
    /// It is another's by now.
    Elsewhere,
    Refused(Refusal),
}

// === impl Routed ===

impl Routed {
    pub(crate) fn here(held: Held, expected: Option<Expected>) -> Self {
        match held.into_request() {
            Some(request) => Self::Here(request, expected),
            // `Way` does not serve a request here that is not whole.
            None => Self::Answered(Refusal::Again.into()),
        }
    }
}
