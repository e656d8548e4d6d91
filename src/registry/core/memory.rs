//! Calls that have ended, for clients that come back for them.
//!
//! A client that was cut off asks again for a stream whose call has ended meanwhile. What it gets then is
//! remembered here: the answer, or that the call was cancelled. It is asked for as often as the client likes.
//!
//! The records of a rank are in one queue, in the order in which their calls ended. A record is kept at least until its time: it is forgotten when it is at the head of its queue and
//! its time is over, so it may wait for one before it that stays longer.
//!
//! Bounded twice, by bytes in all and by bytes a session. What cannot fit is not kept, and nothing is forgotten for it:
//! a record that is larger than a bound, or a spare one beside the owed ones. For the others the oldest spare records
//! go, and then the oldest owed ones. Of these the [`Dropped`] tell: their clients get what they would get without this
//! crate.
//!
//! Either way the one that goes is the oldest of its rank in its session. So a session has its records in two queues of
//! its own, and what is common has only turns. No map knows a record: it is looked for among those of its session.

use std::{collections::VecDeque, mem, sync::Arc};

use tokio::time::Instant;

use super::{
    index::{Slot, Slots, StreamId},
    remembered::{Kept, Leaving, Rank, Ranked},
    session::Session,
};
use crate::call::{CallId, Outcome};

/// A record that its client may have come for, and that was let go or never kept because there was no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dropped {
    pub(crate) call: CallId,
    /// The id of its session.
    pub(crate) session: Arc<str>,
    pub(crate) outcome: Outcome,
    /// What it counted.
    pub(crate) bytes: usize,
}

/// What a record costs besides its answer and the texts in it, in bytes, about: its queues and its session.
pub(super) const RECORD: usize = 512;

/// How many bytes may be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) total: usize,
    pub(crate) session: usize,
}

/// In which order the records of all sessions go.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) limits: Limits,
    pub(super) turns: Ranked<Turns>,
    /// The number of the next record.
    next: u64,
    /// What was dropped and not said yet.
    dropped: Vec<Dropped>,
}

/// In which order the records of a rank go.
#[derive(Debug, Default)]
pub(super) struct Turns {
    /// Oldest first, and some whose record is gone already. The head's is not.
    pub(super) queue: VecDeque<Turn>,
    pub(super) records: usize,
    pub(super) bytes: usize,
}

/// The turn of the oldest record of a session and a rank, if it has this number.
#[derive(Debug)]
pub(super) struct Turn {
    pub(super) session: Slot,
    pub(super) number: u64,
    pub(super) until: Instant,
}

/// Why a record goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Why {
    Over,
    NoRoom,
}

// === impl Memory ===

impl Memory {
    pub(super) fn new() -> Self {
        Self {
            limits: Limits::DEFAULT,
            turns: Ranked::default(),
            next: 0,
            dropped: Vec::new(),
        }
    }

    /// Keeps an ended call if it can, and forgets what is then too much for its session.
    pub(super) fn keep<A>(&mut self, slot: Slot, session: &mut Session<A>, leaving: Leaving<A>) {
        let rank = leaving.rank();
        let Leaving {
            call,
            streams,
            ended,
            ..
        } = leaving;
        let texts = session.key.text_len() + ended.end.text_len();
        let weight = RECORD + ended.weight + texts + streams.len() * size_of::<StreamId>();
        let number = self.next;
        self.next += 1;
        let kept = Kept {
            number,
            call,
            streams,
            end: ended.end,
            weight,
        };
        if weight > self.most(rank, session) {
            return self.note_dropped(rank, session, &kept);
        }
        session.kept.push(rank, kept);
        let turns = self.turns.of_mut(rank);
        turns.records += 1;
        turns.bytes += weight;
        turns.queue.push_back(Turn {
            session: slot,
            number,
            until: ended.until,
        });
        while session.kept.bytes() > self.limits.session {
            let rank = session.kept.goes_first();
            self.forget_oldest_of(session, rank, Why::NoRoom);
        }
    }

    /// How large a record may be to fit in, with whatever may be forgotten for it.
    fn most<A>(&self, rank: Rank, session: &Session<A>) -> usize {
        let Limits {
            total,
            session: share,
        } = self.limits;
        match rank {
            Rank::Owed => share.min(total),
            Rank::Spare => {
                let share = share.saturating_sub(session.kept.bytes_of(Rank::Owed));
                share.min(total.saturating_sub(self.turns.owed.bytes))
            }
        }
    }

    pub(super) fn forget_oldest_of<A>(&mut self, session: &mut Session<A>, rank: Rank, why: Why) {
        let Some(kept) = session.kept.pop(rank) else {
            return;
        };
        let turns = self.turns.of_mut(rank);
        turns.bytes -= kept.weight;
        turns.records -= 1;
        if why == Why::NoRoom {
            self.note_dropped(rank, session, &kept);
        }
    }

    fn note_dropped<A>(&mut self, rank: Rank, session: &Session<A>, kept: &Kept<A>) {
        if rank == Rank::Owed {
            self.dropped.push(Dropped {
                call: kept.call,
                session: session.key.id.clone(),
                outcome: kept.end.outcome(),
                bytes: kept.weight,
            });
        }
    }

    pub(super) fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    pub(super) fn take_dropped(&mut self) -> Vec<Dropped> {
        mem::take(&mut self.dropped)
    }

    /// When the first of the oldest is to be forgotten.
    pub(super) fn next_end(&self) -> Option<Instant> {
        let ends = [self.turns.spare.next_end(), self.turns.owed.next_end()];
        ends.into_iter().flatten().min()
    }

    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.turns.spare.queue.capacity() + self.turns.owed.queue.capacity()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.turns.spare.records + self.turns.owed.records
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn is_empty(&self) -> bool {
        let is_empty = |turns: &Turns| turns.queue.is_empty() && turns.bytes == 0;
        self.len() == 0 && is_empty(&self.turns.spare) && is_empty(&self.turns.owed)
    }
}

// === impl Ranked ===

impl Ranked<Turns> {
    pub(super) fn bytes(&self) -> usize {
        self.spare.bytes + self.owed.bytes
    }
}

// === impl Turns ===

impl Turns {
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.queue.front().map(|turn| turn.until)
    }
}

// === impl Turn ===

impl Turn {
    /// Whether its record is still kept in this session, which forgets the oldest first.
    pub(super) fn is_of<A>(&self, session: &Session<A>, rank: Rank) -> bool {
        let oldest = session.kept.oldest(rank);
        oldest.is_some_and(|oldest| oldest.number <= self.number)
    }

    pub(super) fn is_kept<A>(&self, sessions: &Slots<Session<A>>, rank: Rank) -> bool {
        let session = sessions.get(&self.session);
        session.is_some_and(|session| self.is_of(session, rank))
    }
}

// === impl Limits ===

impl Limits {
    /// 16 MiB in all, 1 MiB a session: what a busy server can spare, and no session can take it all.
    pub(crate) const DEFAULT: Self = Self {
        total: 16 * 1024 * 1024,
        session: 1024 * 1024,
    };
}
