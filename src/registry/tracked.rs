//! The trait of the values that a registry tracks.

use std::sync::Arc;

use super::core::Finished;
use crate::call::{CallId, CancelReason};

/// A value that is registered for a call, and notified of its deadlines. Its methods are called with no lock held.
pub(crate) trait Tracked: Send + Sync + 'static {
    /// The call was removed from the registry before it ended.
    fn on_untracked(&self, id: CallId, finished: Finished);

    /// The call's grace has expired. The cancel may need a confirmation.
    fn on_grace_expired(self: &Arc<Self>, id: CallId);

    /// The call timeout has passed, or the cancel after a grace is confirmed.
    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason);
}
