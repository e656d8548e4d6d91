//! Keeps calls running after a disconnect if no disconnect may cancel them.
//!
//! These are calls without a session, either to tools in `--exempt` or with the grace period `never`. A server without sessions
//! treats a closed connection as a cancellation. To keep the connection open, a task reads the call's response until it ends,
//! whether or not the client is still connected. The task closes the connection earlier only if the call timeout expires, or if
//! the call is cancelled for a reason other than a disconnect. A message that the proxy can't parse might be one of these
//! calls, so it is treated as one.

use std::{
    convert::Infallible,
    future::pending,
    mem,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Body, Bytes};
use futures_util::{
    future::{Either, OptionFuture},
    stream,
};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use mcp_cancel_on_disconnect::{CallToken, CancelReason, Grace};
use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};
use tower_service::Service;
use tracing::Instrument as _;

use crate::{
    config::Config,
    headers::{PROTOCOL_VERSION, SESSION_ID, exactly_one, has_sessions},
    http_service::{HttpService, ResponseFuture, read_to_end},
    message::{Kind, MAX_BODY, Message, batch},
    refusal,
};

/// The configured grace periods for the tools' calls. Clones share the configuration.
#[derive(Debug, Clone)]
pub(crate) struct Graces(Arc<Config>);

/// A service that keeps connections open for calls that a disconnect must not cancel.
#[derive(Debug, Clone)]
pub(crate) struct KeepRunning<S> {
    inner: S,
    /// `None` if no call needs this.
    graces: Option<Graces>,
    background_calls: BackgroundCalls,
}

/// Counts the calls whose responses are read in the background. Clones share the count.
#[derive(Debug, Clone, Default)]
pub(crate) struct BackgroundCalls(Arc<AtomicUsize>);

/// Counts a call in [`BackgroundCalls`], until this guard is dropped.
struct BackgroundCallGuard(BackgroundCalls);

/// A call whose response is read even if its client has disconnected.
struct BackgroundCall {
    token: CallToken,
    response_future: ResponseFuture,
    /// The call timeout.
    ///
    /// The layer can't enforce it, because it does not see the end of a call whose client disconnects before the response head.
    call_timeout: Option<Duration>,
    to_client: oneshot::Sender<Response<Body>>,
    _guard: BackgroundCallGuard,
}

// === impl Graces ===

impl Graces {
    pub(crate) fn new(config: &Config) -> Self {
        Self(Arc::new(config.clone()))
    }

    /// Returns the grace period for a tool's calls: its last `--tool-grace`, or else `--grace`.
    pub(crate) fn for_tool(&self, tool: Option<&str>) -> Grace {
        let mut tool_graces = self.0.tool_grace.iter().rev();
        let tool_grace = tool_graces.find(|(name, _)| Some(name.as_str()) == tool);
        tool_grace.map_or(self.0.grace, |(_, grace)| *grace)
    }

    pub(crate) fn is_exempt(&self, tool: Option<&str>) -> bool {
        tool.is_some_and(|tool| self.0.exempt.iter().any(|name| name == tool))
    }

    /// Returns `true` if no disconnect cancels the tool's calls.
    fn keeps_running(&self, tool: Option<&str>) -> bool {
        self.is_exempt(tool) || self.for_tool(tool) == Grace::Never
    }

    /// Returns `true` if a body might contain a call that no disconnect cancels.
    fn may_contain_kept_call(&self, body: &[u8]) -> bool {
        let messages = batch(body).unwrap_or_else(|| vec![body]);
        messages.into_iter().any(|message| {
            // The server's parser might accept a message that ours rejects.
            Message::read(message).is_none_or(|message| self.may_be_kept_call(&message))
        })
    }

    fn may_be_kept_call(&self, message: &Message<'_>) -> bool {
        let tool = message.tool();
        let is_any_tool = tool.is_none() && message.method.as_deref() == Some("tools/call");
        message.kind == Kind::Request && (is_any_tool || self.keeps_running(tool.as_deref()))
    }

    /// Reads a call's response in its own task, and returns it for the client.
    ///
    /// Returns 503 if the task ends before the response head has arrived.
    async fn read_in_background(
        &self,
        token: CallToken,
        response_future: ResponseFuture,
        guard: BackgroundCallGuard,
    ) -> Response<Body> {
        let (to_client, response) = oneshot::channel();
        let call = BackgroundCall {
            token,
            response_future,
            call_timeout: self.0.call_timeout,
            to_client,
            _guard: guard,
        };
        tokio::spawn(call.read().in_current_span());
        response.await.unwrap_or_else(|_| {
            // A client does not normally see this, because the layer itself responds to a call whose token has fired.
            refusal::plain(StatusCode::SERVICE_UNAVAILABLE, "cancelled\n")
        })
    }

    /// Returns `true` if the configuration allows for calls that no disconnect cancels.
    fn any_keeps_running(&self) -> bool {
        let graces = self.0.tool_grace.iter().map(|(_, grace)| grace);
        let mut graces = graces.chain([&self.0.grace]);
        !self.0.exempt.is_empty() || graces.any(|grace| *grace == Grace::Never)
    }
}

// === impl KeepRunning ===

impl<S> KeepRunning<S> {
    /// Wraps a server. Has no effect on a command, whose calls don't end with their connections.
    pub(crate) fn new(inner: S, graces: Graces) -> Self {
        let is_needed = graces.0.upstream.is_some() && graces.any_keeps_running();
        let graces = is_needed.then_some(graces);
        Self {
            inner,
            graces,
            background_calls: BackgroundCalls::default(),
        }
    }

    /// Returns the calls that a shutdown should wait for.
    ///
    /// The layer only tracks these calls while their clients are connected.
    pub(crate) fn background_calls(&self) -> BackgroundCalls {
        self.background_calls.clone()
    }
}

impl<S: HttpService> Service<Request<Body>> for KeepRunning<S> {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<S::Future, ResponseFuture>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let token = request.extensions().get::<CallToken>();
        let (Some(graces), Some(token)) = (&self.graces, token) else {
            return Either::Left(self.inner.call(request));
        };
        if request.method() != Method::POST || has_session(request.headers()) {
            return Either::Left(self.inner.call(request));
        }
        let (graces, token) = (graces.clone(), token.clone());
        let background_calls = self.background_calls.clone();
        let inner = self.inner.clone();
        // Call the service that has been polled ready rather than its clone.
        let mut inner = mem::replace(&mut self.inner, inner);
        Either::Right(Box::pin(async move {
            let (parts, body) = request.into_parts();
            let (keeps_running, body) = match read_to_end(body, MAX_BODY).await {
                Ok(body) => (graces.may_contain_kept_call(&body), Body::from(body)),
                Err(body) => (false, body),
            };
            let response_future = inner.call(Request::from_parts(parts, body));
            if keeps_running {
                Ok(graces
                    .read_in_background(token, Box::pin(response_future), background_calls.count())
                    .await)
            } else {
                response_future.await
            }
        }))
    }
}

/// Returns `true` if a request might belong to a session.
fn has_session(headers: &HeaderMap) -> bool {
    headers.contains_key(SESSION_ID)
        && exactly_one(headers, &PROTOCOL_VERSION).is_none_or(has_sessions)
}

// === impl BackgroundCalls ===

impl BackgroundCalls {
    fn count(&self) -> BackgroundCallGuard {
        self.0.fetch_add(1, Ordering::Relaxed);
        BackgroundCallGuard(self.clone())
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 0
    }
}

// === impl BackgroundCallGuard ===

impl Drop for BackgroundCallGuard {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::Relaxed);
    }
}

// === impl BackgroundCall ===

impl BackgroundCall {
    /// Reads the response until it ends, the call is cancelled, or the call timeout expires.
    ///
    /// Ignores a cancellation due to a disconnect.
    async fn read(self) {
        let token = self.token.clone();
        let call_timeout = OptionFuture::from(self.call_timeout.map(sleep));
        tokio::select! {
            () = self.read_to_end() => {}
            () = cancelled_without_disconnect(token) => {}
            Some(()) = call_timeout => {}
        }
    }

    /// Passes the response on to the client, or discards it once the client has disconnected.
    ///
    /// If the response is complete but the client disconnects before it has taken the last frame, marks the call as answered.
    async fn read_to_end(self) {
        let response = match self.response_future.await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let (head, mut body) = response.into_parts();
        let (frames, received) = mpsc::channel::<Result<Frame<Bytes>, axum::Error>>(1);
        let received = stream::unfold(received, async |mut received| {
            Some((received.recv().await?, received))
        });
        let response = Response::from_parts(head, Body::new(StreamBody::new(received)));
        // Fails if the client has disconnected.
        drop(self.to_client.send(response));
        while let Some(frame) = body.frame().await {
            let is_last = frame.is_err();
            // If the client has disconnected, discard the frame and read on.
            drop(frames.send(frame).await);
            if is_last {
                return;
            }
        }
        // Resolves once the last frame has been taken for the client, or fails if the client has disconnected.
        if frames.reserve().await.is_err() {
            self.token.answered();
        }
    }
}

/// Waits until a call is cancelled for a reason other than a disconnect.
///
/// If the layer can't parse a request as a call, the request's token fires at a disconnect, whatever the grace period is.
async fn cancelled_without_disconnect(token: CallToken) {
    token.cancelled().await;
    if token.reason() == Some(CancelReason::ClientDisconnected) {
        pending().await
    }
}
