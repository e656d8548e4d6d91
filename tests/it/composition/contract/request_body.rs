//! The request body: what the inner service gets, and what the layer learns from it.

use std::{
    convert::Infallible,
    sync::{Arc, Mutex, PoisonError},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{Method, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason::ClientDisconnected, Outcome, RequestId, body::TeeBody,
    observe::ParseFailure,
};
use proptest::{collection::vec, prelude::*};
use serde_json::json;
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::{
    exchange::{CALL, Kind, Tokens, event_stream, exchange, immediate},
    script::{
        Broken, End, Length,
        Reading::{self, Nothing, OneFrame, ToEnd},
        Script, Scripted, Seen, Step, read,
    },
};
use crate::log::{Call, Happened};

// --- What the inner service gets ---

/// Returns what an inner service sees of a request's body if it reads it this far.
fn seen_inside(
    layer: &CancelOnDisconnectLayer,
    request: Request<Scripted>,
    reading: Reading,
) -> Vec<Seen> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let writer = seen.clone();
    let service = layer.layer(service_fn(move |request: Request<TeeBody<Scripted>>| {
        let writer = writer.clone();
        async move {
            *writer.lock().unwrap_or_else(PoisonError::into_inner) =
                read(&mut request.into_body(), reading);
            Ok::<_, Infallible>(event_stream(Full::<Bytes>::default()))
        }
    }));
    let response = service.oneshot(request).now_or_never();
    let Ok(response) = response.expect("the service answers at once");
    drop(response);
    let mut seen = seen.lock().unwrap_or_else(PoisonError::into_inner);
    std::mem::take(&mut *seen)
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let data = vec(any::<u8>(), 0..300).prop_map(|data| Step::Data(data.into()));
    let step = prop_oneof![
        6 => data,
        1 => Just(Step::Data(Bytes::new())),
        1 => Just(Step::Wait),
        1 => Just(Step::Error),
    ];
    (vec(step, 0..12), any::<bool>()).prop_map(|(mut steps, trailers)| {
        steps.extend(trailers.then_some(Step::Trailers));
        steps
    })
}

fn script(steps: impl Strategy<Value = Vec<Step>>) -> impl Strategy<Value = Script> {
    let length = prop::sample::select(vec![Length::Unknown, Length::Bounds, Length::Exact]);
    let end = prop::sample::select(vec![End::None, End::Announced, End::Silent]);
    (steps, length, end).prop_map(|(steps, length, end)| Script::new(steps).length(length).end(end))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_body_reaches_the_inner_service_unchanged_frame_by_frame(
        script in script(steps()),
        reading in prop::sample::select(vec![ToEnd, OneFrame, Nothing]),
        kind in prop::sample::select(Kind::ALL.to_vec()),
        method in prop::sample::select(vec![Method::POST, Method::GET, Method::PUT]),
    ) {
        let bare = read(&mut script.body(), reading);
        let mut request = kind.request_with(script.body());
        *request.method_mut() = method;
        let (layer, _log) = immediate();
        prop_assert_eq!(seen_inside(&layer, request, reading), bare);
    }

    #[test]
    fn a_call_is_parsed_from_any_split_into_frames(
        (id, written) in id(),
        tool in "\\PC{0,20}",
        text in "\\PC{0,2000}",
        cuts in vec(any::<prop::sample::Index>(), 0..40),
        end in prop::sample::select(vec![End::None, End::Announced]),
        trailers in any::<bool>(),
        kind in prop::sample::select(vec![Kind::Stateless, Kind::Session]),
    ) {
        let message = json!({
            "jsonrpc": "2.0",
            "id": written,
            "method": "tools/call",
            "params": { "name": tool, "arguments": { "text": text } },
        });
        let mut steps = cut(message.to_string().into(), &cuts);
        steps.extend(trailers.then_some(Step::Trailers));
        let request = kind.request_with(Script::new(steps).end(end).body());
        let (layer, log) = immediate();
        seen_inside(&layer, request, ToEnd);
        let call = Call {
            id,
            method: "tools/call".to_owned(),
            tool: Some(tool),
            has_session: kind == Kind::Session,
        };
        let ended = Happened::Ended(call.clone(), Outcome::Unknown);
        prop_assert_eq!(log.events(), [Happened::Started(call), ended]);
    }
}

/// Generates an id, along with its JSON form.
fn id() -> impl Strategy<Value = (RequestId, serde_json::Value)> {
    prop_oneof![
        any::<i64>().prop_map(|id| (RequestId::Number(id), json!(id))),
        "\\PC{0,12}".prop_map(|id| (RequestId::String(id.as_str().into()), json!(id))),
    ]
}

/// Cuts the bytes into frames at these positions. Two cuts at the same position make an empty frame.
fn cut(mut bytes: Bytes, cuts: &[prop::sample::Index]) -> Vec<Step> {
    let mut places: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len())).collect();
    places.sort_unstable();
    let mut from = 0;
    let mut frames: Vec<Step> = Vec::new();
    for place in places {
        frames.push(Step::Data(bytes.split_to(place - from)));
        from = place;
    }
    frames.push(Step::Data(bytes));
    frames
}

// --- What the layer learns ---

/// Returns the events for a POST whose body is read this far.
fn events_of(script: Script, reading: Reading) -> Vec<Happened> {
    let (layer, log) = immediate();
    seen_inside(&layer, Kind::Session.request_with(script.body()), reading);
    log.events()
}

#[test]
fn a_body_that_was_not_read_to_its_end_is_unknown() {
    let unread = [Happened::UnparsedBody(ParseFailure::NotRead)];
    let call = || Script::whole(CALL);
    assert_eq!(events_of(call(), Nothing), unread);
    // All of the body has been read, but its end has not been seen.
    assert_eq!(events_of(call(), OneFrame), unread);
    assert_eq!(events_of(call().end(End::Silent), ToEnd), unread);
}

/// Returns the events for a call whose body stays unread and is answered with `status`.
fn events_of_unread(status: StatusCode, keep: Keep) -> Vec<Happened> {
    let (layer, log) = immediate();
    let kept = Arc::new(Mutex::new(None));
    let keeper = kept.clone();
    let service = layer.layer(service_fn(move |request: Request<TeeBody<Scripted>>| {
        *keeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(request.into_body());
        if keep == Keep::Nothing {
            keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        }
        async move {
            if keep == Keep::ForEver {
                std::future::pending::<()>().await;
            }
            let mut response = Response::new(Script::stalled().body());
            *response.status_mut() = status;
            Ok::<_, Infallible>(response)
        }
    }));
    let request = Kind::Session.request_with(Script::whole(CALL).body());
    let response = service.oneshot(request).now_or_never();
    assert_eq!(response.is_none(), keep == Keep::ForEver);
    if keep == Keep::PastTheHead {
        kept.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
    drop(response);
    kept.lock().unwrap_or_else(PoisonError::into_inner).take();
    log.events()
}

/// How long a request's body is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Keep {
    Nothing,
    PastTheHead,
    /// No head is ever sent.
    ForEver,
}

#[test]
fn a_body_that_a_refusal_left_unread_is_not_reported() {
    for status in [
        StatusCode::UNAUTHORIZED,
        StatusCode::TOO_MANY_REQUESTS,
        StatusCode::TEMPORARY_REDIRECT,
        StatusCode::SERVICE_UNAVAILABLE,
    ] {
        for keep in [Keep::Nothing, Keep::PastTheHead] {
            assert_eq!(events_of_unread(status, keep), [], "{status} {keep:?}");
        }
    }
}

#[test]
fn a_body_that_was_unread_at_the_disconnect_is_not_reported() {
    assert_eq!(events_of_unread(StatusCode::OK, Keep::ForEver), []);
}

#[test]
fn a_body_that_a_service_accepted_unread_is_unknown() {
    for status in [StatusCode::OK, StatusCode::ACCEPTED] {
        for keep in [Keep::Nothing, Keep::PastTheHead] {
            let events = events_of_unread(status, keep);
            let unread = [Happened::UnparsedBody(ParseFailure::NotRead)];
            assert_eq!(events, unread, "{status} {keep:?}");
        }
    }
}

#[test]
fn a_body_that_announces_its_end_with_its_last_frame_is_parsed() {
    let events = events_of(Script::whole(CALL).end(End::Announced), OneFrame);
    assert!(matches!(
        events[..],
        [Happened::Started(_), Happened::Ended(..)]
    ));
}

#[test]
fn a_body_longer_than_4_mib_passes_unread() {
    let padding = Bytes::from(vec![b' '; 4 * 1024 * 1024]);
    let script = Script::new([Step::Data(padding.clone()), Step::data(CALL)]);
    let (layer, log) = immediate();
    let request = Kind::Session.request_with(script.body());
    let seen = seen_inside(&layer, request, ToEnd);
    assert!(seen.contains(&Seen::Data(padding)), "unchanged");
    assert_eq!(
        log.events(),
        [Happened::UnparsedBody(ParseFailure::TooLarge)]
    );
}

#[test]
fn a_body_of_exactly_4_mib_is_read() {
    let padding = vec![b' '; 4 * 1024 * 1024 - CALL.len()];
    let script = Script::new([Step::Data(padding.into()), Step::data(CALL)]);
    assert_eq!(events_of(script, ToEnd).len(), 2);
}

/// Returns a call that follows this many bytes of white space, each in its own frame.
fn in_frames(white_space: usize) -> Script {
    let frames = (0..white_space).map(|_| Step::data(" "));
    Script::new(frames.chain([Step::data(CALL)]))
}

#[test]
fn a_body_in_more_than_16_384_frames_passes_unread() {
    let script = in_frames(16_384);
    let (layer, log) = immediate();
    let request = Kind::Session.request_with(script.body());
    let seen = seen_inside(&layer, request, ToEnd);
    assert_eq!(seen, read(&mut script.body(), ToEnd), "unchanged");
    assert_eq!(
        log.events(),
        [Happened::UnparsedBody(ParseFailure::TooLarge)]
    );
}

#[test]
fn a_body_in_16_384_frames_is_read_and_any_number_of_empty_ones_as_well() {
    assert_eq!(events_of(in_frames(16_383), ToEnd).len(), 2);
    let empty = (0..20_000).map(|_| Step::data(""));
    let script = Script::new(empty.chain([Step::data(CALL)]));
    let events = events_of(script, ToEnd);
    assert!(matches!(
        events[..],
        [Happened::Started(_), Happened::Ended(..)]
    ));
}

#[test]
fn what_is_not_a_call_neither_fires_a_token_nor_is_an_event() {
    for message in [
        json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {} }),
        json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }),
        json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": 7 } }),
        json!({ "jsonrpc": "2.0", "id": 1, "result": {} }),
        json!({ "jsonrpc": "2.0", "id": 1, "error": { "code": 1, "message": "no" } }),
    ] {
        for kind in [Kind::Stateless, Kind::Session] {
            let (layer, log) = immediate();
            let request = kind.request_with(Full::from(message.to_string()));
            let (response, token) = exchange(&layer, request, &Script::stalled());
            drop(response);
            assert_eq!(token.reason(), None, "{kind:?}: {message}");
            assert_eq!(log.events(), [], "{kind:?}: {message}");
        }
    }
}

#[test]
fn the_standalone_stream_of_a_session_does_not_fire_its_token() {
    let (layer, log) = immediate();
    let mut request = Kind::Session.request_with(Full::default());
    *request.method_mut() = Method::GET;
    let (response, token) = exchange(&layer, request, &Script::stalled());
    drop(response);
    assert_eq!(token.reason(), None);
    assert_eq!(log.events(), []);
}

// --- Errors ---

/// Answers 400 with the error that broke off the body.
async fn complain(
    request: Request<TeeBody<Scripted>>,
) -> Result<Response<Full<Bytes>>, Infallible> {
    let error = request
        .into_body()
        .collect()
        .await
        .expect_err("the body breaks off");
    let mut response = Response::new(Full::from(error.to_string()));
    *response.status_mut() = StatusCode::BAD_REQUEST;
    Ok(response)
}

#[test]
fn a_request_that_breaks_off_fires_the_token_of_a_plain_route_and_its_answer_passes() {
    let (layer, _log) = immediate();
    let tokens = Tokens::default();
    let recording = tokens.clone();
    let service = layer.layer(service_fn(move |request: Request<TeeBody<Scripted>>| {
        recording.record(&request);
        complain(request)
    }));
    let script = Script::new([Step::data("half of "), Step::Error]);
    let request = Kind::Plain.request_with(script.body());
    let response = service.oneshot(request).now_or_never();
    let Ok(response) = response.expect("the service answers at once");
    assert_eq!(tokens.latest().reason(), Some(ClientDisconnected));
    assert_eq!(response.status(), StatusCode::BAD_REQUEST);
    let Ok(body) = response
        .into_body()
        .collect()
        .now_or_never()
        .expect("a whole body");
    assert_eq!(body.to_bytes(), Broken.to_string());
    assert_eq!(tokens.latest().reason(), Some(ClientDisconnected));
}

#[test]
fn a_call_that_breaks_off_is_not_a_call() {
    for kind in [Kind::Stateless, Kind::Session] {
        let (layer, log) = immediate();
        let half = Step::Data(Bytes::from_static(&CALL.as_bytes()[..40]));
        let script = Script::new([half, Step::Error]);
        let response = layer
            .layer(service_fn(complain))
            .oneshot(kind.request_with(script.body()))
            .now_or_never();
        let Ok(response) = response.expect("the service answers at once");
        drop(response);
        assert!(layer.calls().is_empty(), "{kind:?}");
        assert_eq!(log.started(), 0, "{kind:?}");
        assert_eq!(log.cancelled(), [], "{kind:?}");
    }
}
