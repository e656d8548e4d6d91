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
    index::{EventId, NameHash, StreamId},
    records::{End, Leaving, Rank, Ranked, Record, Records},
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

/// What a record costs besides its answer and the texts in it, in bytes, about: its place in a queue, 230 as measured where a
/// session has many. So a session has 2,048 records at most.
pub(super) const RECORD: usize = 512;

/// What the first record of a session costs besides, in bytes, about, because the session would be forgotten without it. As
/// measured, a session of which nothing else is known takes about 1,400 with one record. So there are 12,000 of them at most.
pub(super) const SESSION: usize = 832;

/// What is remembered of a session. In a box: a session is large enough without any.
#[derive(Debug)]
pub(super) struct Memory<A>(Option<Box<Remembered<A>>>);

#[derive(Debug)]
struct Remembered<A> {
    records: Ranked<Records<A>>,
    /// The number of the next record.
    next: u64,
    /// What was dropped and not said yet.
    dropped: Vec<Dropped>,
}

// === impl Memory ===

impl<A> Memory<A> {
    /// Keeps an ended call if it can, and forgets what is then too much for its session. Says whether it dropped
    /// something, or all sessions together remember too much.
    pub(super) fn keep(&mut self, id: &Arc<str>, leaving: Leaving<A>, totals: &Totals) -> bool {
        let kept = self.0.get_or_insert_default();
        let rank = leaving.rank();
        let record = kept.record(id, leaving);
        if record.weight > kept.most(rank, totals) {
            kept.note_dropped(id, rank, &record);
        } else {
            totals.add_bytes(rank, record.weight);
            kept.records.of_mut(rank).push(record);
            while kept.bytes() > totals.most_bytes_of_session() {
                kept.drop_oldest(id, kept.goes_first(), totals);
            }
        }
        !kept.dropped.is_empty() || totals.bytes() > totals.most_bytes()
    }

    /// Drops the oldest of a rank until not more than so many bytes of it are left.
    pub(super) fn shrink(&mut self, id: &Arc<str>, rank: Rank, to: usize, totals: &Totals) {
        if let Some(kept) = &mut self.0 {
            while kept.records.of(rank).bytes() > to {
                kept.drop_oldest(id, rank, totals);
            }
        }
    }

    /// Forgets those whose time is over by `now`, so many of a rank at most.
    pub(super) fn forget_due(&mut self, now: Instant, most: usize, totals: &Totals) {
        let Some(kept) = &mut self.0 else {
            return;
        };
        let is_due = |record: &Record<A>| record.until <= now;
        for rank in Rank::ALL {
            for _ in 0..most {
                if !kept.records.of(rank).oldest().is_some_and(is_due) {
                    break;
                }
                kept.pop(rank, totals);
            }
        }
    }

    /// Forgets what is remembered of a session.
    pub(super) fn clear(&mut self, session: NameHash, totals: &Totals) {
        if let Some(kept) = &mut self.0 {
            for rank in Rank::ALL {
                let bytes = kept.records.of_mut(rank).clear(session);
                totals.remove_bytes(rank, bytes);
            }
        }
    }

    /// How the latest of these calls ended that had this event.
    pub(super) fn end_of(&self, session: NameHash, event: EventId) -> Option<&End<A>> {
        let kept = self.0.as_ref()?;
        let latest = Rank::ALL.map(|rank| kept.records.of(rank).latest_with(session, event));
        let latest = latest.into_iter().flatten();
        let latest = latest.max_by_key(|record| record.number);
        latest.map(|record| &record.end)
    }

    pub(super) fn has(&self, session: NameHash) -> bool {
        let kept = self.0.iter();
        let mut ranks = kept.flat_map(|kept| Rank::ALL.map(|rank| kept.records.of(rank)));
        ranks.any(|records| records.have(session))
    }

    /// Whether it owes an answer to a client of a session.
    pub(super) fn owes_answers(&self, session: NameHash, now: Instant) -> bool {
        let kept = self.0.as_ref();
        kept.is_some_and(|kept| kept.records.of(Rank::Owed).have_answers(session, now))
    }

    /// When the first of the oldest is to be forgotten.
    pub(super) fn next_end(&self) -> Option<Instant> {
        let kept = self.0.as_ref()?;
        let [spare, owed] = Rank::ALL.map(|rank| kept.records.of(rank).oldest());
        let earlier = spare.zip(owed).map(|(a, b)| a.until.min(b.until));
        earlier.or_else(|| Some(spare.or(owed)?.until))
    }

    /// When the oldest of a rank is.
    pub(super) fn forgotten_at(&self, rank: Rank) -> Option<Instant> {
        let oldest = self.0.as_ref()?.records.of(rank).oldest();
        oldest.map(|record| record.until)
    }

    pub(super) fn bytes_of(&self, rank: Rank) -> usize {
        let kept = self.0.as_ref();
        kept.map_or(0, |kept| kept.records.of(rank).bytes())
    }

    /// Whether nothing is remembered, and nothing is left to be said.
    pub(super) fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|kept| {
            let is_empty = |rank| kept.records.of(rank).oldest().is_none();
            Rank::ALL.into_iter().all(is_empty) && kept.dropped.is_empty()
        })
    }

    pub(super) fn take_dropped(&mut self) -> Vec<Dropped> {
        let kept = self.0.as_mut();
        kept.map_or_else(Vec::new, |kept| mem::take(&mut kept.dropped))
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        let kept = self.0.iter();
        kept.flat_map(|kept| Rank::ALL.map(|rank| kept.records.of(rank).len()))
            .sum()
    }
}

impl<A> Default for Memory<A> {
    fn default() -> Self {
        Self(None)
    }
}

// === impl Remembered ===

impl<A> Remembered<A> {
    fn record(&mut self, id: &Arc<str>, leaving: Leaving<A>) -> Record<A> {
        let Leaving {
            call,
            session,
            streams,
            ended,
            ..
        } = leaving;
        let texts = id.len() + ended.end.text_len();
        let session_too = match self.bytes() {
            0 => SESSION,
            _ => 0,
        };
        let number = self.next;
        self.next += 1;
        Record {
            number,
            call,
            session,
            weight: RECORD
                + session_too
                + ended.weight
                + texts
                + streams.len() * size_of::<StreamId>(),
            streams,
            end: ended.end,
            until: ended.until,
        }
    }

    /// How large a record may be to fit in, with whatever may be forgotten for it.
    fn most(&self, rank: Rank, totals: &Totals) -> usize {
        let (total, session) = (totals.most_bytes(), totals.most_bytes_of_session());
        match rank {
            Rank::Owed => session.min(total),
            Rank::Spare => {
                let session = session.saturating_sub(self.records.of(Rank::Owed).bytes());
                session.min(total.saturating_sub(totals.bytes_of(Rank::Owed)))
            }
        }
    }

    fn bytes(&self) -> usize {
        Rank::ALL
            .map(|rank| self.records.of(rank).bytes())
            .iter()
            .sum()
    }

    /// Whose turn it is if one has to go.
    fn goes_first(&self) -> Rank {
        match self.records.of(Rank::Spare).oldest() {
            Some(_) => Rank::Spare,
            None => Rank::Owed,
        }
    }

    fn drop_oldest(&mut self, id: &Arc<str>, rank: Rank, totals: &Totals) {
        if let Some(record) = self.pop(rank, totals) {
            self.note_dropped(id, rank, &record);
        }
    }

    fn pop(&mut self, rank: Rank, totals: &Totals) -> Option<Record<A>> {
        let record = self.records.of_mut(rank).pop()?;
        totals.remove_bytes(rank, record.weight);
        Some(record)
    }

    #[cold]
    fn note_dropped(&mut self, id: &Arc<str>, rank: Rank, record: &Record<A>) {
        if rank == Rank::Owed {
            self.dropped.push(Dropped {
                call: record.call,
                session: id.clone(),
                outcome: record.end.outcome(),
                bytes: record.weight,
            });
        }
    }
}

impl<A> Default for Remembered<A> {
    fn default() -> Self {
        Self {
            records: Ranked::default(),
            next: 0,
            dropped: Vec::new(),
        }
    }
}
