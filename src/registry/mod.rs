//! The registry of all calls in flight, and of some that ended.
//!
//! A call lives in its session: `core` is the state machine of one session id, without clock or lock; `street` has the
//! cores of all, each behind a lock of its own, and the timer looks at those that have something due. A lock is held
//! for a map operation, never across an await or a callback.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::{sync::Notify, time::Instant};

use self::{
    limit_warnings::LimitWarnings, managers::Managers, session_map::SessionMap,
    streams::OpenStreams,
};
use crate::{
    call::{CallId, Key, Scope, SessionKey},
    limits::{Limit, Limits},
    lock::lock,
    observe::SetupHints,
    timer::Timer,
};

mod answer;
mod core;
mod drain;
mod eviction;
mod limit_warnings;
mod managers;
mod session_map;
mod streams;
mod totals;
mod tracked;

#[cfg(fuzzing)]
pub(crate) use self::core::as_the_model_says_of;
pub(crate) use self::{
    answer::{Answer, AnswerContent},
    core::{
        Completion, DetachOutcome, DetachedState, Entry, EventIdFormat, EvictedAnswer, ExpiryToken,
        Finished, Generation, NO_GENERATION, POST_GENERATION, RetainedOutcome, UNOBSERVED_TTL,
        numbers,
    },
    managers::Manager,
    session_map::{Core, DeferredEffects, SessionEntry, Untracked},
    streams::StreamHandle,
    tracked::Tracked,
};

pub(crate) type Named<T> = core::EventMatch<Arc<T>, Answer>;

type Call<T> = (CallId, Arc<T>);

pub(crate) struct Registry<T> {
    sessions: Arc<SessionMap<T>>,
    /// How many want room in the memory.
    pending_evictions: AtomicUsize,
    /// The streams that no call keeps.
    streams: Mutex<OpenStreams>,
    /// Nothing is to go on: the server is through.
    closed: AtomicBool,
    /// How many answers are on their way from a session manager to their clients, as far as that lasts.
    deliveries: AtomicUsize,
    managers: Managers,
    pub(crate) limit_warnings: LimitWarnings,
    pub(crate) hints: SetupHints,
}

// === impl Registry ===

impl<T: Tracked> Registry<T> {
    pub(crate) fn new() -> Self {
        Self {
            sessions: SessionMap::new(),
            pending_evictions: AtomicUsize::new(0),
            streams: Mutex::default(),
            closed: AtomicBool::new(false),
            deliveries: AtomicUsize::new(0),
            managers: Managers::default(),
            limit_warnings: LimitWarnings::default(),
            hints: SetupHints::default(),
        }
    }

    /// Knows the sessions of a session manager from now on.
    pub(crate) fn add_manager(&self, manager: Weak<dyn Manager>) {
        self.managers.add(manager);
    }

    /// The session manager that has a session, by its scope.
    pub(crate) fn manager_of(&self, session: &str) -> Option<Scope> {
        self.managers.scope_of(session)
    }

    /// Uses a session of a session manager until what is returned is dropped.
    pub(crate) fn use_session(&self, session: &str) -> Option<Box<dyn Send + Sync>> {
        self.managers.begin_use(session)
    }

    pub(crate) fn timer(&self) -> &Arc<Timer> {
        &self.sessions.timer
    }

    /// Notified when calls have ended while somebody drains.
    pub(crate) fn ended(&self) -> &Notify {
        &self.sessions.ended
    }

    /// Has `start` start a call in the home of its session id, or in one for calls that have none. `true` if it comes
    /// too late: the server is through, and it is to end at once.
    pub(crate) fn start<R>(
        &self,
        id: CallId,
        session_id: Option<&Arc<str>>,
        start: impl FnOnce(&Arc<SessionEntry<T>>, &mut Core<T>) -> R,
    ) -> (R, DeferredEffects<T>, bool) {
        let (result, later) = self.sessions.with_or_insert(session_id, id, start);
        // Who closed the registry did so before looking for calls: one of the two sees the other.
        (result, later, self.is_closed())
    }

    /// Runs one operation on the core of a session id of which something is known.
    pub(crate) fn with_session<R>(
        &self,
        session_id: &str,
        operation: impl FnOnce(&mut Core<T>) -> R,
    ) -> Option<R> {
        Some(self.sessions.find(session_id)?.with(operation))
    }

    /// What an event id of a session names.
    pub(crate) fn match_event(&self, session: &SessionKey, event_id: &[u8]) -> Named<T> {
        let named = self.with_session(&session.id, |core| {
            core.match_event(&session.scope, event_id)
        });
        named.unwrap_or(Named::Nothing)
    }

    /// The call with this key, if its request was accepted.
    pub(crate) fn find(&self, key: &Key) -> Option<Call<T>> {
        let Key { session, request } = key;
        self.with_session(&session.id, |core| core.find(&session.scope, request))?
    }

    /// The same, also if its request is not accepted yet.
    pub(crate) fn find_unaccepted_too(&self, key: &Key) -> Option<Call<T>> {
        let Key { session, request } = key;
        self.with_session(&session.id, |core| {
            core.find_unaccepted_too(&session.scope, request)
        })?
    }

    /// The accepted calls of a session that is ending.
    pub(crate) fn begin_close(&self, session: &SessionKey) -> Vec<Call<T>> {
        let taken = self.with_session(&session.id, |core| core.begin_close(&session.scope));
        taken.unwrap_or_default()
    }

    /// The calls of a session whose requests are not accepted yet.
    pub(crate) fn unaccepted_in(&self, session: &SessionKey) -> Vec<Call<T>> {
        let unaccepted = self.with_session(&session.id, |core| core.unaccepted(&session.scope));
        unaccepted.unwrap_or_default()
    }

    pub(crate) fn detached_in(&self, session: &SessionKey) -> Vec<Call<T>> {
        let detached = self.with_session(&session.id, |core| core.detached(&session.scope));
        detached.unwrap_or_default()
    }

    /// Whether a client that is away may come for something to a session.
    pub(crate) fn is_awaited(&self, session: &SessionKey, now: Instant) -> bool {
        let awaited = self.with_session(&session.id, |core| core.is_awaited(&session.scope, now));
        awaited.unwrap_or(false)
    }

    /// Whether anything is known of a session: calls in flight, or some that ended.
    pub(crate) fn has_session(&self, session: &SessionKey) -> bool {
        let has = self.with_session(&session.id, |core| core.has_session(&session.scope));
        has.unwrap_or(false)
    }

    /// A call in flight, wherever it lives.
    pub(crate) fn call(&self, id: CallId) -> Option<Arc<T>> {
        let mut homes = self.sessions.entries();
        homes.find_map(|home| home.read(|core| core.call(id).cloned()))
    }

    /// Looks at every call that is in flight now, a few at a time: no other call waits long for a lock. One that ends
    /// or comes meanwhile may be among them; each of the others is, once.
    pub(crate) fn scan_calls<R>(
        &self,
        look: impl Fn(CallId, &Entry<Arc<T>>) -> Option<R> + Clone,
    ) -> impl Iterator<Item = R> {
        let before = CallId::next();
        let homes = self.sessions.entries();
        homes.flat_map(move |home| home.scan_calls(before, look.clone()))
    }

    /// Whether calls in flight that have this session id are of several servers, each of which gave it out.
    pub(crate) fn is_ambiguous(&self, session_id: &str) -> bool {
        self.with_session(session_id, |core| core.has_several_sessions())
            .unwrap_or(false)
    }

    /// The same, for those of a session id.
    pub(crate) fn calls_of(&self, session_id: &str) -> impl Iterator<Item = Call<T>> {
        let home = self.sessions.find(session_id).into_iter();
        let before = CallId::next();
        let call = |id, entry: &Entry<Arc<T>>| Some((id, entry.call.clone()));
        home.flat_map(move |home| home.scan_calls(before, call))
    }

    /// How many calls are in flight.
    pub(crate) fn len(&self) -> usize {
        self.sessions.common.totals.in_flight()
    }

    /// How many of them have no client.
    pub(crate) fn detached(&self) -> usize {
        self.sessions.common.totals.detached()
    }

    pub(crate) fn limit(&self, limits: Limits) {
        self.sessions.common.totals.limit(limits);
    }

    /// Whether another call may be tracked. Asked without a lock, so at the limit a few may slip in that come at the same
    /// moment.
    pub(crate) fn has_capacity(&self) -> bool {
        self.len() < self.sessions.common.totals.max(Limit::Calls)
    }

    /// Keeps a stream that ends by itself, to close it in the end if it does not.
    pub(crate) fn register_ending_stream(&self, stream: Weak<dyn StreamHandle>) {
        self.streams().add(stream);
    }

    /// Keeps a stream that no call keeps, to close it in the end.
    pub(crate) fn register_stream(&self, stream: Weak<dyn StreamHandle>) {
        self.register_ending_stream(stream.clone());
        if let Some(stream) = stream.upgrade().filter(|_| self.is_closed()) {
            stream.close();
        }
    }

    /// Whether streams that open are to be closed.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn streams(&self) -> MutexGuard<'_, OpenStreams> {
        lock(&self.streams)
    }
}

/// Has a call say that it is gone, if one is. No lock is held.
pub(crate) fn report<T: Tracked>(left: Option<Untracked<T>>) {
    if let Some((id, call, finished)) = left {
        call.on_untracked(id, finished);
    }
}

impl<T> fmt::Debug for Registry<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registry").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
