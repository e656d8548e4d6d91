//! The ways in which a call leaves: finished, or with its session.

use std::mem;

use tokio::time::Instant;

use super::{
    Core,
    entry::{Finished, Place},
    memory::Dropped,
    records::{End, Ended, Leaving, Rank},
};
use crate::call::{CallId, Scope};

// === impl Core ===

impl<T: Clone, A: Clone> Core<T, A> {
    /// Ends a call. `None` if it has ended before, or left (invariants 2 and 9). What `remember` says stays
    /// known under its streams.
    pub(crate) fn finish(&mut self, id: CallId, remember: Option<Ended<A>>) -> Option<Finished> {
        let is_cancelled = remember
            .as_ref()
            .is_some_and(|ended| matches!(ended.end, End::Cancelled(..)));
        let entry = self.take(id, is_cancelled)?;
        self.has_finished = true;
        let detachment = entry.detachment();
        let times = entry.times.as_ref();
        let remember = remember.map(|ended| {
            let owed = times.and_then(|times| times.retained_until(ended.at));
            Ended {
                until: owed.map_or(ended.until, |owed| ended.until.max(owed)),
                ..ended
            }
        });
        let (mut injectable, mut is_too_much) = (false, false);
        if let Some(place) = entry.place {
            injectable = self.free_id(id, &place) && place.contests == 0;
            self.forget_streams(id, place.session, &entry.streams);
            let remember = remember.filter(|_| !entry.streams.is_empty());
            is_too_much = remember.is_some_and(|ended| {
                self.remember(Leaving {
                    call: id,
                    session: place.session,
                    streams: entry.streams,
                    had_client: detachment.is_none(),
                    ended,
                })
            });
        }
        Some(Finished {
            injectable,
            detachment,
            is_too_much,
        })
    }

    fn remember(&mut self, leaving: Leaving<A>) -> bool {
        let Some((id, _)) = &self.session_id else {
            return false;
        };
        self.memory.keep(id, leaving, &self.common.totals)
    }

    /// Forgets the oldest of a rank until not more than so many bytes of it are left.
    pub(crate) fn shrink_memory(&mut self, rank: Rank, to: usize) {
        if let Some((id, _)) = &self.session_id {
            self.memory.shrink(id, rank, to, &self.common.totals);
        }
    }

    /// How many bytes of a rank are remembered.
    pub(crate) fn bytes_of(&self, rank: Rank) -> usize {
        self.memory.bytes_of(rank)
    }

    /// When the oldest of them is forgotten.
    pub(crate) fn forgotten_at(&self, rank: Rank) -> Option<Instant> {
        self.memory.forgotten_at(rank)
    }

    /// What was dropped from the memory because there was no room, though its client may come for it. Each is told once.
    pub(crate) fn take_dropped(&mut self) -> Vec<Dropped> {
        self.memory.take_dropped()
    }

    /// Ends a call whose time without a client is over, as [`finish`](Self::finish) does: unless its client has come
    /// back, or is about to. Between the look at a clock and the cancel the lock is free (invariant 6).
    pub(crate) fn finish_due(&mut self, id: CallId, ended: Ended<A>) -> Option<Finished> {
        let is_due = self.calls.get(id)?.clock()?.given_out;
        is_due.then(|| self.finish(id, Some(ended)))?
    }

    /// Ends a call that has no client, none that is coming back, and none that may have come back unseen.
    pub(crate) fn finish_detached(&mut self, id: CallId, ended: Ended<A>) -> Option<Finished> {
        let times = self.times_of(id)?;
        let is_alone = times.clock.is_some() && !times.is_held() && !times.is_spared;
        is_alone.then(|| self.finish(id, Some(ended)))?
    }

    /// The accepted calls of a session that is ending. What is remembered of it goes, and so do their streams: should
    /// the session start anew, it counts them anew.
    pub(crate) fn take_accepted(&mut self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.memory.clear(session, &self.common.totals);
        let owns_id = |place: &Place| place.owns_id && place.session == session;
        let taken = self.calls_that(|entry| entry.place.as_ref().is_some_and(owns_id));
        for (id, _) in &taken {
            if let Some(entry) = self.calls.get_mut(*id) {
                let streams = mem::take(&mut entry.streams);
                self.forget_streams(*id, session, &streams);
            }
        }
        taken
    }
}
