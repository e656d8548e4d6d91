//! Reasons for refusing a request and the corresponding responses.

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

/// The `Retry-After` sent with temporary refusals. A session is cached as unowned for the same length of time.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// Error code for an `initialize` that cannot be served: the first code in the server-error range.
const RETRY_LATER: i32 = -32000;

/// Error code for a cancelled call, the same as in the library.
const REQUEST_CANCELLED: i32 = -32800;

/// Why a request was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The directory did not answer, or its contents are not conclusive yet.
    OwnerUnknown,
    /// The owner cannot be reached, but may still be alive.
    OwnerUnreachable,
    /// The session has just moved, or was not restored in time.
    ///
    /// It moved to this or to another instance while the request was being served. The client can resend the request.
    SessionMoved,
    /// The connection to the owner broke before the response arrived.
    ///
    /// The request may already have started, so this instance must not resend it.
    ConnectionLost,
    /// The request head has more header fields than peers accept.
    TooManyFields,
    /// The client disconnected mid-request.
    Incomplete,
    /// The client stalled after sending part of its request.
    Stalled,
}

/// Returns the 503 response to an `initialize` whose session cannot be opened.
///
/// It carries no request id, because the layer does not read the bodies of requests without a session.
pub(crate) fn session_not_opened() -> Response<Body> {
    let error = json!({
        "jsonrpc": "2.0",
        "id": null,
        "error": { "code": RETRY_LATER, "message": "cannot open a session right now" },
    });
    let mut response = json_response(StatusCode::SERVICE_UNAVAILABLE, &error);
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, RETRY_AFTER);
    response
}

/// Returns the JSON-RPC error for a call cancelled by its client before it started.
pub(crate) fn cancelled(request_id: &Value) -> Response<Body> {
    let error = json!({
        "jsonrpc": "2.0",
        "id": request_id,
        "error": { "code": REQUEST_CANCELLED, "message": "request cancelled before it started" },
    });
    json_response(StatusCode::OK, &error)
}

fn json_response(status: StatusCode, message: &Value) -> Response<Body> {
    let mut response = Response::new(Body::from(message.to_string()));
    *response.status_mut() = status;
    let json = HeaderValue::from_static("application/json");
    response.headers_mut().insert(header::CONTENT_TYPE, json);
    response
}

/// Returns the response to a request whose session does not exist.
///
/// It is identical to rmcp's response.
pub(crate) fn no_session() -> Response<Body> {
    text_response(StatusCode::NOT_FOUND, "Not Found: Session not found")
}

fn text_response(status: StatusCode, text: &'static str) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}

// === impl Refusal ===

impl Refusal {
    /// Returns `true` if the response asks the client to retry.
    pub(crate) fn is_temporary(self) -> bool {
        matches!(
            self,
            Self::OwnerUnknown | Self::OwnerUnreachable | Self::SessionMoved
        )
    }
}

impl From<Refusal> for Response<Body> {
    fn from(refusal: Refusal) -> Self {
        const UNAVAILABLE: StatusCode = StatusCode::SERVICE_UNAVAILABLE;
        let (status, text) = match refusal {
            Refusal::OwnerUnknown => (UNAVAILABLE, "this session's owner is currently unknown\n"),
            Refusal::OwnerUnreachable => (
                UNAVAILABLE,
                "the server that owns this session is currently unreachable\n",
            ),
            Refusal::SessionMoved => (UNAVAILABLE, "this session has just moved\n"),
            Refusal::ConnectionLost => (
                StatusCode::BAD_GATEWAY,
                "the server that owns this session closed the connection\n",
            ),
            Refusal::TooManyFields => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "too many header fields to relay\n",
            ),
            Refusal::Incomplete => (StatusCode::BAD_REQUEST, "the request is incomplete\n"),
            Refusal::Stalled => (StatusCode::REQUEST_TIMEOUT, "the request stalled\n"),
        };
        let mut response = text_response(status, text);
        if refusal.is_temporary() {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, RETRY_AFTER);
        }
        response
    }
}
