//! The ended calls of a session that are remembered.
//!
//! A record is [owed](Rank::Owed) or [spare](Rank::Spare). The records of a rank are in one queue, in the order in which
//! their calls ended; the one that goes is the oldest of its rank.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::{index::EventId, room::GiveBack, streams::Streams};
use crate::call::{CallId, CancelReason, Outcome, RequestId};

/// How a remembered call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End<A> {
    Answered(A),
    Cancelled(RequestId, CancelReason),
}

/// A call that ends and is to be remembered.
#[derive(Debug)]
pub(crate) struct Ended<A> {
    pub(crate) end: End<A>,
    /// The size of the answer in bytes.
    pub(crate) weight: usize,
    pub(crate) until: Instant,
}

/// The same with what the core knows of it.
#[derive(Debug)]
pub(super) struct Leaving<A> {
    pub(super) call: CallId,
    pub(super) streams: Streams,
    pub(super) had_client: bool,
    pub(super) ended: Ended<A>,
}

/// Whether a client waits for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rank {
    /// The answer went out to a client that was there. It is kept in case that the link broke just then.
    Spare,
    /// The client was away, or its call was cancelled.
    Owed,
}

/// One for each rank.
#[derive(Debug, Default)]
pub(super) struct Ranked<T> {
    pub(super) spare: T,
    pub(super) owed: T,
}

/// The records of a session. In a box: a session is large enough without any.
#[derive(Debug)]
pub(super) struct Remembered<A>(Option<Box<Ranked<Records<A>>>>);

/// Those of a rank.
#[derive(Debug)]
pub(super) struct Records<A> {
    /// Oldest first.
    pub(super) kept: VecDeque<Kept<A>>,
    pub(super) bytes: usize,
}

/// A record.
#[derive(Debug)]
pub(super) struct Kept<A> {
    pub(super) number: u64,
    pub(super) call: CallId,
    pub(super) streams: Streams,
    pub(super) end: End<A>,
    pub(super) weight: usize,
}

// === impl Leaving ===

impl<A> Leaving<A> {
    pub(super) fn rank(&self) -> Rank {
        match self.ended.end {
            End::Answered(_) if self.had_client => Rank::Spare,
            End::Answered(_) | End::Cancelled(..) => Rank::Owed,
        }
    }
}

// === impl Rank ===

impl Rank {
    /// In the order in which their records go.
    pub(super) const ALL: [Self; 2] = [Self::Spare, Self::Owed];
}

// === impl Ranked ===

impl<T> Ranked<T> {
    pub(super) fn of(&self, rank: Rank) -> &T {
        match rank {
            Rank::Spare => &self.spare,
            Rank::Owed => &self.owed,
        }
    }

    pub(super) fn of_mut(&mut self, rank: Rank) -> &mut T {
        match rank {
            Rank::Spare => &mut self.spare,
            Rank::Owed => &mut self.owed,
        }
    }
}

// === impl Remembered ===

impl<A> Remembered<A> {
    pub(super) fn is_empty(&self) -> bool {
        Rank::ALL
            .into_iter()
            .all(|rank| self.oldest(rank).is_none())
    }

    pub(super) fn of(&self, rank: Rank) -> Option<&Records<A>> {
        Some(self.0.as_ref()?.of(rank))
    }

    pub(super) fn oldest(&self, rank: Rank) -> Option<&Kept<A>> {
        self.of(rank)?.kept.front()
    }

    pub(super) fn bytes_of(&self, rank: Rank) -> usize {
        self.of(rank).map_or(0, |records| records.bytes)
    }

    pub(super) fn bytes(&self) -> usize {
        Rank::ALL.map(|rank| self.bytes_of(rank)).iter().sum()
    }

    /// Whose turn it is if one has to go.
    pub(super) fn goes_first(&self) -> Rank {
        match self.oldest(Rank::Spare) {
            Some(_) => Rank::Spare,
            None => Rank::Owed,
        }
    }

    /// How the latest of these calls ended that had this event.
    pub(super) fn end_of(&self, event: EventId) -> Option<&End<A>> {
        let latest = Rank::ALL.map(|rank| self.of(rank)?.latest_with(event));
        let latest = latest.into_iter().flatten().max_by_key(|kept| kept.number);
        latest.map(|kept| &kept.end)
    }

    pub(super) fn push(&mut self, rank: Rank, kept: Kept<A>) {
        self.0.get_or_insert_default().of_mut(rank).push(kept);
    }

    /// Takes the oldest out.
    pub(super) fn pop(&mut self, rank: Rank) -> Option<Kept<A>> {
        self.0.as_mut()?.of_mut(rank).pop()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        let len = |rank| self.of(rank).map_or(0, |records| records.kept.len());
        Rank::ALL.map(len).iter().sum()
    }

    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        let room = |rank| self.of(rank).map_or(0, |records| records.kept.capacity());
        Rank::ALL.map(room).iter().sum()
    }
}

impl<A> Default for Remembered<A> {
    fn default() -> Self {
        Self(None)
    }
}

// === impl Records ===

impl<A> Records<A> {
    pub(super) fn push(&mut self, kept: Kept<A>) {
        if self.kept.is_empty() {
            // Most sessions of a flood have no second one.
            self.kept.reserve_exact(1);
        }
        self.bytes += kept.weight;
        self.kept.push_back(kept);
    }

    pub(super) fn pop(&mut self) -> Option<Kept<A>> {
        let kept = self.kept.pop_front()?;
        self.kept.give_back();
        self.bytes -= kept.weight;
        Some(kept)
    }

    pub(super) fn latest_with(&self, event: EventId) -> Option<&Kept<A>> {
        let mut kept = self.kept.iter().rev();
        kept.find(|kept| kept.streams.have(event))
    }
}

impl<A> Default for Records<A> {
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            bytes: 0,
        }
    }
}

// === impl End ===

impl<A> End<A> {
    pub(super) fn outcome(&self) -> Outcome {
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
