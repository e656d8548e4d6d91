//! The reasons why a request is not served, and the responses for them.

use axum::body::Body;
use http::{HeaderValue, Response, StatusCode, header};
use serde_json::{Value, json};

/// `Retry-After` of temporary refusals: 1 s. Equal to the time for which a session is cached as unowned.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");

/// The error code of an `initialize` that cannot be served: the first code of the server-error range.
const RETRY_LATER: i32 = -32000;

/// The error code of a cancelled call, as the library sends it.
const REQUEST_CANCELLED: i32 = -32800;

/// The reason why a request is not served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The directory did not answer, or its content proves nothing yet.
    Inconsistent,
    /// The owner could not be reached and may still be alive.
    OwnerUnreachable,
    /// The session moved to this or another instance during the request, or was not restored in time. The request can be sent again.
    SessionMoved,
    /// The connection to the owner ended before the response. The request may have started, so this instance must not send it again.
    ConnectionLost,
    /// The request's head contains more fields than a peer accepts.
    TooManyFields,
    /// The client disconnected in the middle of its request.
    Incomplete,
    /// The client sent part of its request, and then stalled.
    Stalled,
}

/// Returns 503 for an `initialize` whose session cannot be opened.
///
/// The id of the opening request is not known, because the layer does not read the body of a request without a session.
pub(crate) fn session_not_opened() -> Response<Body> {
    let error = json!({
        "jsonrpc": "2.0",
        "id": null,
        "error": { "code": RETRY_LATER, "message": "no session can be opened here at the moment" },
    });
    let mut response = json_response(StatusCode::SERVICE_UNAVAILABLE, &error);
    response
        .headers_mut()
        .insert(header::RETRY_AFTER, RETRY_AFTER);
    response
}

/// Returns the JSON-RPC error for a call that its client cancelled before it started.
pub(crate) fn cancelled(request_id: &Value) -> Response<Body> {
    let error = json!({
        "jsonrpc": "2.0",
        "id": request_id,
        "error": { "code": REQUEST_CANCELLED, "message": "Request cancelled before it began" },
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

/// Returns the response to a request of a session that does not exist, identical to rmcp's.
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
    /// Returns `true` if the client is asked to retry.
    pub(crate) fn is_temporary(self) -> bool {
        matches!(
            self,
            Self::Inconsistent | Self::OwnerUnreachable | Self::SessionMoved
        )
    }
}

impl From<Refusal> for Response<Body> {
    fn from(refusal: Refusal) -> Self {
        const UNAVAILABLE: StatusCode = StatusCode::SERVICE_UNAVAILABLE;
        let (status, text) = match refusal {
            Refusal::Inconsistent => (
                UNAVAILABLE,
                "the owner of this session is currently unknown\n",
            ),
            Refusal::OwnerUnreachable => (
                UNAVAILABLE,
                "the server of this session currently cannot be reached\n",
            ),
            Refusal::SessionMoved => (UNAVAILABLE, "this session has just moved\n"),
            Refusal::ConnectionLost => (
                StatusCode::BAD_GATEWAY,
                "the server of this session closed its connection\n",
            ),
            Refusal::TooManyFields => (
                StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
                "too many header fields for a relay\n",
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
