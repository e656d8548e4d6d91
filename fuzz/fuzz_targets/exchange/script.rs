//! A run's script: the requests and answers that the fuzzer has chosen.

use std::{
    collections::VecDeque,
    fmt,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use fuzz::choices::Choices;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};

use crate::ledger::{Ledger, Side};

/// The message of a deliberate panic.
pub const PANIC_MESSAGE: &str = "on purpose";

const SESSIONS: [&str; 2] = ["s", "t"];

/// A whole exchange: the request and its answer.
pub struct Plan {
    pub request: Request<Scripted>,
    pub answer: Answer,
    /// Whether the request may be a call that the layer observes by its events.
    pub is_post: bool,
}

/// How the inner service treats a request.
#[derive(Clone)]
pub struct Answer {
    /// How many frames of the request body it reads.
    pub reads: usize,
    /// How many polls it waits for afterwards.
    pub waits: u8,
    pub end: End,
}

#[derive(Clone)]
pub enum End {
    Fails,
    Panics,
    Answers {
        head: Head,
        body: Vec<Step>,
        end_hint: EndHint,
    },
}

#[derive(Clone)]
pub struct Head {
    pub status: StatusCode,
    pub media_type: Option<&'static str>,
    pub encoded: bool,
}

#[derive(Clone, Debug)]
pub enum Step {
    Data(Bytes),
    Trailers,
    Error,
    /// Pending for one poll.
    Wait,
    Panic,
}

/// What a body's `size_hint` and `is_end_stream` return.
#[derive(Clone, Copy, PartialEq)]
pub enum EndHint {
    Nothing,
    /// The exact length.
    Length,
    /// `is_end_stream` once the last frame has been read.
    End,
}

/// A body that follows a script and records the data it returns.
pub struct Scripted {
    steps: VecDeque<Step>,
    end_hint: EndHint,
    log: Option<(Ledger, usize, Side)>,
}

#[derive(Debug, PartialEq)]
pub struct Broken;

// === impl Plan ===

impl Plan {
    pub fn new(choices: &mut Choices<'_>) -> Self {
        let method = choices.pick(&[
            "POST", "POST", "POST", "POST", "POST", "GET", "GET", "DELETE", "HEAD",
        ]);
        let mut request = Request::builder()
            .method(method)
            .uri(choices.pick(&["/mcp", "/mcp", "/other"]));
        if !choices.rarely(4) {
            request = request.header("mcp-session-id", choices.pick(&SESSIONS));
        }
        if choices.rarely(16) {
            request = request.header("mcp-session-id", choices.pick(&SESSIONS));
        }
        let version = choices.pick(&["", "2025-06-18", "2025-06-18", "2026-07-28", "soon"]);
        if !version.is_empty() {
            request = request.header("mcp-protocol-version", version);
        }
        let mut steps = Vec::new();
        match method {
            "POST" => {
                let media_type = choices.pick(&[
                    "application/json",
                    "application/json",
                    "application/json",
                    "text/plain",
                ]);
                request = request.header(header::CONTENT_TYPE, media_type);
                request = request.header(header::ACCEPT, "application/json, text/event-stream");
                steps = cut(messages(choices).as_bytes(), choices);
            }
            "GET" if !choices.rarely(4) => {
                request = request.header("last-event-id", event_id(choices));
            }
            _ => {}
        }
        if choices.rarely(16) {
            steps.push(Step::Error);
        }
        let end_hint = end_hint(choices);
        let body = Scripted::new(steps, end_hint);
        Self {
            request: request.body(body).expect("a request"),
            answer: Answer::new(choices),
            is_post: method == "POST",
        }
    }
}

// === impl Answer ===

impl Answer {
    fn new(choices: &mut Choices<'_>) -> Self {
        let reads = match choices.byte() {
            few @ 224.. => usize::from(few) - 224,
            _ => usize::MAX,
        };
        let waits = choices.one_of(4);
        let end = match choices.one_of(16) {
            14 => End::Fails,
            15 => End::Panics,
            kind => {
                let head = Head::new(kind, choices);
                let is_stream = head.media_type == Some("text/event-stream");
                let body = if is_stream {
                    events(choices)
                } else {
                    json(choices)
                };
                End::Answers {
                    head,
                    body,
                    end_hint: end_hint(choices),
                }
            }
        };
        Self { reads, waits, end }
    }
}

impl Head {
    fn new(kind: u8, choices: &mut Choices<'_>) -> Self {
        let (status, media_type) = match kind {
            0..9 => (200, Some("text/event-stream")),
            9 => (200, Some("application/json")),
            10 => (202, None),
            11 => (204, None),
            12 => (401, None),
            _ => (500, Some("text/event-stream")),
        };
        Self {
            status: StatusCode::from_u16(status).expect("a status"),
            media_type,
            encoded: choices.rarely(16),
        }
    }

    /// Returns `true` if the layer reads the answer's body for events.
    pub fn is_readable_stream(&self) -> bool {
        self.status == 200 && self.media_type == Some("text/event-stream") && !self.encoded
    }

    pub fn is_stream(&self) -> bool {
        self.status == 200 && self.media_type == Some("text/event-stream")
    }

    pub fn response<B>(&self, body: B) -> Response<B> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        if let Some(media_type) = self.media_type {
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(media_type));
        }
        if self.encoded {
            headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        response
    }
}

// === What is sent ===

fn end_hint(choices: &mut Choices<'_>) -> EndHint {
    choices.pick(&[
        EndHint::Nothing,
        EndHint::Nothing,
        EndHint::Length,
        EndHint::End,
    ])
}

fn event_id(choices: &mut Choices<'_>) -> &'static str {
    choices.pick(&["0/0", "1/0", "0/1", "x", "y"])
}

fn request_id(choices: &mut Choices<'_>) -> &'static str {
    choices.pick(&["1", "2", "\"1\""])
}

fn messages(choices: &mut Choices<'_>) -> String {
    match choices.one_of(8) {
        0 => format!("[{},{}]", message(choices), message(choices)),
        1 => message(choices).replacen('}', "", 1),
        _ => message(choices),
    }
}

fn message(choices: &mut Choices<'_>) -> String {
    let id = request_id(choices);
    match choices.one_of(16) {
        0..10 => format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"work"}}}}"#
        ),
        10 => format!(
            r#"{{"jsonrpc":"2.0","id":{id},"method":"tools/call","params":{{"name":"work","task":{{}}}}}}"#
        ),
        11 => format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"subscriptions/listen"}}"#),
        12 => format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"initialize"}}"#),
        13 => format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#),
        _ => format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/cancelled","params":{{"requestId":{id}}}}}"#
        ),
    }
}

/// Splits a text into frames with pauses in between.
fn cut(text: &[u8], choices: &mut Choices<'_>) -> Vec<Step> {
    let mut rest = Bytes::copy_from_slice(text);
    let mut steps = Vec::new();
    while !rest.is_empty() {
        match choices.byte() {
            255 => steps.push(Step::Wait),
            254 => steps.push(Step::Data(Bytes::new())),
            length @ 192..254 => {
                let length = usize::from(length - 191).min(rest.len());
                steps.push(Step::Data(rest.split_to(length)));
            }
            _ => steps.push(Step::Data(rest.split_to(rest.len()))),
        }
    }
    steps
}

fn json(choices: &mut Choices<'_>) -> Vec<Step> {
    let id = request_id(choices);
    let mut steps = cut(
        format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{{}}}}"#).as_bytes(),
        choices,
    );
    ending(&mut steps, choices);
    steps
}

fn events(choices: &mut Choices<'_>) -> Vec<Step> {
    let mut steps = Vec::new();
    for _ in 0..choices.one_of(6) {
        let text = match choices.one_of(16) {
            0..5 => format!("data: \nid: {}\nretry: 3000\n\n", event_id(choices)),
            5..9 => format!(
                "data: {{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":{{}}}}\n\n",
                request_id(choices)
            ),
            9 => format!(
                "id: {}\ndata: {{\"jsonrpc\":\"2.0\",\"id\":{},\"error\":{{}}}}\r\n\r\n",
                event_id(choices),
                request_id(choices)
            ),
            10 => {
                "data: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\n".to_owned()
            }
            11 => ": ping\n\n".to_owned(),
            12 => "data: half\n".to_owned(),
            13 => "data: nonsense\n\n".to_owned(),
            _ => {
                steps.push(Step::Wait);
                continue;
            }
        };
        steps.extend(cut(text.as_bytes(), choices));
    }
    ending(&mut steps, choices);
    steps
}

fn ending(steps: &mut Vec<Step>, choices: &mut Choices<'_>) {
    steps.extend(match choices.one_of(16) {
        0 => Some(Step::Trailers),
        1 => Some(Step::Error),
        2 => Some(Step::Panic),
        3..6 => Some(Step::Wait),
        _ => None,
    });
}

// === impl Scripted ===

impl Scripted {
    pub fn new(steps: Vec<Step>, end_hint: EndHint) -> Self {
        Self {
            steps: steps.into(),
            end_hint,
            log: None,
        }
    }

    pub fn logged(mut self, ledger: Ledger, slot: usize, side: Side) -> Self {
        self.log = Some((ledger, slot, side));
        self.record_has_more();
        self
    }

    /// Records whether the body has more data.
    fn record_has_more(&self) {
        if let Some((ledger, slot, Side::ResponseIn)) = &self.log {
            let ends_unseen = self.end_hint == EndHint::Nothing && !self.steps.is_empty();
            ledger.set_has_more(*slot, ends_unseen || self.bytes_left() > 0);
        }
    }

    fn bytes_left(&self) -> u64 {
        let lengths = self.steps.iter().map(|step| match step {
            Step::Data(data) => data.len() as u64,
            _ => 0,
        });
        lengths.sum()
    }
}

impl Body for Scripted {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let step = self.steps.pop_front();
        self.record_has_more();
        Poll::Ready(match step {
            Some(Step::Data(data)) => {
                if let Some((ledger, slot, side)) = &self.log {
                    ledger.record_frame(*slot, *side, data.clone());
                }
                Some(Ok(Frame::data(data)))
            }
            Some(Step::Trailers) => Some(Ok(Frame::trailers(HeaderMap::new()))),
            Some(Step::Error) => Some(Err(Broken)),
            Some(Step::Wait) => return Poll::Pending,
            Some(Step::Panic) => std::panic::panic_any(PANIC_MESSAGE),
            None => None,
        })
    }

    fn is_end_stream(&self) -> bool {
        self.end_hint == EndHint::End && self.steps.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        match self.end_hint {
            EndHint::Length => SizeHint::with_exact(self.bytes_left()),
            EndHint::Nothing | EndHint::End => SizeHint::new(),
        }
    }
}

// === impl Broken ===

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken on purpose")
    }
}

impl std::error::Error for Broken {}
