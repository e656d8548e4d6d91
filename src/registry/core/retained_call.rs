//! Retained calls, each [delivered](DeliveryState::Delivered) or [undelivered](DeliveryState::Undelivered).

use tokio::time::Instant;

use super::{event_ids::EventIds, index::KeyHash};
use crate::call::{CallId, CancelReason, Outcome, RequestId};

/// What a client receives if it resumes an ended call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum RetainedOutcome<A> {
    Answered(A),
    Cancelled(RequestId, CancelReason),
}

/// A call's completion, to be retained.
#[derive(Debug)]
pub(crate) struct Completion<A> {
    pub(crate) outcome: RetainedOutcome<A>,
    /// The answer's size in bytes.
    pub(crate) weight: usize,
    /// When the call ended.
    pub(crate) at: Instant,
    /// The outcome is retained until this time. A detached call's grace period or resume window may extend it.
    pub(crate) until: Instant,
}

/// A completion, along with what the session state knows about the call.
#[derive(Debug)]
pub(super) struct EndedCall<A> {
    pub(super) call: CallId,
    pub(super) session: KeyHash,
    pub(super) event_ids: EventIds,
    /// Whether the call was attached when it ended.
    pub(super) had_client: bool,
    pub(super) completion: Completion<A>,
}

/// Whether a call's outcome has been delivered to its client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DeliveryState {
    /// The answer was sent to a connected client. It is retained in case the connection broke at that moment.
    Delivered,
    /// The client was disconnected, or the call was cancelled.
    Undelivered,
}

/// One value per delivery state.
#[derive(Debug, Default)]
pub(crate) struct PerDeliveryState<T> {
    delivered: T,
    undelivered: T,
}

/// An ended call whose outcome is retained.
#[derive(Debug)]
pub(super) struct RetainedCall<A> {
    pub(super) call: CallId,
    pub(super) session: KeyHash,
    pub(super) delivery_state: DeliveryState,
    pub(super) event_ids: EventIds,
    pub(super) outcome: RetainedOutcome<A>,
    pub(super) weight: usize,
    pub(super) until: Instant,
    /// Whether `until` has been postponed because of a stall.
    pub(super) was_postponed: bool,
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
    /// All states, in eviction order.
    pub(crate) const ALL: [Self; 2] = [Self::Delivered, Self::Undelivered];
}

// === impl PerDeliveryState ===

impl<T> PerDeliveryState<T> {
    pub(crate) fn get(&self, delivery: DeliveryState) -> &T {
        match delivery {
            DeliveryState::Delivered => &self.delivered,
            DeliveryState::Undelivered => &self.undelivered,
        }
    }

    pub(super) fn get_mut(&mut self, delivery: DeliveryState) -> &mut T {
        match delivery {
            DeliveryState::Delivered => &mut self.delivered,
            DeliveryState::Undelivered => &mut self.undelivered,
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

    /// Returns the length of the client-chosen string, if any: a cancelled call's request id.
    pub(super) fn text_len(&self) -> usize {
        match self {
            Self::Cancelled(RequestId::String(id), _) => id.len(),
            Self::Cancelled(RequestId::Number(_), _) | Self::Answered(_) => 0,
        }
    }
}
