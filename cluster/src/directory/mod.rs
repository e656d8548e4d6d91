//! The directory of sessions and their owners, and of the instances that are alive.
//!
//! 1. **Epochs.** Each session has one record, and of two versions of it the one with the higher epoch is authoritative
//!    ([`Record::yields_to`]). [`register`](Directory::register) overwrites an older record, which is what a directory restored from a
//!    snapshot may hold. A [`claim`](Directory::claim) starts a higher epoch; it names the ownership it replaces, and fails if the record
//!    has changed in the meantime. `register` can start a higher epoch too, but only over a record that already belongs to the same owner
//!    ([`Registration::renewed`]).
//! 2. **Tombstones.** When a session ends, because its client has ended it or because it cannot be restored, its record stays behind as a
//!    tombstone, so that no former owner can register the session again.
//! 3. Each compare-and-set works on a single key, and the backend executes it atomically. Nothing relies on two keys agreeing with each
//!    other. When [`register`](Directory::register) replaces another owner's record, it also marks that owner's lease, and the owner's next
//!    heartbeat returns the mark.
//! 4. A missing record proves little, because the directory may have restarted empty a moment ago. Each lookup therefore also returns the
//!    leases as of the same moment ([`Leases`]), and each lease names the run of the backend in which all of its instance's sessions have
//!    been written. [`Heartbeat`](crate::membership::heartbeat::Heartbeat) decides whether that proves anything.
//! 5. An instance acquires its lease first and only then registers sessions. A lease that has lapsed is never renewed: it is acquired anew,
//!    once the instance has recorded the gap. An instance that finds its own lease therefore knows that nothing has been lost since its
//!    last lookup.
//! 6. No caller waits for the directory longer than [`DIRECTORY_TIMEOUT`], because all of them go through [`Limited`]. Answers to calls are
//!    written, read and removed within [`ANSWERS_TIMEOUT`], on a path of their own, so they do not delay any other request.
//!
//! The backend is the store behind the directory: Redis, Valkey, or this process's memory.

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

/// How long a lease lasts, counted from the creation of its heartbeat: three heartbeats.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(6);

/// How long the directory keeps a record that its owner does not write again.
pub(crate) const RECORD_TTL: Duration = Duration::from_secs(60 * 60);

/// How long an answer is kept after its call has ended.
///
/// Clients that resume do so within minutes, and answers take up more of the directory than anything else.
pub(crate) const ANSWER_TTL: Duration = Duration::from_secs(10 * 60);

/// Maximum length of a kept answer.
pub(crate) const MAX_ANSWER: usize = 1024 * 1024;

/// The directory of sessions and their owners.
#[async_trait]
pub(crate) trait Directory: Debug + Send + Sync + 'static {
    /// Reads a session's record and all leases, as of the same moment.
    async fn look_up(&self, session: SessionHash) -> Result<SessionSnapshot, DirectoryError>;

    /// Reads all leases.
    async fn leases(&self) -> Result<Leases, DirectoryError>;

    /// Returns what is needed to restore a session.
    ///
    /// Returns `None` if the session has no record, or only a tombstone.
    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError>;

    /// Writes an owner's sessions, and returns the records that differ from what was to be written.
    ///
    /// A record is left unchanged if it does not [yield](Record::yields_to) to the epoch at which the owner holds the session. If the
    /// stored record does not already belong to the owner, or there is none, the session is written without its [new
    /// epoch](Registration::renewed). Each written record is kept for [`RECORD_TTL`] from now. If it replaces a record of another owner
    /// that has a lease, that owner's next heartbeat [reports it](HeartbeatReply::was_replaced).
    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError>;

    /// Replaces one ownership with another if the session's record is still `previous`.
    ///
    /// An owner claims even its own session before restoring it. From then on, no claim based on an earlier read of the record can succeed.
    async fn claim(
        &self,
        session: SessionHash,
        previous: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError>;

    /// Replaces a session's record with a tombstone, unless another instance's record wins.
    ///
    /// Another instance's record wins if its epoch is the same or higher. The tombstone is kept for [`RECORD_TTL`].
    async fn delete(
        &self,
        session: SessionHash,
        tombstone: Tombstone,
    ) -> Result<(), DirectoryError>;

    /// Renews the lease if it has not lapsed, but never acquires one.
    ///
    /// A lease with a later [`number`](Status::number) is left unchanged. The time at which the instance last turned a client away is
    /// stored even if it has no lease.
    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError>;

    /// Like [`heartbeat`](Self::heartbeat), but acquires a lease if there is none.
    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError>;

    /// Releases the lease, if there is one. This does not count as a lapse.
    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError>;

    /// Keeps the answer to one of `incarnation`'s calls for `time`.
    ///
    /// [`Limited`] rejects answers longer than [`MAX_ANSWER`].
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

    /// Returns a kept answer, or `None` if there is none.
    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError>;
}

/// A session as its owner writes it.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) session: SessionHash,
    /// The epoch at which the owner holds it.
    pub(crate) epoch: Epoch,
    /// A higher epoch that the owner takes with this write, if it was without a lease for a while.
    ///
    /// Once it is written, claims on an earlier record can no longer succeed. It is taken only over a record that already belongs to the
    /// same owner, because a missing record may mean that a later claim has been lost.
    pub(crate) renewed: Option<Epoch>,
    /// The `initialize` parameters, as JSON.
    pub(crate) params: Arc<[u8]>,
}

/// A session's record, with the leases as of the same moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SessionSnapshot {
    pub(crate) record: Option<Record>,
    pub(crate) leases: Leases,
}

/// The instances that hold a lease in the directory at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leases {
    pub(crate) run: BackendRunId,
    pub(crate) entries: Vec<Lease>,
    /// How long ago any instance last turned a client away.
    ///
    /// This includes instances that no longer hold a lease, because they may have turned clients away right up to its lapse.
    pub(crate) turned_away: Option<Duration>,
}

/// A lease, with the status that its instance wrote along with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) incarnation: Incarnation,
    /// How long ago its heartbeat was created, or up to [`DIRECTORY_TIMEOUT`] more.
    pub(crate) age: Duration,
    /// The run of the backend in which all of the instance's sessions have been written.
    pub(crate) written_in: Option<BackendRunId>,
    /// Whether the instance has found the directory consistent for [`LEASE_TTL`] in that run.
    ///
    /// By then, any instance that has not renewed its lease in that run no longer has one.
    pub(crate) is_settled: bool,
    /// Whether answers to its calls are late, or may still be.
    ///
    /// They may still be while calls are possibly running in sessions that the instance must close. An answer is late if its call ended a
    /// while ago and it is still not known to be in the directory.
    pub(crate) has_late_answers: bool,
}

/// The status that an instance writes along with its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// The run of the backend in which all of its sessions have been written.
    pub(crate) written_in: Option<BackendRunId>,
    /// See [`Lease::is_settled`].
    pub(crate) is_settled: bool,
    /// See [`Lease::has_late_answers`].
    pub(crate) has_late_answers: bool,
    /// How long ago the instance last turned a client away, or `None` if it never has.
    pub(crate) turned_away: Option<Duration>,
    /// When the instance created the status, or up to [`DIRECTORY_TIMEOUT`] earlier.
    ///
    /// The lease is renewed as of this time, so that a heartbeat that arrives late does not count as current. `None` if the instance does
    /// not know the directory's time.
    pub(crate) created_at: Option<DirectoryTime>,
    /// Grows with each of the instance's statuses. The directory keeps the one with the highest number.
    pub(crate) number: u64,
}

/// A time on the backend's clock, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DirectoryTime(pub(crate) u64);

/// Identifies one start of a backend. The next start may have lost this one's data.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BackendRunId(Arc<str>);

/// What is needed to restore a session.
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
    /// The record has changed since it was read.
    Lost(Record),
    /// The directory has no record of the session.
    Unknown,
}

/// The reply to a heartbeat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HeartbeatReply {
    pub(crate) run: BackendRunId,
    /// Whether the lease existed. If not, the instance counted as dead for a while, or the backend has lost its data.
    pub(crate) was_alive: bool,
    /// Whether another instance has replaced one of this one's records since the last heartbeat.
    pub(crate) was_replaced: bool,
    /// When the directory executed the heartbeat.
    pub(crate) time: DirectoryTime,
}

// === impl Leases ===

impl Leases {
    pub(crate) fn get(&self, incarnation: Incarnation) -> Option<&Lease> {
        let mut entries = self.entries.iter();
        entries.find(|lease| lease.incarnation == incarnation)
    }

    /// Returns `true` if all live instances but `asker` have written their sessions in this run.
    pub(crate) fn all_have_written(&self, asker: Incarnation) -> bool {
        let is_other = |lease: &&Lease| lease.incarnation != asker;
        let has_written = |lease: &Lease| lease.written_in.as_ref() == Some(&self.run);
        self.entries.iter().filter(is_other).all(has_written)
    }

    /// Returns `true` if any live instance has late answers.
    pub(crate) fn have_late_answers(&self) -> bool {
        self.entries.iter().any(|lease| lease.has_late_answers)
    }

    /// Returns `true` if any instance has settled in this run of the backend.
    ///
    /// By then, every lease that has not been renewed in this run has lapsed.
    pub(crate) fn has_settled(&self) -> bool {
        let is_settled =
            |lease: &Lease| lease.is_settled && lease.written_in.as_ref() == Some(&self.run);
        self.entries.iter().any(is_settled)
    }
}

// === impl Registration ===

impl Registration {
    /// Returns the ownership that the directory stores once this registration has been written.
    pub(crate) fn ownership(&self, owner: Owner) -> Ownership {
        let epoch = self.renewed.unwrap_or(self.epoch);
        Ownership { owner, epoch }
    }
}

// === impl DirectoryTime ===

impl DirectoryTime {
    pub(crate) fn saturating_add(self, elapsed: Duration) -> Self {
        let millis = elapsed.as_millis().try_into().unwrap_or(u64::MAX);
        Self(self.0.saturating_add(millis))
    }

    pub(crate) fn saturating_sub(self, elapsed: Duration) -> Self {
        let millis = elapsed.as_millis().try_into().unwrap_or(u64::MAX);
        Self(self.0.saturating_sub(millis))
    }

    /// Returns the time since `earlier`, or zero if `earlier` is in fact later.
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
