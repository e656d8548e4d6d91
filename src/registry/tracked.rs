//! The trait for values tracked by a registry.

use std::sync::Arc;

use super::core::Finished;
use crate::call::{CallId, CancelReason};

/// A value registered for a call, and notified when the call's deadlines pass. Its methods are called with no lock held.
pub(crate) trait Tracked: Send + Sync + 'static {
    /// Called when the call has been removed from the registry before its end.
    fn on_untracked(&self, id: CallId, finished: Finished);

    /// Called when the call's grace period has expired. The cancellation may still need a confirmation.
    fn on_grace_expired(self: &Arc<Self>, id: CallId);

    /// Called when the call timeout has passed, or when the cancellation of an orphan has been confirmed.
    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason);
}
