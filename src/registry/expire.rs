//! What a registry does when a time is over.

use std::sync::Arc;

use tokio::time::Instant;

use super::{
    Registry, Tracked,
    core::Expired,
    driver::{Expire, Noticed},
    watch::{Due, Unwatch, WatchId},
};
use crate::{call::CancelReason, quietly::quietly};

impl<T: Tracked> Expire for Registry<T> {
    fn due(&self) -> Option<Instant> {
        self.state().awake_at
    }

    fn expire(self: Arc<Self>, now: Instant, noticed: Noticed) -> Option<Instant> {
        let (expired, due, ended) = {
            let mut state = self.state();
            let before = state.core.len();
            let expired = state.core.expire_when(now, noticed == Noticed::Late);
            let ended = self.note_calls(&state, before);
            (expired, state.watches.take_due(now), ended)
        };
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
        let look = |due: Due| quietly(|| due.look(now, noticed)).flatten();
        let again: Vec<_> = due.into_iter().filter_map(look).collect();
        let (next, is_news) = {
            let mut state = self.state();
            for again in again {
                state.watches.again(again);
            }
            let next = state.next_deadline();
            // Another timer may have looked meanwhile, and sleep past what was taken out here.
            let is_news = next.is_some_and(|next| state.awake_at.is_none_or(|at| next < at));
            state.awake_at = next;
            (next, is_news)
        };
        if is_news {
            self.driver.wake();
        }
        next
    }
}

impl<T: Tracked> Unwatch for Registry<T> {
    fn unwatch(&self, id: WatchId) {
        let _gone = self.with_state(|state| state.watches.remove(id));
    }
}
