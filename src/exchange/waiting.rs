//! Waits until a call is accepted or has ended.

use std::time::Duration;

use super::state::{Exchange, PendingCancel, SessionState};
use crate::{call::CallId, wait_until::wait_until};

/// Maximum time a resume waits for an answer that it has overtaken: 1 s.
///
/// Chosen because the answer arrives with the next poll of the reader, or once the server detects that the old connection is closed.
const RACED_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

// === impl Exchange ===

impl Exchange {
    /// Waits until a call is accepted, has ended, or waits for a pending cancel itself.
    pub(super) async fn wait_until_accepted_or_ended(&self, id: CallId) {
        let is_unaccepted = |session: &mut SessionState| session.is_unaccepted(id);
        self.wait_until(|| match self.pending_cancel() {
            PendingCancel::Awaited => true,
            PendingCancel::Unknown => !self.is_in_flight(id),
            PendingCancel::None => !self.with_session(is_unaccepted).unwrap_or(false),
        })
        .await;
    }

    /// Waits until `is_met` returns `true`, which is checked after each [`notify_changed`](Self::notify_changed).
    pub(super) async fn wait_until(&self, is_met: impl Fn() -> bool) {
        wait_until(self.changed.get_or_init(Box::default), is_met).await;
    }

    /// Wakes the waiting tasks after a change of a call.
    ///
    /// The call was accepted or has ended, or its [`PendingCancel`] is known.
    pub(super) fn notify_changed(&self) {
        // A task that starts to wait after this check finds the new state.
        if let Some(changed) = self.changed.get() {
            changed.notify_waiters();
        }
    }

    /// Waits until a call has ended, for at most [`RACED_ANSWER_TIMEOUT`].
    ///
    /// Called after a session manager has refused a resume of the call. rmcp's own manager refuses once it has sent the answer, so
    /// the answer is on its way through the layer.
    pub(crate) async fn wait_for_answer(&self, id: CallId) {
        // The caller checks again in either case.
        let _in_time = tokio::time::timeout(RACED_ANSWER_TIMEOUT, self.wait_until_ended(id)).await;
    }

    /// Waits until a call is no longer in flight.
    pub(crate) async fn wait_until_ended(&self, id: CallId) {
        self.wait_until(|| !self.is_in_flight(id)).await;
    }
}
