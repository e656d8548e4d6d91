//! The task that reads a server's answer to a call and writes it to the call's stream.
//!
//! 1. The task reads until the server's stream ends, whether or not a client is attached. Once the call has been cancelled or
//!    answered, it stops after another [`UPSTREAM_LINGER`](super::UPSTREAM_LINGER).
//! 2. If the server's stream ends before the answer, the task requests the rest, up to [`MAX_ATTEMPTS`] times in a row. This
//!    requires event ids from the server. If the server has sent no ids, or if all attempts fail, the call ends with an error.
//!    If the server refuses the call's credentials, the task ends the client's response, so that the client resumes with fresh
//!    credentials, and then requests the rest with those.
//! 3. An answer that is not an event stream is converted to an event: JSON unchanged, and anything else as an error.
//! 4. The first [`READ_ALLOWANCE`] bytes of an event need no reservation, but the rest does. An event that does not fit
//!    bypasses the ring in pieces.

use std::{convert::Infallible, mem, ops::RangeInclusive, pin::Pin, time::Duration};

use axum::body::Body;
use bytes::BytesMut;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower_service::Service;

use super::{
    budget::Reservation,
    event::{Event, ID_CAPACITY, Weight},
    read::{BOM, Read, Reader, data, scan_lines, skip_bom},
    ring::{EVENT_OVERHEAD, MAX_FRAME},
    session::READ_ALLOWANCE,
    stream::{INTERNAL_ERROR, Refused, Stream},
    upstream_resume::{ResumeResponse, UpstreamResume},
};
use crate::{
    headers::{EVENT_STREAM, JSON, has_content_coding, has_content_type},
    message::{Scanner, single_line},
};

mod refusal;

/// Maximum size of an event in the ring, equal to a session's default limit. Larger events bypass the ring.
const MAX_EVENT: usize = 4 * 1024 * 1024;

/// Maximum size of an event copied into a smaller buffer.
const MAX_COPY: usize = 64 * 1024;

/// How much of a frame is reserved and read at a time.
const READ_STEP: usize = 2 * 1024;

/// Maximum number of consecutive attempts to resume a stream that was cut off.
///
/// A successful attempt resets the count, even if no event follows, because some servers end a resumed stream right away.
const MAX_ATTEMPTS: u32 = 3;

/// The reconnect delay to use if the server has not sent one.
const DEFAULT_RETRY: Duration = Duration::from_secs(1);

/// The range that reconnect delays are clamped to.
const RETRY_RANGE: RangeInclusive<Duration> = Duration::from_millis(250)..=Duration::from_secs(30);

/// Roughly how much of a refusal is read to find a JSON-RPC error.
const MAX_REFUSAL: usize = 64 * 1024;

const COMPRESSED: &str =
    "the MCP server's answer is compressed, although the proxy requested an uncompressed one";

/// A response that the server has yet to send.
pub(super) type PendingResponse = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// The server's answer to a call, which may still be pending.
pub(super) enum Answer {
    /// The response head has not arrived yet.
    Pending(PendingResponse),
    /// The response is an event stream, with this body.
    Events(Body),
}

/// Writes a server's answer to the call's stream.
pub(super) struct Writer<S> {
    stream: Stream,
    resume: UpstreamResume<S>,
    reader: Reader,
    /// Covers what the parser has buffered. `None` if the session has been removed.
    reservation: Option<Reservation>,
    mode: EventMode,
}

/// How the current event is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum EventMode {
    #[default]
    Buffered,
    /// The event bypasses the ring in pieces.
    Bypass,
    /// The reader detached during the bypass, so the rest of the event is discarded.
    Discarded,
}

/// Ends the stream on drop, no matter how the task ends.
struct EndOnDrop(Stream);

/// Why reading a body stopped.
enum ReadEnd {
    /// The server's stream has ended or has been cut off.
    Cut,
    /// The call's stream has refused an event, or has been ended with an error.
    Refused,
}

// === impl Writer ===

impl<S> Writer<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    pub(super) fn new(stream: Stream, resume: UpstreamResume<S>) -> Self {
        Self {
            reservation: stream.reservation(),
            stream,
            resume,
            reader: Reader::default(),
            mode: EventMode::Buffered,
        }
    }

    /// Writes the answer and ends the stream, at the latest when [`Stream::close_due`] returns.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` stores its arguments twice, and every call in flight has one of these futures"
    )]
    pub(super) fn write(mut self, answer: Answer) -> impl Future<Output = ()> {
        async move {
            let stream = self.stream.clone();
            let _end = EndOnDrop(stream.clone());
            tokio::select! {
                biased;
                () = self.write_answer(answer) => {}
                () = stream.close_due() => {}
            }
        }
    }

    async fn write_answer(&mut self, answer: Answer) {
        let mut body = match answer {
            Answer::Events(body) => body,
            Answer::Pending(pending) => {
                let (head, body) = pending.await.into_parts();
                let is_success = head.status.is_success();
                if is_success && has_content_coding(&head.headers) {
                    // A client still waiting for the response head gets a compressed answer unchanged, but this client is
                    // already reading an event stream.
                    return self.end_with_error(COMPRESSED);
                }
                match is_success {
                    true if has_content_type(&head.headers, EVENT_STREAM) => body,
                    true if has_content_type(&head.headers, JSON) => {
                        Box::pin(self.write_json(body)).await;
                        return;
                    }
                    _ => return Box::pin(self.write_refusal(head.status, body)).await,
                }
            }
        };
        loop {
            match self.write_events(body).await {
                ReadEnd::Refused => return,
                ReadEnd::Cut if self.stream.is_answered() => return,
                ReadEnd::Cut => {}
            }
            match Box::pin(self.request_rest()).await {
                Some(rest) => body = rest,
                None => {
                    return self
                        .end_without_answer("the MCP server's stream ended before its answer");
                }
            }
        }
    }

    /// Writes a body's events until it ends.
    async fn write_events(&mut self, mut body: Body) -> ReadEnd {
        self.reader.start_next_body();
        loop {
            let frame = match body.frame().await {
                Some(Ok(frame)) => frame,
                Some(Err(_)) | None => break,
            };
            // Skip trailers, which carry no events. Box the future that reads a frame, so that it takes up no memory while
            // the server is silent.
            if let Ok(bytes) = frame.into_data()
                && Box::pin(self.read(&bytes)).await.is_err()
            {
                return ReadEnd::Refused;
            }
        }
        if mem::take(&mut self.mode) == EventMode::Bypass {
            // The event was cut off, so the client can't have parsed it.
            self.end_without_answer(
                "the MCP server's stream was cut off during an event that was too large for the proxy to store",
            );
            return ReadEnd::Refused;
        }
        drop(self.reader.take());
        self.shrink_reservation();
        ReadEnd::Cut
    }

    /// Parses bytes from an event stream, and writes each event they complete.
    async fn read(&mut self, mut bytes: &[u8]) -> Result<(), Refused> {
        while !bytes.is_empty() {
            let max = match self.mode {
                EventMode::Buffered => READ_STEP,
                EventMode::Bypass | EventMode::Discarded => MAX_FRAME,
            };
            let (mut step, rest) = bytes.split_at(bytes.len().min(max));
            if self.mode == EventMode::Buffered && !self.reserve(step.len()) {
                self.mode = EventMode::Bypass;
                self.reader.begin_scan();
                self.stream.begin_bypass().await;
            }
            let read = self.reader.read(&mut step);
            bytes = if step.is_empty() {
                rest
            } else {
                bytes
                    .get(bytes.len() - rest.len() - step.len()..)
                    .unwrap_or_default()
            };
            match (read, self.mode) {
                (Read::Bytes, EventMode::Buffered) => {}
                (Read::Bytes, _) => self.forward_bypass().await?,
                (Read::Event, EventMode::Buffered) => {
                    let event = self.take_event();
                    self.stream.push(event).await?;
                }
                (Read::Event, _) => {
                    self.forward_bypass().await?;
                    self.end_bypass().await?;
                }
            }
        }
        Ok(())
    }

    /// Reserves room for `more` bytes of the current event. Returns `false` if there is none.
    fn reserve(&mut self, more: usize) -> bool {
        // Up to the allowance, which needs no reservation, double the capacity.
        let allowed = self.reader.needed_capacity(more, READ_ALLOWANCE);
        if allowed <= READ_ALLOWANCE {
            self.reader.reserve(allowed);
            return true;
        }
        let least = self.reader.needed_capacity(more, 0);
        let Some(reservation) = &mut self.reservation else {
            return false;
        };
        if least > MAX_EVENT {
            return false;
        }
        let missing = |needed: usize, reservation: &Reservation| {
            let needed = needed + EVENT_OVERHEAD;
            needed.saturating_sub(reservation.bytes())
        };
        // Doubling makes copies rare. If there is no room for that, grow by less. Only drop events and evict streams if even
        // `least` does not fit.
        for divisor in [1, 8, 64] {
            let max = MAX_EVENT.min(least + least / divisor);
            let needed = self.reader.needed_capacity(more, max);
            if reservation.grow(missing(needed, reservation)).is_ok() {
                self.reader.reserve(needed);
                return true;
            }
        }
        if !self
            .stream
            .grow_reservation(reservation, missing(least, reservation))
        {
            return false;
        }
        self.reader.reserve(least);
        true
    }

    /// Sends a bypassing event's lines, as far as they have been read.
    ///
    /// If the event's reader has detached, the call fails, unless the event is droppable.
    async fn forward_bypass(&mut self) -> Result<(), Refused> {
        let lines = self.reader.take();
        self.shrink_reservation();
        if self.mode != EventMode::Bypass
            || lines.is_empty()
            || self.stream.bypass(lines.into()).await
        {
            return Ok(());
        }
        if self.reader.scan().is_some_and(Scanner::is_droppable) {
            self.mode = EventMode::Discarded
        } else {
            self.stream.fail_lost_event()?
        }
        Ok(())
    }

    async fn end_bypass(&mut self) -> Result<(), Refused> {
        let weight = Weight::from_scan(self.reader.end_scan(), self.stream.call());
        let is_taken =
            mem::take(&mut self.mode) == EventMode::Bypass && self.stream.end_bypass(weight).await;
        if is_taken || weight == Weight::Droppable {
            Ok(())
        } else {
            self.stream.fail_lost_event()
        }
    }

    /// Takes the event just read.
    fn take_event(&mut self) -> Event {
        let lines = self.reader.take();
        let weight = self.weight(&lines);
        let event = Event::from_lines(shrink_buffer(lines), weight);
        match self.reservation.take() {
            Some(reservation) => {
                self.reservation = self.stream.reservation();
                event.with_reservation(reservation)
            }
            None => event,
        }
    }

    fn weight(&self, lines: &[u8]) -> Weight {
        let call = self.stream.call();
        let mut data = data(lines);
        match (data.next(), data.next()) {
            (first, None) => Weight::of(first.unwrap_or_default(), call),
            // To be parsed, the lines would have to be joined, so scan them instead.
            _ => Weight::from_scan(scan_lines(lines), call),
        }
    }

    /// Releases the part of the reservation that the parser does not need.
    fn shrink_reservation(&mut self) {
        let needed = self.reader.needed_capacity(0, 0);
        if let Some(reservation) = &mut self.reservation {
            reservation.shrink(reservation.bytes().saturating_sub(needed));
        }
    }

    /// Requests the events after the last event that had an id.
    ///
    /// Returns `None` if there is no id, if all attempts fail, or if the server refuses the credentials and the client can't
    /// resume.
    async fn request_rest(&mut self) -> Option<Body> {
        let last = HeaderValue::from_bytes(self.reader.last_id()?).ok()?;
        for _ in 0..MAX_ATTEMPTS {
            let retry = self.reader.retry().unwrap_or(DEFAULT_RETRY);
            tokio::time::sleep(retry.clamp(*RETRY_RANGE.start(), *RETRY_RANGE.end())).await;
            let credentials = self.stream.credentials();
            match self.resume.send(&last, credentials.as_deref()).await {
                ResumeResponse::Events(rest) => return Some(rest),
                ResumeResponse::Failed => {}
                ResumeResponse::Unauthorized => {
                    if !self.stream.await_credentials(credentials.as_ref()).await {
                        return None;
                    }
                }
            }
        }
        None
    }

    /// Writes a JSON body as one event, or an error if it is cut off or does not answer the call.
    async fn write_json(&mut self, mut body: Body) {
        if self.read(b"data: ").await.is_err() {
            return;
        }
        let mut mark = BOM;
        loop {
            match body.frame().await {
                Some(Ok(frame)) => {
                    if let Ok(mut bytes) = frame.into_data() {
                        skip_bom(&mut mark, &mut bytes);
                        if self.read(&single_line(bytes)).await.is_err() {
                            return;
                        }
                    }
                }
                Some(Err(_)) => return self.end_with_error("the MCP server's answer was cut off"),
                None => break,
            }
        }
        let read = self.read(b"\n\n").await;
        if read.is_ok() && !self.stream.is_answered() {
            self.end_with_error("the MCP server's JSON response does not answer the call");
        }
    }

    /// Writes any other response as an error: the JSON-RPC error in its body, or else its status.
    async fn write_refusal(&mut self, status: StatusCode, mut body: Body) {
        let mut read = BytesMut::new();
        while let Some(Ok(frame)) = body.frame().await
            && read.len() <= MAX_REFUSAL
        {
            if let Ok(bytes) = frame.into_data() {
                read.extend_from_slice(&bytes);
            }
        }
        if matches!(
            status,
            StatusCode::BAD_GATEWAY | StatusCode::GATEWAY_TIMEOUT
        ) {
            // A gateway sent this, so the server behind it may still be working on the call.
            self.stream.lose_answer();
        }
        match refusal::json_rpc_error(&read) {
            Some(error) => self.stream.end_with_server_error(error),
            None => self.end_with_error(&format!(
                "the MCP server responded with HTTP status {status}"
            )),
        }
    }

    fn end_with_error(&self, message: &str) {
        tracing::debug!("{message}");
        self.stream.end_with_error(INTERNAL_ERROR, message);
    }

    fn end_without_answer(&self, message: &str) {
        tracing::debug!("{message}");
        self.stream.end_without_answer(INTERNAL_ERROR, message);
    }
}

/// Shrinks the buffer of an event's lines to their size.
///
/// Small events are copied. A large buffer is shrunk in place, even though the memory this frees rarely fits another event.
fn shrink_buffer(mut lines: Vec<u8>) -> Vec<u8> {
    let needed = lines.len() + ID_CAPACITY;
    if needed > MAX_COPY {
        lines.shrink_to(needed);
        return lines;
    }
    let mut copy = Vec::with_capacity(needed);
    copy.extend_from_slice(&lines);
    copy
}

// === impl EndOnDrop ===

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event_store::{Call, EventStore, Limits, read::MAX_ID, session::STREAM_OVERHEAD};

    #[tokio::test]
    async fn a_stream_costs_no_more_than_is_counted() {
        let store = EventStore::new(Limits::default());
        let session = store.begin("s", None).unwrap();
        let before = store.stats().buffer_bytes;
        let stream = session.open(Call::new("1").unwrap()).unwrap();
        let counted = store.stats().buffer_bytes - before;
        assert!(counted >= STREAM_OVERHEAD);
        let service = tower::service_fn(async |_: Request<Body>| Ok(Response::new(Body::empty())));
        let resume = UpstreamResume::new(service, &Request::default());
        let task = Writer::new(stream.clone(), resume).write(Answer::Events(Body::empty()));
        // The task, the runtime's overhead for it, the stream, and its entries in four maps. The parser also holds up to three
        // of the server's ids: the last event's, the next one's, and one being read.
        let cost = size_of_val(&task) + 256 + Stream::SIZE + 4 * 128 + 3 * (MAX_ID + 1);
        assert!(
            cost + super::super::session::READ_ALLOWANCE <= STREAM_OVERHEAD,
            "{cost}"
        );
    }
}
