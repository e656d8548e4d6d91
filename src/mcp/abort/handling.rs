//! The future of a handler's method: what it returns, or why it had to end.

use std::{
    borrow::Cow,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project_lite::pin_project;
use rmcp::{ErrorData, RoleServer, model::RequestId, service::RequestContext};
use tokio::time::{Sleep, sleep};
use tokio_util::sync::WaitForCancellationFutureOwned;

use crate::{
    call::CallInfo, catch_panic::catch_panic, mcp::error_for, observe::HandlerEnd, token::CallToken,
};

pin_project! {
    /// Polls a handler, and drops it when it may be stopped, its call is cancelled and its time is over.
    pub(super) struct Handling<F> {
        #[pin]
        handler: Option<F>,
        handled: Handled,
        #[pin]
        stop: Option<Stop>,
    }
}

/// Which request is handled.
pub(super) struct Handled {
    request: RequestId,
    method: Cow<'static, str>,
    tool: Option<Box<str>>,
    call: Option<CallToken>,
}

pin_project! {
    /// When a handler is to be stopped: some time after its token fired.
    pub(super) struct Stop {
        #[pin]
        cancelled: WaitForCancellationFutureOwned,
        window: Duration,
        // Boxed, because nearly no call ever needs it.
        closing: Option<Pin<Box<Sleep>>>,
    }
}

// === impl Handling ===

impl<F> Handling<F> {
    /// Calls the method. It may panic in there, before it returns its future.
    pub(super) fn new(handled: Handled, stop: Option<Stop>, method: impl FnOnce() -> F) -> Self {
        let handler = catch_panic(method);
        Self {
            handler,
            handled,
            stop,
        }
    }
}

impl<F, T> Future for Handling<F>
where
    F: Future<Output = Result<T, ErrorData>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        // First the handler: what it returns in its last moment counts.
        let polled = catch_panic(|| {
            let handler = this.handler.as_mut().as_pin_mut();
            handler.map(|handler| handler.poll(cx))
        });
        match polled {
            Some(Some(Poll::Pending)) => {}
            Some(Some(ready)) => return ready,
            Some(None) | None => {
                let_go(this.handler);
                this.handled.say(HandlerEnd::Panicked);
                let message = "The handler panicked";
                return Poll::Ready(Err(ErrorData::internal_error(message, None)));
            }
        }
        match this.stop.as_pin_mut() {
            Some(stop) => ready!(stop.poll(cx)),
            None => return Poll::Pending,
        }
        let_go(this.handler);
        this.handled.say(HandlerEnd::Stopped);
        Poll::Ready(Err(error_for(None)))
    }
}

/// Drops a handler. Its destructors are the user's: they may panic.
fn let_go<F>(mut handler: Pin<&mut Option<F>>) {
    catch_panic(|| handler.set(None));
}

// === impl Handled ===

impl Handled {
    /// Has the token that the handler sees fire with the call's own. It is the context's alone: rmcp made it as a
    /// child of the token that it keeps for the request.
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

    /// For handlers that are not served through the layer, which knows the tool.
    pub(super) fn with_tool(mut self, tool: &str) -> Self {
        if self.call.is_none() {
            self.tool = Some(tool.into());
        }
        self
    }

    fn say(&self, end: HandlerEnd) {
        let request = (&self.request).into();
        let exchange = self.call.as_ref().map(|call| call.exchange());
        let call = exchange.and_then(|exchange| exchange.call_with(&request));
        let tool = call.and_then(CallInfo::tool).or(self.tool.as_deref());
        let call = call.zip(exchange.map(|exchange| exchange.session_ids()));
        end.log(call, &request, &self.method, tool);
    }
}

// === impl Stop ===

impl Stop {
    pub(super) fn new(context: &RequestContext<RoleServer>, window: Duration) -> Self {
        Self {
            cancelled: context.ct.clone().cancelled_owned(),
            window,
            closing: None,
        }
    }

    /// Ready when the handler has to go.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        if this.closing.is_none() {
            ready!(this.cancelled.poll(cx));
            if this.window.is_zero() {
                return Poll::Ready(());
            }
        }
        let closing = this
            .closing
            .get_or_insert_with(|| Box::pin(sleep(*this.window)));
        closing.as_mut().poll(cx)
    }
}
