//! The directory: who owns which session, and which instances live.
//!
//! 1. A session has one owner. Only [`claim`](Directory::claim) changes it; [`enter`](Directory::enter) writes one where there
//!    is none. Each gives the ownership another version, and a claim names the one that it was made on: one that comes late, after the
//!    session was taken by anybody, its owner too, comes to nothing.
//! 2. What is compared and set is one key, and the engine does both at once. Nothing relies on two keys together.
//! 3. That the directory does not know something proves little: it may have come back empty a moment ago. So such an answer
//!    says in which state the engine was ([`Absence`]), all in one look. [`Heart`](crate::heart::Heart) knows whether that
//!    proves anything.
//! 4. An instance first has its lease, then enters sessions. A lease that lapsed is not renewed but made anew, after the
//!    instance took note of the gap: so whoever finds its own lease knows that nothing was lost since it last looked.
//! 5. Nobody waits longer than [`LIMIT`] for an answer: what is above uses a directory through [`Limited`].
//!
//! The engine is what answers: a Redis, a Valkey, or the memory of this process.

#[cfg(test)]
pub(crate) mod contract;
mod error;
#[cfg(test)]
pub(crate) mod faulty;
mod limited;
pub(crate) mod memory;
mod redis;

use std::{fmt::Debug, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;

pub use self::memory::MemoryDirectory;
pub(crate) use self::redis::RedisDirectory;
pub(crate) use self::{
    error::DirectoryError,
    limited::{LIMIT, Limited},
};
use crate::ids::{CallNumber, Incarnation, Owner, Ownership, SessionHash};

/// How long a lease lasts: 6 s, three beats.
pub(crate) const LEASE: Duration = Duration::from_secs(6);

/// How long the directory knows a session that nobody enters again, and an answer: 1 h.
pub(crate) const KEPT: Duration = Duration::from_secs(60 * 60);

/// For how long a client counts as at the door that was told to come again: 40 s. It is to do so after 1 s; SDKs that keep their own
/// time wait 30 s at most before their next try.
pub(crate) const TURNED_AWAY: Duration = Duration::from_secs(40);

/// How large an answer may be that is kept: 1 MiB.
pub(crate) const MAX_ANSWER: usize = 1024 * 1024;

/// Who owns which session.
#[async_trait]
pub(crate) trait Directory: Debug + Send + Sync + 'static {
    /// Who owns a session. `asker` is the instance that asks.
    async fn owner(
        &self,
        session: SessionHash,
        asker: Incarnation,
    ) -> Result<Found, DirectoryError>;

    /// Notes that a client of a session is at the door of an instance that does not reach the owner. It is known for this
    /// long, [`TURNED_AWAY`] at most, or for longer if it was already.
    async fn knock(&self, session: SessionHash, time: Duration) -> Result<(), DirectoryError>;

    /// Who owns a session, and then, in the same look, whether a client of it is at a door. `asker` is the instance that asks.
    async fn standing(
        &self,
        session: SessionHash,
        asker: Incarnation,
    ) -> Result<Standing, DirectoryError>;

    /// All that is known of a session.
    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError>;

    /// Writes sessions of this owner, with their `initialize` parameters as JSON, each only if nobody else owns it.
    /// Returns those that somebody else owns. Each is kept for [`KEPT`] from now.
    async fn enter(
        &self,
        owner: Owner,
        sessions: &[(SessionHash, Arc<[u8]>)],
    ) -> Result<Vec<(SessionHash, Owner)>, DirectoryError>;

    /// Makes `owner` the owner of a session of which this ownership was read, and that nobody has taken since. An owner takes its
    /// own session so before it brings it to life: then nobody else's claim on what was read before can be won any more.
    async fn claim(
        &self,
        session: SessionHash,
        former: Ownership,
        owner: Owner,
    ) -> Result<Claim, DirectoryError>;

    /// Forgets a session, if it is this owner's.
    async fn remove(&self, session: SessionHash, owner: Owner) -> Result<(), DirectoryError>;

    /// Renews the lease if it has not lapsed. It makes none.
    async fn beat(&self, owner: Owner) -> Result<Beat, DirectoryError>;

    /// Makes the lease, or renews it.
    async fn lease(&self, owner: Owner) -> Result<(), DirectoryError>;

    /// Whether an instance has its lease. `asker` is the instance that asks.
    async fn is_alive(
        &self,
        incarnation: Incarnation,
        asker: Incarnation,
    ) -> Result<Alive, DirectoryError>;

    /// Gives up the lease.
    async fn leave(&self, owner: Owner) -> Result<(), DirectoryError>;

    /// Keeps the answer of a call of that incarnation for [`KEPT`]. An answer of more than [`MAX_ANSWER`] is an error.
    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
    ) -> Result<(), DirectoryError>;

    /// An answer that was kept.
    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError>;
}

/// Whether a session has an owner.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found {
    Owner(Ownership),
    Nobody(Absence),
}

/// How it stands with a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) found: Found,
    /// For how long a client of it still counts as at a door.
    pub(crate) at_the_door: Option<Duration>,
}

/// Whether an instance has its lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Alive {
    Yes,
    No(Absence),
}

/// The state of an engine when it did not know something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Absence {
    pub(crate) run: EngineRun,
    /// Whether the instance that asked had its own lease there.
    pub(crate) asker_is_alive: bool,
}

/// One start of an engine. Another one may have lost what this one knew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EngineRun(Arc<str>);

/// What is known of a session.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) owner: Owner,
    /// The `initialize` parameters, as JSON.
    pub(crate) params: Bytes,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    Won,
    /// Somebody had taken it before.
    Lost(Ownership),
    /// The directory does not know the session.
    Unknown,
}

/// A heartbeat that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Beat {
    pub(crate) run: EngineRun,
    /// Whether there was a lease to renew. If not, the instance counted as dead for a while, or the engine lost what it knew.
    pub(crate) was_alive: bool,
}

// === impl EngineRun ===

impl EngineRun {
    pub(crate) fn new(id: &str) -> Self {
        Self(id.into())
    }
}

// === impl Entry ===

impl Debug for Entry {
    /// Without the parameters, which are the client's.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}
