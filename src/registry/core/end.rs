//! Ends calls and sessions.

use super::{
    SessionState,
    entry::{CallKey, Finished},
    event_ids::EventIds,
    retained_call::{Completion, EndedCall, RetainedOutcome},
    retention::EvictedAnswer,
};
use crate::call::{CallId, Scope};

// === impl SessionState ===

impl<T: Clone, A: Clone> SessionState<T, A> {
    /// Ends a call. If there is a `completion`, retains it under the call's event ids.
    ///
    /// A call without a key or without event ids is not retained. Returns `None` if the call has already ended or been untracked
    /// (invariants 2 and 9).
    pub(crate) fn finish(
        &mut self,
        id: CallId,
        completion: Option<Completion<A>>,
    ) -> Option<Finished> {
        let is_cancelled = completion
            .as_ref()
            .is_some_and(|completion| matches!(completion.outcome, RetainedOutcome::Cancelled(..)));
        let entry = self.remove_entry(id, is_cancelled)?;
        self.has_completed = true;
        let detachment = entry.detachment();
        let timers = entry.timers.as_ref();
        let completion = completion.map(|completion| {
            let retained_until = timers.and_then(|timers| timers.retained_until(completion.at));
            Completion {
                until: retained_until.map_or(completion.until, |retained_until| {
                    completion.until.max(retained_until)
                }),
                ..completion
            }
        });
        let (mut may_cancel_server, mut has_evicted) = (false, false);
        if let Some(key) = entry.key {
            may_cancel_server = self.unindex_request(id, &key) && key.contests == 0;
            let completion = completion.filter(|_| !entry.event_ids.is_empty());
            has_evicted = completion.is_some_and(|completion| {
                self.retain(EndedCall {
                    call: id,
                    session: key.session,
                    event_ids: entry.event_ids.into_known(),
                    had_client: detachment.is_none(),
                    completion,
                })
            });
        }
        Some(Finished {
            may_cancel_server,
            detachment,
            has_evicted,
        })
    }

    fn retain(&mut self, ended: EndedCall<A>) -> bool {
        let Some((id, _)) = &self.session_id else {
            return false;
        };
        self.retained.retain(id, ended, &self.shared.totals)
    }

    /// Takes the evicted answers whose clients may still resume. Each is returned once.
    pub(crate) fn take_evicted(&mut self) -> Vec<EvictedAnswer> {
        self.retained.take_evicted()
    }

    /// Ends a call like [`finish`](Self::finish). Returns `None` if its expiry no longer holds.
    ///
    /// The lock is released between the timer check and this method, so the client may have resumed, or started to resume, in the meantime
    /// (invariant 6).
    pub(crate) fn finish_due(&mut self, id: CallId, completion: Completion<A>) -> Option<Finished> {
        let is_due = self.calls.get(id)?.detached()?.is_expired;
        is_due.then(|| self.finish(id, Some(completion)))?
    }

    /// Ends a detached call like [`finish`](Self::finish).
    ///
    /// Returns `None` if the call is attached, if a resume is pending, or if the client may have resumed unobserved.
    pub(crate) fn finish_detached(
        &mut self,
        id: CallId,
        completion: Completion<A>,
    ) -> Option<Finished> {
        let timers = self.timers_of(id)?;
        let may_cancel = timers.detached.is_some()
            && !timers.has_pending_resume()
            && !timers.may_have_been_resumed;
        may_cancel.then(|| self.finish(id, Some(completion)))?
    }

    /// Starts closing a session: removes its retained calls and returns its accepted calls.
    ///
    /// The accepted calls' event ids are removed too, because a reopened session restarts its stream numbering.
    pub(crate) fn begin_close(&mut self, scope: &Scope) -> Vec<(CallId, T)> {
        let Some(session) = self.session(scope) else {
            return Vec::new();
        };
        self.retained.clear(session, &self.shared.totals);
        let is_accepted = |key: &CallKey| key.is_accepted && key.session == session;
        let accepted = self.calls_where(|entry| entry.key.as_ref().is_some_and(is_accepted));
        for (id, _) in &accepted {
            if let Some(entry) = self.calls.get_mut(*id) {
                entry.event_ids = EventIds::default();
            }
        }
        accepted
    }
}
