//! Handles expired deadlines and applies confirmation decisions.

use std::mem;

use tokio::time::Instant;

use super::{
    SessionState,
    call_timers::{CallTimers, ExpiryDecision, ExpiryToken},
    entry::Expired,
};
#[cfg(any(test, fuzzing))]
use crate::timer::Timeliness;
use crate::{call::CallId, timer::LatenessTracker};

// === impl SessionState ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// Checks all deadlines that have passed by `now`. Returns the calls that the caller must act on.
    ///
    /// These calls stay in flight until they are finished, except for those that are [forgotten](Expired::Forgotten).
    #[cfg(any(test, fuzzing))]
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<(CallId, T, Expired)> {
        self.expire_some(&LatenessTracker::new(now, Timeliness::OnTime), usize::MAX)
    }

    /// Checks up to `max` expired call deadlines and removes up to `max` retained calls.
    ///
    /// Returns the calls that the caller must act on. Postponed calls are not among them. `tracker` determines how late each deadline is
    /// handled (invariant 7).
    pub(crate) fn expire_some(
        &mut self,
        tracker: &LatenessTracker,
        max: usize,
    ) -> Vec<(CallId, T, Expired)> {
        let now = tracker.now();
        self.retained
            .remove_expired(tracker, max, &self.shared.totals);
        let mut expired = Vec::new();
        for _ in 0..max {
            let Some((at, id)) = self.due.first().copied().filter(|(at, _)| *at <= now) else {
                break;
            };
            self.due.remove(&(at, id));
            if let Some(entry) = self.calls.get_mut(id) {
                let timers = entry.timers_mut();
                timers.due = None;
                match timers.check(now, at, tracker.lateness(at), tracker.was_stalled(at)) {
                    ExpiryDecision::CallTimeout => {
                        expired.push((id, entry.call.clone(), Expired::Deadline));
                    }
                    ExpiryDecision::GraceExpired => {
                        expired.push((id, entry.call.clone(), Expired::Grace));
                        self.schedule(id);
                    }
                    ExpiryDecision::GraceConfirmed => {
                        expired.push((id, entry.call.clone(), Expired::GraceConfirmed));
                        self.schedule(id);
                    }
                    ExpiryDecision::Postponed => self.schedule(id),
                    ExpiryDecision::Forget => {
                        let call = entry.call.clone();
                        let finished = self.finish(id, None);
                        expired.extend(
                            finished.map(|finished| (id, call, Expired::Forgotten(finished))),
                        );
                    }
                }
            }
        }
        expired
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let call = self.due.first().map(|(at, _)| *at);
        match (call, self.retained.next_expiry()) {
            (Some(call), Some(retained)) => Some(call.min(retained)),
            (call, retained) => call.or(retained),
        }
    }

    /// Returns the token of a call's expired grace period.
    ///
    /// Returns `None` if the grace period has not expired, or if the expiry no longer holds.
    pub(crate) fn expiry(&self, id: CallId) -> Option<ExpiryToken> {
        self.calls.get(id)?.timers.as_ref()?.expiry()
    }

    /// Postpones the end of a call's grace period to `until`. Returns `false` if the expiry no longer holds.
    pub(crate) fn postpone(&mut self, id: CallId, expiry: ExpiryToken, until: Instant) -> bool {
        self.apply_decision(id, expiry, |timers| timers.postpone(until))
    }

    /// Confirms that a call may be cancelled. Its timer is checked once more.
    ///
    /// Returns `false` if the expiry no longer holds.
    pub(crate) fn confirm(&mut self, id: CallId, expiry: ExpiryToken, now: Instant) -> bool {
        self.apply_decision(id, expiry, |timers| timers.confirm(now))
    }

    /// Applies a confirmation's decision to a call's timers. Returns `false` if the expiry no longer holds.
    fn apply_decision(
        &mut self,
        id: CallId,
        expiry: ExpiryToken,
        apply: impl FnOnce(&mut CallTimers),
    ) -> bool {
        let timers = self.timers_of(id);
        let Some(timers) = timers.filter(|timers| timers.expiry() == Some(expiry)) else {
            return false;
        };
        apply(timers);
        self.schedule(id);
        true
    }

    /// Sets when a call is cancelled at the latest.
    pub(crate) fn set_deadline(&mut self, id: CallId, deadline: Instant) {
        if let Some(entry) = self.calls.get_mut(id) {
            entry.timers_mut().deadline = Some(deadline);
            self.schedule(id);
        }
    }

    /// Updates a call's deadline in `due`.
    pub(super) fn schedule(&mut self, id: CallId) {
        let Some(timers) = self.timers_of(id) else {
            return;
        };
        let at = timers.next_deadline();
        let previous = mem::replace(&mut timers.due, at);
        if previous == at {
            return;
        }
        if let Some(previous) = previous {
            self.due.remove(&(previous, id));
        }
        if let Some(at) = at {
            self.due.insert((at, id));
        }
    }
}
