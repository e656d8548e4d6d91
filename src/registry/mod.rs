//! Tracks in-flight calls and retains the outcomes of ended calls.
//!
//! Calls are grouped by session. `core` is the state machine for a single session id, and has neither a clock nor a lock. `session_map`
//! stores one of these states per session id, each behind its own lock, and the timer checks the sessions with expired deadlines. A lock is
//! held for a single operation, never across an await or a callback.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::{sync::Notify, time::Instant};

use self::{
    limit_warnings::LimitWarnings,
    managers::Managers,
    session_map::{SCAN_BATCH, SessionMap},
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
mod limit_warnings;
mod managers;
mod session_map;
mod streams;
mod totals;
mod tracked;

#[cfg(fuzzing)]
pub(crate) use self::core::check_against_model;
pub(crate) use self::{
    answer::{Answer, AnswerContent},
    core::{
        Completion, DetachOutcome, DetachedState, Entry, EventIdFormat, ExpiryToken, Finished,
        Generation, NO_GENERATION, POST_GENERATION, RetainedOutcome, UNOBSERVED_TTL, numbers,
    },
    managers::Manager,
    session_map::{DeferredEffects, SessionEntry, SessionState, UntrackedCall},
    streams::StreamHandle,
    tracked::Tracked,
};

pub(crate) type EventMatch<T> = core::EventMatch<Arc<T>, Answer>;

type Call<T> = (CallId, Arc<T>);

/// Tracks calls, along with the open streams and the session managers.
pub(crate) struct Registry<T> {
    sessions: Arc<SessionMap<T>>,
    /// Open streams that a drain might not find through an in-flight call.
    streams: Mutex<OpenStreams>,
    /// Whether the server has been drained. If so, newly started calls and streams are ended at once.
    closed: AtomicBool,
    /// Number of answers on their way from a session manager to their clients.
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
            streams: Mutex::default(),
            closed: AtomicBool::new(false),
            deliveries: AtomicUsize::new(0),
            managers: Managers::default(),
            limit_warnings: LimitWarnings::default(),
            hints: SetupHints::default(),
        }
    }

    /// Adds a session manager, so that its sessions can be found.
    pub(crate) fn add_manager(&self, manager: Weak<dyn Manager>) {
        self.managers.add(manager);
    }

    /// Returns the scope of the session manager that has this session, if any.
    pub(crate) fn manager_scope(&self, session: &str) -> Option<Scope> {
        self.managers.scope_of(session)
    }

    /// Marks a session as in use until the returned guard is dropped. Returns `None` if no session manager has the session.
    pub(crate) fn use_session(&self, session: &str) -> Option<Box<dyn Send + Sync>> {
        self.managers.begin_use(session)
    }

    pub(crate) fn timer(&self) -> &Arc<Timer> {
        &self.sessions.timer
    }

    /// Returns the `Notify` that drains wait on.
    ///
    /// It is notified when calls end during a drain, and when the last delivery of an answer ends.
    pub(crate) fn ended(&self) -> &Notify {
        &self.sessions.ended
    }

    /// Runs `start` on a session id's entry, or on an entry for calls without a session.
    ///
    /// The returned flag is `true` if the server has already been drained, in which case the call must end at once.
    pub(crate) fn start<R>(
        &self,
        id: CallId,
        session_id: Option<&Arc<str>>,
        start: impl FnOnce(&Arc<SessionEntry<T>>, &mut SessionState<T>) -> R,
    ) -> (R, DeferredEffects<T>, bool) {
        let (result, deferred) = self.sessions.with_or_insert(session_id, id, start);
        // `close` sets its flag before it scans for calls. Since both lock this entry, either `close` finds this call, or the flag is
        // already set here.
        (result, deferred, self.is_closed())
    }

    /// Runs an operation on a session id's state, or returns `None` if the id has no entry.
    pub(crate) fn with_session<R>(
        &self,
        session_id: &str,
        operation: impl FnOnce(&mut SessionState<T>) -> R,
    ) -> Option<R> {
        Some(self.sessions.find(session_id)?.with(operation))
    }

    /// Returns which of a session's calls an event id matches.
    pub(crate) fn match_event(&self, key: &SessionKey, event_id: &[u8]) -> EventMatch<T> {
        let event_match =
            self.with_session(&key.id, |session| session.match_event(&key.scope, event_id));
        event_match.unwrap_or(EventMatch::Nothing)
    }

    /// Returns the call with this key, or `None` if no accepted request has it.
    pub(crate) fn find(&self, key: &Key) -> Option<Call<T>> {
        self.with_session(&key.session.id, |session| {
            session.find(&key.session.scope, &key.request)
        })?
    }

    /// Returns the call with this key, even if its request has not been accepted yet.
    pub(crate) fn find_including_unaccepted(&self, key: &Key) -> Option<Call<T>> {
        self.with_session(&key.session.id, |session| {
            session.find_including_unaccepted(&key.session.scope, &key.request)
        })?
    }

    /// Starts closing a session: removes its retained calls and returns its accepted calls.
    pub(crate) fn begin_close(&self, key: &SessionKey) -> Vec<Call<T>> {
        let accepted = self.with_session(&key.id, |session| session.begin_close(&key.scope));
        accepted.unwrap_or_default()
    }

    /// Returns the session's calls whose requests have not been accepted yet.
    pub(crate) fn unaccepted_in(&self, key: &SessionKey) -> Vec<Call<T>> {
        let unaccepted = self.with_session(&key.id, |session| session.unaccepted(&key.scope));
        unaccepted.unwrap_or_default()
    }

    pub(crate) fn detached_in(&self, key: &SessionKey) -> Vec<Call<T>> {
        let detached = self.with_session(&key.id, |session| session.detached(&key.scope));
        detached.unwrap_or_default()
    }

    /// Returns `true` if a session's client may still resume.
    ///
    /// This is the case if the session has a detached call, or an undelivered answer still retained and unexpired.
    pub(crate) fn is_awaited(&self, key: &SessionKey, now: Instant) -> bool {
        let is_awaited = self.with_session(&key.id, |session| session.is_awaited(&key.scope, now));
        is_awaited.unwrap_or(false)
    }

    /// Returns `true` if a session has in-flight or retained calls.
    pub(crate) fn has_session(&self, key: &SessionKey) -> bool {
        let has_session = self.with_session(&key.id, |session| session.has_session(&key.scope));
        has_session.unwrap_or(false)
    }

    /// Returns an in-flight call, regardless of its session.
    pub(crate) fn call(&self, id: CallId) -> Option<Arc<T>> {
        let mut entries = self.sessions.entries();
        entries.find_map(|entry| entry.read(|session| session.call(id).cloned()))
    }

    /// Scans the in-flight calls in batches, so that no other call has to wait long for a lock.
    ///
    /// A call that starts or ends during the scan may be missed. Every other call is visited exactly once.
    pub(crate) fn scan_calls<R>(
        &self,
        select: impl Fn(CallId, &Entry<Arc<T>>) -> Option<R> + Clone,
    ) -> impl Iterator<Item = R> {
        let before = CallId::next();
        let entries = self.sessions.entries();
        entries.flat_map(move |entry| entry.scan_calls(before, select.clone()))
    }

    /// Returns `true` if there are in-flight calls with this session id in more than one scope.
    pub(crate) fn is_ambiguous(&self, session_id: &str) -> bool {
        self.with_session(session_id, |session| session.has_several_sessions())
            .unwrap_or(false)
    }

    /// Returns the in-flight calls with this session id, scanning them in batches.
    pub(crate) fn calls_in(&self, session_id: &str) -> impl Iterator<Item = Call<T>> {
        let entry = self.sessions.find(session_id).into_iter();
        let before = CallId::next();
        let call = |id, entry: &Entry<Arc<T>>| Some((id, entry.call.clone()));
        entry.flat_map(move |entry| entry.scan_calls(before, call))
    }

    /// Returns whether any in-flight call with this session id that started after `after` matches.
    ///
    /// Returns `None` if there are too many of them to check at once.
    pub(crate) fn any_newer(
        &self,
        session_id: &str,
        after: CallId,
        is_match: impl Fn(CallId, &T) -> bool,
    ) -> Option<bool> {
        let Some(entry) = self.sessions.find(session_id) else {
            return Some(false);
        };
        entry.read(|session| {
            let mut newer = session.calls_after(after);
            let mut batch = newer.by_ref().take(SCAN_BATCH);
            let is_found = batch.any(|(id, entry)| is_match(id, &entry.call));
            (is_found || newer.next().is_none()).then_some(is_found)
        })
    }

    /// Returns the number of calls in flight.
    pub(crate) fn len(&self) -> usize {
        self.sessions.shared.totals.in_flight()
    }

    /// Returns the number of detached calls.
    pub(crate) fn detached(&self) -> usize {
        self.sessions.shared.totals.detached()
    }

    pub(crate) fn set_limits(&self, limits: Limits) {
        self.sessions.shared.totals.set_limits(limits);
    }

    /// Returns `true` if another call may be tracked. Takes no lock, so a few calls starting at the same time may exceed the limit.
    pub(crate) fn has_capacity(&self) -> bool {
        self.len() < self.sessions.shared.totals.max(Limit::Calls)
    }

    /// Registers a stream that is about to end, so that a drain can close it if it is still open.
    pub(crate) fn register_ending_stream(&self, stream: Weak<dyn StreamHandle>) {
        self.streams().add(stream);
    }

    /// Registers a stream that may not belong to an in-flight call, so that a drain can close it. If the server has already been drained,
    /// the stream is closed at once.
    pub(crate) fn register_stream(&self, stream: Weak<dyn StreamHandle>) {
        self.register_ending_stream(stream.clone());
        if let Some(stream) = stream.upgrade().filter(|_| self.is_closed()) {
            stream.close();
        }
    }

    /// Returns `true` if the server has been drained, in which case new streams are closed at once.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn streams(&self) -> MutexGuard<'_, OpenStreams> {
        lock(&self.streams)
    }
}

/// Notifies a call that it is no longer tracked. Must be called with no lock held.
pub(crate) fn notify_untracked<T: Tracked>(untracked: Option<UntrackedCall<T>>) {
    if let Some((id, call, finished)) = untracked {
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
