//! The response body: from the head to the end.
//!
//! A body that is dropped before its end was abandoned. What counts as the end, in the order in which hyper
//! may show it:
//!
//! 1. the body says it is at its end ([`Body::is_end_stream`]), also before the first poll;
//! 2. all bytes of a body of known length have passed: hyper polls it no more;
//! 3. `None`.
//!
//! An error is no end: the client did not get its answer and its connection is closed.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::{
    call::CancelReason,
    exchange::{Guard, Tap},
    source::Source,
};

pin_project! {
    /// The body of a response that passed [`CancelOnDisconnect`](crate::CancelOnDisconnect): the inner
    /// body, frame by frame. Dropped before its end, it abandons its calls.
    pub struct ResponseBody<B> {
        // First, so that the token fires before the inner body's destructors run.
        guard: Guard,
        #[pin]
        source: Source<B>,
        // How many bytes are to come, where the inner body said it at first.
        remaining: Option<u64>,
    }
}

// === impl ResponseBody ===

impl<B: Body> ResponseBody<B> {
    pub(crate) fn new(mut guard: Guard, inner: B) -> Self {
        let remaining = inner.size_hint().exact();
        if inner.is_end_stream() || remaining == Some(0) {
            guard.complete();
        }
        Self {
            guard,
            source: Source::body(inner),
            remaining,
        }
    }

    /// One event in place of the inner body.
    pub(crate) fn event(event: Bytes) -> Self {
        Self {
            guard: Guard::inert(),
            source: Source::bytes(event),
            remaining: None,
        }
    }
}

impl<B> Body for ResponseBody<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let mut this = self.project();
        let polled = {
            let _polling = this.guard.polling();
            ready!(this.source.as_mut().poll_frame(cx))
        };
        Poll::Ready(match polled {
            Some(Ok(frame)) => {
                if let (Some(remaining), Some(data)) = (this.remaining.as_mut(), frame.data_ref()) {
                    *remaining = remaining.saturating_sub(data.remaining() as u64);
                }
                let frame = match this.guard.tap() {
                    Some(tap) => read(tap, frame),
                    None => frame,
                };
                if *this.remaining == Some(0) || this.source.is_end_stream() {
                    this.guard.complete();
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                this.guard.abandon(CancelReason::ResponseDropped);
                Some(Err(error))
            }
            None => {
                this.guard.complete();
                None
            }
        })
    }

    fn is_end_stream(&self) -> bool {
        self.source.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.source.size_hint()
    }
}

/// Reads a frame. What goes on is the same bytes in the same frame.
fn read<D: Buf + From<Bytes>>(tap: &mut Tap, frame: Frame<D>) -> Frame<D> {
    match frame.into_data() {
        Ok(mut data) => {
            let bytes = data.copy_to_bytes(data.remaining());
            tap.read(&bytes);
            Frame::data(bytes.into())
        }
        Err(trailers) => trailers,
    }
}

impl<B: Default> Default for ResponseBody<B> {
    /// An empty body that belongs to no call, as layers outside make one for their own answers.
    fn default() -> Self {
        Self {
            guard: Guard::inert(),
            source: Source::body(B::default()),
            remaining: None,
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
