//! One HTTP request and its response, as it passes through the layer.
//!
//! The service, both bodies, the response future and the session manager all hold the same [`Exchange`]
//! and tell it what they saw; it alone decides what that means for its calls. Its link in the request's
//! extensions is the [`CallToken`](crate::CallToken), which rmcp carries to the session manager and
//! the handler.
//!
//! # Contract
//!
//! 1. An exchange is over once: [`complete`](Exchange::complete), [`fail`](Exchange::fail) or
//!    [`abandon`](Exchange::abandon), whichever comes first.
//! 2. Its calls are set once: by [`bind`](Exchange::bind) from a typed message, or by
//!    [`settle`](Exchange::settle) from the request body, never by both.
//! 3. A cancel takes this order: reason, token, inner streams, injection.
//! 4. No lock is held while a token fires, an observer runs or the registry is asked.

use std::{
    mem, slice,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use http::{Method, Request};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::identity::{Revision, Session};

use crate::{
    call::{CallId, CallInfo, CancelReason, Outcome},
    cancel::{CancelError, Canceller, Injection},
    envelope::{self, Envelope, Frames, Message, Unknown},
    layer::Options,
    observe::Event,
    policy::Verdict,
    registry::{Key, Registry, Scope, UNSEEN_FOR, Wait},
};

mod guard;
mod identity;

pub(crate) use self::guard::Guard;

pub(crate) const LAST_EVENT_ID: &str = "last-event-id";

/// How long an injected cancel may take to be accepted: 10 s. A session whose client does not read may
/// hold it back, and it must not be held for ever.
const INJECTION_LIMIT: Duration = Duration::from_secs(10);

/// What all exchanges of one service share.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) options: Options,
    pub(crate) registry: Arc<Registry>,
    /// The first path on which a session manager bound a call. Calls to it need no replay.
    wrapped: OnceLock<Box<str>>,
}

pub(crate) struct Exchange {
    instance: Arc<Instance>,
    session: Session,
    revision: Revision,
    /// The path of a GET with `Last-Event-ID`: if it is accepted, the session's client is back.
    resumes_at: Option<Box<str>>,
    calls: OnceLock<InFlight>,
    reason: OnceLock<CancelReason>,
    /// Set with the end of the request body, so that most polls need not lock.
    body_ended: AtomicBool,
    state: Mutex<State>,
}

/// What the response head says about the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Head {
    /// 2xx with `text/event-stream`: accepted, the answer comes on the stream.
    Stream,
    /// 2xx with any other body: the answer itself.
    Answer,
    /// Any other status: never was a call.
    Refusal,
}

enum InFlight {
    One(CallInfo),
    Batch(Box<[CallInfo]>),
}

struct State {
    phase: Phase,
    request: RequestBody,
    token: Option<CancellationToken>,
    canceller: Option<Arc<dyn Canceller>>,
    /// The calls were bound by a session manager, which watches their streams.
    bound: bool,
    /// The call's inner stream was dropped while the exchange went on.
    stream_dropped: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    Streaming,
    /// The client was told all there was to tell.
    Ended,
    /// The client went away, with the head or without it.
    Abandoned {
        streaming: bool,
    },
}

enum RequestBody {
    Passing,
    Ended(Result<Frames, Unknown>),
    /// Read, or not needed any more. `other` if it was JSON-RPC but no call.
    Settled {
        other: bool,
    },
}

// === impl Instance ===

impl Instance {
    pub(crate) fn new(options: Options, registry: Arc<Registry>) -> Self {
        Self {
            options,
            registry,
            wrapped: OnceLock::new(),
        }
    }

    fn is_wrapped(&self, path: &str) -> bool {
        self.wrapped.get().is_some_and(|wrapped| **wrapped == *path)
    }

    pub(crate) fn report(&self, event: &Event<'_>) {
        self.options.observers.on_event(event);
    }
}

// === impl Exchange ===

impl Exchange {
    pub(crate) fn new<B>(instance: Arc<Instance>, request: &Request<B>) -> Self {
        let headers = request.headers();
        let resumes_at = (request.method() == Method::GET && headers.contains_key(LAST_EVENT_ID))
            .then(|| request.uri().path().into());
        Self {
            session: Session::of(headers),
            revision: Revision::of(headers),
            resumes_at,
            instance,
            calls: OnceLock::new(),
            reason: OnceLock::new(),
            body_ended: AtomicBool::new(false),
            state: Mutex::new(State {
                phase: Phase::Open,
                request: RequestBody::Passing,
                token: None,
                canceller: None,
                bound: false,
                stream_dropped: false,
            }),
        }
    }

    /// Whether a cancel of the calls in this request may have to be replayed into the inner service:
    /// it may carry session calls, and nobody is known to bind them.
    pub(crate) fn may_need_replay<B>(&self, request: &Request<B>) -> bool {
        request.method() == Method::POST
            && matches!(self.session, Session::One(_))
            && self.revision == Revision::WithSessions
            && !self.instance.is_wrapped(request.uri().path())
    }

    /// Takes the canceller for calls that no session manager binds.
    pub(crate) fn set_replay(&self, replay: Arc<dyn Canceller>) {
        self.state().canceller = Some(replay);
    }

    // --- What the request body tells ---

    /// The request body has passed: its frames, or why they say nothing.
    pub(crate) fn body_ended(&self, frames: Result<Frames, Unknown>) {
        let mut state = self.state();
        if matches!(state.request, RequestBody::Passing) {
            state.request = RequestBody::Ended(frames);
            self.body_ended.store(true, Ordering::Release);
        }
    }

    /// Reads the calls from the request body, once it has passed and if nobody bound them.
    pub(crate) fn settle(self: &Arc<Self>) {
        if !self.body_ended.swap(false, Ordering::AcqRel) {
            return;
        }
        let settled = RequestBody::Settled { other: false };
        let RequestBody::Ended(frames) = mem::replace(&mut self.state().request, settled) else {
            return;
        };
        match frames.and_then(|frames| envelope::read(&frames.into_bytes())) {
            Ok(envelope) => self.start(envelope),
            Err(why) => self.instance.report(&Event::Unknown { why }),
        }
    }

    fn start(self: &Arc<Self>, envelope: Envelope) {
        let in_flight = match envelope {
            Envelope::Single(message) => self.call_of(message).map(InFlight::One),
            Envelope::Batch(messages) => {
                let calls: Box<[_]> = messages
                    .into_iter()
                    .filter_map(|message| self.call_of(message))
                    .collect();
                (!calls.is_empty()).then_some(InFlight::Batch(calls))
            }
        };
        let Some(in_flight) = in_flight else {
            self.state().request = RequestBody::Settled { other: true };
            return;
        };
        let calls = self.calls.get_or_init(|| in_flight);
        let scope = self
            .state()
            .canceller
            .as_ref()
            .map(|canceller| canceller.scope());
        for call in calls.iter() {
            let key = scope.clone().zip(call.session_id().cloned());
            let key = key.map(|(scope, session)| Key {
                scope,
                session,
                request: call.request_id().clone(),
            });
            self.instance.registry.start(call.id(), key, self.clone());
            self.instance.report(&Event::Started { call });
        }
    }

    /// The call in a message that was read from the body. `initialize` is none, nor is a request of which
    /// it cannot be said whether it belongs to a session.
    fn call_of(&self, message: Message) -> Option<CallInfo> {
        let Message::Request(request) = message else {
            return None;
        };
        if &*request.method == "initialize" {
            return None;
        }
        let in_body = request.protocol_version.as_deref();
        let revision = in_body.map_or(self.revision, |version| {
            self.revision.and(Revision::from_version(version))
        });
        let session = match (&self.session, revision) {
            (Session::None, _) | (Session::One(_), Revision::Stateless) => None,
            (Session::One(id), Revision::WithSessions) => Some(Arc::from(id.to_str().ok()?)),
            (Session::One(_), Revision::Doubtful) | (Session::Doubtful, _) => return None,
        };
        let call = CallInfo::new(request.id, &request.method)
            .with_tool(request.tool)
            .with_session(session)
            .running_as_task(request.task);
        Some(call)
    }

    // --- What the session manager tells ---

    /// Takes a call from the typed message that the session manager was given. `None` if it is not to
    /// be tracked.
    #[cfg(feature = "rmcp")]
    pub(crate) fn bind(
        self: &Arc<Self>,
        call: CallInfo,
        canceller: Arc<dyn Canceller>,
    ) -> Option<CallId> {
        if matches!(self.session, Session::Doubtful) || call.method() == "initialize" {
            return None;
        }
        let key = Key {
            scope: canceller.scope(),
            session: call.session_id()?.clone(),
            request: call.request_id().clone(),
        };
        let id = call.id();
        if self.calls.set(InFlight::One(call)).is_err() {
            return self.rebind(key, canceller);
        }
        self.instance.registry.start_accepted(id, key, self.clone());
        let abandoned = self.become_bound(canceller);
        if let Some(call) = self.call(id) {
            self.instance.report(&Event::Started { call });
            if let Some(streaming) = abandoned {
                self.let_go(call, streaming, CancelReason::ClientDisconnected);
            }
        }
        Some(id)
    }

    /// The body was read before the session manager got the message: the same call, better cancelled.
    #[cfg(feature = "rmcp")]
    fn rebind(&self, key: Key, canceller: Arc<dyn Canceller>) -> Option<CallId> {
        let Some(InFlight::One(call)) = self.calls.get() else {
            return None;
        };
        let same = *call.request_id() == key.request && call.session_id() == Some(&key.session);
        same.then(|| {
            self.instance.registry.rekey(call.id(), key);
            self.become_bound(canceller);
            call.id()
        })
    }

    /// Returns whether the client had already gone, and if so whether it had the head.
    #[cfg(feature = "rmcp")]
    fn become_bound(&self, canceller: Arc<dyn Canceller>) -> Option<bool> {
        let (replay, phase) = {
            let mut state = self.state();
            state.bound = true;
            state.request = RequestBody::Settled { other: false };
            (state.canceller.replace(canceller), state.phase)
        };
        if let Some(Scope::Path(path)) = replay.map(|replay| replay.scope()) {
            // Lost if another path was first: then this one keeps paying for its replays.
            let _first = self.instance.wrapped.set(path);
        }
        match phase {
            Phase::Abandoned { streaming } => Some(streaming),
            _ => None,
        }
    }

    /// The stream of a call came to its end: with the answer, without it, or it could not be opened.
    #[cfg(feature = "rmcp")]
    pub(crate) fn stream_ended(&self, id: CallId, outcome: Outcome) {
        self.finish(id, outcome);
    }

    /// The stream of a call was dropped before its end.
    #[cfg(feature = "rmcp")]
    pub(crate) fn stream_dropped(&self) {
        self.state().stream_dropped = true;
    }

    // --- What the response tells ---

    pub(crate) fn head(self: &Arc<Self>, head: Head) {
        let outcome = match head {
            Head::Stream => return self.accepted(),
            Head::Answer => Outcome::Completed,
            Head::Refusal => Outcome::Failed,
        };
        self.end_calls(outcome);
    }

    fn accepted(&self) {
        let may_resume = {
            let mut state = self.state();
            if state.phase == Phase::Open {
                state.phase = Phase::Streaming;
            }
            !state.bound
        };
        let registry = &self.instance.registry;
        if may_resume {
            for call in self.calls() {
                registry.claim(call.id());
            }
        }
        if let (Some(path), Session::One(id)) = (&self.resumes_at, &self.session)
            && let Ok(session) = id.to_str()
        {
            registry.spare(&Scope::Path(path.clone()), session);
        }
    }

    /// The client was told everything.
    pub(crate) fn complete(self: &Arc<Self>) {
        self.over(Outcome::Unknown);
    }

    /// The inner service returned an error instead of a response.
    pub(crate) fn fail(self: &Arc<Self>) {
        self.over(Outcome::Failed);
    }

    fn over(self: &Arc<Self>, outcome: Outcome) {
        self.settle();
        {
            let mut state = self.state();
            if matches!(state.phase, Phase::Abandoned { .. }) {
                return;
            }
            state.phase = Phase::Ended;
        }
        self.end_calls(outcome);
    }

    /// Ends what is still in flight. A call whose stream was let go inside has nobody left to answer.
    fn end_calls(self: &Arc<Self>, outcome: Outcome) {
        if self.calls.get().is_none() {
            return;
        }
        let dropped = self.state().stream_dropped;
        for call in self.calls() {
            if dropped {
                self.cancel(call.id(), CancelReason::ResponseDropped);
            } else {
                self.finish(call.id(), outcome);
            }
        }
    }

    /// Nobody will read the rest.
    pub(crate) fn abandon(self: &Arc<Self>, reason: CancelReason) {
        self.settle();
        let (streaming, other) = {
            let mut state = self.state();
            let streaming = match state.phase {
                Phase::Open => false,
                Phase::Streaming => true,
                Phase::Ended | Phase::Abandoned { .. } => return,
            };
            state.phase = Phase::Abandoned { streaming };
            let other = matches!(state.request, RequestBody::Settled { other: true });
            (streaming, other)
        };
        if self.calls.get().is_some() {
            for call in self.calls() {
                self.let_go(call, streaming, reason);
            }
        } else if matches!(self.session, Session::None) && !other {
            // No call and no session: a plain request, which nobody can resume.
            self.fire(reason);
        }
    }

    fn let_go(self: &Arc<Self>, call: &CallInfo, streaming: bool, reason: CancelReason) {
        let now = Instant::now();
        let (grace, deadline) = match self.instance.options.grace.verdict(call, streaming) {
            Verdict::CancelNow => return self.cancel(call.id(), reason),
            Verdict::CancelAfter(grace) => (Some(grace), now.checked_add(grace)),
            Verdict::RunOn => (None, None),
        };
        let wait = match deadline {
            Some(at) => Wait::Until(at),
            None if self.state().bound => Wait::ForItsEnd,
            None if call.session().is_some() => Wait::Unseen(now + UNSEEN_FOR),
            // Its stream was all that was to be seen of it.
            None => return self.finish(call.id(), Outcome::Unknown),
        };
        if self.instance.registry.detach(call.id(), wait) {
            self.instance.report(&Event::Detached { call, grace });
        }
    }

    // --- Cancelling ---

    /// Cancels a call, unless it has ended (contract 3).
    pub(crate) fn cancel(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let Some(finished) = self.instance.registry.finish(id) else {
            return;
        };
        self.fire(reason);
        let Some(call) = self.call(id) else {
            return;
        };
        let outcome = Outcome::Cancelled(reason);
        self.instance.report(&Event::Ended { call, outcome });
        let canceller = self.state().canceller.clone();
        if let Some(canceller) = canceller.filter(|_| finished.injectable) {
            self.inject(id, canceller.cancel(call, reason));
        }
    }

    /// Has the injection run elsewhere, and reports if it fails. It is not repeated.
    fn inject(self: &Arc<Self>, id: CallId, injection: Injection) {
        let this = self.clone();
        let injection = async move {
            let result = tokio::time::timeout(INJECTION_LIMIT, injection).await;
            if let Err(error) = result.unwrap_or(Err(CancelError::timed_out())) {
                this.cancel_failed(id, &error);
            }
        };
        if !self.instance.registry.spawn(injection) {
            self.cancel_failed(id, &CancelError::no_runtime());
        }
    }

    fn cancel_failed(&self, id: CallId, error: &CancelError) {
        if let Some(call) = self.call(id) {
            self.instance.report(&Event::CancelFailed { call, error });
        }
    }

    fn finish(&self, id: CallId, outcome: Outcome) {
        if self.instance.registry.finish(id).is_some()
            && let Some(call) = self.call(id)
        {
            self.instance.report(&Event::Ended { call, outcome });
        }
    }

    fn fire(&self, reason: CancelReason) {
        if self.reason.set(reason).is_ok() {
            let token = self.state().token.clone();
            if let Some(token) = token {
                token.cancel();
            }
        }
    }

    pub(crate) fn reason(&self) -> Option<CancelReason> {
        self.reason.get().copied()
    }

    /// The token of the exchange, made when somebody first asks.
    pub(crate) fn token(&self) -> CancellationToken {
        let token = self.state().token.get_or_insert_default().clone();
        // `fire` sets the reason before it looks for a token: one of the two sees the other.
        if self.reason.get().is_some() {
            token.cancel();
        }
        token
    }

    /// Runs `task` where the layer's own work runs. `false` if there is no runtime.
    #[cfg(feature = "rmcp")]
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> bool {
        self.instance.registry.spawn(task)
    }

    fn calls(&self) -> impl Iterator<Item = &CallInfo> {
        self.calls.get().into_iter().flat_map(InFlight::iter)
    }

    fn call(&self, id: CallId) -> Option<&CallInfo> {
        self.calls().find(|call| call.id() == id)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Exchange {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Exchange")
            .field("calls", &self.calls().collect::<Vec<_>>())
            .field("reason", &self.reason())
            .finish_non_exhaustive()
    }
}

// === impl InFlight ===

impl InFlight {
    fn iter(&self) -> slice::Iter<'_, CallInfo> {
        match self {
            Self::One(call) => slice::from_ref(call).iter(),
            Self::Batch(calls) => calls.iter(),
        }
    }
}
