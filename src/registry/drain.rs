//! The drain: what it waits for, and what is left.

use std::sync::{Arc, atomic::Ordering};

use super::{Call, Registry, StreamHandle, Tracked};

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    /// Somebody waits for calls to end. How many have ended by themselves so far, since somebody waits.
    pub(crate) fn begin_drain(&self) -> usize {
        self.sessions.common.totals.track_completions();
        self.completions_since(0)
    }

    pub(crate) fn completions_since(&self, before: usize) -> usize {
        let ended = self.sessions.common.totals.completions();
        ended.saturating_sub(before)
    }

    pub(crate) fn begin_delivery(&self) {
        self.deliveries.fetch_add(1, Ordering::AcqRel);
    }

    pub(crate) fn end_delivery(&self) {
        if self.deliveries.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.sessions.ended.notify_waiters();
        }
    }

    /// Whether answers of calls that have ended are on their way to their clients.
    pub(crate) fn is_delivering(&self) -> bool {
        self.deliveries.load(Ordering::Acquire) > 0
    }

    /// All that is left. Nothing new stays from now on.
    pub(crate) fn close(&self) -> (Vec<Call<T>>, Vec<Arc<dyn StreamHandle>>) {
        // Before anybody looks for calls and streams: one of the two sees the other.
        self.closed.store(true, Ordering::Release);
        let calls = self.scan_calls(|id, entry| Some((id, entry.call.clone())));
        (calls.collect(), self.streams().take())
    }
}
