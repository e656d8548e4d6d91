//! The layer: a builder for the service.

use std::sync::Arc;

use tower_layer::Layer;

use crate::{
    observe::{Observer, Observers},
    policy::Grace,
    registry::{Calls, Registry},
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

/// What the user chose.
#[derive(Debug, Clone, Default)]
pub(crate) struct Options {
    pub(crate) grace: Grace,
    pub(crate) observers: Observers,
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

    /// Sets how long a call goes on after its client went away.
    pub fn grace(mut self, grace: Grace) -> Self {
        self.options.grace = grace;
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
