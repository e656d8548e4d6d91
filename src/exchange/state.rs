//! The state of an exchange: all its fields.

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

/// State shared by all exchanges of one service.
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
    /// The date of the revision in the header.
    pub(super) revision_date: Option<[u8; 10]>,
    pub(super) kind: RequestKind,
    pub(super) call: OnceLock<CallRef>,
    pub(crate) signal: Signal,
    /// The request body has ended or was dropped and may have to be parsed. Checked first, so that most polls need not lock.
    pub(super) must_parse_body: AtomicBool,
    /// Whether the call's streams had event ids, and the last `retry`. `response` packs both.
    pub(super) stream_meta: AtomicU32,
    /// The call was cancelled here, so the error becomes the response.
    pub(super) is_cancelled_here: AtomicBool,
    /// The call has ended, see `streams`.
    pub(super) has_call_ended: AtomicBool,
    /// The bytes that were sent on the streams may have been the answer to the call, see `tap`.
    pub(super) maybe_answered: AtomicBool,
    /// The [`PendingCancel`] of the call, as a number.
    pub(super) pending_cancel: AtomicU8,
    /// Wakes the response future.
    pub(super) response_waker: AtomicWaker,
    /// Notified when the call is accepted or ends, or its [`PendingCancel`] becomes known. Set by the first task that waits.
    pub(super) changed: OnceLock<Box<Notify>>,
    pub(super) state: Mutex<ExchangeState>,
}

/// A call, and the entry of its session.
pub(super) struct CallRef {
    pub(super) info: CallInfo,
    pub(super) entry: Arc<SessionEntry<Exchange>>,
}

/// What a request may be, judging by its head.
pub(super) enum RequestKind {
    /// A POST that may carry a call, or the client's own cancel of one. A POST that is certainly not JSON is `Other`.
    ///
    /// Has the extensions of its calls, see [`CallInfo::extension`].
    Post(Option<Arc<Extensions>>),
    /// A GET with `Last-Event-ID`, for a stream of its session.
    Resume(Box<Resume>),
    /// A DELETE of its session.
    Delete(Box<SessionKey>),
    /// Another GET with a session id. It may open the standalone stream. Until the response head is known, it counts as such a
    /// GET if it accepts events.
    Listen {
        accepts_events: bool,
    },
    /// A cancel that the layer itself sends.
    Replay,
    Other,
}

/// A GET with `Last-Event-ID`.
pub(super) struct Resume {
    pub(super) session: SessionKey,
    pub(super) event_id: Box<[u8]>,
    /// The calls whose grace it keeps from expiring. There are several if the event id is ambiguous.
    pub(super) held_calls: Mutex<Vec<(CallId, Arc<Exchange>)>>,
}

#[derive(Default)]
pub(super) struct ExchangeState {
    pub(super) phase: Phase,
    pub(super) request: RequestBody,
    /// The inner service has returned the response head.
    pub(super) has_head: bool,
    /// A service inside the layer has the answer to the request (see contract 5 of `exchange`).
    ///
    /// It may be set before the request is known to carry a call.
    pub(super) is_answered: bool,
    pub(super) canceller: Option<Arc<dyn Canceller>>,
    pub(super) dispatch: Dispatch,
    pub(super) late_answer: LateAnswer,
    /// The call was answered while its client was connected, as a session manager observed.
    pub(super) is_delivering: bool,
    /// Why a resumed stream of the call is ending. Set where the stream itself observes only that it is dropped.
    pub(super) stream_end_cause: Option<DetachCause>,
    pub(super) streams: CallStreams,
    /// The exchange of a further attempt that is a separate call. The first call has ended.
    pub(super) next: Weak<Exchange>,
    /// Boxed, because it is usually absent: there is a span only if a subscriber records spans.
    pub(super) span: Option<Box<Span>>,
}

/// A message that only its session manager can read.
pub(crate) type OpaqueMessage = Arc<dyn Any + Send + Sync>;

/// Whether a stream can still deliver the answer to a call.
///
/// If the call's streams end early, only the transport of the session observes the answer.
#[derive(Default)]
pub(super) enum LateAnswer {
    /// A stream will deliver the answer, as far as is known.
    #[default]
    Possible,
    /// A copy of the answer that the transport has sent, until a stream delivers it.
    Received(OpaqueMessage),
    /// Streams will no longer deliver the answer.
    Closed,
}

/// One stream of a call. Its owner reports when that stream has ended.
#[derive(Debug, Clone)]
pub(crate) struct Attachment {
    pub(crate) exchange: Arc<Exchange>,
    pub(crate) id: CallId,
    pub(crate) generation: Generation,
}

/// The dispatch of a call to a session manager, which then observes the call's streams.
#[derive(Default)]
pub(super) enum Dispatch {
    /// No session manager has bound it.
    #[default]
    NotBound,
    /// It is bound, and its request is being dispatched. A cancel must not overtake the request, so it is deferred here.
    InProgress(Attempts),
    /// Every attempt was accepted, refused or abandoned. `is_cancelled` if a deferred cancel was sent after that.
    Done { is_cancelled: bool },
}

/// What is deferred until the session manager has accepted or refused the request of a call.
#[derive(Default)]
pub(super) struct Attempts {
    /// Number of attempts in progress. There are several if a middleware sends the request again.
    pub(super) in_progress: u32,
    /// Whether the session manager has accepted an attempt or may have accepted one.
    pub(super) was_accepted: bool,
    /// The call's key while an older in-flight call has the same key. The older call keeps the key if the request is refused.
    pub(super) contested: Option<Box<Key>>,
    pub(super) deferred_cancel: Option<(CancelReason, Option<CancelGuard>)>,
}

/// Whether a call waits for the pending cancel of an older call with its request id.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum PendingCancel {
    /// It does not wait, so such a cancel would hit it.
    None = 0,
    /// Not known yet. The call can be found already.
    Unknown = 1,
    Awaited = 2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Phase {
    #[default]
    Open,
    /// The response is an event stream, or the accepted request is not known to carry a call.
    Streaming,
    /// The response body is the answer to the call, which no session manager tracks.
    Answering,
    /// The whole response was sent, or the inner service returned an error.
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
            maybe_answered: AtomicBool::new(false),
            pending_cancel: AtomicU8::new(0),
            response_waker: AtomicWaker::new(),
            changed: OnceLock::new(),
            state: Mutex::default(),
        }
    }

    /// Returns the extensions of its calls.
    pub(super) fn extensions(&self) -> Option<Arc<Extensions>> {
        match &self.kind {
            RequestKind::Post(extensions) => extensions.clone(),
            _ => None,
        }
    }

    /// Returns `true` if it may carry a call, judging by its head.
    pub(crate) fn may_carry_call(&self) -> bool {
        matches!(self.kind, RequestKind::Post(_))
    }

    /// Returns `true` if a cancel of the call may have to be replayed into the inner service.
    ///
    /// That is so if it may carry a session call, and no session manager has its session.
    pub(crate) fn may_need_replay(&self) -> bool {
        self.may_carry_call()
            && self.revision == Revision::WithSessions
            && self.session.id().is_some_and(|id| {
                let registry = &self.shared.registry;
                registry.manager_scope(id).is_none()
            })
    }

    /// Keeps its session in use until the returned guard is dropped. Returns `None` if no session manager has the session.
    #[cold]
    pub(crate) fn use_session(&self) -> Option<Box<dyn Send + Sync>> {
        self.shared.registry.use_session(self.session.id()?)
    }

    /// Sets the canceller for a call that no session manager binds.
    pub(crate) fn set_replay(&self, replay: Arc<dyn Canceller>) {
        self.state().canceller = Some(replay);
    }

    /// Returns the protocol revision in the request's header.
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

    /// Returns `true` if it is known to carry a call.
    pub(crate) fn has_call(&self) -> bool {
        self.call.get().is_some()
    }

    /// Runs one operation on the state of the call's session. Returns `None` if there is no call.
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

    /// Returns `true` if a call is in flight, and the inner service has accepted it.
    pub(crate) fn is_accepted(&self, id: CallId) -> bool {
        let is_accepted =
            |session: &mut SessionState| session.is_in_flight(id) && !session.is_unaccepted(id);
        self.with_session(is_accepted).unwrap_or(false)
    }

    pub(crate) fn is_detached(&self, id: CallId) -> bool {
        let is_detached = self.with_session(|session| session.is_detached(id));
        is_detached.unwrap_or(false)
    }

    /// Records that a task reads a stream of the call to observe the end of the call.
    pub(crate) fn add_background_reader(&self, id: CallId) {
        self.with_session(|session| session.add_background_reader(id));
    }

    /// Returns the call if its id is `id`, and `None` otherwise.
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
