//! Retains ended calls, so that clients can still resume them.
//!
//! A disconnected client may resume a stream whose call has ended in the meantime. It then receives the retained outcome: the answer, or an
//! error if the call was cancelled. The client may resume any number of times.
//!
//! Each session id has one queue of retained calls, in order of completion. Expired calls are only removed from its head, so a call may
//! outlive its deadline if an older call's is later. There is no map of retained calls, because late clients are rare and a resume only
//! searches its own session's calls.
//!
//! # Limits
//!
//! 1. Each session id has a limit in bytes, and may retain at most [`MAX_DELIVERED`] delivered calls. If a call would exceed one of these
//!    limits, the oldest delivered ones are evicted first, then the oldest undelivered ones.
//! 2. Across all sessions, there is a limit in bytes for each [`DeliveryState`], so no delivered call takes space from an undelivered one.
//!    Within each of these limits, a session retains no more bytes than remain for all the others ([`Totals::try_add_bytes`]), so a few
//!    sessions cannot take all the space.
//! 3. A call is never evicted to make room for another session id's call or for a call that would not fit anyway, and an undelivered call
//!    is never evicted for a delivered one. A call that cannot fit is not retained.
//! 4. [`EvictedAnswer`] reports undelivered calls that have been evicted or not retained. If their clients resume, they receive what they
//!    would have received without this crate.

use std::{collections::VecDeque, mem, sync::Arc};

use tokio::time::Instant;

use super::{
    super::totals::Totals,
    index::{EventId, KeyHash, StreamId},
    retained_call::{DeliveryState, EndedCall, PerDeliveryState, RetainedCall, RetainedOutcome},
    shrink_if_sparse::ShrinkIfSparse,
};
use crate::call::{CallId, Outcome};

/// An outcome that was evicted or not retained, although its client could still have resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EvictedAnswer {
    pub(crate) call: CallId,
    /// The call's session id.
    pub(crate) session: Arc<str>,
    pub(crate) outcome: Outcome,
    /// The size it was counted as.
    pub(crate) bytes: usize,
}

/// Maximum number of delivered calls per session id.
///
/// This is enough for a client with a broken connection, because it resumes its latest calls.
const MAX_DELIVERED: usize = 64;

/// Approximate cost of a retained call in bytes, besides its answer and its strings.
///
/// An entry in a long queue was measured at 230 bytes. With this overhead, a session retains at most 2,048 calls by default.
pub(super) const RECORD_OVERHEAD: usize = 512;

/// Approximate additional cost of a session's first retained call, in bytes.
///
/// This is counted because the session's entry would be removed without that call. A session with nothing but one retained call was
/// measured at about 1,400 bytes. By default, there can be at most about 12,000 of these sessions.
pub(super) const SESSION_OVERHEAD: usize = 832;

/// A session id's retained calls. Boxed, because most session ids have none, and their states are already large.
#[derive(Debug)]
pub(super) struct RetainedCalls<A>(Option<Box<RetainedQueue<A>>>);

#[derive(Debug)]
struct RetainedQueue<A> {
    /// In order of completion.
    calls: VecDeque<RetainedCall<A>>,
    bytes: PerDeliveryState<usize>,
    /// Number of delivered calls.
    delivered: usize,
    /// Evicted answers not yet reported.
    evicted: Vec<EvictedAnswer>,
}

// === impl RetainedCalls ===

impl<A> RetainedCalls<A> {
    /// Retains an ended call if it fits, evicting the session id's older ones to make room.
    ///
    /// If other sessions take the space in the meantime, the call is not retained despite the evictions. Returns `true` if there are
    /// evictions to report.
    pub(super) fn retain(&mut self, id: &Arc<str>, ended: EndedCall<A>, totals: &Totals) -> bool {
        let queue = self.0.get_or_insert_default();
        queue.retain(id, ended, totals);
        !queue.evicted.is_empty()
    }

    /// Removes up to `max` expired calls from the head of the queue.
    pub(super) fn remove_expired(&mut self, now: Instant, max: usize, totals: &Totals) {
        let Some(queue) = &mut self.0 else {
            return;
        };
        for _ in 0..max {
            if queue.calls.front().is_none_or(|call| call.until > now) {
                break;
            }
            queue.remove(0, totals);
        }
    }

    /// Removes a session's retained calls.
    pub(super) fn clear(&mut self, session: KeyHash, totals: &Totals) {
        if let Some(queue) = &mut self.0 {
            let is_in_session = |call: &RetainedCall<A>| call.session == session;
            while let Some(index) = queue.calls.iter().position(is_in_session) {
                queue.remove(index, totals);
            }
        }
    }

    /// Returns the outcome of the latest retained call that an event belongs to.
    pub(super) fn outcome_of(
        &self,
        session: KeyHash,
        event: EventId,
    ) -> Option<&RetainedOutcome<A>> {
        let mut latest_first = self.calls().rev();
        let latest =
            latest_first.find(|call| call.session == session && call.event_ids.contains(event));
        latest.map(|call| &call.outcome)
    }

    pub(super) fn has_session(&self, session: KeyHash) -> bool {
        self.calls().any(|call| call.session == session)
    }

    /// Returns `true` if a session has an undelivered answer still retained and unexpired.
    pub(super) fn has_undelivered_answers(&self, session: KeyHash, now: Instant) -> bool {
        let mut undelivered = self.calls().filter(|call| {
            call.session == session && call.delivery_state == DeliveryState::Undelivered
        });
        undelivered
            .any(|call| matches!(call.outcome, RetainedOutcome::Answered(_)) && call.until > now)
    }

    /// Returns when the next retained call is due to be removed.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        Some(self.0.as_ref()?.calls.front()?.until)
    }

    /// Returns `true` if no call is retained and no eviction is left to report.
    pub(super) fn is_empty(&self) -> bool {
        let queue = self.0.as_ref();
        queue.is_none_or(|queue| queue.calls.is_empty() && queue.evicted.is_empty())
    }

    pub(super) fn take_evicted(&mut self) -> Vec<EvictedAnswer> {
        let queue = self.0.as_mut();
        queue.map_or_else(Vec::new, |queue| mem::take(&mut queue.evicted))
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.calls().count()
    }

    fn calls(&self) -> impl DoubleEndedIterator<Item = &RetainedCall<A>> {
        self.0.iter().flat_map(|queue| &queue.calls)
    }
}

impl<A> Default for RetainedCalls<A> {
    fn default() -> Self {
        Self(None)
    }
}

// === impl RetainedQueue ===

impl<A> RetainedQueue<A> {
    fn retain(&mut self, id: &Arc<str>, ended: EndedCall<A>, totals: &Totals) {
        let call = self.retained_call(id, ended);
        if !self.can_fit(&call, totals) {
            return self.record_eviction(id, &call);
        }
        while self.exceeds_session_limit(&call, totals) {
            let has_evicted = DeliveryState::ALL
                .into_iter()
                .any(|delivery_state| self.evict_oldest(id, delivery_state, totals));
            if !has_evicted {
                break;
            }
        }
        let (delivery_state, weight) = (call.delivery_state, call.weight);
        while !totals.try_add_bytes(delivery_state, *self.bytes.get(delivery_state), weight) {
            if !self.evict_oldest(id, delivery_state, totals) {
                // Another session has taken the space in the meantime.
                return self.record_eviction(id, &call);
            }
        }
        self.push(call);
    }

    fn retained_call(&self, id: &Arc<str>, ended: EndedCall<A>) -> RetainedCall<A> {
        let delivery_state = ended.delivery_state();
        let EndedCall {
            call,
            session,
            event_ids,
            completion,
            ..
        } = ended;
        let text_len = id.len() + completion.outcome.text_len();
        let session_overhead = if self.calls.is_empty() {
            SESSION_OVERHEAD
        } else {
            0
        };
        RetainedCall {
            call,
            session,
            delivery_state,
            weight: RECORD_OVERHEAD
                + session_overhead
                + completion.weight
                + text_len
                + event_ids.len() * size_of::<StreamId>(),
            event_ids,
            outcome: completion.outcome,
            until: completion.until,
        }
    }

    /// Returns `true` if a call would fit after all evictions allowed for it.
    fn can_fit(&self, call: &RetainedCall<A>, totals: &Totals) -> bool {
        let remaining = match call.delivery_state {
            DeliveryState::Delivered => *self.bytes.get(DeliveryState::Undelivered),
            DeliveryState::Undelivered => 0,
        };
        let session_bytes = *self.bytes.get(call.delivery_state);
        remaining.saturating_add(call.weight) <= totals.max_session_bytes()
            && totals.could_add_bytes(call.delivery_state, session_bytes, call.weight)
    }

    fn exceeds_session_limit(&self, call: &RetainedCall<A>, totals: &Totals) -> bool {
        let bytes: usize = DeliveryState::ALL
            .map(|state| *self.bytes.get(state))
            .iter()
            .sum();
        let is_delivered = call.delivery_state == DeliveryState::Delivered;
        bytes + call.weight > totals.max_session_bytes()
            || is_delivered && self.delivered >= MAX_DELIVERED
    }

    /// Evicts the oldest call in a delivery state. Returns `false` if there is none.
    fn evict_oldest(
        &mut self,
        id: &Arc<str>,
        delivery_state: DeliveryState,
        totals: &Totals,
    ) -> bool {
        if *self.bytes.get(delivery_state) == 0 {
            return false;
        }
        let mut calls = self.calls.iter();
        let oldest = calls.position(|call| call.delivery_state == delivery_state);
        let evicted = oldest.and_then(|index| self.remove(index, totals));
        if let Some(call) = &evicted {
            self.record_eviction(id, call);
        }
        evicted.is_some()
    }

    fn push(&mut self, call: RetainedCall<A>) {
        if self.calls.is_empty() {
            // During a flood of sessions, most of them have only one call.
            self.calls.reserve_exact(1);
        }
        self.delivered += usize::from(call.delivery_state == DeliveryState::Delivered);
        *self.bytes.get_mut(call.delivery_state) += call.weight;
        self.calls.push_back(call);
    }

    fn remove(&mut self, index: usize, totals: &Totals) -> Option<RetainedCall<A>> {
        let call = self.calls.remove(index)?;
        self.calls.shrink_if_sparse();
        self.delivered -= usize::from(call.delivery_state == DeliveryState::Delivered);
        *self.bytes.get_mut(call.delivery_state) -= call.weight;
        totals.remove_bytes(call.delivery_state, call.weight);
        Some(call)
    }

    /// Records an undelivered answer, so that its eviction is reported. A delivered one needs no report.
    #[cold]
    fn record_eviction(&mut self, id: &Arc<str>, call: &RetainedCall<A>) {
        if call.delivery_state == DeliveryState::Undelivered {
            self.evicted.push(EvictedAnswer {
                call: call.call,
                session: id.clone(),
                outcome: call.outcome.to_outcome(),
                bytes: call.weight,
            });
        }
    }
}

impl<A> Default for RetainedQueue<A> {
    fn default() -> Self {
        Self {
            calls: VecDeque::new(),
            bytes: PerDeliveryState::default(),
            delivered: 0,
            evicted: Vec::new(),
        }
    }
}
