//! Untracked requests with the same id as an in-flight call.

use super::{SessionState, entry::CallKey};
use crate::call::{CallId, RequestId, Scope};

// === impl SessionState ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// Counts an untracked request with the same id as an in-flight call, and returns that call.
    ///
    /// Returns `None` if no accepted in-flight call has the id.
    ///
    /// Until [`end_contest`](Self::end_contest), no cancellation for the call may be injected, because the server could apply it to the
    /// untracked request instead (invariant 2).
    pub(crate) fn contest(&mut self, scope: &Scope, request: &RequestId) -> Option<(CallId, T)> {
        let (id, call) = self.find(scope, request)?;
        let key = self.key_mut(id)?;
        key.contests = key.contests.saturating_add(1);
        Some((id, call))
    }

    /// Removes a request counted by [`contest`](Self::contest).
    pub(crate) fn end_contest(&mut self, id: CallId) {
        if let Some(key) = self.key_mut(id) {
            key.contests = key.contests.saturating_sub(1);
        }
    }

    fn key_mut(&mut self, id: CallId) -> Option<&mut CallKey> {
        self.calls.get_mut(id)?.key.as_mut()
    }
}
