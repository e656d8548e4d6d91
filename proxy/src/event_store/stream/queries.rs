//! Queries about a stream's state.

use std::time::Duration;

use tokio::time::Instant;

use super::Stream;

/// How long a shutdown waits for a client to resume, beyond the client's reconnect delay.
const RESUME_MARGIN: Duration = Duration::from_secs(1);

// === impl Stream ===

impl Stream {
    /// Returns `true` if a client is reading the stream.
    pub fn is_attached(&self) -> bool {
        self.state().ring.has_reader()
    }

    /// Returns when a client last stopped reading the stream, or `None` if one is reading it now.
    ///
    /// The inner value is `None` if the stream has never had a client.
    pub(in crate::event_store) fn unread_since(&self) -> Option<Option<Instant>> {
        let state = self.state();
        (!state.ring.has_reader()).then_some(state.detached_at)
    }

    /// Returns `true` if the stream has had clients, and all of them have disconnected.
    pub(crate) fn lost_all_readers(&self) -> bool {
        self.state().ring.lost_all_readers()
    }

    /// Returns how many clients have disconnected from the stream.
    pub(crate) fn disconnects(&self) -> u64 {
        self.state().ring.detached_readers()
    }

    /// Returns `true` if there has ever been an event for a client to resume from.
    pub(crate) fn has_events(&self) -> bool {
        self.state().ring.has_events()
    }

    /// Returns `true` if there is an event after this one.
    pub(in crate::event_store) fn has_more(&self, after: u64) -> bool {
        self.state().ring.has_more(after)
    }

    /// Returns `true` if the stream's call has been answered.
    pub fn is_answered(&self) -> bool {
        self.state().ring.is_answered()
    }

    /// Returns `true` if a shutdown should wait for this stream.
    ///
    /// It should wait while the answer to the stream's call is pending or being read, and as long as the client may still
    /// resume within the reconnect delay. It never waits for a standalone stream.
    pub(in crate::event_store) fn is_in_progress(&self) -> bool {
        if self.0.call.is_none() {
            return false;
        }
        let state = self.state();
        let may_resume = state.until.is_none_or(|until| {
            Instant::now() + self.0.retention < until + state.ring.retry() + RESUME_MARGIN
        });
        let is_awaited = !state.is_cancelled && state.ring.has_unread_answer();
        state.ring.is_in_progress() || (is_awaited && may_resume)
    }
}
