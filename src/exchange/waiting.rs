//! Waiting for what becomes of a call: that it is accepted, or that it ends.

use std::{pin::pin, time::Duration};

use super::state::{Exchange, PendingCancel, SessionState};
use crate::call::CallId;

/// How long a resume waits for an answer that it has overtaken: 1 s. It takes a poll of the reader, or until
/// the server notices that the old connection is gone.
const RACED_ANSWER_TIMEOUT: Duration = Duration::from_secs(1);

// === impl Exchange ===

impl Exchange {
    /// Waits until a call is accepted, or not in flight any more, or waits for a pending cancel itself.
    pub(super) async fn wait_until_accepted_or_ended(&self, id: CallId) {
        let is_undecided = |core: &mut SessionState| core.is_unaccepted(id);
        self.wait_until(|| match self.pending_cancel() {
            PendingCancel::Awaited => true,
            PendingCancel::Unknown => !self.is_in_flight(id),
            PendingCancel::None => !self.with_session(is_undecided).unwrap_or(false),
        })
        .await;
    }

    /// Waits for a change of a call, of which [`tell_decided`](Self::tell_decided) tells.
    pub(super) async fn wait_until(&self, has_come: impl Fn() -> bool) {
        let decided = self.changed.get_or_init(Box::default);
        loop {
            // Listens before it looks.
            let mut notified = pin!(decided.notified());
            notified.as_mut().enable();
            if has_come() {
                return;
            }
            notified.await;
        }
    }

    /// A call of it was accepted, or has ended: tells who waits for that.
    pub(super) fn notify_changed(&self) {
        // Whoever comes to wait after this look finds how it is.
        if let Some(decided) = self.changed.get() {
            decided.notify_waiters();
        }
    }

    /// Waits until a call has ended, but not for long. Its session manager let go of it already, so its answer
    /// must be on its way through our hands.
    pub(crate) async fn wait_for_answer(&self, id: CallId) {
        // Whatever becomes of it, the caller looks again.
        let _in_time = tokio::time::timeout(RACED_ANSWER_TIMEOUT, self.wait_until_ended(id)).await;
    }

    /// Waits until a call is not in flight any more.
    pub(crate) async fn wait_until_ended(&self, id: CallId) {
        self.wait_until(|| !self.is_in_flight(id)).await;
    }
}
