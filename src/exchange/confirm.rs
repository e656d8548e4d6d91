//! Consults the layer's `confirm` callback, if any, before cancelling an orphan.
//!
//! 1. While a confirmation is pending, the client can still resume the call, and another cancellation can still end it. In both
//!    cases, the decision is ignored ([`ExpiryToken`]).
//! 2. If `confirm` panics or times out, or its runtime shuts down, the cancellation is postponed by the call's grace period.
//! 3. After [`Confirmation::Cancel`], the timer checks the call once more before cancelling it. `SessionClosed` cancels the call
//!    immediately.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::{cancel::Cancel, state::Exchange};
use crate::{
    call::{CallId, CancelReason},
    catch_panic::catch_panic,
    confirm::{Confirm, Confirmation, Confirming, Orphan},
    registry::ExpiryToken,
    timer::{Migration, migrating_timeout},
};

/// Maximum time for a confirmation, after which the cancellation is postponed.
pub(crate) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum postponement, without which `Postpone(Duration::ZERO)` could cause a busy loop.
pub(crate) const MIN_POSTPONE: Duration = Duration::from_millis(100);

/// Maximum postponement, short enough that `Instant::now() + MAX_POSTPONE` cannot overflow.
const MAX_POSTPONE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// A pending confirmation, which applies its `decision` when dropped.
///
/// Until the future returned by `confirm` has completed, the decision is to postpone by the grace period.
struct PendingConfirmation {
    exchange: Arc<Exchange>,
    id: CallId,
    expiry: ExpiryToken,
    decision: Confirmation,
}

// === impl Exchange ===

impl Exchange {
    /// Requests confirmation that an orphan may be cancelled.
    ///
    /// Does nothing if the call has ended or its grace period is no longer expired.
    #[cold]
    pub(super) fn request_confirmation(self: &Arc<Self>, id: CallId, confirm: &Confirm) {
        let request = self.with_session(|session| {
            Some((
                session.expiry(id)?,
                session.detachment(id)?,
                session.resume_window(id)?,
            ))
        });
        // If any of these is missing, the client has resumed or the call has ended.
        let (Some((expiry, detachment, grace)), Some(call)) = (request.flatten(), self.call(id))
        else {
            return;
        };
        let pending = PendingConfirmation {
            exchange: self.clone(),
            id,
            expiry,
            decision: Confirmation::Postpone(grace),
        };
        let orphan = Orphan {
            call,
            detachment,
            grace,
        };
        if let Some(confirming) = catch_panic(|| confirm(&orphan)) {
            let timer = self.shared.registry.timer();
            timer.spawn(Migration::BeforeStart, pending.await_decision(confirming));
        }
    }
}

// === impl PendingConfirmation ===

impl PendingConfirmation {
    async fn await_decision(mut self, confirming: Confirming) {
        if let Some(decision) = migrating_timeout(CONFIRM_TIMEOUT, confirming).await {
            self.decision = decision;
        }
    }
}

impl Drop for PendingConfirmation {
    fn drop(&mut self) {
        let (id, expiry, now) = (self.id, self.expiry, Instant::now());
        match self.decision {
            Confirmation::Cancel => {
                self.exchange
                    .with_session(|session| session.confirm(id, expiry, now));
            }
            Confirmation::Postpone(wait) => {
                let until = now + wait.clamp(MIN_POSTPONE, MAX_POSTPONE);
                self.exchange
                    .with_session(|session| session.postpone(id, expiry, until));
            }
            Confirmation::SessionClosed => {
                let cancel = Cancel::confirmed(CancelReason::SessionClosed, expiry);
                self.exchange.cancel(id, cancel);
            }
        }
    }
}
