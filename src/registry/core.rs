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
//! 4. **Live streams.** The stream of the POST is generation 1, that of each accepted resume the next. Attached
//!    means: one of them lives, whichever. They may be accepted, attached and dropped in any order, and each goes once.
//! 5. **Holds are counted.** Each resume that names a stream of the call stops the clock until it is answered, at most
//!    [`entry::MAX_HOLD`] past the deadline. One that is refused or dropped takes its own hold away and no other's.
//! 6. **Detach.** A grace starts in full with every detach. A cancel goes through only while the very clock that ran
//!    out still stands so ([`Core::finish_due`]). Only resumes that brought no event
//!    (a server that the layer alone watches) renew it no more than [`MAX_BARREN`] times in a row.
//! 7. **Late wake-ups.** The end of a grace that is noticed late is not acted on: the runtime stood still, and the
//!    resumes wait in the accept queue. More than [`entry::LATE`] late, or noticed by another runtime because its own
//!    stands still, it is put off for long, once. Else more than [`entry::JITTER`] late, it is looked at again
//!    [`entry::GLANCE`] later, until that look is not more than [`entry::ON_TIME`] late itself, [`entry::MAX_GLANCES`]
//!    times at most. A hold may be what notices; its own time is not late.
//! 8. **Names.** Requests and streams are found in their own session only. An event id names the stream that it was seen
//!    on; only rmcp's own also name the stream by their number ([`Form`]). Of a call's event ids
//!    the first and the latest [`streams::MAX_EVENT_IDS`] are known; when more came, any unknown id of the session
//!    may be one of them.
//!    The calls of a batch share their streams.
//! 9. **A reused id** makes the older call leave, untouched. It is returned once, to be reported, and never again.
//! 10. **Server-side ends** of attached calls are the exchange's: see there.
//! 11. **Memory.** An ended call is remembered by its streams at least until its time, see [`memory`].
//! 12. **The end of a session** ends its calls, and nothing of it is remembered ([`Core::take_session`]).
//! 13. **Nothing stays** but calls in flight and the memory. A detached call without a deadline whose end
//!     cannot be seen is forgotten after [`UNSEEN_FOR`], never cancelled. One beyond the [`Limits`] leaves
//!     at once, likewise.
//! 14. **In doubt, nothing is cancelled.**

use std::{
    collections::{BTreeSet, hash_map},
    mem,
    time::Duration,
};

use tokio::time::Instant;

use self::{
    entry::{Look, Place, Times},
    index::{ById, Names, Slot, Slots},
    memory::Leaving,
    room::GiveBack,
    scopes::Scopes,
    sessions::Sessions,
    streams::Streams,
};
use super::limits::{Limit, Limits};
use crate::{call::CallId, detach::Detachment};

mod detached;
mod entry;
mod find;
mod index;
mod memory;
mod room;
mod scopes;
mod sessions;
mod streams;

#[cfg(fuzzing)]
pub(crate) use self::model::as_the_model_says_of;
#[cfg(feature = "rmcp")]
pub(crate) use self::{entry::NOBODYS, index::numbers};
pub(crate) use self::{
    entry::{Entry, Expired, FIRST, GLANCE, Generation, LATE, ON_TIME, Wait},
    find::Named,
    index::{Key, Scope, SessionKey, StreamId},
    memory::{Dropped, End, Ended, Limits as MemoryLimits},
    streams::Form,
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
    /// The call has ended, or another stream of it lives, or this one was gone already.
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
    /// Whether something was [dropped](Core::take_dropped) from the memory.
    pub(crate) dropped: bool,
}

/// A call that is gone without having been finished.
pub(crate) type Left<T> = (CallId, T, Finished);

#[derive(Debug)]
pub(crate) struct Core<T, A> {
    names: Names,
    calls: ById<Entry<T>>,
    /// Requests and streams of calls in flight, by name.
    index: Slots<CallId>,
    sessions: Sessions<A>,
    scopes: Scopes,
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
            sessions: Sessions::new(),
            scopes: Scopes::default(),
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
        let place = key.and_then(|key| self.enter(id, key));
        self.calls.insert(id, Entry::new(call, place, deadline));
        if deadline.is_some() {
            self.schedule(id);
        }
    }

    /// Makes an accepted call the owner of its key. Another owner leaves (invariant 9).
    pub(crate) fn claim(&mut self, id: CallId) -> Option<Left<T>> {
        let place = self.calls.get_mut(&id)?.place.as_mut()?;
        place.owns_key = true;
        let slot = self.names.request(place.session, &place.request);
        let older = self.index.insert(slot, id).filter(|older| *older != id)?;
        let place = self.calls.get(&id)?.place.as_ref()?;
        // Else it is another name with the same hash.
        let former = self.calls.get(&older);
        let former = former.filter(|former| former.is(place.session, &place.request))?;
        let call = former.call.clone();
        Some((older, call, self.finish(older, None)?))
    }

    /// Claims a better key for a call than the one it was started with. Its streams get new names.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn rekey(&mut self, id: CallId, key: Key) -> Option<Left<T>> {
        let mut entry = self.take(id)?;
        self.forget_streams(id, &entry);
        self.free_key(id, &entry);
        self.leave_session(entry.place.take(), None);
        entry.place = self.enter(id, key);
        entry.streams = Streams::default();
        if entry.clock().is_some() {
            self.detached.enter(entry.session());
        }
        self.calls.insert(id, entry);
        self.schedule(id);
        self.claim(id)
    }

    /// Notes an event id of a call's stream.
    pub(crate) fn name(&mut self, id: CallId, event_id: &[u8], form: Form) {
        let session = self.calls.get(&id).and_then(Entry::session);
        let Some(session) = session else {
            return;
        };
        let stream = match (form, index::numbers(event_id)) {
            #[cfg(any(feature = "rmcp", test, fuzzing))]
            (Form::Rmcp, Some((_, stream))) => StreamId::Numbered(stream),
            (Form::Any, Some(numbers)) if self.name_in_run(id, session, numbers) => return,
            _ => StreamId::Opaque(self.names.event(event_id)),
        };
        let entry = self.calls.get_mut(&id);
        let Some(forgotten) = entry.and_then(|entry| entry.streams.add(stream)) else {
            return;
        };
        let former = self.index.insert(self.names.stream(session, stream), id);
        if let Some(former) = former {
            self.share(former, id, stream);
        }
        if let Some(forgotten) = forgotten {
            self.unname(session, forgotten, id);
        }
    }

    /// Notes an event that counts up from the last, or from nothing. `false` if it does not, or if another call of the
    /// session counts so.
    fn name_in_run(&mut self, id: CallId, session: Slot, (index, stream): (u64, u64)) -> bool {
        let Some(entry) = self.calls.get_mut(&id) else {
            return true;
        };
        if !entry.streams.is_empty() {
            return entry.streams.continue_run(index, stream);
        }
        let name = StreamId::Numbered(stream);
        let event = index::EventId {
            numbers: Some((index, stream)),
            hash: 0,
        };
        let other = self.owner(session, name);
        let other = other.map(|(other, entry)| (other, entry.streams.have(event)));
        if other.is_some_and(|(_, has_it)| !has_it) {
            return false;
        }
        let entry = self.calls.get_mut(&id);
        if !entry.is_some_and(|entry| entry.streams.start_run(index, stream)) {
            return false;
        }
        self.index.insert(self.names.stream(session, name), id);
        if let Some((other, _)) = other {
            self.share(other, id, name);
        }
        true
    }

    /// Notes that two calls have a stream, if the former still has it.
    fn share(&mut self, former: CallId, id: CallId, stream: StreamId) {
        if former != id
            && let Some(other) = self.calls.get_mut(&former)
            && other.streams.iter().any(|its| its == stream)
        {
            other.streams.share();
            if let Some(entry) = self.calls.get_mut(&id) {
                entry.streams.share();
            }
        }
    }

    /// Notes that a call's event ids are not all known, because its stream cannot be read.
    pub(crate) fn blur(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(&id) {
            entry.streams.blur();
        }
    }

    // --- Its client goes and comes ---

    /// Notes that a stream of a call has just ended. `barren`: it was a resume that brought no event.
    pub(crate) fn detach(
        &mut self,
        id: CallId,
        stream: Generation,
        wait: Wait,
        barren: bool,
        detachment: Detachment,
    ) -> Detached {
        let Some(entry) = self.calls.get_mut(&id) else {
            return Detached::Stale;
        };
        if !entry.remove_stream(stream) || entry.has_stream() {
            return Detached::Stale;
        }
        let session = entry.session();
        let times = entry.times_mut();
        let ends = times.detach(wait, barren, detachment);
        let is_due = ends.is_some_and(|at| at <= detachment.since());
        if !is_due && let Some(limit) = self.detached.full(session) {
            // It never was among them.
            times.clock = None;
            let finished = self.finish(id, None);
            return finished.map_or(Detached::Stale, |it| Detached::Beyond(limit, it));
        }
        self.detached.enter(session);
        if is_due {
            times.give_out();
        }
        self.schedule(id);
        match is_due {
            true => Detached::Due,
            false => Detached::Waiting,
        }
    }

    /// Notes that a resume of a call was accepted: another stream of it lives from now on.
    pub(crate) fn attach(&mut self, id: CallId) -> Option<Generation> {
        let entry = self.calls.get_mut(&id)?;
        let stream = entry.add_stream();
        let session = entry.session();
        if entry.times_mut().clock.take().is_some() {
            self.detached.leave(session);
            self.schedule(id);
        }
        Some(stream)
    }

    /// Adds a hold to a call: its clock stops. `false` if it has ended.
    pub(crate) fn hold(&mut self, id: CallId, now: Instant) -> bool {
        let Some(entry) = self.calls.get_mut(&id) else {
            return false;
        };
        entry.times_mut().hold(now);
        self.schedule(id);
        true
    }

    /// Takes a hold away that was added once.
    pub(crate) fn release(&mut self, id: CallId, now: Instant) {
        if let Some(times) = self.times_of(id) {
            times.release(now);
            self.schedule(id);
        }
    }

    /// Lets a detached call run on unseen: its client may have come back, on a stream that is not known
    /// to be this call's.
    pub(crate) fn spare(&mut self, id: CallId, now: Instant) {
        if let Some(times) = self.times_of(id) {
            times.spare(now + UNSEEN_FOR);
            self.schedule(id);
        }
    }

    /// A task reads a stream of a call on, to see its end.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn read_on(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(&id) {
            entry.times_mut().add_reader();
            self.schedule(id);
        }
    }

    /// Such a task has ended. After the last of them nobody watches for the call's end any more.
    #[cfg(any(feature = "rmcp", test, fuzzing))]
    pub(crate) fn lose_sight(&mut self, id: CallId, now: Instant) {
        if let Some(times) = self.times_of(id) {
            times.remove_reader(now + UNSEEN_FOR);
            self.schedule(id);
        }
    }

    // --- A call ends ---

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
            for stream in streams.iter().flat_map(Streams::iter) {
                self.unname(slot, stream, *id);
            }
        }
        owners
    }

    /// The calls whose time is over by `now`. They stay until they are finished, but for those that are
    /// forgotten.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<(CallId, T, Expired)> {
        self.expire_when(now, false)
    }

    /// The same. `starved`: a runtime that serves requests is known to stand still (invariant 7).
    pub(crate) fn expire_when(&mut self, now: Instant, starved: bool) -> Vec<(CallId, T, Expired)> {
        self.sessions.forget_due(now);
        let mut over = Vec::new();
        while let Some((at, id)) = self.due.pop_first() {
            if at > now {
                self.due.insert((at, id));
                break;
            }
            if let Some(entry) = self.calls.get_mut(&id) {
                let times = entry.times_mut();
                times.due = None;
                match times.look(now, at, starved) {
                    Look::Over(Expired::Deadline) => {
                        over.push((id, entry.call.clone(), Expired::Deadline));
                    }
                    Look::Over(expired) => {
                        over.push((id, entry.call.clone(), expired));
                        self.schedule(id);
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
        call.into_iter()
            .chain(self.sessions.memory.next_end())
            .min()
    }

    // --- The parts ---

    /// Finds a call the place that its key gives it. `None` if there is none.
    fn enter(&mut self, id: CallId, key: Key) -> Option<Place> {
        self.scopes.note(&key.session.scope);
        let session = self.names.session(&key.session);
        Some(Place {
            session,
            seat: self.sessions.enter(session, key.session, id)?,
            request: key.request,
            owns_key: false,
        })
    }

    /// Takes a call out of everything but its session and the index, where the other calls of its batch take its place.
    fn take(&mut self, id: CallId) -> Option<Entry<T>> {
        let mut entry = self.calls.remove(&id)?;
        self.calls.give_back();
        if let Some(times) = &mut entry.times {
            if let Some(at) = times.due.take() {
                self.due.remove(&(at, id));
            }
            if times.clock.is_some() {
                self.detached.leave(entry.session());
            }
        }
        if entry.streams.are_shared() {
            self.hand_over(id, &entry);
        }
        Some(entry)
    }

    fn hand_over(&mut self, id: CallId, entry: &Entry<T>) {
        let Some(session) = entry.session() else {
            return;
        };
        for stream in entry.streams.iter() {
            let slot = self.names.stream(session, stream);
            if self.index.get(&slot) == Some(&id)
                && let Some(other) = self.on_stream(session, stream).first()
            {
                self.index.insert(slot, *other);
            }
        }
    }

    /// Gives up the key of a call that left. `false` if it has none, or another call may be meant by it.
    fn free_key(&mut self, id: CallId, entry: &Entry<T>) -> bool {
        let Some(place) = &entry.place else {
            return false;
        };
        let slot = self.names.request(place.session, &place.request);
        if let Some(was_its_own) = self.free(slot, id) {
            return was_its_own;
        }
        let mut others = self.calls_in(place.session);
        !others.any(|(_, other)| other.is(place.session, &place.request))
    }

    /// Takes a call that left out of its session, which may remember it.
    fn leave_session(&mut self, place: Option<Place>, remember: Option<Leaving<A>>) {
        if let Some(place) = place
            && let Some(follows) = self.sessions.leave(&place, remember)
            && let Some(entry) = self.calls.get_mut(&follows)
            && let Some(its) = &mut entry.place
        {
            its.seat = place.seat;
        }
    }

    fn forget_streams(&mut self, id: CallId, entry: &Entry<T>) {
        if let Some(session) = entry.session() {
            for stream in entry.streams.iter() {
                self.unname(session, stream, id);
            }
        }
    }

    fn unname(&mut self, session: Slot, stream: StreamId, id: CallId) {
        let slot = self.names.stream(session, stream);
        self.free(slot, id);
    }

    /// Frees a name if it is a call's own, and says whether it was. `None` if it is nobody's.
    fn free(&mut self, slot: Slot, id: CallId) -> Option<bool> {
        let hash_map::Entry::Occupied(owner) = self.index.entry(slot) else {
            return None;
        };
        let is_owner = *owner.get() == id;
        if is_owner {
            owner.remove();
            self.index.give_back();
        }
        Some(is_owner)
    }

    /// Enters a call's next look into `due`, or takes it out.
    fn schedule(&mut self, id: CallId) {
        let Some(times) = self.times_of(id) else {
            return;
        };
        let at = times.next_look();
        let former = mem::replace(&mut times.due, at);
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

    fn times_of(&mut self, id: CallId) -> Option<&mut Times> {
        self.calls.get_mut(&id)?.times.as_deref_mut()
    }

    pub(crate) fn limit_memory(&mut self, limits: MemoryLimits) {
        self.sessions.memory.limits = limits;
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
