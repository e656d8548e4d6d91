//! The trait for the values that a registry tracks.

use std::sync::Arc;

use super::core::Finished;
use crate::call::{CallId, CancelReason};

/// A value that is registered for a call and notified of the call's deadlines. Its methods are called with no lock held.
pub(crate) trait Tracked: Send + Sync + 'static {
    /// The call has been removed from the registry before its end.
    fn on_untracked(&self, id: CallId, finished: Finished);

    /// The call's grace period has expired. The cancellation may still need a confirmation.
    fn on_grace_expired(self: &Arc<Self>, id: CallId);

    /// The call timeout has passed, or the cancellation after a grace period has been confirmed.
    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason);
}
