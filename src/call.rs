//! One in-flight JSON-RPC request: what it is, why it may be cancelled and how it ends.

#[cfg(feature = "rmcp")]
use std::sync::OnceLock;
use std::{
    borrow::Cow,
    fmt,
    str::FromStr,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::policy::Rules;

/// The JSON-RPC error code of a cancelled request.
pub(crate) const REQUEST_CANCELLED: i32 = -32800;

/// The method of 2026-07-28 whose response stream is the subscription.
pub(crate) const LISTEN: &str = "subscriptions/listen";

/// The `id` of a JSON-RPC request, read the way rmcp reads it.
///
/// A number and a string never alias: `1` is not `"1"` (JSON-RPC 2.0, section 4). A number in float
/// form that is an integer is that integer: `1.0` is `1`.
///
/// ```
/// use mcp_cancel_on_disconnect::RequestId;
///
/// assert_ne!(RequestId::Number(1), RequestId::String("1".into()));
/// assert_eq!(RequestId::Number(7).to_string(), "7");
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
#[allow(
    clippy::exhaustive_enums,
    reason = "JSON-RPC 2.0 knows these two kinds of id and no other"
)]
pub enum RequestId {
    /// An integer.
    Number(i64),
    /// A string, compared byte by byte.
    String(Arc<str>),
}

/// The identity of a call, unique in this process.
///
/// JSON-RPC ids are not: every stateless client counts its own from 1. Everything that acts on a
/// call goes by its `CallId`. It is a number, and comes back from its text:
///
/// ```
/// use mcp_cancel_on_disconnect::{CallId, CancelOnDisconnectLayer, CancelReason};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let id: CallId = "7".parse()?; // from a log line, or from a form
/// assert_eq!(id.to_string(), "7");
/// assert_eq!(u64::from(id), 7);
///
/// let calls = CancelOnDisconnectLayer::new().calls();
/// assert!(!calls.cancel(id, CancelReason::Requested), "no such call");
/// assert!("seven".parse::<CallId>().is_err());
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct CallId(u64);

/// A text is no [`CallId`].
///
/// ```
/// use mcp_cancel_on_disconnect::{CallId, ParseCallIdError};
///
/// let error: ParseCallIdError = "-1".parse::<CallId>().unwrap_err();
/// assert_eq!(error.to_string(), "not the id of a call");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParseCallIdError(());

/// What is known of a call. Observers get it with every event.
///
/// `Debug` leaves out the session id: whoever knows it can speak for the session.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event};
///
/// let layer = CancelOnDisconnectLayer::new().observe(|event: &Event<'_>| {
///     if let Event::Ended { call, outcome, .. } = event {
///         println!("{} {} {:?}: {outcome:?}", call.request_id(), call.method(), call.tool());
///     }
/// });
/// assert!(layer.calls().is_empty());
/// ```
#[derive(Clone)]
pub struct CallInfo {
    id: CallId,
    started_at: Instant,
    request_id: RequestId,
    method: Cow<'static, str>,
    tool: Option<Box<str>>,
    session: Option<Arc<str>>,
    protocol_version: Option<Cow<'static, str>>,
    must_run_on: bool,
    ends_with_its_stream: bool,
    /// In a box, because most calls have nothing of it.
    special: Option<Box<Special>>,
    /// The same of a message that came typed.
    #[cfg(feature = "rmcp")]
    typed: OnceLock<Box<Typed>>,
}

/// What few calls have.
#[derive(Clone, Default)]
struct Special {
    policy: Rules,
}

/// What few calls have, and only a session manager tells.
#[cfg(feature = "rmcp")]
#[derive(Clone, Default)]
struct Typed {
    progress_token: Option<RequestId>,
    /// Keyed hash of the arguments, if the call may be superseded.
    fingerprint: Option<u64>,
}

/// Why a call was cancelled. Its `Display` is the `reason` of the injected
/// `notifications/cancelled`.
///
/// ```
/// use mcp_cancel_on_disconnect::CancelReason;
///
/// assert_eq!(CancelReason::ClientDisconnected.to_string(), "client disconnected");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum CancelReason {
    /// The client closed its connection, or its stream of it, and no grace was due.
    ClientDisconnected,
    /// The client went away and did not come back within its grace.
    Orphaned,
    /// The client sent the same call again while this one had no client.
    Superseded,
    /// It lasted longer than its policy allows.
    TimedOut,
    /// Somebody asked for it: [`Calls::cancel`](crate::Calls::cancel).
    Requested,
    /// The server is shutting down: [`Calls::drain`](crate::Calls::drain).
    ShuttingDown,
    /// Its session was closed.
    SessionClosed,
    /// The client cancelled it, by a `notifications/cancelled` of its own.
    ClientCancelled,
    /// A service between the layer and the handler let go of the call's stream, such as an inner
    /// timeout that answered in its place.
    ResponseDropped,
    /// The inner service panicked while the call was in flight.
    ServicePanicked,
}

/// How a call ended, as far as the layer could see.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelReason, Outcome};
///
/// assert_ne!(Outcome::Completed, Outcome::Cancelled(CancelReason::Orphaned));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Outcome {
    /// Its answer was seen: a JSON-RPC result or error.
    Completed,
    /// It was cancelled. Behind a layer without a session manager it may have completed before, unseen, while
    /// its client was away.
    Cancelled(CancelReason),
    /// It was given up for this reason, and nobody could be told: it has no session into which a cancel could be
    /// injected, nobody took its [`CallToken`](crate::CallToken), and its revision does not make the end of its stream
    /// a cancel. Its server may have seen that its stream was dropped, as rmcp 3 does; else it runs on.
    Abandoned(CancelReason),
    /// Its client cancelled it.
    ClientCancelled,
    /// The inner service failed, or answered with an error status.
    Failed,
    /// Nothing more can be seen of it: it runs on behind a layer that has no session manager, its answer
    /// could not be told from other messages, or its client used its id again (the specification forbids
    /// that). It was not cancelled.
    Unknown,
}

// === impl RequestId ===

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::String(string) => string.fmt(f),
        }
    }
}

impl From<&RequestId> for serde_json::Value {
    fn from(id: &RequestId) -> Self {
        match id {
            RequestId::Number(number) => (*number).into(),
            RequestId::String(string) => string.as_ref().into(),
        }
    }
}

// === impl CallId ===

impl CallId {
    pub(crate) fn next() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl FromStr for CallId {
    type Err = ParseCallIdError;

    /// Reads the number that [`Display`](fmt::Display) writes.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        text.parse().map(Self).map_err(|_| ParseCallIdError(()))
    }
}

impl From<CallId> for u64 {
    fn from(id: CallId) -> Self {
        id.0
    }
}

// === impl ParseCallIdError ===

impl fmt::Display for ParseCallIdError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not the id of a call")
    }
}

impl std::error::Error for ParseCallIdError {}

// === impl CallInfo ===

impl CallInfo {
    pub(crate) fn new(request_id: RequestId, method: &str) -> Self {
        let method = match method {
            "tools/call" => Cow::Borrowed("tools/call"),
            other => Cow::Owned(other.to_owned()),
        };
        Self {
            id: CallId::next(),
            started_at: Instant::now(),
            request_id,
            method,
            tool: None,
            session: None,
            protocol_version: None,
            must_run_on: false,
            ends_with_its_stream: false,
            special: None,
            #[cfg(feature = "rmcp")]
            typed: OnceLock::new(),
        }
    }

    pub(crate) fn set_tool(&mut self, tool: Option<impl Into<Box<str>>>) {
        self.tool = tool.map(Into::into);
    }

    pub(crate) fn set_session(&mut self, session: Option<Arc<str>>) {
        self.session = session;
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn set_progress_token(&mut self, token: Option<RequestId>) {
        if let Some(token) = token {
            let mut typed = self.typed.take().unwrap_or_default();
            typed.progress_token = Some(token);
            self.typed = OnceLock::from(typed);
        }
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn set_fingerprint(&mut self, fingerprint: u64) {
        let mut typed = self.typed.take().unwrap_or_default();
        typed.fingerprint = Some(fingerprint);
        self.typed = OnceLock::from(typed);
    }

    /// Takes over what only the typed message of the same call says.
    #[cfg(feature = "rmcp")]
    pub(crate) fn learn(&self, mut typed: Self) {
        if let Some(typed) = typed.typed.take() {
            // A call is bound once.
            let _first = self.typed.set(typed);
        }
    }

    /// Whether it takes the place of `other`: the same call, sent again.
    #[cfg(feature = "rmcp")]
    pub(crate) fn supersedes(&self, other: &Self) -> bool {
        !other.policy().is_exempt
            && self.fingerprint().is_some()
            && self.fingerprint() == other.fingerprint()
            && self.session == other.session
            && self.method == other.method
            && self.tool == other.tool
    }

    pub(crate) fn set_protocol_version(&mut self, version: Option<&str>) {
        self.protocol_version = version.map(|version| match version {
            "2025-06-18" => Cow::Borrowed("2025-06-18"),
            "2025-11-25" => Cow::Borrowed("2025-11-25"),
            "2026-07-28" => Cow::Borrowed("2026-07-28"),
            other => Cow::Owned(other.to_owned()),
        });
    }

    pub(crate) fn started_at(&self) -> Instant {
        self.started_at
    }

    #[cfg(feature = "rmcp")]
    fn fingerprint(&self) -> Option<u64> {
        self.typed.get()?.fingerprint
    }

    fn special_mut(&mut self) -> &mut Special {
        self.special.get_or_insert_default()
    }

    pub(crate) fn set_policy(&mut self, policy: Rules) {
        if policy != self.policy() {
            self.special_mut().policy = policy;
        }
    }

    pub(crate) fn policy(&self) -> Rules {
        let special = self.special.as_ref();
        special.map_or_else(Rules::default, |special| special.policy)
    }

    /// When it is cancelled at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let may_last = self.policy().call_timeout.filter(|_| !self.has_own_end())?;
        self.started_at.checked_add(may_last)
    }

    /// Whether only its client says how long it lasts.
    fn has_own_end(&self) -> bool {
        self.must_run_on || self.method == LISTEN
    }

    /// A 2025-11-25 task-augmented request: only `tasks/cancel` may end its work.
    pub(crate) fn set_must_run_on(&mut self, task: bool) {
        self.must_run_on = task;
    }

    /// A request of revision 2026-07-28 or later: closing its stream is its cancel.
    pub(crate) fn set_ends_with_its_stream(&mut self, ends: bool) {
        self.ends_with_its_stream = ends;
    }

    /// The call's identity in this process.
    pub fn id(&self) -> CallId {
        self.id
    }

    /// How long ago the layer came to know of it. When it ends, that is how long it took.
    pub fn age(&self) -> Duration {
        self.started_at.elapsed()
    }

    /// The JSON-RPC id the client gave it, unique in its session only.
    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// The JSON-RPC method, such as `tools/call`. It comes from the client: any length, any text.
    pub fn method(&self) -> &str {
        &self.method
    }

    /// The name of the called tool, for `tools/call`. It comes from the client as well.
    pub fn tool(&self) -> Option<&str> {
        self.tool.as_deref()
    }

    /// The `Mcp-Session-Id` of a session call. A stateless call has none.
    pub fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// The protocol revision that the request's body named, as those of 2026-07-28 do. Not known of calls that a
    /// session manager bound.
    pub fn protocol_version(&self) -> Option<&str> {
        self.protocol_version.as_deref()
    }

    pub(crate) fn session_id(&self) -> Option<&Arc<str>> {
        self.session.as_ref()
    }

    #[cfg(feature = "rmcp")]
    pub(crate) fn progress_token(&self) -> Option<&RequestId> {
        self.typed.get()?.progress_token.as_ref()
    }

    pub(crate) fn must_run_on(&self) -> bool {
        self.must_run_on
    }

    pub(crate) fn ends_with_its_stream(&self) -> bool {
        self.ends_with_its_stream
    }
}

impl fmt::Debug for CallInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallInfo")
            .field("id", &self.id)
            .field("request_id", &self.request_id)
            .field("method", &self.method)
            .field("tool", &self.tool)
            .field("has_session", &self.session.is_some())
            .finish_non_exhaustive()
    }
}

// === impl CancelReason ===

impl CancelReason {
    /// The JSON-RPC error that a client gets for a call that was cancelled so: code and message.
    pub(crate) fn error(self) -> (i32, &'static str) {
        match self {
            Self::TimedOut => (-32001, "Request timed out"),
            _ => (REQUEST_CANCELLED, "Request cancelled"),
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::ClientDisconnected => "client disconnected",
            Self::Orphaned => "client disconnected and did not come back within its grace",
            Self::Superseded => "superseded by the same call",
            Self::TimedOut => "timed out",
            Self::Requested => "cancelled on request",
            Self::ShuttingDown => "server shutting down",
            Self::SessionClosed => "session closed",
            Self::ClientCancelled => "cancelled by the client",
            Self::ResponseDropped => "response dropped by the server",
            Self::ServicePanicked => "service panicked",
        }
    }
}

impl fmt::Display for CancelReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}
