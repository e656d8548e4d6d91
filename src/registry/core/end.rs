//! How a call leaves: finished, or with its session.

use std::mem;

use super::{
    Core,
    entry::Finished,
    memory::Dropped,
    remembered::{Ended, Leaving},
};
use crate::call::{CallId, SessionKey};

// === impl Core ===

impl<T: Clone, A: Clone> Core<T, A> {
    /// Ends a call. `None` if it has ended before, or left (invariants 2 and 9). What `remember` says stays
    /// known under its streams.
    pub(crate) fn finish(&mut self, id: CallId, remember: Option<Ended<A>>) -> Option<Finished> {
        let entry = self.take(id)?;
        self.finished = self.finished.wrapping_add(1);
        let injectable = self.free_key(id, &entry);
        let detachment = entry.detachment();
        self.forget_streams(id, &entry);
        let remember = remember.filter(|_| !entry.streams.is_empty());
        let remember = remember.map(|ended| Leaving {
            call: id,
            streams: entry.streams,
            had_client: detachment.is_none(),
            ended,
        });
        self.leave_session(entry.place, remember);
        Some(Finished {
            injectable,
            detachment,
            dropped: self.sessions.memory.has_dropped(),
        })
    }

    /// What was dropped from the memory because there was no room, though its client may come for it. Each is told once.
    pub(crate) fn take_dropped(&mut self) -> Vec<Dropped> {
        self.sessions.memory.take_dropped()
    }

    /// Ends a call whose time without a client is over, as [`finish`](Self::finish) does: unless its client has come
    /// back, or is about to. Between the look at a clock and the cancel the lock is free (invariant 6).
    pub(crate) fn finish_due(&mut self, id: CallId, ended: Ended<A>) -> Option<Finished> {
        let is_due = self.calls.get(&id)?.clock()?.given_out;
        is_due.then(|| self.finish(id, Some(ended)))?
    }

    /// Ends a call that has no client, and none that is coming back.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn finish_detached(&mut self, id: CallId, ended: Ended<A>) -> Option<Finished> {
        let times = self.times_of(id)?;
        let is_alone = times.clock.is_some() && !times.is_held();
        is_alone.then(|| self.finish(id, Some(ended)))?
    }

    /// The calls in flight of a session that is ending. What is remembered of it goes, and so do their
    /// streams: should the session start anew, it counts them anew.
    pub(crate) fn take_session(&mut self, session: &SessionKey) -> Vec<(CallId, T)> {
        let Some((slot, found)) = self.session(session) else {
            return Vec::new();
        };
        let calls = self.calls_of(found);
        let owners = calls.filter(|(_, entry)| entry.place.as_ref().is_some_and(|it| it.owns_key));
        let owners = owners.map(|(id, entry)| (id, entry.call.clone()));
        let owners: Vec<(CallId, T)> = owners.collect();
        self.sessions.forget_all_of(slot);
        for (id, _) in &owners {
            let entry = self.calls.get_mut(id);
            let streams = entry.map(|entry| mem::take(&mut entry.streams));
            let Some(streams) = streams else {
                continue;
            };
            for stream in streams.iter() {
                self.unname(slot, stream, *id);
                if streams.are_shared() {
                    // One that is not accepted yet may have it too, and stays.
                    self.name_by_another(slot, stream);
                }
            }
        }
        owners
    }
}
