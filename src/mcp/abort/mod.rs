//! A handler whose work is stopped when its call is cancelled.
//!
//! `forward` has the methods and says which may be stopped; `handling` is the future that stops them.

use std::time::Duration;

use rmcp::{
    RoleServer, ServerHandler,
    service::{RequestContext, SubscriptionContext},
};

use self::handling::{Handled, Handling, Stop};

mod forward;
mod handling;

/// How long a cancelled handler may go on before it is dropped: 1 s, enough to look at the token and clean up.
const WINDOW: Duration = Duration::from_secs(1);

/// A [`ServerHandler`] whose work ends when its call is cancelled, whether it looks at its token or not.
///
/// rmcp tells a handler by [`RequestContext::ct`] that its call is cancelled. A handler that does not look runs on, such as a
/// `#[tool]` that somebody else wrote, or one that waits for a child process or for another server. Inside `AbortOnCancel`, the
/// handler has a second to end by itself. Then its future is dropped where it waits, and its destructors run: those of a
/// `Child` with `kill_on_drop`, a lock, a request to another server. If a client is left, it gets the error -32800. The log
/// says at level info which handler was dropped.
///
/// ```
/// use std::{sync::Arc, time::Duration};
/// use axum::Router;
/// use mcp_cancel_on_disconnect::{AbortOnCancel, CancelOnDisconnectLayer, CancellableSessionManager};
/// use rmcp::{ServerHandler, transport::streamable_http_server::StreamableHttpService};
///
/// #[derive(Clone)]
/// struct MyServer;
/// impl ServerHandler for MyServer {}
///
/// let sessions = Arc::new(CancellableSessionManager::default());
/// let handler = AbortOnCancel::new(MyServer).after(Duration::from_millis(200));
/// let mcp = StreamableHttpService::new(move || Ok(handler.clone()), sessions, Default::default());
/// let app: Router = Router::new()
///     .nest_service("/mcp", mcp)
///     .layer(CancelOnDisconnectLayer::new());
/// # drop(app);
///
/// let handler = AbortOnCancel::new("a handler");
/// assert!(format!("{handler:?}").contains("window: 1s"));
/// assert_eq!(handler.inner(), &"a handler");
/// assert_eq!(handler.into_inner(), "a handler");
/// ```
///
/// # What it stops
///
/// A call is cancelled when [`RequestContext::ct`] or its [`CallToken`](crate::CallToken) fires. Both fire the
/// [`RequestContext::ct`] that the handler sees. rmcp alone does not fire it for a call of 2026-07-28 whose events are stored,
/// nor for a call whose cancel could not be injected.
///
/// | stopped | runs to its end |
/// |---|---|
/// | `tools/call`, `prompts/get`, `resources/read`, `completion/complete` | `initialize`, `ping`, `logging/setLevel` |
/// | all lists, `server/discover`, skills, `resources/directory/read` | `resources/subscribe` and `unsubscribe` |
/// | requests with other methods | `subscriptions/listen` (its own context fires), `tasks/*`, notifications |
///
/// The requests on the left only get something for their client. Those on the right change what the server knows of its client,
/// and must not do so by half.
///
/// It cannot stop `spawn_blocking`, a handler that blocks its thread, or a task that the handler spawned, unless something in the
/// handler ends that task when it is dropped (a `JoinSet`, an `AbortOnDropHandle`). Such work has to look at a token, or to
/// register a clean-up with [`CallToken::on_cancel`](crate::CallToken::on_cancel).
///
/// # Panics in handlers
///
/// With rmcp, a handler that panics leaves its call open, and the client waits without end. Here the client gets the error
/// -32603. The panic itself is sent to the panic hook as always, and affects nothing else.
#[derive(Debug, Clone)]
pub struct AbortOnCancel<H> {
    handler: H,
    window: Duration,
}

// === impl AbortOnCancel ===

impl<H> AbortOnCancel<H> {
    /// Stops the work of `handler` 1 s after a cancel.
    pub fn new(handler: H) -> Self {
        Self {
            handler,
            window: WINDOW,
        }
    }

    /// Sets how long a cancelled handler may go on. With [`Duration::ZERO`] it is polled once more and then dropped.
    pub fn after(mut self, window: Duration) -> Self {
        self.window = window;
        self
    }

    /// The handler inside.
    pub fn inner(&self) -> &H {
        &self.handler
    }

    /// Takes the handler out.
    pub fn into_inner(self) -> H {
        self.handler
    }
}

impl<H: ServerHandler> AbortOnCancel<H> {
    /// Has a method handle a request that may be stopped.
    fn abortable<'a, F>(
        &'a self,
        handled: Handled,
        context: RequestContext<RoleServer>,
        method: impl FnOnce(&'a H, RequestContext<RoleServer>) -> F,
    ) -> Handling<F> {
        let stop = Stop::new(&context, self.window);
        Handling::new(handled, Some(stop), || method(&self.handler, context))
    }

    /// Has a method handle a request that must not be stopped.
    fn protected<'a, F>(
        &'a self,
        handled: Handled,
        context: RequestContext<RoleServer>,
        method: impl FnOnce(&'a H, RequestContext<RoleServer>) -> F,
    ) -> Handling<F> {
        Handling::new(handled, None, || method(&self.handler, context))
    }

    /// Has a method run for a subscription.
    fn subscription<'a, F>(
        &'a self,
        context: SubscriptionContext,
        method: impl FnOnce(&'a H, SubscriptionContext) -> F,
    ) -> Handling<F> {
        let handled = Handled::new(context.request_context(), "subscriptions/listen");
        Handling::new(handled, None, || method(&self.handler, context))
    }
}
