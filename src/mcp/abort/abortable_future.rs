//! The future that runs a handler's method.
//!
//! It resolves to the handler's result, or to an error if the handler was stopped or panicked.

use std::{
    borrow::Cow,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use rmcp::{ErrorData, RoleServer, model::RequestId, service::RequestContext};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::{
    call::CallInfo, catch_panic::catch_panic, mcp::error_for, observe::HandlerEnd, token::CallToken,
};

pin_project! {
    /// Polls a handler until its [`AbortTimer`] completes, and then drops it. Without a timer, the handler runs to completion.
    pub(super) struct AbortableFuture<F> {
        #[pin]
        handler: Option<F>,
        request_info: RequestInfo,
        #[pin]
        abort_timer: Option<AbortTimer>,
    }
}

/// The request a handler is serving.
pub(super) struct RequestInfo {
    request: RequestId,
    method: Cow<'static, str>,
    tool: Option<Box<str>>,
    call: Option<CallToken>,
}

pin_project! {
    /// Completes when a handler must stop, one grace period after its token fires.
    pub(super) struct AbortTimer {
        #[pin]
        cancelled: WaitForCancellationFutureOwned,
        grace: Duration,
        // Boxed, because few calls need it.
        sleep_until_abort: Option<Pin<Box<Sleep>>>,
    }
}

// === impl AbortableFuture ===

impl<F> AbortableFuture<F> {
    /// Calls the method, which might panic even before returning its future.
    pub(super) fn new(
        request_info: RequestInfo,
        abort_timer: Option<AbortTimer>,
        method: impl FnOnce() -> F,
    ) -> Self {
        let handler = catch_panic(method);
        Self {
            handler,
            request_info,
            abort_timer,
        }
    }
}

impl<F, T> Future for AbortableFuture<F>
where
    F: Future<Output = Result<T, ErrorData>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let mut polled = poll_handler(this.handler.as_mut(), cx);
        if let Some(Poll::Pending) = polled {
            match this.abort_timer.as_pin_mut() {
                Some(timer) => ready!(timer.poll(this.request_info, cx)),
                None => return Poll::Pending,
            }
            // Poll the handler one last time, in case the token fired while it was being polled.
            polled = poll_handler(this.handler.as_mut(), cx);
        }
        let end = match polled {
            Some(Poll::Ready(result)) => return Poll::Ready(result),
            Some(Poll::Pending) => HandlerEnd::Stopped,
            None => HandlerEnd::Panicked,
        };
        drop_handler(this.handler);
        this.request_info.log(end);
        Poll::Ready(Err(match end {
            HandlerEnd::Stopped => error_for(None),
            HandlerEnd::Panicked => ErrorData::internal_error("The handler panicked", None),
        }))
    }
}

/// Polls a handler. Returns `None` if it panics, or if it panicked before returning its future.
fn poll_handler<F: Future>(
    mut handler: Pin<&mut Option<F>>,
    cx: &mut Context<'_>,
) -> Option<Poll<F::Output>> {
    catch_panic(|| {
        handler
            .as_mut()
            .as_pin_mut()
            .map(|handler| handler.poll(cx))
    })?
}

/// Drops a handler, whose destructors are user code and might panic.
fn drop_handler<F>(mut handler: Pin<&mut Option<F>>) {
    catch_panic(|| handler.set(None));
}

// === impl RequestInfo ===

impl RequestInfo {
    /// Creates a description of the request and links the context's token to the call.
    ///
    /// After that, cancelling the call fires that token. Only the context holds it: rmcp creates it as a child of the token it stores
    /// for the request.
    pub(super) fn new(
        context: &RequestContext<RoleServer>,
        method: impl Into<Cow<'static, str>>,
    ) -> Self {
        let call = CallToken::of(context);
        if let Some(call) = &call {
            call.exchange().link(context.ct.clone());
        }
        Self {
            request: context.id.clone(),
            method: method.into(),
            tool: None,
            call,
        }
    }

    /// Sets the tool for a handler without a layer. With a layer, the tool is already known.
    pub(super) fn with_tool(mut self, tool: &str) -> Self {
        if self.call.is_none() {
            self.tool = Some(tool.into());
        }
        self
    }

    /// Returns the call's own token if only a dropped stream fired the context's token.
    ///
    /// A dropped stream must not stop the handler, but if a call has no session, rmcp fires the context's token as soon as the stream is
    /// dropped, regardless of the call's grace period.
    fn outlive_stream(&self) -> Option<CancellationToken> {
        let exchange = self.call.as_ref()?.exchange();
        exchange.outlives_stream(&(&self.request).into())
    }

    fn log(&self, end: HandlerEnd) {
        let request = (&self.request).into();
        let exchange = self.call.as_ref().map(|call| call.exchange());
        let call = exchange.and_then(|exchange| exchange.call_with_request_id(&request));
        let tool = call.and_then(CallInfo::tool).or(self.tool.as_deref());
        let call = call.zip(exchange.map(|exchange| exchange.session_ids()));
        end.log(call, &request, &self.method, tool);
    }
}

// === impl AbortTimer ===

impl AbortTimer {
    pub(super) fn new(context: &RequestContext<RoleServer>, grace: Duration) -> Self {
        Self {
            cancelled: context.ct.clone().cancelled_owned(),
            grace,
            sleep_until_abort: None,
        }
    }

    /// Returns `Ready` when the handler must be dropped.
    fn poll(self: Pin<&mut Self>, request_info: &RequestInfo, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        if this.sleep_until_abort.is_none() {
            ready!(this.cancelled.as_mut().poll(cx));
            if let Some(token) = request_info.outlive_stream() {
                this.cancelled.set(token.cancelled_owned());
                ready!(this.cancelled.poll(cx));
            }
            if this.grace.is_zero() {
                return Poll::Ready(());
            }
        }
        let sleep_until_abort = this
            .sleep_until_abort
            .get_or_insert_with(|| Box::pin(sleep(*this.grace)));
        sleep_until_abort.as_mut().poll(cx)
    }
}
