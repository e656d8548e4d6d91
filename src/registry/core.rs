//! The calls of one session id, in flight and remembered, without clock, lock or task.
//!
//! `now` is always passed in, and nothing here calls out: the caller acts on what is returned. `T` is what the caller wants back
//! for a call, and `A` is an answer that is kept for a client to come back for. [`Totals`] counts what sessions have together.
//! An id means one session in each scope that gave it out, which is nearly always one scope. Calls without a session live in
//! cores too, where they have no names.
//!
//! # Invariants
//!
//! 1. **Accepted first.** A call owns its JSON-RPC id only once the inner service accepted it ([`Core::claim`]).
//!    Before that it cannot touch another call.
//! 2. **One end.** [`Core::finish`] ends a call at most once. A cancel may be injected into the server only
//!    if no other call of its session owns its id, or waits to,
//!    and no request that is not tracked may have it ([`Core::contest`]).
//! 3. **Only detached calls are orphaned.** An attached call ends by its answer, at the deadline that its policy
//!    gave it, or because somebody asked.
//! 4. **Live streams.** The stream of the POST is generation 1, that of each accepted resume the next. Attached
//!    means: one of them lives, whichever. They may be accepted, attached and dropped in any order, and each goes once.
//! 5. **Holds are counted.** Each resume that names a stream of the call stops the clock until it is answered, at most
//!    [`call_timers::MAX_HOLD`] past the deadline. One that is refused or dropped takes its own hold away and no other's.
//! 6. **Detach.** A grace starts in full with every detach. A cancel goes through only while the very clock that ran
//!    out still stands so ([`Core::finish_due`]). Where somebody is asked before it, the same holds for the answer
//!    ([`Core::confirm`], [`Core::put_off`]), and the clock is looked at once more: what stood still meanwhile is noticed, and
//!    then it is asked again.
//!    Only resumes that brought no event
//!    (a server that the layer alone watches) renew it no more than [`call_timers::MAX_BARREN`] times in a row.
//! 7. **Late wake-ups.** The end of a grace that is noticed late is not acted on: the runtime stood still, and the
//!    resumes wait in the accept queue. More than [`STALL_THRESHOLD`](crate::timer::STALL_THRESHOLD) late, or noticed by another
//!    runtime because its own stands still, it is put off for long, once. Else more than [`call_timers::JITTER`] late, it is
//!    looked at again [`RECHECK_DELAY`](crate::timer::RECHECK_DELAY) later, until that look is not more than
//!    [`RECHECK_TOLERANCE`](crate::timer::RECHECK_TOLERANCE) late itself, [`MAX_RECHECKS`](crate::timer::MAX_RECHECKS) times at most. A hold
//!    may be what notices; its own time is not late. Nor is what the timer comes to late because it has much to do, while
//!    it lets the runtime serve its clients ([`LatenessTracker`](crate::timer::LatenessTracker)).
//! 8. **Names.** An event id names the stream that it was seen on; only rmcp's own also name the stream by their number
//!    ([`Form`]). Of a call's event ids the first and the latest [`streams::MAX_EVENT_IDS`] are known; when more came,
//!    any unknown id of the session may be one of them.
//! 9. **A reused id** makes the older call leave, untouched. It is returned once, to be reported, and never again.
//! 10. **Server-side ends** of attached calls are the exchange's: see there.
//! 11. **Memory.** An ended call is remembered by its streams at least until its time, see [`memory`]. If it had no client, that
//!     is not before the end of its grace, and not before its patience is over: both were decided when the client went.
//! 12. **The end of a session** ends its calls, and nothing of it is remembered ([`Core::take_accepted`]).
//! 13. **Nothing stays** but calls in flight and the memory. A detached call whose end cannot be seen is forgotten after
//!     [`UNSEEN_FOR`], not cancelled; one that has a deadline not before that. One beyond the limits leaves at once.
//! 14. **In doubt, nothing is cancelled.** A call that is [spared](Core::spare) runs on, be its client's loss noticed before or
//!     after that, until its client resumes. No other call supersedes it.

use std::{collections::BTreeSet, mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use self::{
    call_timers::CallTimers, entry::CallKey, index::ScopeSet, retention::RetainedCalls,
    small_map::SmallMap,
};
use super::totals::Totals;
use crate::{
    call::{CallId, Detachment, RequestId, Scope},
    limits::Limit,
};

mod call_timers;
mod contest;
mod due;
mod end;
mod entry;
mod generation;
mod index;
mod lookup;
mod retained_call;
mod retention;
mod shrink_if_sparse;
mod small_map;
mod streams;

#[cfg(fuzzing)]
pub(crate) use self::model::as_the_model_says_of;
pub(crate) use self::{
    call_timers::{DetachedState, ExpiryToken},
    entry::{Entry, Expired, Finished},
    generation::{Generation, NO_GENERATION, POST_GENERATION},
    index::{KeyHash, KeyHasher, PrehashedMap, numbers},
    lookup::EventMatch,
    retained_call::{Completion, DeliveryState, PerDeliveryState, RetainedOutcome},
    retention::EvictedAnswer,
    shrink_if_sparse::ShrinkIfSparse,
    streams::EventIdFormat,
};

/// How long a detached call is kept that has no deadline and whose end nobody watches: 1 h, longer than
/// any proxy keeps a silent stream open.
pub(crate) const UNOBSERVED_TTL: Duration = Duration::from_secs(60 * 60);

/// What a detach did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DetachOutcome {
    /// The call has ended, or another stream of it lives, or this one was gone already.
    Ignored,
    /// Its deadline is now.
    CancelNow,
    Waiting,
    /// It has left: there are too many already.
    OverLimit(Limit, Finished),
    /// It has left: nobody can see its end.
    Untracked(Finished),
}

/// A call that is gone without having been finished.
pub(crate) type Untracked<T> = (CallId, T, Finished);

/// What the cores of a registry share.
#[derive(Debug, Default)]
pub(crate) struct RegistryShared {
    pub(crate) hasher: KeyHasher,
    pub(crate) totals: Totals,
}

#[derive(Debug)]
pub(crate) struct SessionState<T, A> {
    shared: Arc<RegistryShared>,
    /// The session id and its hash. Calls without one have no names.
    session_id: Option<(Arc<str>, KeyHash)>,
    scopes: ScopeSet,
    calls: SmallMap<CallId, Entry<T>>,
    /// Requests and streams of calls in flight, by name.
    index: SmallMap<KeyHash, CallId>,
    /// Two calls had the same event id, or might have: from then on all are looked through.
    has_shared_event_ids: bool,
    /// Of some call not all event ids were known by name.
    has_incomplete_event_ids: bool,
    retained: RetainedCalls<A>,
    /// Since somebody last asked.
    has_completed: bool,
    due: BTreeSet<(Instant, CallId)>,
    detached: usize,
}

// === impl Core ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    pub(crate) fn new(
        common: Arc<RegistryShared>,
        session_id: Option<(Arc<str>, KeyHash)>,
    ) -> Self {
        Self {
            shared: common,
            session_id,
            scopes: ScopeSet::None,
            calls: SmallMap::default(),
            index: SmallMap::default(),
            has_shared_event_ids: false,
            has_incomplete_event_ids: false,
            retained: RetainedCalls::default(),
            has_completed: false,
            due: BTreeSet::new(),
            detached: 0,
        }
    }

    /// How many calls are in flight.
    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Whether nothing is known of the session: no call in flight, and none that is remembered.
    pub(crate) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.retained.is_empty()
    }

    /// Whether calls have ended since this was asked last, and somebody waits for that.
    pub(crate) fn take_completion_flag(&mut self) -> bool {
        mem::take(&mut self.has_completed) && self.shared.totals.is_tracking_completions()
    }

    /// The calls in flight.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        self.calls.iter()
    }

    /// Those of them that came after one and before another, oldest first.
    pub(crate) fn calls_between(
        &self,
        after: Option<CallId>,
        before: CallId,
    ) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        let calls = self.calls.after(after);
        calls.take_while(move |(id, _)| *id < before)
    }

    // --- A call comes ---

    /// A call that may last to `deadline`. It is found by its `name`, if it is known who gave out its session's id.
    pub(crate) fn start(
        &mut self,
        id: CallId,
        name: Option<(Scope, RequestId)>,
        call: T,
        deadline: Option<Instant>,
    ) {
        let place = name.and_then(|(scope, request)| {
            let session = self.session(&scope)?;
            self.scopes = self.scopes.with(session);
            Some(CallKey::new(session, request))
        });
        self.shared.totals.add_call();
        self.calls.insert(id, Entry::new(call, place, deadline));
        if deadline.is_some() {
            self.schedule(id);
        }
    }

    /// Makes an accepted call the owner of its id. Another owner leaves (invariant 9).
    pub(crate) fn accept(&mut self, id: CallId) -> Option<Untracked<T>> {
        let place = self.calls.get_mut(id)?.key.as_mut()?;
        place.is_accepted = true;
        let slot = self.shared.hasher.request(place.session, &place.request);
        let older = self.index.insert(slot, id).filter(|older| *older != id)?;
        let place = self.calls.get(id)?.key.as_ref()?;
        // Else it is another name with the same hash.
        let former = self.calls.get(older);
        let former = former.filter(|former| former.has_key(place.session, &place.request))?;
        let call = former.call.clone();
        Some((older, call, self.finish(older, None)?))
    }

    /// Makes an accepted call the owner of its id, unless another call in flight owns it. Returns whether it does.
    pub(crate) fn try_accept(&mut self, id: CallId) -> bool {
        let Some(place) = self.calls.get(id).and_then(|entry| entry.key.as_ref()) else {
            return true;
        };
        let slot = self.shared.hasher.request(place.session, &place.request);
        let owner = self
            .index
            .get(slot)
            .and_then(|owner| self.calls.get(*owner));
        let is_owned = owner.is_some_and(|owner| owner.has_key(place.session, &place.request));
        // No other call leaves: none owned the id.
        !is_owned && self.accept(id).is_none()
    }

    /// Claims another name for a call than the one it was started with, or than none. Its streams get new names.
    pub(crate) fn rekey(
        &mut self,
        id: CallId,
        scope: &Scope,
        request: RequestId,
    ) -> Option<Untracked<T>> {
        let session = self.session(scope)?;
        let entry = self.calls.get_mut(id)?;
        self.scopes = self.scopes.with(session);
        let streams = mem::take(&mut entry.streams);
        let former = entry.key.replace(CallKey::new(session, request));
        if let Some(former) = former {
            self.unindex_streams(id, former.session, &streams);
            self.unindex_request(id, &former);
        }
        self.accept(id)
    }

    // --- Its client goes and comes ---

    /// Notes that a stream of a call has just ended. `barren`: it was a resume that brought no event.
    pub(crate) fn detach(
        &mut self,
        id: CallId,
        stream: Generation,
        wait: DetachedState,
        is_empty_resume: bool,
        detachment: Detachment,
    ) -> DetachOutcome {
        let Some(entry) = self.calls.get_mut(id) else {
            return DetachOutcome::Ignored;
        };
        if !entry.remove_stream(stream) || entry.has_stream() {
            return DetachOutcome::Ignored;
        }
        let times = entry.timers_mut();
        let ends = times.detach(wait, is_empty_resume, detachment);
        let is_due = ends.is_some_and(|at| at <= detachment.since());
        if is_due {
            times.mark_expired();
            self.shared.totals.add_detached();
        } else if let Some(limit) = self.exceeded_limit(id) {
            if let Some(times) = self.timers_of(id) {
                // It never was among them.
                times.grace_timer = None;
            }
            let finished = self.finish(id, None);
            return finished.map_or(DetachOutcome::Ignored, |it| {
                DetachOutcome::OverLimit(limit, it)
            });
        }
        self.detached += 1;
        self.schedule(id);
        if is_due {
            DetachOutcome::CancelNow
        } else {
            DetachOutcome::Waiting
        }
    }

    /// Removes a stream of a call that may have been answered. Ends the call if that was its last stream.
    pub(crate) fn remove_stream(&mut self, id: CallId, stream: Generation) -> Option<Finished> {
        let entry = self.calls.get_mut(id)?;
        let is_last = entry.remove_stream(stream) && !entry.has_stream();
        is_last.then(|| self.finish(id, None))?
    }

    /// The limit that keeps another call without a client out, if one does. That of the session comes first. Else it
    /// is counted among all.
    fn exceeded_limit(&self, id: CallId) -> Option<Limit> {
        let totals = &self.shared.totals;
        let most = totals.max(Limit::DetachedOfSession);
        let is_met = self.detached >= most
            && (self.scopes != ScopeSet::Several || self.other_detached(id) >= most);
        if self.session_id.is_some() && is_met {
            return Some(Limit::DetachedOfSession);
        }
        (!totals.try_add_detached()).then_some(Limit::Detached)
    }

    /// How many other calls of its session have no client, where others have its id.
    fn other_detached(&self, id: CallId) -> usize {
        let session = self.calls.get(id).and_then(Entry::session);
        let others = self.calls().filter(|(other, _)| *other != id);
        let its = others.filter(|(_, entry)| entry.session() == session);
        its.filter(|(_, entry)| entry.grace_timer().is_some())
            .count()
    }

    /// Ends a call in place of a [`detach`](Self::detach): nobody can see its end any more.
    pub(crate) fn untrack(&mut self, id: CallId, stream: Generation) -> DetachOutcome {
        let Some(entry) = self.calls.get_mut(id) else {
            return DetachOutcome::Ignored;
        };
        if !entry.remove_stream(stream) || entry.has_stream() {
            return DetachOutcome::Ignored;
        }
        let finished = self.finish(id, None);
        finished.map_or(DetachOutcome::Ignored, DetachOutcome::Untracked)
    }

    /// Notes that a resume of a call was accepted: another stream of it lives from now on.
    pub(crate) fn attach(&mut self, id: CallId) -> Option<Generation> {
        let entry = self.calls.get_mut(id)?;
        let stream = entry.add_stream();
        let times = entry.timers_mut();
        times.is_maybe_resumed = false;
        if times.grace_timer.take().is_some() {
            self.remove_detached();
            self.schedule(id);
        }
        Some(stream)
    }

    /// Adds a hold to a call: its clock stops. `false` if it has ended.
    pub(crate) fn begin_resume(&mut self, id: CallId, now: Instant) -> bool {
        let Some(entry) = self.calls.get_mut(id) else {
            return false;
        };
        entry.timers_mut().begin_resume(now);
        self.schedule(id);
        true
    }

    /// Takes a hold away that was added once.
    pub(crate) fn end_resume(&mut self, id: CallId, now: Instant) {
        if let Some(times) = self.timers_of(id) {
            times.end_resume(now);
            self.schedule(id);
        }
    }

    /// Lets a call run on: its client may have come back, on a stream that is not known to be this call's. An attached call is
    /// [spared](Self::is_spared) when it is detached. Returns `false` if the call has ended.
    pub(crate) fn set_maybe_resumed(&mut self, id: CallId, wait: DetachedState) -> bool {
        let Some(entry) = self.calls.get_mut(id) else {
            return false;
        };
        entry.timers_mut().set_maybe_resumed(wait);
        self.schedule(id);
        true
    }

    /// Whether a call is to run on when it loses its client.
    pub(crate) fn is_maybe_resumed(&self, id: CallId) -> bool {
        let times = self.calls.get(id).and_then(|entry| entry.timers.as_deref());
        times.is_some_and(|times| times.is_maybe_resumed)
    }

    /// A task reads a stream of a call on, to see its end.
    pub(crate) fn add_background_reader(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(id) {
            entry.timers_mut().add_background_reader();
            self.schedule(id);
        }
    }

    /// Such a task has ended. After the last of them nobody watches for the call's end any more, and the call is forgotten at
    /// the given time. `None` if its end is seen elsewhere.
    pub(crate) fn remove_background_reader(&mut self, id: CallId, unseen_until: Option<Instant>) {
        if let Some(times) = self.timers_of(id) {
            times.remove_background_reader(unseen_until);
            self.schedule(id);
        }
    }

    // --- The parts ---

    /// Takes a call out of everything but the index.
    fn remove_entry(&mut self, id: CallId, is_cancelled: bool) -> Option<Entry<T>> {
        let mut entry = self.calls.remove(id)?;
        self.shared.totals.remove_call(is_cancelled);
        if let Some(times) = &mut entry.timers {
            if let Some(at) = times.due.take() {
                self.due.remove(&(at, id));
            }
            if times.grace_timer.is_some() {
                self.remove_detached();
            }
        }
        Some(entry)
    }

    fn remove_detached(&mut self) {
        self.detached = self.detached.saturating_sub(1);
        self.shared.totals.remove_detached();
    }

    fn timers_of(&mut self, id: CallId) -> Option<&mut CallTimers> {
        self.calls.get_mut(id)?.timers.as_deref_mut()
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
