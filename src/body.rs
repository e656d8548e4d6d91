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

use bytes::Buf;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::{call::CancelReason, exchange::Guard};

pin_project! {
    /// The body of a response that passed [`CancelOnDisconnect`](crate::CancelOnDisconnect): the inner
    /// body, frame by frame. Dropped before its end, it abandons its calls.
    pub struct ResponseBody<B> {
        // First, so that the token fires before the inner body's destructors run.
        guard: Guard,
        #[pin]
        inner: B,
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
            inner,
            remaining,
        }
    }
}

impl<B: Body> Body for ResponseBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Self::Data>, Self::Error>>> {
        let mut this = self.project();
        let polled = {
            let _polling = this.guard.polling();
            ready!(this.inner.as_mut().poll_frame(cx))
        };
        match &polled {
            Some(Ok(frame)) => {
                if let (Some(remaining), Some(data)) = (this.remaining.as_mut(), frame.data_ref()) {
                    *remaining = remaining.saturating_sub(data.remaining() as u64);
                }
                if *this.remaining == Some(0) || this.inner.is_end_stream() {
                    this.guard.complete();
                }
            }
            Some(Err(_)) => this.guard.abandon(CancelReason::ResponseDropped),
            None => this.guard.complete(),
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

impl<B: Default> Default for ResponseBody<B> {
    /// An empty body that belongs to no call, as layers outside make one for their own answers.
    fn default() -> Self {
        Self {
            guard: Guard::inert(),
            inner: B::default(),
            remaining: None,
        }
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
