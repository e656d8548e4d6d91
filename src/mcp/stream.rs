//! The event stream of a call, with the call's end seen in it.

use std::{
    fmt,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::{
    Stream, StreamExt,
    future::{Either, select},
};
use rmcp::{
    model::{JsonRpcMessage, RequestId},
    transport::streamable_http_server::session::ServerSseMessage,
};

use crate::{
    call::{CallId, Outcome},
    exchange::Exchange,
};

/// The inner manager's stream of a call.
///
/// Dropped before its end, while the call goes on, it is read on by a task: then the call is known to
/// complete, and its session is never blocked by a channel that nobody reads.
pub(super) struct CallStream<S: Stream<Item = ServerSseMessage> + Send + 'static> {
    // Boxed because a drop must be able to hand it to the task, and it may not be `Unpin`. One
    // allocation of the stream's size, which is a pointer for rmcp's own manager.
    stream: Option<Pin<Box<S>>>,
    call: Option<BoundCall>,
}

/// A call whose end is watched for. Dropped before it, the end is unknown.
pub(super) struct BoundCall {
    exchange: Arc<Exchange>,
    id: CallId,
    request_id: RequestId,
}

// === impl CallStream ===

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> CallStream<S> {
    pub(super) fn new(stream: S, call: Option<BoundCall>) -> Self {
        Self {
            stream: Some(Box::pin(stream)),
            call,
        }
    }
}

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> Stream for CallStream<S> {
    type Item = ServerSseMessage;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let this = &mut *self;
        let Some(stream) = &mut this.stream else {
            return Poll::Ready(None);
        };
        let event = ready!(stream.as_mut().poll_next(cx));
        match &event {
            Some(event) => {
                if let Some(call) = this.call.take_if(|call| call.is_answered_by(event)) {
                    call.end(Outcome::Completed);
                }
            }
            None => {
                this.stream = None;
                this.call = None;
            }
        }
        Poll::Ready(event)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.stream.as_ref().map_or((0, Some(0)), Stream::size_hint)
    }
}

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> Drop for CallStream<S> {
    fn drop(&mut self) {
        let (Some(stream), Some(call)) = (self.stream.take(), self.call.take()) else {
            return;
        };
        let exchange = call.exchange.clone();
        if exchange.reason().is_none() {
            exchange.stream_dropped();
            exchange.spawn(read_on(stream, call));
        }
    }
}

impl<S: Stream<Item = ServerSseMessage> + Send + 'static> fmt::Debug for CallStream<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallStream").finish_non_exhaustive()
    }
}

/// Reads a stream to the answer of its call, its end, or the cancel of the call.
async fn read_on(mut stream: Pin<Box<impl Stream<Item = ServerSseMessage>>>, call: BoundCall) {
    let mut cancelled = pin!(call.exchange.token().cancelled_owned());
    while let Either::Left((Some(event), _)) = select(stream.next(), cancelled.as_mut()).await {
        if call.is_answered_by(&event) {
            return call.end(Outcome::Completed);
        }
    }
}

// === impl BoundCall ===

impl BoundCall {
    pub(super) fn new(exchange: Arc<Exchange>, id: CallId, request_id: RequestId) -> Self {
        Self {
            exchange,
            id,
            request_id,
        }
    }

    fn is_answered_by(&self, event: &ServerSseMessage) -> bool {
        match event.message.as_deref() {
            Some(JsonRpcMessage::Response(response)) => response.id == self.request_id,
            Some(JsonRpcMessage::Error(error)) => error.id.as_ref() == Some(&self.request_id),
            _ => false,
        }
    }

    pub(super) fn end(self, outcome: Outcome) {
        self.exchange.stream_ended(self.id, outcome);
    }
}

impl Drop for BoundCall {
    fn drop(&mut self) {
        self.exchange.stream_ended(self.id, Outcome::Unknown);
    }
}
