//! The parts of a request's and a response's head that matter to the response.

use http::{HeaderMap, StatusCode, header};

use crate::{
    exchange::Head,
    fields::{self, Fields},
};

/// Whether the `Accept` header names server-sent events, and does not rule them out (RFC 9110, section 12.5.1).
pub(super) fn accepts_events(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter();
    let mut ranges = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    ranges.any(|range| {
        let mut parts = range.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        let names_it = parts
            .next()
            .is_some_and(|essence| essence.eq_ignore_ascii_case(b"text/event-stream"));
        names_it && !parts.any(is_zero_weight)
    })
}

fn is_zero_weight(parameter: &[u8]) -> bool {
    let weight = parameter
        .strip_prefix(b"q=")
        .or(parameter.strip_prefix(b"Q="));
    weight.is_some_and(|weight| weight.iter().all(|byte| matches!(byte, b'0' | b'.')))
}

pub(super) fn content_length(fields: &Fields<'_>) -> Option<u64> {
    let length = fields.content_length.first()?;
    length.to_str().ok()?.parse().ok()
}

pub(super) fn read_head(status: StatusCode, fields: &Fields<'_>) -> Head {
    if !status.is_success() {
        return Head::Refusal;
    }
    match has_type(fields, "text/event-stream") {
        true => Head::Stream {
            readable: fields.content_encoding.is_absent(),
        },
        false => Head::Answer,
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
