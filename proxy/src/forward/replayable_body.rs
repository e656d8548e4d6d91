//! A request body that can be read again if the request fails.
//!
//! This lets the error response carry the request's id.

use std::{
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use axum::body::{Body, Bytes, HttpBody};
use http_body::{Frame, SizeHint};
use http_body_util::BodyExt as _;
use tokio::{sync::oneshot, time::timeout};

/// Maximum size of a request buffered to find its id.
const MAX_BUFFERED: usize = 64 * 1024;

/// How long the rest of a failed request may take to arrive.
const REST_TIMEOUT: Duration = Duration::from_secs(1);

/// A request body that retains the frames it has sent, up to [`MAX_BUFFERED`] bytes.
///
/// Retaining a frame does not copy its bytes.
pub(super) struct ReplayableBody {
    /// Taken when the body is returned, on drop.
    body: Option<Body>,
    sent: SentFrames,
    returned: Option<oneshot::Sender<(SentFrames, Body)>>,
}

/// The frames that a body has sent, up to a limit.
#[derive(Default)]
struct SentFrames {
    frames: Vec<Bytes>,
    bytes: usize,
}

/// Receives the body when the HTTP client drops it.
pub(super) struct Returned(oneshot::Receiver<(SentFrames, Body)>);

// === impl ReplayableBody ===

impl ReplayableBody {
    pub(super) fn new(body: Body) -> (Self, Returned) {
        let (returned, receiver) = oneshot::channel();
        let replayable_body = Self {
            body: Some(body),
            sent: SentFrames::default(),
            returned: Some(returned),
        };
        (replayable_body, Returned(receiver))
    }
}

impl HttpBody for ReplayableBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        let polled = Pin::new(body).poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled
            && let Some(data) = frame.data_ref()
        {
            self.sent.add(data);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.as_ref().is_none_or(HttpBody::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        self.body
            .as_ref()
            .map(HttpBody::size_hint)
            .unwrap_or_default()
    }
}

impl Drop for ReplayableBody {
    fn drop(&mut self) {
        if let (Some(body), Some(returned)) = (self.body.take(), self.returned.take()) {
            // Fails if the request has already been answered.
            let _ = returned.send((std::mem::take(&mut self.sent), body));
        }
    }
}

// === impl SentFrames ===

impl SentFrames {
    fn add(&mut self, data: &Bytes) {
        self.bytes = self.bytes.saturating_add(data.len());
        if self.bytes <= MAX_BUFFERED {
            self.frames.push(data.clone())
        } else {
            self.frames = Vec::new()
        }
    }
}

// === impl Returned ===

impl Returned {
    /// Returns the entire request body, or an empty body if it is too large or arrives too late.
    pub(super) async fn request(self) -> Vec<u8> {
        let request = timeout(REST_TIMEOUT, async {
            let (mut sent, mut rest) = self.0.await.ok()?;
            while let Some(frame) = rest.frame().await {
                if let Some(data) = frame.ok()?.data_ref() {
                    sent.add(data);
                }
                if sent.bytes > MAX_BUFFERED {
                    return None;
                }
            }
            Some(sent.frames.concat())
        });
        request.await.ok().flatten().unwrap_or_default()
    }
}
