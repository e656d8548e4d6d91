//! A call is cancelled halfway through its answer while its client is connected.

use std::{convert::Infallible, time::Duration};

use axum::body::Body;
use bytes::Bytes;
use futures_util::{StreamExt as _, stream};
use http::{Request, Response, header};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, body::TeeBody};
use tower::{Layer as _, ServiceExt as _, service_fn};

use crate::support::within;

const CALL: &str = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a"}}"#;
const TIMEOUT: Duration = Duration::from_secs(30);
const HALF: &str = r#"{"jsonrpc":"2.0","#;

#[tokio::test(start_paused = true)]
async fn the_client_gets_the_error_behind_half_an_event() {
    let events = stalled("text/event-stream", "data: 1\n\ndata: {\"jsonrpc\":");
    let text = timed_out(CALL, Duration::ZERO, events).await;
    let events: Vec<_> = text.split("\n\n").collect();
    assert_eq!(events[..2], ["data: 1", "data: {\"jsonrpc\":"]);
    assert!(events[2].contains("-32001"), "{text:?}");
}

#[tokio::test(start_paused = true)]
async fn the_client_gets_the_error_behind_half_an_answer_that_is_sent_as_an_event() {
    let answer = stalled("application/json", HALF);
    let text = timed_out(CALL, Duration::from_secs(10), answer).await;
    let (half, error) = text.split_once("\n\n").expect("two events");
    assert_eq!(half, format!("data: {HALF}"));
    assert!(error.contains("-32001"), "{text:?}");
}

/// The length has already been sent, so no error can be appended.
///
/// hyper closes the connection.
#[tokio::test(start_paused = true)]
async fn half_an_answer_of_known_length_ends() {
    let mut answer = stalled("application/json", HALF);
    answer
        .headers_mut()
        .insert(header::CONTENT_LENGTH, 100.into());
    assert_eq!(timed_out(CALL, Duration::ZERO, answer).await, HALF);
}

/// Only requests at revision 2025-11-25 run as tasks.
#[tokio::test(start_paused = true)]
async fn a_task_parameter_does_not_keep_a_call_of_2026_07_28_from_its_timeout() {
    let task = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a","task":{},
        "_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28"}}}"#;
    let events = stalled("text/event-stream", ":\n\n");
    let text = timed_out(task, Duration::ZERO, events).await;
    assert!(text.contains("-32001"), "{text:?}");
}

/// Returns a response whose body sends `half` and then stalls.
fn stalled(content_type: &'static str, half: &'static str) -> Response<Body> {
    let half = stream::iter([Ok::<_, Infallible>(Bytes::from(half))]).chain(stream::pending());
    let response = Response::builder().header(header::CONTENT_TYPE, content_type);
    response.body(Body::from_stream(half)).expect("a response")
}

/// Returns what a client receives when its call times out.
///
/// If the service stays `silent` for 10 s, the layer sends the head early.
async fn timed_out(call: &'static str, silent: Duration, answer: Response<Body>) -> String {
    let layer = CancelOnDisconnectLayer::new()
        .call_timeout(TIMEOUT)
        .commit_after(Duration::from_secs(5));
    let answer = std::sync::Mutex::new(Some(answer));
    let answer = std::sync::Arc::new(answer);
    let service = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
        let answer = answer.lock().unwrap().take().expect("one call");
        async move {
            let _whole = request.into_body().collect().await;
            tokio::time::sleep(silent).await;
            Ok::<_, Infallible>(answer)
        }
    }));
    let request = Request::post("/mcp")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::ACCEPT, "application/json, text/event-stream")
        .body(Body::from(call))
        .expect("a request");
    let Ok(response) = service.oneshot(request).await;
    let whole = response.into_body().collect();
    let whole = within("the body to end", whole)
        .await
        .expect("the body does not fail");
    String::from_utf8(whole.to_bytes().into()).expect("text")
}
