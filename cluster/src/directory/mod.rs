//! The directory: who owns which session, and which instances live.
//!
//! 1. **Epochs.** A session has one record, and the record with the higher epoch is the truth ([`Record::yields_to`]).
//!    [`register`](Directory::register) overwrites an older record, as a directory has it that was restored from a snapshot. A higher epoch
//!    begins with a [`claim`](Directory::claim), which names the record that it read, and fails if there is another by then; or
//!    with `register`, over the record of the same owner only ([`Registration::renewed`]).
//! 2. **Tombstones.** A session that its client ended leaves a record, so that no former owner registers it again.
//! 3. What is compared and set is one key, and the backend does both at once. Nothing relies on two keys together.
//! 4. That the directory does not know something proves little: it may have come back empty a moment ago. So each look has
//!    the leases of that moment with it ([`Leases`]), each with "all of mine is written, in this run of the directory".
//!    [`Heartbeat`](crate::heartbeat::Heartbeat) decides whether that proves anything.
//! 5. An instance first has its lease, then registers sessions. A lease that lapsed is not renewed but made anew, after the
//!    instance took note of the gap: so an instance that finds its own lease knows that nothing was lost since it last looked.
//! 6. No caller waits longer than [`DIRECTORY_TIMEOUT`] for an answer: all use a directory through [`Limited`]. Answers of calls are
//!    written and removed within [`ANSWERS_TIMEOUT`], apart from all else, so that they delay nothing.
//!
//! The backend is what answers: a Redis, a Valkey, or the memory of this process.

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
pub(crate) use self::redis::{RedisAddress, RedisDirectory};
pub(crate) use self::{
    error::DirectoryError,
    limited::{ANSWERS_TIMEOUT, DIRECTORY_TIMEOUT, Limited},
};
use crate::ids::{
    CallNumber, Epoch, Incarnation, Owner, Ownership, Record, SessionHash, Tombstone,
};

/// How long a lease lasts: 6 s, three heartbeats.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(6);

/// How long the directory keeps a record that its owner does not write again: 1 h.
pub(crate) const RECORD_TTL: Duration = Duration::from_secs(60 * 60);

/// How long an answer is kept after the end of its call: 10 minutes. Chosen because clients that resume do so within minutes, and
/// answers are the largest part of what the directory holds.
pub(crate) const KEPT_ANSWER: Duration = Duration::from_secs(10 * 60);

/// How large an answer may be that is kept: 1 MiB.
pub(crate) const MAX_ANSWER: usize = 1024 * 1024;

/// Who owns which session.
#[async_trait]
pub(crate) trait Directory: Debug + Send + Sync + 'static {
    /// Reads the record of a session, and then, in the same look, all leases.
    async fn look(&self, session: SessionHash) -> Result<Look, DirectoryError>;

    /// Reads all leases.
    async fn leases(&self) -> Result<Leases, DirectoryError>;

    /// Reads what is needed to restore a session. `None` if it has no owner.
    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError>;

    /// Writes sessions of this owner, each unless its record has a higher epoch than the owner knows of. Returns the records that it
    /// left as they are. Each record that was written is kept for [`RECORD_TTL`] from now.
    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError>;

    /// Replaces an ownership by another one, if the record of the session is still that ownership. An owner claims its own
    /// session so before it restores it: then no other claim on what was read before can succeed any more.
    async fn claim(
        &self,
        session: SessionHash,
        former: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError>;

    /// Replaces the record of a session by a tombstone, unless another owner has it at a higher epoch. The tombstone is kept
    /// for [`RECORD_TTL`].
    async fn delete(&self, session: SessionHash, by: Tombstone) -> Result<(), DirectoryError>;

    /// Renews the lease if it has not lapsed. It makes none.
    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError>;

    /// Makes the lease, or renews it.
    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError>;

    /// Gives up the lease.
    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError>;

    /// Keeps the answer of a call of that incarnation for `time`. An answer of more than [`MAX_ANSWER`] is an error.
    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
        time: Duration,
    ) -> Result<(), DirectoryError>;

    /// Removes an answer, if there is one.
    async fn remove_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<(), DirectoryError>;

    /// An answer that was kept.
    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError>;
}

/// A session, as its owner writes it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) session: SessionHash,
    /// The epoch at which the owner has it.
    pub(crate) epoch: Epoch,
    /// A later one that it takes with this, if it had no lease for a while: no claim on what was read before is won any more. It is
    /// only taken over a record of this owner. Where there is none, a later claim may have been lost.
    pub(crate) renewed: Option<Epoch>,
    /// The `initialize` parameters, as JSON.
    pub(crate) params: Arc<[u8]>,
}

/// The record of a session, and the leases of that moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Look {
    pub(crate) record: Option<Record>,
    pub(crate) leases: Leases,
}

/// The instances that have a lease, as the directory has them at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leases {
    pub(crate) run: BackendRunId,
    pub(crate) all: Vec<Lease>,
    /// How long ago any instance last turned a client away, also one that has no lease any more.
    pub(crate) turned_away: Option<Duration>,
}

/// A lease, and what its instance wrote with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) incarnation: Incarnation,
    /// How long ago it was renewed.
    pub(crate) age: Duration,
    /// In which run of the backend all sessions of the instance are written.
    pub(crate) written_in: Option<BackendRunId>,
    /// In that run the directory was consistent for the instance for a lease's time: an instance that has not written since has no lease.
    pub(crate) is_settled: bool,
    /// Answers of its calls are to be written once more, because that failed or because the backend lost them.
    pub(crate) has_late_answers: bool,
}

/// What an instance writes with its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// In which run of the backend all its sessions are written.
    pub(crate) written_in: Option<BackendRunId>,
    /// As in [`Lease`].
    pub(crate) is_settled: bool,
    /// As in [`Lease`].
    pub(crate) has_late_answers: bool,
    /// How long ago it last turned a client away, if it did.
    pub(crate) turned_away: Option<Duration>,
}

/// One start of a backend. Another one may have lost what this one knew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackendRunId(Arc<str>);

/// What is needed to restore a session.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) ownership: Ownership,
    /// The `initialize` parameters, as JSON.
    pub(crate) params: Bytes,
}

/// What became of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    Won,
    /// The record is another one by now.
    Lost(Record),
    /// The directory does not know the session.
    Unknown,
}

/// A heartbeat that was answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeartbeatReply {
    pub(crate) run: BackendRunId,
    /// Whether there was a lease to renew. If not, the instance counted as dead for a while, or the backend lost what it knew.
    pub(crate) was_alive: bool,
}

// === impl Leases ===

impl Leases {
    pub(crate) fn of(&self, incarnation: Incarnation) -> Option<&Lease> {
        let mut all = self.all.iter();
        all.find(|lease| lease.incarnation == incarnation)
    }

    /// Whether each living instance but `asker` has written all its sessions in this run of the backend.
    pub(crate) fn all_have_written(&self, asker: Incarnation) -> bool {
        let others = |lease: &&Lease| lease.incarnation != asker;
        let has_written = |lease: &Lease| lease.written_in.as_ref() == Some(&self.run);
        self.all.iter().filter(others).all(has_written)
    }

    /// Whether a living instance has answers to write that the directory may have lost, or has refused.
    pub(crate) fn have_late_answers(&self) -> bool {
        self.all.iter().any(|lease| lease.has_late_answers)
    }

    /// Whether an instance has settled in this run of the backend: an instance that has not written in it has no lease.
    pub(crate) fn has_settled(&self) -> bool {
        let is_settled =
            |lease: &Lease| lease.is_settled && lease.written_in.as_ref() == Some(&self.run);
        self.all.iter().any(is_settled)
    }
}

// === impl Registration ===

impl Registration {
    /// What the directory has once it is written.
    pub(crate) fn ownership(&self, owner: Owner) -> Ownership {
        let epoch = self.renewed.unwrap_or(self.epoch);
        Ownership { owner, epoch }
    }
}

// === impl BackendRunId ===

impl BackendRunId {
    pub(crate) fn new(id: &str) -> Self {
        Self(id.into())
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

// === impl Entry ===

impl Debug for Entry {
    /// Without the parameters, which are the client's.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("ownership", &self.ownership)
            .finish_non_exhaustive()
    }
}
