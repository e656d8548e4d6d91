//! The state of all calls in flight, without clock, lock or task.
//!
//! `now` is always passed in, and nothing here calls out: the caller acts on what is returned. `T` is
//! whatever the caller wants back for a call.
//!
//! # Invariants
//!
//! 1. **Accepted first.** A call owns its [`Key`] only once the inner service accepted it
//!    ([`Core::claim`]). Before that it cannot touch another call.
//! 2. **One end.** [`Core::finish`] ends a call at most once, and may be injected into the
//!    server only if no other call owns its key.
//! 3. **A detached call may be cancelled by its deadline, an attached one never.**
//! 4. **A reused id** makes the older call leave without a trace: it is never returned again.
//! 5. **Nothing stays** but calls that have not ended. A detached call whose end cannot be seen is
//!    forgotten after [`UNSEEN_FOR`], never cancelled.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry as Slot},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::call::{CallId, RequestId};

/// How long a detached call is kept that has no deadline and whose end nobody watches: 1 h, longer than
/// any proxy keeps a silent stream open.
pub(crate) const UNSEEN_FOR: Duration = Duration::from_secs(60 * 60);

/// Where a session call is found by its JSON-RPC id: ids are unique in one session of one scope only.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    pub(crate) scope: Scope,
    pub(crate) session: Arc<str>,
    pub(crate) request: RequestId,
}

/// Who gave out the session id.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Scope {
    /// A session manager of ours, by its instance.
    #[cfg(feature = "rmcp")]
    Manager(u64),
    /// Whatever serves this request path.
    Path(Box<str>),
}

/// What becomes of a call at its detach.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wait {
    /// Cancelled at this time, if it is still detached then.
    Until(Instant),
    /// Runs on. Its end will be seen.
    ForItsEnd,
    /// Runs on unseen, forgotten at this time.
    Unseen(Instant),
}

#[derive(Debug)]
pub(crate) struct Core<T> {
    calls: HashMap<CallId, Entry<T>>,
    owners: HashMap<Key, CallId>,
    deadlines: BTreeSet<(Instant, CallId)>,
}

/// A call that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Whether a cancel may be sent to the server under its JSON-RPC id (invariant 2).
    pub(crate) injectable: bool,
}

#[derive(Debug)]
struct Entry<T> {
    call: T,
    key: Option<Key>,
    wait: Option<Wait>,
}

// === impl Core ===

impl<T: Clone> Core<T> {
    pub(crate) fn new() -> Self {
        Self {
            calls: HashMap::new(),
            owners: HashMap::new(),
            deadlines: BTreeSet::new(),
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    pub(crate) fn start(&mut self, id: CallId, key: Option<Key>, call: T) {
        let entry = Entry {
            call,
            key,
            wait: None,
        };
        self.calls.insert(id, entry);
    }

    /// Makes an accepted call the owner of its key. Another owner leaves (invariant 4).
    pub(crate) fn claim(&mut self, id: CallId) {
        let Some(key) = self.calls.get(&id).and_then(|entry| entry.key.clone()) else {
            return;
        };
        if let Some(older) = self.owners.insert(key, id)
            && older != id
            && let Some(entry) = self.calls.remove(&older)
        {
            self.forget_deadline(older, entry.wait);
        }
    }

    /// Claims a better key for a call than the one it was started with.
    #[cfg(any(feature = "rmcp", test))]
    pub(crate) fn rekey(&mut self, id: CallId, key: Key) {
        let Some(entry) = self.calls.get_mut(&id) else {
            return;
        };
        if let Some(former) = entry.key.replace(key)
            && let Slot::Occupied(owner) = self.owners.entry(former)
            && *owner.get() == id
        {
            owner.remove();
        }
        self.claim(id);
    }

    /// Notes that the client of a call has gone. `false` if the call is not in flight.
    pub(crate) fn detach(&mut self, id: CallId, wait: Wait) -> bool {
        let Some(entry) = self.calls.get_mut(&id) else {
            return false;
        };
        let former = entry.wait.replace(wait);
        self.forget_deadline(id, former);
        if let Some(at) = wait.deadline() {
            self.deadlines.insert((at, id));
        }
        true
    }

    /// Lets the detached calls of a session wait for their end instead of a cancel: the client came back
    /// for one of them, and it is not known for which.
    pub(crate) fn spare(&mut self, scope: &Scope, session: &str, now: Instant) {
        let of_session = |key: &Key| key.scope == *scope && *key.session == *session;
        let spared: Vec<CallId> = self
            .deadlines
            .iter()
            .filter(|(_, id)| {
                let key = self.calls.get(id).and_then(|entry| entry.key.as_ref());
                key.is_some_and(of_session)
            })
            .map(|(_, id)| *id)
            .collect();
        for id in spared {
            self.detach(id, Wait::Unseen(now + UNSEEN_FOR));
        }
    }

    /// Ends a call. `None` if it has ended before (invariant 2), or left (invariant 4).
    pub(crate) fn finish(&mut self, id: CallId) -> Option<Finished> {
        let entry = self.calls.remove(&id)?;
        self.forget_deadline(id, entry.wait);
        let injectable = match entry.key {
            None => false,
            Some(key) => match self.owners.entry(key) {
                Slot::Vacant(_) => true,
                Slot::Occupied(owner) if *owner.get() == id => {
                    owner.remove();
                    true
                }
                Slot::Occupied(_) => false,
            },
        };
        Some(Finished { injectable })
    }

    /// The calls whose grace is over by `now`. They stay until they are finished.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<(CallId, T)> {
        let mut orphans = Vec::new();
        while let Some((at, id)) = self.deadlines.first().copied().filter(|(at, _)| *at <= now) {
            self.deadlines.remove(&(at, id));
            let Some(entry) = self.calls.get_mut(&id) else {
                continue;
            };
            match entry.wait {
                Some(Wait::Until(_)) => orphans.push((id, entry.call.clone())),
                _ => {
                    self.finish(id);
                }
            }
        }
        orphans
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(at, _)| *at)
    }

    fn forget_deadline(&mut self, id: CallId, wait: Option<Wait>) {
        if let Some(at) = wait.and_then(Wait::deadline) {
            self.deadlines.remove(&(at, id));
        }
    }
}

// === impl Wait ===

impl Wait {
    fn deadline(self) -> Option<Instant> {
        match self {
            Self::Until(at) | Self::Unseen(at) => Some(at),
            Self::ForItsEnd => None,
        }
    }
}

#[cfg(test)]
mod tests;
