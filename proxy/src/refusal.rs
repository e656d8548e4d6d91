//! Builds the proxy's own responses.

use std::{error::Error, fmt, iter, time::Duration};

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use http_body_util::LengthLimitError;
use serde_json::{Value, json};

/// The revisions with sessions. A client can negotiate any of them with its server.
const REVISIONS: [&str; 4] = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"];

/// The `Retry-After` to send while a limit is reached.
pub const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Error code: the body is not JSON.
pub const PARSE_ERROR: i32 = -32700;
/// Error code: the request is invalid.
pub const INVALID_REQUEST: i32 = -32600;
/// Error code: the proxy's own errors. This is the first of JSON-RPC's implementation-defined codes.
pub const SERVER_ERROR: i32 = -32000;
/// Error code: the session does not exist, or no longer exists.
pub const SESSION_NOT_FOUND: i32 = -32001;
/// Error code: the server does not support the request's revision.
const UNSUPPORTED_REVISION: i32 = -32022;

/// Why a request body was not read to the end, even though its client is still connected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BodyError {
    /// The client sent the body too slowly.
    TooSlow,
    /// Other requests' bodies took up the capacity.
    NoRoom,
}

/// Returns a response without a body.
pub fn empty(status: StatusCode) -> Response<Body> {
    let mut response = Response::new(Body::empty());
    *response.status_mut() = status;
    response
}

/// Returns a response with a line of text.
pub fn plain(status: StatusCode, text: &'static str) -> Response<Body> {
    with_body(status, text.into(), "text/plain; charset=utf-8")
}

/// Returns a JSON-RPC error. `id` is the request's id as JSON text, or `None` for `null`.
pub fn error(status: StatusCode, id: Option<&str>, code: i32, text: &str) -> Response<Body> {
    with_error(status, id, &json!({ "code": code, "message": text }))
}

/// Returns a JSON-RPC error with status 503.
///
/// `after` is sent as `Retry-After`, rounded up to whole seconds.
pub fn busy(id: Option<&str>, text: &str, after: Duration) -> Response<Body> {
    let mut response = error(StatusCode::SERVICE_UNAVAILABLE, id, SERVER_ERROR, text);
    let seconds = after.as_secs() + u64::from(after.subsec_nanos() > 0);
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, seconds.into());
    response
}

/// Returns the error for a revision without sessions.
///
/// The Python and TypeScript clients recognise this code and list, and fall back to `initialize`.
pub fn unsupported_revision(id: Option<&str>, requested: &str) -> Response<Body> {
    let data = json!({ "supported": REVISIONS, "requested": requested });
    let error = json!({ "code": UNSUPPORTED_REVISION, "message": "Unsupported protocol version", "data": data });
    with_error(StatusCode::BAD_REQUEST, id, &error)
}

/// Returns the response to a request whose body the proxy refused to read.
///
/// Returns `None` if `error` has any other cause.
pub fn for_body_error(error: &(dyn Error + 'static)) -> Option<Response<Body>> {
    let mut causes = iter::successors(Some(error), |error| (*error).source());
    causes.find_map(|cause| {
        if cause.is::<LengthLimitError>() {
            let text = "the request is larger than this proxy accepts";
            let status = StatusCode::PAYLOAD_TOO_LARGE;
            return Some(self::error(status, None, INVALID_REQUEST, text));
        }
        let refused = cause.downcast_ref::<BodyError>()?;
        let text = refused.to_string();
        Some(match refused {
            BodyError::TooSlow => {
                self::error(StatusCode::REQUEST_TIMEOUT, None, INVALID_REQUEST, &text)
            }
            BodyError::NoRoom => busy(None, &text, RETRY_AFTER),
        })
    })
}

fn with_error(status: StatusCode, id: Option<&str>, error: &Value) -> Response<Body> {
    let id = id.unwrap_or("null");
    let body = format!(r#"{{"jsonrpc":"2.0","id":{id},"error":{error}}}"#);
    with_body(status, body.into(), "application/json")
}

fn with_body(status: StatusCode, body: Body, content_type: &'static str) -> Response<Body> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    let content_type = HeaderValue::from_static(content_type);
    response
        .headers_mut()
        .insert(header::CONTENT_TYPE, content_type);
    response
}

// === impl BodyError ===

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::TooSlow => "the rest of the request did not arrive in time",
            Self::NoRoom => "the proxy is receiving too many requests at once",
        })
    }
}

impl Error for BodyError {}
