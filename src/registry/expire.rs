//! What a registry does when a time is over.

use tokio::time::Instant;

use super::{Registry, Tracked, core::Expired};
use crate::{
    call::CancelReason,
    quietly::quietly,
    timer::{NextLook, Noticed, Timed},
};

impl<T: Tracked> Registry<T> {
    /// Has the timer look no later than this.
    pub(super) fn look_by(&self, at: Instant) {
        if let Some(ticket) = self.ticket.get() {
            return ticket.by(at);
        }
        // Not under the lock of `ticket`: others are told here.
        let first = self.timer.set(at, self.this.clone());
        if self.ticket.set(first).is_err()
            && let Some(ticket) = self.ticket.get()
        {
            ticket.by(at);
        }
    }
}

impl<T: Tracked> Timed for Registry<T> {
    fn look(&self, now: Instant, noticed: Noticed) -> Option<NextLook> {
        let (expired, next, ended) = {
            let mut state = self.state();
            let before = state.core.len();
            let expired = state.core.expire_when(now, noticed == Noticed::Late);
            let ended = self.note_calls(&state, before);
            state.awake_at = state.core.next_deadline();
            (expired, state.awake_at, ended)
        };
        // Before anybody hears of what is over: that may last, and others may look meanwhile.
        if let Some(at) = next {
            self.look_by(at);
        }
        if ended {
            self.ended.notify_waiters();
        }
        for (id, exchange, expired) in expired {
            // What is let go of is the user's. A destructor that panics harms no other call.
            quietly(|| match expired {
                Expired::Grace => exchange.expired(id, CancelReason::Orphaned),
                Expired::Deadline => exchange.expired(id, CancelReason::TimedOut),
                Expired::Unseen(finished) => exchange.left(id, finished),
            });
        }
        // Its ticket knows already.
        None
    }

    fn judges_lateness(&self) -> bool {
        true
    }
}
