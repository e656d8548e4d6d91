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
use crate::hub::ring::{ReaderName, Start, Taken};

/// Reads a stream until it ends, or until another one takes over.
struct Reading {
    stream: Stream,
    name: ReaderName,
    /// What it gets before all events.
    mark: Option<Bytes>,
}

// === impl Stream ===

impl Stream {
    /// Has a reader begin there. If it is `marked` it first gets an event that names where it is.
    pub(super) fn read(&self, from: Start, marked: bool) -> Option<Response<Body>> {
        let (name, mark, former) = {
            let mut state = self.state();
            let name = state.ring.attach(from)?;
            let mark = state.ring.mark(name).filter(|_| marked);
            (name, mark, state.reader.take())
        };
        if let Some(former) = former {
            former.wake();
        }
        self.0.moved.notify_waiters();
        let reading = Reading {
            stream: self.clone(),
            name,
            mark,
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
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if let Some(mark) = self.mark.take() {
            return Poll::Ready(Some(Ok(Frame::data(mark))));
        }
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
                    self.stream.is_spare(until);
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
