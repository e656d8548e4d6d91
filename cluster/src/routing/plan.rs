//! Decides where a request is served. The plan does no I/O. It receives results and returns the next action.
//!
//! 1. A client's request is served here without a lookup if it has no session, or if its session is open here.
//! 2. A request from a peer is served here or refused as moved. It is never relayed, because there is only one hop.
//! 3. Every other request is relayed to its session's owner. A session is claimed only if the lease of its owner is over, or if its
//!    owner answered that it relinquished the session. A refused, reset or silent connection proves nothing. An instance that loses a claim
//!    relays to the winner. The winner may be shutting down as well, so there are up to [`MAX_CLAIMS`] claims.
//! 4. "No such session" is answered here only if the directory was consistent for long enough. Otherwise the client is asked to retry.
//! 5. An instance that shuts down does not reclaim a session that it has relinquished. It waits until another instance claims the session.
//! 6. A call that a peer may have started is neither served here nor sent again. Nor is a request whose body was sent and could not be kept.

use std::fmt;

use crate::{
    ids::{Incarnation, Ownership},
    refusals::Refusal,
    relay::failure::Failure,
    shutdown::ShutdownStage,
};

/// Maximum number of claims for one request: 3.
const MAX_CLAIMS: u8 = 3;

/// Maximum number of lookups while another instance is claiming a relinquished session: 20.
const MAX_LOOKUP_RETRIES: u8 = 20;

/// The facts about a request when its head has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IncomingRequest {
    /// The request carries a readable session id.
    pub(crate) has_session: bool,
    /// The session is open here. For a peer's request, it may also be about to be restored here, or have ended here.
    pub(crate) is_local: bool,
    /// The request arrived on the peer listener.
    pub(crate) is_from_peer: bool,
    /// The shutdown stage of this instance.
    pub(crate) stage: ShutdownStage,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Serve the request here.
    Serve,
    /// Restore the session here, and serve the request. This instance owns the session and must reclaim it first.
    Reclaim,
    /// Serve the request here, or transfer its session.
    Transfer,
    /// Answer the peer that the session is not here.
    Moved,
    /// Look up the owner.
    LookUp,
    /// Look up the owner after a delay.
    LookUpLater,
    Relay(Ownership),
    /// Check whether this owner has a lease.
    CheckLease(Ownership),
    /// Claim the session from this owner.
    Claim(Ownership, Cause),
    Refuse(Refusal),
}

/// The reason why a session may be claimed from its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The owner's lease is over.
    LeaseOver,
    /// The owner answered that it relinquished the session.
    Relinquished,
}

/// The result of an [`Action::LookUp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    Owner(Ownership),
    Unowned,
    NoAnswer,
}

/// The result of an [`Action::CheckLease`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseState {
    Alive,
    Expired,
    /// The directory did not answer, or its content proves nothing.
    NoAnswer,
}

/// The result of an [`Action::Claim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimed {
    Won,
    Lost(Ownership),
    /// The directory has no record of the session, or has its tombstone.
    Unowned,
    NoAnswer,
}

/// The routing of one request.
#[derive(Debug)]
pub(crate) struct RoutingPlan {
    me: Incarnation,
    /// The request is a POST, which may have an effect that must not happen twice.
    is_call: bool,
    /// A peer may have started the call. It is refused, but its session is claimed for later requests if the owner's lease is over.
    may_have_started: bool,
    claims: u8,
    lookup_retries: u8,
}

// === impl IncomingRequest ===

impl IncomingRequest {
    /// Returns the first action for the request.
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

// === impl RoutingPlan ===

impl RoutingPlan {
    pub(crate) fn new(me: Incarnation, is_call: bool) -> Self {
        Self {
            me,
            is_call,
            may_have_started: false,
            claims: 0,
            lookup_retries: 0,
        }
    }

    /// Returns the action after a lookup.
    ///
    /// `is_consistent`: the directory was consistent for long enough that a session without a record does not exist.
    pub(crate) fn on_lookup(&self, known: Known, is_consistent: bool) -> Action {
        match known {
            Known::Owner(ownership) if ownership.owner.incarnation == self.me => Action::Reclaim,
            Known::Owner(ownership) => Action::Relay(ownership),
            Known::Unowned if is_consistent => Action::Serve,
            Known::Unowned | Known::NoAnswer => Action::Refuse(Refusal::Inconsistent),
        }
    }

    /// Returns the action for a relinquished session that no other instance has claimed yet.
    ///
    /// The request is refused after [`MAX_LOOKUP_RETRIES`] more lookups.
    pub(crate) fn on_relinquished(&mut self) -> Action {
        if self.lookup_retries == MAX_LOOKUP_RETRIES {
            return Action::Refuse(Refusal::SessionMoved);
        }
        self.lookup_retries += 1;
        Action::LookUpLater
    }

    /// Returns the action after a failed relay.
    pub(crate) fn on_relay_failure(&mut self, owner: Ownership, failure: Failure) -> Action {
        self.may_have_started |= failure == Failure::Broken && self.is_call;
        match failure {
            Failure::Stalled => Action::Refuse(Refusal::Stalled),
            // Another attempt could relay in circles.
            _ if self.claims == MAX_CLAIMS => self.refuse(Refusal::OwnerUnreachable),
            Failure::Moved => Action::Claim(owner, Cause::Relinquished),
            Failure::Refused
            | Failure::Misdirected
            | Failure::Unreachable
            | Failure::Silent
            | Failure::Broken => Action::CheckLease(owner),
        }
    }

    /// Returns the action after a check of the lease of an unreachable owner.
    pub(crate) fn on_lease(&self, owner: Ownership, lease: LeaseState) -> Action {
        match lease {
            LeaseState::Expired => Action::Claim(owner, Cause::LeaseOver),
            LeaseState::Alive => self.refuse(Refusal::OwnerUnreachable),
            LeaseState::NoAnswer => self.refuse(Refusal::Inconsistent),
        }
    }

    /// Refuses the request. A call that may have started is always refused as [`Refusal::ConnectionLost`].
    pub(crate) fn refuse(&self, refusal: Refusal) -> Action {
        Action::Refuse(if self.may_have_started {
            Refusal::ConnectionLost
        } else {
            refusal
        })
    }

    /// Returns the action after a claim.
    ///
    /// `is_consistent`: an unowned session provably does not exist. `is_whole`: the request can still be sent or served unchanged.
    pub(crate) fn on_claim(
        &mut self,
        claimed: Claimed,
        is_consistent: bool,
        is_whole: bool,
    ) -> Action {
        self.claims += 1;
        match claimed {
            _ if self.may_have_started => Action::Refuse(Refusal::ConnectionLost),
            Claimed::NoAnswer => Action::Refuse(Refusal::Inconsistent),
            Claimed::Unowned if !is_consistent => Action::Refuse(Refusal::Inconsistent),
            _ if !is_whole => Action::Refuse(Refusal::SessionMoved),
            Claimed::Unowned => Action::Serve,
            Claimed::Won => Action::Reclaim,
            Claimed::Lost(ownership) if ownership.owner.incarnation == self.me => Action::Reclaim,
            Claimed::Lost(ownership) => Action::Relay(ownership),
        }
    }
}

// === impl Known ===

impl Known {
    /// Returns the label of the metric.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Owner(_) => "owner",
            Self::Unowned => "unowned",
            Self::NoAnswer => "no_answer",
        }
    }
}

// === impl Claimed ===

impl Claimed {
    /// Returns the label of the metric.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Won => "won",
            Self::Lost(_) => "lost",
            Self::Unowned => "unowned",
            Self::NoAnswer => "no_answer",
        }
    }
}

// === impl Cause ===

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LeaseOver => "its owner's lease is over",
            Self::Relinquished => "its owner relinquished it",
        })
    }
}

#[cfg(test)]
mod tests;
