//! The directory of sessions and their owners, and of the instances that are alive.
//!
//! 1. **Epochs.** A session has one record. Of two versions of a record, the one with the higher epoch is authoritative
//!    ([`Record::yields_to`]). [`register`](Directory::register) overwrites an older record, which a directory restored from a snapshot may
//!    have. A [`claim`](Directory::claim) starts a higher epoch. It specifies the ownership that it replaces, and fails if the record has
//!    changed. `register` may also start a higher epoch, but only over a record of the same owner ([`Registration::renewed`]).
//! 2. **Tombstones.** The record of an ended session remains as a tombstone, so no former owner registers the session again. A session ends
//!    if its client ends it, or if it cannot be restored.
//! 3. Each compare-and-set concerns one key, and the backend executes it atomically. Nothing relies on two keys together.
//!    [`register`](Directory::register) also marks the lease of another owner whose record it replaces. The next heartbeat of that owner
//!    returns the mark.
//! 4. A missing record proves little, because the directory may have restarted empty a moment ago. Each lookup therefore includes the
//!    leases of that moment ([`Leases`]). Each lease specifies the run of the backend in which all sessions of its instance have been
//!    written. [`Heartbeat`](crate::membership::heartbeat::Heartbeat) decides whether that proves anything.
//! 5. An instance first acquires its lease, then registers sessions. A lease that lapsed is not renewed but acquired anew, after the
//!    instance has recorded the gap. An instance that finds its own lease therefore knows that nothing was lost since its last lookup.
//! 6. No caller waits longer than [`DIRECTORY_TIMEOUT`] for an answer, because all use a directory through [`Limited`]. Answers to calls
//!    are written, read and removed within [`ANSWERS_TIMEOUT`], on a separate path, and therefore delay no other request.
//!
//! The backend is the store behind the directory: a Redis, a Valkey, or the memory of this process.

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

/// Lifetime of a lease since its heartbeat was created: 6 s, three heartbeats.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(6);

/// How long the directory keeps a record that its owner does not write again: 1 h.
pub(crate) const RECORD_TTL: Duration = Duration::from_secs(60 * 60);

/// How long an answer is kept after its call ended: 10 min.
///
/// Chosen because clients that resume do so within minutes, and answers are the largest part of the directory.
pub(crate) const ANSWER_TTL: Duration = Duration::from_secs(10 * 60);

/// Maximum length of a kept answer: 1 MiB.
pub(crate) const MAX_ANSWER: usize = 1024 * 1024;

/// The directory of sessions and their owners.
#[async_trait]
pub(crate) trait Directory: Debug + Send + Sync + 'static {
    /// Reads the record of a session and all leases, as of one moment.
    async fn look_up(&self, session: SessionHash) -> Result<SessionSnapshot, DirectoryError>;

    /// Reads all leases.
    async fn leases(&self) -> Result<Leases, DirectoryError>;

    /// Reads what is needed to restore a session. Returns `None` if it has no record or a tombstone.
    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError>;

    /// Writes sessions of `owner`. Returns the records that differ from what was to be written.
    ///
    /// A record is left unchanged if it does not [yield](Record::yields_to) to the epoch at which the owner has the session. If the owner
    /// had no record, the session is written without its [new epoch](Registration::renewed). Each written record is kept for
    /// [`RECORD_TTL`] from now. If it replaces the record of another owner with a lease, that owner's next heartbeat
    /// [returns this](HeartbeatReply::was_replaced).
    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError>;

    /// Replaces an ownership with another one if the session's record is still `previous`.
    ///
    /// An owner claims its own session before it restores the session. After that, no claim on a record that was read before can succeed.
    async fn claim(
        &self,
        session: SessionHash,
        previous: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError>;

    /// Replaces a session's record with a tombstone, unless another instance's record has the same or a higher epoch.
    ///
    /// The tombstone is kept for [`RECORD_TTL`].
    async fn delete(
        &self,
        session: SessionHash,
        tombstone: Tombstone,
    ) -> Result<(), DirectoryError>;

    /// Renews the lease if it has not lapsed. Never acquires one. Does not change a lease with a later [`number`](Status::number).
    ///
    /// Also stores when the instance last turned a client away, even without a lease.
    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError>;

    /// Like [`heartbeat`](Self::heartbeat), but acquires a lease if there is none.
    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError>;

    /// Releases the lease, if any. Does not count as a lapse.
    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError>;

    /// Keeps the answer to a call of `incarnation` for `time`. [`Limited`] refuses an answer longer than [`MAX_ANSWER`].
    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
        time: Duration,
    ) -> Result<(), DirectoryError>;

    /// Removes an answer, if any.
    async fn remove_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<(), DirectoryError>;

    /// Returns a kept answer, or `None` if there is none.
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
    /// A higher epoch that the owner takes with this write, if it had no lease for a while.
    ///
    /// A claim on an earlier record can no longer succeed. The epoch is only taken over a record of the same owner. If there is no record, a
    /// later claim may have been lost.
    pub(crate) renewed: Option<Epoch>,
    /// The `initialize` parameters, as JSON.
    pub(crate) params: Arc<[u8]>,
}

/// The record of a session, and the leases of the same moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionSnapshot {
    pub(crate) record: Option<Record>,
    pub(crate) leases: Leases,
}

/// The instances that have a lease in the directory at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leases {
    pub(crate) run: BackendRunId,
    pub(crate) entries: Vec<Lease>,
    /// How long ago any instance last turned a client away. Includes instances that no longer have a lease.
    ///
    /// An instance may have turned clients away until its lease lapsed.
    pub(crate) turned_away: Option<Duration>,
}

/// A lease, and the status that its instance wrote with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) incarnation: Incarnation,
    /// How long ago its heartbeat was created, or up to [`DIRECTORY_TIMEOUT`] more.
    pub(crate) age: Duration,
    /// The run of the backend in which all sessions of the instance have been written.
    pub(crate) written_in: Option<BackendRunId>,
    /// The instance has found the directory consistent for [`LEASE_TTL`] in that run.
    ///
    /// An instance that has not renewed its lease within that period no longer has one.
    pub(crate) is_settled: bool,
    /// Answers to its calls are late, or calls of sessions that it must close may still be running.
    ///
    /// An answer is late if it is not known to be in the directory a while after its call ended.
    pub(crate) has_late_answers: bool,
}

/// The status that an instance writes with its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// The run of the backend in which all its sessions have been written.
    pub(crate) written_in: Option<BackendRunId>,
    /// As in [`Lease`].
    pub(crate) is_settled: bool,
    /// As in [`Lease`].
    pub(crate) has_late_answers: bool,
    /// How long ago the instance last turned a client away. `None` if it never has.
    pub(crate) turned_away: Option<Duration>,
    /// When the instance created the status, or up to [`DIRECTORY_TIMEOUT`] earlier.
    ///
    /// `None` if the instance does not know the directory's time.
    ///
    /// The lease is renewed as of then, so a heartbeat that arrives late does not count as current.
    pub(crate) created_at: Option<DirectoryTime>,
    /// Grows with each status of the instance. The directory stores the status with the highest number.
    pub(crate) number: u64,
}

/// A time by the backend's clock, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DirectoryTime(pub(crate) u64);

/// The id of one start of a backend. Another start may have lost the data of this one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackendRunId(Arc<str>);

/// The data to restore a session.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) ownership: Ownership,
    /// The `initialize` parameters, as JSON.
    pub(crate) params: Bytes,
}

/// The result of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Claim {
    Won,
    /// The record has changed since.
    Lost(Record),
    /// The directory has no record of the session.
    Unknown,
}

/// The reply to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeartbeatReply {
    pub(crate) run: BackendRunId,
    /// Whether the lease existed. If not, the instance counted as dead for a while, or the backend lost its data.
    pub(crate) was_alive: bool,
    /// Whether another instance has replaced a record of this one since the last heartbeat.
    pub(crate) was_replaced: bool,
    /// When the directory executed the heartbeat.
    pub(crate) time: DirectoryTime,
}

// === impl Leases ===

impl Leases {
    pub(crate) fn of(&self, incarnation: Incarnation) -> Option<&Lease> {
        let mut entries = self.entries.iter();
        entries.find(|lease| lease.incarnation == incarnation)
    }

    /// Returns `true` if all live instances but `asker` have written their sessions in the run.
    pub(crate) fn all_have_written(&self, asker: Incarnation) -> bool {
        let is_other = |lease: &&Lease| lease.incarnation != asker;
        let has_written = |lease: &Lease| lease.written_in.as_ref() == Some(&self.run);
        self.entries.iter().filter(is_other).all(has_written)
    }

    /// Returns `true` if a live instance has late answers.
    pub(crate) fn have_late_answers(&self) -> bool {
        self.entries.iter().any(|lease| lease.has_late_answers)
    }

    /// Returns `true` if an instance has settled in this run of the backend.
    ///
    /// A lease that was not renewed in this run has then lapsed.
    pub(crate) fn has_settled(&self) -> bool {
        let is_settled =
            |lease: &Lease| lease.is_settled && lease.written_in.as_ref() == Some(&self.run);
        self.entries.iter().any(is_settled)
    }
}

// === impl Registration ===

impl Registration {
    /// Returns the ownership that the directory stores once this has been written.
    pub(crate) fn ownership(&self, owner: Owner) -> Ownership {
        let epoch = self.renewed.unwrap_or(self.epoch);
        Ownership { owner, epoch }
    }
}

// === impl DirectoryTime ===

impl DirectoryTime {
    pub(crate) fn after(self, elapsed: Duration) -> Self {
        let millis = elapsed.as_millis().try_into().unwrap_or(u64::MAX);
        Self(self.0.saturating_add(millis))
    }

    pub(crate) fn before(self, elapsed: Duration) -> Self {
        let millis = elapsed.as_millis().try_into().unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(millis))
    }

    /// Returns the time since `earlier`, or zero if that is later.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
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
    /// Omits the parameters, which are the client's.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("ownership", &self.ownership)
            .finish_non_exhaustive()
    }
}
