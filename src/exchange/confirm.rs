//! The question before an orphan is cancelled, where the layer has somebody to ask.
//!
//! 1. Nothing happens to the call while it is asked: a client that resumes has it, and the answer then means nothing
//!    ([`Expiry`]).
//! 2. No answer is an answer: the call is put off. That holds for a panic, for one that takes too long, and for a runtime that
//!    ends meanwhile.
//! 3. A cancel that was confirmed waits for another look at the clock.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;

use super::state::{Exchange, SessionState};
use crate::{
    call::{CallId, CancelReason},
    catch_panic::catch_panic,
    confirm::{Confirm, Confirmation, Confirming, Orphan},
    registry::ExpiryToken,
    timer::{Migration, migrating_timeout},
};

/// How long an answer may take: 10 s. Then the call is put off.
pub(crate) const CONFIRM_TIMEOUT: Duration = Duration::from_secs(10);

/// The least that a call is put off: 100 ms, so that an answer that says nothing does not keep a processor busy.
pub(crate) const MIN_POSTPONE: Duration = Duration::from_millis(100);

/// The most that a call is put off: 10 years. Chosen because every clock can be set to it.
const MAX_POSTPONE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// A question that was not answered yet. Dropped, it puts its call off.
struct PendingConfirmation {
    exchange: Arc<Exchange>,
    id: CallId,
    expiry: ExpiryToken,
    answer: Confirmation,
}

// === impl Exchange ===

impl Exchange {
    /// Asks whether an orphan may be cancelled.
    #[cold]
    pub(super) fn request_confirmation(self: &Arc<Self>, id: CallId, confirm: &Confirm) {
        let asked = self
            .with_session(|core| Some((core.expiry(id)?, core.detachment(id)?, core.grace(id)?)));
        // Else its client came back in this very moment.
        let (Some((expiry, detachment, grace)), Some(call)) = (asked.flatten(), self.call(id))
        else {
            return;
        };
        let question = PendingConfirmation {
            exchange: self.clone(),
            id,
            expiry,
            answer: Confirmation::Postpone(grace),
        };
        let orphan = Orphan {
            call,
            detachment,
            grace,
        };
        if let Some(answer) = catch_panic(|| confirm(&orphan)) {
            let timer = self.shared.registry.timer();
            timer.spawn(Migration::BeforeStart, question.await_answer(answer));
        }
    }

    /// Cancels an orphan of which somebody said so, if that still holds.
    fn cancel_confirmed(self: &Arc<Self>, id: CallId, expiry: ExpiryToken, reason: CancelReason) {
        let span = self.span();
        let finish = |core: &mut SessionState, ended| {
            if core.expiry(id) == Some(expiry) {
                core.finish_due(id, ended)
            } else {
                None
            }
        };
        if let Some(injection) = self.cancel_detached(None, id, reason, finish) {
            self.inject(id, injection, span);
        }
    }
}

// === impl PendingConfirmation ===

impl PendingConfirmation {
    async fn await_answer(mut self, answer: Confirming) {
        if let Some(answer) = migrating_timeout(CONFIRM_TIMEOUT, answer).await {
            self.answer = answer;
        }
    }
}

impl Drop for PendingConfirmation {
    fn drop(&mut self) {
        let (id, expiry, now) = (self.id, self.expiry, Instant::now());
        match self.answer {
            Confirmation::Cancel => {
                self.exchange
                    .with_session(|core| core.confirm(id, expiry, now));
            }
            Confirmation::Postpone(wait) => {
                let until = now + wait.clamp(MIN_POSTPONE, MAX_POSTPONE);
                self.exchange
                    .with_session(|core| core.postpone(id, expiry, until));
            }
            Confirmation::SessionClosed => {
                self.exchange
                    .cancel_confirmed(id, expiry, CancelReason::SessionClosed);
            }
        }
    }
}
