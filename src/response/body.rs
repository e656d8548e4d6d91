//! The response body, from the head until it ends.
//!
//! Dropping the body before it has ended is treated as a disconnect. It has ended as soon as one of the following is true, in
//! the order in which hyper can notice them:
//!
//! 1. the body reports that it has ended ([`Body::is_end_stream`]), even before the first poll;
//! 2. the body's length is known and all its bytes have been sent, so hyper does not poll it again;
//! 3. a frame contains trailers, which nothing may follow (RFC 9110, section 6.5), so hyper does not poll it again, either;
//! 4. a poll returns `None`.
//!
//! An error is treated as a disconnect, too, because the client has not received its answer and its connection is closed.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::{PeerClosed, is_ready, stream::EventStream};
use crate::{call::DetachCause, either_body::EitherBody, exchange::Guard};

pin_project! {
    /// The body of a response from [`CancelOnDisconnect`](crate::CancelOnDisconnect).
    ///
    /// Dropping it before it has ended is treated as a disconnect.
    ///
    /// The inner body is forwarded frame by frame. While an event stream is quiet, the layer injects probes between its events
    /// ([`keep_alive`](crate::CancelOnDisconnectLayer::keep_alive)). If this server cancels the call, the layer injects an error
    /// for the client. With a [`stall_timeout`](crate::CancelOnDisconnectLayer::stall_timeout), the layer also splits large
    /// frames of events.
    ///
    /// [`CancelOnDisconnect`](crate::CancelOnDisconnect) has an example. The default body is empty:
    ///
    /// ```
    /// use axum::body::Body;
    /// use http_body::Body as _;
    /// use mcp_cancel_on_disconnect::body::ResponseBody;
    ///
    /// assert!(ResponseBody::<Body>::default().is_end_stream());
    /// ```
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProj]
    enum Kind<B> {
        Plain {
            // Declared first, so that the token fires before the inner body's destructors run.
            guard: Guard,
            #[pin]
            source: EitherBody<B>,
            // Number of bytes left, or `None` if unknown.
            remaining: Option<u64>,
            // `None` if the connection is not watched or has been closed.
            peer: Option<PeerClosed>,
        },
        Events { stream: EventStream<B> },
    }
}

// === impl ResponseBody ===

impl<B: Body> ResponseBody<B> {
    /// Creates a body of `remaining` bytes, or of unknown length if `remaining` is `None`.
    ///
    /// The body ends early if the client closes its connection (`peer`) while the inner body is pending.
    pub(super) fn plain(
        mut guard: Guard,
        inner: B,
        remaining: Option<u64>,
        peer: Option<PeerClosed>,
    ) -> Self {
        if inner.is_end_stream() || remaining == Some(0) {
            guard.complete();
        }
        let source = EitherBody::body(inner);
        Self {
            kind: Kind::Plain {
                guard,
                source,
                remaining,
                peer,
            },
        }
    }

    pub(super) fn events(stream: EventStream<B>) -> Self {
        Self {
            kind: Kind::Events { stream },
        }
    }

    /// Creates a body of `bytes`, which replaces the inner one.
    pub(super) fn bytes(bytes: Bytes) -> Self {
        Self::inert(EitherBody::bytes(bytes))
    }
}

impl<B> ResponseBody<B> {
    fn inert(source: EitherBody<B>) -> Self {
        Self {
            kind: Kind::Plain {
                guard: Guard::inert(),
                source,
                remaining: None,
                peer: None,
            },
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
        let (guard, mut source, remaining, peer) = match self.project().kind.project() {
            KindProj::Events { stream } => return stream.poll_frame(cx),
            KindProj::Plain {
                guard,
                source,
                remaining,
                peer,
            } => (guard, source, remaining, peer),
        };
        let polled = {
            let _polling = guard.poll_guard();
            source.as_mut().poll_frame(cx)
        };
        let polled = match polled {
            Poll::Ready(polled) => polled,
            Poll::Pending if is_ready(peer, cx) => {
                *peer = None;
                guard.report_dropped(DetachCause::PeerClosed);
                return Poll::Ready(None);
            }
            Poll::Pending => return Poll::Pending,
        };
        match &polled {
            Some(Ok(frame)) => {
                if let (Some(remaining), Some(data)) = (remaining.as_mut(), frame.data_ref()) {
                    *remaining = remaining.saturating_sub(data.remaining() as u64);
                }
                if *remaining == Some(0) || frame.is_trailers() || source.is_end_stream() {
                    guard.complete();
                }
            }
            Some(Err(_)) => guard.report_dropped(DetachCause::ResponseDropped),
            None => guard.complete(),
        }
        Poll::Ready(polled)
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Plain { source, .. } => source.is_end_stream(),
            Kind::Events { stream } => stream.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Plain { source, .. } => source.size_hint(),
            Kind::Events { stream } => stream.size_hint(),
        }
    }
}

impl<B: Default> Default for ResponseBody<B> {
    /// Returns an empty body that belongs to no call.
    ///
    /// Outer layers can use it for their own responses.
    fn default() -> Self {
        Self::inert(EitherBody::body(B::default()))
    }
}

impl<B> fmt::Debug for ResponseBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseBody").finish_non_exhaustive()
    }
}
