//! Backend faults for the simulation: lost data and clock steps.

use std::{collections::HashMap, fmt::Debug, hash::Hash, time::Duration};

use tokio::time::Instant;

use super::{MemoryDirectory, State};
use crate::ids::{Incarnation, Record, SessionHash};

/// A directory's data at one moment.
pub(crate) struct Snapshot(State);

/// The kind of data to evict.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Session,
    Lease,
    Answer,
}

impl MemoryDirectory {
    /// Returns a copy of all data.
    pub(crate) fn take_snapshot(&self) -> Snapshot {
        Snapshot(self.state().clone())
    }

    /// Restarts with a snapshot's data, like a killed backend or a replica after a failover.
    pub(crate) fn load_snapshot(&self, snapshot: &Snapshot) {
        let mut state = self.state();
        *state = State {
            starts: state.starts + 1,
            ..snapshot.0.clone()
        };
    }

    /// Evicts the key that `pick` selects and describes it, or returns `None` if there is no key.
    pub(crate) fn evict_any(&self, kind: Kind, pick: u64) -> Option<String> {
        let mut state = self.state();
        match kind {
            Kind::Session => evict(&mut state.sessions, pick).map(|key| format!("session {key}")),
            // All leases share one key.
            Kind::Lease => {
                let has_any = !state.leases.is_empty();
                state.leases.clear();
                state.turned_away = None;
                has_any.then(|| "leases".to_owned())
            }
            Kind::Answer => {
                let State { answers, .. } = &mut *state;
                let mut keys: Vec<_> = answers.keys().copied().collect();
                keys.sort_by_key(|key| format!("{key:?}"));
                let key = *keys.get(pick as usize % keys.len().max(1))?;
                // Let the answer expire rather than remove it, because its key is still in `write_order`.
                answers.get_mut(&key)?.1 = Instant::now();
                Some(format!("answer {} of {}", key.2, key.0))
            }
        }
    }

    pub(crate) fn has_owner(&self, session: SessionHash) -> bool {
        let mut state = self.state();
        let stored = state.session(session, Instant::now());
        stored.is_some_and(|stored| matches!(stored.record, Record::Owned(_)))
    }

    /// Returns a session's owner, even if the record has expired.
    pub(crate) fn owner(&self, session: SessionHash) -> Option<Incarnation> {
        let state = self.state();
        let record = state.sessions.get(&session)?.record;
        match record {
            Record::Owned(ownership) => Some(ownership.owner.incarnation),
            Record::Deleted(_) => None,
        }
    }

    /// Returns the instances that have a lease.
    pub(crate) fn living(&self) -> Vec<Incarnation> {
        let now = Instant::now();
        let state = self.state();
        let valid = state.leases.iter().filter(|(_, lease)| lease.is_valid(now));
        valid.map(|(incarnation, _)| *incarnation).collect()
    }

    /// Steps the backend's clock forward, as `ntpd` does. This is also what an instance observes after it has been suspended.
    pub(crate) fn step_clock(&self, step: Duration) {
        let mut state = self.state();
        let earlier = |at: Instant| at.checked_sub(step).unwrap();
        state.started_at = earlier(state.started_at);
        state.turned_away = state.turned_away.map(earlier);
        for lease in state.leases.values_mut() {
            lease.renewed_at = earlier(lease.renewed_at);
        }
    }

    /// Sets the backend's clock back, so that the times already stored are in the future.
    pub(crate) fn set_clock_back(&self, step: Duration) {
        let mut state = self.state();
        state.started_at += step;
        state.turned_away = state.turned_away.map(|at| at + step);
        for lease in state.leases.values_mut() {
            lease.renewed_at += step;
        }
    }

    /// Removes a session's record, like a backend that has run out of memory.
    pub(crate) fn evict(&self, session: SessionHash) {
        self.state().sessions.remove(&session);
    }
}

/// Removes the key that `pick` selects, which does not depend on the map's iteration order.
fn evict<K: Copy + Eq + Hash + Debug, V>(map: &mut HashMap<K, V>, pick: u64) -> Option<K> {
    let mut keys: Vec<K> = map.keys().copied().collect();
    keys.sort_by_key(|key| format!("{key:?}"));
    let key = *keys.get(pick as usize % keys.len().max(1))?;
    map.remove(&key);
    Some(key)
}
