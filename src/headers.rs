//! The headers that the layer reads.
//!
//! The headers needed from every message are collected in a single pass, which is cheaper than looking them up one by one.

use http::{HeaderMap, HeaderName, HeaderValue, header};

pub(crate) const LAST_EVENT_ID: &str = "last-event-id";

static SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
static PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// The headers read from every request and response.
#[derive(Debug, Default)]
pub(crate) struct McpHeaders<'a> {
    pub(crate) session_id: Header<'a>,
    pub(crate) protocol_version: Header<'a>,
    pub(crate) content_type: Header<'a>,
    pub(crate) content_length: Header<'a>,
    /// Whether the content is encoded, for example compressed.
    pub(crate) is_encoded: bool,
}

/// A header's value, and whether the header is repeated.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Header<'a> {
    #[default]
    Absent,
    One(&'a HeaderValue),
    /// The header is repeated. This is the first value.
    Several(&'a HeaderValue),
}

// === impl McpHeaders ===

impl<'a> McpHeaders<'a> {
    pub(crate) fn from_map(headers: &'a HeaderMap) -> Self {
        let mut mcp_headers = Self::default();
        for (name, value) in headers {
            // These comparisons are cheap, because standard names are compared as integers.
            let header = if *name == header::CONTENT_TYPE {
                &mut mcp_headers.content_type
            } else if *name == header::CONTENT_LENGTH {
                &mut mcp_headers.content_length
            } else if *name == header::CONTENT_ENCODING {
                mcp_headers.is_encoded |= has_coding(value);
                continue;
            } else if *name == SESSION_ID {
                &mut mcp_headers.session_id
            } else if *name == PROTOCOL_VERSION {
                &mut mcp_headers.protocol_version
            } else {
                continue;
            };
            *header = match *header {
                Header::Absent => Header::One(value),
                Header::One(first) | Header::Several(first) => Header::Several(first),
            };
        }
        mcp_headers
    }
}

// === impl Header ===

impl<'a> Header<'a> {
    pub(crate) fn first(self) -> Option<&'a HeaderValue> {
        match self {
            Self::Absent => None,
            Self::One(first) | Self::Several(first) => Some(first),
        }
    }
}

/// Returns `true` if a `Content-Type` is `media_type`, with or without parameters.
///
/// See RFC 9110, section 8.3.1.
pub(crate) fn is_media_type(value: &HeaderValue, media_type: &str) -> bool {
    if value.as_bytes() == media_type.as_bytes() {
        return true;
    }
    let essence = value.as_bytes().split(|byte| *byte == b';').next();
    essence.is_some_and(|essence| {
        essence
            .trim_ascii()
            .eq_ignore_ascii_case(media_type.as_bytes())
    })
}

/// Returns `true` if, judging by its `Content-Type`, a body cannot be a JSON-RPC message.
///
/// Returns `false` if the header is absent or repeated, and also for `application/json-rpc` and types ending in `+json`, because some
/// servers accept those too.
pub(crate) fn is_certainly_not_json(content_type: Header<'_>) -> bool {
    let Header::One(value) = content_type else {
        return false;
    };
    if value.as_bytes().starts_with(b"application/json") {
        return false;
    }
    let essence = value.as_bytes().split(|byte| *byte == b';').next();
    let essence = essence.unwrap_or_default().trim_ascii();
    let essence = essence.to_ascii_lowercase();
    !essence.starts_with(b"application/json") && !essence.ends_with(b"+json")
}

/// Returns `true` if the `Accept` header lists `text/event-stream` with a weight above zero.
///
/// See RFC 9110, section 12.5.1.
pub(crate) fn accepts_events(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT).iter();
    let mut ranges = values.flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    ranges.any(|range| {
        let mut parts = range.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
        let is_event_stream = parts
            .next()
            .is_some_and(|essence| essence.eq_ignore_ascii_case(b"text/event-stream"));
        is_event_stream && !parts.any(is_zero_weight)
    })
}

fn is_zero_weight(parameter: &[u8]) -> bool {
    let weight = parameter
        .strip_prefix(b"q=")
        .or(parameter.strip_prefix(b"Q="));
    weight.is_some_and(|weight| weight.iter().all(|byte| matches!(byte, b'0' | b'.')))
}

/// Returns `true` if a `Content-Encoding` lists a coding that changes the content.
///
/// `identity` and empty list elements do not change it (RFC 9110, sections 5.6.1 and 8.4.1).
fn has_coding(value: &HeaderValue) -> bool {
    let codings = value.as_bytes().split(|byte| *byte == b',');
    codings.map(<[u8]>::trim_ascii).any(|coding| {
        let is_identity = coding.eq_ignore_ascii_case(b"identity");
        !coding.is_empty() && !is_identity
    })
}

#[cfg(test)]
mod tests {
    use http::HeaderName;

    use super::*;

    #[test]
    fn each_header_is_found_and_a_repeated_one_is_recognised() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("accept", "a"),
            ("Content-Type", "b"),
            ("mcp-session-id", "c"),
            ("mcp-session-i", "d"),
            ("content-type", "e"),
            ("content-encoding", "f"),
        ] {
            let name: HeaderName = name.parse().unwrap();
            headers.append(name, HeaderValue::from_static(value));
        }
        let mcp_headers = McpHeaders::from_map(&headers);
        assert!(matches!(mcp_headers.session_id, Header::One(value) if value == "c"));
        assert!(matches!(mcp_headers.content_type, Header::Several(first) if first == "b"));
        assert!(mcp_headers.is_encoded);
        assert!(mcp_headers.protocol_version.first().is_none());
        assert!(mcp_headers.content_length.first().is_none());
    }

    #[test]
    fn content_is_encoded_if_any_coding_but_identity_is_named() {
        let is_encoded = |values: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append("content-encoding", HeaderValue::from_static(value));
            }
            McpHeaders::from_map(&headers).is_encoded
        };
        for plain in [
            &[][..],
            &[""],
            &["identity"],
            &["Identity"],
            &[" , identity,"],
            &["identity", ""],
        ] {
            assert!(!is_encoded(plain), "{plain:?}");
        }
        for encoded in [
            &["gzip"][..],
            &["identity, gzip"],
            &["identity", "br"],
            &["identity;q=1"],
            &["?"],
        ] {
            assert!(is_encoded(encoded), "{encoded:?}");
        }
    }
}
