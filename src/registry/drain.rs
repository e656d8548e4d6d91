//! Tracks what a drain waits for, and finds what it has to end.

use std::sync::{Arc, atomic::Ordering};

use super::{Call, Registry, StreamHandle, Tracked};

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    /// Starts tracking completions. Returns how many calls have ended without a cancellation since the first drain started.
    pub(crate) fn begin_drain(&self) -> usize {
        self.sessions.shared.totals.track_completions();
        self.completions_since(0)
    }

    /// Returns how many calls have ended without a cancellation since `before` was counted.
    pub(crate) fn completions_since(&self, before: usize) -> usize {
        let completions = self.sessions.shared.totals.completions();
        completions.saturating_sub(before)
    }

    /// Counts an answer as being on its way to its client.
    pub(crate) fn begin_delivery(&self) {
        self.deliveries.fetch_add(1, Ordering::AcqRel);
    }

    /// Stops counting an answer, and wakes the drains if no other answer is on its way.
    pub(crate) fn end_delivery(&self) {
        if self.deliveries.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.sessions.ended.notify_waiters();
        }
    }

    /// Returns `true` if answers to ended calls are still on their way to clients.
    pub(crate) fn is_delivering(&self) -> bool {
        self.deliveries.load(Ordering::Acquire) > 0
    }

    /// Closes the registry. Returns its in-flight calls and registered streams.
    ///
    /// Calls and streams started later are ended at once.
    pub(crate) fn close(&self) -> (Vec<Call<T>>, Vec<Arc<dyn StreamHandle>>) {
        // Set the flag before the scan. A new call or stream is added under a lock that the scan also takes, and checks the flag
        // afterwards, so either the scan finds it, or it finds the flag set.
        self.closed.store(true, Ordering::Release);
        let calls = self.scan_calls(|id, entry| Some((id, entry.call.clone())));
        (calls.collect(), self.streams().take())
    }
}
