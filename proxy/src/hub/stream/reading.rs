//! The body of a response that reads a stream.

use std::{
    convert::Infallible,
    pin::Pin,
    task::{Context, Poll},
};

use axum::body::Body;
use bytes::Bytes;
use http::{HeaderValue, Response, header};
use http_body::Frame;

use super::Stream;
use crate::hub::ring::{ReaderName, Taken};

/// Reads a stream until it ends, or until another one takes over.
struct Reading {
    stream: Stream,
    name: ReaderName,
}

// === impl Stream ===

impl Stream {
    pub(super) fn read(&self, after: Option<u64>) -> Option<Response<Body>> {
        let (name, former) = {
            let mut state = self.state();
            (state.ring.attach(after)?, state.reader.take())
        };
        if let Some(former) = former {
            former.wake();
        }
        self.0.moved.notify_waiters();
        let reading = Reading {
            stream: self.clone(),
            name,
        };
        Some(event_stream(Body::new(reading)))
    }
}

/// A response of events that are never to be stored or held back on the way.
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

// === impl Reading ===

impl http_body::Body for Reading {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let inner = &self.stream.0;
        let mut state = self.stream.state();
        match state.ring.take(self.name) {
            Taken::Frame(bytes) => {
                drop(state);
                inner.moved.notify_waiters();
                Poll::Ready(Some(Ok(Frame::data(bytes))))
            }
            Taken::Wait => {
                state.reader = Some(cx.waker().clone());
                Poll::Pending
            }
            Taken::End => {
                let is_over = state.ring.is_over_for(self.name);
                let first = is_over && !std::mem::replace(&mut state.spare, true);
                let until = state.until.filter(|_| first);
                drop(state);
                if let Some(until) = until {
                    inner.session.spare(until, inner.number);
                }
                Poll::Ready(None)
            }
        }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.stream.state();
            state.ring.leave(self.name);
            state.reader.take()
        };
        // That of a reader that took over from this one must not be lost.
        if let Some(waker) = waker {
            waker.wake();
        }
        self.stream.0.moved.notify_waiters();
    }
}
