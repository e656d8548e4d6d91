//! The layer: a builder for the service.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use tower_layer::Layer;

use crate::{
    call::CallInfo,
    observe::{Observer, Observers},
    policy::{Grace, Policy},
    registry::{Calls, Limits, Registry},
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

/// Which answers are kept for clients that come back for them. Needs
/// [`CancellableSessionManager`](crate::CancellableSessionManager), which sees the answers; keeping one is
/// a reference count, not a copy.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Retain};
///
/// let frugal = CancelOnDisconnectLayer::new().retain(Retain::Detached);
/// # drop(frugal);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Retain {
    /// All, for 60 s at least: also one that was on its way when the link broke.
    #[default]
    All,
    /// Those that came while nobody was there to take them.
    Detached,
    /// None: who comes back too late gets what rmcp gives, an empty stream.
    Off,
}

/// What the user chose.
#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) observers: Observers,
    pub(crate) retain: Retain,
    policy: Policy,
    policy_by_call: Option<Arc<PolicyByCall>>,
    exempt: Option<Arc<Exempt>>,
}

type PolicyByCall = dyn Fn(&CallInfo) -> Policy + Send + Sync;
type Exempt = dyn Fn(&CallInfo) -> bool + Send + Sync;

// === impl CancelOnDisconnectLayer ===

impl CancelOnDisconnectLayer {
    /// A layer with [`Grace::Auto`] and a registry of its own.
    pub fn new() -> Self {
        Self {
            options: Options::default(),
            registry: Arc::new(Registry::new()),
        }
    }

    /// Sets how long a call goes on after its client went away. Shorthand for a [`policy`](Self::policy) that
    /// is the same for all calls.
    pub fn grace(mut self, grace: Grace) -> Self {
        self.options.policy = self.options.policy.grace(grace);
        self
    }

    /// Asks for the policy of every call, once, when it is known. Replaces [`grace`](Self::grace).
    ///
    /// If the closure panics, the call gets the policy it would have without it.
    pub fn policy(mut self, policy: impl Fn(&CallInfo) -> Policy + Send + Sync + 'static) -> Self {
        self.options.policy_by_call = Some(Arc::new(policy));
        self
    }

    /// Lets the calls for which `exempt` is true run to their end, whatever their client does.
    ///
    /// If the closure panics, the call is not exempt.
    ///
    /// ```
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let layer = CancelOnDisconnectLayer::new().exempt(|call| call.tool() == Some("deploy"));
    /// # drop(layer);
    /// ```
    pub fn exempt(mut self, exempt: impl Fn(&CallInfo) -> bool + Send + Sync + 'static) -> Self {
        self.options.exempt = Some(Arc::new(exempt));
        self
    }

    /// Sets which answers are kept for clients that come back.
    pub fn retain(mut self, retain: Retain) -> Self {
        self.options.retain = retain;
        self
    }

    /// Sets how many bytes of answers are kept: in all (16 MiB), and of one session (1 MiB). The oldest go
    /// first. Holds for all clones of the layer.
    pub fn retain_at_most(self, total: usize, session: usize) -> Self {
        self.registry.limit_memory(Limits { total, session });
        self
    }

    /// Adds an observer of all that happens to calls.
    pub fn observe(mut self, observer: impl Observer) -> Self {
        self.options.observers.add(observer);
        self
    }

    /// The calls in flight through this layer and its clones.
    pub fn calls(&self) -> Calls {
        Calls::new(self.registry.clone())
    }
}

// === impl Options ===

impl Options {
    pub(crate) fn policy_for(&self, call: &CallInfo) -> Policy {
        let policy = match &self.policy_by_call {
            Some(policy) => ask(|| policy(call)).unwrap_or(self.policy),
            None => self.policy,
        };
        match &self.exempt {
            Some(exempt) if ask(|| exempt(call)).unwrap_or(false) => policy.grace(Grace::Never),
            _ => policy,
        }
    }
}

/// A user's panic must not take a call down with it.
fn ask<T>(question: impl FnOnce() -> T) -> Option<T> {
    catch_unwind(AssertUnwindSafe(question)).ok()
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("policy", &self.policy)
            .field("policy_by_call", &self.policy_by_call.is_some())
            .field("exempt", &self.exempt.is_some())
            .field("retain", &self.retain)
            .field("observers", &self.observers)
            .finish()
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
