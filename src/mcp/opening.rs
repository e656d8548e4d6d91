//! A request on its way into the manager inside, and the stream that comes back.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use futures_util::Stream;
use rmcp::transport::streamable_http_server::session::ServerSseMessage;

use super::{
    event_ids::{Seal, Sealed},
    session::InUse,
    stream::{BoundCall, CallStream},
};

/// Opens the stream of a request. `F` is in a box: it holds the message, which is large, and rmcp moves this twice.
pub(super) struct Opening<F> {
    opened: F,
    call: Option<BoundCall>,
    seal: Option<Box<Seal>>,
    /// Last, so that the session is in use until the call is seen to be given up.
    used: Option<InUse>,
}

// === impl Opening ===

impl<F> Opening<F> {
    pub(super) fn new(
        opened: F,
        call: Option<BoundCall>,
        seal: Option<Box<Seal>>,
        used: Option<InUse>,
    ) -> Self {
        Self {
            opened,
            call,
            seal,
            used,
        }
    }
}

impl<F, S, E> Future for Opening<F>
where
    F: Future<Output = Result<S, E>> + Unpin,
    S: Stream<Item = ServerSseMessage> + Send + 'static,
{
    type Output = Result<CallStream<Sealed<S>>, E>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let opened = ready!(Pin::new(&mut self.opened).poll(cx));
        let mut call = self.call.take();
        Poll::Ready(match opened {
            Ok(stream) => {
                if let Some(call) = &mut call {
                    call.opened();
                }
                let sealed = Sealed::new(stream, self.seal.take());
                Ok(CallStream::new(sealed, call, self.used.take()))
            }
            Err(error) => {
                if let Some(call) = call {
                    call.refused();
                }
                Err(error)
            }
        })
    }
}
