//! The stream for a client that resumes a cancelled call, without a session manager.
//!
//! The call might have completed unobserved before it was cancelled, in which case its server might have stored the answer. The
//! stream is therefore buffered at first. If the answer turns up in it, the entire buffer is passed on. If the stream ends
//! without the answer, or yields no event for [`NEXT_EVENT_TIMEOUT`], the client receives only the error. The buffered events are
//! dropped in that case, because some clients would resume again after an event with an id.

use std::{
    fmt, mem,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body, Frame};
use tokio::time::Instant;

use super::{Polled, Sleeper, timer};
use crate::{call::RequestId, envelope::Answers, sse::Reader};

/// Maximum time to wait for the server's next event, the same as with a session manager.
const NEXT_EVENT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum number of bytes to buffer. A longer stream is passed on, even without the answer.
///
/// Same as the default of `Limits::retained_per_session`.
const MAX_BUFFERED: usize = 1024 * 1024;

/// The inner body and its buffer.
pub(super) struct Late<B> {
    body: Pin<Box<B>>,
    stage: LateStage,
}

enum LateStage {
    Reading(Box<HeldBack>),
    /// The inner body contains the answer or is longer than [`MAX_BUFFERED`].
    Forwarding,
    Ended,
}

/// A stream being buffered until the answer turns up.
struct HeldBack {
    request: RequestId,
    error: Bytes,
    reader: Reader,
    held: BytesMut,
    /// `None` outside a tokio runtime.
    silence: Option<Sleeper>,
}

// === impl Late ===

impl<B> Late<B> {
    /// `error` is the event to send if the stream does not contain the answer to `request`.
    pub(super) fn new(body: B, request: RequestId, error: Bytes) -> Self {
        Self {
            body: Box::pin(body),
            stage: LateStage::Reading(Box::new(HeldBack {
                request,
                error,
                reader: Reader::default(),
                held: BytesMut::new(),
                silence: timer(NEXT_EVENT_TIMEOUT),
            })),
        }
    }
}

impl<B> Late<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    pub(super) fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled<B> {
        loop {
            let reading = match &mut self.stage {
                LateStage::Reading(reading) => reading,
                LateStage::Forwarding => return self.body.as_mut().poll_frame(cx),
                LateStage::Ended => return Poll::Ready(None),
            };
            let frame = match self.body.as_mut().poll_frame(cx) {
                Poll::Ready(frame) => frame,
                Poll::Pending => {
                    ready!(reading.poll_silence(cx));
                    None
                }
            };
            let frame = match frame.transpose() {
                Ok(frame) => frame,
                Err(error) => return Poll::Ready(Some(Err(error))),
            };
            // Trailers end the body, too, because no frame can follow them.
            let (bytes, next) = match frame.and_then(|frame| frame.into_data().ok()) {
                Some(mut data) => match reading.read(&data.copy_to_bytes(data.remaining())) {
                    Some(held) => (held, LateStage::Forwarding),
                    None => continue,
                },
                None => (mem::take(&mut reading.error), LateStage::Ended),
            };
            self.stage = next;
            return Poll::Ready(Some(Ok(Frame::data(bytes.into()))));
        }
    }
}

impl<B> fmt::Debug for Late<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Late").finish_non_exhaustive()
    }
}

// === impl HeldBack ===

impl HeldBack {
    /// Buffers a frame. Returns the buffer if it must be passed on.
    fn read(&mut self, frame: &[u8]) -> Option<Bytes> {
        self.held.extend_from_slice(frame);
        let (mut is_event, mut is_answer) = (false, false);
        self.reader.read(frame, |event| {
            is_event = true;
            is_answer |= match event.answers {
                Answers::One(request) => request == self.request,
                // A batch might contain the answer.
                Answers::Nothing | Answers::Ambiguous(_) => event.is_ambiguous,
            };
        });
        if is_event
            && let (Some(silence), Some(deadline)) = (&mut self.silence, next_event_deadline())
        {
            silence.as_mut().reset(deadline);
        }
        let is_passed_on = is_answer || self.held.len() > MAX_BUFFERED;
        is_passed_on.then(|| mem::take(&mut self.held).freeze())
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut self.silence {
            Some(silence) => silence.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

fn next_event_deadline() -> Option<Instant> {
    Instant::now().checked_add(NEXT_EVENT_TIMEOUT)
}
