//! The description of a call, which observers, policies and snapshots get.

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use tokio::time::Instant;

use super::key::{CallId, Key, RequestId, Scope, SessionKey};
use crate::policy::EffectivePolicy;

/// The method of 2026-07-28 whose response stream is the subscription.
pub(crate) const LISTEN: &str = "subscriptions/listen";

/// What is known of a call. Observers get it with every event, and a policy decides by it.
///
/// `Debug` leaves out the session id, because a client that knows it can act for the session.
///
/// ```
/// use axum::{Router, body::{Body, Bytes}, routing::post};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Policy, RequestId};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let begun = std::time::Instant::now();
/// let (seen, calls) = std::sync::mpsc::channel();
/// let layer = CancelOnDisconnectLayer::new().policy(move |call| {
///     seen.send(call.clone()).unwrap();
///     Policy::new()
/// });
/// let app: Router = Router::new().route("/mcp", post(async |_: Bytes| "ok")).layer(layer);
/// let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
/// let request = Request::post("/mcp").header("content-type", "application/json");
/// app.oneshot(request.body(Body::from(call)).unwrap()).await.unwrap();
///
/// let call = calls.recv().unwrap();
/// assert_eq!((call.method(), call.tool()), ("tools/call", Some("upload")));
/// assert_eq!(call.request_id(), &RequestId::Number(7));
/// assert_eq!((call.session(), call.protocol_version()), (None, None));
/// assert!(call.age() <= begun.elapsed());
/// # }
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
    is_task: bool,
    is_cancelled_on_disconnect: bool,
    /// In a box, because most calls have the default.
    policy: Option<Box<EffectivePolicy>>,
    /// In a box, because most calls have nothing of it.
    typed: OnceLock<Box<TypedMeta>>,
}

/// What only few calls have, and only a session manager knows.
#[derive(Clone, Default)]
struct TypedMeta {
    progress_token: Option<RequestId>,
    /// Keyed hash of the arguments, if the call may be superseded.
    fingerprint: Option<u64>,
}

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
            is_task: false,
            is_cancelled_on_disconnect: false,
            policy: None,
            typed: OnceLock::new(),
        }
    }

    pub(crate) fn set_tool(&mut self, tool: Option<impl Into<Box<str>>>) {
        self.tool = tool.map(Into::into);
    }

    pub(crate) fn set_session(&mut self, session: Option<Arc<str>>) {
        self.session = session;
    }

    pub(crate) fn set_progress_token(&mut self, token: Option<RequestId>) {
        if token.is_some() {
            self.set_typed(|typed| typed.progress_token = token);
        }
    }

    pub(crate) fn set_fingerprint(&mut self, fingerprint: u64) {
        self.set_typed(|typed| typed.fingerprint = Some(fingerprint));
    }

    fn set_typed(&mut self, set: impl FnOnce(&mut TypedMeta)) {
        let mut typed = self.typed.take().unwrap_or_default();
        set(&mut typed);
        self.typed = OnceLock::from(typed);
    }

    /// Merges the parts that only the typed message of the call has.
    pub(crate) fn merge_typed(&self, mut typed: Self) {
        let typed = typed.typed.take();
        if self.is_task || typed.is_some() {
            // A call is bound once.
            let _first = self.typed.set(typed.unwrap_or_default());
        }
    }

    /// Whether it takes the place of `other`: the same call, sent again.
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

    fn fingerprint(&self) -> Option<u64> {
        self.typed.get()?.fingerprint
    }

    pub(crate) fn set_policy(&mut self, policy: EffectivePolicy) {
        if policy != self.policy() {
            self.policy = Some(Box::new(policy));
        }
    }

    pub(crate) fn policy(&self) -> EffectivePolicy {
        self.policy.as_deref().copied().unwrap_or_default()
    }

    /// When it is cancelled at the latest.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let may_last = self
            .policy()
            .call_timeout
            .filter(|_| !self.is_unbounded())?;
        self.started_at.checked_add(may_last)
    }

    /// Returns `true` if only its client determines how long it lasts.
    fn is_unbounded(&self) -> bool {
        self.is_task() || self.method == LISTEN
    }

    /// A 2025-11-25 task-augmented request: only `tasks/cancel` may end its work.
    pub(crate) fn set_task(&mut self, task: bool) {
        self.is_task = task;
    }

    /// A request of revision 2026-07-28 or later: closing its stream is its cancel.
    pub(crate) fn set_cancelled_on_disconnect(&mut self, is_cancelled: bool) {
        self.is_cancelled_on_disconnect = is_cancelled;
    }

    /// The call's identity in this process.
    pub fn id(&self) -> CallId {
        self.id
    }

    /// The time since the layer came to know the call. When the call ends, that is how long it took.
    pub fn age(&self) -> Duration {
        self.started_at.elapsed()
    }

    /// The JSON-RPC id the client gave it, unique in its session only.
    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// The JSON-RPC method, such as `tools/call`. It is sent by the client, which may choose any text of any length.
    pub fn method(&self) -> &str {
        &self.method
    }

    /// The name of the called tool, for `tools/call`. It is sent by the client too.
    pub fn tool(&self) -> Option<&str> {
        self.tool.as_deref()
    }

    /// The `Mcp-Session-Id` of a session call. A stateless call has none.
    pub fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// The protocol revision of the call: what the request's body names, as requests of 2026-07-28 do, or else its
    /// `MCP-Protocol-Version` header, which clients send since 2025-06-18. Returns `None` for older clients, and if the header is not
    /// a date.
    pub fn protocol_version(&self) -> Option<&str> {
        self.protocol_version.as_deref()
    }

    pub(crate) fn session_id(&self) -> Option<&Arc<str>> {
        self.session.as_ref()
    }

    /// What it is found by, if it is a session call. `scope`: who gave out its session's id.
    pub(crate) fn key(&self, scope: Scope) -> Option<Key> {
        let session = SessionKey {
            scope,
            id: self.session.clone()?,
        };
        Some(Key {
            session,
            request: self.request_id.clone(),
        })
    }

    pub(crate) fn progress_token(&self) -> Option<&RequestId> {
        self.typed.get()?.progress_token.as_ref()
    }

    /// Whether it runs as a task. A call that a session manager bound does not: rmcp's handlers know of no task.
    pub(crate) fn is_task(&self) -> bool {
        self.is_task && self.typed.get().is_none()
    }

    pub(crate) fn is_cancelled_on_disconnect(&self) -> bool {
        self.is_cancelled_on_disconnect
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
