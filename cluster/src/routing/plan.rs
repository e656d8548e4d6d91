//! Decides where a request is served. The plan does no I/O: it is given the result of each action and returns the next one.
//!
//! 1. A client's request is served here without a lookup if it has no session, or if its session is open here.
//! 2. A peer's request is either served here or answered with 421. It is never relayed any further, so there is only one hop.
//! 3. Any other request is relayed to its session's owner. A session is claimed only if its owner's lease has lapsed, or if its owner has
//!    responded that it relinquished the session. A refused, reset or silent connection is not conclusive. An instance that loses a claim
//!    relays the request to the winner, which may be shutting down too, so there can be up to [`MAX_CLAIMS`] claims.
//! 4. This instance responds "no such session" only if the directory has been consistent for long enough to prove it. Otherwise, the client
//!    is asked to retry.
//! 5. An instance shutting down does not reclaim a session it has relinquished. Instead, it waits for another instance to claim the
//!    session.
//! 6. A call that a peer may have started is neither served here nor resent. The same applies to a request whose body has been sent and
//!    could not be retained.

use std::fmt;

use crate::{
    ids::{Incarnation, Ownership},
    refusals::Refusal,
    relay::failure::Failure,
    shutdown::ShutdownStage,
};

/// Maximum number of claims for one request.
const MAX_CLAIMS: u8 = 3;

/// Maximum number of lookups while another instance is claiming a relinquished session.
const MAX_LOOKUP_RETRIES: u8 = 20;

/// What is known about a request once its head has arrived.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IncomingRequest {
    /// Whether the request carries a readable session id.
    pub(crate) has_session: bool,
    /// Whether the session is open here.
    ///
    /// For a peer's request, this is also set if the session is about to be restored here, or has ended here.
    pub(crate) is_local: bool,
    /// Whether the request arrived on the peer listener.
    pub(crate) is_from_peer: bool,
    /// This instance's shutdown stage.
    pub(crate) stage: ShutdownStage,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Action {
    /// Serve the request here.
    Serve,
    /// Restore the session here and serve the request.
    ///
    /// This instance owns the session, but must reclaim it first.
    Reclaim,
    /// Serve the request here, or transfer its session.
    Transfer,
    /// Respond with 421, because the session is not here.
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

/// Why a session may be claimed from its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The owner's lease has lapsed.
    LeaseLapsed,
    /// The owner has responded that it relinquished the session.
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
    /// The directory did not answer, or its contents are not conclusive.
    NoAnswer,
}

/// The result of an [`Action::Claim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimed {
    Won,
    Lost(Ownership),
    /// The directory has no record of the session, or only its tombstone.
    Unowned,
    NoAnswer,
}

/// The state of routing one request.
#[derive(Debug)]
pub(crate) struct RoutingPlan {
    this_instance: Incarnation,
    /// Whether the request is a POST, which may have an effect that must not happen twice.
    is_call: bool,
    /// Whether a peer may have started the call.
    ///
    /// The call is then refused, but if the owner's lease has lapsed, its session is still claimed for later requests.
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
    pub(crate) fn new(this_instance: Incarnation, is_call: bool) -> Self {
        Self {
            this_instance,
            is_call,
            may_have_started: false,
            claims: 0,
            lookup_retries: 0,
        }
    }

    /// Returns the action to take after a lookup.
    ///
    /// `is_consistent` indicates whether the directory has been consistent for long enough to prove that a session without a record does
    /// not exist.
    pub(crate) fn on_lookup(&self, known: Known, is_consistent: bool) -> Action {
        match known {
            Known::Owner(ownership) if ownership.owner.incarnation == self.this_instance => {
                Action::Reclaim
            }
            Known::Owner(ownership) => Action::Relay(ownership),
            Known::Unowned if is_consistent => Action::Serve,
            Known::Unowned | Known::NoAnswer => Action::Refuse(Refusal::OwnerUnknown),
        }
    }

    /// Returns the action for a relinquished session that no other instance has claimed yet.
    ///
    /// After [`MAX_LOOKUP_RETRIES`] more lookups, the request is refused.
    pub(crate) fn on_relinquished(&mut self) -> Action {
        if self.lookup_retries == MAX_LOOKUP_RETRIES {
            return Action::Refuse(Refusal::SessionMoved);
        }
        self.lookup_retries += 1;
        Action::LookUpLater
    }

    /// Returns the action to take after a failed relay.
    pub(crate) fn on_relay_failure(&mut self, owner: Ownership, failure: Failure) -> Action {
        self.may_have_started |= failure == Failure::Broken && self.is_call;
        match failure {
            Failure::Stalled => Action::Refuse(Refusal::Stalled),
            // Another claim could make the request go around in circles.
            _ if self.claims == MAX_CLAIMS => self.refuse(Refusal::OwnerUnreachable),
            Failure::Moved => Action::Claim(owner, Cause::Relinquished),
            Failure::Refused
            | Failure::Misdirected
            | Failure::Unreachable
            | Failure::Silent
            | Failure::Broken => Action::CheckLease(owner),
        }
    }

    /// Returns the action to take after checking whether an unreachable owner has a lease.
    pub(crate) fn on_lease(&self, owner: Ownership, lease: LeaseState) -> Action {
        match lease {
            LeaseState::Expired => Action::Claim(owner, Cause::LeaseLapsed),
            LeaseState::Alive => self.refuse(Refusal::OwnerUnreachable),
            LeaseState::NoAnswer => self.refuse(Refusal::OwnerUnknown),
        }
    }

    /// Refuses the request. If the call may have started, the refusal is always [`Refusal::ConnectionLost`].
    pub(crate) fn refuse(&self, refusal: Refusal) -> Action {
        Action::Refuse(if self.may_have_started {
            Refusal::ConnectionLost
        } else {
            refusal
        })
    }

    /// Returns the action to take after a claim.
    ///
    /// `is_consistent` indicates whether an unowned session provably does not exist. `is_intact` indicates whether the request can still be
    /// sent or served unchanged.
    pub(crate) fn on_claim(
        &mut self,
        claimed: Claimed,
        is_consistent: bool,
        is_intact: bool,
    ) -> Action {
        self.claims += 1;
        match claimed {
            _ if self.may_have_started => Action::Refuse(Refusal::ConnectionLost),
            Claimed::NoAnswer => Action::Refuse(Refusal::OwnerUnknown),
            Claimed::Unowned if !is_consistent => Action::Refuse(Refusal::OwnerUnknown),
            _ if !is_intact => Action::Refuse(Refusal::SessionMoved),
            Claimed::Unowned => Action::Serve,
            Claimed::Won => Action::Reclaim,
            Claimed::Lost(ownership) if ownership.owner.incarnation == self.this_instance => {
                Action::Reclaim
            }
            Claimed::Lost(ownership) => Action::Relay(ownership),
        }
    }
}

// === impl Known ===

impl Known {
    /// Returns the metric's label.
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
    /// Returns the metric's label.
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
            Self::LeaseLapsed => "its owner's lease has lapsed",
            Self::Relinquished => "its owner has relinquished it",
        })
    }
}

#[cfg(test)]
mod tests;
