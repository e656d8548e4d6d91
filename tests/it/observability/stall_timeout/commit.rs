//! Response heads that the layer sends before there is an answer.

use std::time::Duration;

use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer,
    CancelReason::{ClientDisconnected, TimedOut},
    Outcome,
};
use tokio::time::{Instant, sleep};

use super::*;
use crate::log::number;

const SECOND: Duration = Duration::from_secs(1);
const ANSWER: &str = r#"{"jsonrpc":"2.0","id":7,"result":{"content":[]}}"#;

fn committing() -> (CancelOnDisconnectLayer, Log) {
    let (layer, log) = immediate();
    (layer.commit_after(10 * SECOND), log)
}

/// Sends a call for which the layer sends the head before the server answers.
async fn committed(
    layer: &CancelOnDisconnectLayer,
    request: Request<Body>,
) -> (ResponseBody<Body>, ReceivedRequest) {
    let (client, mut server) = between(layer);
    let started = Instant::now();
    let (response, next_request) = tokio::join!(client.send(request), server.next_request());
    assert_eq!(started.elapsed().as_secs(), 10);
    assert_eq!(response.status(), 200);
    assert_eq!(
        response.headers()[header::CONTENT_TYPE],
        "text/event-stream"
    );
    assert_eq!(response.headers()["x-accel-buffering"], "no");
    (response.into_body(), next_request)
}

/// Returns the only message in a body of events.
async fn message(body: &mut ResponseBody<Body>) -> Value {
    let text = rest(body).await;
    let data = text
        .strip_prefix("data: ")
        .and_then(|text| text.strip_suffix("\n\n"));
    let data = data.unwrap_or_else(|| panic!("not one event: {text:?}"));
    assert!(!data.contains(['\n', '\r']), "{data:?}");
    serde_json::from_str(data).expect("JSON")
}

fn error(code: i32, message: &str, data: Option<Value>) -> Value {
    let mut error = json!({ "code": code, "message": message });
    if let Some(data) = data {
        error["data"] = data;
    }
    json!({ "jsonrpc": "2.0", "id": 7, "error": error })
}

fn status(status: u16, content_type: &str, body: &str) -> Response<Body> {
    let mut response = typed(content_type, Body::from(body.to_owned()));
    *response.status_mut() = http::StatusCode::from_u16(status).expect("a status");
    response
}

#[tokio::test(start_paused = true)]
async fn a_silent_call_is_answered_with_a_stream_and_probed() {
    let (layer, _log) = committing();
    let (mut body, _request) = committed(&layer, call()).await;
    let started = Instant::now();
    assert_eq!(frame(&mut body).await.as_deref(), Some(PROBE));
    assert_eq!(started.elapsed().as_secs(), 15);
}

#[tokio::test(start_paused = true)]
async fn its_probes_have_the_usual_interval() {
    let layer = committing().0.keep_alive(3 * SECOND);
    let (mut body, _request) = committed(&layer, call()).await;
    let started = Instant::now();
    assert_eq!(frame(&mut body).await.as_deref(), Some(PROBE));
    assert_eq!(started.elapsed().as_secs(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_json_answer_becomes_one_event() {
    let (layer, log) = committing();
    let (mut body, next_request) = committed(&layer, call()).await;
    next_request.answer(typed("application/json; charset=utf-8", Body::from(ANSWER)));
    assert_eq!(rest(&mut body).await, format!("data: {ANSWER}\n\n"));
    assert_eq!(log.ends(&number(7)), [Outcome::Completed]);
}

#[tokio::test(start_paused = true)]
async fn a_json_answer_on_many_lines_in_many_frames_is_still_one_event() {
    let (layer, _log) = committing();
    let (mut body, next_request) = committed(&layer, call()).await;
    let (feed, answer) = Feed::new();
    next_request.answer(typed("application/json", answer));
    for piece in [
        "{\n  \"jsonrpc\"",
        ": \"2.0\",\r\n",
        "\"id\": 7,\r",
        "\"result\": {}\n}\n",
    ] {
        feed.write(piece);
    }
    drop(feed);
    let answer = message(&mut body).await;
    assert_eq!(answer, json!({ "jsonrpc": "2.0", "id": 7, "result": {} }));
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_passed_on() {
    let (layer, log) = committing();
    let (mut body, next_request) = committed(&layer, call()).await;
    let (feed, events_to_come) = Feed::new();
    next_request.answer(events(events_to_come));
    let answer = format!("data: {ANSWER}\n\n");
    for event in ["id: 1\ndata:\n\n", &answer] {
        feed.write(event.to_owned());
        assert_eq!(frame(&mut body).await.as_deref(), Some(event));
    }
    drop(feed);
    assert_eq!(frame(&mut body).await, None);
    assert_eq!(log.ends(&number(7)), [Outcome::Completed]);
}

#[tokio::test(start_paused = true)]
async fn an_error_status_becomes_an_error_of_the_call() {
    let (layer, log) = committing();
    let (mut body, next_request) = committed(&layer, call()).await;
    next_request.answer(status(503, "text/plain", "busy"));
    let expected = error(
        -32603,
        "HTTP status 503 Service Unavailable",
        Some(json!({ "status": 503 })),
    );
    assert_eq!(message(&mut body).await, expected);
    assert_eq!(log.ends(&number(7)), [Outcome::Failed]);
}

#[tokio::test(start_paused = true)]
async fn an_error_status_with_a_json_rpc_error_keeps_it() {
    for id in ["7", "null"] {
        let (mut body, next_request) = committed(&committing().0, call()).await;
        let refusal = format!(
            r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32602,"message":"no","data":1}}}}"#
        );
        next_request.answer(status(400, "application/json", &refusal));
        assert_eq!(
            message(&mut body).await,
            error(-32602, "no", Some(json!(1))),
            "{id}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_of_another_request_is_not_used() {
    let (mut body, next_request) = committed(&committing().0, call()).await;
    let refusal = r#"{"jsonrpc":"2.0","id":8,"error":{"code":-32602,"message":"no"}}"#;
    next_request.answer(status(400, "application/json", refusal));
    let message = message(&mut body).await;
    assert_eq!(message["id"], 7);
    assert_eq!(message["error"]["code"], -32603);
}

#[tokio::test(start_paused = true)]
async fn a_failing_service_becomes_an_error_of_the_call() {
    let (layer, log) = committing();
    let (mut body, next_request) = committed(&layer, call()).await;
    next_request.fail();
    assert_eq!(
        message(&mut body).await,
        error(-32603, "the service failed", None)
    );
    assert_eq!(log.ends(&number(7)), [Outcome::Failed]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_cannot_be_an_event_becomes_an_error_of_the_call() {
    let gzip = |mut response: Response<Body>| {
        let gzip = header::HeaderValue::from_static("gzip");
        response
            .headers_mut()
            .insert(header::CONTENT_ENCODING, gzip);
        response
    };
    for answer in [
        typed("text/html", Body::from("<p>")),
        gzip(typed("application/json", Body::from("?"))),
        gzip(events(Body::from("?"))),
    ] {
        let (mut body, next_request) = committed(&committing().0, call()).await;
        let shown = format!("{:?}", answer.headers());
        next_request.answer(answer);
        let message = message(&mut body).await;
        assert_eq!(message["id"], 7, "{shown}");
        assert_eq!(message["error"]["code"], -32603, "{shown}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_encoded_as_identity_becomes_an_event() {
    let answer = r#"{"jsonrpc":"2.0","id":7,"result":{}}"#;
    for coding in ["identity", "", "identity, "] {
        let coded = |mut response: Response<Body>| {
            let coding = header::HeaderValue::from_static(coding);
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_ENCODING, coding);
            response
        };
        for response in [
            typed("application/json", Body::from(answer)),
            events(Body::from(format!("data: {answer}\n\n"))),
        ] {
            let (layer, log) = committing();
            let (mut body, next_request) = committed(&layer, call()).await;
            next_request.answer(coded(response));
            assert_eq!(message(&mut body).await["result"], json!({}), "{coding:?}");
            drop(body);
            assert_eq!(log.ends(&number(7)), [Outcome::Completed], "{coding:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_disconnect_after_the_head_cancels_the_call() {
    let (layer, log) = committing();
    let (body, mut next_request) = committed(&layer, call()).await;
    drop(body);
    next_request.abandoned().await;
    assert_eq!(next_request.token().reason(), Some(ClientDisconnected));
    assert_eq!(
        log.ends(&number(7)),
        [Outcome::Cancelled(ClientDisconnected)]
    );
    assert!(layer.calls().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_call_that_times_out_after_its_head_sends_the_error_to_its_client() {
    let layer = committing().0.call_timeout(20 * SECOND);
    let (mut body, mut next_request) = committed(&layer, call()).await;
    let text = rest(&mut body).await;
    next_request.abandoned().await;
    assert_eq!(next_request.token().reason(), Some(TimedOut));
    let error = error(-32001, "Request timed out", None);
    assert!(text.ends_with(&format!("data: {error}\n\n")), "{text:?}");
}

#[tokio::test(start_paused = true)]
async fn an_answer_in_time_is_unchanged() {
    let (client, mut server) = between(&committing().0);
    let (response, ()) = tokio::join!(client.send(call()), async {
        let next_request = server.next_request().await;
        sleep(9 * SECOND).await;
        next_request.answer(status(429, "text/plain", "slow down"));
    });
    assert_eq!(response.status(), 429);
    assert_eq!(rest(&mut response.into_body()).await, "slow down");
}

#[tokio::test(start_paused = true)]
async fn only_a_single_call_of_a_client_that_accepts_events_is_answered_early() {
    let accept = |value: &'static str| {
        let mut request = call();
        let value = header::HeaderValue::from_static(value);
        request.headers_mut().insert(header::ACCEPT, value);
        request
    };
    let get = Request::get("/mcp")
        .header(header::ACCEPT, "text/event-stream")
        .body(Body::empty())
        .expect("a request");
    let one = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list" });
    for (what, request) in [
        ("json only", accept("application/json")),
        ("anything", accept("*/*")),
        (
            "events ruled out",
            accept("application/json, text/event-stream;q=0.0"),
        ),
        ("get", get),
        (
            "initialize",
            post(&json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize" })),
        ),
        (
            "a notification",
            post(&json!({ "jsonrpc": "2.0", "method": "notifications/x" })),
        ),
        (
            "a batch",
            post(&json!([one, { "jsonrpc": "2.0", "id": 2, "method": "tools/list" }])),
        ),
        ("no JSON-RPC", post(&json!({ "hello": 1 }))),
    ] {
        let (client, mut server) = between(&committing().0);
        let started = Instant::now();
        let (response, ()) = tokio::join!(client.send(request), async {
            let next_request = server.next_request().await;
            sleep(60 * SECOND).await;
            next_request.answer(status(418, "text/plain", ""));
        });
        assert_eq!(response.status(), 418, "{what}");
        assert_eq!(started.elapsed().as_secs(), 60, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_answer_may_become_an_event_is_forwarded_without_accept_encoding() {
    for (request, passes) in [
        (call(), false),
        (
            Request::get("/x").body(Body::empty()).expect("a request"),
            true,
        ),
    ] {
        let (mut head, body) = request.into_parts();
        let gzip = header::HeaderValue::from_static("gzip");
        head.headers.insert(header::ACCEPT_ENCODING, gzip);
        let (client, mut server) = between(&committing().0);
        let ((), _) = tokio::join!(
            async {
                let next_request = server.next_request().await;
                let passed = next_request.headers.contains_key(header::ACCEPT_ENCODING);
                assert_eq!(passed, passes);
                next_request.answer(Response::new(Body::empty()));
            },
            client.send(Request::from_parts(head, body)),
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_uploaded_slowly_keeps_the_status_of_its_refusal() {
    let (layer, _log) = committing();
    let (client, mut server) = between(&layer);
    let (upload, body) = Feed::new();
    let request = call().map(|_| body);
    let uploaded = async {
        for piece in [
            r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params""#,
            r#":{"name":"a"}}"#,
        ] {
            tokio::time::sleep(30 * SECOND).await;
            upload.write(piece);
        }
        drop(upload);
        let next_request = server.next_request().await;
        tokio::time::sleep(9 * SECOND).await;
        next_request.answer(status(403, "text/plain", "no"));
    };
    let (response, ()) = tokio::join!(client.send(request), uploaded);
    assert_eq!(response.status(), 403);
}

#[tokio::test(start_paused = true)]
async fn a_silent_call_that_was_uploaded_slowly_is_still_answered_with_a_stream() {
    let (layer, _log) = committing();
    let (client, mut server) = between(&layer);
    let (upload, body) = Feed::new();
    let request = call().map(|_| body);
    let started = Instant::now();
    let uploaded = async {
        tokio::time::sleep(30 * SECOND).await;
        upload.write(r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}"#);
        drop(upload);
        server.next_request().await
    };
    let (response, _uploaded) = tokio::join!(client.send(request), uploaded);
    assert_eq!(
        response.headers()[header::CONTENT_TYPE],
        "text/event-stream"
    );
    assert_eq!(started.elapsed().as_secs(), 40, "10 s after the upload");
}

#[tokio::test(start_paused = true)]
async fn a_byte_order_mark_is_not_part_of_the_event() {
    let (layer, _log) = committing();
    let (mut body, next_request) = committed(&layer, call()).await;
    let marked = format!("\u{feff}{ANSWER}");
    let answer = typed("application/json", Body::from(marked));
    next_request
        .answer
        .send(Ok(answer))
        .expect("the layer is waiting");
    let expected: Value = serde_json::from_str(ANSWER).expect("JSON");
    assert_eq!(message(&mut body).await, expected);
}

/// A client would ignore an event without data and wait forever.
#[tokio::test(start_paused = true)]
async fn an_answer_without_a_text_is_an_error() {
    for text in ["", " \n"] {
        let (layer, _log) = committing();
        let (mut body, next_request) = committed(&layer, call()).await;
        let answer = typed("application/json", Body::from(text));
        next_request
            .answer
            .send(Ok(answer))
            .expect("the layer is waiting");
        let answer = message(&mut body).await;
        assert_eq!(answer["error"]["code"], -32603, "{answer}");
    }
}

/// Such a request is not a call, so its answer may be compressed.
#[tokio::test(start_paused = true)]
async fn a_request_of_another_kind_keeps_its_accept_encoding() {
    let (layer, _log) = committing();
    for (content_type, is_kept) in [("text/plain", true), ("application/json", false)] {
        let (client, mut server) = between(&layer);
        let mut request = call();
        let headers = request.headers_mut();
        headers.insert(header::CONTENT_TYPE, content_type.parse().expect("a value"));
        headers.insert(header::ACCEPT_ENCODING, "gzip".parse().expect("a value"));
        let sending = client.send(request);
        let answering = async {
            let next_request = server.next_request().await;
            let has_it = next_request.headers.contains_key(header::ACCEPT_ENCODING);
            let answer = typed("application/json", Body::from(ANSWER));
            next_request
                .answer
                .send(Ok(answer))
                .expect("the layer is waiting");
            has_it
        };
        let (_, has_it) = tokio::join!(sending, answering);
        assert_eq!(has_it, is_kept, "{content_type}");
    }
}
