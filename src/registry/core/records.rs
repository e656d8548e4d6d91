//! The records of ended calls, each [owed](Rank::Owed) or [spare](Rank::Spare).

use std::collections::VecDeque;

use tokio::time::Instant;

use super::{
    give_back::GiveBack,
    index::{EventId, NameHash},
    streams::Streams,
};
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
    pub(crate) at: Instant,
    /// It is kept so long at least. Where its client was away, what was decided then may be longer.
    pub(crate) until: Instant,
}

/// The same with what the core knows of it.
#[derive(Debug)]
pub(super) struct Leaving<A> {
    pub(super) call: CallId,
    pub(super) session: NameHash,
    pub(super) streams: Streams,
    pub(super) had_client: bool,
    pub(super) ended: Ended<A>,
}

/// Whether a client waits for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rank {
    /// The answer went out to a client that was there. It is kept in case that the link broke just then.
    Spare,
    /// The client was away, or its call was cancelled.
    Owed,
}

/// One for each rank.
#[derive(Debug, Default)]
pub(crate) struct Ranked<T> {
    spare: T,
    owed: T,
}

/// The records of a rank, oldest first.
#[derive(Debug)]
pub(super) struct Records<A> {
    kept: VecDeque<Record<A>>,
    bytes: usize,
}

#[derive(Debug)]
pub(super) struct Record<A> {
    /// Counts up in its session.
    pub(super) number: u64,
    pub(super) call: CallId,
    pub(super) session: NameHash,
    pub(super) streams: Streams,
    pub(super) end: End<A>,
    pub(super) weight: usize,
    /// It is kept so long at least.
    pub(super) until: Instant,
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
    pub(crate) const ALL: [Self; 2] = [Self::Spare, Self::Owed];
}

// === impl Ranked ===

impl<T> Ranked<T> {
    pub(crate) fn of(&self, rank: Rank) -> &T {
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

// === impl Records ===

impl<A> Records<A> {
    pub(super) fn push(&mut self, record: Record<A>) {
        if self.kept.is_empty() {
            // Most sessions of a flood have no second one.
            self.kept.reserve_exact(1);
        }
        self.bytes += record.weight;
        self.kept.push_back(record);
    }

    /// Takes the oldest out.
    pub(super) fn pop(&mut self) -> Option<Record<A>> {
        let record = self.kept.pop_front()?;
        self.kept.give_back();
        self.bytes -= record.weight;
        Some(record)
    }

    /// Takes all of a session out. Returns how many bytes they counted.
    pub(super) fn clear(&mut self, session: NameHash) -> usize {
        let before = self.bytes;
        self.kept.retain(|record| {
            let stays = record.session != session;
            if !stays {
                self.bytes -= record.weight;
            }
            stays
        });
        self.kept.give_back();
        before - self.bytes
    }

    pub(super) fn oldest(&self) -> Option<&Record<A>> {
        self.kept.front()
    }

    pub(super) fn latest_with(&self, session: NameHash, event: EventId) -> Option<&Record<A>> {
        let mut kept = self.kept.iter().rev();
        kept.find(|record| record.session == session && record.streams.have(event))
    }

    /// Whether an answer of a session is among them whose time is not over.
    pub(super) fn have_answers(&self, session: NameHash, now: Instant) -> bool {
        let mut its = self.kept.iter().filter(|record| record.session == session);
        its.any(|record| matches!(record.end, End::Answered(_)) && record.until > now)
    }

    pub(super) fn have(&self, session: NameHash) -> bool {
        self.kept.iter().any(|record| record.session == session)
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.kept.len()
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
