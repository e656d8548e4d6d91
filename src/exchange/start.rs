//! Starts the call contained in a request body.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
};

use super::{
    cancel::Cancel,
    contest::Contest,
    identity::{Revision, SessionHeader},
    request_body::{BodyKind, Contested, RequestBody},
    state::{CallRef, Exchange, Phase},
};
use crate::{
    call::{CallId, CallInfo, CancelReason, Key, RequestId},
    envelope::{self, Frames, Message, ParseFailure, Request, UnparsedBody},
    limits::Limit,
    observe::Event,
    registry::DeferredEffects,
};

/// A call that has just been registered in its session.
#[must_use]
pub(super) struct Registered {
    deferred: DeferredEffects<Exchange>,
    /// Whether the server has been drained, in which case the call must end at once.
    is_drained: bool,
    /// Whether another in-flight call owns the id.
    pub(super) is_contested: bool,
}

// === impl Exchange ===

impl Exchange {
    /// Records that the request body has ended, with its frames or the reason it was not parsed.
    pub(crate) fn on_body_ended(&self, frames: Result<Frames, UnparsedBody>) {
        self.set_passed_body(RequestBody::Ended(frames));
    }

    /// Records that the request body was dropped before it ended.
    #[cold]
    pub(crate) fn on_body_dropped(&self, body: UnparsedBody) {
        self.set_passed_body(RequestBody::Dropped(body));
    }

    fn set_passed_body(&self, body: RequestBody) {
        let mut state = self.state();
        if matches!(state.request, RequestBody::Passing) {
            state.request = body;
            self.must_parse_body.store(true, Ordering::Release);
        }
    }

    /// Parses a request body that has ended, unless a session manager has already bound the call.
    pub(crate) fn parse_body(self: &Arc<Self>) {
        if !self.must_parse_body.load(Ordering::Relaxed)
            || !self.must_parse_body.swap(false, Ordering::AcqRel)
        {
            return;
        }
        let frames = {
            let mut state = self.state();
            if state.request.as_dropped().is_some() && state.phase != Phase::Streaming {
                // The service may have refused the request without reading its body (see `report_unparsed_body`).
                return;
            }
            match mem::replace(&mut state.request, RequestBody::Parsing) {
                RequestBody::Ended(frames) => frames,
                RequestBody::Dropped(body) => Err(body),
                other => {
                    state.request = other;
                    return;
                }
            }
        };
        let body = match frames {
            Ok(frames) => frames.into_bytes(),
            Err(body) => return self.on_unparsed_body(body),
        };
        match envelope::read(&body) {
            Ok(message) => self.start(message),
            Err(reason) => self.on_unparsed_body(UnparsedBody {
                reason,
                is_ambiguous: reason.is_ambiguous(&body),
            }),
        }
    }

    /// Handles an unparsable body, which may carry a call or not be JSON-RPC at all.
    #[cold]
    fn on_unparsed_body(&self, body: UnparsedBody) {
        let registry = &self.shared.registry;
        let manager = self.session.id().and_then(|id| registry.manager_scope(id));
        {
            let mut state = self.state();
            if !matches!(state.request, RequestBody::Parsing) {
                // A session manager has bound the call in the meantime.
                return;
            }
            if manager.is_some() && state.phase == Phase::Open && !state.has_head {
                // The session manager may still bind the call. If it does not, `report_unparsed_body` reports the body.
                state.request = RequestBody::Ended(Err(body));
                return;
            }
            state.request = self.classify_unparsed(body);
        }
        self.shared.report(&Event::UnparsedBody {
            reason: body.reason,
        });
    }

    /// Reports an unparsable body once no session manager will bind the call.
    ///
    /// If the inner service has `accepted` the request, an open exchange becomes [`Phase::Streaming`]. A body that was dropped before it
    /// ended is reported only in that case, because a service can refuse a request without reading its body.
    pub(super) fn report_unparsed_body(&self, accepted: bool) {
        let unparsed = {
            let mut state = self.state();
            if accepted && state.phase == Phase::Open {
                state.phase = Phase::Streaming;
            }
            let (body, is_reported) = match &state.request {
                RequestBody::Ended(Err(body)) => (*body, true),
                RequestBody::Dropped(body) => (*body, accepted),
                _ => return,
            };
            state.request = self.classify_unparsed(body);
            is_reported.then_some(body)
        };
        if let Some(body) = unparsed {
            self.shared.report(&Event::UnparsedBody {
                reason: body.reason,
            });
        }
    }

    fn classify_unparsed(&self, body: UnparsedBody) -> RequestBody {
        // In a session, an unread body may have been JSON-RPC.
        let is_unread = body.reason == ParseFailure::NotRead && !self.session.is_none();
        RequestBody::Known(BodyKind::unparsed(body.is_ambiguous || is_unread))
    }

    /// Sets the body's kind. Returns `false` if a session manager has bound the call in the meantime.
    fn set_body_kind(&self, kind: BodyKind) -> bool {
        let mut state = self.state();
        let is_first = matches!(state.request, RequestBody::Parsing);
        if is_first {
            state.request = RequestBody::Known(kind);
        }
        is_first
    }

    /// Starts the call in a parsed message, unless a session manager has bound it. Records the kind of any other message.
    fn start(self: &Arc<Self>, message: Message<'_>) {
        let request = match message {
            Message::Request(request) => Some(request),
            Message::Response => None,
            Message::Notification(notification) => {
                let target = notification
                    .cancels
                    .and_then(|request| self.cancel_target(request));
                let kind = target.map(|target| BodyKind::Cancel(Box::new(target)));
                self.set_body_kind(kind.unwrap_or(BodyKind::Other));
                return;
            }
        };
        // `Other` rather than `Plain`, because a disconnect has no effect on JSON-RPC without a tracked call.
        let Some(call) = request.and_then(|request| self.build_call(request)) else {
            self.set_body_kind(BodyKind::Other);
            return;
        };
        let canceller = self.state().canceller.clone();
        let key = canceller.and_then(|canceller| call.key(canceller.scope()));
        let registry = &self.shared.registry;
        if !registry.has_capacity() {
            let contest = key.and_then(|key| Contest::begin(registry, &key));
            let contest = contest.map(|contest| -> Box<dyn Contested> { Box::new(contest) });
            if self.set_body_kind(BodyKind::Untracked(contest)) {
                self.report_untracked(&call, Limit::Calls);
            }
            return;
        }
        self.capture_span();
        let mut state = self.state();
        if !matches!(state.request, RequestBody::Parsing) {
            // A session manager has bound the call in the meantime.
            return;
        }
        if state.is_answered {
            state.request = RequestBody::Known(BodyKind::Other);
            drop(state);
            return self.report_completed_at_once(&call);
        }
        state.request = RequestBody::Known(BodyKind::Plain);
        let registered = self.register(call, key, false);
        drop(state);
        self.on_registered(registered);
    }

    /// Registers a call in its session. Must be called under the state lock, so that the call is only registered once.
    ///
    /// A session entry may be locked under the state lock, but no other lock is taken while a session entry is locked.
    pub(super) fn register(
        self: &Arc<Self>,
        call: CallInfo,
        key: Option<Key>,
        is_accepted: bool,
    ) -> Registered {
        let (id, deadline) = (call.id(), call.deadline());
        let session_id = call.session_id().cloned();
        let key = key.map(|key| (key.session.scope, key.request));
        let registry = &self.shared.registry;
        let (is_contested, deferred, is_drained) =
            registry.start(id, session_id.as_ref(), |entry, session| {
                session.start(id, key, self.clone(), deadline);
                // The session entry is locked, so a thread that finds the call in the session also finds it here, and vice versa. This
                // uses `set`, because `get_or_init` would move the large value once more.
                let _ = self.call.set(CallRef {
                    info: call,
                    entry: entry.clone(),
                });
                is_accepted && !session.try_accept(id)
            });
        Registered {
            deferred,
            is_drained,
            is_contested,
        }
    }

    /// Reports that the call has started and cancels it if the server has been drained.
    ///
    /// Must be called without holding any lock.
    pub(super) fn on_registered(self: &Arc<Self>, registered: Registered) {
        let Registered {
            deferred,
            is_drained,
            ..
        } = registered;
        deferred.run();
        let Some(call) = self.info() else {
            return;
        };
        self.report(&Event::Started { call });
        if is_drained {
            self.cancel(call.id(), Cancel::now(CancelReason::ShuttingDown));
        }
    }

    /// Returns the in-flight call, accepted or not, targeted by a client's cancellation.
    fn cancel_target(&self, request: RequestId) -> Option<(Key, CallId)> {
        let canceller = self.state().canceller.clone()?;
        let session = self.session.key(|_| canceller.scope())?;
        let key = Key { session, request };
        let (id, _) = self.shared.registry.find_including_unaccepted(&key)?;
        Some((key, id))
    }

    /// Builds the call from a parsed request.
    ///
    /// Returns `None` for `initialize`, or if it cannot be determined whether the request belongs to a session.
    fn build_call(&self, request: Request<'_>) -> Option<CallInfo> {
        if &*request.method == "initialize" {
            return None;
        }
        let body_version = request.protocol_version.as_deref();
        let revision = body_version.map_or(self.revision, |version| {
            self.revision
                .merge(Revision::from_version(version.as_bytes()))
        });
        let session = match (&self.session, revision) {
            (SessionHeader::None, _) | (SessionHeader::One(_), Revision::Stateless) => None,
            (SessionHeader::One(_), Revision::WithSessions) => Some(Arc::from(self.session.id()?)),
            (SessionHeader::One(_), Revision::Ambiguous) | (SessionHeader::Ambiguous, _) => {
                return None;
            }
        };
        let mut call = CallInfo::new(request.id, &request.method);
        call.set_tool(request.tool);
        call.set_session(session);
        call.set_extensions(self.extensions());
        call.set_protocol_version(body_version.or(self.protocol_version()));
        // Revision 2026-07-28 removed this parameter.
        call.set_task(request.task && revision != Revision::Stateless);
        call.set_cancelled_on_disconnect(revision == Revision::Stateless);
        call.set_policy(self.shared.options.policy_for(&call));
        Some(call)
    }
}
