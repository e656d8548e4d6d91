//! The end of a server: what is waited for, and what is left.

use std::sync::{Arc, atomic::Ordering};

use super::{Call, Outlet, Registry, Stage, Tracked};

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    /// Somebody waits for calls to end. How many have ended by themselves so far.
    pub(crate) fn begin_drain(&self) -> usize {
        {
            let mut state = self.state();
            if state.stage == Stage::Open {
                state.stage = Stage::Draining;
            }
        }
        self.ended_since(0)
    }

    pub(crate) fn ended_since(&self, before: usize) -> usize {
        let finished = self.state().core.finished();
        let drained = self.drained.load(Ordering::Acquire);
        finished.saturating_sub(drained).saturating_sub(before)
    }

    /// All that is left. Nothing new stays from now on.
    pub(crate) fn close(&self) -> (Vec<Call<T>>, Vec<Arc<dyn Outlet>>) {
        let mut state = self.state();
        state.stage = Stage::Closed;
        // Before anybody looks for streams of these calls: one of the two sees the other.
        self.closed.store(true, Ordering::Release);
        let calls = state.core.calls();
        let calls = calls.map(|(id, entry)| (id, entry.call.clone())).collect();
        (calls, state.streams.take())
    }
}
