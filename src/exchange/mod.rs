//! One HTTP request and its response, as it passes through the layer.
//!
//! The service, both bodies, the response future and the session manager all hold the same [`Exchange`]
//! and tell it what they saw; it alone decides what that means for its calls. Its link in the request's
//! extensions is the [`CallToken`](crate::CallToken), which rmcp carries to the session manager and
//! the handler.
//!
//! | file | what it decides |
//! |---|---|
//! | `identity` | whose calls these are, from the request's headers |
//! | `request` | which calls there are, from the body |
//! | `bound` | which call there is, and how its streams fare, from a session manager |
//! | `response` | how far they came, from the response's head and body |
//! | `resume` | whose call a GET with `Last-Event-ID` goes on with |
//! | `end` | how a call ends: answered, cancelled, let go |
//! | `report` | in which span events are reported |
//! | `outlet` | what its client hears of a cancel that it did not ask for |
//! | `hooks` | what happens when the token fires |
//! | `guard` | tells of drops and panics |
//!
//! # Contract
//!
//! 1. An exchange is over once: [`complete`](Exchange::complete), [`fail`](Exchange::fail) or
//!    [`abandon`](Exchange::abandon), whichever comes first.
//! 2. Its calls are set once: by [`bind`](Exchange::bind) from a typed message, or by
//!    [`settle`](Exchange::settle) from the request body.
//! 3. A cancel takes this order: reason, token, inner streams, injection.
//!    It is announced before its call leaves the registry: who closes the session waits for calls in flight, and for
//!    what is announced.
//! 4. No lock is held while a token fires, an observer runs, a hook runs or is dropped, or the registry is asked.

#[cfg(feature = "rmcp")]
use std::any::Any;
use std::{
    fmt, slice,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
};

use futures_util::task::AtomicWaker;
use http::{Method, Request};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tracing::Span;

use self::{
    hooks::Hooks,
    identity::{Revision, Session},
    outlet::LastWords,
    request::RequestBody,
    resume::Resume,
};
#[cfg(feature = "rmcp")]
use crate::call::RequestId;
use crate::{
    call::{CallId, CallInfo, CancelReason},
    cancel::{Announced, Canceller},
    detach::DetachCause,
    fields::Fields,
    layer::Options,
    observe::Event,
    registry::{Registry, Scope, SessionKey},
};

#[cfg(feature = "rmcp")]
mod bound;
mod end;
mod guard;
mod hooks;
mod identity;
mod outlet;
mod report;
mod request;
mod response;
mod resume;

#[cfg(feature = "rmcp")]
pub(crate) use self::{bound::BEFORE_CLOSE, end::Attachment};
pub(crate) use self::{
    guard::Guard,
    outlet::Outlet,
    response::{BodyPlan, Head, Tap},
};

pub(crate) const LAST_EVENT_ID: &str = "last-event-id";

/// What all exchanges of one service share.
#[derive(Debug)]
pub(crate) struct Instance {
    pub(crate) options: Options,
    pub(crate) registry: Arc<Registry>,
}

pub(crate) struct Exchange {
    instance: Arc<Instance>,
    session: Session,
    revision: Revision,
    kind: Kind,
    calls: OnceLock<InFlight>,
    reason: OnceLock<CancelReason>,
    /// Set with the end of the request body, so that most polls need not lock.
    body_ended: AtomicBool,
    /// What passed on the streams of its calls, see `response`.
    passed: AtomicU32,
    /// Its calls were cancelled here, and its response is to say so.
    closed: AtomicBool,
    /// Somebody outside the crate has its token.
    heard: AtomicBool,
    /// Its calls have ended, see `outlet`.
    calls_over: AtomicBool,
    /// The response future.
    answerer: AtomicWaker,
    /// Notified when a call of it was accepted or has ended, if anybody ever waited for that.
    decided: OnceLock<Box<Notify>>,
    state: Mutex<State>,
}

/// What a request may be to the layer.
enum Kind {
    /// A POST: may carry calls, or the client's own cancel of one.
    Post,
    /// A GET with `Last-Event-ID`, for a stream of its session.
    Resume(Box<Resume>),
    /// A DELETE of its session.
    Delete(Box<SessionKey>),
    Other,
}

enum InFlight {
    One(CallInfo),
    Batch(Box<[CallInfo]>),
}

struct State {
    phase: Phase,
    request: RequestBody,
    token: Option<CancellationToken>,
    hooks: Hooks,
    canceller: Option<Arc<dyn Canceller>>,
    handover: Handover,
    /// Its answer, between its session's transport and its stream.
    #[cfg(feature = "rmcp")]
    in_passing: Option<InPassing>,
    /// How a resumed stream of its call is going just now, where the stream itself cannot tell.
    going: Option<DetachCause>,
    last_words: LastWords,
    /// In a box: where nobody subscribes to spans there is none.
    span: Option<Box<Span>>,
}

/// A message that only its session manager can read.
#[cfg(feature = "rmcp")]
type InPassing = Arc<dyn Any + Send + Sync>;

/// How far a call has come on its way into a session manager, which then watches its streams.
#[cfg_attr(
    not(feature = "rmcp"),
    expect(dead_code, reason = "only a session manager takes calls over")
)]
enum Handover {
    /// No session manager has bound it.
    None,
    /// It is bound, and its request is on the way. A cancel must not overtake that: it waits here.
    Opening(Option<(CancelReason, Option<Announced>)>),
    /// The session manager took the request. `cancelled`: and a cancel that had waited for that.
    Open { cancelled: bool },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Open,
    /// The inner service took the request.
    Streaming,
    /// The client was told all there was to tell.
    Ended,
    /// The client went away, or nobody reads the rest.
    Abandoned,
}

// === impl Instance ===

impl Instance {
    pub(crate) fn new(options: Options, registry: Arc<Registry>) -> Self {
        Self { options, registry }
    }

    pub(crate) fn report(&self, event: &Event<'_>) {
        self.options.observers.on_event(event);
    }
}

// === impl Exchange ===

impl Exchange {
    pub(crate) fn new<B>(
        instance: Arc<Instance>,
        request: &Request<B>,
        fields: &Fields<'_>,
    ) -> Self {
        let session = Session::of(fields.session_id);
        let revision = Revision::of(fields.protocol_version);
        let kind = Kind::of(&instance, request, &session);
        Self {
            instance,
            session,
            revision,
            kind,
            calls: OnceLock::new(),
            reason: OnceLock::new(),
            body_ended: AtomicBool::new(false),
            passed: AtomicU32::new(0),
            closed: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            calls_over: AtomicBool::new(false),
            answerer: AtomicWaker::new(),
            decided: OnceLock::new(),
            state: Mutex::new(State {
                phase: Phase::Open,
                request: RequestBody::Passing,
                token: None,
                hooks: Hooks::default(),
                canceller: None,
                handover: Handover::None,
                #[cfg(feature = "rmcp")]
                in_passing: None,
                going: None,
                last_words: LastWords::default(),
                span: None,
            }),
        }
    }

    /// Whether a cancel of the calls in this request may have to be replayed into the inner service:
    /// it may carry session calls, and nobody is known to bind them.
    pub(crate) fn may_need_replay(&self) -> bool {
        matches!(self.kind, Kind::Post)
            && self.revision == Revision::WithSessions
            && self.session.id().is_some_and(|id| {
                let registry = &self.instance.registry;
                registry.manager_of(id).is_none()
            })
    }

    /// Takes the canceller for calls that no session manager binds.
    pub(crate) fn set_replay(&self, replay: Arc<dyn Canceller>) {
        self.state().canceller = Some(replay);
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

    #[cfg(feature = "rmcp")]
    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.instance.registry
    }

    fn calls(&self) -> impl Iterator<Item = &CallInfo> {
        self.calls.get().into_iter().flat_map(InFlight::iter)
    }

    pub(crate) fn call(&self, id: CallId) -> Option<&CallInfo> {
        self.calls().find(|call| call.id() == id)
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn call_with(&self, request: &RequestId) -> Option<&CallInfo> {
        self.calls().find(|call| call.request_id() == request)
    }

    fn is_bound(&self) -> bool {
        !matches!(self.state().handover, Handover::None)
    }

    /// Somebody outside the crate gets its token, and so may hear of a cancel.
    pub(crate) fn hear(&self) {
        self.heard.store(true, Ordering::Relaxed);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("calls", &self.calls().collect::<Vec<_>>())
            .field("reason", &self.reason())
            .finish_non_exhaustive()
    }
}

// === impl Kind ===

impl Kind {
    fn of<B>(instance: &Instance, request: &Request<B>, session: &Session) -> Self {
        let path = request.uri().path();
        match *request.method() {
            Method::POST => Self::Post,
            Method::GET => {
                let resume = session
                    .key(|id| instance.scope_of(id, path))
                    .and_then(|session| Resume::receive(instance, session, request.headers()));
                resume.map_or(Self::Other, |resume| Self::Resume(Box::new(resume)))
            }
            Method::DELETE => session
                .key(|_| Scope::Path(path.into()))
                .map_or(Self::Other, |session| Self::Delete(Box::new(session))),
            _ => Self::Other,
        }
    }
}

impl Instance {
    /// Who gave out a session id that came to a path: the session manager that knows it, or the path's server.
    fn scope_of(&self, id: &str, path: &str) -> Scope {
        let manager = self.registry.manager_of(id);
        manager.unwrap_or_else(|| Scope::Path(path.into()))
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
