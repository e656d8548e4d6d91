//! The task that reads a server's answer to a call and writes it to the call's stream.
//!
//! 1. The task reads whether or not a client is attached, until the server's stream ends, or until
//!    [`UPSTREAM_LINGER`](super::UPSTREAM_LINGER) after the call was cancelled or answered.
//! 2. If the stream ends before the answer, and the server has sent event ids, the task requests the rest. It does so up to
//!    [`MAX_ATTEMPTS`] times in a row. Otherwise the call ends with an error. If the server refuses the credentials of the call,
//!    the client's response ends, so that the client resumes with fresh ones. The rest is requested with these.
//! 3. An answer that is not an event stream becomes one: JSON as it is, and anything else as an error.
//! 4. The bytes of an event after the first [`READ_ALLOWANCE`] are reserved. An event without room bypasses the ring in pieces.

use std::{convert::Infallible, mem, ops::RangeInclusive, pin::Pin, time::Duration};

use axum::body::Body;
use bytes::BytesMut;
use http::{HeaderValue, Request, Response, StatusCode};
use http_body_util::BodyExt;
use tower_service::Service;

use super::{
    budget::Reservation,
    event::{Event, ID_CAPACITY, Weight},
    read::{BOM, Read, Reader, data, scanned, skip_bom},
    ring::{EVENT_OVERHEAD, MAX_FRAME},
    session::READ_ALLOWANCE,
    stream::{INTERNAL_ERROR, Refused, Stream},
    upstream_resume::{ResumeResponse, UpstreamResume},
};
use crate::{
    headers::{EVENT_STREAM, JSON, has_content_coding, is_of_type},
    message::{Scanner, single_line},
};

mod refusal;

/// Maximum size of an event in the ring: 4 MiB, the limit of a session. Larger events, and any without room, bypass it.
const MAX_EVENT: usize = 4 * 1024 * 1024;

/// Maximum size of an event that is copied to a smaller buffer: 64 KiB.
const MAX_COPY: usize = 64 * 1024;

/// Number of bytes of a frame that are reserved and read at a time: 2 KiB.
const READ_STEP: usize = 2 * 1024;

/// Maximum number of attempts to resume a stream that was cut off: 3.
///
/// A successful attempt restarts the count even without a new event, because some servers end a resumed stream at once.
const MAX_ATTEMPTS: u32 = 3;

/// Reconnect delay if the server sent none: 1 s.
const DEFAULT_RETRY: Duration = Duration::from_secs(1);

/// Reconnect delays are clamped to this range: 250 ms to 30 s.
const RETRY_RANGE: RangeInclusive<Duration> = Duration::from_millis(250)..=Duration::from_secs(30);

/// Maximum size of a refusal that is read for a JSON-RPC error: 64 KiB.
const MAX_REFUSAL: usize = 64 * 1024;

const COMPRESSED: &str =
    "the MCP server's answer is compressed, although the proxy requested an uncompressed one";

/// The pending response from the server.
pub(super) type PendingResponse = Pin<Box<dyn Future<Output = Response<Body>> + Send>>;

/// The state of the server's answer.
pub(super) enum Answer {
    /// The response head has not arrived.
    Pending(PendingResponse),
    /// The response is an event stream.
    Events(Body),
}

/// Writes a server's answer to the stream of its call.
pub(super) struct Writer<S> {
    stream: Stream,
    resume: UpstreamResume<S>,
    reader: Reader,
    /// Covers what the parser buffers. `None` if the session was removed.
    reservation: Option<Reservation>,
    mode: EventMode,
}

/// How the current event is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum EventMode {
    #[default]
    Buffered,
    /// It bypasses the ring in pieces.
    Bypass,
    /// Its reader detached during the bypass. The rest is discarded.
    Discarded,
}

/// Ends the stream, however the task ends.
struct EndOnDrop(Stream);

/// Why reading has ended.
enum ReadEnd {
    /// The server's stream ended or was cut off.
    Cut,
    /// The stream refused an event, or was ended with an error.
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

    /// Writes the answer and ends the stream. Stops once [`Stream::close_due`] returns.
    #[expect(
        clippy::manual_async_fn,
        reason = "an `async fn` keeps its arguments twice, and there is one such future for each call in flight"
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
                    // A client that waits for the head gets such an answer unchanged. This client has an event stream
                    // already.
                    return self.end_with_error(COMPRESSED);
                }
                match is_success {
                    true if is_of_type(&head.headers, EVENT_STREAM) => body,
                    true if is_of_type(&head.headers, JSON) => {
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

    /// Writes the events of a body, to its end.
    async fn write_events(&mut self, mut body: Body) -> ReadEnd {
        self.reader.begin_again();
        loop {
            let frame = match body.frame().await {
                Some(Ok(frame)) => frame,
                Some(Err(_)) | None => break,
            };
            // Trailers do not carry events. The future of a read is boxed, so that it takes no memory while the server is
            // silent.
            if let Ok(bytes) = frame.into_data()
                && Box::pin(self.read(&bytes)).await.is_err()
            {
                return ReadEnd::Refused;
            }
        }
        if mem::take(&mut self.mode) == EventMode::Bypass {
            // The end of the event is missing, so no client has parsed it.
            self.end_without_answer(
                "the MCP server's stream was cut off in the middle of an event too large for the proxy to keep",
            );
            return ReadEnd::Refused;
        }
        drop(self.reader.take());
        self.shrink_reservation();
        ReadEnd::Cut
    }

    /// Reads bytes of an event stream and writes each event that they complete.
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

    /// Reserves room for `more` bytes of an event. Returns `false` if there is none.
    fn reserve(&mut self, more: usize) -> bool {
        // The capacity doubles up to the allowance, which needs no reservation.
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
        // Doubling makes copies rare. If there is no room to double, it grows by less. Events are dropped, and streams
        // evicted, only to fit `least`.
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

    /// Sends the new lines of a bypassing event. If its reader has detached, the call fails unless the event is droppable.
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

    /// Takes the event that was read.
    fn take_event(&mut self) -> Event {
        let lines = self.reader.take();
        let weight = self.weight(&lines);
        let event = Event::from_lines(fitted(lines), weight);
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
            // The lines need not be joined for a scan.
            _ => Weight::from_scan(scanned(lines), call),
        }
    }

    /// Releases the part of the reservation that the parser does not need.
    fn shrink_reservation(&mut self) {
        let needed = self.reader.needed_capacity(0, 0);
        if let Some(reservation) = &mut self.reservation {
            reservation.shrink(reservation.bytes().saturating_sub(needed));
        }
    }

    /// Requests the events after the last one with an id. Returns `None` if there is no id, or all attempts fail.
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

    /// Writes a JSON answer as one event. The call ends with an error if the JSON is cut off or is no answer.
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
            self.end_with_error("the MCP server's JSON response has no answer to the call");
        }
    }

    /// Writes another response as an error: the JSON-RPC error in its body, or else its status.
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
            // The answer of a gateway in front of the server, which may be working on the call.
            self.stream.lose_answer();
        }
        match refusal::json_rpc_error(&read) {
            Some(error) => self.stream.end_with_server_error(error),
            None => self.end_with_error(&format!(
                "the MCP server answered with HTTP status {status}"
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

/// Returns the lines of an event in a buffer of their size.
///
/// Small lines are copied. A large buffer is shrunk in place, even though the rest of its block then rarely fits an event.
fn fitted(mut lines: Vec<u8>) -> Vec<u8> {
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
        // The task, the runtime's overhead for it, the stream, and its entries in four maps. The parser also keeps three ids of
        // the server: that of the last event, that of the next, and one that is being read.
        let cost = size_of_val(&task) + 256 + Stream::SIZE + 4 * 128 + 3 * (MAX_ID + 1);
        assert!(
            cost + super::super::session::READ_ALLOWANCE <= STREAM_OVERHEAD,
            "{cost}"
        );
    }
}
