//! The response body that reads a stream.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Response, header};
use http_body::Frame;
use tokio::time::Instant;

use super::Stream;
use crate::event_store::ring::{ReaderId, Start, Taken};

/// Reads a stream until it ends, or until another reader replaces this one.
struct ReaderBody {
    stream: Stream,
    id: ReaderId,
    /// Sent before any other event.
    position_event: Option<Bytes>,
}

// === impl Stream ===

impl Stream {
    /// Attaches a reader in place of the current one, and returns its response.
    ///
    /// If `with_position` is set, the reader first gets a position event, unless it starts at the very first event. If `from`
    /// is [`Start::After`], returns `None` if the event never existed or the stream has dropped all of its events.
    pub(super) fn read(&self, from: Start, with_position: bool) -> Option<Response<Body>> {
        let (id, position_event, previous) = {
            let mut state = self.state();
            let id = state.ring.attach(from)?;
            if state.ring.is_in_progress() {
                // The mark is set again once this reader has taken everything.
                state.is_evictable = false;
            }
            let position_event = state.ring.position_event(id).filter(|_| with_position);
            (id, position_event, state.reader.take())
        };
        if let Some(previous) = previous {
            previous.wake();
        }
        self.0.reader_progress.notify_waiters();
        let reader_body = ReaderBody {
            stream: self.clone(),
            id,
            position_event,
        };
        Some(event_stream(Body::new(reader_body)))
    }
}

/// Returns an event stream response, with headers that forbid caching and buffering.
fn event_stream(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/event-stream"),
    );
    headers.insert(
        header::CACHE_CONTROL,
        HeaderValue::from_static("no-cache, no-transform"),
    );
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

// === impl ReaderBody ===

impl http_body::Body for ReaderBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(position_event) = self.position_event.take() {
            return Poll::Ready(Some(Ok(Frame::data(position_event))));
        }
        let inner = &self.stream.0;
        let mut state = self.stream.state();
        match state.ring.take(self.id) {
            Taken::Frame(bytes) => {
                drop(state);
                inner.reader_progress.notify_waiters();
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Taken::Wait => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            Taken::End => {
                let is_fully_read = state.ring.is_fully_read_by(self.id);
                let is_first = is_fully_read && !std::mem::replace(&mut state.is_evictable, true);
                let until = state.until.filter(|_| is_first);
                drop(state);
                if let Some(until) = until {
                    self.stream.mark_evictable(until);
                }
                Poll::Ready(None)
            }
        }
    }
}

impl Drop for ReaderBody {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.stream.state();
            state.ring.detach(self.id);
            state.detached_at = Some(Instant::now());
            state.reader.take()
        };
        // Don't lose the waker, which may belong to a reader that has replaced this one.
        if let Some(waker) = waker {
            waker.wake();
        }
        self.stream.0.reader_progress.notify_waiters();
    }
}
