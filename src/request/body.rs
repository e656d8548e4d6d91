//! The request body: a tee that never delays, re-frames or alters it.
//!
//! The tee holds on to the reference-counted frames until the body has ended, and then hands them to the [`Exchange`], which
//! parses them only if no session manager has bound the call.

use std::{
    fmt, mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes};
use http::{Method, Request};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::{
    call::DetachCause,
    either_body::EitherBody,
    envelope::{Frames, ParseFailure, UnparsedBody},
    exchange::Exchange,
    headers::{self, Header, McpHeaders},
};

pin_project! {
    /// The request body that the layer passes to the inner service.
    ///
    /// The client's body is passed through unchanged, frame by frame. If the layer is replaying a cancellation, the body is the
    /// `notifications/cancelled` message.
    ///
    /// If the inner service accepts only one body type, map the body:
    ///
    /// ```
    /// use axum::{body::Body, middleware::from_fn, routing::post, Router};
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    /// use tower::{ServiceBuilder, ServiceExt};
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// let stack = ServiceBuilder::new()
    ///     .layer(CancelOnDisconnectLayer::new())
    ///     .map_request(|request: http::Request<_>| request.map(Body::new))
    ///     .layer(from_fn(|request, next: axum::middleware::Next| next.run(request)));
    /// let app: Router = Router::new().route("/mcp", post(async || "ok")).layer(stack);
    /// let request = http::Request::post("/mcp").body(Body::empty()).unwrap();
    /// assert_eq!(app.oneshot(request).await.unwrap().status(), 200);
    /// # }
    /// ```
    pub struct TeeBody<B> {
        #[pin]
        source: EitherBody<B>,
        observer: Option<BodyObserver>,
    }
}

/// Reports to the exchange when the body ends.
struct BodyObserver {
    exchange: Arc<Exchange>,
    capture: Capture,
}

/// How a body is captured.
pub(crate) enum Capture {
    /// The body is not captured, and its end is not reported.
    Off,
    /// The body might be a JSON-RPC message, so its frames are captured.
    On(Frames),
    /// The body will not be parsed, so only its end is reported.
    Unparsed(UnparsedBody),
}

// === impl TeeBody ===

impl<B> TeeBody<B> {
    /// Creates a body that is passed through unobserved.
    pub(crate) fn passthrough(body: B) -> Self {
        Self {
            source: EitherBody::body(body),
            observer: None,
        }
    }

    /// Creates the body of a replayed cancellation.
    pub(crate) fn replay(content: Bytes) -> Self {
        Self {
            source: EitherBody::bytes(content),
            observer: None,
        }
    }

    /// Observes a request body for `exchange`.
    pub(crate) fn observed(
        request: Request<B>,
        exchange: Arc<Exchange>,
        capture: Capture,
    ) -> Request<Self> {
        request.map(|body| Self {
            source: EitherBody::body(body),
            observer: Some(BodyObserver { exchange, capture }),
        })
    }
}

impl<B> Body for TeeBody<B>
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
        let polled = ready!(this.source.as_mut().poll_frame(cx));
        let Some(observer) = this.observer else {
            return Poll::Ready(polled);
        };
        Poll::Ready(match polled {
            Some(Ok(frame)) => {
                let frame = observer.observe(frame);
                // Nothing follows trailers, and the reader might not poll again.
                if frame.is_trailers() || this.source.is_end_stream() {
                    observer.finish();
                }
                Some(Ok(frame))
            }
            Some(Err(error)) => {
                // This error is the only sign that the client has disconnected mid-request.
                observer
                    .exchange
                    .on_dropped(DetachCause::Disconnected, None);
                Some(Err(error))
            }
            None => {
                observer.finish();
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

impl<B> fmt::Debug for TeeBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TeeBody").finish_non_exhaustive()
    }
}

// === impl BodyObserver ===

impl BodyObserver {
    /// Captures a frame, and returns an identical one.
    fn observe<D: Buf + From<Bytes>>(&mut self, frame: Frame<D>) -> Frame<D> {
        let Capture::On(frames) = &mut self.capture else {
            return frame;
        };
        match frame.into_data() {
            Ok(mut data) => {
                let bytes = data.copy_to_bytes(data.remaining());
                if !frames.push(bytes.clone()) {
                    let frames = mem::take(frames);
                    self.capture = Capture::Unparsed(frames.unparsed(ParseFailure::TooLarge));
                }
                Frame::data(bytes.into())
            }
            Err(trailers) => trailers,
        }
    }

    fn finish(&mut self) {
        match mem::replace(&mut self.capture, Capture::Off) {
            Capture::Off => {}
            Capture::On(frames) => self.exchange.on_body_ended(Ok(frames)),
            Capture::Unparsed(body) => self.exchange.on_body_ended(Err(body)),
        }
    }
}

impl Drop for BodyObserver {
    fn drop(&mut self) {
        match mem::replace(&mut self.capture, Capture::Off) {
            Capture::Off => {}
            Capture::On(frames) => {
                let body = frames.unparsed(ParseFailure::NotRead);
                self.exchange.on_body_dropped(body);
            }
            Capture::Unparsed(body) => self.exchange.on_body_dropped(body),
        }
    }
}

// === impl Capture ===

impl Capture {
    /// Returns how to capture a request's body, judging by the request head.
    pub(crate) fn for_request(method: &Method, headers: &McpHeaders<'_>) -> Self {
        if method != Method::POST {
            return Self::Off;
        }
        match headers.content_type {
            Header::One(value) if headers::is_media_type(value, "application/json") => {}
            Header::Absent => return Self::unparsed(ParseFailure::ContentType, false),
            Header::One(_) | Header::Several(_) => {
                let is_ambiguous = !headers::is_certainly_not_json(headers.content_type);
                return Self::unparsed(ParseFailure::ContentType, is_ambiguous);
            }
        }
        if headers.is_encoded {
            return Self::unparsed(ParseFailure::ContentEncoding, true);
        }
        Self::On(Frames::default())
    }

    fn unparsed(reason: ParseFailure, is_ambiguous: bool) -> Self {
        Self::Unparsed(UnparsedBody {
            reason,
            is_ambiguous,
        })
    }
}
