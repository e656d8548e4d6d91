//! The token that notifies a handler when its call is cancelled.

use std::{
    fmt,
    future::poll_fn,
    pin::pin,
    sync::Arc,
    task::{Poll, ready},
};

use tokio_util::sync::CancellationToken;

use crate::{call::CancelReason, exchange::Exchange};

mod gateway;

/// A token that fires when its call is cancelled, and never after the call has completed.
///
/// The layer puts a token into the extensions of every request, whether or not it is an MCP request, and of every cancellation that it
/// replays. On a route without MCP, the token fires if the client disconnects before it has received the complete response.
///
/// ```
/// use axum::{Extension, Router, body::Body, routing::get};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancelReason};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let (token_tx, mut tokens) = tokio::sync::mpsc::unbounded_channel();
/// let app: Router = Router::new()
///     .route(
///         "/report",
///         get(async move |Extension(token): Extension<CallToken>| {
///             token_tx.send(token).unwrap();
///             std::future::pending::<()>().await // a long report
///         }),
///     )
///     .layer(CancelOnDisconnectLayer::new());
///
/// let request = Request::get("/report").body(Body::empty()).unwrap();
/// let mut response = Box::pin(app.oneshot(request));
/// assert!(futures_util::poll!(&mut response).is_pending());
/// let token = tokens.recv().await.unwrap();
/// assert!(!token.is_cancelled());
///
/// drop(response); // what hyper does when the client disconnects
/// token.cancelled().await;
/// assert_eq!(token.reason(), Some(CancelReason::ClientDisconnected));
/// # }
/// ```
///
/// # In handlers of older versions of rmcp
///
/// `CallToken::of` takes the context of rmcp 3.9 and later. In older versions (0.8.5, 1.8 and 2.2 are tested) the token is in the HTTP
/// request head, which rmcp copies into the context. Without sessions, it is the only sign of a disconnect these handlers get, because
/// their `RequestContext::ct` never fires.
///
/// ```
/// use mcp_cancel_on_disconnect::CallToken;
/// use rmcp::{RoleServer, service::RequestContext};
///
/// fn token(context: &RequestContext<RoleServer>) -> Option<CallToken> {
///     let head = context.extensions.get::<http::request::Parts>()?;
///     head.extensions.get::<CallToken>().cloned()
/// }
/// # let _ = token;
/// ```
#[derive(Clone)]
pub struct CallToken(Arc<Exchange>);

// === impl CallToken ===

impl CallToken {
    pub(crate) fn new(exchange: Arc<Exchange>) -> Self {
        Self(exchange)
    }

    pub(crate) fn exchange(&self) -> &Arc<Exchange> {
        &self.0
    }

    /// Returns `true` if the call has been cancelled. See [`CallToken`] for an example.
    pub fn is_cancelled(&self) -> bool {
        self.reason().is_some()
    }

    /// Returns why the call was cancelled, or `None` if it has not been cancelled.
    pub fn reason(&self) -> Option<CancelReason> {
        self.0.signal.mark_observed();
        self.0.signal.reason()
    }

    /// Waits until the call is cancelled.
    ///
    /// Completes at once if the call has already been cancelled, and never if it ends without a cancellation.
    ///
    /// # Cancel safety
    ///
    /// This method is cancel safe.
    pub async fn cancelled(&self) {
        self.0.signal.token().cancelled_owned().await;
    }

    /// Runs a future until it completes or the call is cancelled, whichever happens first.
    ///
    /// On cancellation, the future is polled one last time, so that no result is lost: if it is ready, its output is returned. Otherwise
    /// the future is dropped, and then the reason is returned.
    ///
    /// Dropping the future drops everything it owns. Whether that also stops work outside the future depends on the kind of work:
    ///
    /// | work | what dropping it does | example |
    /// |---|---|---|
    /// | HTTP request (`reqwest`) | closes its connection or resets its stream, so the server can stop | `http_request` |
    /// | child process (`tokio::process`) | kills the process if `kill_on_drop` is set, but not its children | `child_process` |
    /// | SQLite query (`sqlx`) | does not stop the query, which needs a progress handler that checks the token | `sqlx` |
    /// | PostgreSQL query (`sqlx`) | does not stop the query, unless its connection is closed and the server has `client_connection_check_interval` set | `sqlx` |
    /// | spawned task, blocking code | does not stop it: pass it a clone of this token, or a [`child_token`](Self::child_token) | `plain_axum` |
    ///
    /// The examples are in the crate's `examples/` folder.
    ///
    /// ```
    /// use axum::{Extension, Router, body::Body, routing::get};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancelReason};
    /// use tower::ServiceExt;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let (report, mut reports) = tokio::sync::mpsc::unbounded_channel();
    /// let app: Router = Router::new()
    ///     .route(
    ///         "/report",
    ///         get(async move |Extension(token): Extension<CallToken>| {
    ///             tokio::spawn(async move {
    ///                 let first = token.run_until_cancelled(async { "a quick query" }).await;
    ///                 report.send(first).unwrap();
    ///                 let second = token.run_until_cancelled(std::future::pending()).await;
    ///                 report.send(second).unwrap();
    ///             });
    ///             std::future::pending::<()>().await
    ///         }),
    ///     )
    ///     .layer(CancelOnDisconnectLayer::new());
    ///
    /// let request = Request::get("/report").body(Body::empty()).unwrap();
    /// let mut response = Box::pin(app.oneshot(request));
    /// assert!(futures_util::poll!(&mut response).is_pending());
    /// assert_eq!(reports.recv().await, Some(Ok("a quick query")));
    ///
    /// drop(response); // what hyper does when the client disconnects
    /// assert_eq!(reports.recv().await, Some(Err(CancelReason::ClientDisconnected)));
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// Returns the reason if the call is cancelled. If the call has already been cancelled, the future is not polled at all.
    ///
    /// # Cancel safety
    ///
    /// Dropping the returned future drops the inner future.
    pub async fn run_until_cancelled<F: Future>(
        &self,
        future: F,
    ) -> Result<F::Output, CancelReason> {
        if let Some(reason) = self.reason() {
            return Err(reason);
        }
        let token = self.0.signal.token();
        let (mut cancelled, mut future) = (pin!(token.cancelled()), pin!(future));
        poll_fn(|cx| {
            // Poll the future before the token, so that no result is lost. In tokio-util's own method, the order differs between versions.
            if let Poll::Ready(output) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(output));
            }
            ready!(cancelled.as_mut().poll(cx));
            // The future may have become ready in the meantime. It may even have been ready all along, because tokio's channels return
            // `Pending` to a task that has used up its budget.
            let last_poll = pin!(tokio::task::unconstrained(future.as_mut())).poll(cx);
            if let Poll::Ready(output) = last_poll {
                return Poll::Ready(Ok(output));
            }
            // The reason is always recorded before the token fires.
            Poll::Ready(Err(self
                .reason()
                .unwrap_or(CancelReason::ClientDisconnected)))
        })
        .await
    }

    /// Runs `clean_up` once if the call is cancelled.
    ///
    /// A clean-up might release a lock, remove a temporary file, stop billing or notify another server.
    ///
    /// The clean-up receives the reason. It runs even if the handler ignores its token, has been dropped or has already returned. If the
    /// call has already been cancelled, the clean-up runs at once. If the call completes, the clean-up is dropped without running, along
    /// with everything it owns.
    ///
    /// It runs in a task on the runtime where the call was cancelled. If that runtime stalls or shuts down before the clean-up has started,
    /// another runtime that serves requests runs it instead.
    ///
    /// A call can have several clean-ups. They run concurrently, in no particular order, and a panic in one does not affect the others.
    /// Code that must run in *every* case, cancelled or not, belongs in a destructor in the handler. A clean-up should not hold on to its
    /// own call's `CallToken`, because the two would keep each other alive if the end of the call were never observed.
    ///
    /// ```
    /// use std::sync::atomic::{AtomicU32, Ordering};
    /// use axum::{Extension, Router, body::Body, routing::get};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer};
    /// use tower::ServiceExt;
    ///
    /// static JOBS: AtomicU32 = AtomicU32::new(0);
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let app: Router = Router::new()
    ///     .route(
    ///         "/report",
    ///         get(async |Extension(token): Extension<CallToken>| {
    ///             JOBS.fetch_add(1, Ordering::Relaxed); // a job is now running elsewhere
    ///             token.on_cancel(async move |reason| {
    ///                 println!("stop the job: {reason}");
    ///                 JOBS.fetch_sub(1, Ordering::Relaxed);
    ///             });
    ///             std::future::pending::<()>().await
    ///         }),
    ///     )
    ///     .layer(CancelOnDisconnectLayer::new());
    ///
    /// let request = Request::get("/report").body(Body::empty()).unwrap();
    /// let mut response = Box::pin(app.oneshot(request));
    /// assert!(futures_util::poll!(&mut response).is_pending());
    /// assert_eq!(JOBS.load(Ordering::Relaxed), 1);
    ///
    /// drop(response); // what hyper does when the client disconnects
    /// while JOBS.load(Ordering::Relaxed) > 0 {
    ///     tokio::task::yield_now().await;
    /// }
    /// # }
    /// ```
    pub fn on_cancel<F>(&self, clean_up: impl FnOnce(CancelReason) -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.0.on_cancel(clean_up);
    }

    /// Returns `true` if this request was sent by the layer itself.
    ///
    /// Without a session manager, the layer cancels a call by replaying a `notifications/cancelled` into the inner service. This method
    /// distinguishes that request from a cancellation sent by a client. A replay's own token never fires.
    ///
    /// ```
    /// use axum::{Extension, Router, body::Body, http::StatusCode, routing::post};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer};
    /// use tower::ServiceExt;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let app: Router = Router::new()
    ///     .route("/mcp", post(async |Extension(token): Extension<CallToken>| match token.is_replay() {
    ///         true => StatusCode::ACCEPTED, // the layer's own cancellation
    ///         false => StatusCode::OK,
    ///     }))
    ///     .layer(CancelOnDisconnectLayer::new());
    /// let request = Request::post("/mcp").body(Body::empty()).unwrap();
    /// assert_eq!(app.oneshot(request).await.unwrap().status(), StatusCode::OK);
    /// # }
    /// ```
    pub fn is_replay(&self) -> bool {
        self.0.is_replay()
    }

    /// Returns a [`CancellationToken`] that fires when the call is cancelled. Cancelling it does not cancel the call.
    ///
    /// ```
    /// use axum::{Extension, Router, body::Body, routing::get};
    /// use http::Request;
    /// use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer};
    /// use tower::ServiceExt;
    ///
    /// async fn report(Extension(token): Extension<CallToken>) {
    ///     let child = token.child_token();
    ///     child.cancel();
    ///     assert!(child.is_cancelled() && !token.is_cancelled());
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let app: Router = Router::new()
    ///     .route("/report", get(report))
    ///     .layer(CancelOnDisconnectLayer::new());
    /// let request = Request::get("/report").body(Body::empty()).unwrap();
    /// assert_eq!(app.oneshot(request).await.unwrap().status(), 200);
    /// # }
    /// ```
    pub fn child_token(&self) -> CancellationToken {
        self.0.signal.token().child_token()
    }
}

/// Formatting a token does not mark it as observed.
impl fmt::Debug for CallToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallToken")
            .field("reason", &self.0.signal.reason())
            .finish_non_exhaustive()
    }
}

#[cfg(feature = "axum")]
mod extract {
    use std::convert::Infallible;

    use axum::{
        extract::{FromRequestParts, OptionalFromRequestParts},
        response::{IntoResponse, Response},
    };
    use http::{StatusCode, request::Parts};

    use super::CallToken;

    /// The rejection for a handler taking a [`CallToken`] on a route without the layer.
    ///
    /// It is rendered as a response with status 500. A handler taking an `Option<CallToken>` works on these routes too.
    ///
    /// ```
    /// use axum::{Router, body::Body, routing::get};
    /// use http::{Request, StatusCode};
    /// use mcp_cancel_on_disconnect::CallToken;
    /// use tower::ServiceExt;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let app: Router = Router::new()
    ///     .route("/strict", get(async |_: CallToken| "cancellable"))
    ///     .route("/lenient", get(async |token: Option<CallToken>| match token {
    ///         Some(_) => "cancellable",
    ///         None => "not cancellable",
    ///     }));
    /// let request = |path| Request::get(path).body(Body::empty()).unwrap();
    /// let strict = app.clone().oneshot(request("/strict")).await.unwrap();
    /// assert_eq!(strict.status(), StatusCode::INTERNAL_SERVER_ERROR);
    /// let lenient = app.oneshot(request("/lenient")).await.unwrap();
    /// assert_eq!(lenient.status(), StatusCode::OK);
    /// # }
    /// ```
    #[derive(Debug)]
    #[non_exhaustive]
    pub struct MissingLayer;

    impl<S: Sync> FromRequestParts<S> for CallToken {
        type Rejection = MissingLayer;

        async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Self::Rejection> {
            let token = parts.extensions.get::<Self>().cloned();
            token
                .inspect(|token| token.0.signal.mark_observed())
                .ok_or(MissingLayer)
        }
    }

    /// `Option<CallToken>` is `None` on a route without the layer.
    impl<S: Sync> OptionalFromRequestParts<S> for CallToken {
        type Rejection = Infallible;

        async fn from_request_parts(
            parts: &mut Parts,
            _: &S,
        ) -> Result<Option<Self>, Self::Rejection> {
            let token = parts.extensions.get::<Self>().cloned();
            Ok(token.inspect(|token| token.0.signal.mark_observed()))
        }
    }

    impl std::fmt::Display for MissingLayer {
        fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("the route has no CancelOnDisconnectLayer")
        }
    }

    impl std::error::Error for MissingLayer {}

    impl IntoResponse for MissingLayer {
        fn into_response(self) -> Response {
            (StatusCode::INTERNAL_SERVER_ERROR, self.to_string()).into_response()
        }
    }
}

#[cfg(feature = "axum")]
pub use self::extract::MissingLayer;
