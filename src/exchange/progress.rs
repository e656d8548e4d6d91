//! The progress of an exchange, from the response's head and body.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use bytes::Bytes;

use super::{
    request_body::{RequestBody, Settled},
    resuming::Accepted,
    state::{Attachment, Exchange, Phase, RequestKind},
    tap::Tap,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, DetachCause, Outcome},
    jsonrpc,
    registry::{FIRST, report},
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
    /// Replaced by one event: the call that is asked for was cancelled.
    Replace(Bytes),
}

// === impl Exchange ===

impl Exchange {
    pub(crate) fn head(self: &Arc<Self>, head: Head) -> BodyPlan {
        if head != Head::Refusal {
            self.accepted_notice();
        }
        let outcome = match head {
            Head::Stream { readable } => return self.streaming(readable),
            Head::Answer => Outcome::Completed,
            Head::Refusal => Outcome::Failed,
        };
        self.release_hold();
        if let Some(call) = self.info()
            && !self.is_bound()
        {
            self.finish(call.id(), outcome);
        }
        BodyPlan::Pass
    }

    /// Whatever the request was, the inner service took it.
    fn accepted_notice(&self) {
        let registry = &self.instance.registry;
        if let RequestKind::Delete(session) = &self.kind {
            for (id, exchange) in registry.take_session(session) {
                exchange.cancelled_elsewhere(id, CancelReason::SessionClosed);
            }
        }
        if self.info().is_some() {
            return;
        }
        self.accepted_unread();
        let (key, meant) = match (&self.kind, &self.state().request) {
            (RequestKind::Post, RequestBody::Settled(Settled::Cancel(meant))) => (**meant).clone(),
            _ => return,
        };
        // Meanwhile that call may have ended, and another may have its id.
        if let Some((id, exchange)) = registry.find(&key).filter(|(id, _)| *id == meant) {
            exchange.cancelled_elsewhere(id, CancelReason::ClientCancelled);
        }
    }

    fn streaming(self: &Arc<Self>, readable: bool) -> BodyPlan {
        let is_bound = {
            let mut state = self.state();
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
                Accepted::Cancelled(request, reason) => {
                    let error = jsonrpc::cancelled(&request, reason);
                    return BodyPlan::Replace(sse::event(&error));
                }
            },
            _ => self.claim(),
        };
        let Some(attached) = attached else {
            return BodyPlan::Pass;
        };
        BodyPlan::Tap(Box::new(match readable {
            true => Tap::new(attached),
            false => Tap::blind(attached),
        }))
    }

    fn claim(self: &Arc<Self>) -> Option<Attachment> {
        let id = self.info()?.id();
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
            (Some(Some(call)), None) => self.finish(call, Outcome::Unknown),
            (Some(None), None) | (None, _) => {}
        }
    }

    /// The inner service returned an error instead of a response.
    pub(crate) fn fail(self: &Arc<Self>) {
        if let Some(Some(call)) = self.over() {
            self.finish(call, Outcome::Failed);
        }
    }

    /// Gives its call, if that ends with it: no session manager watches it. `None` if it was over before.
    fn over(self: &Arc<Self>) -> Option<Option<CallId>> {
        self.settle();
        self.release_hold();
        let (call, is_bound) = {
            let mut state = self.state();
            if !state.phase.is_open() {
                return None;
            }
            state.phase = Phase::Ended;
            // Both under one lock: a session manager may bind a call in this moment.
            (self.info().map(CallInfo::id), state.is_bound())
        };
        if call.is_none() {
            self.signal.forget();
        }
        Some(call.filter(|_| !is_bound))
    }

    /// Nobody will read the rest. `tap` has read what there was.
    pub(crate) fn abandon(self: &Arc<Self>, cause: DetachCause, tap: Option<Box<Tap>>) {
        self.leave(cause);
        if let Some(tap) = tap {
            tap.gone(cause);
        }
    }

    #[cold]
    fn leave(self: &Arc<Self>, cause: DetachCause) {
        self.settle();
        self.release_hold();
        let other = {
            let mut state = self.state();
            if !state.phase.is_open() {
                return;
            }
            state.phase = Phase::Abandoned;
            state.is_answered || state.request.is_other()
        };
        if let Some(call) = self.info() {
            self.let_go(call, FIRST, cause, false);
            return;
        }
        if cause == DetachCause::Stalled {
            let observers = &self.instance.options.observers;
            observers.on_stalled_stream(self.session.id());
        }
        match &self.kind {
            RequestKind::Resume(resume) => resume.is_going(&self.instance, cause),
            // No call and no session: a plain request, which nobody can resume.
            _ if self.session.is_none() && !other => self.fire(cause.reason()),
            _ => {}
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
            let retry = u32::try_from(retry.as_millis()).map_or(!REPLAYABLE, |ms| ms & !REPLAYABLE);
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
