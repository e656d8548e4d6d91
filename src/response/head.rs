//! The parts of a request's and a response's head that matter to the response.

use http::StatusCode;

use crate::{
    exchange::Head,
    fields::{self, Fields},
};

pub(super) fn content_length(fields: &Fields<'_>) -> Option<u64> {
    let length = fields.content_length.first()?;
    length.to_str().ok()?.parse().ok()
}

pub(super) fn read_head(status: StatusCode, fields: &Fields<'_>) -> Head {
    if !status.is_success() {
        return Head::Refusal;
    }
    if has_type(fields, "text/event-stream") {
        Head::Stream {
            readable: !fields.is_encoded,
        }
    } else {
        Head::Answer
    }
}

/// Whether the content is of this media type.
pub(super) fn has_type(fields: &Fields<'_>, media_type: &str) -> bool {
    let value = fields.content_type.first();
    value.is_some_and(|value| fields::names_media_type(value, media_type))
}

/// RFC 9110, section 6.4.1.
pub(super) fn has_no_content(status: StatusCode) -> bool {
    status.is_informational()
        || status == StatusCode::NO_CONTENT
        || status == StatusCode::NOT_MODIFIED
}
