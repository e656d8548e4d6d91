//! Limits how long request bodies may take, and how much memory they take up in total.
//!
//! All bodies received on a listener share one capacity. A body takes capacity for every byte read, and only returns it when
//! dropped. If there is not enough capacity left, the body fails right away instead of waiting. Otherwise, bodies holding
//! capacity could all end up waiting for each other.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{BoxError, body::Bytes};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Limited;
use hyper::body::Incoming;
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, Sleep, sleep},
};

use crate::refusal::BodyError;

/// How long the next [`BODY_PROGRESS`] bytes of a body, or the rest of it, may take.
const BODY_TIMEOUT: Duration = Duration::from_secs(30);

/// Number of bytes after which [`BODY_TIMEOUT`] restarts.
///
/// This way, a client sending 2.2 KB/s does not time out.
const BODY_PROGRESS: usize = 64 * 1024;

/// Capacity for request body bytes. Clones share it.
#[derive(Debug, Clone)]
pub(super) struct Capacity(Arc<Semaphore>);

/// A request body that takes up capacity and must keep making progress.
#[derive(Debug)]
pub(super) struct TimedBody {
    inner: Limited<Incoming>,
    capacity: Capacity,
    taken: Option<OwnedSemaphorePermit>,
    /// Set the first time the body is pending.
    deadline: Option<Pin<Box<Sleep>>>,
    /// Number of bytes received since the deadline was last reset, or since the body started.
    received: usize,
}

// === impl Capacity ===

impl Capacity {
    pub(super) fn new(bytes: usize) -> Self {
        Self(Arc::new(Semaphore::new(bytes)))
    }
}

// === impl TimedBody ===

impl TimedBody {
    pub(super) fn new(body: Incoming, size: usize, capacity: Capacity) -> Self {
        Self {
            inner: Limited::new(body, size),
            capacity,
            taken: None,
            deadline: None,
            received: 0,
        }
    }

    /// Takes capacity for `bytes` bytes. Returns `false` if there is not enough.
    fn take(&mut self, bytes: usize) -> bool {
        let Ok(permits) = u32::try_from(bytes) else {
            return false;
        };
        let Ok(taken) = self.capacity.0.clone().try_acquire_many_owned(permits) else {
            return false;
        };
        if let Some(held) = &mut self.taken {
            held.merge(taken);
        } else {
            self.taken = Some(taken);
        }
        true
    }

    /// Returns `true` once the deadline has passed. The deadline is reset every [`BODY_PROGRESS`] bytes.
    fn poll_deadline(&mut self, cx: &mut Context<'_>) -> bool {
        let deadline = self
            .deadline
            .get_or_insert_with(|| Box::pin(sleep(BODY_TIMEOUT)));
        if self.received >= BODY_PROGRESS {
            self.received = 0;
            deadline.as_mut().reset(Instant::now() + BODY_TIMEOUT);
        }
        deadline.as_mut().poll(cx).is_ready()
    }
}

impl Body for TimedBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = Pin::new(&mut self.inner).poll_frame(cx);
        if polled.is_pending() && self.poll_deadline(cx) {
            return Poll::Ready(Some(Err(BodyError::TooSlow.into())));
        }
        let frame = ready!(polled);
        let length = match &frame {
            Some(Ok(frame)) => frame.data_ref().map_or(0, Bytes::len),
            _ => 0,
        };
        self.received += length;
        if self.take(length) {
            Poll::Ready(frame)
        } else {
            Poll::Ready(Some(Err(BodyError::NoRoom.into())))
        }
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
