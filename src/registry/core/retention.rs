//! Retention of ended calls, for clients that resume them.
//!
//! A client that was disconnected may resume a stream whose call has ended meanwhile. The retained call has what the client then
//! gets: the answer, or the error of a cancelled call. The client may resume any number of times.
//!
//! The retained calls of a delivery state are in one queue, in order of completion. They are removed from its head. A retained call
//! may therefore outlive its own deadline, if an older one has a later deadline.
//!
//! There are two limits, in bytes of a session id and in bytes of all sessions. A call that cannot fit is not retained, and none is
//! evicted for it: one that is larger than a limit, or a delivered one beside the undelivered ones. For other calls, the oldest
//! delivered ones of the session are evicted first, and then its oldest undelivered ones. [`EvictedAnswer`] reports the latter:
//! their clients get what they would get without this crate. If all sessions together exceed their limit, the registry evicts
//! ([`SessionState::shrink_retained`](super::SessionState::shrink_retained)).
//!
//! Retained calls are in no map: a late client is rare, and searches those of its session only.

use std::{mem, sync::Arc};

use tokio::time::Instant;

use super::{
    super::totals::Totals,
    index::{EventId, KeyHash, StreamId},
    retained_call::{
        DeliveryState, EndedCall, PerDeliveryState, RetainedCall, RetainedOutcome, RetainedQueue,
    },
};
use crate::call::{CallId, Outcome};

/// An answer that was evicted, or not retained at all, although its client might have resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EvictedAnswer {
    pub(crate) call: CallId,
    /// The id of its session.
    pub(crate) session: Arc<str>,
    pub(crate) outcome: Outcome,
    /// Its size, as it was counted.
    pub(crate) bytes: usize,
}

/// Approximate cost of a retained call besides its answer and its texts, in bytes: its entry in a queue, 230 as measured where a
/// session has many. So a session has at most 2,048 of them.
pub(super) const RECORD_OVERHEAD: usize = 512;

/// Approximate further cost of the first retained call of a session, in bytes, because the session's entry would be removed without
/// it. As measured, a session with nothing but one retained call takes about 1,400. So there are at most 12,000 of them.
pub(super) const SESSION_OVERHEAD: usize = 832;

/// The retained calls of a session. Boxed, because most sessions have none and are large enough.
#[derive(Debug)]
pub(super) struct RetainedCalls<A>(Option<Box<RetainedQueues<A>>>);

#[derive(Debug)]
struct RetainedQueues<A> {
    by_state: PerDeliveryState<RetainedQueue<A>>,
    /// The number of the next retained call.
    next_number: u64,
    /// The answers that were evicted and are not reported yet.
    evicted: Vec<EvictedAnswer>,
}

// === impl RetainedCalls ===

impl<A> RetainedCalls<A> {
    /// Retains an ended call if it fits, and evicts what then exceeds the limit of the session. Returns `true` if an answer was
    /// evicted, or all sessions together exceed their limit.
    pub(super) fn retain(&mut self, id: &Arc<str>, ended: EndedCall<A>, totals: &Totals) -> bool {
        let queues = self.0.get_or_insert_default();
        let delivery = ended.delivery_state();
        let call = queues.retained_call(id, ended);
        if call.weight > queues.max_weight(delivery, totals) {
            queues.record_eviction(id, delivery, &call);
        } else {
            totals.add_bytes(delivery, call.weight);
            queues.by_state.of_mut(delivery).push(call);
            while queues.bytes() > totals.max_bytes_of_session() {
                queues.evict_oldest(id, queues.next_to_evict(), totals);
            }
        }
        !queues.evicted.is_empty() || totals.bytes() > totals.max_bytes()
    }

    /// Evicts the oldest of a delivery state until at most `max_bytes` of it are left.
    pub(super) fn shrink(
        &mut self,
        id: &Arc<str>,
        delivery: DeliveryState,
        max_bytes: usize,
        totals: &Totals,
    ) {
        if let Some(queues) = &mut self.0 {
            while queues.by_state.of(delivery).bytes() > max_bytes {
                queues.evict_oldest(id, delivery, totals);
            }
        }
    }

    /// Removes at most `max` of each delivery state that have expired by `now`.
    pub(super) fn remove_expired(&mut self, now: Instant, max: usize, totals: &Totals) {
        let Some(queues) = &mut self.0 else {
            return;
        };
        let is_due = |call: &RetainedCall<A>| call.until <= now;
        for delivery in DeliveryState::ALL {
            for _ in 0..max {
                if !queues.by_state.of(delivery).oldest().is_some_and(is_due) {
                    break;
                }
                queues.pop(delivery, totals);
            }
        }
    }

    /// Removes the retained calls of a session.
    pub(super) fn clear(&mut self, session: KeyHash, totals: &Totals) {
        if let Some(queues) = &mut self.0 {
            for delivery in DeliveryState::ALL {
                let bytes = queues.by_state.of_mut(delivery).clear(session);
                totals.remove_bytes(delivery, bytes);
            }
        }
    }

    /// Returns the outcome of the latest retained call that has an event.
    pub(super) fn outcome_of(
        &self,
        session: KeyHash,
        event: EventId,
    ) -> Option<&RetainedOutcome<A>> {
        let queues = self.0.as_ref()?;
        let latest = DeliveryState::ALL.map(|delivery| {
            queues
                .by_state
                .of(delivery)
                .latest_with_event(session, event)
        });
        let latest = latest.into_iter().flatten();
        let latest = latest.max_by_key(|call| call.number);
        latest.map(|call| &call.outcome)
    }

    pub(super) fn has_session(&self, session: KeyHash) -> bool {
        let queues = self.0.iter();
        let mut all = queues
            .flat_map(|queues| DeliveryState::ALL.map(|delivery| queues.by_state.of(delivery)));
        all.any(|records| records.has_session(session))
    }

    /// Returns `true` if an undelivered answer of a session is retained and has not expired.
    pub(super) fn has_undelivered_answers(&self, session: KeyHash, now: Instant) -> bool {
        let queues = self.0.as_ref();
        queues.is_some_and(|queues| {
            queues
                .by_state
                .of(DeliveryState::Undelivered)
                .has_answers(session, now)
        })
    }

    /// When the next retained call expires.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let queues = self.0.as_ref()?;
        let [delivered, undelivered] =
            DeliveryState::ALL.map(|delivery| queues.by_state.of(delivery).oldest());
        let earlier = delivered
            .zip(undelivered)
            .map(|(a, b)| a.until.min(b.until));
        earlier.or_else(|| Some(delivered.or(undelivered)?.until))
    }

    /// When the oldest of a delivery state expires.
    pub(super) fn earliest_expiry(&self, delivery: DeliveryState) -> Option<Instant> {
        let oldest = self.0.as_ref()?.by_state.of(delivery).oldest();
        oldest.map(|call| call.until)
    }

    pub(super) fn bytes_of(&self, delivery: DeliveryState) -> usize {
        let queues = self.0.as_ref();
        queues.map_or(0, |queues| queues.by_state.of(delivery).bytes())
    }

    /// Returns `true` if no call is retained, and no eviction is left to report.
    pub(super) fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|queues| {
            let is_empty = |delivery| queues.by_state.of(delivery).oldest().is_none();
            DeliveryState::ALL.into_iter().all(is_empty) && queues.evicted.is_empty()
        })
    }

    pub(super) fn take_evicted(&mut self) -> Vec<EvictedAnswer> {
        let queues = self.0.as_mut();
        queues.map_or_else(Vec::new, |queues| mem::take(&mut queues.evicted))
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        let queues = self.0.iter();
        queues
            .flat_map(|queues| {
                DeliveryState::ALL.map(|delivery| queues.by_state.of(delivery).len())
            })
            .sum()
    }
}

impl<A> Default for RetainedCalls<A> {
    fn default() -> Self {
        Self(None)
    }
}

// === impl RetainedQueues ===

impl<A> RetainedQueues<A> {
    fn retained_call(&mut self, id: &Arc<str>, ended: EndedCall<A>) -> RetainedCall<A> {
        let EndedCall {
            call,
            session,
            streams,
            completion: ended,
            ..
        } = ended;
        let texts = id.len() + ended.outcome.text_len();
        let session_too = match self.bytes() {
            0 => SESSION_OVERHEAD,
            _ => 0,
        };
        let number = self.next_number;
        self.next_number += 1;
        RetainedCall {
            number,
            call,
            session,
            weight: RECORD_OVERHEAD
                + session_too
                + ended.weight
                + texts
                + streams.len() * size_of::<StreamId>(),
            streams,
            outcome: ended.outcome,
            until: ended.until,
        }
    }

    /// Maximum weight of a call that can be retained, after the evictions that are allowed for it.
    fn max_weight(&self, delivery: DeliveryState, totals: &Totals) -> usize {
        let (total, session) = (totals.max_bytes(), totals.max_bytes_of_session());
        match delivery {
            DeliveryState::Undelivered => session.min(total),
            DeliveryState::Delivered => {
                let session =
                    session.saturating_sub(self.by_state.of(DeliveryState::Undelivered).bytes());
                session.min(total.saturating_sub(totals.bytes_of(DeliveryState::Undelivered)))
            }
        }
    }

    fn bytes(&self) -> usize {
        DeliveryState::ALL
            .map(|delivery| self.by_state.of(delivery).bytes())
            .iter()
            .sum()
    }

    /// The delivery state of which the oldest is evicted next.
    fn next_to_evict(&self) -> DeliveryState {
        match self.by_state.of(DeliveryState::Delivered).oldest() {
            Some(_) => DeliveryState::Delivered,
            None => DeliveryState::Undelivered,
        }
    }

    fn evict_oldest(&mut self, id: &Arc<str>, delivery: DeliveryState, totals: &Totals) {
        if let Some(call) = self.pop(delivery, totals) {
            self.record_eviction(id, delivery, &call);
        }
    }

    fn pop(&mut self, delivery: DeliveryState, totals: &Totals) -> Option<RetainedCall<A>> {
        let call = self.by_state.of_mut(delivery).pop()?;
        totals.remove_bytes(delivery, call.weight);
        Some(call)
    }

    #[cold]
    fn record_eviction(&mut self, id: &Arc<str>, delivery: DeliveryState, call: &RetainedCall<A>) {
        if delivery == DeliveryState::Undelivered {
            self.evicted.push(EvictedAnswer {
                call: call.call,
                session: id.clone(),
                outcome: call.outcome.to_outcome(),
                bytes: call.weight,
            });
        }
    }
}

impl<A> Default for RetainedQueues<A> {
    fn default() -> Self {
        Self {
            by_state: PerDeliveryState::default(),
            next_number: 0,
            evicted: Vec::new(),
        }
    }
}
