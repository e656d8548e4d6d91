//! Decides what the response's head and body mean for the call.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;

use super::{
    cancel::Cancel,
    request_body::{BodyKind, RequestBody},
    resume::Accepted,
    state::{Attachment, Exchange, ExchangeState, Phase, RequestKind},
    tap::Tap,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, DetachCause, Outcome, RequestId},
    disconnect::StreamEnd,
    jsonrpc,
    observe::Hint,
    registry::{Generation, POST_GENERATION, notify_untracked},
    sse,
};

/// The bit of `stream_meta` set once an event id may have been sent. The other bits hold the last `retry` in ms.
const REPLAYABLE: u32 = 1 << 31;

/// What the response head means for the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    /// 2xx with `text/event-stream`: the answer is sent on the stream, which is `readable` unless it is encoded.
    Stream { readable: bool },
    /// 2xx with any other body: the body is the answer.
    Answer,
    /// 202 without JSON, which cannot be an answer. Servers of revision 2024-11-05 send the answer on another stream.
    Accepted,
    /// Any other status: the server has refused the request. The client may retry it later if the refusal `is_temporary`.
    Refusal { is_temporary: bool },
}

/// What to do with the response body.
pub(crate) enum BodyPlan {
    /// Pass it on.
    Pass,
    /// Pass it on and read it.
    Tap(Box<Tap>),
    /// Pass it on as the call's answer. When the body ends, so does the call.
    Answer(Attachment),
    /// Pass it on if it contains the answer to `request`. Otherwise replace it with `error`, because the call was cancelled.
    Late { request: RequestId, error: Bytes },
}

// === impl ExchangeState ===

impl ExchangeState {
    /// Records the response head. A GET or DELETE is treated as MCP if it is answered with a stream, and as plain otherwise.
    fn record_head(&mut self, kind: &RequestKind, head: Head) {
        self.has_head = true;
        if matches!(
            kind,
            RequestKind::Listen { .. } | RequestKind::Resume(_) | RequestKind::Delete(_)
        ) {
            self.request = RequestBody::Known(match head {
                Head::Stream { .. } => BodyKind::Other,
                Head::Answer | Head::Accepted | Head::Refusal { .. } => BodyKind::Plain,
            });
        }
    }
}

// === impl Exchange ===

impl Exchange {
    /// Handles the response head and returns what to do with the body.
    pub(crate) fn on_head(self: &Arc<Self>, head: Head) -> BodyPlan {
        if !matches!(head, Head::Refusal { .. }) {
            self.on_accepted();
        }
        match head {
            Head::Stream { readable } => self.on_stream_head(readable),
            Head::Answer => {
                self.state().record_head(&self.kind, head);
                self.end_resume();
                self.begin_answer().map_or(BodyPlan::Pass, BodyPlan::Answer)
            }
            Head::Accepted => {
                self.state().record_head(&self.kind, head);
                self.end_resume();
                if let Some(call) = self.info()
                    && !self.is_bound()
                {
                    // The call owns its request id now, so that no cancellation of an older call with that id hits it.
                    self.accept_call();
                    self.finish(call.id(), Outcome::Unknown);
                }
                BodyPlan::Pass
            }
            Head::Refusal { is_temporary } => {
                self.state().record_head(&self.kind, head);
                if is_temporary && let RequestKind::Resume(resume) = &self.kind {
                    resume.renew_grace_periods();
                }
                self.end_resume();
                match self.info() {
                    Some(call) if !self.is_bound() => self.finish(call.id(), Outcome::Failed),
                    Some(_) => {}
                    None => self.report_unparsed_body(false),
                }
                BodyPlan::Pass
            }
        }
    }

    /// Records that the body is the call's answer.
    ///
    /// Returns `None` if the call is not in flight, if a session manager tracks it, or if the exchange has ended.
    fn begin_answer(self: &Arc<Self>) -> Option<Attachment> {
        self.call_in_flight()?;
        {
            let mut state = self.state();
            if state.is_bound() || !state.phase.is_open() {
                return None;
            }
            state.phase = Phase::Answering;
        }
        self.accept_call()
    }

    /// Called when the inner service has accepted the request, whatever its kind.
    fn on_accepted(&self) {
        let registry = &self.shared.registry;
        if let RequestKind::Delete(session) = &self.kind {
            let accepted = registry.begin_close(session);
            // Calls whose response heads are not ready yet are in flight too.
            let unaccepted = registry.unaccepted_in(session);
            for (id, exchange) in accepted.into_iter().chain(unaccepted) {
                exchange.cancel(id, Cancel::external(CancelReason::SessionClosed));
            }
        }
        if self.info().is_some() {
            return;
        }
        self.report_unparsed_body(true);
        let contest = self.state().request.take_contest();
        if let Some(contest) = contest {
            return contest.on_accepted();
        }
        let (key, target) = match (&self.kind, &self.state().request) {
            (RequestKind::Post(_), RequestBody::Known(BodyKind::Cancel(target))) => {
                (**target).clone()
            }
            _ => return,
        };
        // The target may have ended in the meantime, and another call may have reused its id. The lookup includes unaccepted calls, because
        // a call answered with JSON is only accepted once the response head arrives with the answer.
        if let Some((id, exchange)) = registry
            .find_including_unaccepted(&key)
            .filter(|(id, _)| *id == target)
        {
            exchange.cancel(id, Cancel::external(CancelReason::ClientCancelled));
        }
    }

    /// Handles an event stream's head.
    fn on_stream_head(self: &Arc<Self>, readable: bool) -> BodyPlan {
        let is_bound = {
            let mut state = self.state();
            state.record_head(&self.kind, Head::Stream { readable });
            if state.phase == Phase::Open {
                state.phase = Phase::Streaming;
            }
            state.is_bound()
        };
        // The session manager observes the stream itself.
        if is_bound {
            return BodyPlan::Pass;
        }
        let attached = match &self.kind {
            RequestKind::Resume(resume) => match resume.accept(&self.shared) {
                Accepted::Nothing => None,
                Accepted::Attached(attached) => Some(attached),
                // An encoded body may contain the answer, so it must be passed on.
                Accepted::Cancelled(..) if !readable => None,
                Accepted::Cancelled(request, reason) => {
                    let error = sse::event(&jsonrpc::cancellation_error(&request, reason));
                    return BodyPlan::Late { request, error };
                }
            },
            _ => self.accept_call(),
        };
        let Some(attached) = attached else {
            return BodyPlan::Pass;
        };
        BodyPlan::Tap(Box::new(if readable {
            Tap::new(attached)
        } else {
            Tap::opaque(attached)
        }))
    }

    /// Makes the call the owner of its request id and returns its first stream.
    ///
    /// Returns `None` if the request is not known to carry a call.
    fn accept_call(self: &Arc<Self>) -> Option<Attachment> {
        let call = self.info()?;
        let id = call.id();
        if call.policy().supersede && call.session().is_some() {
            let hints = &self.shared.registry.hints;
            hints.emit(Hint::SupersedeHasNoEffect);
        }
        notify_untracked(self.with_session(|session| session.accept(id)).flatten());
        self.notify_changed();
        Some(Attachment {
            exchange: self.clone(),
            id,
            generation: POST_GENERATION,
        })
    }

    /// Called when the client has received the complete response, which `tap` has read.
    pub(crate) fn complete(self: &Arc<Self>, tap: Option<Box<Tap>>) {
        match (self.mark_ended(), tap) {
            (Some(_), Some(tap)) => tap.finish(DetachCause::EndedByServer),
            (Some((Some(call), Phase::Answering)), None) => self.finish(call, Outcome::Completed),
            (Some((Some(call), _)), None) => self.finish(call, Outcome::Unknown),
            (Some((None, _)), None) | (None, _) => {}
        }
    }

    /// Called when the inner service has returned an error instead of a response.
    pub(crate) fn fail(self: &Arc<Self>) {
        if let Some((Some(call), _)) = self.mark_ended() {
            self.finish(call, Outcome::Failed);
        }
    }

    /// Ends the exchange. Returns the call, unless a session manager tracks it, and the previous phase.
    ///
    /// Returns `None` if the exchange has already ended.
    fn mark_ended(self: &Arc<Self>) -> Option<(Option<CallId>, Phase)> {
        self.parse_body();
        self.end_resume();
        let (call, is_bound, phase) = {
            let mut state = self.state();
            if !state.phase.is_open() {
                return None;
            }
            let phase = mem::replace(&mut state.phase, Phase::Ended);
            // Read both under the state lock, because a session manager may bind the call concurrently.
            (self.info().map(CallInfo::id), state.is_bound(), phase)
        };
        if call.is_none() {
            self.report_unparsed_body(false);
            self.signal.disarm();
            self.release_unused();
        }
        Some((call.filter(|_| !is_bound), phase))
    }

    /// Drops an untracked request's contest. If the request is known to carry no call, also drops the canceller.
    fn release_unused(&self) {
        let (is_known, contest) = {
            let mut state = self.state();
            let is_known = matches!(state.request, RequestBody::Known(_));
            (is_known, state.request.take_contest())
        };
        // The server has refused the request, or its client has disconnected.
        drop(contest);
        if is_known && self.info().is_none() {
            self.release_canceller();
        }
    }

    /// Called when the response was dropped before it ended. `tap` has read the part already sent.
    pub(crate) fn on_dropped(self: &Arc<Self>, cause: DetachCause, tap: Option<Box<Tap>>) {
        self.on_response_lost(cause, false);
        if let Some(tap) = tap {
            tap.finish(cause);
        }
    }

    /// Handles a response that was dropped before it ended.
    ///
    /// `has_head` is `true` if an earlier exchange of the same request has recorded that the client has the response head.
    #[cold]
    fn on_response_lost(self: &Arc<Self>, cause: DetachCause, has_head: bool) {
        self.parse_body();
        self.end_resume();
        let (is_plain, has_head) = {
            let mut state = self.state();
            if !state.phase.is_open() {
                return;
            }
            state.phase = Phase::Dropped;
            let is_plain = !state.is_answered && self.is_plain(&state.request);
            (is_plain, has_head || state.has_head)
        };
        if let Some(call) = self.info() {
            if !has_head {
                // A middleware may have read events, but the client has received none, so it has no id to resume with.
                self.stream_meta.fetch_and(!REPLAYABLE, Ordering::Relaxed);
            }
            self.on_stream_lost(call, POST_GENERATION, cause, false);
            if let Some(next) = self.next_call() {
                next.on_response_lost(cause, has_head);
            }
            return;
        }
        self.report_unparsed_body(false);
        self.release_unused();
        if cause == DetachCause::Stalled {
            let observers = &self.shared.options.observers;
            observers.on_stalled_stream(self.session.id());
        }
        if let RequestKind::Resume(resume) = &self.kind {
            resume.set_end_cause(&self.shared, cause);
        }
        if is_plain {
            self.fire(cause.reason());
        }
    }

    /// Returns `true` if a disconnect fires the token of a request without a call.
    ///
    /// This applies to non-MCP requests that no client can resume. A session header alone does not make a request MCP, because a client can
    /// send one on any route.
    fn is_plain(&self, request: &RequestBody) -> bool {
        match &self.kind {
            // By the time an MCP server responds to a DELETE, it has already handled the request, so a DELETE's token cancels nothing.
            RequestKind::Delete(_)
            | RequestKind::Listen {
                accepts_events: false,
            } => !request.is_other(),
            RequestKind::Resume(_) | RequestKind::Listen { .. } => request.is_plain(),
            RequestKind::Replay => false,
            RequestKind::Post(_) if !self.session.is_none() => request.is_plain(),
            RequestKind::Post(_) | RequestKind::Other => !request.is_other(),
        }
    }

    /// Sets whether the bytes sent so far may have been the answer.
    pub(super) fn set_may_have_been_answered(&self, may_have_been_answered: bool) {
        self.may_have_been_answered
            .store(may_have_been_answered, Ordering::Relaxed);
    }

    /// Removes a stream that may have carried the call's answer.
    ///
    /// The call is not cancelled. Once its last stream is lost, it ends with [`Outcome::Unknown`].
    #[cold]
    pub(super) fn remove_stream(&self, id: CallId, generation: Generation) {
        let finished = self.with_session(|session| session.remove_stream(id, generation));
        if let Some(finished) = finished.flatten() {
            self.end_untracked(id, finished);
        }
    }

    fn end_resume(&self) {
        if let RequestKind::Resume(resume) = &self.kind {
            resume.end();
        }
    }

    /// Records whether one of the call's streams has event ids and what its `retry` is.
    pub(crate) fn record_stream_meta(&self, replayable: bool, retry: Option<Duration>) {
        if replayable && self.stream_meta.load(Ordering::Relaxed) & REPLAYABLE == 0 {
            self.stream_meta.fetch_or(REPLAYABLE, Ordering::Relaxed);
        }
        if let Some(retry) = retry {
            let retry =
                u32::try_from(retry.as_millis()).map_or(!REPLAYABLE, |ms| ms.min(!REPLAYABLE));
            let with_retry = |meta| Some((meta & REPLAYABLE) | retry);
            // Never fails, because the closure always returns a value.
            let _ = self
                .stream_meta
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_retry);
        }
    }

    /// Returns the server's last `retry`: how long the client waits before resuming.
    ///
    /// Returns `None` if the server has not sent a `retry`, or if it sent zero.
    pub(crate) fn retry(&self) -> Option<Duration> {
        let retry = u64::from(self.stream_meta.load(Ordering::Relaxed) & !REPLAYABLE);
        (retry != 0).then(|| Duration::from_millis(retry))
    }

    /// Returns what is known about the call's streams when one of them ends.
    pub(super) fn stream_end(&self, by_server: bool) -> StreamEnd {
        let canceller = self.state().canceller.clone();
        StreamEnd {
            replayable: self.stream_meta.load(Ordering::Relaxed) & REPLAYABLE != 0,
            retry: self.retry(),
            by_server,
            stored: canceller.is_some_and(|canceller| canceller.has_event_store()),
        }
    }
}
