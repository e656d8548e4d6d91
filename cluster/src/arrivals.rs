//! Sessions that are on their way here: this instance is their owner, and the request that brings them is being served.
//!
//! 1. To a peer they are here already. If they were not, it would claim a session that was claimed a moment ago, and two instances
//!    would bring it to life.
//! 2. One request at a time brings a session. rmcp says "no such session" to all that wait for one whose client hangs up, and for a
//!    moment after that to everybody. So it is remembered who broke off.

use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{sync, time::Instant};

use crate::{ids::SessionHash, recent::Recent};

/// For how long it is remembered that somebody broke off: 1 s. rmcp forgets it as soon as a task of its own was run.
const BROKE_OFF_FOR: Duration = Duration::from_secs(1);

/// Of how many sessions that is remembered: 4,096.
const MAX_BROKE_OFF: usize = 4 * 1024;

/// What is on its way. It is a handle: clones are the same.
#[derive(Debug, Clone, Default)]
pub(crate) struct Arrivals(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    coming: Mutex<HashMap<SessionHash, Coming>>,
    /// Sessions whose client hung up while they were brought.
    broke_off: Mutex<Recent<()>>,
    /// How many sessions come: nearly always none, and then nobody takes the lock.
    count: AtomicUsize,
}

#[derive(Debug, Default)]
struct Coming {
    /// How many requests bring it.
    requests: usize,
    turn: Arc<sync::Mutex<()>>,
}

/// A session is on its way until this is dropped.
#[derive(Debug)]
pub(crate) struct Expected {
    arrivals: Arrivals,
    session: SessionHash,
    turn: Arc<sync::Mutex<()>>,
}

/// As long as this lives, no other request brings the session.
pub(crate) type Turn = sync::OwnedMutexGuard<()>;

/// A session is being brought. Dropped before [`ends`](Self::ends), its client has hung up.
pub(crate) struct Bringing<'a>(Option<&'a Expected>);

// === impl Arrivals ===

impl Arrivals {
    /// A session is on its way.
    pub(crate) fn expect(&self, session: SessionHash) -> Expected {
        let mut coming = self.coming();
        let expected = self.count_in(session, coming.entry(session).or_default());
        self.0.count.store(coming.len(), Ordering::Release);
        expected
    }

    /// The same, if it is already.
    pub(crate) fn join(&self, session: SessionHash) -> Option<Expected> {
        let mut coming = self.coming();
        let its = coming.get_mut(&session)?;
        Some(self.count_in(session, its))
    }

    fn count_in(&self, session: SessionHash, its: &mut Coming) -> Expected {
        its.requests += 1;
        Expected {
            arrivals: self.clone(),
            session,
            turn: its.turn.clone(),
        }
    }

    /// Does something unless a session is on its way, and before it can be.
    pub(crate) fn unless_coming(&self, session: SessionHash, act: impl FnOnce()) {
        let coming = self.coming();
        if !coming.contains_key(&session) {
            act();
        }
    }

    pub(crate) fn has(&self, session: SessionHash) -> bool {
        self.coming().contains_key(&session)
    }

    /// How many requests bring a session.
    #[cfg(test)]
    pub(crate) fn requests(&self, session: SessionHash) -> usize {
        self.coming().get(&session).map_or(0, |its| its.requests)
    }

    /// Whether nothing is on its way.
    pub(crate) fn are_none(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    fn coming(&self) -> MutexGuard<'_, HashMap<SessionHash, Coming>> {
        self.0.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn broke_off(&self) -> MutexGuard<'_, Recent<()>> {
        let broke_off = self.0.broke_off.lock();
        broke_off.unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl Inner ===

impl Default for Inner {
    fn default() -> Self {
        Self {
            coming: Mutex::default(),
            broke_off: Mutex::new(Recent::new(MAX_BROKE_OFF, BROKE_OFF_FOR)),
            count: AtomicUsize::new(0),
        }
    }
}

// === impl Expected ===

impl Expected {
    /// Waits until no other request brings the session.
    pub(crate) async fn turn(&self) -> Turn {
        self.turn.clone().lock_owned().await
    }

    /// Somebody whose turn it is brings the session from here on.
    pub(crate) fn begin(&self) -> Bringing<'_> {
        Bringing(Some(self))
    }

    /// Whether somebody broke off in the last moment.
    pub(crate) fn broke_off(&self) -> bool {
        let broke_off = self.arrivals.broke_off();
        broke_off.get(self.session, Instant::now()).is_some()
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        let mut coming = self.arrivals.coming();
        if let Entry::Occupied(mut its) = coming.entry(self.session) {
            match its.get().requests.checked_sub(1) {
                Some(left @ 1..) => its.get_mut().requests = left,
                _ => drop(its.remove()),
            }
        }
        self.arrivals.0.count.store(coming.len(), Ordering::Release);
    }
}

// === impl Bringing ===

impl Bringing<'_> {
    /// It has come, or does not, and its client was there.
    pub(crate) fn ends(mut self) {
        self.0 = None;
    }
}

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        if let Some(expected) = self.0 {
            let mut broke_off = expected.arrivals.broke_off();
            broke_off.insert(expected.session, (), Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_session_is_expected_until_nothing_brings_it_any_more() {
        let arrivals = Arrivals::default();
        let (session, other) = (SessionHash::of("a"), SessionHash::of("b"));
        let first = arrivals.expect(session);
        let second = arrivals.expect(session);
        drop(first);
        assert!(arrivals.has(session) && !arrivals.has(other));
        drop(second);
        assert!(!arrivals.has(session) && arrivals.are_none());
    }

    #[tokio::test]
    async fn one_request_at_a_time_brings_a_session() {
        let arrivals = Arrivals::default();
        let [first, second] = [(); 2].map(|()| arrivals.expect(SessionHash::of("a")));
        let other = arrivals.expect(SessionHash::of("b"));
        let turn = first.turn().await;
        assert!(second.turn().now_or_never().is_none());
        assert!(other.turn().now_or_never().is_some());
        drop((turn, first));
        assert!(second.turn().now_or_never().is_some());
    }
}
