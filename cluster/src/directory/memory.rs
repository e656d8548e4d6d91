//! A directory in the memory of a process, for instances that are all in it.

use std::{
    collections::{HashMap, VecDeque, hash_map::Entry as Slot},
    fmt::{self, Debug, Formatter},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use bytes::Bytes;
use tokio::time::Instant;

use super::{
    Absence, Alive, Beat, Claim, Directory, DirectoryError, EngineRun, Entry, Found, KEPT, LEASE,
    Standing,
};
use crate::ids::{CallNumber, Incarnation, Owner, Ownership, SessionHash};

/// How many bytes of answers are kept: 64 MiB. Beyond that the oldest go.
const MAX_ANSWERS: usize = 64 * 1024 * 1024;

/// What an answer costs beside its bytes.
const ANSWER_OVERHEAD: usize = 256;

/// A directory of owners in memory, for several instances in one process: tests, demonstrations, a server with one runtime a
/// core. Clones are the same directory.
///
/// It knows a session for an hour after its owner last entered it, as the real one does.
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

#[derive(Default)]
#[cfg_attr(test, derive(Clone))]
struct State {
    /// How often it was started again.
    starts: u64,
    sessions: HashMap<SessionHash, Known>,
    leases: HashMap<Incarnation, Instant>,
    /// Until when a client of a session counts as at a door.
    doors: HashMap<SessionHash, Instant>,
    answers: HashMap<AnswerKey, (Bytes, Instant)>,
    /// Their keys, the oldest first.
    oldest: VecDeque<AnswerKey>,
    answer_bytes: usize,
}

#[cfg_attr(test, derive(Clone))]
struct Known {
    ownership: Ownership,
    params: Bytes,
    until: Instant,
}

type AnswerKey = (SessionHash, Incarnation, CallNumber);

// === impl MemoryDirectory ===

impl MemoryDirectory {
    /// How many sessions have an owner.
    pub fn sessions(&self) -> usize {
        let mut state = self.state();
        state.sweep(Instant::now());
        state.sessions.len()
    }

    /// Comes back empty, as an engine does that keeps nothing on a disk.
    #[cfg(test)]
    pub(crate) fn restart(&self) {
        let mut state = self.state();
        *state = State {
            starts: state.starts + 1,
            ..State::default()
        };
    }

    /// Loses all that it knows, and runs on.
    #[cfg(test)]
    pub(crate) fn flush(&self) {
        let mut state = self.state();
        *state = State {
            starts: state.starts,
            ..State::default()
        };
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
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
    async fn owner(
        &self,
        session: SessionHash,
        asker: Incarnation,
    ) -> Result<Found, DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        Ok(match state.session(session, now) {
            Some(known) => Found::Owner(known.ownership),
            None => Found::Nobody(state.absence(asker, now)),
        })
    }

    async fn knock(&self, session: SessionHash, time: Duration) -> Result<(), DirectoryError> {
        let until = Instant::now() + time;
        let mut state = self.state();
        let known = state.doors.entry(session).or_insert(until);
        *known = until.max(*known);
        Ok(())
    }

    async fn standing(
        &self,
        session: SessionHash,
        asker: Incarnation,
    ) -> Result<Standing, DirectoryError> {
        let found = self.owner(session, asker).await?;
        let until = self.state().doors.get(&session).copied();
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        Ok(Standing {
            found,
            at_the_door: left.filter(|left| !left.is_zero()),
        })
    }

    async fn load(&self, session: SessionHash) -> Result<Option<Entry>, DirectoryError> {
        let mut state = self.state();
        let known = state.session(session, Instant::now());
        Ok(known.map(|known| Entry {
            owner: known.ownership.owner,
            params: known.params.clone(),
        }))
    }

    async fn enter(
        &self,
        owner: Owner,
        sessions: &[(SessionHash, Arc<[u8]>)],
    ) -> Result<Vec<(SessionHash, Owner)>, DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        let mut others = Vec::new();
        for (session, params) in sessions {
            let params = || Bytes::copy_from_slice(params);
            let until = now + KEPT;
            match state.session(*session, now) {
                Some(known) if known.ownership.owner != owner => {
                    others.push((*session, known.ownership.owner));
                }
                Some(known) => (known.params, known.until) = (params(), until),
                None => {
                    let known = Known {
                        ownership: Ownership::begin(owner),
                        params: params(),
                        until,
                    };
                    state.sessions.insert(*session, known);
                }
            }
        }
        Ok(others)
    }

    async fn claim(
        &self,
        session: SessionHash,
        former: Ownership,
        owner: Owner,
    ) -> Result<Claim, DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        let Some(known) = state.session(session, now) else {
            return Ok(Claim::Unknown);
        };
        if known.ownership != former {
            return Ok(Claim::Lost(known.ownership));
        }
        known.ownership = Ownership::begin(owner);
        known.until = now + KEPT;
        Ok(Claim::Won)
    }

    async fn remove(&self, session: SessionHash, owner: Owner) -> Result<(), DirectoryError> {
        let mut state = self.state();
        if let Slot::Occupied(known) = state.sessions.entry(session)
            && known.get().ownership.owner == owner
        {
            known.remove();
        }
        Ok(())
    }

    async fn beat(&self, owner: Owner) -> Result<Beat, DirectoryError> {
        let mut state = self.state();
        let now = Instant::now();
        state.sweep(now);
        let lease = state.leases.get_mut(&owner.incarnation);
        let was_alive = lease.is_some();
        if let Some(until) = lease {
            *until = now + LEASE;
        }
        Ok(Beat {
            run: state.run(),
            was_alive,
        })
    }

    async fn lease(&self, owner: Owner) -> Result<(), DirectoryError> {
        self.state()
            .leases
            .insert(owner.incarnation, Instant::now() + LEASE);
        Ok(())
    }

    async fn is_alive(
        &self,
        incarnation: Incarnation,
        asker: Incarnation,
    ) -> Result<Alive, DirectoryError> {
        let state = self.state();
        let now = Instant::now();
        Ok(if state.has_lease(incarnation, now) {
            Alive::Yes
        } else {
            Alive::No(state.absence(asker, now))
        })
    }

    async fn leave(&self, owner: Owner) -> Result<(), DirectoryError> {
        self.state().leases.remove(&owner.incarnation);
        Ok(())
    }

    async fn keep_answer(
        &self,
        session: SessionHash,
        incarnation: Incarnation,
        call: CallNumber,
        answer: Bytes,
    ) -> Result<(), DirectoryError> {
        let key = (session, incarnation, call);
        self.state().keep(key, answer, Instant::now() + KEPT);
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
        let kept = state
            .answers
            .get(&key)
            .filter(|(_, until)| *until > Instant::now());
        Ok(kept.map(|(answer, _)| answer.clone()))
    }
}

// === impl State ===

impl State {
    fn run(&self) -> EngineRun {
        EngineRun::new(&self.starts.to_string())
    }

    fn session(&mut self, session: SessionHash, now: Instant) -> Option<&mut Known> {
        self.sessions
            .get_mut(&session)
            .filter(|known| known.until > now)
    }

    fn has_lease(&self, incarnation: Incarnation, now: Instant) -> bool {
        self.leases
            .get(&incarnation)
            .is_some_and(|until| *until > now)
    }

    fn absence(&self, asker: Incarnation, now: Instant) -> Absence {
        Absence {
            run: self.run(),
            asker_is_alive: self.has_lease(asker, now),
        }
    }

    fn keep(&mut self, key: AnswerKey, answer: Bytes, until: Instant) {
        self.answer_bytes += answer.len() + ANSWER_OVERHEAD;
        if let Some((before, _)) = self.answers.insert(key, (answer, until)) {
            self.answer_bytes -= before.len() + ANSWER_OVERHEAD;
            self.oldest.retain(|kept| *kept != key);
        }
        self.oldest.push_back(key);
        while self.answer_bytes > MAX_ANSWERS {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        let key = self.oldest.pop_front();
        if let Some((answer, _)) = key.and_then(|key| self.answers.remove(&key)) {
            self.answer_bytes -= answer.len() + ANSWER_OVERHEAD;
        }
    }

    /// Forgets what is over. Every beat of every instance comes here.
    fn sweep(&mut self, now: Instant) {
        self.leases.retain(|_, until| *until > now);
        self.sessions.retain(|_, known| known.until > now);
        self.doors.retain(|_, until| *until > now);
        while let Some(oldest) = self.oldest.front()
            && self
                .answers
                .get(oldest)
                .is_none_or(|(_, until)| *until <= now)
        {
            self.forget_oldest();
        }
    }
}

#[cfg(test)]
pub(crate) mod faults;
#[cfg(test)]
mod tests;
