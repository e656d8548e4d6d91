//! Retains ended calls, so that clients can still resume them.
//!
//! A disconnected client may resume a stream whose call has ended in the meantime. It then receives the retained outcome: the answer, or an
//! error if the call was cancelled. The client may resume any number of times.
//!
//! Each session id has one queue of retained calls, ordered by when they expire, so expired calls are always at its head. Nearly all calls
//! are retained for the same time and join the queue at its back. Retained calls are not in a map, because late clients are rare and a
//! resume only searches its own session's calls.
//!
//! # Limits
//!
//! 1. Each session id has a limit in bytes, and may retain at most [`MAX_DELIVERED`] delivered calls. If a call would exceed one of these
//!    limits, any expired calls are removed first. If that is not enough, delivered calls are evicted, then undelivered ones, in each case
//!    starting with the one that expires first.
//! 2. Across all sessions, there is a limit in bytes for each [`DeliveryState`], so no delivered call takes space from an undelivered call.
//!    Within each of these limits, a session retains no more bytes than remain for all the others ([`Totals::try_add_bytes`]), so a few
//!    sessions cannot take all the space.
//! 3. A call is never evicted to make room for another session id's call or for a call that would not fit anyway, and an undelivered call
//!    is never evicted for a delivered call. A call that cannot fit is not retained.
//! 4. [`EvictedAnswer`] reports undelivered calls that have been evicted or not retained. If their clients resume, they receive what they
//!    would have received without this crate.

use std::{collections::VecDeque, mem, sync::Arc};

use tokio::time::Instant;

use super::{
    super::totals::Totals,
    call_timers::MAX_RESUME_WAIT,
    index::{EventId, KeyHash, StreamId},
    retained_call::{DeliveryState, EndedCall, PerDeliveryState, RetainedCall, RetainedOutcome},
    shrink_if_sparse::ShrinkIfSparse,
};
use crate::{
    call::{CallId, Outcome},
    timer::{LatenessTracker, STALL_THRESHOLD},
};

/// An outcome that was evicted or not retained, although its client could still have resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EvictedAnswer {
    pub(crate) call: CallId,
    /// The call's session id.
    pub(crate) session: Arc<str>,
    pub(crate) outcome: Outcome,
    /// The size counted for the outcome.
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

/// A session id's retained calls, and the space they take up.
#[derive(Debug)]
struct RetainedQueue<A> {
    /// Ordered by `until`.
    calls: VecDeque<RetainedCall<A>>,
    bytes: PerDeliveryState<usize>,
    /// Number of delivered calls.
    delivered: usize,
    /// Evicted answers not yet reported.
    evicted: Vec<EvictedAnswer>,
}

// === impl RetainedCalls ===

impl<A> RetainedCalls<A> {
    /// Retains an ended call if it fits, evicting the session id's older calls to make room.
    ///
    /// If other sessions take the space in the meantime, the call is not retained despite the evictions. Returns `true` if there are
    /// evictions to report.
    pub(super) fn retain(&mut self, id: &Arc<str>, ended: EndedCall<A>, totals: &Totals) -> bool {
        let queue = self.0.get_or_insert_default();
        queue.retain(id, ended, totals);
        !queue.evicted.is_empty()
    }

    /// Removes up to `max` expired calls.
    ///
    /// A call that has expired during a stall is retained for [`MAX_RESUME_WAIT`] longer, once (invariant 7).
    pub(super) fn remove_expired(
        &mut self,
        tracker: &LatenessTracker,
        max: usize,
        totals: &Totals,
    ) {
        let Some(queue) = &mut self.0 else {
            return;
        };
        let now = tracker.now();
        for _ in 0..max {
            let Some(call) = queue.first_expired(now) else {
                break;
            };
            let is_late =
                tracker.was_stalled(call.until) || tracker.lateness(call.until) > STALL_THRESHOLD;
            if is_late && !call.was_postponed {
                queue.postpone_first(now + MAX_RESUME_WAIT);
            } else {
                queue.remove(0, totals);
            }
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

    /// Returns the outcome of the retained call that an event belongs to. If there are several, the call that started last takes
    /// precedence.
    pub(super) fn outcome_of(
        &self,
        session: KeyHash,
        event: EventId,
    ) -> Option<&RetainedOutcome<A>> {
        let matching = self
            .calls()
            .filter(|call| call.session == session && call.event_ids.contains(event));
        let latest = matching.max_by_key(|call| call.call);
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

    fn calls(&self) -> impl Iterator<Item = &RetainedCall<A>> {
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
        let now = ended.completion.at;
        let call = self.retained_call(id, ended);
        if self.try_add_bytes(&call, totals) {
            return self.push(call);
        }
        while self.first_expired(now).is_some_and(|call| {
            // If it expired during a stall, its client may be about to resume (invariant 7).
            call.was_postponed || now.duration_since(call.until) <= STALL_THRESHOLD
        }) {
            self.remove(0, totals);
        }
        if !self.can_fit(&call, totals) {
            return self.record_eviction(id, &call);
        }
        while !self.try_add_bytes(&call, totals) {
            if !self.evict_for(&call, id, totals) {
                // Another session has taken the space in the meantime.
                return self.record_eviction(id, &call);
            }
        }
        self.push(call);
    }

    /// Adds a call's bytes to the totals. Returns `false` if the call only fits after an eviction.
    fn try_add_bytes(&self, call: &RetainedCall<A>, totals: &Totals) -> bool {
        let session_bytes = *self.bytes.get(call.delivery_state);
        !self.exceeds_session_limit(call, totals)
            && totals.try_add_bytes(call.delivery_state, session_bytes, call.weight)
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
            was_postponed: false,
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

    /// Evicts one call to make room for another. Returns `false` if no call may be evicted.
    fn evict_for(&mut self, call: &RetainedCall<A>, id: &Arc<str>, totals: &Totals) -> bool {
        // The session's limit applies to all of its calls together, but each total only to calls in the same delivery state.
        if self.exceeds_session_limit(call, totals) {
            DeliveryState::ALL
                .into_iter()
                .any(|delivery_state| self.evict_first(id, delivery_state, totals))
        } else {
            self.evict_first(id, call.delivery_state, totals)
        }
    }

    /// Evicts the call in a delivery state that expires first. Returns `false` if there is none.
    fn evict_first(
        &mut self,
        id: &Arc<str>,
        delivery_state: DeliveryState,
        totals: &Totals,
    ) -> bool {
        if *self.bytes.get(delivery_state) == 0 {
            return false;
        }
        let mut calls = self.calls.iter();
        let first = calls.position(|call| call.delivery_state == delivery_state);
        let evicted = first.and_then(|index| self.remove(index, totals));
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
        self.insert(call);
    }

    /// Inserts a call behind those that expire no later, which is nearly always at the back.
    fn insert(&mut self, call: RetainedCall<A>) {
        if self
            .calls
            .back()
            .is_none_or(|last| last.until <= call.until)
        {
            return self.calls.push_back(call);
        }
        let mut calls = self.calls.iter();
        let previous = calls.rposition(|other| other.until <= call.until);
        let index = previous.map_or(0, |index| index + 1);
        self.calls.insert(index, call);
    }

    /// Returns the call that expires first, if it has expired by `now`.
    fn first_expired(&self, now: Instant) -> Option<&RetainedCall<A>> {
        self.calls.front().filter(|call| call.until <= now)
    }

    /// Postpones the expiry of the call that expires first.
    fn postpone_first(&mut self, until: Instant) {
        if let Some(call) = self.calls.pop_front() {
            self.insert(RetainedCall {
                until,
                was_postponed: true,
                ..call
            });
        }
    }

    fn remove(&mut self, index: usize, totals: &Totals) -> Option<RetainedCall<A>> {
        let call = self.calls.remove(index)?;
        self.calls.shrink_if_sparse();
        self.delivered -= usize::from(call.delivery_state == DeliveryState::Delivered);
        *self.bytes.get_mut(call.delivery_state) -= call.weight;
        totals.remove_bytes(call.delivery_state, call.weight);
        Some(call)
    }

    /// Records an undelivered answer, so that its eviction is reported. The eviction of a delivered answer need not be reported.
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
