//! The layer, which is also its own builder.

use std::{sync::Arc, time::Duration};

use http::{Extensions, HeaderMap};
use tower_layer::Layer;

use crate::{
    call::CallInfo,
    calls::Calls,
    confirm::{Confirmation, Confirming, Orphan},
    exchange::Registry,
    limits::Limits,
    observe::{Event, Observer, SessionIds},
    options::{Options, RetainAnswers},
    policy::{Grace, Policy},
    service::CancelOnDisconnect,
};

/// Minimum [`stall_timeout`](CancelOnDisconnectLayer::stall_timeout). The timer checks each stream once per timeout, so there has to be a
/// minimum.
const MIN_STALL: Duration = Duration::from_millis(100);

/// Cancels the calls of clients that disconnect. See the [crate docs](crate).
///
/// ```
/// use std::time::Duration;
/// use mcp_cancel_on_disconnect::{
///     CancelOnDisconnectLayer, Event, Grace, Observer, Policy, RetainAnswers, observe::SessionIds,
/// };
///
/// struct Printer;
/// impl Observer for Printer {
///     fn on_event(&self, event: &Event<'_>) {
///         println!("{event:?}");
///     }
/// }
///
/// let layer = CancelOnDisconnectLayer::new()
///     .grace(Grace::After(Duration::from_secs(60)))
///     .policy(|call| match call.tool() {
///         Some("approve") => Policy::new().grace(Grace::Never),
///         _ => Policy::new(),
///     })
///     .exempt(|call| call.tool() == Some("deploy"))
///     .exempt(|call| call.method() == "prompts/get")
///     .stall_timeout(Duration::from_secs(30))
///     .retain(RetainAnswers::Off)
///     .log_session_ids(SessionIds::Omitted)
///     .observe(Printer)
///     .observe_fn(|event| {
///         if let Event::Ended { call, outcome, .. } = event {
///             println!("{}: {outcome:?}", call.method());
///         }
///     });
/// let options = format!("{layer:?}");
/// for option in ["grace: After(60s)", "policy: true", "exempt: 2", "retain: Off", "2 observers"] {
///     assert!(options.contains(option), "{options}");
/// }
/// ```
///
/// Clones share one registry of calls, so you can set different options for each of a server's routes, and [`calls`](Self::calls) still
/// returns the calls on all of them:
///
/// ```
/// use axum::{Router, routing::post};
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
///
/// let layer = CancelOnDisconnectLayer::new();
/// let app: Router = Router::new()
///     .route("/mcp", post(async || "tools that may be resumed").layer(layer.clone()))
///     .route(
///         "/batch",
///         post(async || "jobs that run on").layer(layer.clone().grace(Grace::Never)),
///     );
/// assert_eq!(layer.calls().len(), 0);
/// # drop(app);
/// ```
#[derive(Debug, Clone)]
pub struct CancelOnDisconnectLayer {
    options: Options,
    registry: Arc<Registry>,
}

// === impl CancelOnDisconnectLayer ===

impl CancelOnDisconnectLayer {
    /// Creates a layer with [`Grace::Auto`] and its own registry.
    pub fn new() -> Self {
        Self {
            options: Options::default(),
            registry: Arc::new(Registry::new()),
        }
    }

    /// Sets how long a call keeps running after a disconnect. A [`policy`](Self::policy) can override this.
    pub fn grace(mut self, grace: Grace) -> Self {
        self.options.rules.grace = grace;
        self
    }

    /// Sets the closure that returns a call's policy, replacing any previous closure.
    ///
    /// The closure runs once per call, when the call becomes known.
    ///
    /// For anything that the policy leaves unset, [`grace`](Self::grace) and [`call_timeout`](Self::call_timeout) apply, regardless of the
    /// order in which you set the options. They also apply if the closure panics.
    pub fn policy(mut self, policy: impl Fn(&CallInfo) -> Policy + Send + Sync + 'static) -> Self {
        self.options.policy = Some(Arc::new(policy));
        self
    }

    /// Lets calls keep running after a disconnect if `exempt` returns `true` for them.
    ///
    /// An exempt call is not ended by a grace period or by [`supersede`](Policy::supersede). It can still be ended by a
    /// [`call_timeout`](Self::call_timeout), by [`Calls::cancel`] or [`Calls::drain`], or by its client's own `notifications/cancelled`,
    /// and it still ends with its session. A subscription still ends with its stream.
    ///
    /// This has no effect on a server that stops a call on its own when the connection closes. rmcp 3 does that for calls without a
    /// session, by firing `RequestContext::ct` (see [`Grace`]).
    ///
    /// If you add several closures, a call is exempt if any of them returns `true`. A closure that panics does not exempt the call.
    pub fn exempt(mut self, exempt: impl Fn(&CallInfo) -> bool + Send + Sync + 'static) -> Self {
        self.options.exempt.push(Arc::new(exempt));
        self
    }

    /// Adds an extension to each call, derived from its request's headers and extensions.
    ///
    /// [`policy`](Self::policy), [`exempt`](Self::exempt) and observers read it with [`CallInfo::extension`]. For example, it can be the
    /// user, tenant or route that an outer middleware has added to the request's extensions. The extension is dropped along with the last
    /// [`CallToken`](crate::CallToken) and the last clone of the [`CallInfo`]. If the closure returns `None` or panics, the call does not
    /// get this extension. If several closures return the same type, the last one to return a value wins.
    ///
    /// The closure runs for each POST that may carry JSON, before the body is read, so it also runs for bodies that turn out not to be
    /// calls.
    ///
    /// ```
    /// use std::{sync::mpsc, time::Duration};
    /// use axum::{Router, body::{Body, Bytes}, routing::post};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace, Policy};
    /// use tower::ServiceExt;
    ///
    /// #[derive(Clone, PartialEq, Debug)]
    /// struct Tenant(String);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let (sender, tenants) = mpsc::channel();
    /// let layer = CancelOnDisconnectLayer::new()
    ///     .call_extension(|headers, _extensions| {
    ///         let tenant = headers.get("x-tenant")?.to_str().ok()?;
    ///         Some(Tenant(tenant.to_owned()))
    ///     })
    ///     .policy(move |call| {
    ///         sender.send(call.extension::<Tenant>().cloned()).unwrap();
    ///         match call.extension() {
    ///             Some(Tenant(name)) if name == "batch" => Policy::new().grace(Grace::After(Duration::from_secs(600))),
    ///             _ => Policy::new(),
    ///         }
    ///     });
    /// let app: Router = Router::new().route("/mcp", post(async |_: Bytes| "ok")).layer(layer);
    /// let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
    /// let request = Request::post("/mcp").header("content-type", "application/json").header("x-tenant", "batch");
    /// app.oneshot(request.body(Body::from(call)).unwrap()).await.unwrap();
    /// assert_eq!(tenants.recv().unwrap(), Some(Tenant("batch".into())));
    /// # }
    /// ```
    pub fn call_extension<T: Clone + Send + Sync + 'static>(
        mut self,
        extension: impl Fn(&HeaderMap, &Extensions) -> Option<T> + Send + Sync + 'static,
    ) -> Self {
        self.options
            .extensions
            .push(Arc::new(move |headers, extensions, call_extensions| {
                if let Some(extension) = extension(headers, extensions) {
                    call_extensions.insert(extension);
                }
            }));
        self
    }

    /// Sets the closure that decides whether an orphan is cancelled.
    ///
    /// This replaces any previous closure.
    ///
    /// An orphan is a call whose client has not resumed within its grace period.
    ///
    /// Use this if the decision depends on something outside this process, such as whether the client has resumed on another server. The
    /// call waits for the decision, and if its client resumes in the meantime, the call is not cancelled. If the closure panics, or has not
    /// decided within 10 s, the call waits for another grace period.
    ///
    /// The closure is not called for calls without a grace period. It does not delay a cancellation caused by a
    /// [`call_timeout`](Self::call_timeout), by [`Calls`], or by the end of a session.
    ///
    /// The future is polled on a runtime that serves requests. It does not keep the call or its session open.
    ///
    /// ```
    /// use std::{sync::{Arc, atomic::{AtomicBool, Ordering}}, time::Duration};
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Confirmation};
    ///
    /// let front_is_up = Arc::new(AtomicBool::new(true)); // set by a health check
    /// let layer = CancelOnDisconnectLayer::new().confirm(move |orphan| {
    ///     let (front_is_up, grace) = (front_is_up.clone(), orphan.grace());
    ///     async move {
    ///         if front_is_up.load(Ordering::Relaxed) {
    ///             Confirmation::Cancel
    ///         } else {
    ///             Confirmation::Postpone(grace) // no client could have resumed
    ///         }
    ///     }
    /// });
    /// assert!(format!("{layer:?}").contains("confirm: true"));
    /// ```
    pub fn confirm<F>(mut self, confirm: impl Fn(&Orphan<'_>) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Confirmation> + Send + 'static,
    {
        self.options.confirm = Some(Arc::new(move |orphan: &Orphan<'_>| {
            let confirming: Confirming = Box::pin(confirm(orphan));
            confirming
        }));
        self
    }

    /// Sets how long a call may last, unless its [`policy`](Self::policy) sets a different limit.
    ///
    /// See [`Policy::call_timeout`]. There is no limit by default.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// use std::time::Duration;
    /// use axum::{Router, body::{Body, Bytes, to_bytes}, routing::post};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    /// use tower::ServiceExt;
    ///
    /// let app: Router = Router::new()
    ///     .route("/mcp", post(async |_: Bytes| std::future::pending::<()>().await))
    ///     .layer(CancelOnDisconnectLayer::new().call_timeout(Duration::from_secs(60)));
    /// let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
    /// let request = Request::post("/mcp").header("content-type", "application/json");
    /// let response = app.oneshot(request.body(Body::from(call)).unwrap()).await.unwrap();
    /// let answer = to_bytes(response.into_body(), 1000).await.unwrap();
    /// assert!(String::from_utf8_lossy(&answer).contains("-32001"));
    /// # }
    /// ```
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.options.rules.call_timeout = Some(timeout);
        self
    }

    /// Sends a comment on each `text/event-stream` response that has been quiet for `interval`.
    ///
    /// The interval is at least 1 ms. Off by default; rmcp itself sends comments like these every 15 s.
    ///
    /// A vanished client is detected only when a write to its connection fails. The comment, called a *probe*, provides that write. Clients
    /// ignore it because it is not an event, but proxies treat it as traffic. Probes are only sent between events, never inside one, and
    /// not at all if the body is encoded or its length is known.
    ///
    /// The layer also sets `X-Accel-Buffering: no` and `Cache-Control: no-cache` on the response, unless the inner service has set them.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// use std::{convert::Infallible, time::Duration};
    /// use axum::{Router, body::{Body, Bytes}, routing::get};
    /// use futures_util::{StreamExt, stream};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    /// use tower::ServiceExt;
    ///
    /// async fn quiet() -> ([(&'static str, &'static str); 1], Body) {
    ///     let body = Body::from_stream(stream::pending::<Result<Bytes, Infallible>>());
    ///     ([("content-type", "text/event-stream")], body)
    /// }
    ///
    /// let app: Router = Router::new()
    ///     .route("/events", get(quiet))
    ///     .layer(CancelOnDisconnectLayer::new().keep_alive(Duration::from_secs(5)));
    /// let request = Request::get("/events").body(Body::empty()).unwrap();
    /// let response = app.oneshot(request).await.unwrap();
    /// let probe = response.into_body().into_data_stream().next().await.unwrap().unwrap();
    /// assert!(probe.starts_with(b":"), "a comment: {probe:?}");
    /// # }
    /// ```
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.options.keep_alive = Some(interval.max(Duration::from_millis(1)));
        self
    }

    /// Sends a call's response head early if its handler stays silent.
    ///
    /// If the inner service has not answered within `silence` of the call becoming known, the client receives `200 text/event-stream`, then
    /// probes, and finally the answer as an event.
    ///
    /// Without this option, a call answered with JSON has no response head until the handler sends something, and the same is true of a
    /// silent call of revision 2026-07-28. Until then, proxies cut off the call at their idle limit, and a vanished client is not detected.
    ///
    /// This is off by default, because the inner response's head is discarded: its headers are dropped, and an error status becomes the
    /// JSON-RPC error -32603 with `data.status`, unless the body is a JSON-RPC error itself. The inner future is also boxed.
    ///
    /// The option applies to a POST with a single call (never `initialize`) from a client that accepts events. The layer removes
    /// `Accept-Encoding` from every POST by these clients that may carry JSON, because the request head does not show whether the body is a
    /// call. The call's stream is probed at the [`keep_alive`](Self::keep_alive) interval, or every 15 s if there is none.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() {
    /// use std::time::Duration;
    /// use axum::{Router, body::{Body, Bytes}, routing::post};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    /// use tower::ServiceExt;
    ///
    /// let app: Router = Router::new()
    ///     .route("/mcp", post(async |_: Bytes| std::future::pending::<()>().await))
    ///     .layer(CancelOnDisconnectLayer::new().commit_after(Duration::from_secs(10)));
    /// let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
    /// let request = Request::post("/mcp")
    ///     .header("content-type", "application/json")
    ///     .header("accept", "application/json, text/event-stream");
    /// let response = app.oneshot(request.body(Body::from(call)).unwrap()).await.unwrap();
    /// assert_eq!(response.headers()["content-type"], "text/event-stream");
    /// # }
    /// ```
    pub fn commit_after(mut self, silence: Duration) -> Self {
        self.options.commit_after = Some(silence);
        self
    }

    /// Treats a connected client as disconnected if it has not read its stream for `timeout`.
    ///
    /// The timeout is at least 100 ms. Off by default, and [`Duration::ZERO`] turns it off.
    ///
    /// In rmcp, a session's streams share one worker, which waits for the slowest of them, so a single stream that is not being read
    /// blocks all of the session's calls, cancellations included. A stream has stalled if hyper took its last frame at least `timeout` ago
    /// and has not requested another since. A stream that is merely quiet has not stalled.
    ///
    /// # What counts as reading
    ///
    /// A large frame is passed on in 16 KiB pieces, so a client that reads it slowly still counts as reading. The layer itself only notices
    /// when hyper requests the next piece, which hyper does once there is room in its own buffer and the kernel's. On Linux the kernel's
    /// send buffer grows to 4 MB, and the kernel reports room only when a third of it is free. A [`WatchedListener`] limits the unsent part
    /// to about 100 KiB, so that even a client at 10 KB/s makes progress within seconds.
    ///
    /// On HTTP/2, a client that stops reading one stream can exhaust the entire connection's flow-control window. Then none of its streams
    /// can make progress, and all those waiting to send count as stalled, because the layer cannot determine which of them exhausted the
    /// window. Choose a timeout longer than any pause that a well-behaved client might make.
    ///
    /// [`WatchedListener`]: https://docs.rs/mcp-cancel-on-disconnect/latest/mcp_cancel_on_disconnect/socket/struct.WatchedListener.html
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let layer = CancelOnDisconnectLayer::new().stall_timeout(Duration::from_secs(60));
    /// assert!(format!("{layer:?}").contains("stall_timeout: Some(60s)"));
    /// assert!(format!("{:?}", layer.stall_timeout(Duration::ZERO)).contains("stall_timeout: None"));
    /// ```
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.options.stall_timeout = (!timeout.is_zero()).then_some(timeout.max(MIN_STALL));
        self
    }

    /// Sets which answers are retained for clients that resume.
    pub fn retain(mut self, retain: RetainAnswers) -> Self {
        self.options.retain = retain;
        self
    }

    /// Sets the limits on tracked calls and retained answers, for all clones of the layer.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use axum::{Router, body::{Body, Bytes}, routing::post};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Limits};
    /// use tower::ServiceExt;
    ///
    /// let layer = CancelOnDisconnectLayer::new().limits(Limits::default().calls(0));
    /// let calls = layer.calls();
    /// let app: Router = Router::new()
    ///     .route("/mcp", post(async move |_: Bytes| assert!(calls.is_empty(), "over the limit")))
    ///     .layer(layer);
    /// let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
    /// let request = Request::post("/mcp").header("content-type", "application/json");
    /// let response = app.oneshot(request.body(Body::from(call)).unwrap()).await.unwrap();
    /// assert_eq!(response.status(), 200, "the call runs as it would without the layer");
    /// # }
    /// ```
    pub fn limits(self, limits: Limits) -> Self {
        self.registry.set_limits(limits);
        self
    }

    /// Adds an observer, which receives every [`Event`]. A layer can have several observers.
    pub fn observe(mut self, observer: impl Observer) -> Self {
        self.options.observers.add(observer);
        self
    }

    /// Adds a closure as an observer. Unlike [`observe`](Self::observe), this does not require a type annotation on the closure's argument.
    pub fn observe_fn(self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.observe(observer)
    }

    /// Sets how session ids appear in the log. By default, they are hashed with a key that differs in every process.
    pub fn log_session_ids(mut self, session_ids: SessionIds) -> Self {
        self.options.observers.session_ids = session_ids;
        self
    }

    /// Returns a handle to the in-flight calls of this layer and its clones.
    pub fn calls(&self) -> Calls {
        Calls::new(self.registry.clone())
    }
}

impl Default for CancelOnDisconnectLayer {
    fn default() -> Self {
        Self::new()
    }
}

impl<S: Clone> Layer<S> for CancelOnDisconnectLayer {
    type Service = CancelOnDisconnect<S>;

    fn layer(&self, inner: S) -> Self::Service {
        CancelOnDisconnect::new(inner, self.options.clone(), self.registry.clone())
    }
}
