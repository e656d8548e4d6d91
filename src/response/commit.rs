//! Converts the inner answer to events for a response whose head was sent early.
//!
//! Once the client has received `200 text/event-stream`, whatever the inner service responds with has to be sent as events.
//! Events are passed through unchanged, a JSON body becomes the data of a single event, and any other answer becomes a JSON-RPC
//! error. The inner answer's headers are discarded.

use std::{
    fmt,
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::{Buf, Bytes, BytesMut};
use http::{Response, StatusCode};
use http_body::{Body, Frame};
use memchr::memchr2;
use serde_json::{Value, json};

use super::{
    Polled,
    head::{classify_head, has_content_type},
};
use crate::{
    call::{DetachCause, RequestId},
    exchange::{BodyPlan, Guard, Head, Tap},
    headers::McpHeaders,
    jsonrpc,
    sse::{self, BomFilter},
};

/// Once a refusal has exceeded this many bytes, it is not read any further.
///
/// Only a JSON-RPC error would be of interest, and JSON-RPC errors are shorter.
const MAX_REFUSAL: usize = 64 * 1024;

/// Resolves to the inner service's answer, or to `None` if the service fails.
pub(super) type PendingAnswer<B> = Pin<Box<dyn Future<Output = Option<Response<B>>> + Send>>;

/// A body that sends the answer to one request as events.
pub(super) struct CommittedBody<B> {
    request: RequestId,
    stage: CommitStage<B>,
}

enum CommitStage<B> {
    Pending(PendingAnswer<B>),
    Events(Pin<Box<B>>),
    /// A JSON body, sent as the data of a single event. Leading white space is skipped.
    Json(JsonEvent<B>),
    Refusal {
        status: StatusCode,
        body: Pin<Box<B>>,
        received: BytesMut,
    },
    Ended,
}

/// Converts a JSON body to a single event.
struct JsonEvent<B> {
    status: StatusCode,
    body: Pin<Box<B>>,
    /// Removes a byte order mark, which inside an event would become part of the text.
    bom_filter: BomFilter,
    has_data: bool,
}

// === impl CommittedBody ===

impl<B> CommittedBody<B>
where
    B: Body,
    B::Data: From<Bytes>,
{
    pub(super) fn new(request: RequestId, pending: PendingAnswer<B>) -> Self {
        Self {
            request,
            stage: CommitStage::Pending(pending),
        }
    }

    pub(super) fn poll_frame(&mut self, guard: &mut Guard, cx: &mut Context<'_>) -> Polled<B> {
        loop {
            let polling = guard.poll_guard();
            match &mut self.stage {
                CommitStage::Pending(pending) => {
                    let response = pending.as_mut().poll(cx);
                    drop(polling);
                    if let Some(exchange) = guard.exchange() {
                        exchange.parse_body();
                    }
                    if let Some(first) = self.on_answer(guard, ready!(response)) {
                        return Poll::Ready(Some(Ok(Frame::data(first.into()))));
                    }
                }
                CommitStage::Events(body) => return body.as_mut().poll_frame(cx),
                CommitStage::Json(json) => {
                    let frame = ready!(json.body.as_mut().poll_frame(cx)).transpose();
                    let frame = match frame {
                        Ok(frame) => frame,
                        Err(error) => return Poll::Ready(Some(Err(error))),
                    };
                    // Trailers end the body, too: nothing can follow them, and an event cannot contain them.
                    let data = match frame.and_then(|frame| frame.into_data().ok()) {
                        Some(mut data) => {
                            match json.convert(data.copy_to_bytes(data.remaining())) {
                                Some(data) => data,
                                None => continue,
                            }
                        }
                        None => {
                            let end = if json.has_data {
                                Bytes::from_static(b"\n\n")
                            } else {
                                refusal(&self.request, json.status, &[])
                            };
                            self.stage = CommitStage::Ended;
                            end
                        }
                    };
                    return Poll::Ready(Some(Ok(Frame::data(data.into()))));
                }
                CommitStage::Refusal {
                    status,
                    body,
                    received,
                } => match ready!(body.as_mut().poll_frame(cx)) {
                    Some(Ok(frame)) if frame.is_data() && received.len() <= MAX_REFUSAL => {
                        if let Ok(mut data) = frame.into_data() {
                            received.extend_from_slice(&data.copy_to_bytes(data.remaining()));
                        }
                    }
                    _ => {
                        let event = refusal(&self.request, *status, received);
                        self.stage = CommitStage::Ended;
                        return Poll::Ready(Some(Ok(Frame::data(event.into()))));
                    }
                },
                CommitStage::Ended => return Poll::Ready(None),
            }
        }
    }

    /// Handles the inner service's answer.
    ///
    /// Returns the bytes to send immediately, or `None` if the body has to be polled first.
    fn on_answer(&mut self, guard: &mut Guard, answer: Option<Response<B>>) -> Option<Bytes> {
        let Some(answer) = answer else {
            guard.fail();
            self.stage = CommitStage::Ended;
            let error = json!({ "code": jsonrpc::INTERNAL_ERROR, "message": "the service failed" });
            return Some(error_event((&self.request).into(), error));
        };
        let (parts, body) = answer.into_parts();
        let mcp_headers = McpHeaders::from_map(&parts.headers);
        let head = classify_head(parts.status, &mcp_headers);
        match guard.exchange().map(|exchange| exchange.on_head(head)) {
            Some(BodyPlan::Tap(tap)) => guard.set_tap(tap),
            Some(BodyPlan::Answer(call)) => guard.set_tap(Box::new(Tap::answer_as_event(call))),
            Some(BodyPlan::Pass | BodyPlan::Late { .. }) | None => {}
        }
        let is_encoded = mcp_headers.is_encoded;
        self.stage = match head {
            Head::Stream { readable: true } => CommitStage::Events(Box::pin(body)),
            Head::Answer if has_content_type(&mcp_headers, "application/json") && !is_encoded => {
                CommitStage::Json(JsonEvent::new(parts.status, body))
            }
            Head::Stream { readable: false } => {
                // The head has already been sent and does not declare this encoding.
                guard.report_dropped(DetachCause::ResponseDropped);
                CommitStage::Ended
            }
            Head::Refusal { .. } if !is_encoded => CommitStage::Refusal {
                status: parts.status,
                body: Box::pin(body),
                received: BytesMut::new(),
            },
            Head::Answer | Head::Accepted | Head::Refusal { .. } => CommitStage::Ended,
        };
        match self.stage {
            CommitStage::Ended => Some(refusal(&self.request, parts.status, &[])),
            _ => None,
        }
    }
}

// === impl JsonEvent ===

impl<B> JsonEvent<B> {
    fn new(status: StatusCode, body: B) -> Self {
        let mut bom_filter = BomFilter::default();
        bom_filter.record_injection();
        Self {
            status,
            body: Box::pin(body),
            bom_filter,
            has_data: false,
        }
    }

    /// Returns the bytes to send for a frame, or `None` if only white space has been received so far.
    fn convert(&mut self, frame: Bytes) -> Option<Bytes> {
        let data = replace_line_breaks(self.bom_filter.filter(frame));
        if self.has_data {
            return Some(data);
        }
        let text = data.trim_ascii_start();
        self.has_data = !text.is_empty();
        self.has_data
            .then(|| [&b"data: "[..], text].concat().into())
    }
}

impl<B> fmt::Debug for CommittedBody<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Committed").finish_non_exhaustive()
    }
}

/// Replaces line breaks in JSON with spaces.
///
/// This does not change the JSON's meaning, because line breaks can only occur between tokens.
fn replace_line_breaks(json: Bytes) -> Bytes {
    if memchr2(b'\n', b'\r', &json).is_none() {
        return json;
    }
    let replace_break = |byte: &u8| match byte {
        b'\n' | b'\r' => b' ',
        other => *other,
    };
    json.iter().map(replace_break).collect()
}

/// Returns the error event for a refusal, or for an answer that cannot be sent as an event.
///
/// The event contains the JSON-RPC error from the body or, if there is none, an error with the status.
fn refusal(request: &RequestId, status: StatusCode, body: &[u8]) -> Bytes {
    let id = Value::from(request);
    let error_in_body = serde_json::from_slice(body)
        .ok()
        .and_then(|mut message: Value| {
            let answered = message.get("id");
            let is_ours = answered.is_none_or(|answered| answered.is_null() || *answered == id);
            let error = message.get_mut("error").filter(|_| is_ours)?.take();
            let is_error = error.get("code")?.is_i64() && error.get("message")?.is_string();
            is_error.then_some(error)
        });
    let error = error_in_body.unwrap_or_else(|| {
        json!({
            "code": jsonrpc::INTERNAL_ERROR,
            "message": format!("HTTP status {status}"),
            "data": { "status": status.as_u16() },
        })
    });
    error_event(id, error)
}

fn error_event(id: Value, error: Value) -> Bytes {
    sse::event(&jsonrpc::error_response(id, error))
}
