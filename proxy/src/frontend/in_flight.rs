//! Counts a connection's requests in flight, each from its head to the end of its response.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::sync::Notify;

/// Counts requests in flight. Clones share the count.
#[derive(Debug, Clone, Default)]
pub(super) struct InFlight(Arc<Requests>);

#[derive(Debug, Default)]
struct Requests {
    count: AtomicUsize,
    started: AtomicUsize,
    none_left: Notify,
}

/// Marks a request as in flight, until this guard is dropped.
#[derive(Debug)]
pub(super) struct InFlightGuard(InFlight);

// === impl InFlight ===

impl InFlight {
    /// Counts a request until the returned guard is dropped.
    pub(super) fn start(&self) -> InFlightGuard {
        self.0.started.fetch_add(1, Ordering::Relaxed);
        self.0.count.fetch_add(1, Ordering::AcqRel);
        InFlightGuard(self.clone())
    }

    /// Returns the total number of requests started so far, including those that have ended.
    pub(super) fn started(&self) -> usize {
        self.0.started.load(Ordering::Relaxed)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.count.load(Ordering::Acquire) == 0
    }

    /// Waits until no request is in flight.
    pub(super) async fn wait_until_empty(&self) {
        while !self.is_empty() {
            self.0.none_left.notified().await;
        }
    }
}

// === impl InFlightGuard ===

impl Drop for InFlightGuard {
    fn drop(&mut self) {
        let requests = &*self.0.0;
        if requests.count.fetch_sub(1, Ordering::AcqRel) == 1 {
            requests.none_left.notify_one();
        }
    }
}
