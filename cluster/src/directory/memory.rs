//! An in-memory directory, for instances that all run in one process.

use std::{
    collections::{HashMap, VecDeque},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    BackendRunId, Claim, Directory, DirectoryError, DirectoryTime, Entry, HeartbeatReply,
    LEASE_TTL, Lease, Leases, RECORD_TTL, Registration, SessionSnapshot, Status,
};
use crate::{
    ids::{CallNumber, Incarnation, Owner, Ownership, Record, SessionHash, Tombstone},
    lock::lock,
};

/// Maximum total size of the stored answers. Beyond that, the oldest answers are evicted.
const MAX_ANSWERS: usize = 64 * 1024 * 1024;

/// The number of bytes charged for each answer, in addition to its length.
const ANSWER_OVERHEAD: usize = 256;

/// What the directory's clock reads when it starts.
const CLOCK_START: DirectoryTime = DirectoryTime(60 * 60 * 1000);

/// An in-memory directory, for several instances in one process. Clones share the directory.
///
/// It is meant for tests, demos, and servers that run one runtime per core. Like a Redis directory, it retains a session for an hour after
/// its owner last registered or claimed it, and an answer for ten minutes after its call ended. It stores up to 64 MiB of answers.
///
/// ```
/// use mcp_cancel_cluster::MemoryDirectory;
///
/// let directory = MemoryDirectory::default();
/// let same = directory.clone();
/// assert_eq!(same.sessions(), 0);
/// ```
#[derive(Clone, Default)]
pub struct MemoryDirectory(Arc<Mutex<State>>);

#[cfg_attr(test, derive(Clone))]
struct State {
    /// The number of restarts so far.
    starts: u64,
    /// When the directory's clock read [`CLOCK_START`].
    started_at: Instant,
    sessions: HashMap<SessionHash, StoredSession>,
    leases: HashMap<Incarnation, StoredLease>,
    /// When an instance last turned a client away, or a lease last lapsed.
    turned_away: Option<Instant>,
    answers: HashMap<AnswerKey, (Bytes, Instant)>,
    /// The keys of `answers`, in the order they were written.
    write_order: VecDeque<AnswerKey>,
    answer_bytes: usize,
}

#[cfg_attr(test, derive(Clone))]
struct StoredSession {
    record: Record,
    params: Bytes,
    expires_at: Instant,
}

/// A lease, with the status its instance wrote along with it.
#[cfg_attr(test, derive(Clone))]
struct StoredLease {
    renewed_at: Instant,
    /// The number of the status written along with the lease.
    number: u64,
    written_in: Option<BackendRunId>,
    is_settled: bool,
    has_late_answers: bool,
    /// Whether another owner has replaced one of the instance's records since the last renewal.
    was_replaced: bool,
}

type AnswerKey = (SessionHash, Incarnation, CallNumber);

// === impl MemoryDirectory ===

impl MemoryDirectory {
    /// Returns the number of sessions that have an owner.
    pub fn sessions(&self) -> usize {
        let mut state = self.state();
        state.sweep(Instant::now());
        let stored = state.sessions.values();
        stored
            .filter(|stored| matches!(stored.record, Record::Owned(_)))
            .count()
    }

    /// Restarts empty, like a backend without persistence.
    #[cfg(test)]
    pub(crate) fn restart(&self) {
        let mut state = self.state();
        *state = State {
            starts: state.starts + 1,
            started_at: state.started_at,
            ..State::default()
        };
    }

    /// Loses all data but keeps running.
    #[cfg(test)]
    pub(crate) fn flush(&self) {
        let mut state = self.state();
        *state = State {
            starts: state.starts,
            started_at: state.started_at,
            ..State::default()
        };
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.0)
    }
}

impl Debug for MemoryDirectory {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryDirectory")
            .field("sessions", &self.sessions())
            .finish()
    }
}

#[async_trait]
impl Directory for MemoryDirectory {
    async fn look_up(&self, session: SessionHash) -> Result<SessionSnapshot, DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        Ok(SessionSnapshot {
            record: state.session(session, now).map(|stored| stored.record),
            leases: state.leases(now),
        })
    }

    async fn leases(&self) -> Result<Leases, DirectoryError> {
        Ok(self.state().leases(Instant::now()))
    }

    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError> {
        let mut state = self.state();
        let stored = state.session(session, Instant::now());
        Ok(stored.and_then(|stored| match stored.record {
            Record::Owned(ownership) => Some(Entry {
                ownership,
                params: stored.params.clone(),
            }),
            Record::Deleted(_) => None,
        }))
    }

    async fn register(
        &self,
        owner: Owner,
        sessions: &[Registration],
    ) -> Result<Vec<(SessionHash, Record)>, DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        let mut differing = Vec::new();
        for registered in sessions {
            let (session, epoch) = (registered.session, registered.epoch);
            match state.session(session, now) {
                Some(stored) if !stored.record.yields_to(&Ownership { owner, epoch }) => {
                    differing.push((session, stored.record));
                }
                stored => {
                    let stored = stored.map(|stored| stored.record);
                    let ownership = match stored {
                        Some(Record::Owned(stored)) if stored.owner == owner => {
                            registered.ownership(owner)
                        }
                        _ => Ownership { owner, epoch },
                    };
                    if let Some(Record::Owned(Ownership { owner: former, .. })) = stored
                        && former != owner
                        && let Some(lease) = state.leases.get_mut(&former.incarnation)
                    {
                        lease.was_replaced = true;
                    }
                    let params = Bytes::copy_from_slice(&registered.params);
                    state.write(session, Record::Owned(ownership), params, now);
                    if ownership != registered.ownership(owner) {
                        differing.push((session, Record::Owned(ownership)));
                    }
                }
            }
        }
        Ok(differing)
    }

    async fn claim(
        &self,
        session: SessionHash,
        previous: Ownership,
        wanted: Ownership,
    ) -> Result<Claim, DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        let Some(stored) = state.session(session, now) else {
            return Ok(Claim::Unknown);
        };
        if stored.record != Record::Owned(previous) {
            return Ok(Claim::Lost(stored.record));
        }
        stored.record = Record::Owned(wanted);
        stored.expires_at = now + RECORD_TTL;
        Ok(Claim::Won)
    }

    async fn delete(
        &self,
        session: SessionHash,
        tombstone: Tombstone,
    ) -> Result<(), DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        let stored = state.session(session, now).map(|stored| stored.record);
        if let Some(tombstone) = tombstone.supersede(stored) {
            state.write(session, Record::Deleted(tombstone), Bytes::new(), now);
        }
        Ok(())
    }

    async fn heartbeat(
        &self,
        owner: Owner,
        status: &Status,
    ) -> Result<HeartbeatReply, DirectoryError> {
        let (mut state, now) = (self.state(), Instant::now());
        let was_replaced = state.renew_lease(owner, status, now);
        Ok(HeartbeatReply {
            run: state.run(),
            was_alive: was_replaced.is_some(),
            was_replaced: was_replaced.unwrap_or(false),
            time: state.time(now),
        })
    }

    async fn acquire_lease(&self, owner: Owner, status: &Status) -> Result<(), DirectoryError> {
        let (mut state, now) = (self.state(), Instant::now());
        if state.renew_lease(owner, status, now).is_none() {
            let lease = StoredLease::new(status, state.created_at(status, now));
            state.leases.insert(owner.incarnation, lease);
        }
        Ok(())
    }

    async fn release_lease(&self, owner: Owner) -> Result<(), DirectoryError> {
        self.state().leases.remove(&owner.incarnation);
        Ok(())
    }

    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
        time: Duration,
    ) -> Result<(), DirectoryError> {
        let key = (session, incarnation, call);
        self.state()
            .store_answer(key, answer, Instant::now() + time);
        Ok(())
    }

    async fn remove_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<(), DirectoryError> {
        self.state().remove((session, incarnation, call));
        Ok(())
    }

    async fn answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
    ) -> Result<Option<Bytes>, DirectoryError> {
        let key = (session, incarnation, call);
        let state = self.state();
        let stored = state
            .answers
            .get(&key)
            .filter(|(_, until)| *until > Instant::now());
        Ok(stored.map(|(answer, _)| answer.clone()))
    }
}

// === impl State ===

impl State {
    fn time(&self, now: Instant) -> DirectoryTime {
        CLOCK_START.saturating_add(now - self.started_at)
    }

    /// Renews a lease, unless a later status has already renewed it.
    ///
    /// Returns whether one of the instance's records has been replaced since the last renewal, or `None` if there is no lease.
    fn renew_lease(&mut self, owner: Owner, status: &Status, now: Instant) -> Option<bool> {
        self.sweep(now);
        self.record_turned_away(status, now);
        let created_at = self.created_at(status, now);
        let lease = self.leases.get_mut(&owner.incarnation)?;
        let was_replaced = lease.was_replaced;
        if lease.number <= status.number {
            *lease = StoredLease::new(status, created_at.max(lease.renewed_at));
        }
        Some(was_replaced)
    }

    /// Returns when a status was created, or `now` if that is unknown or in the future.
    fn created_at(&self, status: &Status, now: Instant) -> Instant {
        let elapsed = status.created_at.map(|at| self.time(now).since(at));
        now.checked_sub(elapsed.unwrap_or_default()).unwrap_or(now)
    }

    fn run(&self) -> BackendRunId {
        BackendRunId::new(&self.starts.to_string())
    }

    fn session(&mut self, session: SessionHash, now: Instant) -> Option<&mut StoredSession> {
        self.sessions
            .get_mut(&session)
            .filter(|stored| stored.expires_at > now)
    }

    fn write(&mut self, session: SessionHash, record: Record, params: Bytes, now: Instant) {
        let expires_at = now + RECORD_TTL;
        let stored = StoredSession {
            record,
            params,
            expires_at,
        };
        self.sessions.insert(session, stored);
    }

    fn leases(&self, now: Instant) -> Leases {
        let current = self.leases.iter().filter(|(_, lease)| lease.is_valid(now));
        let leases = current.map(|(incarnation, lease)| Lease {
            incarnation: *incarnation,
            age: now - lease.renewed_at,
            written_in: lease.written_in.clone(),
            is_settled: lease.is_settled,
            has_late_answers: lease.has_late_answers,
        });
        Leases {
            run: self.run(),
            entries: leases.collect(),
            turned_away: self
                .turned_away
                .max(self.last_lapse(now))
                .map(|at| now - at),
        }
    }

    /// Returns when a lease last lapsed. A released lease does not count as lapsed.
    fn last_lapse(&self, now: Instant) -> Option<Instant> {
        let lapsed = self.leases.values().filter(|lease| !lease.is_valid(now));
        lapsed.map(|lease| lease.renewed_at + LEASE_TTL).max()
    }

    fn record_turned_away(&mut self, status: &Status, now: Instant) {
        let elapsed = status.turned_away;
        let turned_away = elapsed.and_then(|elapsed| now.checked_sub(elapsed));
        self.turned_away = self.turned_away.max(turned_away);
    }

    fn store_answer(&mut self, key: AnswerKey, answer: Bytes, until: Instant) {
        self.remove(key);
        self.answer_bytes += answer.len() + ANSWER_OVERHEAD;
        self.answers.insert(key, (answer, until));
        self.write_order.push_back(key);
        while self.answer_bytes > MAX_ANSWERS {
            self.evict_oldest();
        }
    }

    fn remove(&mut self, key: AnswerKey) {
        if let Some((answer, _)) = self.answers.remove(&key) {
            self.answer_bytes -= answer.len() + ANSWER_OVERHEAD;
            let index = self.write_order.iter().position(|written| *written == key);
            index.and_then(|index| self.write_order.remove(index));
        }
    }

    fn evict_oldest(&mut self) {
        if let Some(key) = self.write_order.front().copied() {
            self.remove(key);
        }
    }

    /// Removes expired leases, records and answers.
    ///
    /// An expired answer stays in memory until every answer written before it has expired, but [`answer`](Directory::answer) no longer
    /// returns it.
    fn sweep(&mut self, now: Instant) {
        self.turned_away = self.turned_away.max(self.last_lapse(now));
        self.leases.retain(|_, lease| lease.is_valid(now));
        self.sessions.retain(|_, stored| stored.expires_at > now);
        while let Some(oldest) = self.write_order.front()
            && self
                .answers
                .get(oldest)
                .is_none_or(|(_, until)| *until <= now)
        {
            self.evict_oldest();
        }
    }
}

impl Default for State {
    fn default() -> Self {
        Self {
            starts: 0,
            started_at: Instant::now(),
            sessions: HashMap::new(),
            leases: HashMap::new(),
            turned_away: None,
            answers: HashMap::new(),
            write_order: VecDeque::new(),
            answer_bytes: 0,
        }
    }
}

// === impl StoredLease ===

impl StoredLease {
    fn new(status: &Status, renewed_at: Instant) -> Self {
        Self {
            renewed_at,
            number: status.number,
            written_in: status.written_in.clone(),
            is_settled: status.is_settled,
            has_late_answers: status.has_late_answers,
            was_replaced: false,
        }
    }

    fn is_valid(&self, now: Instant) -> bool {
        now - self.renewed_at < LEASE_TTL
    }
}

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod tests;
