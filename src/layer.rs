//! The layer: a builder for the service.

use std::{sync::Arc, time::Duration};

use tower_layer::Layer;

use crate::{
    call::CallInfo,
    calls::Calls,
    exchange::Registry,
    limits::Limits,
    observe::{Event, Observer, SessionIds},
    options::{Options, Retain},
    policy::{Grace, Policy},
    service::CancelOnDisconnect,
};

/// Cancels the calls of clients that hang up. See the [crate docs](crate).
///
/// Clones share one registry of calls, so the routes of one server may differ in their options and are still
/// one server to [`calls`](Self::calls):
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
    /// A layer with [`Grace::Auto`] and a registry of its own.
    pub fn new() -> Self {
        Self {
            options: Options::default(),
            registry: Arc::new(Registry::new()),
        }
    }

    /// Sets how long a call goes on after its client went away, unless its [`policy`](Self::policy) says otherwise.
    pub fn grace(mut self, grace: Grace) -> Self {
        self.options.rules.grace = grace;
        self
    }

    /// Asks for the policy of every call, once, when it is known. A second closure replaces the first.
    ///
    /// What the policy does not set is as [`grace`](Self::grace) and [`call_timeout`](Self::call_timeout) say, in
    /// whatever order the options are given. If the closure panics, the call gets what they say.
    pub fn policy(mut self, policy: impl Fn(&CallInfo) -> Policy + Send + Sync + 'static) -> Self {
        self.options.policy = Some(Arc::new(policy));
        self
    }

    /// Lets the calls for which `exempt` is true run to their end, whatever their client does: neither a grace nor
    /// [`supersede`](Policy::supersede) ends them. A [`call_timeout`](Self::call_timeout) does, and
    /// [`Calls::cancel`], [`Calls::drain`] and the end of their session. A subscription still ends with its stream.
    ///
    /// Given several times, a call is exempt if one of the closures says so. One that panics says no.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let layer = CancelOnDisconnectLayer::new()
    ///     .exempt(|call| call.tool() == Some("deploy"))
    ///     .exempt(|call| call.method() == "prompts/get");
    /// # drop(layer);
    /// ```
    pub fn exempt(mut self, exempt: impl Fn(&CallInfo) -> bool + Send + Sync + 'static) -> Self {
        self.options.exempt.push(Arc::new(exempt));
        self
    }

    /// Sets how long a call may last, unless its [`policy`](Self::policy) says otherwise, see
    /// [`Policy::call_timeout`].
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.options.rules.call_timeout = Some(timeout);
        self
    }

    /// Probes clients: puts a comment into every response stream (`text/event-stream`) that was quiet for
    /// this long, at least 1 ms. Off by default; rmcp does the same every 15 s.
    ///
    /// That a client is gone without a word shows only when something is written to it. A comment is no
    /// event: clients ignore it, proxies take it for traffic. It stands between two events, never inside one, and goes
    /// with `X-Accel-Buffering: no` and `Cache-Control: no-cache`, where the inner service has not said
    /// otherwise. No probes get into a body that is encoded or whose length is known.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let layer = CancelOnDisconnectLayer::new().keep_alive(Duration::from_secs(5));
    /// # drop(layer);
    /// ```
    pub fn keep_alive(mut self, interval: Duration) -> Self {
        self.options.keep_alive = Some(interval.max(Duration::from_millis(1)));
        self
    }

    /// Answers calls whose handler stays silent: when the inner service has not answered after this long,
    /// the client gets `200 text/event-stream` and probes, and the answer as an event when it is there.
    ///
    /// Without it, a JSON answer or a silent call of 2026-07-28 has no head until the handler says something.
    /// Proxies cut such a call at their idle limit, and a client that vanished is noticed by nobody. Off by
    /// default, because what the inner service says in its head is lost: the status (an error status becomes the
    /// JSON-RPC error -32603, with `data.status`) and headers. Inner layers that add headers add them to
    /// nothing. The inner future is boxed.
    ///
    /// Only for a POST with one call (never `initialize`) from a client that accepts events. Such a request is
    /// passed on without its `Accept-Encoding`. Streams committed so are probed every
    /// [`keep_alive`](Self::keep_alive), or else every 15 s.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let layer = CancelOnDisconnectLayer::new().commit_after(Duration::from_secs(10));
    /// # drop(layer);
    /// ```
    pub fn commit_after(mut self, silence: Duration) -> Self {
        self.options.commit_after = Some(silence);
        self
    }

    /// Takes a client for gone that is connected and has not read from its stream for this long. Off by
    /// default.
    ///
    /// The streams of a session share its worker, which waits for the slowest: one client that does
    /// not read holds up all calls of its session, cancels included. A stream is stalled when its last frame was
    /// taken this long ago and the next has not been asked for. A quiet stream is not. Kernel buffers and
    /// hyper's hide the first megabytes.
    ///
    /// ```
    /// use std::time::Duration;
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let layer = CancelOnDisconnectLayer::new().stall_timeout(Duration::from_secs(30));
    /// # drop(layer);
    /// ```
    pub fn stall_timeout(mut self, timeout: Duration) -> Self {
        self.options.stall_timeout = Some(timeout);
        self
    }

    /// Sets which answers are kept for clients that come back.
    pub fn retain(mut self, retain: Retain) -> Self {
        self.options.retain = retain;
        self
    }

    /// Sets how many calls are tracked, and how much is kept of answers. Holds for all clones of the layer.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Limits};
    ///
    /// let limits = Limits::default().calls(10_000).detached_of_session(32);
    /// let layer = CancelOnDisconnectLayer::new().limits(limits);
    /// # drop(layer);
    /// ```
    pub fn limits(self, limits: Limits) -> Self {
        self.registry.limit(limits);
        self
    }

    /// Adds an observer of all that happens to calls.
    pub fn observe(mut self, observer: impl Observer) -> Self {
        self.options.observers.add(observer);
        self
    }

    /// The same for a closure, which needs no type for its argument here.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event};
    ///
    /// let layer = CancelOnDisconnectLayer::new().observe_fn(|event| {
    ///     if let Event::Ended { call, outcome, .. } = event {
    ///         println!("{}: {outcome:?}", call.method());
    ///     }
    /// });
    /// assert!(layer.calls().is_empty());
    /// ```
    pub fn observe_fn(self, observer: impl Fn(&Event<'_>) + Send + Sync + 'static) -> Self {
        self.observe(observer)
    }

    /// Sets how the log shows session ids. By default as a hash that means nothing elsewhere.
    pub fn log_session_ids(mut self, session_ids: SessionIds) -> Self {
        self.options.observers.session_ids = session_ids;
        self
    }

    /// The calls in flight through this layer and its clones.
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
