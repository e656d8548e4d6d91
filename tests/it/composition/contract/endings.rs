//! What counts as the end of a body, and which call it ends.
//!
//! This covers trailers, answers in pieces, and possible answers.

use std::{
    convert::Infallible,
    future::pending,
    sync::{Arc, Mutex, PoisonError},
    task::Poll,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use http::{HeaderValue, Method, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Full};
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer,
    CancelReason::{self, ClientCancelled, ClientDisconnected, Requested, SessionClosed},
    Outcome,
    body::{ResponseBody, TeeBody},
};
use serde_json::{Value, json};
use tower::{Layer as _, ServiceExt as _, service_fn};

use super::{
    exchange::{
        CALL, Kind, Tokens, bodyless, event_stream, exchange, immediate, poll_once, respond,
    },
    script::{
        End, Length,
        Reading::{Nothing, OneFrame, ToEnd},
        Script, Scripted, Seen, Step, read,
    },
};
use crate::{log::number, support::within};

const SESSION: &str = "mcp-session-id";

const ANSWER: &str = r#"{"jsonrpc":"2.0","id":7,"result":{}}"#;

// --- Trailers ---

#[test]
fn a_body_that_is_read_up_to_its_trailers_and_dropped_is_not_a_disconnect() {
    let script = Script::new([Step::data("data: 1\n\n"), Step::Trailers]);
    for kind in Kind::ALL {
        for content_type in ["text/event-stream", "application/grpc"] {
            let (layer, _log) = immediate();
            let script = script.clone();
            let (response, token) = respond(&layer, kind.request(), move |_| {
                with(
                    event_stream(script.body()),
                    header::CONTENT_TYPE,
                    content_type,
                )
            });
            let mut body = response.into_body();
            read(&mut body, OneFrame);
            let trailers = read(&mut body, OneFrame);
            assert!(matches!(trailers[1], Seen::Trailers(_)), "{trailers:?}");
            drop(body);
            assert_eq!(token.reason(), None, "{kind:?} {content_type}");
            assert!(layer.calls().is_empty(), "{kind:?} {content_type}");
        }
    }
}

#[test]
fn a_request_whose_reader_stops_at_its_trailers_was_read() {
    let (layer, log) = immediate();
    let tokens = Tokens::default();
    let recording = tokens.clone();
    let service = layer.layer(service_fn(move |request: Request<TeeBody<Scripted>>| {
        recording.record(&request);
        let mut body = request.into_body();
        read(&mut body, OneFrame);
        let trailers = read(&mut body, OneFrame);
        assert!(matches!(trailers[1], Seen::Trailers(_)), "{trailers:?}");
        async { Ok::<_, Infallible>(event_stream(Script::stalled().body())) }
    }));
    let script = Script::new([Step::data(CALL), Step::Trailers]);
    let request = Kind::Session.request_with(script.body());
    let Ok(response) = service.oneshot(request).now_or_never().expect("at once");
    assert_eq!(log.started(), 1);
    drop(response);
    assert_eq!(tokens.latest().reason(), Some(ClientDisconnected));
}

// --- Possible answers ---

#[test]
fn a_disconnect_after_a_possible_answer_cancels_nothing() {
    let batch = r#"data: [{"jsonrpc":"2.0","id":7,"result":{}}]"#;
    let batch = || Script::whole(format!("{batch}\n\n")).end(End::Silent);
    let gzip = || Script::whole("\u{1f}?").end(End::Silent);
    for kind in [Kind::Stateless, Kind::Session] {
        for (what, script, encoding) in [("a batch", batch(), ""), ("gzip", gzip(), "gzip")] {
            let (layer, log) = immediate();
            let (response, token) = respond(&layer, kind.request(), move |_| {
                let events = event_stream(script.body());
                with(events, header::CONTENT_ENCODING, encoding)
            });
            let mut body = response.into_body();
            read(&mut body, OneFrame);
            assert_eq!(layer.calls().len(), 1, "{kind:?} {what}");
            drop(body);
            assert_eq!(token.reason(), None, "{kind:?} {what}");
            assert_eq!(log.ends(&number(7)), [Outcome::Unknown], "{kind:?} {what}");
        }
    }
}

#[test]
fn an_encoded_stream_without_data_yet_is_cancelled() {
    for kind in [Kind::Stateless, Kind::Session] {
        let (layer, log) = immediate();
        let (response, token) = respond(&layer, kind.request(), |_| {
            let events = event_stream(Script::stalled().body());
            with(events, header::CONTENT_ENCODING, "gzip")
        });
        drop(response);
        assert_eq!(token.reason(), Some(ClientDisconnected), "{kind:?}");
        let cancelled = Outcome::Cancelled(ClientDisconnected);
        assert_eq!(log.ends(&number(7)), [cancelled], "{kind:?}");
    }
}

#[test]
fn content_that_is_encoded_as_identity_is_read() {
    for coding in ["identity", "", "Identity, "] {
        let (layer, log) = immediate();
        let mut request = Kind::Session.request();
        let value = HeaderValue::from_static(coding);
        request
            .headers_mut()
            .insert(header::CONTENT_ENCODING, value);
        let (response, _token) = respond(&layer, request, move |_| {
            let events = Script::whole(format!("data: {ANSWER}\n\n")).end(End::Silent);
            with(
                event_stream(events.body()),
                header::CONTENT_ENCODING,
                coding,
            )
        });
        assert_eq!(log.started(), 1, "{coding:?}");
        read(&mut response.into_body(), OneFrame);
        assert_eq!(log.ends(&number(7)), [Outcome::Completed], "{coding:?}");
    }
}

// --- Answers that are the whole response ---

/// Returns a response whose JSON answer follows `script`.
fn json_answer(
    layer: &CancelOnDisconnectLayer,
    kind: Kind,
    script: Script,
) -> (Response<ResponseBody<Scripted>>, CallToken) {
    respond(layer, kind.request(), move |_| {
        let response = Response::new(script.body());
        with(response, header::CONTENT_TYPE, "application/json")
    })
}

#[test]
fn a_call_whose_answer_is_being_written_is_in_flight_until_the_end_of_the_body() {
    let pieces = || {
        Script::new([
            Step::data(" "),
            Step::data("{\"jsonrpc\":"),
            Step::data("}"),
        ])
    };
    for kind in [Kind::Stateless, Kind::Session] {
        for length in [Length::Unknown, Length::Exact] {
            let (layer, log) = immediate();
            let (response, token) = json_answer(&layer, kind, pieces().length(length));
            assert_eq!(layer.calls().len(), 1, "{kind:?} {length:?}");
            let mut body = response.into_body();
            read(&mut body, OneFrame);
            assert_eq!(layer.calls().len(), 1, "{kind:?} {length:?}");
            read(&mut body, ToEnd);
            assert_eq!(log.ends(&number(7)), [Outcome::Completed], "{length:?}");
            drop(body);
            assert_eq!(token.reason(), None, "{kind:?} {length:?}");
        }
    }
}

#[test]
fn a_disconnect_before_the_answer_is_complete_cancels_the_call() {
    for kind in [Kind::Stateless, Kind::Session] {
        for length in [Length::Unknown, Length::Exact] {
            for frames in 0..3 {
                let (layer, log) = immediate();
                let steps = ["  ", "{\"jsonrpc\":", "\"2.0\"}"].map(Step::data);
                let script = Script::new(steps).length(length);
                let (response, token) = json_answer(&layer, kind, script);
                let mut body = response.into_body();
                (0..frames).for_each(|_| drop(read(&mut body, OneFrame)));
                drop(body);
                let cell = format!("{kind:?} {length:?} {frames}");
                assert_eq!(token.reason(), Some(ClientDisconnected), "{cell}");
                let cancelled = Outcome::Cancelled(ClientDisconnected);
                assert_eq!(log.ends(&number(7)), [cancelled], "{cell}");
            }
        }
    }
}

#[test]
fn a_disconnect_when_the_answer_may_be_complete_cancels_nothing() {
    for kind in [Kind::Stateless, Kind::Session] {
        let (layer, log) = immediate();
        let script = Script::new([Step::data(ANSWER), Step::data("\n")]).end(End::Silent);
        let (response, token) = json_answer(&layer, kind, script);
        let mut body = response.into_body();
        read(&mut body, OneFrame);
        read(&mut body, OneFrame);
        drop(body);
        assert_eq!(token.reason(), None, "{kind:?}");
        assert_eq!(log.ends(&number(7)), [Outcome::Unknown], "{kind:?}");
    }
}

#[test]
fn a_call_that_is_cancelled_before_its_answer_begins_gets_the_error_in_the_body() {
    let (layer, log) = immediate();
    let script = Script::whole("  ").end(End::Silent);
    let (response, token) = json_answer(&layer, Kind::Stateless, script);
    let mut body = response.into_body();
    read(&mut body, OneFrame);
    let call = layer.calls().snapshot()[0].info().id();
    assert!(layer.calls().cancel(call, Requested));
    assert_eq!(token.reason(), Some(Requested));
    let rest = poll_once(Box::pin(body.collect()).as_mut());
    let Poll::Ready(Ok(rest)) = rest else {
        panic!("the body ends");
    };
    let received: Value = serde_json::from_slice(&rest.to_bytes()).expect("JSON");
    assert_eq!(
        (&received["id"], &received["error"]["code"]),
        (&json!(7), &json!(-32800))
    );
    assert_eq!(log.ends(&number(7)), [Outcome::Cancelled(Requested)]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_waits_for_an_answer_that_is_being_written() {
    let (layer, _log) = immediate();
    let script = Script::new([Step::data("{"), Step::data("}")]);
    let (response, _token) = json_answer(&layer, Kind::Stateless, script);
    let calls = layer.calls();
    let mut drain = Box::pin(calls.drain(Duration::from_secs(60)));
    assert!(poll_once(drain.as_mut()).is_pending());
    read(&mut response.into_body(), ToEnd);
    let report = within("the drain to end", drain).await;
    assert_eq!((report.ended, report.cancelled), (1, 0));
}

// --- Calls without a head ---

/// A server that accepts everything but never answers a call.
fn silent_server(
    layer: &CancelOnDisconnectLayer,
    token: &Arc<Mutex<Option<CallToken>>>,
) -> impl Fn(Request<Full<Bytes>>) -> Pending {
    let token = token.clone();
    let service = layer.layer(service_fn(move |request: Request<TeeBody<Full<Bytes>>>| {
        let token = token.clone();
        async move {
            let call_token = request.extensions().get::<CallToken>().cloned();
            let Ok(body) = request.into_body().collect().await;
            if body.to_bytes() == CALL {
                *token.lock().unwrap_or_else(PoisonError::into_inner) = call_token;
                pending::<()>().await;
            }
            let mut accepted = Response::new(Full::<Bytes>::default());
            *accepted.status_mut() = StatusCode::ACCEPTED;
            Ok::<_, Infallible>(accepted)
        }
    }));
    move |request| Box::pin(service.clone().oneshot(request))
}

type Pending = futures_util::future::BoxFuture<
    'static,
    Result<Response<ResponseBody<Full<Bytes>>>, Infallible>,
>;

fn delete(session: &'static str) -> Request<Full<Bytes>> {
    let mut request = bodyless(Method::DELETE);
    *request.uri_mut() = http::Uri::from_static("/mcp");
    let session = HeaderValue::from_static(session);
    request.headers_mut().insert(SESSION, session);
    request
}

fn cancel(id: u32) -> Request<Full<Bytes>> {
    let params = json!({ "requestId": id });
    let cancel = json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": params });
    Kind::Session.request_with(Full::from(cancel.to_string()))
}

/// Returns what another request in its session does to a call that has no head yet.
///
/// The result is why its token has fired, and the ends that were reported.
fn reason_after(request: Request<Full<Bytes>>) -> (Option<CancelReason>, Vec<Outcome>) {
    let (layer, log) = immediate();
    let token = Arc::new(Mutex::new(None));
    let send = silent_server(&layer, &token);
    let mut call = send(Kind::Session.request());
    assert!(poll_once(call.as_mut()).is_pending());
    assert_eq!(log.started(), 1);
    assert!(poll_once(send(request).as_mut()).is_ready());
    let token = token.lock().unwrap_or_else(PoisonError::into_inner);
    let token: CallToken = token.clone().expect("the call has arrived");
    (token.reason(), log.ends(&number(7)))
}

#[test]
fn a_clients_own_cancel_ends_a_call_that_has_no_head_yet() {
    let ended = (Some(ClientCancelled), vec![Outcome::ClientCancelled]);
    assert_eq!(reason_after(cancel(7)), ended);
    assert_eq!(reason_after(cancel(8)), (None, vec![]));
}

#[test]
fn a_delete_ends_a_call_of_its_session_that_has_no_head_yet() {
    let ended = Outcome::Cancelled(SessionClosed);
    let ended = (Some(SessionClosed), vec![ended]);
    assert_eq!(reason_after(delete("the-session")), ended);
    assert_eq!(reason_after(delete("another-session")), (None, vec![]));
}

// --- A session header where there is no MCP ---

/// Returns whether an abandoned request's token fires.
///
/// The first value is for a request without a head yet, the second for one whose head had this content type.
fn fires(request: &Request<Full<Bytes>>, content_type: &'static str) -> [bool; 2] {
    [true, false].map(|is_pending| {
        let (layer, _log) = immediate();
        let tokens = Tokens::default();
        let recording = tokens.clone();
        let service = layer.layer(service_fn(move |request: Request<TeeBody<Full<Bytes>>>| {
            recording.record(&request);
            async move {
                let Ok(_) = request.into_body().collect().await;
                if is_pending {
                    pending::<()>().await;
                }
                let response = Response::new(Script::stalled().body());
                Ok::<_, Infallible>(with(response, header::CONTENT_TYPE, content_type))
            }
        }));
        let (head, body) = request.clone().into_parts();
        let mut answer = Box::pin(service.oneshot(Request::from_parts(head, body)));
        let response = answer.as_mut().now_or_never();
        drop((answer, response));
        tokens.latest().is_cancelled()
    })
}

#[test]
fn a_session_header_on_a_plain_route_does_not_keep_a_token_from_firing() {
    let in_session = |mut request: Request<Full<Bytes>>| {
        let session = HeaderValue::from_static("anything");
        request.headers_mut().insert(SESSION, session);
        request
    };
    let get = in_session(bodyless(Method::GET));
    assert_eq!(fires(&get, "text/html"), [true; 2]);
    let mut doubled = get.clone();
    let second = HeaderValue::from_static("else");
    doubled.headers_mut().append(SESSION, second);
    assert_eq!(fires(&doubled, "text/html"), [true; 2]);
    assert_eq!(
        fires(&in_session(bodyless(Method::PUT)), "text/html"),
        [true; 2]
    );
    let form = in_session(Kind::Plain.request_with(Full::from("name=value")));
    assert_eq!(fires(&form, "text/html"), [true; 2]);
    let delete = in_session(bodyless(Method::DELETE));
    assert_eq!(fires(&delete, "text/html"), [true; 2]);

    let mut accepting = get;
    let events = HeaderValue::from_static("text/event-stream");
    accepting.headers_mut().insert(header::ACCEPT, events);
    // Before the head is sent, it could be a session's standalone stream.
    assert_eq!(fires(&accepting, "text/html"), [false, true]);
    assert_eq!(fires(&accepting, "text/event-stream"), [false; 2]);
    let mut resuming = accepting;
    let event = HeaderValue::from_static("1/7");
    resuming.headers_mut().insert("last-event-id", event);
    assert_eq!(fires(&resuming, "text/html"), [false, true]);
    assert_eq!(fires(&resuming, "text/event-stream"), [false; 2]);
}

#[test]
fn what_may_be_json_rpc_of_a_session_does_not_fire_its_token() {
    for message in [
        "[]",
        "{",
        r#"{"jsonrpc":"2.0","id":1,"method":"initialize"}"#,
    ] {
        let request = Kind::Session.request_with(Full::from(message));
        assert_eq!(
            fires(&request, "text/event-stream"),
            [false; 2],
            "{message}"
        );
    }
    let (layer, _log) = immediate();
    let mut request = Kind::Session.request();
    *request.method_mut() = Method::DELETE;
    let (response, token) = exchange(&layer, request, &Script::stalled());
    drop(response);
    assert_eq!(token.reason(), None);
}

// --- Nests ---

#[cfg(feature = "axum")]
#[tokio::test]
async fn a_delete_in_one_nest_does_not_end_a_call_of_another() {
    use axum::{Router, body::Body, routing::any};

    let (layer, log) = immediate();
    let server = || {
        let answer = any(async |request: axum::extract::Request| {
            let is_post = request.method() == Method::POST;
            let _whole = request.into_body().collect().await;
            let events = Body::new(Script::stalled().body());
            let accepted = || (StatusCode::ACCEPTED, Body::empty()).into_response();
            use axum::response::IntoResponse as _;
            if is_post {
                event_stream(events)
            } else {
                accepted()
            }
        });
        Router::new().route("/mcp", answer).layer(layer.clone())
    };
    let app = Router::new().nest("/a", server()).nest("/b", server());
    let send = async |mut request: Request<Full<Bytes>>, path: &'static str| {
        *request.uri_mut() = http::Uri::from_static(path);
        let response = app.clone().oneshot(request.map(Body::new)).await;
        response.expect("a response")
    };
    let call = send(Kind::Session.request(), "/a/mcp").await;
    assert_eq!(log.started(), 1);

    send(delete("the-session"), "/b/mcp").await;
    assert_eq!(log.ends(&number(7)), []);
    send(cancel(7), "/b/mcp").await;
    assert_eq!(log.ends(&number(7)), []);

    send(delete("the-session"), "/a/mcp").await;
    assert_eq!(log.ends(&number(7)), [Outcome::Cancelled(SessionClosed)]);
    drop(call);
}

fn with<B>(
    mut response: Response<B>,
    name: header::HeaderName,
    value: &'static str,
) -> Response<B> {
    let value = HeaderValue::from_static(value);
    response.headers_mut().insert(name, value);
    response
}

#[test]
fn a_json_answer_that_is_empty_or_never_read_is_an_end_or_a_disconnect() {
    for (script, end) in [
        (Script::new([]).end(End::Announced), Outcome::Completed),
        (Script::stalled().length(Length::Exact), Outcome::Completed),
        (Script::stalled(), Outcome::Cancelled(ClientDisconnected)),
    ] {
        let (layer, log) = immediate();
        let (response, _token) = json_answer(&layer, Kind::Session, script);
        let mut body = response.into_body();
        read(&mut body, Nothing);
        drop(body);
        assert_eq!(log.ends(&number(7)), [end]);
    }
}
