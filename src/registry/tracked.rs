//! The trait of what a registry tracks.

use std::sync::Arc;

use super::core::Finished;
use crate::call::{CallId, CancelReason};

/// What is registered for a call, and hears when its time is over. Called with no lock held.
pub(crate) trait Tracked: Send + Sync + 'static {
    /// Nobody will see the end of the call: it left.
    fn on_untracked(&self, id: CallId, finished: Finished);

    /// The time that its client had to come back is over. Somebody may have to be asked before it is cancelled.
    fn on_grace_expired(self: &Arc<Self>, id: CallId);

    /// Its time is over.
    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason);
}
