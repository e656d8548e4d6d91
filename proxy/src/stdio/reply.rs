//! Responses that this side gives itself.

use std::time::Duration;

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::json;

/// The first revision without sessions, which no stdio server speaks as this side would have to.
pub(super) const FIRST_WITHOUT_SESSIONS: &str = "2026-07-28";

/// The revisions that a stdio server may speak. Which it does is between it and its client.
const REVISIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// How long a client is asked to wait while there is no room: 1 s.
pub(super) const BUSY: Duration = Duration::from_secs(1);

/// Errors of JSON-RPC and MCP.
pub(super) const PARSE_ERROR: i32 = -32700;
pub(super) const INVALID_REQUEST: i32 = -32600;
pub(super) const SERVER_ERROR: i32 = -32000;
pub(super) const SESSION_NOT_FOUND: i32 = -32001;
const UNSUPPORTED_REVISION: i32 = -32022;

/// A response without a body.
pub(super) fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// A JSON-RPC error. `id` is the JSON text of the request's id, if there is one.
pub(super) fn error(status: StatusCode, id: Option<&str>, code: i32, text: &str) -> Response<Body> {
    body(status, id, &json!({ "code": code, "message": text }))
}

/// The same, with a hint when to come back.
pub(super) fn busy(id: Option<&str>, text: &str, after: Duration) -> Response<Body> {
    let mut response = error(StatusCode::SERVICE_UNAVAILABLE, id, SERVER_ERROR, text);
    let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, seconds.into());
    response
}

/// Says that only revisions with sessions are spoken. Clients fall back to `initialize` then: those of Python and
/// TypeScript look at this code and this list.
pub(super) fn unsupported_revision(id: Option<&str>, requested: &str) -> Response<Body> {
    let data = json!({ "supported": REVISIONS, "requested": requested });
    let error = json!({ "code": UNSUPPORTED_REVISION, "message": "Unsupported protocol version", "data": data });
    body(StatusCode::BAD_REQUEST, id, &error)
}

fn body(status: StatusCode, id: Option<&str>, error: &serde_json::Value) -> Response<Body> {
    let id = id.unwrap_or("null");
    let json = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    let mut response = Response::new(Body::from(json));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}
