//! Compares the layer with two independent parsers on any response body, in any frames. All of them must read the same
//! events, and the layer's probes must not change what the parsers read.

#![no_main]

use std::{convert::Infallible, pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::{Stream, stream};
use fuzz::{
    choices::Choices,
    clock, frames,
    inner::Inner,
    json::Json,
    judge::{self, Verdict},
    parsers::{by_sse_stream, by_sseer},
};
use http::{Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use libfuzzer_sys::fuzz_target;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, RequestId,
    body::TeeBody,
    fuzzing::{self, ParsedEvent},
};
use tokio::time::sleep;
use tower_layer::Layer as _;
use tower_service::Service as _;

/// How long the stream is silent before it is probed or its head is sent.
const INTERVAL: Duration = Duration::from_secs(1);

/// The largest `retry` that the crate uses.
const MAX_RETRY_MS: u64 = (1 << 31) - 1;

const BOM: &[u8] = b"\xef\xbb\xbf";

const PROBE: &[u8] = b":\n\n";

#[derive(Clone, Copy, PartialEq)]
enum Head {
    /// The inner service sends the head right away.
    Inner,
    /// The layer sends the head, because the inner service is silent.
    Early,
    /// The layer sends the head, but the inner answer turns out not to be a stream.
    EarlyJson,
}

/// Frames, and the number of silent intervals before each of them and before the end.
#[derive(Clone)]
struct Script {
    frames: Vec<(u32, Bytes)>,
    last: u32,
}

fuzz_target!(|bytes: &[u8]| {
    let Some((decisions, rest)) = bytes.split_first() else {
        return;
    };
    let (decisions, text) = rest.split_at((usize::from(*decisions) % 64).min(rest.len()));
    let mut choices = Choices::new(decisions);
    let head = choices.pick(&[Head::Inner, Head::Early, Head::EarlyJson]);
    let mut silences = [0; 4]
        .map(|_: u32| u32::from(choices.one_of(3)))
        .into_iter()
        .cycle();
    let mut silence = move || silences.next().unwrap_or_default();
    let frames = frames::cut(text, &mut choices);
    if head != Head::EarlyJson {
        compare_events(&frames);
    }
    let script = Script {
        frames: frames.into_iter().map(|frame| (silence(), frame)).collect(),
        last: silence(),
    };
    compare_probed(text, &script, head);
});

/// Compares the layer's events with both parsers'.
fn compare_events(frames: &[Bytes]) {
    let seen = fuzzing::events(frames.iter().map(|frame| &**frame));
    if !seen
        .iter()
        .all(|event| event.retry_ms.is_none_or(|retry| retry <= MAX_RETRY_MS))
    {
        panic!("{seen:?}");
    }
    // Both parsers consider a `retry` above `u64::MAX` invalid, whereas the layer uses the maximum.
    let beyond = frames
        .concat()
        .chunk_by(|a, b| a.is_ascii_digit() && b.is_ascii_digit())
        .any(|digits| digits.len() > 19);

    let (events, failed) = by_sse_stream(frames);
    let read_by_parser = events.iter().map(|event| {
        let data = event.data.as_deref().unwrap_or_default();
        let retry = event.retry.filter(|_| !beyond);
        (event.id.clone().map(String::into_bytes), retry, data)
    });
    compare(read_by_parser, failed, seen.clone());

    // `sseer` follows the standard: an event needs data, and an id applies to all later events.
    let (events, failed) = by_sseer(frames);
    let read_by_parser = events.iter().map(|event| {
        let retry = event.retry.filter(|_| !beyond);
        let retry = retry.map(|retry| retry.as_millis() as u64);
        (Some(event.id.as_bytes().to_vec()), retry, &*event.data)
    });
    let read_by_parser = read_by_parser.filter(|(_, _, data)| !is_nothing(data).unwrap_or(false));
    let mut last_id = Vec::new();
    let mut lasting = Vec::new();
    for mut event in seen {
        last_id = event.id.unwrap_or(last_id);
        event.id = Some(last_id.clone());
        if event.answers != Ok(None) {
            lasting.push(event);
        }
    }
    compare(read_by_parser, failed, lasting);
}

/// Checks that both have the same events, up to the point where the parser failed.
fn compare<'a>(
    read_by_parser: impl Iterator<Item = (Option<Vec<u8>>, Option<u64>, &'a str)>,
    failed: bool,
    seen: Vec<ParsedEvent>,
) {
    // Events with nothing but a `retry` are skipped, because the parsers accept `+1` as a `retry` and the layer does not.
    let mut seen = seen
        .into_iter()
        .filter(|event| event.id.is_some() || event.answers != Ok(None));
    for (id, retry, data) in read_by_parser {
        match is_nothing(data) {
            Some(true) if id.is_none() => continue,
            // Whether the layer counts this as an event depends on an escape.
            None => return,
            Some(_) => {}
        }
        let Some(event) = seen.next() else {
            panic!("{data:?} with id {id:?} was not seen");
        };
        assert_eq!(event.id, id);
        if let (Some(retry), Some(seen)) = (retry, event.retry_ms) {
            assert_eq!(seen, retry.min(MAX_RETRY_MS));
        }
        match (verdict(data), &event.answers) {
            (Verdict::Clear(id) | Verdict::Perhaps(id), Ok(answers)) => assert_eq!(*answers, id),
            (Verdict::Clear(id), Err(reason)) => {
                assert!(data.contains('\\'), "{reason} for {id:?}")
            }
            (Verdict::Doubtful, Ok(answers)) => {
                // Text that the layer does not need may be malformed.
                let bare = judge::without_text(data.as_bytes());
                let malformed =
                    Json::parse(data.as_bytes()).is_none() && Json::parse(&bare).is_some();
                assert!(malformed, "{answers:?} in {data:?}");
            }
            (Verdict::Perhaps(_) | Verdict::Doubtful, Err(_)) => {}
        }
    }
    assert!(failed || seen.next().is_none(), "an event that is none");
}

fn verdict(data: &str) -> Verdict<Option<RequestId>> {
    if data.bytes().all(|byte| b" \t\r\n".contains(&byte)) {
        return Verdict::Clear(None);
    }
    Json::parse(data.as_bytes()).map_or(Verdict::Doubtful, |data| judge::answer(&data))
}

/// Returns `true` if the data answers nothing, or `None` if an escape makes it ambiguous.
fn is_nothing(data: &str) -> Option<bool> {
    match verdict(data) {
        Verdict::Clear(None) => (!data.contains('\\')).then_some(true),
        Verdict::Doubtful if data.contains('"') => {
            // If only text is malformed, the layer may read it as a message that is not an answer.
            let bare = judge::without_text(data.as_bytes());
            Json::parse(&bare).is_none().then_some(false)
        }
        _ => Some(false),
    }
}

/// Compares the response with probes to the response without any.
fn compare_probed(text: &[u8], script: &Script, head: Head) {
    let received = clock::run(respond(script, head));
    if head == Head::EarlyJson {
        let Some(answer) = Json::parse(text) else {
            return;
        };
        let (events, failed) = by_sse_stream(&received);
        let sent_by_layer = events
            .first()
            .and_then(|event| Json::parse(event.data.as_deref()?.as_bytes()));
        assert!(!failed && events.len() == 1, "{received:?}");
        assert_eq!(sent_by_layer, Some(answer), "{received:?}");
        return;
    }
    let inner: Vec<Bytes> = script
        .frames
        .iter()
        .map(|(_, frame)| frame.clone())
        .collect();
    assert_eq!(
        by_sse_stream(&received),
        by_sse_stream(&inner),
        "sse-stream: {received:?}"
    );
    assert_eq!(by_sseer(&received), by_sseer(&inner), "sseer: {received:?}");
    if inner.iter().any(|frame| frame.ends_with(PROBE)) {
        return;
    }
    let probed_first = received
        .iter()
        .find(|frame| !frame.is_empty())
        .is_some_and(|frame| frame == PROBE);
    let passed: Vec<u8> = received
        .iter()
        .filter(|frame| *frame != PROBE)
        .flatten()
        .copied()
        .collect();
    let text = match probed_first {
        // After a probe, a byte order mark would become part of the first line.
        true if BOM.starts_with(text) => &[],
        true => text.strip_prefix(BOM).unwrap_or(text),
        false => text,
    };
    assert_eq!(passed, text, "{received:?}");
}

/// The layer's response to a client that always reads.
async fn respond(script: &Script, head: Head) -> Vec<Bytes> {
    let layer = CancelOnDisconnectLayer::new().keep_alive(INTERVAL);
    let layer = match head {
        Head::Inner => layer,
        Head::Early | Head::EarlyJson => layer.commit_after(INTERVAL),
    };
    let media_type = match head {
        Head::Inner | Head::Early => "text/event-stream",
        Head::EarlyJson => "application/json",
    };
    let script = script.clone();
    let mut service = layer.layer(Inner(move |request: Request<TeeBody<Full<Bytes>>>| {
        let script = script.clone();
        async move {
            let Ok(_whole) = request.into_body().collect().await;
            if head != Head::Inner {
                sleep(INTERVAL + INTERVAL / 8).await;
            }
            Response::builder()
                .header(header::CONTENT_TYPE, media_type)
                .body(StreamBody::new(timed_frames(script)))
                .expect("a response")
        }
    }));
    let call = Request::post("/mcp")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json, text/event-stream")
        .body(Full::from(
            r#"{"jsonrpc":"2.0","id":7,"method":"tools/call"}"#,
        ))
        .expect("a request");
    let Ok(response) = service.call(call).await;
    let mut body = pin!(response.into_body());
    let mut frames = Vec::new();
    while let Some(Ok(frame)) = body.frame().await {
        frames.extend(frame.into_data());
    }
    frames
}

/// A script's frames with their pauses. No frame is sent at the moment a probe is due.
fn timed_frames(
    script: Script,
) -> impl Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + 'static {
    let frames = script
        .frames
        .into_iter()
        .map(|(silence, frame)| (silence, Some(frame)));
    let steps = frames.chain([(script.last, None)]);
    stream::unfold(steps, async |mut steps| {
        let (silence, frame) = steps.next()?;
        if silence > 0 {
            sleep(INTERVAL * silence + INTERVAL / 2).await;
        }
        Some((Ok(Frame::data(frame?)), steps))
    })
}
