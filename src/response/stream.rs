//! A response body that is an event stream, or an answer sent in pieces.
//!
//! It forwards the inner body frame by frame. Between events, the layer injects probes, which detect a disconnected client. If
//! this server cancels the call, the layer also injects the error for the client. If the inner body was dropped mid-event, the
//! layer terminates that event before sending the error.
//!
//! With a stall timeout, the stream delivers large frames in pieces of [`MAX_PIECE`] bytes. hyper polls for the next frame only
//! once it has written the previous frame to the socket, so a client that reads a large frame slowly would otherwise be mistaken
//! for a stalled client.

use std::{
    mem,
    pin::Pin,
    sync::{Arc, Weak},
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, header};
use http_body::{Body, Frame, SizeHint};
use tokio::time::Instant;

use super::{
    PeerClosed, Polled, Sleeper, is_ready,
    slot::{BodySlot, Inner, InnerBody, Next},
    timer,
};
use crate::{
    call::DetachCause,
    exchange::{DeliveryGuard, Exchange, Guard},
    registry::StreamHandle,
    sse::{self, BomFilter, Boundary},
};

/// The header that responses use to disable buffering in nginx.
const X_ACCEL_BUFFERING: HeaderName = HeaderName::from_static("x-accel-buffering");

/// Maximum number of bytes to deliver at once under a stall timeout.
///
/// Same as the default maximum size of an HTTP/2 frame. At 400 KB/s, a client reads only 25 pieces a second, so the overhead is
/// small.
const MAX_PIECE: usize = 16 * 1024;

/// A body that forwards the inner body and injects messages into it.
pub(super) struct EventStream<B> {
    slot: Arc<BodySlot<B>>,
    content: Content,
    /// The rest of a frame being delivered in pieces.
    rest: Bytes,
    peer: Option<PeerClosed>,
    bom_filter: BomFilter,
    /// The exchange of the call this stream resumes.
    resumed: Option<Arc<Exchange>>,
    /// Whether the stream has been registered because it is outliving its call.
    is_registered: bool,
    /// Set while the stream has yet to deliver the answer to an ended call.
    delivering: Option<DeliveryGuard>,
    ended: bool,
}

/// What can be injected into the body.
pub(super) enum Content {
    /// Nothing: the body is encoded, or its length is known. `remaining` is the number of bytes left, if known.
    Passthrough { remaining: Option<u64> },
    /// The answer itself, with the number of bytes left if its length is known.
    ///
    /// As long as only white space has been sent, JSON of unknown length can still be replaced with a cancellation error.
    Answer {
        is_untouched: bool,
        remaining: Option<u64>,
    },
    /// Events, between which messages can be injected.
    Injectable {
        boundary: Boundary,
        probes: Option<Box<Probes>>,
    },
}

/// Determines when the next probe is due.
pub(super) struct Probes {
    interval: Duration,
    quiet_since: Instant,
    timer: Sleeper,
}

// === impl EventStream ===

impl<B: Send + 'static> EventStream<B> {
    pub(super) fn new(
        guard: Guard,
        inner: Inner<B>,
        content: Content,
        peer: Option<PeerClosed>,
    ) -> Self {
        let exchange = guard.exchange().cloned();
        let stall_timeout = exchange.as_deref().and_then(Exchange::stall_timeout);
        let stall_timeout = stall_timeout.filter(|_| !matches!(content, Content::Answer { .. }));
        let slot = Arc::new(BodySlot::new(guard, inner, stall_timeout));
        let mut resumed = None;
        let mut delivering = None;
        if let Some(exchange) = exchange {
            let handle: Weak<dyn StreamHandle> = Arc::<BodySlot<B>>::downgrade(&slot);
            resumed = exchange.on_stream_opened(handle);
            delivering = resumed.as_ref().unwrap_or(&exchange).delivery_guard();
            if let Some(timeout) = stall_timeout
                && let Some(handle) =
                    exchange.set_stream_timer(Arc::<BodySlot<B>>::downgrade(&slot), timeout)
            {
                slot.set_timer(handle);
            }
        }
        Self {
            slot,
            content,
            rest: Bytes::new(),
            peer,
            bom_filter: BomFilter::default(),
            resumed,
            is_registered: false,
            delivering,
            ended: false,
        }
    }
}

impl<B> EventStream<B> {
    pub(super) fn is_end_stream(&self) -> bool {
        self.ended
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        match self.content {
            Content::Passthrough {
                remaining: Some(remaining),
            }
            | Content::Answer {
                remaining: Some(remaining),
                ..
            } => SizeHint::with_exact(remaining),
            _ => SizeHint::default(),
        }
    }
}

impl<B> EventStream<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled<B> {
        self.slot.record_poll();
        let polled = ready!(self.poll(cx));
        if matches!(polled, Some(Ok(_))) {
            self.slot.record_delivery();
        } else {
            self.ended = true;
        }
        Poll::Ready(polled)
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Polled<B> {
        while !self.ended {
            let at_boundary = self.rest.is_empty() && self.content.is_at_boundary();
            match self.slot.next(at_boundary, cx.waker()) {
                Next::Message(message) => {
                    let message = self.content.wrap(message);
                    return self.inject(message);
                }
                Next::Inner(body) if !self.rest.is_empty() => {
                    let rest = mem::take(&mut self.rest);
                    return self.deliver(body, Frame::data(rest.into()));
                }
                Next::Inner(mut body) => match body.as_mut().poll_frame(cx) {
                    Poll::Pending => {
                        let exchange = self.exchange_to_register(&mut body);
                        if self.slot.restore(body) {
                            if let Some(exchange) = exchange {
                                self.delivering = exchange.delivery_guard();
                                exchange.register_orphaned_streams();
                            }
                            return self.poll_idle(cx);
                        }
                    }
                    Poll::Ready(Some(Ok(frame))) => return self.deliver(body, frame),
                    Poll::Ready(Some(Err(error))) => {
                        let guard = body.as_mut().guard();
                        guard.report_dropped(DetachCause::ResponseDropped);
                        return Poll::Ready(Some(Err(error)));
                    }
                    Poll::Ready(None) => {
                        body.as_mut().guard().complete();
                        break;
                    }
                },
                // This server cancelled the call, so the client receives the error after the current frame.
                Next::Closed if self.slot.was_closed_with_error() && !self.rest.is_empty() => {
                    let rest = mem::take(&mut self.rest);
                    let piece = self.split_piece(rest);
                    return Poll::Ready(Some(Ok(Frame::data(self.forward(piece)))));
                }
                Next::Closed => {
                    let Some(message) = self.next_remaining_message() else {
                        break;
                    };
                    // Terminate the incomplete event, which the client can't parse anyway, so that it can parse the error.
                    let message = [&b"\n\n"[..], &self.content.wrap(message)].concat();
                    return self.inject(message.into());
                }
            }
        }
        Poll::Ready(None)
    }

    /// Returns the next message for the client after the inner body has been dropped.
    ///
    /// The body might have been dropped mid-event. Returns `None` if no message is left, or if messages cannot be injected into
    /// the body.
    fn next_remaining_message(&self) -> Option<Bytes> {
        let is_injectable = matches!(self.content, Content::Injectable { .. });
        is_injectable.then(|| self.slot.next_remaining_message())?
    }

    /// Returns the frame, or its first piece, and puts the inner body back.
    fn deliver(&mut self, mut body: Pin<Box<InnerBody<B>>>, frame: Frame<B::Data>) -> Polled<B> {
        let is_trailers = frame.is_trailers();
        let frame = match frame.into_data() {
            Ok(mut data) => {
                let piece = self.split_piece(data.copy_to_bytes(data.remaining()));
                Frame::data(self.observe(&mut body, piece))
            }
            Err(trailers) => trailers,
        };
        self.ended = self.rest.is_empty() && body.is_end_stream();
        if self.ended || is_trailers || self.content.is_fully_sent() {
            body.as_mut().guard().complete();
        }
        self.slot.restore(body);
        Poll::Ready(Some(Ok(frame)))
    }

    /// Returns a frame's first piece, which might be the entire frame, and stores the rest.
    fn split_piece(&mut self, mut frame: Bytes) -> Bytes {
        if !self.slot.has_stall_timeout() || frame.len() <= MAX_PIECE {
            return frame;
        }
        self.rest = frame.split_off(MAX_PIECE);
        frame
    }

    /// Lets the tap read bytes from the inner body and forwards them.
    fn observe(&mut self, body: &mut Pin<Box<InnerBody<B>>>, bytes: Bytes) -> B::Data {
        if let Some(tap) = body.as_mut().guard().tap() {
            tap.read(&bytes);
        }
        self.forward(bytes)
    }

    fn forward(&mut self, bytes: Bytes) -> B::Data {
        self.content.observe(&bytes);
        self.bom_filter.filter(bytes).into()
    }

    /// Returns the exchange, at most once, if the call has ended but the inner body has not.
    fn exchange_to_register(&mut self, body: &mut Pin<Box<InnerBody<B>>>) -> Option<Arc<Exchange>> {
        let exchange = self
            .resumed
            .as_ref()
            .or(body.as_mut().guard().exchange())
            .filter(|exchange| exchange.has_call_ended())?;
        let is_first = !mem::replace(&mut self.is_registered, true);
        is_first.then(|| exchange.clone())
    }

    /// Detects a closed connection and sends probes while the inner body is pending.
    fn poll_idle(&mut self, cx: &mut Context<'_>) -> Polled<B> {
        if is_ready(&mut self.peer, cx) {
            self.slot.on_disconnect(DetachCause::PeerClosed);
            return Poll::Ready(None);
        }
        if let Content::Injectable {
            boundary,
            probes: Some(probes),
        } = &mut self.content
            && boundary.is_at_event_boundary()
        {
            ready!(probes.poll(cx));
            return self.inject(sse::COMMENT);
        }
        Poll::Pending
    }

    #[cold]
    fn inject(&mut self, bytes: Bytes) -> Polled<B> {
        self.bom_filter.record_injection();
        self.content.reset_probes();
        Poll::Ready(Some(Ok(Frame::data(bytes.into()))))
    }
}

impl<B> Drop for EventStream<B> {
    fn drop(&mut self) {
        self.slot.drop_inner();
    }
}

// === impl Content ===

impl Content {
    pub(super) fn injectable(probes: Option<Probes>) -> Self {
        Self::Injectable {
            boundary: Boundary::default(),
            probes: probes.map(Box::new),
        }
    }

    /// Returns the content for an answer. Only JSON can be replaced with an error.
    pub(super) fn answer(is_json: bool, length: Option<u64>) -> Self {
        Self::Answer {
            is_untouched: is_json && length.is_none(),
            remaining: length,
        }
    }

    /// Updates the state with the body's next frame.
    fn observe(&mut self, frame: &[u8]) {
        match self {
            Self::Passthrough { remaining: None } => {}
            Self::Answer {
                is_untouched,
                remaining: None,
            } => {
                *is_untouched = *is_untouched && frame.trim_ascii().is_empty();
            }
            Self::Passthrough {
                remaining: Some(remaining),
            }
            | Self::Answer {
                remaining: Some(remaining),
                ..
            } => *remaining = remaining.saturating_sub(frame.len() as u64),
            Self::Injectable { boundary, .. } => {
                boundary.observe(frame);
                self.reset_probes();
            }
        }
    }

    /// Restarts the probe interval, because bytes have been sent.
    fn reset_probes(&mut self) {
        if let Self::Injectable {
            probes: Some(probes),
            ..
        } = self
        {
            probes.reset();
        }
    }

    fn is_at_boundary(&self) -> bool {
        match self {
            Self::Passthrough { .. } => false,
            Self::Answer { is_untouched, .. } => *is_untouched,
            Self::Injectable { boundary, .. } => boundary.is_at_event_boundary(),
        }
    }

    /// Wraps a JSON-RPC message in this content's format.
    #[cold]
    fn wrap(&self, message: Bytes) -> Bytes {
        match self {
            Self::Answer { .. } => message,
            Self::Passthrough { .. } | Self::Injectable { .. } => sse::event(&message),
        }
    }

    /// Returns `true` if the body's length is known and all its bytes have been sent.
    fn is_fully_sent(&self) -> bool {
        matches!(
            self,
            Self::Passthrough { remaining: Some(0) }
                | Self::Answer {
                    remaining: Some(0),
                    ..
                }
        )
    }
}

// === impl Probes ===

impl Probes {
    /// Returns `None` outside a tokio runtime.
    pub(super) fn new(interval: Duration) -> Option<Self> {
        Some(Self {
            interval,
            quiet_since: Instant::now(),
            timer: timer(interval)?,
        })
    }

    /// Restarts the interval. The timer itself is only reset when it expires.
    fn reset(&mut self) {
        self.quiet_since = Instant::now();
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            ready!(self.timer.as_mut().poll(cx));
            match self.quiet_since.checked_add(self.interval) {
                Some(due) if due > Instant::now() => self.timer.as_mut().reset(due),
                _ => return Poll::Ready(()),
            }
        }
    }
}

/// Disables buffering by proxies, without overriding headers that are already set.
pub(super) fn set_unbuffered(headers: &mut HeaderMap) {
    for (name, value) in [
        (header::CACHE_CONTROL, "no-cache"),
        (X_ACCEL_BUFFERING, "no"),
    ] {
        headers
            .entry(name)
            .or_insert(HeaderValue::from_static(value));
    }
}
