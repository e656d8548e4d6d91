//! Retained calls, each [delivered](DeliveryState::Delivered) or [undelivered](DeliveryState::Undelivered).

use std::collections::VecDeque;

use tokio::time::Instant;

use super::{
    index::{EventId, KeyHash},
    shrink_if_sparse::ShrinkIfSparse,
    streams::Streams,
};
use crate::call::{CallId, CancelReason, Outcome, RequestId};

/// The outcome of a retained call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RetainedOutcome<A> {
    Answered(A),
    Cancelled(RequestId, CancelReason),
}

/// The completion of a call that is to be retained.
#[derive(Debug)]
pub(crate) struct Completion<A> {
    pub(crate) outcome: RetainedOutcome<A>,
    /// The size of the answer in bytes.
    pub(crate) weight: usize,
    pub(crate) at: Instant,
    /// It is retained at least until then. For a detached call, the time that was decided at the detach may be later.
    pub(crate) until: Instant,
}

/// A completion with what the session state has of the call.
#[derive(Debug)]
pub(super) struct EndedCall<A> {
    pub(super) call: CallId,
    pub(super) session: KeyHash,
    pub(super) streams: Streams,
    pub(super) had_client: bool,
    pub(super) completion: Completion<A>,
}

/// Whether the outcome of a call was delivered to its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeliveryState {
    /// The answer was sent to a client that was connected. It is retained in case the connection broke at that moment.
    Delivered,
    /// The client was disconnected, or its call was cancelled.
    Undelivered,
}

/// One value for each delivery state.
#[derive(Debug, Default)]
pub(crate) struct PerDeliveryState<T> {
    delivered: T,
    undelivered: T,
}

/// The retained calls of a delivery state, oldest first.
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
    /// It is retained at least until then.
    pub(super) until: Instant,
}

// === impl EndedCall ===

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

// === impl DeliveryState ===

impl DeliveryState {
    /// In the order in which they are evicted.
    pub(crate) const ALL: [Self; 2] = [Self::Delivered, Self::Undelivered];
}

// === impl PerDeliveryState ===

impl<T> PerDeliveryState<T> {
    pub(crate) fn of(&self, delivery: DeliveryState) -> &T {
        match delivery {
            DeliveryState::Delivered => &self.delivered,
            DeliveryState::Undelivered => &self.undelivered,
        }
    }

    pub(super) fn of_mut(&mut self, delivery: DeliveryState) -> &mut T {
        match delivery {
            DeliveryState::Delivered => &mut self.delivered,
            DeliveryState::Undelivered => &mut self.undelivered,
        }
    }
}

// === impl RetainedQueue ===

impl<A> RetainedQueue<A> {
    pub(super) fn push(&mut self, call: RetainedCall<A>) {
        if self.calls.is_empty() {
            // Under a flood of sessions, most sessions have one.
            self.calls.reserve_exact(1);
        }
        self.bytes += call.weight;
        self.calls.push_back(call);
    }

    /// Removes the oldest.
    pub(super) fn pop(&mut self) -> Option<RetainedCall<A>> {
        let call = self.calls.pop_front()?;
        self.calls.shrink_if_sparse();
        self.bytes -= call.weight;
        Some(call)
    }

    /// Removes all of a session. Returns the bytes that they counted.
    pub(super) fn clear(&mut self, session: KeyHash) -> usize {
        let before = self.bytes;
        self.calls.retain(|call| {
            let is_kept = call.session != session;
            if !is_kept {
                self.bytes -= call.weight;
            }
            is_kept
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
        kept.find(|call| call.session == session && call.streams.contains(event))
    }

    /// Returns `true` if an answer of a session is among them that has not expired.
    pub(super) fn has_answers(&self, session: KeyHash, now: Instant) -> bool {
        let mut calls = self.calls.iter().filter(|call| call.session == session);
        calls.any(|call| matches!(call.outcome, RetainedOutcome::Answered(_)) && call.until > now)
    }

    pub(super) fn has_session(&self, session: KeyHash) -> bool {
        self.calls.iter().any(|call| call.session == session)
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

// === impl RetainedOutcome ===

impl<A> RetainedOutcome<A> {
    pub(super) fn to_outcome(&self) -> Outcome {
        match self {
            Self::Answered(_) => Outcome::Completed,
            Self::Cancelled(_, CancelReason::ClientCancelled) => Outcome::ClientCancelled,
            Self::Cancelled(_, reason) => Outcome::Cancelled(*reason),
        }
    }

    /// Length of the texts in it that a client chose.
    pub(super) fn text_len(&self) -> usize {
        match self {
            Self::Cancelled(RequestId::String(id), _) => id.len(),
            Self::Cancelled(RequestId::Number(_), _) | Self::Answered(_) => 0,
        }
    }
}
