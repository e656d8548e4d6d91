//! The ways in which a call leaves: finished, or with its session.

use std::mem;

use tokio::time::Instant;

use super::{
    SessionState,
    entry::{CallKey, Finished},
    retained_call::{Completion, DeliveryState, EndedCall, RetainedOutcome},
    retention::EvictedAnswer,
};
use crate::call::{CallId, Scope};

// === impl Core ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// Ends a call. `None` if it has ended before, or left (invariants 2 and 9). What `remember` says stays
    /// known under its streams.
    pub(crate) fn finish(
        &mut self,
        id: CallId,
        remember: Option<Completion<A>>,
    ) -> Option<Finished> {
        let is_cancelled = remember
            .as_ref()
            .is_some_and(|ended| matches!(ended.outcome, RetainedOutcome::Cancelled(..)));
        let entry = self.remove_entry(id, is_cancelled)?;
        self.has_completed = true;
        let detachment = entry.detachment();
        let times = entry.timers.as_ref();
        let remember = remember.map(|ended| {
            let owed = times.and_then(|times| times.retained_until(ended.at));
            Completion {
                until: owed.map_or(ended.until, |owed| ended.until.max(owed)),
                ..ended
            }
        });
        let (mut injectable, mut is_too_much) = (false, false);
        if let Some(place) = entry.key {
            injectable = self.unindex_request(id, &place) && place.contests == 0;
            self.unindex_streams(id, place.session, &entry.streams);
            let remember = remember.filter(|_| !entry.streams.is_empty());
            is_too_much = remember.is_some_and(|ended| {
                self.retain(EndedCall {
                    call: id,
                    session: place.session,
                    streams: entry.streams,
                    had_client: detachment.is_none(),
                    completion: ended,
                })
            });
        }
        Some(Finished {
            may_cancel_server: injectable,
            detachment,
            needs_eviction: is_too_much,
        })
    }

    fn retain(&mut self, leaving: EndedCall<A>) -> bool {
        let Some((id, _)) = &self.session_id else {
            return false;
        };
        self.retained.retain(id, leaving, &self.shared.totals)
    }

    /// Forgets the oldest of a rank until not more than so many bytes of it are left.
    pub(crate) fn shrink_retained(&mut self, rank: DeliveryState, to: usize) {
        if let Some((id, _)) = &self.session_id {
            self.retained.shrink(id, rank, to, &self.shared.totals);
        }
    }

    /// How many bytes of a rank are remembered.
    pub(crate) fn bytes_of(&self, rank: DeliveryState) -> usize {
        self.retained.bytes_of(rank)
    }

    /// When the oldest of them is forgotten.
    pub(crate) fn earliest_expiry(&self, rank: DeliveryState) -> Option<Instant> {
        self.retained.earliest_expiry(rank)
    }

    /// What was dropped from the memory because there was no room, though its client may come for it. Each is told once.
    pub(crate) fn take_evicted(&mut self) -> Vec<EvictedAnswer> {
        self.retained.take_evicted()
    }

    /// Ends a call whose time without a client is over, as [`finish`](Self::finish) does: unless its client has come
    /// back, or is about to. Between the look at a clock and the cancel the lock is free (invariant 6).
    pub(crate) fn finish_due(&mut self, id: CallId, ended: Completion<A>) -> Option<Finished> {
        let is_due = self.calls.get(id)?.grace_timer()?.is_expired;
        is_due.then(|| self.finish(id, Some(ended)))?
    }

    /// Ends a call that has no client, none that is coming back, and none that may have come back unseen.
    pub(crate) fn finish_detached(&mut self, id: CallId, ended: Completion<A>) -> Option<Finished> {
        let times = self.timers_of(id)?;
        let is_alone =
            times.grace_timer.is_some() && !times.has_pending_resume() && !times.is_maybe_resumed;
        is_alone.then(|| self.finish(id, Some(ended)))?
    }

    /// The accepted calls of a session that is ending. What is remembered of it goes, and so do their streams: should
    /// the session start anew, it counts them anew.
    pub(crate) fn begin_close(&mut self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.retained.clear(session, &self.shared.totals);
        let owns_id = |place: &CallKey| place.is_accepted && place.session == session;
        let taken = self.calls_where(|entry| entry.key.as_ref().is_some_and(owns_id));
        for (id, _) in &taken {
            if let Some(entry) = self.calls.get_mut(*id) {
                let streams = mem::take(&mut entry.streams);
                self.unindex_streams(*id, session, &streams);
            }
        }
        taken
    }
}
