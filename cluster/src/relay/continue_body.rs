//! A relayed call's body, sent once the peer requests it (`Expect: 100-continue`).
//!
//! Until a peer requests the body, it cannot have started the call. If the connection breaks before that, the call can be resent, no matter
//! how long its body is.

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use crate::lock::lock;

use axum::body::Body;
use bytes::Bytes;
use futures_util::task::AtomicWaker;
use http_body::{Body as _, Frame, SizeHint};

/// Tracks whether the peer has requested the body. Clones share the state.
#[derive(Clone)]
pub(crate) struct ContinueSignal(Arc<Deferred>);

/// The state shared by a [`ContinueSignal`] and its [`ContinueBody`].
struct Deferred {
    is_signalled: AtomicBool,
    waker: AtomicWaker,
    /// The body, until it is sent or taken back.
    body: Mutex<Option<Body>>,
}

/// The body passed to the connection. It yields the deferred body once the peer requests it.
struct ContinueBody {
    signal: ContinueSignal,
    /// The deferred body's length, if known.
    length: Option<u64>,
    body: Option<Body>,
}

// === impl ContinueSignal ===

impl ContinueSignal {
    /// Defers a body, and returns the signal and the body to send.
    pub(crate) fn defer(body: Body) -> (Self, Body) {
        let length = body.size_hint().exact();
        let signal = Self(Arc::new(Deferred {
            is_signalled: AtomicBool::new(false),
            waker: AtomicWaker::new(),
            body: Mutex::new(Some(body)),
        }));
        let body = ContinueBody {
            signal: signal.clone(),
            length,
            body: None,
        };
        (signal, Body::new(body))
    }

    /// Called when the peer requests the body.
    pub(crate) fn on_continue(&self) {
        self.0.is_signalled.store(true, Ordering::Release);
        self.0.waker.wake();
    }

    /// Returns `true` if the peer has requested the body.
    pub(crate) fn is_signalled(&self) -> bool {
        self.0.is_signalled.load(Ordering::Acquire)
    }

    /// Takes the body back, unless the peer has requested it or it has already been taken back.
    pub(crate) fn take_back(&self) -> Option<Body> {
        let mut body = self.body();
        if self.is_signalled() {
            None
        } else {
            body.take()
        }
    }

    fn body(&self) -> MutexGuard<'_, Option<Body>> {
        lock(&self.0.body)
    }
}

// === impl ContinueBody ===

impl http_body::Body for ContinueBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if this.body.is_none() {
            // Register the waker before checking, so that a signal in between is not missed.
            this.signal.0.waker.register(cx.waker());
            if !this.signal.is_signalled() {
                return Poll::Pending;
            }
            this.body = this.signal.body().take();
        }
        match &mut this.body {
            Some(body) => Pin::new(body).poll_frame(cx),
            None => Poll::Ready(Some(Err(axum::Error::new("the body has been taken back")))),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_some_and(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        match &self.body {
            Some(body) => body.size_hint(),
            None => self.length.map_or_else(SizeHint::new, SizeHint::with_exact),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;

    use super::*;

    #[tokio::test]
    async fn a_body_is_sent_when_it_is_requested() {
        let (signal, body) = ContinueSignal::defer(Body::from("call"));
        assert_eq!(body.size_hint().exact(), Some(4));
        let sent = tokio::spawn(body.collect());
        tokio::task::yield_now().await;
        assert!(!sent.is_finished());
        assert!(!signal.is_signalled());
        signal.on_continue();
        assert!(signal.is_signalled());
        assert_eq!(sent.await.unwrap().unwrap().to_bytes(), "call");
        assert!(signal.take_back().is_none());
    }

    #[tokio::test]
    async fn a_body_that_the_peer_did_not_request_is_taken_back_and_not_sent() {
        let (signal, mut sent) = ContinueSignal::defer(Body::from("call"));
        assert!(sent.frame().now_or_never().is_none());
        let body = signal.take_back().unwrap();
        signal.on_continue();
        assert!(sent.frame().await.unwrap().is_err());
        assert_eq!(body.collect().await.unwrap().to_bytes(), "call");
    }
}
