//! The calls whose time is over, and the answers of those who were asked about one.

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

// === impl Core ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// The calls whose time is over by `now`. They stay until they are finished, but for those that are
    /// forgotten.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<(CallId, T, Expired)> {
        self.expire_some(&LatenessTracker::new(now, Timeliness::OnTime), usize::MAX)
    }

    /// The first of them, so many looks at most, and as many records of those that ended. How late each was noticed the
    /// watch tells (invariant 7).
    pub(crate) fn expire_some(
        &mut self,
        watch: &LatenessTracker,
        most: usize,
    ) -> Vec<(CallId, T, Expired)> {
        let now = watch.now();
        self.retained.remove_expired(now, most, &self.shared.totals);
        let mut over = Vec::new();
        for _ in 0..most {
            let Some((at, id)) = self.due.first().copied().filter(|(at, _)| *at <= now) else {
                break;
            };
            self.due.remove(&(at, id));
            if let Some(entry) = self.calls.get_mut(id) {
                let times = entry.timers_mut();
                times.due = None;
                match times.check(now, at, watch.lateness(at), watch.was_stalled(at)) {
                    ExpiryDecision::CallTimeout => {
                        over.push((id, entry.call.clone(), Expired::Deadline));
                    }
                    ExpiryDecision::GraceExpired => {
                        over.push((id, entry.call.clone(), Expired::Grace));
                        self.schedule(id);
                    }
                    ExpiryDecision::GraceConfirmed => {
                        over.push((id, entry.call.clone(), Expired::GraceConfirmed));
                        self.schedule(id);
                    }
                    ExpiryDecision::Postponed => self.schedule(id),
                    ExpiryDecision::Forget => {
                        let call = entry.call.clone();
                        let finished = self.finish(id, None);
                        over.extend(finished.map(|it| (id, call, Expired::Forgotten(it))));
                    }
                }
            }
        }
        over
    }

    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let call = self.due.first().map(|(at, _)| *at);
        match (call, self.retained.next_expiry()) {
            (Some(call), Some(record)) => Some(call.min(record)),
            (call, record) => call.or(record),
        }
    }

    /// The time that somebody was told to cancel a call, if that holds: its client is not back, nor about to be.
    pub(crate) fn expiry(&self, id: CallId) -> Option<ExpiryToken> {
        self.calls.get(id)?.timers.as_ref()?.expiry()
    }

    /// Lets a call go on waiting to this time, unless the clock that ran out does not stand so any more.
    pub(crate) fn postpone(&mut self, id: CallId, expiry: ExpiryToken, until: Instant) -> bool {
        self.answer(id, expiry, |times| times.postpone(until))
    }

    /// Notes that a call may be cancelled, unless the clock that ran out does not stand so any more. It is looked at
    /// once more.
    pub(crate) fn confirm(&mut self, id: CallId, expiry: ExpiryToken, now: Instant) -> bool {
        self.answer(id, expiry, |times| times.confirm(now))
    }

    fn answer(
        &mut self,
        id: CallId,
        expiry: ExpiryToken,
        answer: impl FnOnce(&mut CallTimers),
    ) -> bool {
        let times = self.timers_of(id);
        let Some(times) = times.filter(|times| times.expiry() == Some(expiry)) else {
            return false;
        };
        answer(times);
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

    /// Enters a call's next look into `due`, or takes it out.
    pub(super) fn schedule(&mut self, id: CallId) {
        let Some(times) = self.timers_of(id) else {
            return;
        };
        let at = times.next_deadline();
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
}
