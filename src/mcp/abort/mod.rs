//! A wrapper that stops a handler when its call is cancelled.
//!
//! `forward` implements the handler's methods and determines which of them may be stopped; `abortable_future` stops them.

use std::time::Duration;

use rmcp::{
    RoleServer, ServerHandler,
    service::{RequestContext, SubscriptionContext},
};

use self::abortable_future::{AbortTimer, AbortableFuture, RequestInfo};

mod abortable_future;
mod forward;

/// How long a cancelled handler may keep running before it is dropped.
///
/// This gives it enough time to check its token and clean up.
const ABORT_GRACE: Duration = Duration::from_secs(1);

/// A [`ServerHandler`] wrapper that stops cancelled handlers even if they ignore their token.
///
/// rmcp fires [`RequestContext::ct`] when a call is cancelled, but a handler that ignores this token keeps running: a `#[tool]`
/// from another crate, for example, or a handler awaiting a child process or another server.
///
/// Inside `AbortOnCancel`, a cancelled handler has one second to finish on its own. After that, its future is dropped at its
/// current await point, which runs the destructors of everything it owns, such as a `Child` with `kill_on_drop`, a lock, or a
/// request to another server. If the client is still connected, it receives the error -32800. Each dropped handler is logged at
/// the info level.
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
/// assert!(format!("{handler:?}").contains("grace: 1s"));
/// assert_eq!(handler.inner(), &"a handler");
/// assert_eq!(handler.into_inner(), "a handler");
/// ```
///
/// # What it stops
///
/// A call is cancelled when [`RequestContext::ct`] or its [`CallToken`](crate::CallToken) fires. With `AbortOnCancel`, the
/// [`CallToken`](crate::CallToken) also fires its handler's [`RequestContext::ct`]. Without it, `ct` does not fire in two cases:
/// if the call is under protocol revision 2026-07-28 and its events are stored, or if the cancellation could not be injected.
///
/// | stopped | runs to completion |
/// |---|---|
/// | `tools/call`, `prompts/get`, `resources/read`, `completion/complete` | `initialize`, `ping`, `logging/setLevel` |
/// | all lists, `server/discover`, `skills/get`, `resources/directory/read` | `resources/subscribe`, `resources/unsubscribe` |
/// | requests with any other method | `subscriptions/listen` (its own context fires), `tasks/*`, notifications |
///
/// The requests on the left do work for their client. Most of the requests on the right change what the server stores about the
/// client and must not be interrupted halfway.
///
/// `AbortOnCancel` cannot stop `spawn_blocking`, or a handler that blocks its thread. Nor can it stop a task spawned by the
/// handler, unless the handler owns it through a `JoinSet` or an `AbortOnDropHandle`. Such work has to check a token, or register
/// a clean-up with [`CallToken::on_cancel`](crate::CallToken::on_cancel).
///
/// # Panics in handlers
///
/// With rmcp alone, a panicking handler sends no answer, so its client waits until it times out. With `AbortOnCancel`, the client
/// receives the error -32603. The panic hook still runs, but nothing else is affected.
#[derive(Debug, Clone)]
pub struct AbortOnCancel<H> {
    handler: H,
    grace: Duration,
}

// === impl AbortOnCancel ===

impl<H> AbortOnCancel<H> {
    /// Wraps a handler so that it is stopped 1 s after a cancellation.
    pub fn new(handler: H) -> Self {
        Self {
            handler,
            grace: ABORT_GRACE,
        }
    }

    /// Sets how long a cancelled handler may keep running.
    ///
    /// With [`Duration::ZERO`], it is polled once more and then dropped.
    pub fn after(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Returns the inner handler.
    pub fn inner(&self) -> &H {
        &self.handler
    }

    /// Unwraps the inner handler.
    pub fn into_inner(self) -> H {
        self.handler
    }
}

impl<H: ServerHandler> AbortOnCancel<H> {
    /// Runs the method for a request that may be stopped.
    fn abortable<'a, F>(
        &'a self,
        request_info: RequestInfo,
        context: RequestContext<RoleServer>,
        method: impl FnOnce(&'a H, RequestContext<RoleServer>) -> F,
    ) -> AbortableFuture<F> {
        let abort_timer = AbortTimer::new(&context, self.grace);
        AbortableFuture::new(request_info, Some(abort_timer), || {
            method(&self.handler, context)
        })
    }

    /// Runs the method for a request that must not be stopped.
    fn protected<'a, F>(
        &'a self,
        request_info: RequestInfo,
        context: RequestContext<RoleServer>,
        method: impl FnOnce(&'a H, RequestContext<RoleServer>) -> F,
    ) -> AbortableFuture<F> {
        AbortableFuture::new(request_info, None, || method(&self.handler, context))
    }

    /// Runs the method for a subscription. It is not stopped, because its own context fires.
    fn subscription<'a, F>(
        &'a self,
        context: SubscriptionContext,
        method: impl FnOnce(&'a H, SubscriptionContext) -> F,
    ) -> AbortableFuture<F> {
        let request_info = RequestInfo::new(context.request_context(), "subscriptions/listen");
        AbortableFuture::new(request_info, None, || method(&self.handler, context))
    }
}
