//! Calls of a session that have ended, for clients that resume their calls.
//!
//! A client that was cut off asks again for a stream whose call has ended meanwhile. The memory has what it then gets: the
//! answer, or that the call was cancelled. The client may ask as often as it likes.
//!
//! The records of a rank are in one queue, in the order in which their calls ended. A record is kept at least until its
//! time: it is forgotten when it is at the head of its queue and its time is over, so it may wait for one before it that
//! stays longer.
//!
//! It has two bounds, in bytes of a session id and in bytes of all sessions. A record that cannot fit is not kept, and nothing is
//! forgotten for it: one that is larger than a bound, or a spare one beside the owed ones. For other records, the oldest spare
//! records of the session go first, and then its oldest owed ones, which the [`Dropped`] report: their clients get what they
//! would get without this crate. If all sessions together remember too much, the registry makes room
//! ([`Core::shrink_memory`](super::Core::shrink_memory)).
//!
//! Records are in no map: a late client is rare, and looks through those of its session.

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

/// A record that its client may have come for, and that was let go or never kept because there was no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct EvictedAnswer {
    pub(crate) call: CallId,
    /// The id of its session.
    pub(crate) session: Arc<str>,
    pub(crate) outcome: Outcome,
    /// What it counted.
    pub(crate) bytes: usize,
}

/// What a record costs besides its answer and the texts in it, in bytes, about: its place in a queue, 230 as measured where a
/// session has many. So a session has 2,048 records at most.
pub(super) const RECORD_OVERHEAD: usize = 512;

/// What the first record of a session costs besides, in bytes, about, because the session would be forgotten without it. As
/// measured, a session of which nothing else is known takes about 1,400 with one record. So there are 12,000 of them at most.
pub(super) const SESSION_OVERHEAD: usize = 832;

/// What is remembered of a session. In a box: a session is large enough without any.
#[derive(Debug)]
pub(super) struct RetainedCalls<A>(Option<Box<RetainedQueues<A>>>);

#[derive(Debug)]
struct RetainedQueues<A> {
    records: PerDeliveryState<RetainedQueue<A>>,
    /// The number of the next record.
    next_number: u64,
    /// What was dropped and not said yet.
    evicted: Vec<EvictedAnswer>,
}

// === impl Memory ===

impl<A> RetainedCalls<A> {
    /// Keeps an ended call if it can, and forgets what is then too much for its session. Says whether it dropped
    /// something, or all sessions together remember too much.
    pub(super) fn retain(&mut self, id: &Arc<str>, leaving: EndedCall<A>, totals: &Totals) -> bool {
        let kept = self.0.get_or_insert_default();
        let rank = leaving.delivery_state();
        let record = kept.record(id, leaving);
        if record.weight > kept.max_weight(rank, totals) {
            kept.record_eviction(id, rank, &record);
        } else {
            totals.add_bytes(rank, record.weight);
            kept.records.of_mut(rank).push(record);
            while kept.bytes() > totals.max_bytes_of_session() {
                kept.evict_oldest(id, kept.next_to_evict(), totals);
            }
        }
        !kept.evicted.is_empty() || totals.bytes() > totals.max_bytes()
    }

    /// Drops the oldest of a rank until not more than so many bytes of it are left.
    pub(super) fn shrink(
        &mut self,
        id: &Arc<str>,
        rank: DeliveryState,
        to: usize,
        totals: &Totals,
    ) {
        if let Some(kept) = &mut self.0 {
            while kept.records.of(rank).bytes() > to {
                kept.evict_oldest(id, rank, totals);
            }
        }
    }

    /// Forgets those whose time is over by `now`, so many of a rank at most.
    pub(super) fn remove_expired(&mut self, now: Instant, most: usize, totals: &Totals) {
        let Some(kept) = &mut self.0 else {
            return;
        };
        let is_due = |record: &RetainedCall<A>| record.until <= now;
        for rank in DeliveryState::ALL {
            for _ in 0..most {
                if !kept.records.of(rank).oldest().is_some_and(is_due) {
                    break;
                }
                kept.pop(rank, totals);
            }
        }
    }

    /// Forgets what is remembered of a session.
    pub(super) fn clear(&mut self, session: KeyHash, totals: &Totals) {
        if let Some(kept) = &mut self.0 {
            for rank in DeliveryState::ALL {
                let bytes = kept.records.of_mut(rank).clear(session);
                totals.remove_bytes(rank, bytes);
            }
        }
    }

    /// How the latest of these calls ended that had this event.
    pub(super) fn outcome_of(
        &self,
        session: KeyHash,
        event: EventId,
    ) -> Option<&RetainedOutcome<A>> {
        let kept = self.0.as_ref()?;
        let latest =
            DeliveryState::ALL.map(|rank| kept.records.of(rank).latest_with_event(session, event));
        let latest = latest.into_iter().flatten();
        let latest = latest.max_by_key(|record| record.number);
        latest.map(|record| &record.outcome)
    }

    pub(super) fn has_session(&self, session: KeyHash) -> bool {
        let kept = self.0.iter();
        let mut ranks = kept.flat_map(|kept| DeliveryState::ALL.map(|rank| kept.records.of(rank)));
        ranks.any(|records| records.has_session(session))
    }

    /// Whether it owes an answer to a client of a session.
    pub(super) fn has_undelivered_answers(&self, session: KeyHash, now: Instant) -> bool {
        let kept = self.0.as_ref();
        kept.is_some_and(|kept| {
            kept.records
                .of(DeliveryState::Undelivered)
                .has_answers(session, now)
        })
    }

    /// When the first of the oldest is to be forgotten.
    pub(super) fn next_expiry(&self) -> Option<Instant> {
        let kept = self.0.as_ref()?;
        let [spare, owed] = DeliveryState::ALL.map(|rank| kept.records.of(rank).oldest());
        let earlier = spare.zip(owed).map(|(a, b)| a.until.min(b.until));
        earlier.or_else(|| Some(spare.or(owed)?.until))
    }

    /// When the oldest of a rank is.
    pub(super) fn earliest_expiry(&self, rank: DeliveryState) -> Option<Instant> {
        let oldest = self.0.as_ref()?.records.of(rank).oldest();
        oldest.map(|record| record.until)
    }

    pub(super) fn bytes_of(&self, rank: DeliveryState) -> usize {
        let kept = self.0.as_ref();
        kept.map_or(0, |kept| kept.records.of(rank).bytes())
    }

    /// Whether nothing is remembered, and nothing is left to be said.
    pub(super) fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|kept| {
            let is_empty = |rank| kept.records.of(rank).oldest().is_none();
            DeliveryState::ALL.into_iter().all(is_empty) && kept.evicted.is_empty()
        })
    }

    pub(super) fn take_evicted(&mut self) -> Vec<EvictedAnswer> {
        let kept = self.0.as_mut();
        kept.map_or_else(Vec::new, |kept| mem::take(&mut kept.evicted))
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        let kept = self.0.iter();
        kept.flat_map(|kept| DeliveryState::ALL.map(|rank| kept.records.of(rank).len()))
            .sum()
    }
}

impl<A> Default for RetainedCalls<A> {
    fn default() -> Self {
        Self(None)
    }
}

// === impl Remembered ===

impl<A> RetainedQueues<A> {
    fn record(&mut self, id: &Arc<str>, leaving: EndedCall<A>) -> RetainedCall<A> {
        let EndedCall {
            call,
            session,
            streams,
            completion: ended,
            ..
        } = leaving;
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

    /// How large a record may be to fit in, with whatever may be forgotten for it.
    fn max_weight(&self, rank: DeliveryState, totals: &Totals) -> usize {
        let (total, session) = (totals.max_bytes(), totals.max_bytes_of_session());
        match rank {
            DeliveryState::Undelivered => session.min(total),
            DeliveryState::Delivered => {
                let session =
                    session.saturating_sub(self.records.of(DeliveryState::Undelivered).bytes());
                session.min(total.saturating_sub(totals.bytes_of(DeliveryState::Undelivered)))
            }
        }
    }

    fn bytes(&self) -> usize {
        DeliveryState::ALL
            .map(|rank| self.records.of(rank).bytes())
            .iter()
            .sum()
    }

    /// Whose turn it is if one has to go.
    fn next_to_evict(&self) -> DeliveryState {
        match self.records.of(DeliveryState::Delivered).oldest() {
            Some(_) => DeliveryState::Delivered,
            None => DeliveryState::Undelivered,
        }
    }

    fn evict_oldest(&mut self, id: &Arc<str>, rank: DeliveryState, totals: &Totals) {
        if let Some(record) = self.pop(rank, totals) {
            self.record_eviction(id, rank, &record);
        }
    }

    fn pop(&mut self, rank: DeliveryState, totals: &Totals) -> Option<RetainedCall<A>> {
        let record = self.records.of_mut(rank).pop()?;
        totals.remove_bytes(rank, record.weight);
        Some(record)
    }

    #[cold]
    fn record_eviction(&mut self, id: &Arc<str>, rank: DeliveryState, record: &RetainedCall<A>) {
        if rank == DeliveryState::Undelivered {
            self.evicted.push(EvictedAnswer {
                call: record.call,
                session: id.clone(),
                outcome: record.outcome.to_outcome(),
                bytes: record.weight,
            });
        }
    }
}

impl<A> Default for RetainedQueues<A> {
    fn default() -> Self {
        Self {
            records: PerDeliveryState::default(),
            next_number: 0,
            evicted: Vec::new(),
        }
    }
}
