//! The state machine for one session id's calls, in flight and retained.
//!
//! It has no clock, no lock and no task: `now` is always passed in, and instead of calling back, each function returns what its caller has
//! to do. `T` is the caller's handle to a call, and `A` is an answer retained for a resuming client. [`Totals`] counts across all sessions.
//!
//! Nearly always, a session id refers to a single session. If several scopes have issued the same id, it refers to a different session in
//! each scope. Calls without a session are tracked in session states too, but have no keys.
//!
//! # Invariants
//!
//! 1. **Accepted first.** A call owns its JSON-RPC id only once the inner service has accepted its request ([`SessionState::accept`]).
//!    Until then, the call cannot affect any other.
//! 2. **One end.** [`SessionState::finish`] ends a call at most once. A cancellation may be injected into the server only if it cannot be
//!    applied to another request: either the call owns its id, or no other call in its session has that id. In addition, no untracked
//!    request in progress may be using the id ([`SessionState::contest`]).
//! 3. **Only detached calls are orphaned.** An attached call is only cancelled at its policy's deadline, or explicitly.
//! 4. **Live streams.** The POST's stream is generation 1, and each accepted resume gets the next generation. A call is attached while at
//!    least one of its streams is open. Streams may be attached and dropped in any order, and each is removed once.
//! 5. **Pending resumes are counted.** While a resume of any of the call's streams is pending, the grace period does not expire until
//!    [`call_timers::MAX_RESUME_WAIT`] past its deadline. A refused or dropped resume does not affect any other pending resume.
//! 6. **Detach.** Every detach starts a full grace period. Once it has expired, the caller either cancels the call
//!    ([`SessionState::finish_due`]), or requests a confirmation and applies the answer ([`SessionState::confirm`],
//!    [`SessionState::postpone`]). None of these has any effect if the expiry no longer holds by then.
//!    - After a confirmation, the timer is checked once more. If the runtime has stalled in the meantime, and no earlier stall has extended
//!      the grace period, the confirmation is requested again.
//!    - Resumes that deliver no events renew the grace period at most [`call_timers::MAX_EMPTY_RESUMES`] times in a row, but they are only
//!      recognised if no session manager tracks the call. A resume that is turned away counts towards this limit
//!      ([`SessionState::renew_grace`]).
//! 7. **Late wake-ups.** If a grace period is found to have expired late, the runtime has been stalled and resumes may be waiting in the
//!    accept queue, so the call is not cancelled at once. A late expiry may also be discovered by a resume before the timer runs.
//!    - If the expiry is more than [`STALL_THRESHOLD`](crate::timer::STALL_THRESHOLD) late, or if the call's own runtime is stalled and
//!      another runtime is handling the call, the grace period is extended once, by at least [`call_timers::MAX_RESUME_WAIT`].
//!    - Otherwise, if it is more than [`call_timers::TIMER_RESOLUTION`] late, it is rechecked every
//!      [`RECHECK_DELAY`](crate::timer::RECHECK_DELAY), until a check is at most [`RECHECK_TOLERANCE`](crate::timer::RECHECK_TOLERANCE)
//!      late or it has been rechecked [`MAX_RECHECKS`](crate::timer::MAX_RECHECKS) times.
//!    - A deadline is not late if it passes while a resume is pending, or if it is only delayed by a backlog in the timer task, because
//!      that task lets the runtime serve its clients in between ([`LatenessTracker`](crate::timer::LatenessTracker)).
//!    - A retained call that expired during a stall is likewise kept for another [`call_timers::MAX_RESUME_WAIT`], once, but is not
//!      rechecked otherwise.
//! 8. **Event ids.** An event id identifies the stream it was seen on. If it is in rmcp's own format, any other event id with the same
//!    stream number identifies that stream too ([`EventIdFormat`]). A call stores its first event id and the latest
//!    [`event_ids::MAX_EVENT_IDS`]. Older opaque ids are still recognised as possibly belonging to the call ([`forgotten_ids`]). If one of
//!    its streams cannot be read, any unknown id in the session may belong to the call.
//! 9. **A reused id** untracks the older call without cancelling it. The older call is returned to the caller exactly once, for reporting.
//! 10. **Server-side ends.** If the server ends one of an attached call's streams, the exchange handles it.
//! 11. **Retention.** An ended call is retained under its streams' event ids until its deadline, unless it is evicted ([`retention`]). If
//!     the call was detached, the deadline is never before the end of its grace period, and is at least its resume window after the call
//!     ended.
//! 12. **Closing a session** ends its calls and retains none of them ([`SessionState::begin_close`]).
//! 13. **Nothing is stored** except in-flight and retained calls. A detached call whose end cannot be observed is removed after
//!     [`UNOBSERVED_TTL`], without being cancelled. If it has a deadline, it is instead tracked until then and cancelled. A detached call
//!     over a limit is removed at once.
//! 14. **When in doubt, nothing is cancelled.** A call that [may have been resumed](SessionState::mark_maybe_resumed) keeps running until
//!     its client resumes, whether it was marked before or after its stream was lost. No other call supersedes it.

use std::{collections::BTreeSet, mem, sync::Arc, time::Duration};

use tokio::time::Instant;

use self::{
    call_timers::CallTimers, entry::CallKey, event_ids::EventIds, index::ScopeSet,
    retention::RetainedCalls, small_map::SmallMap,
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
mod event_ids;
mod forgotten_ids;
mod generation;
mod index;
mod lookup;
mod resume;
mod retained_call;
mod retention;
mod shrink_if_sparse;
mod small_map;

#[cfg(fuzzing)]
pub(crate) use self::model::check_against_model;
pub(crate) use self::{
    call_timers::{DetachedState, ExpiryToken},
    entry::{Entry, Expired, Finished},
    event_ids::EventIdFormat,
    generation::{Generation, NO_GENERATION, POST_GENERATION},
    index::{KeyHash, KeyHasher, PrehashedMap, numbers},
    lookup::EventMatch,
    retained_call::{Completion, DeliveryState, PerDeliveryState, RetainedOutcome},
    shrink_if_sparse::ShrinkIfSparse,
};

/// How long a detached call is tracked if it has no deadline and its end cannot be observed.
///
/// Proxies close silent streams sooner than this.
pub(crate) const UNOBSERVED_TTL: Duration = Duration::from_secs(60 * 60);

/// What happened to a call when one of its streams was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DetachOutcome {
    /// The call has ended, it has another open stream, or this stream was already removed.
    Ignored,
    /// The call's deadline has already been reached.
    CancelNow,
    /// The call keeps running until it is resumed, reaches its deadline or ends.
    Waiting,
    /// The call is no longer tracked, because it would have exceeded a limit.
    OverLimit(Limit, Finished),
    /// The call is no longer tracked, because its end cannot be observed.
    Untracked(Finished),
}

/// A call removed from the registry while it is still running.
pub(crate) type UntrackedCall<T> = (CallId, T, Finished);

/// State shared by all of a registry's sessions.
#[derive(Debug, Default)]
pub(crate) struct RegistryShared {
    pub(crate) hasher: KeyHasher,
    pub(crate) totals: Totals,
}

/// The state of one session id's calls. See the [module docs](self).
#[derive(Debug)]
pub(crate) struct SessionState<T, A> {
    shared: Arc<RegistryShared>,
    /// The session id and its hash. `None` for calls without a session, which have no keys.
    session_id: Option<(Arc<str>, KeyHash)>,
    scopes: ScopeSet,
    calls: SmallMap<CallId, Entry<T>>,
    /// Accepted in-flight calls, by the hash of their key.
    by_request: SmallMap<KeyHash, CallId>,
    retained: RetainedCalls<A>,
    /// Whether any calls have ended since the last [`take_completion_flag`](Self::take_completion_flag).
    has_completed: bool,
    due: BTreeSet<(Instant, CallId)>,
    detached: usize,
    /// The longest `retry` of any of the calls' ended streams.
    longest_retry: Option<Duration>,
}

// === impl SessionState ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    pub(crate) fn new(
        shared: Arc<RegistryShared>,
        session_id: Option<(Arc<str>, KeyHash)>,
    ) -> Self {
        Self {
            shared,
            session_id,
            scopes: ScopeSet::None,
            calls: SmallMap::default(),
            by_request: SmallMap::default(),
            retained: RetainedCalls::default(),
            has_completed: false,
            due: BTreeSet::new(),
            detached: 0,
            longest_retry: None,
        }
    }

    /// Returns the number of calls in flight.
    pub(crate) fn len(&self) -> usize {
        self.calls.len()
    }

    /// Returns `true` if the session has no in-flight or retained calls.
    pub(crate) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.retained.is_empty()
    }

    /// Clears the flag set when a call ends. Returns `true` if it was set and completions are being tracked.
    pub(crate) fn take_completion_flag(&mut self) -> bool {
        mem::take(&mut self.has_completed) && self.shared.totals.is_tracking_completions()
    }

    /// Returns the calls in flight.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        self.calls.iter()
    }

    /// Returns the in-flight calls that started after `after`, oldest first.
    pub(crate) fn calls_after(&self, after: CallId) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        self.calls.after(Some(after))
    }

    /// Returns the in-flight calls that started after `after` and before `before`, oldest first.
    pub(crate) fn calls_between(
        &self,
        after: Option<CallId>,
        before: CallId,
    ) -> impl Iterator<Item = (CallId, &Entry<T>)> {
        let calls = self.calls.after(after);
        calls.take_while(move |(id, _)| *id < before)
    }

    // --- Starting a call ---

    /// Starts a call, which is cancelled at `deadline` at the latest.
    ///
    /// `key` is its lookup key, which is `None` for a stateless call or while the session's scope is not yet known.
    pub(crate) fn start(
        &mut self,
        id: CallId,
        key: Option<(Scope, RequestId)>,
        call: T,
        deadline: Option<Instant>,
    ) {
        let key = key.and_then(|(scope, request)| {
            let session = self.session(&scope)?;
            self.scopes = self.scopes.with(session);
            Some(CallKey::new(session, request))
        });
        self.shared.totals.add_call();
        self.calls.insert(id, Entry::new(call, key, deadline));
        if deadline.is_some() {
            self.schedule(id);
        }
    }

    /// Makes an accepted call the owner of its id. Any previous owner is untracked and returned (invariant 9).
    pub(crate) fn accept(&mut self, id: CallId) -> Option<UntrackedCall<T>> {
        let key = self.calls.get_mut(id)?.key.as_mut()?;
        key.is_accepted = true;
        let slot = self.shared.hasher.request(key.session, &key.request);
        let older = self
            .by_request
            .insert(slot, id)
            .filter(|older| *older != id)?;
        let key = self.calls.get(id)?.key.as_ref()?;
        let previous = self.calls.get(older);
        // If only the hashes are equal, the older call has a different key and stays tracked.
        let previous = previous.filter(|previous| previous.has_key(key.session, &key.request))?;
        let call = previous.call.clone();
        Some((older, call, self.finish(older, None)?))
    }

    /// Makes an accepted call the owner of its id, unless another in-flight call already owns it.
    ///
    /// Returns `true` if the call now owns the id, has no key, or has ended. Must be called only once for each call.
    pub(crate) fn try_accept(&mut self, id: CallId) -> bool {
        let Some(key) = self.calls.get(id).and_then(|entry| entry.key.as_ref()) else {
            return true;
        };
        let slot = self.shared.hasher.request(key.session, &key.request);
        let accepted_call = self
            .by_request
            .get(slot)
            .and_then(|accepted_call| self.calls.get(*accepted_call));
        let is_owned = accepted_call
            .is_some_and(|accepted_call| accepted_call.has_key(key.session, &key.request));
        // This `accept` cannot untrack another call, because none owned the id.
        !is_owned && self.accept(id).is_none()
    }

    /// Accepts a call under a different key from the one it was started with. Its event ids have to be re-recorded.
    ///
    /// As with [`accept`](Self::accept), an older call with that key is untracked and returned.
    pub(crate) fn rekey(
        &mut self,
        id: CallId,
        scope: &Scope,
        request: RequestId,
    ) -> Option<UntrackedCall<T>> {
        let session = self.session(scope)?;
        let entry = self.calls.get_mut(id)?;
        self.scopes = self.scopes.with(session);
        entry.event_ids = EventIds::default();
        let previous = entry.key.replace(CallKey::new(session, request));
        if let Some(previous) = previous {
            self.unindex_request(id, &previous);
        }
        self.accept(id)
    }

    // --- Disconnects and resumes ---

    /// Records that one of a call's streams has just ended.
    ///
    /// `resumed_without_events` is `true` if the stream was a resume that delivered no events.
    pub(crate) fn detach(
        &mut self,
        id: CallId,
        stream: Generation,
        state: DetachedState,
        resumed_without_events: bool,
        detachment: Detachment,
    ) -> DetachOutcome {
        let Some(entry) = self.calls.get_mut(id) else {
            return DetachOutcome::Ignored;
        };
        if !entry.remove_stream(stream) || entry.has_stream() {
            return DetachOutcome::Ignored;
        }
        let timers = entry.timers_mut();
        let deadline = timers.detach(state, resumed_without_events, detachment);
        let is_due = deadline.is_some_and(|at| at <= detachment.detached_at());
        if is_due {
            timers.mark_expired();
            self.shared.totals.add_detached();
        } else if let Some(limit) = self.try_add_detached(id) {
            if let Some(timers) = self.timers_of(id) {
                // The call was never counted as detached, so `finish` must not subtract it.
                timers.detached = None;
            }
            let finished = self.finish(id, None);
            return finished.map_or(DetachOutcome::Ignored, |finished| {
                DetachOutcome::OverLimit(limit, finished)
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

    /// Removes a stream from a call that may have been answered. If it was the last stream, the call ends.
    pub(crate) fn remove_stream(&mut self, id: CallId, stream: Generation) -> Option<Finished> {
        let entry = self.calls.get_mut(id)?;
        let is_last = entry.remove_stream(stream) && !entry.has_stream();
        is_last.then(|| self.finish(id, None))?
    }

    /// Counts a call as detached in the totals, or returns the limit that this would exceed. The session's own limit is checked first.
    fn try_add_detached(&self, id: CallId) -> Option<Limit> {
        let totals = &self.shared.totals;
        let max = totals.max(Limit::DetachedPerSession);
        // If several sessions share the id, `self.detached` also counts the other sessions' calls.
        let is_reached = self.detached >= max
            && (self.scopes != ScopeSet::Several || self.other_detached(id) >= max);
        if self.session_id.is_some() && is_reached {
            return Some(Limit::DetachedPerSession);
        }
        (!totals.try_add_detached()).then_some(Limit::Detached)
    }

    /// Returns how many other calls in the session are detached. Only needed if several sessions share the session id.
    fn other_detached(&self, id: CallId) -> usize {
        let session = self.calls.get(id).and_then(Entry::session);
        let others = self.calls().filter(|(other, _)| *other != id);
        let in_session = others.filter(|(_, entry)| entry.session() == session);
        in_session
            .filter(|(_, entry)| entry.detached().is_some())
            .count()
    }

    /// Removes a stream like [`detach`](Self::detach). If it was the last stream, the call's end can no longer be observed, so the call is
    /// untracked.
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

    /// Attaches a call whose resume has been accepted.
    ///
    /// Returns the generation of its new stream, or `None` if the call has ended.
    pub(crate) fn attach(&mut self, id: CallId) -> Option<Generation> {
        let entry = self.calls.get_mut(id)?;
        let stream = entry.add_stream();
        let timers = entry.timers_mut();
        timers.may_have_been_resumed = false;
        if timers.detached.take().is_some() {
            self.remove_detached();
            self.schedule(id);
        }
        Some(stream)
    }

    /// Adds a task that reads one of a call's streams in the background.
    ///
    /// The task will observe the call's end.
    pub(crate) fn add_background_reader(&mut self, id: CallId) {
        if let Some(entry) = self.calls.get_mut(id) {
            entry.timers_mut().add_background_reader();
            self.schedule(id);
        }
    }

    /// Removes a background reader that has ended.
    ///
    /// Once none are left, a detached call's end can no longer be observed, so the call is removed at `unobserved_until`. `None` means that
    /// the end is observed elsewhere, in which case the call is not removed.
    pub(crate) fn remove_background_reader(
        &mut self,
        id: CallId,
        unobserved_until: Option<Instant>,
    ) {
        if let Some(timers) = self.timers_of(id) {
            timers.remove_background_reader(unobserved_until);
            self.schedule(id);
        }
    }

    // --- Helpers ---

    /// Removes a call from everything except the request index.
    fn remove_entry(&mut self, id: CallId, is_cancelled: bool) -> Option<Entry<T>> {
        let mut entry = self.calls.remove(id)?;
        self.shared.totals.remove_call(is_cancelled);
        if let Some(timers) = &mut entry.timers {
            if let Some(at) = timers.due.take() {
                self.due.remove(&(at, id));
            }
            if timers.detached.is_some() {
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
