//! The progress of an exchange, from the response's head and body.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;

use super::{
    request_body::{RequestBody, Settled},
    resuming::Accepted,
    state::{Attachment, Exchange, Locked, Phase, RequestKind},
    tap::Tap,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, DetachCause, Outcome, RequestId},
    jsonrpc,
    observe::Hint,
    registry::{FIRST, Generation, report},
    sse,
    verdict::Going,
};

/// The bit of `passed` that says that an event id passed. The others hold the last `retry` in ms.
const REPLAYABLE: u32 = 1 << 31;

/// What the response head says about the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    /// 2xx with `text/event-stream`: accepted, the answer comes on the stream. `readable` if nothing
    /// encodes it.
    Stream { readable: bool },
    /// 2xx with any other body: the answer itself.
    Answer,
    /// Any other status: never was a call.
    Refusal,
}

/// What the response body is to be.
pub(crate) enum BodyPlan {
    /// Passed on.
    Pass,
    /// Passed on and read.
    Tap(Box<Tap>),
    /// Passed on. It is the answer to this call, which ends with it.
    Answer(Attachment),
    /// Passed on if it has the answer to this request. Else replaced by one event, because its call was cancelled.
    Late { request: RequestId, error: Bytes },
}

// === impl Locked ===

impl Locked {
    /// Notes that the inner service has answered. A GET or DELETE of a session that is not answered with a stream is a plain request.
    fn note_head(&mut self, kind: &RequestKind, head: Head) {
        self.has_head = true;
        if matches!(
            kind,
            RequestKind::Listen { .. } | RequestKind::Resume(_) | RequestKind::Delete(_)
        ) {
            self.request = RequestBody::Settled(match head {
                Head::Stream { .. } => Settled::Other,
                Head::Answer | Head::Refusal => Settled::Plain,
            });
        }
    }
}

// === impl Exchange ===

impl Exchange {
    pub(crate) fn head(self: &Arc<Self>, head: Head) -> BodyPlan {
        if head != Head::Refusal {
            self.accepted_notice();
        }
        match head {
            Head::Stream { readable } => self.streaming(readable),
            Head::Answer => {
                self.state().note_head(&self.kind, head);
                self.release_hold();
                self.answering().map_or(BodyPlan::Pass, BodyPlan::Answer)
            }
            Head::Refusal => {
                self.state().note_head(&self.kind, head);
                self.release_hold();
                match self.info() {
                    Some(call) if !self.is_bound() => self.finish(call.id(), Outcome::Failed),
                    Some(_) => {}
                    None => self.unread(false),
                }
                BodyPlan::Pass
            }
        }
    }

    /// The body is the answer to its call, if that is in flight and no session manager watches it.
    fn answering(self: &Arc<Self>) -> Option<Attachment> {
        self.call_in_flight()?;
        {
            let mut state = self.state();
            if state.is_bound() || !state.phase.is_open() {
                return None;
            }
            state.phase = Phase::Answering;
        }
        self.claim()
    }

    /// Whatever the request was, the inner service took it.
    fn accepted_notice(&self) {
        let registry = &self.instance.registry;
        if let RequestKind::Delete(session) = &self.kind {
            let ended = registry.take_session(session);
            // A call whose answer has no head yet is in flight as well.
            let pending = registry.unaccepted_in(session);
            for (id, exchange) in ended.into_iter().chain(pending) {
                exchange.cancelled_elsewhere(id, CancelReason::SessionClosed);
            }
        }
        if self.info().is_some() {
            return;
        }
        self.unread(true);
        let contest = self.state().request.take_contest();
        if let Some(contest) = contest {
            return contest.lose();
        }
        let (key, meant) = match (&self.kind, &self.state().request) {
            (RequestKind::Post, RequestBody::Settled(Settled::Cancel(meant))) => (**meant).clone(),
            _ => return,
        };
        // Meanwhile that call may have ended, and another may have its id.
        // The server accepted the cancel. Whether it has accepted the call, shows for a JSON answer only at the end.
        if let Some((id, exchange)) = registry.find_any(&key).filter(|(id, _)| *id == meant) {
            exchange.cancelled_elsewhere(id, CancelReason::ClientCancelled);
        }
    }

    fn streaming(self: &Arc<Self>, readable: bool) -> BodyPlan {
        let is_bound = {
            let mut state = self.state();
            state.note_head(&self.kind, Head::Stream { readable });
            if state.phase == Phase::Open {
                state.phase = Phase::Streaming;
            }
            state.is_bound()
        };
        if is_bound {
            return BodyPlan::Pass;
        }
        let attached = match &self.kind {
            RequestKind::Resume(resume) => match resume.accept(&self.instance) {
                Accepted::Nothing => None,
                Accepted::Attached(attached) => Some(attached),
                // What is encoded may be the answer.
                Accepted::Cancelled(..) if !readable => None,
                Accepted::Cancelled(request, reason) => {
                    let error = sse::event(&jsonrpc::cancelled(&request, reason));
                    return BodyPlan::Late { request, error };
                }
            },
            _ => self.claim(),
        };
        let Some(attached) = attached else {
            return BodyPlan::Pass;
        };
        BodyPlan::Tap(Box::new(if readable {
            Tap::new(attached)
        } else {
            Tap::blind(attached)
        }))
    }

    fn claim(self: &Arc<Self>) -> Option<Attachment> {
        let call = self.info()?;
        let id = call.id();
        if call.policy().supersede && call.session().is_some() {
            let remarks = &self.instance.registry.hints;
            remarks.emit(Hint::SupersedeHasNoEffect);
        }
        report(self.at_home(|core| core.claim(id)).flatten());
        self.tell_decided();
        Some(Attachment {
            exchange: self.clone(),
            id,
            generation: FIRST,
        })
    }

    /// The client was told everything. `tap` has read it.
    pub(crate) fn complete(self: &Arc<Self>, tap: Option<Box<Tap>>) {
        match (self.over(), tap) {
            (Some(_), Some(tap)) => tap.gone(DetachCause::EndedByServer),
            (Some((Some(call), Phase::Answering)), None) => self.finish(call, Outcome::Completed),
            (Some((Some(call), _)), None) => self.finish(call, Outcome::Unknown),
            (Some((None, _)), None) | (None, _) => {}
        }
    }

    /// The inner service returned an error instead of a response.
    pub(crate) fn fail(self: &Arc<Self>) {
        if let Some((Some(call), _)) = self.over() {
            self.finish(call, Outcome::Failed);
        }
    }

    /// Ends the exchange. Returns its call if no session manager watches that, and the phase until now; `None` if the
    /// exchange had already ended.
    fn over(self: &Arc<Self>) -> Option<(Option<CallId>, Phase)> {
        self.settle();
        self.release_hold();
        let (call, is_bound, phase) = {
            let mut state = self.state();
            if !state.phase.is_open() {
                return None;
            }
            let phase = mem::replace(&mut state.phase, Phase::Ended);
            // Both under one lock: a session manager may bind a call in this moment.
            (self.info().map(CallInfo::id), state.is_bound(), phase)
        };
        if call.is_none() {
            self.unread(false);
            self.signal.forget();
            self.release_unused();
        }
        Some((call.filter(|_| !is_bound), phase))
    }

    /// Drops what would replay a cancel, if the request is known to carry no call.
    fn release_unused(&self) {
        let (has_passed, contest) = {
            let mut state = self.state();
            let has_passed = matches!(state.request, RequestBody::Settled(_));
            (has_passed, state.request.take_contest())
        };
        // The server has refused the request, or its client has left.
        drop(contest);
        if has_passed && self.info().is_none() {
            self.release_canceller();
        }
    }

    /// Nobody will read the rest. `tap` has read what there was.
    pub(crate) fn abandon(self: &Arc<Self>, cause: DetachCause, tap: Option<Box<Tap>>) {
        self.leave(cause, false);
        if let Some(tap) = tap {
            tap.gone(cause);
        }
    }

    /// `has_head`: the client has the response head, though another exchange of its request was given it.
    #[cold]
    fn leave(self: &Arc<Self>, cause: DetachCause, has_head: bool) {
        self.settle();
        self.release_hold();
        let (is_plain, has_head) = {
            let mut state = self.state();
            if !state.phase.is_open() {
                return;
            }
            state.phase = Phase::Abandoned;
            let is_plain = !state.is_answered && self.is_plain(&state.request);
            (is_plain, has_head || state.has_head)
        };
        if let Some(call) = self.info() {
            if !has_head {
                // A middleware may have read events. The client has received none, so it has no id to resume with.
                self.passed.fetch_and(!REPLAYABLE, Ordering::Relaxed);
            }
            self.let_go(call, FIRST, cause, false);
            if let Some(next) = self.next_call() {
                next.leave(cause, has_head);
            }
            return;
        }
        self.unread(false);
        self.release_unused();
        if cause == DetachCause::Stalled {
            let observers = &self.instance.options.observers;
            observers.on_stalled_stream(self.session.id());
        }
        if let RequestKind::Resume(resume) = &self.kind {
            resume.is_going(&self.instance, cause);
        }
        if is_plain {
            self.fire(cause.reason());
        }
    }

    /// Whether the request, which carries no call, has nothing to do with MCP: then its client cannot resume it, and to
    /// disconnect is to abandon it. A session header alone says nothing: any client may send one on any route.
    fn is_plain(&self, request: &RequestBody) -> bool {
        match &self.kind {
            // What a server that speaks MCP does with a DELETE is done when it answers: its token cancels nothing.
            RequestKind::Delete(_)
            | RequestKind::Listen {
                accepts_events: false,
            } => !request.is_other(),
            RequestKind::Resume(_) | RequestKind::Listen { .. } => request.is_plain(),
            RequestKind::Replay => false,
            RequestKind::Post if !self.session.is_none() => request.is_plain(),
            RequestKind::Post | RequestKind::Other => !request.is_other(),
        }
    }

    /// Notes whether what passed of the response may have been the answer.
    pub(super) fn set_maybe_answered(&self, maybe: bool) {
        self.maybe_answered.store(maybe, Ordering::Relaxed);
    }

    /// A stream of a call has gone on which the answer may have passed. In doubt the call is not cancelled: with its last
    /// stream it ends as unknown.
    #[cold]
    pub(super) fn lose_stream(&self, id: CallId, generation: Generation) {
        let finished = self.at_home(|core| core.lose_stream(id, generation));
        if let Some(finished) = finished.flatten() {
            self.left_unseen(id, finished);
        }
    }

    fn release_hold(&self) {
        if let RequestKind::Resume(resume) = &self.kind {
            resume.release();
        }
    }

    /// Notes what passed on a stream of its call.
    pub(crate) fn mark_passed(&self, replayable: bool, retry: Option<Duration>) {
        if replayable && self.passed.load(Ordering::Relaxed) & REPLAYABLE == 0 {
            self.passed.fetch_or(REPLAYABLE, Ordering::Relaxed);
        }
        if let Some(retry) = retry {
            let retry =
                u32::try_from(retry.as_millis()).map_or(!REPLAYABLE, |ms| ms.min(!REPLAYABLE));
            let with_retry = |passed| Some((passed & REPLAYABLE) | retry);
            // Fails only if the closure does.
            let _former =
                self.passed
                    .fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_retry);
        }
    }

    /// How long the server told the client to wait before it comes back.
    pub(super) fn retry(&self) -> Option<Duration> {
        let retry = u64::from(self.passed.load(Ordering::Relaxed) & !REPLAYABLE);
        (retry != 0).then(|| Duration::from_millis(retry))
    }

    pub(super) fn going(&self, by_server: bool) -> Going {
        let canceller = self.state().canceller.clone();
        Going {
            replayable: self.passed.load(Ordering::Relaxed) & REPLAYABLE != 0,
            retry: self.retry(),
            by_server,
            stored: canceller.is_some_and(|canceller| canceller.has_event_store()),
        }
    }
}
