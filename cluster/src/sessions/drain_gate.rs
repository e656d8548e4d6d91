//! A session's drain gate, which counts its requests in flight and can be closed to new ones.
//!
//! 1. A request enters the gate before it is served, and exits once it has been answered. Once the gate has been closed, no request can
//!    enter.
//! 2. Before an idle gate is closed, other conditions are checked too, such as whether the session has calls in flight. The gate is closed
//!    only if no request has entered since it was found idle, so the conditions cannot have changed unnoticed.
//! 3. The gate never reopens. A restored session gets a new gate.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard},
};

use tokio::sync::Notify;

use crate::{lock::lock, wait_until::wait_until};

/// Counts a session's requests in flight, and can be closed to new ones.
#[derive(Debug, Default)]
pub(crate) struct DrainGate {
    state: Mutex<State>,
    changed: Notify,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    is_closed: bool,
    in_flight: usize,
    /// Number of requests that have entered so far.
    entries: u64,
}

/// Keeps a request in flight until dropped.
pub(crate) struct InFlightGuard(Arc<DrainGate>);

// === impl DrainGate ===

impl DrainGate {
    /// Enters the gate, or returns `None` if it is closed.
    pub(crate) fn enter(self: &Arc<Self>) -> Option<InFlightGuard> {
        let mut state = self.state();
        if state.is_closed {
            return None;
        }
        state.in_flight += 1;
        state.entries += 1;
        Some(InFlightGuard(self.clone()))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.state().is_closed
    }

    /// Returns `true` if no request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.state().in_flight == 0
    }

    /// Closes the gate if no request is in flight and `may_close` returns `true`.
    ///
    /// If a request enters in the meantime, the gate stays open. Returns `true` if the gate is now closed, including if it was closed
    /// before.
    pub(crate) fn close_if_idle(&self, may_close: impl FnOnce() -> bool) -> bool {
        let snapshot = *self.state();
        if snapshot.is_closed {
            return true;
        }
        if snapshot.in_flight > 0 || !may_close() {
            return false;
        }
        let is_closed = {
            let mut state = self.state();
            state.is_closed |= state.entries == snapshot.entries;
            state.is_closed
        };
        self.notify_changed();
        is_closed
    }

    /// Closes the gate once it is idle. Returns as soon as this or another task has closed it.
    pub(crate) async fn close_when_idle(&self, may_close: impl Fn() -> bool) {
        wait_until(&self.changed, || self.close_if_idle(&may_close)).await;
    }

    /// Waits until the gate is closed, or is idle and `may_close` returns `true`. Does not close it.
    pub(crate) async fn wait_until_idle(&self, may_close: impl Fn() -> bool) {
        let is_done = || {
            let snapshot = *self.state();
            snapshot.is_closed || snapshot.in_flight == 0 && may_close()
        };
        wait_until(&self.changed, is_done).await;
    }

    /// Closes the gate, even if requests are in flight.
    pub(crate) fn close(&self) {
        self.state().is_closed = true;
        self.notify_changed();
    }

    /// Wakes the tasks waiting for the gate, because the conditions they check may have changed.
    pub(crate) fn notify_changed(&self) {
        self.changed.notify_waiters();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

// === impl InFlightGuard ===

impl InFlightGuard {
    /// Returns `true` if the gate is closed, for example because its session was relinquished.
    pub(crate) fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let is_last = {
            let mut state = self.0.state();
            state.in_flight -= 1;
            state.in_flight == 0
        };
        if is_last {
            self.0.notify_changed();
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
    fn no_request_enters_a_closed_gate() {
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
    fn a_request_during_the_check_keeps_the_gate_open() {
        let gate = Arc::new(DrainGate::default());
        let enter_and_exit = || {
            drop(gate.enter().unwrap());
            true
        };
        assert!(!gate.close_if_idle(enter_and_exit) && !gate.is_closed());
        assert!(gate.close_if_idle(|| true));
    }

    #[test]
    fn closing_the_gate_when_idle_wakes_all_waiting_tasks() {
        let gate = Arc::new(DrainGate::default());
        let in_flight = gate.enter().unwrap();
        let mut waiting = [(); 2].map(|()| Box::pin(gate.close_when_idle(|| true)));
        assert!(waiting.iter_mut().all(|wait| wait.now_or_never().is_none()));
        drop(in_flight);
        assert!(waiting.iter_mut().all(|wait| wait.now_or_never().is_some()));
    }

    #[test]
    fn the_gate_can_be_closed_while_requests_are_in_flight() {
        let gate = Arc::new(DrainGate::default());
        let in_flight = gate.enter().unwrap();
        let mut wait = Box::pin(gate.close_when_idle(|| true));
        assert!((&mut wait).now_or_never().is_none());
        gate.close();
        assert!(wait.now_or_never().is_some() && gate.enter().is_none());
        drop(in_flight);
        assert!(gate.is_closed());
    }

    /// One thread keeps entering the gate until another one closes it, when no request may be in flight.
    #[test]
    fn no_request_is_in_flight_once_the_gate_was_closed_when_idle() {
        for _ in 0..2_000 {
            let gate = Arc::new(DrainGate::default());
            let other = gate.clone();
            let entering = std::thread::spawn(move || {
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
            assert_eq!(gate.state().in_flight, 0);
            entering.join().unwrap();
        }
    }
}
