//! The types that make up an exchange's state.

use std::{
    any::Any,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, Weak,
        atomic::{AtomicBool, AtomicU8, AtomicU32},
    },
};

use futures_util::task::AtomicWaker;
use http::Extensions;
use tokio::sync::Notify;
use tracing::Span;

use super::{
    call_streams::CallStreams,
    identity::{Revision, SessionHeader},
    request_body::RequestBody,
    signal::Signal,
};
use crate::{
    call::{CallId, CallInfo, CancelReason, DetachCause, Key, RequestId, SessionKey},
    cancel::{CancelGuard, Canceller},
    lock::lock,
    observe::Event,
    options::Options,
    registry::{self, Generation, SessionEntry},
};

pub(crate) type Registry = registry::Registry<Exchange>;

pub(crate) type SessionState = registry::SessionState<Exchange>;

/// State shared by all of a service's exchanges.
#[derive(Debug)]
pub(crate) struct LayerShared {
    pub(crate) options: Options,
    pub(crate) registry: Arc<Registry>,
}

/// One HTTP request and its response.
pub(crate) struct Exchange {
    pub(super) shared: Arc<LayerShared>,
    pub(super) session: SessionHeader,
    pub(super) revision: Revision,
    /// The revision date from the header.
    pub(super) revision_date: Option<[u8; 10]>,
    pub(super) kind: RequestKind,
    pub(super) call: OnceLock<CallRef>,
    pub(crate) signal: Signal,
    /// Whether the request body has ended or been dropped and may still have to be parsed.
    ///
    /// This is checked first, so that most polls do not have to take the lock.
    pub(super) must_parse_body: AtomicBool,
    /// Whether the call's streams have carried event ids, and the last `retry`.
    ///
    /// The `response` module packs both into a single number.
    pub(super) stream_meta: AtomicU32,
    /// Whether this server has cancelled the call with an error, which becomes the response.
    pub(super) is_cancelled_here: AtomicBool,
    /// Whether the call has ended (see `streams`).
    pub(super) has_call_ended: AtomicBool,
    /// Whether the bytes sent on the streams may have been the call's answer (see `tap`).
    pub(super) may_have_been_answered: AtomicBool,
    /// The call's [`PendingCancel`], as a number.
    pub(super) pending_cancel: AtomicU8,
    /// Wakes the response future.
    pub(super) response_waker: AtomicWaker,
    /// Notified when the call is accepted or ends, or when its [`PendingCancel`] becomes known.
    ///
    /// Created by the first task to wait for it.
    pub(super) changed: OnceLock<Box<Notify>>,
    pub(super) state: Mutex<ExchangeState>,
}

/// A call and its session's entry.
pub(super) struct CallRef {
    pub(super) info: CallInfo,
    pub(super) entry: Arc<SessionEntry<Exchange>>,
}

/// The kind of a request, judging by its head.
pub(super) enum RequestKind {
    /// A POST that may carry a call, or the client's own cancellation of one. A POST that is certainly not JSON is `Other`.
    ///
    /// Contains the extensions for its calls (see [`CallInfo::extension`]).
    Post(Option<Arc<Extensions>>),
    /// A GET with `Last-Event-ID`, which may resume one of its session's streams.
    Resume(Box<Resume>),
    /// A DELETE request for a session.
    Delete(Box<SessionKey>),
    /// Any other GET with a session id, which may open the standalone stream. Until the response head is known, it is assumed to do
    /// so if it accepts events.
    Listen {
        accepts_events: bool,
    },
    /// A cancellation sent by the layer itself.
    Replay,
    Other,
}

/// A GET with `Last-Event-ID`.
pub(super) struct Resume {
    pub(super) session: SessionKey,
    pub(super) event_id: Box<[u8]>,
    /// The calls whose grace periods this resume keeps from expiring. There are several if the event id is ambiguous.
    pub(super) held_calls: Mutex<Vec<(CallId, Arc<Exchange>)>>,
}

/// The part of an exchange's state that its lock protects.
#[derive(Default)]
pub(super) struct ExchangeState {
    pub(super) phase: Phase,
    pub(super) request: RequestBody,
    /// Whether the inner service has returned the response head.
    pub(super) has_head: bool,
    /// Whether a service inside the layer already has the answer to the request.
    ///
    /// See contract 5 of `exchange`. This can be set before the request is known to carry a call.
    pub(super) is_answered: bool,
    pub(super) canceller: Option<Arc<dyn Canceller>>,
    pub(super) dispatch: Dispatch,
    pub(super) late_answer: LateAnswer,
    /// Whether a session manager observed the call's answer while its client was connected.
    pub(super) is_delivering: bool,
    /// Why a resumed stream of the call is ending, if the stream itself cannot tell.
    pub(super) stream_end_cause: Option<DetachCause>,
    pub(super) streams: CallStreams,
    /// The exchange of a later attempt that is a separate call, because the first call has ended.
    pub(super) next: Weak<Exchange>,
    /// Boxed, because it is usually absent: there is only a span if a subscriber records spans.
    pub(super) span: Option<Box<Span>>,
}

/// A message readable only by its session manager.
pub(crate) type OpaqueMessage = Arc<dyn Any + Send + Sync>;

/// Whether a stream can still deliver a call's answer.
///
/// If the call's streams end early, only the session's transport observes the answer.
#[derive(Default)]
pub(super) enum LateAnswer {
    /// A stream is expected to deliver the answer.
    #[default]
    Possible,
    /// A copy of the answer sent by the transport, stored until a stream delivers it.
    Received(OpaqueMessage),
    /// No stream will deliver the answer any more.
    Closed,
}

/// One of a call's streams. The owner of this value reports when the stream has ended.
#[derive(Debug, Clone)]
pub(crate) struct Attachment {
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) id: CallId,
    pub(crate) generation: Generation,
}

/// A call's dispatch to a session manager, which then observes the call's streams.
#[derive(Default)]
pub(super) enum Dispatch {
    /// No session manager has bound the call.
    #[default]
    NotBound,
    /// The call is bound, and its request is being dispatched. Cancellations are deferred, because they must not overtake the request.
    InProgress(Attempts),
    /// Every attempt has been accepted, refused or abandoned. If a deferred cancellation was sent after that, `is_cancelled` is set.
    Done { is_cancelled: bool },
}

/// What is deferred until the session manager has accepted or refused a call's request.
#[derive(Default)]
pub(super) struct Attempts {
    /// Number of attempts in progress. There are several if a middleware resends the request.
    pub(super) in_progress: u32,
    /// Whether the session manager has accepted, or may have accepted, an attempt.
    pub(super) was_accepted: bool,
    /// The call's key, if an older in-flight call still has the same key.
    ///
    /// If the request is refused, the older call keeps the key.
    pub(super) contested: Option<Box<Key>>,
    pub(super) deferred_cancel: Option<(CancelReason, Option<CancelGuard>)>,
}

/// Whether a call waits for the pending cancellation of an older call with the same id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PendingCancel {
    /// The call is not waiting, so the older call's cancellation would cancel this call instead.
    None = 0,
    /// It is not yet known whether the call is waiting, although the call can already be found.
    Unknown = 1,
    Awaited = 2,
}

/// How far the response has progressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Open,
    /// The response is an event stream, or the accepted request is not known to carry a call.
    Streaming,
    /// The response body is the answer to the call, which no session manager tracks.
    Answering,
    /// The complete response has been sent, or the inner service has returned an error.
    Ended,
    /// The response was dropped before it ended.
    Dropped,
}

// === impl Phase ===

impl Phase {
    /// Returns `true` while the client is still waiting.
    pub(super) fn is_open(self) -> bool {
        matches!(self, Self::Open | Self::Streaming | Self::Answering)
    }
}

// === impl LayerShared ===

impl LayerShared {
    pub(crate) fn report(&self, event: &Event<'_>) {
        self.options.observers.on_event(event);
    }
}

// === impl Exchange ===

impl Exchange {
    pub(super) fn from_parts(
        shared: Arc<LayerShared>,
        session: SessionHeader,
        revision: Revision,
        revision_date: Option<[u8; 10]>,
        kind: RequestKind,
    ) -> Self {
        Self {
            shared,
            session,
            revision,
            revision_date,
            kind,
            call: OnceLock::new(),
            signal: Signal::default(),
            must_parse_body: AtomicBool::new(false),
            stream_meta: AtomicU32::new(0),
            is_cancelled_here: AtomicBool::new(false),
            has_call_ended: AtomicBool::new(false),
            may_have_been_answered: AtomicBool::new(false),
            pending_cancel: AtomicU8::new(0),
            response_waker: AtomicWaker::new(),
            changed: OnceLock::new(),
            state: Mutex::default(),
        }
    }

    /// Returns the extensions for the request's calls.
    pub(super) fn extensions(&self) -> Option<Arc<Extensions>> {
        match &self.kind {
            RequestKind::Post(extensions) => extensions.clone(),
            _ => None,
        }
    }

    /// Returns `true` if the request may carry a call, judging by its head.
    pub(crate) fn may_carry_call(&self) -> bool {
        matches!(self.kind, RequestKind::Post(_))
    }

    /// Returns `true` if a cancellation may have to be replayed into the inner service.
    ///
    /// This is the case if the request may carry a session call and no session manager has its session.
    pub(crate) fn may_need_replay(&self) -> bool {
        self.may_carry_call()
            && self.revision == Revision::WithSessions
            && self.session.id().is_some_and(|id| {
                let registry = &self.shared.registry;
                registry.manager_scope(id).is_none()
            })
    }

    /// Keeps the session in use until the returned guard is dropped. Returns `None` if no session manager has the session.
    #[cold]
    pub(crate) fn use_session(&self) -> Option<Box<dyn Send + Sync>> {
        self.shared.registry.use_session(self.session.id()?)
    }

    /// Sets the canceller to use for a call that no session manager binds.
    pub(crate) fn set_replay(&self, replay: Arc<dyn Canceller>) {
        self.state().canceller = Some(replay);
    }

    /// Returns the protocol revision from the request's header.
    pub(super) fn protocol_version(&self) -> Option<&str> {
        str::from_utf8(self.revision_date.as_ref()?).ok()
    }

    pub(crate) fn registry(&self) -> &Arc<Registry> {
        &self.shared.registry
    }

    /// Returns the call, or `None` if the request is not known to carry one.
    pub(super) fn info(&self) -> Option<&CallInfo> {
        Some(&self.call.get()?.info)
    }

    /// Returns `true` if the request is known to carry a call.
    pub(crate) fn has_call(&self) -> bool {
        self.call.get().is_some()
    }

    /// Runs an operation on the call's session state, or returns `None` if there is no call.
    pub(crate) fn with_session<R>(
        &self,
        operation: impl FnOnce(&mut SessionState) -> R,
    ) -> Option<R> {
        Some(self.call.get()?.entry.with(operation))
    }

    pub(crate) fn is_in_flight(&self, id: CallId) -> bool {
        let is_in_flight = self.with_session(|session| session.is_in_flight(id));
        is_in_flight.unwrap_or(false)
    }

    /// Returns `true` if a call is in flight and has been accepted by the inner service.
    pub(crate) fn is_accepted(&self, id: CallId) -> bool {
        let is_accepted =
            |session: &mut SessionState| session.is_in_flight(id) && !session.is_unaccepted(id);
        self.with_session(is_accepted).unwrap_or(false)
    }

    pub(crate) fn is_detached(&self, id: CallId) -> bool {
        let is_detached = self.with_session(|session| session.is_detached(id));
        is_detached.unwrap_or(false)
    }

    /// Records that a background task is reading one of the call's streams.
    ///
    /// The task keeps reading to find out when the call ends.
    pub(crate) fn add_background_reader(&self, id: CallId) {
        self.with_session(|session| session.add_background_reader(id));
    }

    /// Returns the call if it has this id.
    pub(crate) fn call(&self, id: CallId) -> Option<&CallInfo> {
        self.info().filter(|call| call.id() == id)
    }

    pub(crate) fn call_with_request_id(&self, request: &RequestId) -> Option<&CallInfo> {
        self.info().filter(|call| call.request_id() == request)
    }

    pub(crate) fn is_bound(&self) -> bool {
        self.state().is_bound()
    }

    pub(super) fn state(&self) -> MutexGuard<'_, ExchangeState> {
        lock(&self.state)
    }
}

// === impl ExchangeState ===

impl ExchangeState {
    /// Returns `true` if a session manager tracks the call.
    pub(super) fn is_bound(&self) -> bool {
        !matches!(self.dispatch, Dispatch::NotBound)
    }
}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exchange")
            .field("call", &self.info())
            .field("reason", &self.signal.reason())
            .finish_non_exhaustive()
    }
}
