//! The parts of a response head that matter to the layer.

use http::StatusCode;

use crate::{
    exchange::Head,
    headers::{self, McpHeaders},
};

/// Returns the first `Content-Length`, or `None` if it is absent or not a number.
pub(super) fn content_length(headers: &McpHeaders<'_>) -> Option<u64> {
    let length = headers.content_length.first()?;
    length.to_str().ok()?.parse().ok()
}

/// Returns what a response head means for its request's call.
pub(super) fn classify_head(status: StatusCode, headers: &McpHeaders<'_>) -> Head {
    if !status.is_success() {
        return Head::Refusal {
            is_temporary: is_temporary(status),
        };
    }
    if has_content_type(headers, "text/event-stream") {
        Head::Stream {
            readable: !headers.is_encoded,
        }
    } else if status == StatusCode::ACCEPTED && !has_content_type(headers, "application/json") {
        Head::Accepted
    } else {
        Head::Answer
    }
}

/// Returns `true` if the client can retry the same request later.
///
/// See RFC 9110, sections 15.5.9 and 15.6, and RFC 6585, section 4.
fn is_temporary(status: StatusCode) -> bool {
    status.is_server_error()
        || matches!(
            status,
            StatusCode::REQUEST_TIMEOUT | StatusCode::TOO_MANY_REQUESTS
        )
}

/// Returns `true` if the content's media type is `media_type`.
pub(super) fn has_content_type(headers: &McpHeaders<'_>, media_type: &str) -> bool {
    let value = headers.content_type.first();
    value.is_some_and(|value| headers::is_media_type(value, media_type))
}

/// Returns `true` if responses with `status` have no content (RFC 9110, section 6.4.1).
pub(super) fn has_no_content(status: StatusCode) -> bool {
    status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
}
