//! Compares the layer with `serde_json` on any request body, whole and split into any frames. The layer must not read
//! anything that is not in the body, and must pass the body on unchanged.

#![no_main]

use std::{
    convert::Infallible,
    future::{Ready, ready},
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use bytes::Bytes;
use futures_util::{FutureExt as _, stream};
use fuzz::{
    choices::Choices,
    clock, frames,
    json::Json,
    judge::{Verdict, is_array, message, without_text},
};
use http::{Request, Response, StatusCode, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use libfuzzer_sys::fuzz_target;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, Event, Outcome, RequestId,
    body::TeeBody,
    fuzzing::{self, ParsedMessage},
    observe::ParseFailure,
};
use tower_layer::Layer as _;
use tower_service::Service;

/// The maximum number of frames that the layer keeps.
const MAX_FRAMES: usize = 16 * 1024;

/// A call as observers see it: id, method, tool, protocol version.
type Call = (RequestId, String, Option<String>, Option<String>);

/// The events that the layer has reported.
#[derive(Default)]
struct Reported {
    started: Vec<Call>,
    ended: Vec<Outcome>,
    unknown: Option<ParseFailure>,
}

/// An inner service that parses its request body and refuses invalid JSON.
#[derive(Clone)]
struct Strict {
    received: Arc<Mutex<Vec<Bytes>>>,
}

fuzz_target!(|bytes: &[u8]| {
    let (body, cuts) = match bytes.iter().rposition(|byte| *byte == 0) {
        // JSON text has no zero bytes, so whatever follows the last one chooses the cuts.
        Some(zero) => (&bytes[..zero], &bytes[zero + 1..]),
        None => (bytes, &[][..]),
    };
    let read = fuzzing::read(body);
    judge(body, &read);
    let frames = frames::cut(body, &mut Choices::new(cuts));
    let frames = if frames.len() < MAX_FRAMES {
        frames
    } else {
        vec![Bytes::copy_from_slice(body)]
    };
    pass(body, frames, read);
});

/// Compares the crate's result with `serde_json`'s.
fn judge(body: &[u8], read: &Result<ParsedMessage, ParseFailure>) {
    assert_eq!(
        is_array(body),
        *read == Err(ParseFailure::Batch),
        "{}",
        body.escape_ascii()
    );
    let Some(json) = Json::parse(body) else {
        // The crate skips text it does not need, so in a body that it accepts, only that text may be invalid.
        let bare = without_text(body);
        assert!(
            read.is_err() || Json::parse(&bare).is_some(),
            "{}",
            body.escape_ascii()
        );
        return;
    };
    match (message(&json), read) {
        (Verdict::Clear(message) | Verdict::Perhaps(message), Ok(read)) => {
            assert_eq!(*read, message, "{}", body.escape_ascii());
        }
        (Verdict::Doubtful, Ok(read)) => panic!("{read:?} of {}", body.escape_ascii()),
        // An escape may be hiding a key, so the crate is free to reject the body.
        (Verdict::Clear(message), Err(reason)) => {
            assert!(
                body.contains(&b'\\'),
                "{reason} for {message:?} in {}",
                body.escape_ascii()
            );
        }
        (Verdict::Perhaps(_) | Verdict::Doubtful, Err(_)) => {}
    }
}

/// Passes the body through the layer.
fn pass(body: &[u8], frames: Vec<Bytes>, read: Result<ParsedMessage, ParseFailure>) {
    let reported = Arc::new(Mutex::new(Reported::default()));
    let log = reported.clone();
    let layer = CancelOnDisconnectLayer::new().observe(move |event: &Event<'_>| {
        let mut reported = log.lock().expect("no panic");
        match event {
            Event::Started { call, .. } => reported.started.push((
                call.request_id().clone(),
                call.method().to_owned(),
                call.tool().map(str::to_owned),
                call.protocol_version().map(str::to_owned),
            )),
            Event::Ended { outcome, .. } => reported.ended.push(*outcome),
            Event::UnparsedBody { reason, .. } => reported.unknown = Some(*reason),
            _ => panic!("{event:?}"),
        }
    });
    let received = Arc::new(Mutex::new(Vec::new()));
    let mut service = layer.layer(Strict {
        received: received.clone(),
    });
    let sent = frames.clone();
    let request = Request::post("/mcp")
        .header(header::CONTENT_TYPE, "application/json")
        .body(StreamBody::new(stream::iter(
            sent.into_iter()
                .map(|frame| Ok::<_, Infallible>(Frame::data(frame))),
        )))
        .expect("a request");
    let response = clock::run(service.call(request));
    drop(response);

    assert_eq!(
        *received.lock().expect("no panic"),
        frames,
        "the frames are untouched"
    );
    let reported = std::mem::take(&mut *reported.lock().expect("no panic"));
    let (expected, unknown) = match read {
        Ok(read) => (call(read), None),
        Err(reason) => (None, Some(reason)),
    };
    assert_eq!(reported.started, Vec::from_iter(expected.clone()));
    assert_eq!(reported.unknown, unknown);
    let outcome = match Json::parse(body) {
        Some(_) => Outcome::Completed,
        // The inner service has refused the body.
        None => Outcome::Failed,
    };
    assert_eq!(reported.ended, Vec::from_iter(expected.map(|_| outcome)));
    assert!(layer.calls().is_empty());
}

/// Returns the call in a request without a session, or `None` if the request is not a call.
fn call(read: ParsedMessage) -> Option<Call> {
    match read {
        ParsedMessage::Request {
            id,
            method,
            tool,
            protocol_version,
            ..
        } if &*method != "initialize" => Some((
            id,
            method.into(),
            tool.map(Into::into),
            protocol_version.map(Into::into),
        )),
        _ => None,
    }
}

impl<B> Service<Request<TeeBody<B>>> for Strict
where
    TeeBody<B>: http_body::Body<Data = Bytes, Error = Infallible>,
{
    type Response = Response<Empty<Bytes>>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<TeeBody<B>>) -> Self::Future {
        let mut body = std::pin::pin!(request.into_body());
        let mut whole = Vec::new();
        let mut received = self.received.lock().expect("no panic");
        while let Some(Ok(frame)) = body.frame().now_or_never().expect("nothing to wait for") {
            let data = frame.into_data().expect("no trailers were sent");
            whole.extend_from_slice(&data);
            received.push(data);
        }
        let mut response = Response::new(Empty::new());
        if Json::parse(&whole).is_none() {
            *response.status_mut() = StatusCode::BAD_REQUEST;
        }
        ready(Ok(response))
    }
}
