//! The decision where a request is served, without input or output: what was learned goes in, what to do next comes out.
//!
//! 1. A request without a session, and one whose session lives here, is served here. Nothing is asked.
//! 2. What came from a peer is served here or refused as moved. It is never relayed: there is one hop.
//! 3. Everything else is relayed to the owner of its session. A session is claimed only if the lease of its owner is over, or if its
//!    owner answered that it gave the session up. A refused, reset or silent connection proves nothing. An instance that loses a
//!    claim relays to the winner. The winner may be on its way out as well, so there are [`MAX_CLAIMS`].
//! 4. "No such session" is only said here if the directory was consistent for long enough. In every other doubt the client is asked
//!    to come again.
//! 5. An instance that leaves does not take back what it has given up: it waits for who claims that.
//! 6. Nothing is served here whose body has gone to a peer already, and no call is sent twice.

use std::fmt;

use crate::{
    departure::Stage,
    ids::{Incarnation, Ownership},
};

/// How many claims are made for a request: 3.
const MAX_CLAIMS: u8 = 3;

/// How often it is asked who has claimed what this instance gave up: 20 times.
const MAX_LOOKS: u8 = 20;

/// What is known of a request when its head has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// It names one session that can be read.
    pub(crate) has_session: bool,
    /// That session lives here.
    pub(crate) is_here: bool,
    /// It came over the listener for peers.
    pub(crate) is_from_peer: bool,
    /// How far the departure of this instance is.
    pub(crate) stage: Stage,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    /// Serve it here.
    Serve,
    /// Serve it here although its session does not live here yet: it is this instance's, and comes with this request if this instance
    /// can take it once more.
    Take,
    /// Serve it here, or hand its session over.
    HandOver,
    /// Tell the peer that the session is not here.
    Moved,
    /// Ask for the owner.
    LookUp,
    /// The same after a while.
    LookAgain,
    Relay(Ownership),
    /// Ask whether this owner is alive.
    AskLease(Ownership),
    /// Claim the session from this owner.
    Claim(Ownership, Cause),
    Refuse(Refusal),
}

/// Why a session may be claimed from its owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Cause {
    /// The lease of the owner is over.
    LeaseOver,
    /// The owner answered that it gave the session up.
    GivenUp,
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

/// What came of a [`Step::LookUp`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Known {
    Owner(Ownership),
    Nobody,
    NoAnswer,
}

/// Why a [`Step::Relay`] came to nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was refused. Nothing was sent. The owner may be alive behind a firewall that rejects.
    Refused,
    /// The owner answered that it gave the session up.
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

/// What came of a [`Step::AskLease`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lease {
    Alive,
    Gone,
    NoAnswer,
}

/// What came of a [`Step::Claim`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claimed {
    Won,
    Lost(Ownership),
    /// The directory does not know the session any more.
    Nobody,
    NoAnswer,
}

/// The way of one request.
#[derive(Debug)]
pub(crate) struct Way {
    me: Incarnation,
    /// The request is a POST: it may have an effect that must not happen twice.
    is_call: bool,
    claims: u8,
    looks: u8,
}

// === impl Arrival ===

impl Arrival {
    pub(crate) fn step(self) -> Step {
        let is_ours = self.has_session && self.is_here;
        match (self.is_from_peer, is_ours) {
            (true, true) => match self.stage {
                Stage::Here => Step::Serve,
                Stage::HandingOver => Step::HandOver,
                Stage::Gone | Stage::Closed => Step::Moved,
            },
            (true, false) => Step::Moved,
            (false, true) => Step::Serve,
            (false, false) if !self.has_session => Step::Serve,
            (false, false) => Step::LookUp,
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

// === impl Way ===

impl Way {
    pub(crate) fn new(me: Incarnation, is_call: bool) -> Self {
        Self {
            me,
            is_call,
            claims: 0,
            looks: 0,
        }
    }

    /// What follows from a look-up. `is_consistent`: the directory was consistent for long enough that what it does not know does not exist.
    pub(crate) fn known(&self, known: Known, is_consistent: bool) -> Step {
        match known {
            Known::Owner(is) if is.owner.incarnation == self.me => Step::Take,
            Known::Owner(is) => Step::Relay(is),
            Known::Nobody if is_consistent => Step::Serve,
            Known::Nobody | Known::NoAnswer => Step::Refuse(Refusal::NotSound),
        }
    }

    /// What follows from a look-up that finds a session this instance's, which has given it up.
    pub(crate) fn given_up(&mut self) -> Step {
        if self.looks == MAX_LOOKS {
            return Step::Refuse(Refusal::Again);
        }
        self.looks += 1;
        Step::LookAgain
    }

    /// What follows from a relay that came to nothing.
    pub(crate) fn failed(&self, owner: Ownership, failure: Failure) -> Step {
        match failure {
            Failure::Broken if self.is_call => Step::Refuse(Refusal::Broken),
            Failure::Stalled => Step::Refuse(Refusal::Stalled),
            // Whoever goes on from here could go in circles.
            _ if self.claims == MAX_CLAIMS => Step::Refuse(Refusal::OwnerAway),
            Failure::Moved => Step::Claim(owner, Cause::GivenUp),
            Failure::Refused
            | Failure::Misdirected
            | Failure::Unreachable
            | Failure::Silent
            | Failure::Broken => Step::AskLease(owner),
        }
    }

    /// What follows from the lease of an owner who could not be reached.
    pub(crate) fn lease(&self, owner: Ownership, lease: Lease) -> Step {
        match lease {
            Lease::Gone => Step::Claim(owner, Cause::LeaseOver),
            Lease::Alive => Step::Refuse(Refusal::OwnerAway),
            Lease::NoAnswer => Step::Refuse(Refusal::NotSound),
        }
    }

    /// What follows from a claim. `is_whole`: the request can still be sent or served as it came.
    pub(crate) fn claimed(
        &mut self,
        claimed: Claimed,
        is_consistent: bool,
        is_whole: bool,
    ) -> Step {
        self.claims += 1;
        match claimed {
            Claimed::NoAnswer => Step::Refuse(Refusal::NotSound),
            Claimed::Nobody if !is_consistent => Step::Refuse(Refusal::NotSound),
            _ if !is_whole => Step::Refuse(Refusal::Again),
            Claimed::Nobody => Step::Serve,
            Claimed::Won => Step::Take,
            Claimed::Lost(is) if is.owner.incarnation == self.me => Step::Take,
            Claimed::Lost(is) => Step::Relay(is),
        }
    }
}

// === impl Cause ===

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::LeaseOver => "its owner's lease is over",
            Self::GivenUp => "its owner gave it up",
        })
    }
}

#[cfg(test)]
mod tests;
