//! Handles calls whose grace period or timeout has expired, or that are to be untracked.

use std::sync::Arc;

use super::{cancel::Cancel, state::Exchange};
use crate::{
    call::{CallId, CancelReason, DetachCause},
    registry::{Finished, Tracked},
};

impl Tracked for Exchange {
    fn on_untracked(&self, id: CallId, finished: Finished) {
        self.end_untracked(id, finished);
    }

    fn on_grace_expired(self: &Arc<Self>, id: CallId) {
        let cause = self.with_session(|session| session.cause_without_grace(id));
        match (cause.flatten(), &self.shared.options.confirm) {
            (None, Some(confirm)) => self.request_confirmation(id, &**confirm),
            (cause, _) => {
                let reason = cause.map_or(CancelReason::Orphaned, DetachCause::reason);
                self.cancel(id, Cancel::expired(reason));
            }
        }
    }

    fn on_expired(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let cancel = match reason {
            CancelReason::TimedOut => Cancel::now(reason),
            _ => Cancel::expired(reason),
        };
        self.cancel(id, cancel);
    }
}
