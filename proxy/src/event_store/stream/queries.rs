//! The state of a stream, for its session and for the writer.

use std::time::Duration;

use tokio::time::Instant;

use super::Stream;

/// How much longer than it was asked to wait a client may take to resume while the program ends: 1 s.
const RESUME_MARGIN: Duration = Duration::from_secs(1);

// === impl Stream ===

impl Stream {
    /// Whether a client reads it.
    pub fn is_attached(&self) -> bool {
        self.state().ring.has_reader()
    }

    /// Returns `true` if all clients that read it have left.
    pub(crate) fn lost_all_readers(&self) -> bool {
        self.state().ring.lost_all_readers()
    }

    /// Returns `true` if there ever was an event, from which a client may resume.
    pub(crate) fn has_events(&self) -> bool {
        self.state().ring.has_events()
    }

    /// Whether there is an event after this one.
    pub(in crate::event_store) fn has_more(&self, after: u64) -> bool {
        self.state().ring.has_more(after)
    }

    /// Whether its call was answered.
    pub fn is_answered(&self) -> bool {
        self.state().ring.is_answered()
    }

    /// Whether it is for a call whose answer is still to come, or to be read by the client that is there, or that has not had
    /// the time to resume.
    pub(in crate::event_store) fn is_in_progress(&self) -> bool {
        if self.0.call.is_none() {
            return false;
        }
        let state = self.state();
        let has_time = state.until.is_none_or(|until| {
            Instant::now() + self.0.retention < until + state.ring.retry() + RESUME_MARGIN
        });
        let is_awaited = !state.is_cancelled && state.ring.has_unread_answer();
        state.ring.is_in_progress() || (is_awaited && has_time)
    }
}
