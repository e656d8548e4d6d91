//! Late clients of a server that only has the layer.
//!
//! They get what the server has stored, or otherwise the error.

use std::{convert::Infallible, io, time::Duration};

use axum::body::{Body, Bytes};
use futures_util::{StreamExt as _, stream};
use http::{Method, Request, Response};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace, body::TeeBody};
use tokio::time::{sleep, timeout};
use tower::{Layer as _, ServiceExt as _, service_fn};

const CALL: &str =
    r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"hold","arguments":{}}}"#;

const GRACE: Duration = Duration::from_millis(300);

/// Longer than the grace period.
const LATE: Duration = Duration::from_millis(800);

/// Longer than any timer in these tests.
const SOON: Duration = Duration::from_secs(3);

const STORED: &str = "id: 2\ndata: {\"jsonrpc\":\"2.0\",\"id\":7,\"result\":{\"stored\":true}}\n\n";

/// What a client has received of a body, and whether the body has ended.
#[derive(Debug)]
struct Received {
    text: String,
    has_ended: bool,
}

/// Returns a request within a session.
fn request(method: Method, name: &str, value: &str, body: &'static str) -> Request<Body> {
    let request = Request::builder().method(method).uri("/mcp");
    let request = request
        .header("accept", "application/json, text/event-stream")
        .header("mcp-session-id", "s")
        .header(name, value);
    request.body(Body::from(body)).expect("a request")
}

fn events(body: Body) -> Response<Body> {
    let response = Response::builder().header("content-type", "text/event-stream");
    response.body(body).expect("a response")
}

/// Returns a body that sends `beginning` and then stalls forever.
fn stuck(beginning: impl Into<Bytes>) -> Body {
    let beginning = stream::iter([Ok::<_, io::Error>(beginning.into())]);
    Body::from_stream(beginning.chain(stream::pending()))
}

/// Returns what a client receives when it resumes `time` after its disconnect.
///
/// The server replays `stored`.
async fn resumed_after(
    time: Duration,
    stored: impl Fn() -> Body + Clone + Send + Sync + 'static,
) -> Received {
    let layer = CancelOnDisconnectLayer::new().grace(Grace::After(GRACE));
    let service = layer.layer(service_fn(move |request: Request<TeeBody<Body>>| {
        let stored = stored.clone();
        async move {
            let method = request.method().clone();
            let body = request.into_body().collect().await;
            let body = body.expect("a body").to_bytes();
            let is_cancel = String::from_utf8_lossy(&body).contains("notifications/cancelled");
            Ok::<_, Infallible>(if is_cancel {
                let accepted = Response::builder().status(202);
                accepted.body(Body::empty()).expect("a response")
            } else if method == Method::GET {
                events(stored())
            } else {
                events(stuck("id: 1\ndata:\n\n"))
            })
        }
    }));
    let call = request(Method::POST, "content-type", "application/json", CALL);
    let Ok(response) = service.clone().oneshot(call).await;
    let mut body = response.into_body();
    let _first = timeout(SOON, body.frame()).await;
    drop(body);
    sleep(time).await;
    let resume = request(Method::GET, "last-event-id", "1", "");
    let Ok(response) = service.oneshot(resume).await;
    let mut body = response.into_body();
    let mut text = String::new();
    let reading = async {
        while let Some(frame) = body.frame().await {
            let data = frame.expect("no error").into_data().expect("data");
            text.push_str(&String::from_utf8_lossy(&data));
        }
    };
    let has_ended = timeout(SOON, reading).await.is_ok();
    Received { text, has_ended }
}

#[tokio::test(start_paused = true)]
async fn a_late_client_gets_the_answer_that_its_server_has_stored() {
    for time in [Duration::ZERO, LATE] {
        let whole = resumed_after(time, || Body::from(STORED)).await;
        assert_eq!((whole.text.as_str(), whole.has_ended), (STORED, true));
        let progress =
            "id: 1a\ndata: {\"jsonrpc\":\"2.0\",\"method\":\"notifications/progress\"}\n\n";
        let open = resumed_after(time, move || stuck(format!("{progress}{STORED}"))).await;
        assert_eq!(open.text, format!("{progress}{STORED}"));
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_client_gets_only_the_error_if_its_server_has_no_answer() {
    let other = "id: 2\ndata: {\"jsonrpc\":\"2.0\",\"id\":8,\"result\":{}}\n\n";
    for stored in [
        "",
        "id: 2\nretry: 10\ndata:\n\n",
        other,
        "data: {\"jsonrpc\":\"2.0\",\"id\":7,\"res",
    ] {
        let ended = resumed_after(LATE, move || Body::from(stored)).await;
        let open = resumed_after(LATE, move || stuck(stored)).await;
        for got in [ended, open] {
            assert!(got.has_ended, "{stored:?}: {got:?}");
            assert!(got.text.starts_with("data: {"), "{stored:?}: {got:?}");
            assert!(got.text.contains("-32800"), "{stored:?}: {got:?}");
            assert_eq!(got.text.matches("\n\n").count(), 1, "{stored:?}: {got:?}");
        }
    }
}
