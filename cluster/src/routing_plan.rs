//! The decision where a request is served, without input or output: what was learned goes in, what to do next comes out.
//!
//! 1. A request without a session, and one whose session lives here, is served here. Nothing is asked.
//! 2. What came from a peer is served here or refused as moved. It is never relayed: there is one hop.
//! 3. Everything else is relayed to the owner of its session. A session is claimed only if the lease of its owner is over, or if its
//!    owner answered that it relinquished the session. A refused, reset or silent connection proves nothing. An instance that loses a
//!    claim relays to the winner. The winner may be on its way out as well, so there are [`MAX_CLAIMS`].
//! 4. "No such session" is only said here if the directory was consistent for long enough. In every other doubt the client is asked
//!    to come again.
//! 5. An instance that shuts down does not reclaim what it has relinquished: it waits for the instance that claims that.
//! 6. Nothing is served here whose body has gone to a peer already, and no call is sent twice.

use std::fmt;

use crate::{
    ids::{Incarnation, Ownership},
    shutdown::ShutdownStage,
};

/// How many claims are made for a request: 3.
const MAX_CLAIMS: u8 = 3;

/// Maximum number of look-ups of the instance that has claimed what this one relinquished: 20.
const MAX_LOOKUP_RETRIES: u8 = 20;

/// What is known of a request when its head has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IncomingRequest {
    /// It names one session that can be read.
    pub(crate) has_session: bool,
    /// That session lives here.
    pub(crate) is_local: bool,
    /// It came over the listener for peers.
    pub(crate) is_from_peer: bool,
    /// How far the shutdown of this instance is.
    pub(crate) stage: ShutdownStage,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Serve it here.
    Serve,
    /// Serve it here although its session does not live here yet: it is this instance's, and is restored for this request if this instance
    /// can reclaim it.
    Reclaim,
    /// Serve it here, or transfer its session.
    Transfer,
    /// Tell the peer that the session is not here.
    Moved,
    /// Ask for the owner.
    LookUp,
    /// The same after a while.
    LookUpLater,
    Relay(Ownership),
    /// Ask whether this owner is alive.
    CheckLease(Ownership),
    /// Claim the session from this owner.
    Claim(Ownership, Cause),
    Refuse(Refusal),
}

/// Why a session may be claimed from its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The lease of the owner is over.
    LeaseOver,
    /// The owner answered that it relinquished the session.
    Relinquished,
}

/// Why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The directory did not answer, or what it says is not to be relied on yet.
    NotSound,
    /// The owner, who is not known to be gone, could not be reached.
    OwnerAway,
    /// The session has come to this instance or another while the request was under way. It can be sent again.
    Again,
    /// The owner broke off before it answered. Whether it had begun is not known, so it is not for this instance to send it again.
    Broken,
    /// The head of the request has more fields than a peer takes.
    TooManyFields,
    /// The client broke off in the middle of its request.
    BrokeOff,
    /// The client sent a part of its request, and nothing more.
    Stalled,
}

/// What came of a [`Action::LookUp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    Owner(Ownership),
    Unowned,
    NoAnswer,
}

/// Why a [`Action::Relay`] came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was refused. Nothing was sent. The owner may be alive behind a firewall that rejects.
    Refused,
    /// The owner answered that it relinquished the session.
    Moved,
    /// Another instance than the owner answered at its address, and it does not have the session.
    Misdirected,
    /// No connection came about, or none to a peer, or it ended before the body of a call was asked for.
    Unreachable,
    /// No head came in time, and no call can have begun.
    Silent,
    /// The connection ended before the head. A call may have begun.
    Broken,
    /// The body of the request stalled while it was sent.
    Stalled,
}

/// What came of a [`Action::CheckLease`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseState {
    Alive,
    Expired,
    NoAnswer,
}

/// What came of a [`Action::Claim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimed {
    Won,
    Lost(Ownership),
    /// The directory does not know the session any more.
    Unowned,
    NoAnswer,
}

/// The routing of one request.
#[derive(Debug)]
pub(crate) struct RoutingPlan {
    me: Incarnation,
    /// The request is a POST: it may have an effect that must not happen twice.
    is_call: bool,
    claims: u8,
    lookup_retries: u8,
}

// === impl IncomingRequest ===

impl IncomingRequest {
    pub(crate) fn action(self) -> Action {
        let is_ours = self.has_session && self.is_local;
        match (self.is_from_peer, is_ours) {
            (true, true) => match self.stage {
                ShutdownStage::Running => Action::Serve,
                ShutdownStage::Transferring => Action::Transfer,
                ShutdownStage::Stopped | ShutdownStage::Closed => Action::Moved,
            },
            (true, false) => Action::Moved,
            (false, true) => Action::Serve,
            (false, false) if !self.has_session => Action::Serve,
            (false, false) => Action::LookUp,
        }
    }
}

// === impl Refusal ===

impl Refusal {
    /// Whether the client is asked to come again.
    pub(crate) fn is_temporary(self) -> bool {
        matches!(self, Self::NotSound | Self::OwnerAway | Self::Again)
    }
}

// === impl RoutingPlan ===

impl RoutingPlan {
    pub(crate) fn new(me: Incarnation, is_call: bool) -> Self {
        Self {
            me,
            is_call,
            claims: 0,
            lookup_retries: 0,
        }
    }

    /// What follows from a look-up. `is_consistent`: the directory was consistent for long enough that what it does not know does not exist.
    pub(crate) fn on_lookup(&self, known: Known, is_consistent: bool) -> Action {
        match known {
            Known::Owner(is) if is.owner.incarnation == self.me => Action::Reclaim,
            Known::Owner(is) => Action::Relay(is),
            Known::Unowned if is_consistent => Action::Serve,
            Known::Unowned | Known::NoAnswer => Action::Refuse(Refusal::NotSound),
        }
    }

    /// What follows from a look-up that finds a session this instance's, which has relinquished it.
    pub(crate) fn on_relinquished(&mut self) -> Action {
        if self.lookup_retries == MAX_LOOKUP_RETRIES {
            return Action::Refuse(Refusal::Again);
        }
        self.lookup_retries += 1;
        Action::LookUpLater
    }

    /// What follows from a relay that came to nothing.
    pub(crate) fn on_relay_failure(&self, owner: Ownership, failure: Failure) -> Action {
        match failure {
            Failure::Broken if self.is_call => Action::Refuse(Refusal::Broken),
            Failure::Stalled => Action::Refuse(Refusal::Stalled),
            // Whoever goes on from here could go in circles.
            _ if self.claims == MAX_CLAIMS => Action::Refuse(Refusal::OwnerAway),
            Failure::Moved => Action::Claim(owner, Cause::Relinquished),
            Failure::Refused
            | Failure::Misdirected
            | Failure::Unreachable
            | Failure::Silent
            | Failure::Broken => Action::CheckLease(owner),
        }
    }

    /// What follows from the lease of an owner who could not be reached.
    pub(crate) fn on_lease(&self, owner: Ownership, lease: LeaseState) -> Action {
        match lease {
            LeaseState::Expired => Action::Claim(owner, Cause::LeaseOver),
            LeaseState::Alive => Action::Refuse(Refusal::OwnerAway),
            LeaseState::NoAnswer => Action::Refuse(Refusal::NotSound),
        }
    }

    /// What follows from a claim. `is_whole`: the request can still be sent or served as it came.
    pub(crate) fn on_claim(
        &mut self,
        claimed: Claimed,
        is_consistent: bool,
        is_whole: bool,
    ) -> Action {
        self.claims += 1;
        match claimed {
            Claimed::NoAnswer => Action::Refuse(Refusal::NotSound),
            Claimed::Unowned if !is_consistent => Action::Refuse(Refusal::NotSound),
            _ if !is_whole => Action::Refuse(Refusal::Again),
            Claimed::Unowned => Action::Serve,
            Claimed::Won => Action::Reclaim,
            Claimed::Lost(is) if is.owner.incarnation == self.me => Action::Reclaim,
            Claimed::Lost(is) => Action::Relay(is),
        }
    }
}

// === impl Cause ===

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LeaseOver => "its owner's lease is over",
            Self::Relinquished => "its owner gave it up",
        })
    }
}

#[cfg(test)]
mod tests;
