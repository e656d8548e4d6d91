//! The response future, from the request to the response head.
//!
//! It completes before the inner service has answered if this server has cancelled the call, if the head is sent early, or if the
//! client has disconnected while hyper is not reading.

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body::Body;
use pin_project_lite::pin_project;
use tokio::time::Instant;

use super::{
    PeerClosed, Sleeper,
    body::ResponseBody,
    commit::CommittedBody,
    head::{classify_head, content_length, has_content_type, has_no_content},
    is_ready,
    late::Late,
    peer_closed,
    slot::Inner,
    stream::{Content, EventStream, Probes, set_unbuffered},
    timer,
};
use crate::{
    call::{CallInfo, DetachCause},
    exchange::{BodyPlan, DeliveryGuard, Guard, Head, Tap},
    headers::{McpHeaders, accepts_events},
    options::Options,
};

/// The probe interval for a stream whose head was sent early, if [`keep_alive`] is not set.
///
/// This is a quarter of the shortest default idle timeout among proxies.
///
/// [`keep_alive`]: crate::CancelOnDisconnectLayer::keep_alive
const DEFAULT_PROBE_INTERVAL: Duration = Duration::from_secs(15);

/// Minimum interval between checks of whether the call is known yet.
///
/// The interval is [`commit_after`](crate::CancelOnDisconnectLayer::commit_after) if that is longer.
const RECHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Stands in for a duration that would overflow [`Instant`].
const FAR_FUTURE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The status nginx logs when a client disconnects before the response.
const CLIENT_CLOSED_REQUEST: u16 = 499;

pin_project! {
    /// The response future of [`CancelOnDisconnect`](crate::CancelOnDisconnect).
    ///
    /// Dropping it before it is ready is treated as a disconnect.
    ///
    /// ```
    /// use axum::body::Body;
    /// use http::{Request, Response};
    /// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, body::{ResponseFuture, TeeBody}};
    /// use tower::{Layer, Service, service_fn};
    ///
    /// async fn respond<F, B>(future: ResponseFuture<F>) -> u16
    /// where
    ///     ResponseFuture<F>: Future<Output = Result<Response<B>, std::convert::Infallible>>,
    /// {
    ///     future.await.unwrap().status().as_u16()
    /// }
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let mut service = CancelOnDisconnectLayer::new().layer(service_fn(async |_: Request<TeeBody<Body>>| {
    ///     Ok::<_, std::convert::Infallible>(Response::new(Body::from("hello")))
    /// }));
    /// assert_eq!(respond(service.call(Request::new(Body::empty()))).await, 200);
    /// # }
    /// ```
    pub struct ResponseFuture<F> {
        // Declared first, so that the token fires before the inner future's destructors run.
        guard: Guard,
        #[pin]
        inner: InnerFuture<F>,
        options: ResponseOptions,
        // Set if the call was answered before the inner service returned the response head. A drain waits until this guard has
        // been dropped.
        delivering: Option<DeliveryGuard>,
        session_use: UseUntilHead,
    }
}

pin_project! {
    #[project = InnerFutureProj]
    enum InnerFuture<F> {
        Inline { #[pin] future: F },
        // Boxed if it might have to keep running inside the body.
        Boxed { future: Option<Pin<Box<F>>> },
    }
}

/// A request's use of its session, which lasts until the response head is ready.
///
/// It keeps the session open while the session manager has yet to receive the request, because its body is incomplete or a
/// middleware is holding it back.
#[derive(Default)]
enum UseUntilHead {
    /// No poll has returned `Pending` yet, or a session manager had bound the call by then.
    #[default]
    NotStarted,
    /// `None` if no session manager has the session.
    Started { _use: Option<Box<dyn Send + Sync>> },
}

/// How the response is handled, according to the request and the layer's options.
#[derive(Default)]
pub(crate) struct ResponseOptions {
    head_only: bool,
    commit: Option<Silence>,
    peer: Option<PeerClosed>,
}

/// Measures how long the inner service has been silent.
///
/// The clock starts once the call is known, because a client might be uploading its request slowly.
struct Silence {
    limit: Duration,
    timer: Sleeper,
    has_call: bool,
}

// === impl ResponseFuture ===

impl<F> ResponseFuture<F> {
    pub(crate) fn new(guard: Guard, future: F, options: ResponseOptions) -> Self {
        let inner = match options.commit {
            None => InnerFuture::Inline { future },
            Some(_) => InnerFuture::Boxed {
                future: Some(Box::pin(future)),
            },
        };
        Self {
            guard,
            inner,
            options,
            delivering: None,
            session_use: UseUntilHead::NotStarted,
        }
    }

    /// Creates the future for a request already being handled by another layer.
    pub(crate) fn passthrough(future: F) -> Self {
        Self::new(Guard::inert(), future, ResponseOptions::default())
    }
}

impl<F, RB, E> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Response<RB>, E>> + Send + 'static,
    RB: Body + Send + 'static,
    RB::Data: From<Bytes>,
{
    type Output = Result<Response<ResponseBody<RB>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Some(exchange) = this.guard.exchange() {
            exchange.set_response_waker(cx.waker());
            if let Some(cancellation_error) = exchange.cancellation_error() {
                this.guard.complete();
                return Poll::Ready(Ok(json_response(cancellation_error)));
            }
        }
        let polled = {
            let _polling = this.guard.poll_guard();
            this.inner.as_mut().poll(cx)
        };
        if polled.is_ready() {
            *this.session_use = UseUntilHead::NotStarted;
        }
        if let Some(exchange) = this.guard.exchange() {
            // Before `parse_body`, the call is known only if a session manager has bound it, and an in-flight call already uses
            // its session.
            if polled.is_pending()
                && matches!(this.session_use, UseUntilHead::NotStarted)
                && !exchange.has_call()
            {
                let _use = exchange.use_session();
                *this.session_use = UseUntilHead::Started { _use };
            }
            exchange.parse_body();
        }
        match polled {
            Poll::Ready(Ok(response)) => {
                let guard = mem::replace(this.guard, Guard::inert());
                Poll::Ready(Ok(this.options.respond(guard, response)))
            }
            Poll::Ready(Err(error)) => {
                this.guard.fail();
                Poll::Ready(Err(error))
            }
            Poll::Pending if is_ready(&mut this.options.peer, cx) => {
                this.guard.report_dropped(DetachCause::PeerClosed);
                Poll::Ready(Ok(client_closed_request()))
            }
            Poll::Pending => {
                if this.delivering.is_none()
                    && let Some(exchange) = this.guard.exchange()
                {
                    *this.delivering = exchange.delivery_guard();
                }
                let Some(silence) = &mut this.options.commit else {
                    return Poll::Pending;
                };
                let exchange = this.guard.exchange();
                let call = exchange.and_then(|exchange| exchange.call_in_flight());
                let Some(call) = silence.poll_elapsed(call, cx) else {
                    return Poll::Pending;
                };
                let request = call.request_id().clone();
                let Some(future) = this.inner.as_mut().take() else {
                    return Poll::Pending;
                };
                let session_use = mem::take(this.session_use);
                let pending = Box::pin(async move {
                    let answer = future.await.ok();
                    drop(session_use);
                    answer
                });
                let guard = mem::replace(this.guard, Guard::inert());
                let committed = CommittedBody::new(request, pending);
                Poll::Ready(Ok(this.options.commit(guard, committed)))
            }
        }
    }
}

impl<F> fmt::Debug for ResponseFuture<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

// === impl InnerFuture ===

impl<F: Future> InnerFuture<F> {
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        match self.project() {
            InnerFutureProj::Inline { future } => future.poll(cx),
            InnerFutureProj::Boxed {
                future: Some(future),
            } => future.as_mut().poll(cx),
            InnerFutureProj::Boxed { future: None } => Poll::Pending,
        }
    }

    fn take(self: Pin<&mut Self>) -> Option<Pin<Box<F>>> {
        match self.project() {
            InnerFutureProj::Inline { .. } => None,
            InnerFutureProj::Boxed { future } => future.take(),
        }
    }
}

// === impl Silence ===

impl Silence {
    /// Returns `None` outside a tokio runtime.
    fn new(limit: Duration) -> Option<Self> {
        Some(Self {
            limit,
            timer: timer(limit)?,
            has_call: false,
        })
    }

    /// Returns the call once the inner service has been silent for the limit.
    ///
    /// Returns `None` before that, or if no call is in flight.
    fn poll_elapsed<'a>(
        &mut self,
        call: Option<&'a CallInfo>,
        cx: &mut Context<'_>,
    ) -> Option<&'a CallInfo> {
        if let Some(call) = call
            && !mem::replace(&mut self.has_call, true)
        {
            self.reset_timer(call.started_at(), self.limit);
        }
        while self.timer.as_mut().poll(cx).is_ready() {
            if self.has_call {
                return call;
            }
            // Another task might be reading the request body, so this future might not be polled when the call becomes known.
            self.reset_timer(Instant::now(), self.limit.max(RECHECK_INTERVAL));
        }
        None
    }

    fn reset_timer(&mut self, from: Instant, time: Duration) {
        let deadline = from.checked_add(time).unwrap_or(from + FAR_FUTURE);
        self.timer.as_mut().reset(deadline);
    }
}

// === impl ResponseOptions ===

impl ResponseOptions {
    /// Returns the options for a request.
    ///
    /// `may_be_call` is `true` if the request might contain a call, judging by its head.
    pub(crate) fn for_request<B>(
        request: &Request<B>,
        may_be_call: bool,
        options: &Options,
    ) -> Self {
        let commit_after = options
            .commit_after
            .filter(|_| may_be_call && accepts_events(request.headers()));
        Self {
            head_only: request.method() == Method::HEAD,
            commit: commit_after.and_then(Silence::new),
            peer: peer_closed(request.extensions()),
        }
    }

    /// Returns `true` if the inner answer might have to be sent as events.
    pub(crate) fn may_commit(&self) -> bool {
        self.commit.is_some()
    }

    /// Turns the inner service's answer into the response.
    fn respond<RB>(
        &mut self,
        mut guard: Guard,
        response: Response<RB>,
    ) -> Response<ResponseBody<RB>>
    where
        RB: Body + Send + 'static,
    {
        let (mut parts, body) = response.into_parts();
        let mcp_headers = McpHeaders::from_map(&parts.headers);
        let has_exact_size = body.size_hint().exact().is_some();
        let length = body
            .size_hint()
            .exact()
            .or_else(|| content_length(&mcp_headers));
        let Some(exchange) = guard.exchange() else {
            return Response::from_parts(parts, ResponseBody::plain(guard, body, length, None));
        };
        let keep_alive = exchange.keep_alive();
        let head = classify_head(parts.status, &mcp_headers);
        let mut answered_call = None;
        match exchange.on_head(head) {
            BodyPlan::Late { request, error } if !has_no_content(parts.status) => {
                parts.headers.remove(header::CONTENT_LENGTH);
                let late = Box::new(Late::new(body, request, error));
                let content = Content::injectable(keep_alive.and_then(Probes::new));
                let inner = Inner::Late { late };
                let stream = EventStream::new(guard, inner, content, self.peer.take());
                return Response::from_parts(parts, ResponseBody::events(stream));
            }
            BodyPlan::Tap(tap) => guard.set_tap(tap),
            BodyPlan::Answer(call) => answered_call = Some(call),
            BodyPlan::Late { .. } | BodyPlan::Pass => {}
        }
        if self.head_only || has_no_content(parts.status) {
            // hyper drops these bodies without polling them.
            guard.complete();
        }
        let has_ended = body.is_end_stream() || length == Some(0) || guard.exchange().is_none();
        if let Some(call) = answered_call.filter(|_| !has_exact_size && !has_ended) {
            // The server might keep working until the body ends. If the length is known, the call ends with the last byte.
            let is_json =
                has_content_type(&mcp_headers, "application/json") && !mcp_headers.is_encoded;
            if length.is_none() {
                guard.set_tap(Box::new(Tap::answer(call, is_json)));
            }
            let content = Content::answer(is_json, length);
            let stream = EventStream::new(guard, Inner::Body { body }, content, self.peer.take());
            return Response::from_parts(parts, ResponseBody::events(stream));
        }
        let (Head::Stream { readable }, false) = (head, has_ended) else {
            let peer = self.peer.take();
            return Response::from_parts(parts, ResponseBody::plain(guard, body, length, peer));
        };
        let content = match length {
            None if readable => {
                if keep_alive.is_some() {
                    set_unbuffered(&mut parts.headers);
                }
                Content::injectable(keep_alive.and_then(Probes::new))
            }
            remaining => Content::Passthrough { remaining },
        };
        let stream = EventStream::new(guard, Inner::Body { body }, content, self.peer.take());
        Response::from_parts(parts, ResponseBody::events(stream))
    }

    /// Returns a response whose head is sent before the inner service has answered.
    #[cold]
    fn commit<RB>(
        &mut self,
        guard: Guard,
        committed: CommittedBody<RB>,
    ) -> Response<ResponseBody<RB>>
    where
        RB: Body + Send + 'static,
    {
        let keep_alive = guard.exchange().and_then(|exchange| exchange.keep_alive());
        let content =
            Content::injectable(Probes::new(keep_alive.unwrap_or(DEFAULT_PROBE_INTERVAL)));
        let inner = Inner::Committed {
            committed: Box::new(committed),
        };
        let stream = EventStream::new(guard, inner, content, self.peer.take());
        let mut response = Response::new(ResponseBody::events(stream));
        let headers = response.headers_mut();
        let events = HeaderValue::from_static("text/event-stream");
        headers.insert(header::CONTENT_TYPE, events);
        set_unbuffered(headers);
        response
    }
}

/// Returns the response to a call cancelled by this server.
#[cold]
fn json_response<RB: Body>(message: Bytes) -> Response<ResponseBody<RB>> {
    let mut response = Response::new(ResponseBody::bytes(message));
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Returns the response for a client that has disconnected and will not receive it.
#[cold]
fn client_closed_request<RB: Body>() -> Response<ResponseBody<RB>> {
    let mut response = Response::new(ResponseBody::bytes(Bytes::new()));
    if let Ok(status) = StatusCode::from_u16(CLIENT_CLOSED_REQUEST) {
        *response.status_mut() = status;
    }
    response
}
