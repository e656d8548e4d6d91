//! The state of all calls in flight, and of some that ended, without clock, lock or task.
//!
//! `now` is always passed in, and nothing here calls out: the caller acts on what is returned. `T` is
//! whatever the caller wants back for a call, `A` an answer that is kept for a client to come back for.
//!
//! # Invariants
//!
//! 1. **Accepted first.** A call owns its [`Key`] only once the inner service accepted it ([`Core::claim`]).
//!    Before that it cannot touch another call.
//! 2. **One end.** [`Core::finish`] ends a call at most once. A cancel may be injected into the server only
//!    if no other call owns its key, or waits to.
//! 3. **Only detached calls are orphaned.** An attached call ends by its answer, at the deadline that its policy
//!    gave it, or because somebody asked.
//! 4. **Generations.** The first stream of a call is generation 1, each accepted resume the next. Attached
//!    means: the newest lives. Older ones may end as they like.
//! 5. **Hold.** A resume that names a stream of the call stops the clock until it is answered, one at a
//!    time and at most [`entry::MAX_HOLD`] past the deadline.
//! 6. **Detach.** A grace starts in full with every detach. Only resumes that brought no event
//!    (a server that the layer alone watches) renew it no more than [`MAX_BARREN`] times in a row.
//! 7. **Late wake-ups.** A deadline that is noticed more than [`entry::LATE`] late is put off once: the runtime was
//!    starved, and the resumes wait in the accept queue. A hold may be who notices; its own time is not late.
//! 8. **Names.** Requests and streams are found in their own session only. Of a call's opaque event ids
//!    the first and the latest [`entry::MAX_EVENT_IDS`] are known; when more came, any unknown id of the session
//!    may be one of them.
//!    The calls of a batch share their streams.
//! 9. **A reused id** makes the older call leave, untouched. It is returned once, to be reported, and never again.
//! 10. **Server-side ends** of attached calls are the exchange's: see there.
//! 11. **Memory.** An ended call is remembered by its streams for a while, see [`memory`].
//! 12. **The end of a session** ends its calls, and nothing of it is remembered ([`Core::take_session`]).
//! 13. **Nothing stays** but calls in flight and the memory. A detached call without a deadline whose end
//!     cannot be seen is forgotten after [`UNSEEN_FOR`], never cancelled. One beyond the [`Limits`] leaves
//!     at once, likewise.
//! 14. **In doubt, nothing is cancelled.**

use std::{collections::BTreeSet, mem, time::Duration};

use tokio::time::Instant;

use self::{
    entry::{Clock, Look, Streams},
    index::{ById, Ids, Names, Slot, Slots},
    memory::Memory,
    scopes::Scopes,
};
use super::limits::{Limit, Limits};
use crate::{call::CallId, detach::Detachment};

mod detached;
mod entry;
mod find;
mod index;
mod memory;
mod scopes;

#[cfg(feature = "rmcp")]
pub(crate) use self::index::numbered;
#[cfg(fuzzing)]
pub(crate) use self::model::as_the_model_says_of;
pub(crate) use self::{
    entry::{Entry, Expired, FIRST, Generation, LATE, Wait},
    find::Named,
    index::{Key, Scope, SessionKey, StreamId},
    memory::{End, Ended, Limits as MemoryLimits},
};

/// How many resumes in a row may renew the grace although they brought nothing: 20, a minute for
/// a client that polls every 3 s.
pub(crate) const MAX_BARREN: u32 = 20;

/// How long a detached call is kept that has no deadline and whose end nobody watches: 1 h, longer than
/// any proxy keeps a silent stream open.
pub(crate) const UNSEEN_FOR: Duration = Duration::from_secs(60 * 60);

/// What a detach did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Detached {
    /// The call has ended, or a newer stream of it lives, or it was detached already.
    Stale,
    /// Its deadline is now.
    Due,
    Waiting,
    /// It has left: there are too many already.
    Beyond(Limit, Finished),
}

/// A call that has just ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Finished {
    /// Whether a cancel may be sent to the server under its JSON-RPC id (invariant 2).
    pub(crate) injectable: bool,
    /// Its time without a client, if it had none.
    pub(crate) detachment: Option<Detachment>,
}

/// A call that is gone without having been finished.
pub(crate) type Left<T> = (CallId, T, Finished);

#[derive(Debug)]
pub(crate) struct Core<T, A> {
    names: Names,
    calls: ById<Entry<T>>,
    /// Requests and streams by name. A stream may belong to a call that has ended.
    index: Slots<CallId>,
    /// The calls of each session, in flight or remembered.
    sessions: Slots<Ids>,
    scopes: Scopes,
    memory: Memory<A>,
    due: BTreeSet<(Instant, CallId)>,
    detached: detached::Detached,
    finished: usize,
}

// === impl Core ===

impl<T: Clone, A: Clone> Core<T, A> {
    pub(crate) fn new() -> Self {
        Self {
            names: Names::default(),
            calls: ById::default(),
            index: Slots::default(),
            sessions: Slots::default(),
            scopes: Scopes::default(),
            memory: Memory::new(),
            due: BTreeSet::new(),
            detached: detached::Detached::default(),
            finished: 0,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    /// How many calls have ended so far.
    pub(crate) fn finished(&self) -> usize {
        self.finished
    }

    /// The calls in flight.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        self.calls.iter().map(|(id, entry)| (*id, entry))
    }

    // --- A call comes ---

    /// A call that may last to `deadline`.
    pub(crate) fn start(
        &mut self,
        id: CallId,
        key: Option<Key>,
        call: T,
        deadline: Option<Instant>,
    ) {
        if let Some(key) = &key {
            self.scopes.note(&key.session.scope);
        }
        let session = key.as_ref().map(|key| self.names.session(&key.session));
        let named = session.zip(key.as_ref());
        let slot = named.map(|(session, key)| self.names.request(session, &key.request));
        let entry = Entry::new(call, key, session, slot, deadline);
        self.calls.insert(id, entry);
        if let Some(session) = session {
            self.sessions.entry(session).or_default().insert(id);
        }
        if deadline.is_some() {
            self.schedule(id);
        }
    }

    /// Makes an accepted call the owner of its key. Another owner leaves (invariant 9).
    pub(crate) fn claim(&mut self, id: CallId) -> Option<Left<T>> {
        let entry = self.calls.get_mut(&id)?;
        let slot = entry.slot?;
        entry.owns_key = true;
        let older = self.index.insert(slot, id).filter(|older| *older != id)?;
        if self.calls.get(&older)?.key != self.calls.get(&id)?.key {
            // Another name with the same hash.
            return None;
        }
        let entry = self.leave(older)?;
        self.forget_streams(older, &entry);
        self.finished = self.finished.wrapping_add(1);
        let finished = Finished {
            injectable: false,
            detachment: entry.detachment(),
        };
        Some((older, entry.call, finished))
    }

    /// Claims a better key for a call than the one it was started with. Its streams get new names.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn rekey(&mut self, id: CallId, key: Key) -> Option<Left<T>> {
        let mut entry = self.leave(id)?;
        self.forget_streams(id, &entry);
        self.free_key(id, &entry);
        self.scopes.note(&key.session.scope);
        let session = self.names.session(&key.session);
        let slot = self.names.request(session, &key.request);
        entry.rekey(key, session, slot);
        if entry.detached.is_some() {
            self.detached.enter(Some(session));
        }
        self.calls.insert(id, entry);
        self.sessions.entry(session).or_default().insert(id);
        self.schedule(id);
        self.claim(id)
    }

    /// Notes an event id of a call's stream.
    pub(crate) fn name(&mut self, id: CallId, event_id: &[u8]) {
        let stream = self.names.stream_id(event_id);
        let Some(entry) = self.calls.get_mut(&id) else {
            return;
        };
        let Some(session) = entry.session else {
            return;
        };
        let Some(forgotten) = entry.streams.add(stream) else {
            return;
        };
        let former = self.index.insert(self.names.stream(session, stream), id);
        if let Some(other) = former.and_then(|former| self.calls.get_mut(&former))
            && other.streams.contains(stream)
        {
            other.streams.shared = true;
            if let Some(entry) = self.calls.get_mut(&id) {
                entry.streams.shared = true;
            }
        }
        if let Some(forgotten) = forgotten {
            self.unname(session, forgotten, id);
        }
    }

    /// Notes that a call's event ids are not all known, because its stream cannot be read.
    pub(crate) fn blur(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(&id) {
            entry.streams.overflowed = true;
        }
    }

    // --- Its client goes and comes ---

    /// Notes that a stream of a call has just ended. `barren`: it was a resume that brought no event.
    pub(crate) fn detach(
        &mut self,
        id: CallId,
        generation: Generation,
        mut wait: Wait,
        barren: bool,
        detachment: Detachment,
    ) -> Detached {
        let Some(entry) = self.calls.get_mut(&id) else {
            return Detached::Stale;
        };
        if entry.generation != generation || entry.detached.is_some() {
            return Detached::Stale;
        }
        entry.barren = if barren { entry.barren + 1 } else { 0 };
        if let Wait::Until { deadline, .. } = &mut wait {
            if entry.barren > MAX_BARREN {
                *deadline = entry.last_deadline.unwrap_or(*deadline).min(*deadline);
            }
            entry.last_deadline = Some(*deadline);
        }
        entry.detached = Some(Box::new(Clock {
            detachment,
            wait,
            put_off: false,
            released: None,
        }));
        let session = entry.session;
        let is_due = matches!(entry.grace_ends(), Some(at) if at <= detachment.since());
        if !is_due && let Some(limit) = self.detached.full(session) {
            // It never was among them.
            entry.detached = None;
            let finished = self.finish(id, None);
            return finished.map_or(Detached::Stale, |it| Detached::Beyond(limit, it));
        }
        self.detached.enter(session);
        if is_due {
            return Detached::Due;
        }
        self.schedule(id);
        Detached::Waiting
    }

    /// Notes that a resume of a call was accepted: its stream is the newest from now on.
    pub(crate) fn attach(&mut self, id: CallId) -> Option<Generation> {
        let entry = self.calls.get_mut(&id)?;
        entry.generation = entry.generation.next();
        if entry.detached.take().is_some() {
            self.detached.leave(entry.session);
        }
        entry.held = false;
        let generation = entry.generation;
        self.schedule(id);
        Some(generation)
    }

    /// Stops the clock of a call. `None` if it is held already, or has ended.
    pub(crate) fn hold(&mut self, id: CallId, now: Instant) -> Option<Generation> {
        let entry = self.calls.get_mut(&id)?;
        let held = entry.hold(now).then_some(entry.generation);
        if held.is_some() {
            self.schedule(id);
        }
        held
    }

    /// Lets the clock of a call go on that was held in this generation. A hold ends with its generation, and
    /// the next one is somebody else's.
    pub(crate) fn release(&mut self, id: CallId, generation: Generation, now: Instant) {
        if let Some(entry) = self.calls.get_mut(&id)
            && entry.generation == generation
            && entry.release(now)
        {
            self.schedule(id);
        }
    }

    /// Lets a detached call run on unseen: its client may have come back, on a stream that is not known
    /// to be this call's.
    pub(crate) fn spare(&mut self, id: CallId, now: Instant) {
        if let Some(entry) = self.calls.get_mut(&id) {
            entry.held = false;
            if let Some(clock) = &mut entry.detached {
                clock.wait = Wait::Unseen(now + UNSEEN_FOR);
            }
            self.schedule(id);
        }
    }

    /// Nobody watches for the end of a detached call any more.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn lose_sight(&mut self, id: CallId, generation: Generation, now: Instant) {
        if let Some(entry) = self.calls.get_mut(&id)
            && entry.generation == generation
            && let Some(clock) = &mut entry.detached
            && clock.wait == Wait::ForItsEnd
        {
            clock.wait = Wait::Unseen(now + UNSEEN_FOR);
            self.schedule(id);
        }
    }

    // --- A call ends ---

    /// Ends a call. `None` if it has ended before, or left (invariants 2 and 9). What `remember` says stays
    /// known under its streams.
    pub(crate) fn finish(&mut self, id: CallId, remember: Option<Ended<A>>) -> Option<Finished> {
        let entry = self.leave(id)?;
        self.finished = self.finished.wrapping_add(1);
        let finished = Finished {
            injectable: self.free_key(id, &entry),
            detachment: entry.detachment(),
        };
        match (remember, &entry.key) {
            (Some(ended), Some(key)) if !entry.streams.is_empty() => {
                let key = key.session.clone();
                self.remember(id, entry.session, key, entry.streams, ended);
            }
            _ => self.forget_streams(id, &entry),
        }
        Some(finished)
    }

    /// Ends a call as [`finish`](Self::finish) does, unless its client has come back: between the look at a
    /// deadline and its cancel the lock is free (invariant 3).
    pub(crate) fn finish_detached(&mut self, id: CallId, ended: Ended<A>) -> Option<Finished> {
        self.is_detached(id).then(|| self.finish(id, Some(ended)))?
    }

    /// The calls in flight of a session that is ending. What is remembered of it goes, and so do their
    /// streams: should the session start anew, it counts them anew.
    pub(crate) fn take_session(&mut self, session: &SessionKey) -> Vec<(CallId, T)> {
        let slot = self.names.session(session);
        let in_flight: Vec<(CallId, T)> = self
            .calls_of(slot, session)
            .filter(|(_, entry)| entry.owns_key)
            .map(|(id, entry)| (id, entry.call.clone()))
            .collect();
        for id in self.sessions.get(&slot).cloned().unwrap_or_default() {
            if self.memory.is_of(id, session) {
                self.forget(id);
            }
        }
        for (id, _) in &in_flight {
            let entry = self.calls.get_mut(id);
            let streams = entry.map(|entry| mem::take(&mut entry.streams));
            for stream in streams.iter().flat_map(Streams::iter) {
                self.unname(slot, stream, *id);
            }
        }
        in_flight
    }

    /// The calls whose time is over by `now`. They stay until they are finished, but for those that are
    /// forgotten.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<(CallId, T, Expired)> {
        while let Some(id) = self.memory.ended(now) {
            self.forget(id);
        }
        let mut over = Vec::new();
        while let Some((at, id)) = self.due.pop_first() {
            if at > now {
                self.due.insert((at, id));
                break;
            }
            if let Some(entry) = self.calls.get_mut(&id) {
                entry.due = None;
                match entry.look(now, at) {
                    Look::Over(expired) => {
                        over.push((id, entry.call.clone(), expired));
                        // Its client may come back before it is cancelled.
                        if let Some(deadline) = entry.deadline.filter(|at| *at > now) {
                            entry.due = Some(deadline);
                            self.due.insert((deadline, id));
                        }
                    }
                    Look::PutOff => self.schedule(id),
                    Look::Forget => {
                        let call = entry.call.clone();
                        let finished = self.finish(id, None);
                        over.extend(finished.map(|it| (id, call, Expired::Unseen(it))));
                    }
                }
            }
        }
        over
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let call = self.due.first().map(|(at, _)| *at);
        call.into_iter().chain(self.memory.next_end()).min()
    }

    // --- The parts ---

    /// Takes a call out of everything but the index, where the other calls of its batch take its place.
    fn leave(&mut self, id: CallId) -> Option<Entry<T>> {
        let entry = self.calls.remove(&id)?;
        if entry.detached.is_some() {
            self.detached.leave(entry.session);
        }
        if let Some(at) = entry.due {
            self.due.remove(&(at, id));
        }
        if let Some(session) = entry.session {
            self.leave_session(session, id);
            if entry.streams.shared {
                self.hand_over(session, id, &entry);
            }
        }
        Some(entry)
    }

    fn hand_over(&mut self, session: Slot, id: CallId, entry: &Entry<T>) {
        let Some(key) = &entry.key else {
            return;
        };
        for stream in entry.streams.iter() {
            let slot = self.names.stream(session, stream);
            if self.index.get(&slot) == Some(&id)
                && let Some(other) = self.on_stream(session, &key.session, stream).first()
            {
                self.index.insert(slot, *other);
            }
        }
    }

    /// Gives up the key of a call that left. `false` if it has none, or another call may be meant by it.
    fn free_key(&mut self, id: CallId, entry: &Entry<T>) -> bool {
        let (Some(key), Some(session), Some(slot)) = (&entry.key, entry.session, entry.slot) else {
            return false;
        };
        match self.index.get(&slot) {
            Some(owner) if *owner == id => self.index.remove(&slot).is_some(),
            Some(_) => false,
            None => {
                let mut others = self.calls_of(session, &key.session);
                !others.any(|(_, other)| other.key.as_ref() == Some(key))
            }
        }
    }

    fn leave_session(&mut self, session: Slot, id: CallId) {
        if let Some(ids) = self.sessions.get_mut(&session) {
            ids.remove(&id);
            if ids.is_empty() {
                self.sessions.remove(&session);
            }
        }
    }

    fn forget_streams(&mut self, id: CallId, entry: &Entry<T>) {
        if let Some(session) = entry.session {
            for stream in entry.streams.iter() {
                self.unname(session, stream, id);
            }
        }
    }

    fn unname(&mut self, session: Slot, stream: StreamId, id: CallId) {
        let slot = self.names.stream(session, stream);
        if self.index.get(&slot) == Some(&id) {
            self.index.remove(&slot);
        }
    }

    /// Enters a call's next look into `due`, or takes it out.
    fn schedule(&mut self, id: CallId) {
        let Some(entry) = self.calls.get_mut(&id) else {
            return;
        };
        let at = entry.next_look();
        let former = mem::replace(&mut entry.due, at);
        if former == at {
            return;
        }
        if let Some(former) = former {
            self.due.remove(&(former, id));
        }
        if let Some(at) = at {
            self.due.insert((at, id));
        }
    }

    fn remember(
        &mut self,
        id: CallId,
        slot: Option<Slot>,
        session: SessionKey,
        streams: Streams,
        ended: Ended<A>,
    ) {
        let Some(slot) = slot else {
            return;
        };
        self.sessions.entry(slot).or_default().insert(id);
        for forgotten in self.memory.keep(id, slot, session, streams, ended) {
            self.forget(forgotten);
        }
    }

    /// Forgets an ended call.
    fn forget(&mut self, id: CallId) {
        if let Some(kept) = self.memory.take(id) {
            self.leave_session(kept.slot, id);
            for stream in kept.streams.iter() {
                self.unname(kept.slot, stream, id);
            }
        }
    }

    pub(crate) fn limit_memory(&mut self, limits: MemoryLimits) {
        self.memory.limits = limits;
    }

    pub(crate) fn limit(&mut self, limits: Limits) {
        self.detached.limits = limits;
    }
}

#[cfg(any(test, fuzzing))]
#[allow(
    clippy::indexing_slicing,
    clippy::unwrap_used,
    reason = "a test, which the fuzzer runs too"
)]
mod model;
#[cfg(test)]
mod tests;
