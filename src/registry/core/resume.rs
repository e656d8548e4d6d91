//! Pending resumes of in-flight calls, and their effect on the grace period.

use std::time::Duration;

use tokio::time::Instant;

use super::{SessionState, call_timers::DetachedState};
use crate::call::CallId;

// === impl SessionState ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// Records an ended stream's `retry`. Returns the session's longest `retry` so far.
    ///
    /// Whichever stream it resumes, the TypeScript SDK first waits for the last `retry` received on any of the session's streams.
    pub(crate) fn record_retry(&mut self, retry: Option<Duration>) -> Option<Duration> {
        self.longest_retry = self.longest_retry.max(retry);
        self.longest_retry
    }

    /// Adds a pending resume to a call, which defers the expiry of its grace period. Returns `false` if the call has ended.
    pub(crate) fn begin_resume(&mut self, id: CallId, now: Instant) -> bool {
        let Some(entry) = self.calls.get_mut(id) else {
            return false;
        };
        entry.timers_mut().begin_resume(now);
        self.schedule(id);
        true
    }

    /// Restarts a call's grace period, because its client has been asked to retry a resume later.
    ///
    /// Has no effect after [`MAX_EMPTY_RESUMES`](super::call_timers::MAX_EMPTY_RESUMES) empty or refused resumes in a row.
    pub(crate) fn renew_grace(&mut self, id: CallId, now: Instant) {
        if let Some(timers) = self.timers_of(id) {
            timers.renew_grace(now);
            self.schedule(id);
        }
    }

    /// Removes a pending resume added by [`begin_resume`](Self::begin_resume).
    pub(crate) fn end_resume(&mut self, id: CallId, now: Instant) {
        if let Some(timers) = self.timers_of(id) {
            timers.end_resume(now);
            self.schedule(id);
        }
    }

    /// Lets a call keep running, because its client may have resumed unobserved. Returns `false` if the call has ended.
    ///
    /// The client may have resumed on a stream that is not known to belong to this call. If the call is attached, this takes effect once it
    /// is detached.
    pub(crate) fn mark_maybe_resumed(&mut self, id: CallId, state: DetachedState) -> bool {
        let Some(entry) = self.calls.get_mut(id) else {
            return false;
        };
        entry.timers_mut().mark_maybe_resumed(state);
        self.schedule(id);
        true
    }

    /// Returns `true` if a call keeps running while it is detached. See [`mark_maybe_resumed`](Self::mark_maybe_resumed).
    pub(crate) fn may_have_been_resumed(&self, id: CallId) -> bool {
        let timers = self.calls.get(id).and_then(|entry| entry.timers.as_deref());
        timers.is_some_and(|timers| timers.may_have_been_resumed)
    }
}
