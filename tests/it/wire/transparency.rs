//! Probes do not change any events.
//!
//! A client reads the same events with and without probes, whatever the inner service sends, and however and whenever
//! it sends it.

mod oracle;
#[allow(unreachable_pub, reason = "the fuzz targets include this file, too")]
mod parsers;
mod streams;

use std::{cell::Cell, convert::Infallible, pin::pin, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use http::{Request, Response, header};
use http_body::Frame;
use http_body_util::{BodyExt as _, Full, StreamBody};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, body::TeeBody};
use proptest::{
    collection::vec,
    prelude::*,
    test_runner::{TestCaseError, TestRunner},
};
use serde_json::{Value, json};
use tokio::time::sleep;
use tower::{Layer as _, ServiceExt as _, service_fn};

use self::{
    oracle::{Piece, expected, is_boundary, is_probe, pieces, without_mark},
    parsers::{by_sse_stream, by_sseer},
    streams::{Cut, cut, cuts, noise, stream_of_events},
};

/// How long a stream is silent before a probe is sent.
const INTERVAL: Duration = Duration::from_secs(1);

/// How long an answer can be silent before the layer sends its head early.
const COMMIT_AFTER: Duration = Duration::from_secs(1);

/// What the inner service sends.
///
/// It is each frame with the number of silent intervals before it, followed by the number before the end.
type Script = (Vec<(u32, Bytes)>, u32);

/// What sends the response head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Head {
    /// The inner service, at once.
    Inner,
    /// The layer, because the inner service is silent.
    Early,
}

/// What a client has received.
struct Received {
    frames: Vec<Bytes>,
    /// The number of probes in `frames`.
    probes: usize,
}

#[test]
fn events_are_the_same_with_probes_at_any_position() {
    let (probes, events) = (Cell::new(0), Cell::new(0));
    let streams = (stream_of_events(), cuts(), silences(), head());
    let checked = runner(600).run(&streams, |(text, cuts, silences, head)| {
        let script = script(&text, &cuts, &silences);
        let got = through(&script, head, &[0]);
        prop_assert_eq!(pieces(&got.frames), expected(&script), "{:?}", &script);
        probes.set(probes.get() + got.probes);
        events.set(events.get() + by_sseer(&got.frames).0.len());
        reads_the_same(&script, &got)
    });
    checked.expect("no event differs");
    // Make sure that enough has been probed and read for the test to be meaningful.
    assert!(probes.get() > 600, "{} probes", probes.get());
    assert!(events.get() > 600, "{} events", events.get());
}

#[test]
fn noise_is_the_same_with_probes() {
    let streams = (noise(), cuts(), silences(), head());
    let checked = runner(600).run(&streams, |(text, cuts, silences, head)| {
        let script = script(&text, &cuts, &silences);
        let got = through(&script, head, &[0]);
        prop_assert_eq!(pieces(&got.frames), expected(&script), "{:?}", &script);
        reads_the_same(&script, &got)
    });
    checked.expect("no event differs");
}

#[test]
fn a_slow_client_reads_the_same_events() {
    let pauses = vec(prop_oneof![2 => Just(0_u32), 1 => 1..4_u32], 1..8);
    let streams = (stream_of_events(), cuts(), silences(), head(), pauses);
    let checked = runner(500).run(&streams, |(text, cuts, silences, head, pauses)| {
        let script = script(&text, &cuts, &silences);
        let got = through(&script, head, &pauses);
        // When a probe is due depends on the client, but where it may be placed does not.
        let mut passed = Vec::new();
        for piece in pieces(&got.frames) {
            match piece {
                Piece::Inner(bytes) => passed.extend(bytes),
                Piece::Probe => prop_assert!(is_boundary(&passed), "{:?}", &got.frames),
            }
        }
        let first = got.frames.iter().find(|frame| !frame.is_empty());
        let probed_first = first.is_some_and(|frame| is_probe(frame));
        let whole = if probed_first {
            without_mark(&text)
        } else {
            &text
        };
        prop_assert_eq!(&passed, whole, "{:?}", &got.frames);
        reads_the_same(&script, &got)
    });
    checked.expect("no event differs");
}

#[test]
fn a_json_answer_that_is_sent_as_an_event_is_one_event_in_any_split() {
    let streams = (
        "[a-zé\"\\\\{}: \r\n]{0,40}",
        any::<bool>(),
        cuts(),
        silences(),
    );
    let checked = runner(200).run(&streams, |(text, pretty, cuts, silences)| {
        let answer = json!({ "jsonrpc": "2.0", "id": 7, "result": { "text": text } });
        let body = if pretty {
            format!("{answer:#}")
        } else {
            answer.to_string()
        };
        let script = script(body.as_bytes(), &cuts, &silences);
        let got = exchange(&script, Head::Early, &[0], "application/json");
        let (events, failed) = by_sse_stream(&got.frames);
        prop_assert!(!failed, "{:?}", &got.frames);
        let answers: Vec<Value> = events
            .iter()
            .map(|event| {
                serde_json::from_str(event.data.as_deref().unwrap_or_default()).unwrap_or_default()
            })
            .collect();
        prop_assert_eq!(answers, [answer], "{:?}", &got.frames);
        Ok(())
    });
    checked.expect("one event");
}

fn reads_the_same((frames, _): &Script, got: &Received) -> Result<(), TestCaseError> {
    let inner: Vec<Bytes> = frames.iter().map(|(_, frame)| frame.clone()).collect();
    prop_assert_eq!(
        by_sse_stream(&got.frames),
        by_sse_stream(&inner),
        "sse-stream: {:?}",
        &got.frames
    );
    prop_assert_eq!(
        by_sseer(&got.frames),
        by_sseer(&inner),
        "sseer: {:?}",
        &got.frames
    );
    Ok(())
}

// === Exchanges ===

fn through(script: &Script, head: Head, pauses: &[u32]) -> Received {
    exchange(script, head, pauses, "text/event-stream")
}

/// Reads one of the layer's responses on a clock that jumps.
///
/// Before each frame, the client waits for the number of intervals given in `pauses`.
fn exchange(script: &Script, head: Head, pauses: &[u32], media_type: &'static str) -> Received {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let layer = CancelOnDisconnectLayer::new().keep_alive(INTERVAL);
    let layer = match head {
        Head::Inner => layer,
        Head::Early => layer.commit_after(COMMIT_AFTER),
    };
    let script = script.clone();
    let service = service_fn(move |request: Request<TeeBody<Full<Bytes>>>| {
        let script = script.clone();
        async move {
            let Ok(_whole) = request.into_body().collect().await;
            if head == Head::Early {
                sleep(COMMIT_AFTER + INTERVAL / 8).await;
            }
            let response = Response::builder()
                .header(header::CONTENT_TYPE, media_type)
                .body(StreamBody::new(sent(script)))
                .expect("a response");
            Ok::<_, Infallible>(response)
        }
    });
    runtime.block_on(async {
        let Ok(response) = layer.layer(service).oneshot(call()).await;
        let mut body = pin!(response.into_body());
        let mut frames = Vec::new();
        for pause in pauses.iter().cycle() {
            if *pause > 0 {
                sleep(INTERVAL * *pause).await;
            }
            let Some(Ok(frame)) = body.frame().await else {
                break;
            };
            frames.extend(frame.into_data());
        }
        let probes = frames.iter().filter(|frame| is_probe(frame)).count();
        Received { frames, probes }
    })
}

/// Yields a script's frames at their times, which never coincide with a probe being due.
fn sent(
    (frames, last): Script,
) -> impl stream::Stream<Item = Result<Frame<Bytes>, Infallible>> + Send + 'static {
    let frames = frames
        .into_iter()
        .map(|(silence, frame)| (silence, Some(frame)));
    let steps = frames.chain([(last, None)]);
    stream::unfold(steps, async |mut steps| {
        let (silence, frame) = steps.next()?;
        if silence > 0 {
            sleep(INTERVAL * silence + INTERVAL / 2).await;
        }
        Some((Ok(Frame::data(frame?)), steps))
    })
}

fn call() -> Request<Full<Bytes>> {
    Request::post("/mcp")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json, text/event-stream")
        .body(Full::from(
            r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"talk"}}"#,
        ))
        .expect("a request")
}

// === Strategies ===

fn runner(cases: u32) -> TestRunner {
    TestRunner::new(ProptestConfig {
        cases,
        failure_persistence: None,
        ..ProptestConfig::default()
    })
}

fn head() -> impl Strategy<Value = Head> {
    prop_oneof![Just(Head::Inner), Just(Head::Early)]
}

/// Generates the silences before a script's frames. They are repeated as needed.
fn silences() -> impl Strategy<Value = Vec<u32>> {
    vec(prop_oneof![1 => Just(0_u32), 1 => 1..4_u32], 1..12)
}

fn script(text: &[u8], cuts: &[Cut], silences: &[u32]) -> Script {
    let mut silences = silences.iter().copied().cycle();
    let mut silence = || silences.next().unwrap_or_default();
    let frames = cut(text, cuts)
        .into_iter()
        .map(|frame| (silence(), Bytes::copy_from_slice(frame)))
        .collect();
    (frames, silence())
}
