//! What the layer knows about a call.

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, OnceLock},
    time::Duration,
};

use http::Extensions;
use tokio::time::Instant;

use super::key::{CallId, Key, RequestId, Scope, SessionKey};
use crate::policy::EffectivePolicy;

/// The 2026-07-28 method whose response stream is the subscription itself.
pub(crate) const LISTEN: &str = "subscriptions/listen";

/// A call's description, as seen by observers, policies and snapshots.
///
/// `Debug` omits the session id, because any client that knows it can act on behalf of the session.
///
/// ```
/// use axum::{Router, body::{Body, Bytes}, routing::post};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Policy, RequestId};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let started = std::time::Instant::now();
/// let (seen, calls) = std::sync::mpsc::channel();
/// let layer = CancelOnDisconnectLayer::new().call_extension(|_, _| Some("tenant a")).policy(move |call| {
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
/// assert_eq!(call.extension(), Some(&"tenant a"));
/// assert!(call.age() <= started.elapsed());
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
    /// Boxed, because most calls use the defaults.
    custom: Option<Box<Custom>>,
    /// Boxed, because most calls have no typed metadata.
    typed: OnceLock<Box<TypedMeta>>,
}

/// Properties added to a call by the layer's options.
#[derive(Clone, Default)]
struct Custom {
    policy: EffectivePolicy,
    extensions: Option<Arc<Extensions>>,
}

/// Properties that few calls have and that only a session manager knows.
#[derive(Clone, Default)]
struct TypedMeta {
    progress_token: Option<RequestId>,
    /// Keyed hash of the method and the parameters. `None` unless the call's policy sets `supersede`.
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
            custom: None,
            typed: OnceLock::new(),
        }
    }

    pub(crate) fn set_tool(&mut self, tool: Option<impl Into<Box<str>>>) {
        self.tool = tool.map(Into::into);
    }

    pub(crate) fn set_extensions(&mut self, extensions: Option<Arc<Extensions>>) {
        if extensions.is_some() {
            self.custom.get_or_insert_default().extensions = extensions;
        }
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

    /// Merges in the properties that can only be read from the call's typed message. Only the first merge has an effect.
    pub(crate) fn merge_typed(&self, mut typed: Self) {
        let typed = typed.typed.take();
        // Set the field even if there is nothing to merge, because `is_task` uses it to recognise that a session manager has bound the
        // call.
        if self.is_task || typed.is_some() {
            let _ = self.typed.set(typed.unwrap_or_default());
        }
    }

    /// Returns `true` if this call repeats `other` and supersedes it.
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
            self.custom.get_or_insert_default().policy = policy;
        }
    }

    pub(crate) fn policy(&self) -> EffectivePolicy {
        let custom = self.custom.as_deref();
        custom.map(|custom| custom.policy).unwrap_or_default()
    }

    /// Returns when the call times out, or `None` if it has no timeout.
    pub(crate) fn deadline(&self) -> Option<Instant> {
        let timeout = self
            .policy()
            .call_timeout
            .filter(|_| !self.is_unbounded())?;
        self.started_at.checked_add(timeout)
    }

    /// Returns `true` if only the client determines how long the call lasts.
    fn is_unbounded(&self) -> bool {
        self.is_task() || self.method == LISTEN
    }

    /// Sets whether this is a 2025-11-25 task-augmented request. Only `tasks/cancel` may end its work.
    pub(crate) fn set_task(&mut self, task: bool) {
        self.is_task = task;
    }

    /// Sets whether closing the call's stream cancels the call (from revision 2026-07-28 on).
    pub(crate) fn set_cancelled_on_disconnect(&mut self, is_cancelled: bool) {
        self.is_cancelled_on_disconnect = is_cancelled;
    }

    /// Returns the call's identity within this process.
    pub fn id(&self) -> CallId {
        self.id
    }

    /// Returns how long the layer has known about the call. In [`Event::Ended`](crate::Event::Ended), this is the call's duration.
    pub fn age(&self) -> Duration {
        self.started_at.elapsed()
    }

    /// Returns the JSON-RPC id chosen by the client. It is only unique within its session.
    pub fn request_id(&self) -> &RequestId {
        &self.request_id
    }

    /// Returns the JSON-RPC method, such as `tools/call`. A client can send any text of any length.
    pub fn method(&self) -> &str {
        &self.method
    }

    /// Returns the called tool's name if the method is `tools/call`. A client can send any text of any length.
    pub fn tool(&self) -> Option<&str> {
        self.tool.as_deref()
    }

    /// Returns the `Mcp-Session-Id` of a session call, or `None` for a stateless call.
    pub fn session(&self) -> Option<&str> {
        self.session.as_deref()
    }

    /// Returns the call's protocol revision.
    ///
    /// From 2026-07-28 on, requests carry the revision in their body. For older revisions it is taken from the `MCP-Protocol-Version`
    /// header, which clients send from 2025-06-18 on. Returns `None` if the client is older than that, or if the header's value is not a
    /// date.
    pub fn protocol_version(&self) -> Option<&str> {
        self.protocol_version.as_deref()
    }

    /// Returns the value of type `T` added to the call by a [`call_extension`], if any.
    ///
    /// [`call_extension`]: crate::CancelOnDisconnectLayer::call_extension
    pub fn extension<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.custom.as_deref()?.extensions.as_deref()?.get()
    }

    pub(crate) fn session_id(&self) -> Option<&Arc<str>> {
        self.session.as_ref()
    }

    /// Returns the call's key, or `None` for a stateless call. `scope` is the issuer of its session id.
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

    /// Returns `true` if the call runs as a task. Calls bound by a session manager never run as tasks, because rmcp has no `params.task`.
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
