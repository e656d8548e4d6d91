//! The calls whose time is over, and the answers of those who were asked about one.

use std::mem;

use tokio::time::Instant;

use super::{
    Core,
    entry::Expired,
    times::{Expiry, Judged, Times},
};
#[cfg(any(test, fuzzing))]
use crate::timer::Timeliness;
use crate::{call::CallId, timer::LatenessTracker};

// === impl Core ===

impl<T: Clone, A: Clone> Core<T, A> {
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
        self.memory.forget_due(now, most, &self.common.totals);
        let mut over = Vec::new();
        for _ in 0..most {
            let Some((at, id)) = self.due.first().copied().filter(|(at, _)| *at <= now) else {
                break;
            };
            self.due.remove(&(at, id));
            if let Some(entry) = self.calls.get_mut(id) {
                let times = entry.times_mut();
                times.due = None;
                match times.look(now, at, watch.lateness(at), watch.was_stalled(at)) {
                    Judged::TooLong => {
                        over.push((id, entry.call.clone(), Expired::Deadline));
                    }
                    Judged::Orphan => {
                        over.push((id, entry.call.clone(), Expired::Grace));
                        self.schedule(id);
                    }
                    Judged::ConfirmedOrphan => {
                        over.push((id, entry.call.clone(), Expired::Confirmed));
                        self.schedule(id);
                    }
                    Judged::PutOff => self.schedule(id),
                    Judged::Forget => {
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
        match (call, self.memory.next_end()) {
            (Some(call), Some(record)) => Some(call.min(record)),
            (call, record) => call.or(record),
        }
    }

    /// The time that somebody was told to cancel a call, if that holds: its client is not back, nor about to be.
    pub(crate) fn expiry(&self, id: CallId) -> Option<Expiry> {
        self.calls.get(id)?.times.as_ref()?.given_out()
    }

    /// Lets a call go on waiting to this time, unless the clock that ran out does not stand so any more.
    pub(crate) fn put_off(&mut self, id: CallId, expiry: Expiry, until: Instant) -> bool {
        self.answer(id, expiry, |times| times.put_off(until))
    }

    /// Notes that a call may be cancelled, unless the clock that ran out does not stand so any more. It is looked at
    /// once more.
    pub(crate) fn confirm(&mut self, id: CallId, expiry: Expiry, now: Instant) -> bool {
        self.answer(id, expiry, |times| times.confirm(now))
    }

    fn answer(&mut self, id: CallId, expiry: Expiry, answer: impl FnOnce(&mut Times)) -> bool {
        let times = self.times_of(id);
        let Some(times) = times.filter(|times| times.given_out() == Some(expiry)) else {
            return false;
        };
        answer(times);
        self.schedule(id);
        true
    }

    /// Sets when a call is cancelled at the latest.
    pub(crate) fn set_deadline(&mut self, id: CallId, deadline: Instant) {
        if let Some(entry) = self.calls.get_mut(id) {
            entry.times_mut().deadline = Some(deadline);
            self.schedule(id);
        }
    }

    /// Enters a call's next look into `due`, or takes it out.
    pub(super) fn schedule(&mut self, id: CallId) {
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
}
