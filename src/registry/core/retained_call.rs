//! The records of ended calls, each [owed](Rank::Owed) or [spare](Rank::Spare).

use std::collections::VecDeque;

use tokio::time::Instant;

use super::{
    index::{EventId, KeyHash},
    shrink_if_sparse::ShrinkIfSparse,
    streams::Streams,
};
use crate::call::{CallId, CancelReason, Outcome, RequestId};

/// How a remembered call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RetainedOutcome<A> {
    Answered(A),
    Cancelled(RequestId, CancelReason),
}

/// A call that ends and is to be remembered.
#[derive(Debug)]
pub(crate) struct Completion<A> {
    pub(crate) outcome: RetainedOutcome<A>,
    /// The size of the answer in bytes.
    pub(crate) weight: usize,
    pub(crate) at: Instant,
    /// It is kept so long at least. Where its client was away, what was decided then may be longer.
    pub(crate) until: Instant,
}

/// The same with what the core knows of it.
#[derive(Debug)]
pub(super) struct EndedCall<A> {
    pub(super) call: CallId,
    pub(super) session: KeyHash,
    pub(super) streams: Streams,
    pub(super) had_client: bool,
    pub(super) completion: Completion<A>,
}

/// Whether a client waits for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeliveryState {
    /// The answer went out to a client that was there. It is kept in case that the link broke just then.
    Delivered,
    /// The client was away, or its call was cancelled.
    Undelivered,
}

/// One for each rank.
#[derive(Debug, Default)]
pub(crate) struct PerDeliveryState<T> {
    delivered: T,
    undelivered: T,
}

/// The records of a rank, oldest first.
#[derive(Debug)]
pub(super) struct RetainedQueue<A> {
    calls: VecDeque<RetainedCall<A>>,
    bytes: usize,
}

#[derive(Debug)]
pub(super) struct RetainedCall<A> {
    /// Counts up in its session.
    pub(super) number: u64,
    pub(super) call: CallId,
    pub(super) session: KeyHash,
    pub(super) streams: Streams,
    pub(super) outcome: RetainedOutcome<A>,
    pub(super) weight: usize,
    /// It is kept so long at least.
    pub(super) until: Instant,
}

// === impl Leaving ===

impl<A> EndedCall<A> {
    pub(super) fn delivery_state(&self) -> DeliveryState {
        match self.completion.outcome {
            RetainedOutcome::Answered(_) if self.had_client => DeliveryState::Delivered,
            RetainedOutcome::Answered(_) | RetainedOutcome::Cancelled(..) => {
                DeliveryState::Undelivered
            }
        }
    }
}

// === impl Rank ===

impl DeliveryState {
    /// In the order in which their records go.
    pub(crate) const ALL: [Self; 2] = [Self::Delivered, Self::Undelivered];
}

// === impl Ranked ===

impl<T> PerDeliveryState<T> {
    pub(crate) fn of(&self, rank: DeliveryState) -> &T {
        match rank {
            DeliveryState::Delivered => &self.delivered,
            DeliveryState::Undelivered => &self.undelivered,
        }
    }

    pub(super) fn of_mut(&mut self, rank: DeliveryState) -> &mut T {
        match rank {
            DeliveryState::Delivered => &mut self.delivered,
            DeliveryState::Undelivered => &mut self.undelivered,
        }
    }
}

// === impl Records ===

impl<A> RetainedQueue<A> {
    pub(super) fn push(&mut self, record: RetainedCall<A>) {
        if self.calls.is_empty() {
            // Most sessions of a flood have no second one.
            self.calls.reserve_exact(1);
        }
        self.bytes += record.weight;
        self.calls.push_back(record);
    }

    /// Takes the oldest out.
    pub(super) fn pop(&mut self) -> Option<RetainedCall<A>> {
        let record = self.calls.pop_front()?;
        self.calls.shrink_if_sparse();
        self.bytes -= record.weight;
        Some(record)
    }

    /// Takes all of a session out. Returns how many bytes they counted.
    pub(super) fn clear(&mut self, session: KeyHash) -> usize {
        let before = self.bytes;
        self.calls.retain(|record| {
            let stays = record.session != session;
            if !stays {
                self.bytes -= record.weight;
            }
            stays
        });
        self.calls.shrink_if_sparse();
        before - self.bytes
    }

    pub(super) fn oldest(&self) -> Option<&RetainedCall<A>> {
        self.calls.front()
    }

    pub(super) fn latest_with_event(
        &self,
        session: KeyHash,
        event: EventId,
    ) -> Option<&RetainedCall<A>> {
        let mut kept = self.calls.iter().rev();
        kept.find(|record| record.session == session && record.streams.contains(event))
    }

    /// Whether an answer of a session is among them whose time is not over.
    pub(super) fn has_answers(&self, session: KeyHash, now: Instant) -> bool {
        let mut its = self.calls.iter().filter(|record| record.session == session);
        its.any(|record| {
            matches!(record.outcome, RetainedOutcome::Answered(_)) && record.until > now
        })
    }

    pub(super) fn has_session(&self, session: KeyHash) -> bool {
        self.calls.iter().any(|record| record.session == session)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.calls.len()
    }
}

impl<A> Default for RetainedQueue<A> {
    fn default() -> Self {
        Self {
            calls: VecDeque::new(),
            bytes: 0,
        }
    }
}

// === impl End ===

impl<A> RetainedOutcome<A> {
    pub(super) fn to_outcome(&self) -> Outcome {
        match self {
            Self::Answered(_) => Outcome::Completed,
            Self::Cancelled(_, CancelReason::ClientCancelled) => Outcome::ClientCancelled,
            Self::Cancelled(_, reason) => Outcome::Cancelled(*reason),
        }
    }

    /// How long the texts in it are that a client chose.
    pub(super) fn text_len(&self) -> usize {
        match self {
            Self::Cancelled(RequestId::String(id), _) => id.len(),
            Self::Cancelled(RequestId::Number(_), _) | Self::Answered(_) => 0,
        }
    }
}
