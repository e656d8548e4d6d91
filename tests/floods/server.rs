//! An in-process server that accepts every request in a known session, and its clients.

use std::convert::Infallible;

use axum::body::{Body, Bytes, to_bytes};
use futures_util::{StreamExt as _, stream};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt as _;
use mcp_cancel_on_disconnect::{
    CallInfo, Calls, CancelOnDisconnectLayer, RequestId, body::TeeBody,
};
use serde_json::{Value, json};
use tower::{ServiceExt as _, layer::Layer as _, service_fn, util::BoxCloneSyncService};

/// A prefix for session ids that no client has opened.
pub(crate) const UNKNOWN: &str = "unknown";

/// The session and the id of the call that must not be affected.
pub(crate) const VICTIM: (&str, i64) = ("victim", 7);

/// The layer over a server whose calls never end. A call sends the event `e-0`, or as many events as its `x-events`
/// header asks for: `e-0`, `e-1` and so on.
pub(crate) struct Server {
    service: BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>,
    pub(crate) calls: Calls,
}

// === impl Server ===

impl Server {
    pub(crate) fn new(layer: CancelOnDisconnectLayer) -> Self {
        let calls = layer.calls();
        let service = layer.layer(service_fn(serve));
        let service = service.map_response(|response: Response<_>| response.map(Body::new));
        Self {
            service: BoxCloneSyncService::new(service),
            calls,
        }
    }

    pub(crate) async fn send(&self, request: Request<Body>) -> Response<Body> {
        let service = self.service.clone();
        service.oneshot(request).await.expect("it never fails")
    }

    /// Starts a call and reads its first event.
    pub(crate) async fn call(&self, session: &str, id: impl Into<Value>) -> Body {
        let message = json!({
            "jsonrpc": "2.0", "id": id.into(), "method": "tools/call", "params": { "name": "hold" },
        });
        let response = self
            .send(request("POST", session, message.to_string()))
            .await;
        assert_eq!(response.status(), 200);
        let mut body = response.into_body();
        body.frame().await.expect("an event").expect("no error");
        body
    }

    /// Asserts that the victim's call is in flight. Its token cannot have fired, since that would have ended the
    /// call.
    pub(crate) fn assert_victim_in_flight(&self) {
        let is_victim = |call: &CallInfo| {
            let session = call.session() == Some(VICTIM.0);
            session && *call.request_id() == RequestId::Number(VICTIM.1)
        };
        let calls = self.calls.snapshot();
        assert!(calls.iter().any(|call| is_victim(call.info())));
    }
}

pub(crate) fn request(method: &str, session: &str, body: String) -> Request<Body> {
    let request = Request::builder()
        .method(method)
        .uri("/mcp")
        .header("content-type", "application/json")
        .header("mcp-session-id", session);
    request.body(Body::from(body)).expect("a request")
}

pub(crate) fn resume(session: &str, event_id: &str) -> Request<Body> {
    let mut request = request("GET", session, String::new());
    let event_id = event_id.parse().expect("a header");
    request.headers_mut().insert("last-event-id", event_id);
    request
}

async fn serve(request: Request<TeeBody<Body>>) -> Result<Response<Body>, Infallible> {
    let (head, body) = request.into_parts();
    let body = to_bytes(Body::new(body), usize::MAX).await.expect("a body");
    let session = head.headers.get("mcp-session-id");
    let is_unknown = session.is_some_and(|id| id.as_bytes().starts_with(UNKNOWN.as_bytes()));
    let message: Value = serde_json::from_slice(&body).unwrap_or_default();
    let response = Response::builder();
    let response = match () {
        () if is_unknown => response.status(StatusCode::NOT_FOUND).body(Body::empty()),
        () if message["id"].is_null() && head.method == "POST" => {
            response.status(StatusCode::ACCEPTED).body(Body::empty())
        }
        () => {
            let many = head.headers.get("x-events");
            let many = many.and_then(|many| many.to_str().ok()?.parse().ok());
            let event = |n: u32| Ok::<_, Infallible>(Bytes::from(format!("id: e-{n}\ndata:\n\n")));
            let events = stream::iter((0..many.unwrap_or(1)).map(event));
            let body = Body::from_stream(events.chain(stream::pending()));
            let response = response.header("content-type", "text/event-stream");
            response.body(body)
        }
    };
    Ok(response.expect("a response"))
}
