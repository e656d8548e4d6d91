//! Limits how long a request body may pause.
//!
//! Without this limit, a client that sends half a body and then stays connected would block every task waiting for the rest.

use std::{
    error::Error,
    fmt,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::Body;
use bytes::Bytes;
use http_body::{Body as _, Frame, SizeHint};
use tokio::time::{Sleep, sleep};

/// How long a request body may pause while it is being read.
///
/// Long enough for lost packets to be retransmitted on any working link.
pub(crate) const BODY_IDLE_TIMEOUT: Duration = Duration::from_secs(30);

/// The error for a request body that has made no progress for [`BODY_IDLE_TIMEOUT`].
#[derive(Debug)]
struct BodyStalled;

/// A body that fails with [`BodyStalled`] if it pauses for too long while it is being read.
struct IdleTimeoutBody {
    body: Body,
    /// The time left for the next frame, or `None` if the reader is not waiting for a frame.
    ///
    /// A body that is not being read cannot stall.
    timer: Option<Pin<Box<Sleep>>>,
}

/// Wraps a body so that reading it fails if no data arrives for [`BODY_IDLE_TIMEOUT`].
pub(crate) fn with_idle_timeout(body: Body) -> Body {
    if body.is_end_stream() {
        return body;
    }
    Body::new(IdleTimeoutBody { body, timer: None })
}

/// Returns `true` if an error was caused by a stalled body.
pub(crate) fn is_stalled(error: &(dyn Error + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        if error.is::<BodyStalled>() {
            return true;
        }
        next = error.source();
    }
    false
}

// === impl IdleTimeoutBody ===

impl http_body::Body for IdleTimeoutBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let this = &mut *self;
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.timer = None;
            return Poll::Ready(frame);
        }
        let timer = this
            .timer
            .get_or_insert_with(|| Box::pin(sleep(BODY_IDLE_TIMEOUT)));
        let expired = timer.as_mut().poll(cx);
        expired.map(|()| Some(Err(axum::Error::new(BodyStalled))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

// === impl BodyStalled ===

impl fmt::Display for BodyStalled {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "no request body data received for {} s",
            BODY_IDLE_TIMEOUT.as_secs()
        )
    }
}

impl Error for BodyStalled {}

#[cfg(test)]
mod tests {
    use std::io;

    use futures_util::{StreamExt as _, stream};
    use http_body_util::BodyExt as _;
    use tokio::time::Instant;

    use super::*;

    /// Returns a body of `frame_count` frames, with `pause` before each. It then ends if `is_complete`, and stalls otherwise.
    fn body(frame_count: u64, pause: Duration, is_complete: bool) -> Body {
        let frames = stream::iter(0..frame_count).then(move |_| async move {
            sleep(pause).await;
            Ok::<_, io::Error>(Bytes::from_static(b"x"))
        });
        let rest = if is_complete {
            stream::empty().boxed()
        } else {
            stream::pending().boxed()
        };
        with_idle_timeout(Body::from_stream(frames.chain(rest)))
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_makes_progress_may_take_any_time() {
        let slow = BODY_IDLE_TIMEOUT - Duration::from_millis(1);
        let whole = body(100, slow, true).collect().await.unwrap();
        assert_eq!(whole.to_bytes().len(), 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_stalls_fails() {
        let started = Instant::now();
        let second = Duration::from_secs(1);
        let error = body(2, second, false).collect().await.unwrap_err();
        assert_eq!(started.elapsed(), 2 * second + BODY_IDLE_TIMEOUT);
        assert!(is_stalled(&error), "{error}");
        assert!(!is_stalled(&axum::Error::new(io::Error::other("reset"))));
    }

    #[tokio::test(start_paused = true)]
    async fn a_body_that_is_not_read_does_not_stall() {
        let mut body = body(2, Duration::from_secs(1), true);
        for _ in 0..2 {
            sleep(2 * BODY_IDLE_TIMEOUT).await;
            assert!(body.frame().await.unwrap().is_ok());
        }
        assert!(body.frame().await.is_none());
    }
}
