//! The drain gate of a session: how many requests are in flight, and whether it is closed, in one state.
//!
//! 1. A request enters before it is served, and leaves when it has an answer. None enters once the gate is closed.
//! 2. It is closed when idle only if no request entered since it was seen to be idle: what is looked at in between, such as the
//!    calls whose clients have gone, cannot have changed unseen.
//! 3. It stays closed. A session that comes back gets a gate of its own.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use tokio::sync::Notify;

use crate::wait_until::wait_until;

/// It is closed.
const CLOSED: u64 = 1 << 63;

/// Some task waits for it to be closed, and is woken by each request that leaves.
const WATCHED: u64 = 1 << 62;

/// One request in flight. The bits below count how many requests have entered, and may wrap around.
const ONE: u64 = 1 << 32;

const ENTRIES: u64 = ONE - 1;

#[derive(Debug, Default)]
pub(crate) struct DrainGate {
    state: AtomicU64,
    changed: Notify,
}

/// A request is in flight until this is dropped.
pub(crate) struct InFlightGuard(Arc<DrainGate>);

// === impl DrainGate ===

impl DrainGate {
    /// Enters, unless it is closed.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<InFlightGuard> {
        let enters = |state: u64| {
            let entries = (state + 1) & ENTRIES;
            (state & CLOSED == 0).then_some(((state & !ENTRIES) + ONE) | entries)
        };
        let entered = self
            .state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, enters);
        entered.ok().map(|_| InFlightGuard(self.clone()))
    }

    pub(crate) fn is_closed(&self) -> bool {
        is_closed(self.state.load(Ordering::Acquire))
    }

    /// Closes it if no request is in flight, `is_idle` says so as well, and none entered meanwhile. Says whether it is closed.
    pub(crate) fn close_if_idle(&self, is_idle: impl FnOnce() -> bool) -> bool {
        let seen = self.watch();
        if is_closed(seen) {
            return true;
        }
        if !is_empty(seen) || !is_idle() {
            return false;
        }
        let closed =
            self.state
                .compare_exchange(seen, seen | CLOSED, Ordering::AcqRel, Ordering::Acquire);
        self.changed();
        closed.is_ok()
    }

    /// Returns when it is closed, be it because it was idle or by another task.
    pub(crate) async fn close_when_idle(&self, is_idle: impl Fn() -> bool) {
        self.until(|| self.close_if_idle(&is_idle)).await;
    }

    /// Returns when it is closed, or no request is in flight and `is_idle` says so as well. It stays as it is.
    pub(crate) async fn until_idle(&self, is_idle: impl Fn() -> bool) {
        let is_over = || {
            let seen = self.watch();
            is_closed(seen) || is_empty(seen) && is_idle()
        };
        self.until(is_over).await;
    }

    async fn until(&self, is_so: impl Fn() -> bool) {
        wait_until(&self.changed, is_so).await;
    }

    /// How it is, from now on watched.
    fn watch(&self) -> u64 {
        self.state.fetch_or(WATCHED, Ordering::AcqRel) | WATCHED
    }

    /// Closes it, whatever is in flight.
    pub(crate) fn close(&self) {
        self.state.fetch_or(CLOSED, Ordering::AcqRel);
        self.changed();
    }

    /// Something has changed for the tasks that wait for it to be closed.
    pub(crate) fn changed(&self) {
        self.changed.notify_waiters();
    }
}

fn is_closed(state: u64) -> bool {
    state & CLOSED != 0
}

fn is_empty(state: u64) -> bool {
    state & !(CLOSED | WATCHED | ENTRIES) == 0
}

// === impl InFlightGuard ===

impl InFlightGuard {
    /// Whether the gate is closed, for example because the session is relinquished.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let before = self.0.state.fetch_sub(ONE, Ordering::AcqRel);
        if before & WATCHED != 0 {
            self.0.changed();
        }
    }
}

impl fmt::Debug for InFlightGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlightGuard")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn nothing_enters_once_it_is_closed() {
        let gate = Arc::new(DrainGate::default());
        let [first, second] = [(); 2].map(|()| gate.enter().unwrap());
        assert!(!gate.close_if_idle(|| true));
        drop(first);
        assert!(!gate.close_if_idle(|| true));
        drop(second);
        assert!(!gate.close_if_idle(|| false) && !gate.is_closed());
        assert!(gate.close_if_idle(|| true) && gate.is_closed());
        assert!(gate.enter().is_none() && gate.close_if_idle(|| false));
    }

    #[test]
    fn a_request_that_enters_and_leaves_while_it_is_looked_at_keeps_it_open() {
        let gate = Arc::new(DrainGate::default());
        let enters_and_leaves = || {
            drop(gate.enter().unwrap());
            true
        };
        assert!(!gate.close_if_idle(enters_and_leaves) && !gate.is_closed());
        // Also if a request enters for the four billionth time.
        gate.state.fetch_or(ENTRIES, Ordering::AcqRel);
        assert!(!gate.close_if_idle(enters_and_leaves) && !gate.is_closed());
        assert!(gate.close_if_idle(|| true));
    }

    #[test]
    fn it_is_closed_when_idle_for_all_that_wait() {
        let gate = Arc::new(DrainGate::default());
        let in_flight = gate.enter().unwrap();
        let mut waiting = [(); 2].map(|()| Box::pin(gate.close_when_idle(|| true)));
        assert!(
            waiting
                .iter_mut()
                .all(|waits| waits.now_or_never().is_none())
        );
        drop(in_flight);
        assert!(
            waiting
                .iter_mut()
                .all(|waits| waits.now_or_never().is_some())
        );
    }

    #[test]
    fn it_can_be_closed_while_requests_are_in_flight() {
        let gate = Arc::new(DrainGate::default());
        let in_flight = gate.enter().unwrap();
        let mut waits = Box::pin(gate.close_when_idle(|| true));
        assert!((&mut waits).now_or_never().is_none());
        gate.close();
        assert!(waits.now_or_never().is_some() && gate.enter().is_none());
        drop(in_flight);
        assert!(gate.is_closed());
    }

    /// Two threads, one that enters and one that closes: a request that is in flight had entered before.
    #[test]
    fn nothing_is_in_flight_once_it_was_closed_when_idle() {
        for _ in 0..2_000 {
            let gate = Arc::new(DrainGate::default());
            let other = gate.clone();
            let enters = std::thread::spawn(move || {
                let mut entered = 0;
                while let Some(guard) = other.enter() {
                    assert!(!other.is_closed());
                    entered += 1;
                    drop(guard);
                }
                entered
            });
            while !gate.close_if_idle(|| true) {
                std::hint::spin_loop();
            }
            assert!(is_empty(gate.state.load(Ordering::Acquire)));
            enters.join().unwrap();
        }
    }
}
