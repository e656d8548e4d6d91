//! The directory: which instance owns each session, and which instances are alive.
//!
//! Any instance can look up a session's owner in order to relay a request to it. If the owner's lease has lapsed, or if the owner has
//! relinquished the session, another instance can claim it. The backend is the store behind the directory: Redis, Valkey, or this process's
//! memory.
//!
//! 1. **Epochs.** Each session has one record. If two versions of it exist, the version with the higher epoch is authoritative
//!    ([`Record::yields_to`]). A [`claim`](Directory::claim) starts a higher epoch. It specifies the ownership it replaces, and fails if
//!    the record has changed in the meantime. [`register`](Directory::register) overwrites an older record, such as one in a directory
//!    restored from a snapshot. It can start a higher epoch too, but only over a record that already belongs to the same owner
//!    ([`Registration::renewed`]).
//! 2. **Tombstones.** When a client ends its session, or a session cannot be restored, the session's record is replaced by a tombstone, so
//!    that no former owner can re-register the session.
//! 3. **Single keys.** The backend executes each compare-and-set atomically, on a single key, and nothing relies on two keys agreeing with
//!    each other. When [`register`](Directory::register) replaces another owner's record, it also marks that owner's lease, and the reply
//!    to the owner's next heartbeat reports the mark.
//! 4. **Missing records.** A missing record is not conclusive, because the directory may just have restarted empty. Each lookup therefore
//!    also returns the leases as of the same moment ([`Leases`]), and each lease specifies the run of the backend in which its instance has
//!    written all of its sessions. From these leases, [`Heartbeat`](crate::membership::heartbeat::Heartbeat) decides whether the session
//!    really does not exist.
//! 5. **Leases.** An instance acquires its lease first and only then registers sessions. A lapsed lease is never renewed. Instead, the
//!    instance records the gap and then acquires a new lease. An instance that finds its own lease therefore knows that nothing has been
//!    lost since its last lookup.
//! 6. **Timeouts.** No caller waits for the directory longer than [`DIRECTORY_TIMEOUT`], because all requests pass through [`Limited`].
//!    Answers to calls are written, read and removed within [`ANSWERS_TIMEOUT`], on a separate path, so that they do not delay any other
//!    request.

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

/// How long a lease lasts from the creation of its heartbeat: three heartbeat intervals.
pub(crate) const LEASE_TTL: Duration = Duration::from_secs(6);

/// How long the directory retains a record after the last write.
pub(crate) const RECORD_TTL: Duration = Duration::from_secs(60 * 60);

/// How long an answer is retained after its call ends.
///
/// Clients that resume a call do so within minutes, and answers take up more of the directory than anything else.
pub(crate) const ANSWER_TTL: Duration = Duration::from_secs(10 * 60);

/// Maximum length of a stored answer.
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

    /// Writes an owner's sessions, and returns the records that did not turn out as intended.
    ///
    /// What is written for a session depends on its stored record:
    ///
    /// - If the record does not [yield](Record::yields_to) to the epoch at which the owner holds the session, it is left unchanged.
    /// - If it already belongs to the owner, the session is written at its [new epoch](Registration::renewed), if it has one.
    /// - Otherwise, even if there is no record, the session is written at the epoch at which the owner holds it.
    ///
    /// Each written record is retained for [`RECORD_TTL`] from now. If it replaces another owner's record and that owner has a lease, that
    /// owner's next heartbeat [reports the replacement](HeartbeatReply::was_replaced).
    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError>;

    /// Replaces one ownership with another if the session's record is still `previous`.
    ///
    /// An owner claims even its own session before restoring it, so that no claim based on an earlier read of the record can succeed
    /// afterwards.
    async fn claim(
        &self,
        session: SessionHash,
        previous: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError>;

    /// Replaces a session's record with a tombstone, unless another instance's record wins.
    ///
    /// Another instance's record wins if its epoch is the same as the tombstone's or higher. The tombstone is retained for [`RECORD_TTL`].
    async fn delete(
        &self,
        session: SessionHash,
        tombstone: Tombstone,
    ) -> Result<(), DirectoryError>;

    /// Renews the owner's lease if it has not lapsed, but never acquires a new lease.
    ///
    /// A lease written with a higher [`number`](Status::number) is left unchanged. The time at which the instance last turned a client away
    /// is stored even if the instance has no lease.
    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError>;

    /// Like [`heartbeat`](Self::heartbeat), but acquires a lease if there is none.
    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError>;

    /// Releases the lease, if there is one. A released lease does not count as lapsed.
    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError>;

    /// Stores the answer to one of `incarnation`'s calls for `time`.
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

    /// Returns a stored answer, or `None` if there is none.
    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError>;
}

/// A session to be written by its owner.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Registration {
    pub(crate) session: SessionHash,
    /// The epoch at which the owner holds the session.
    pub(crate) epoch: Epoch,
    /// A higher epoch to take with this write, if the owner was without a lease for a while.
    ///
    /// Once it has been written, claims on an earlier record can no longer succeed. It is written only over a record that already belongs
    /// to the same owner, because if the record is missing, a later claim may have been lost with it.
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

/// All of the directory's leases at a single moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Leases {
    pub(crate) run: BackendRunId,
    pub(crate) entries: Vec<Lease>,
    /// How long ago any instance last turned a client away.
    ///
    /// This includes instances that no longer hold a lease, because they may have turned clients away right up to the moment their lease
    /// lapsed.
    pub(crate) turned_away: Option<Duration>,
}

/// A lease, with the status its instance wrote along with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lease {
    pub(crate) incarnation: Incarnation,
    /// Time since the lease's last heartbeat was created, or up to [`DIRECTORY_TIMEOUT`] more.
    pub(crate) age: Duration,
    /// The run of the backend in which all of the instance's sessions have been written.
    pub(crate) written_in: Option<BackendRunId>,
    /// Whether the instance has found the directory consistent for [`LEASE_TTL`] in that run.
    ///
    /// By then, any instance that has not renewed its lease in that run no longer has a lease.
    pub(crate) is_settled: bool,
    /// Whether answers to the instance's calls are late, or may turn out to be late.
    ///
    /// An answer is late if its call ended a while ago but the answer is still not known to be in the directory. Answers may turn out to be
    /// late while the instance has sessions it must close, because their calls may still be running.
    pub(crate) has_late_answers: bool,
}

/// The status that an instance writes along with its lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Status {
    /// The run of the backend in which all of this instance's sessions have been written.
    pub(crate) written_in: Option<BackendRunId>,
    /// See [`Lease::is_settled`].
    pub(crate) is_settled: bool,
    /// See [`Lease::has_late_answers`].
    pub(crate) has_late_answers: bool,
    /// How long ago the instance last turned a client away, or `None` if it never has.
    pub(crate) turned_away: Option<Duration>,
    /// When the instance created the status, or up to [`DIRECTORY_TIMEOUT`] earlier.
    ///
    /// The lease is renewed as of this time, so that a late heartbeat is not mistaken for a current heartbeat. `None` if the instance does
    /// not know the directory's time.
    pub(crate) created_at: Option<DirectoryTime>,
    /// Increases with each status the instance creates. The directory keeps the status with the highest number.
    pub(crate) number: u64,
}

/// A time on the backend's clock, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct DirectoryTime(pub(crate) u64);

/// Identifies one run of a backend. After a restart, the data from this run may be lost.
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
    /// Whether the lease still existed. If not, the sender was considered dead for a while, or the backend has lost its data.
    pub(crate) was_alive: bool,
    /// Whether another instance has replaced one of the sender's records since its last heartbeat.
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
    /// By then, every lease not renewed in this run has lapsed.
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
    /// Omits the parameters, which belong to the client.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entry")
            .field("ownership", &self.ownership)
            .finish_non_exhaustive()
    }
}
