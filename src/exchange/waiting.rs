//! Waits for calls to be accepted or to end.

use std::time::Duration;

use super::state::{Exchange, PendingCancel, SessionState};
use crate::{call::CallId, wait_until::wait_until};

/// Maximum time a resume waits for an answer that it has overtaken.
///
/// The answer arrives with the reader's next poll, or once the server has detected that the old connection is closed.
const RACED_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

// === impl Exchange ===

impl Exchange {
    /// Waits until a call is accepted, has ended, or is itself waiting for a pending cancellation.
    pub(super) async fn wait_until_accepted_or_ended(&self, id: CallId) {
        let is_unaccepted = |session: &mut SessionState| session.is_unaccepted(id);
        self.wait_until(|| match self.pending_cancel() {
            PendingCancel::Awaited => true,
            PendingCancel::Unknown => !self.is_in_flight(id),
            PendingCancel::None => !self.with_session(is_unaccepted).unwrap_or(false),
        })
        .await;
    }

    /// Waits until `is_met` returns `true`, rechecking after each [`notify_changed`](Self::notify_changed).
    pub(super) async fn wait_until(&self, is_met: impl Fn() -> bool) {
        wait_until(self.changed.get_or_init(Box::default), is_met).await;
    }

    /// Wakes the tasks waiting for the call's state to change.
    ///
    /// Called when the call has been accepted or has ended, or when its [`PendingCancel`] has become known.
    pub(super) fn notify_changed(&self) {
        // A task that starts waiting after this check sees the new state.
        if let Some(changed) = self.changed.get() {
            changed.notify_waiters();
        }
    }

    /// Waits up to [`RACED_ANSWER_TIMEOUT`] for a call to end.
    ///
    /// Called after a session manager has refused to resume the call. rmcp's own manager refuses once it has sent the answer, so the
    /// answer is already on its way through the layer.
    pub(crate) async fn wait_for_answer(&self, id: CallId) {
        // Ignore a timeout, because the caller rechecks either way.
        let _ = tokio::time::timeout(RACED_ANSWER_TIMEOUT, self.wait_until_ended(id)).await;
    }

    /// Waits until a call is no longer in flight.
    pub(crate) async fn wait_until_ended(&self, id: CallId) {
        self.wait_until(|| !self.is_in_flight(id)).await;
    }
}
