//! Reads the request and response headers that matter to the proxy.

use http::{HeaderMap, HeaderName, header};

/// The header with the session id.
pub const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");

/// The header with the protocol revision.
pub const PROTOCOL_VERSION: HeaderName = HeaderName::from_static("mcp-protocol-version");

/// The header with the id of the last event that a client has received.
pub const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");

/// The first revision whose clients support priming events.
///
/// A priming event carries no message, just an id to resume from.
pub const FIRST_REVISION_WITH_PRIMING: &str = "2025-11-25";

/// The first revision without sessions and resumption.
pub const FIRST_WITHOUT_SESSIONS: &str = "2026-07-28";

/// An event stream's media type.
pub const EVENT_STREAM: &str = "text/event-stream";

/// JSON's media type.
pub const JSON: &str = "application/json";

/// The error for a header that occurs more than once or is not text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ambiguous;

/// Returns the value of a header that may occur at most once.
pub fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Ambiguous> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| Ambiguous),
        (Some(_), Some(_)) => Err(Ambiguous),
    }
}

/// Returns a header's value if the header occurs exactly once and is non-empty text.
pub fn exactly_one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let value = single(headers, name).ok().flatten();
    value.filter(|value| !value.is_empty())
}

/// Like [`exactly_one`], but allows the header to be repeated with the same value.
pub fn same_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let mut values = headers.get_all(name).iter();
    let first = values.next()?;
    if values.any(|value| value != first) {
        return None;
    }
    first.to_str().ok().filter(|value| !value.is_empty())
}

/// Returns `true` if a client accepts this media type.
///
/// If several ranges match it, the most specific one takes precedence (RFC 9110, section 12.5.1).
pub fn accepts(headers: &HeaderMap, wanted: &str) -> bool {
    let family = wanted.split('/').next().unwrap_or_default();
    let ranges = headers
        .get_all(header::ACCEPT)
        .iter()
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','));
    let matching = ranges.filter_map(|range| {
        let media_range = essence(range);
        let range_family = media_range.strip_suffix(b"/*").unwrap_or_default();
        let specificity = if media_range.eq_ignore_ascii_case(wanted.as_bytes()) {
            2
        } else if range_family.eq_ignore_ascii_case(family.as_bytes()) {
            1
        } else if media_range == b"*/*" {
            0
        } else {
            return None;
        };
        Some((specificity, !has_zero_weight(range)))
    });
    matching.max().is_some_and(|(_, is_accepted)| is_accepted)
}

/// Returns `true` if a range has a weight of zero, which means "not acceptable".
///
/// See RFC 9110, section 12.4.2.
fn has_zero_weight(range: &[u8]) -> bool {
    let mut parameters = range.split(|byte| *byte == b';').map(<[u8]>::trim_ascii);
    parameters.any(|parameter| {
        let weight = parameter
            .strip_prefix(b"q=")
            .or(parameter.strip_prefix(b"Q="));
        weight.is_some_and(|weight| weight.iter().all(|byte| matches!(byte, b'0' | b'.')))
    })
}

/// Returns `true` if a body has this media type, with any parameters.
pub fn has_content_type(headers: &HeaderMap, media_type: &str) -> bool {
    let value = headers.get(header::CONTENT_TYPE);
    value.is_some_and(|value| essence(value.as_bytes()).eq_ignore_ascii_case(media_type.as_bytes()))
}

/// Returns `true` if a body has a content coding.
///
/// `identity` and empty list elements are ignored (RFC 9110, sections 5.6.1 and 8.4.1).
pub fn has_content_coding(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::CONTENT_ENCODING).iter();
    let mut codings = values
        .flat_map(|value| value.as_bytes().split(|byte| *byte == b','))
        .map(<[u8]>::trim_ascii);
    codings.any(|coding| !coding.is_empty() && !coding.eq_ignore_ascii_case(b"identity"))
}

/// Returns a media type without its parameters (RFC 9110, section 8.3.1).
fn essence(value: &[u8]) -> &[u8] {
    let essence = value.split(|byte| *byte == b';').next();
    essence.unwrap_or_default().trim_ascii()
}

/// Returns `true` if this revision has sessions. A revision that is not a date has none.
pub fn has_sessions(revision: &str) -> bool {
    let is_date = revision.len() == FIRST_WITHOUT_SESSIONS.len()
        && revision
            .bytes()
            .zip(FIRST_WITHOUT_SESSIONS.bytes())
            .all(|(byte, model)| match model {
                b'-' => byte == b'-',
                _ => byte.is_ascii_digit(),
            });
    is_date && revision < FIRST_WITHOUT_SESSIONS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let fields = fields
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), http::HeaderValue::from_static(value)));
        fields.collect()
    }

    #[test]
    fn the_most_specific_range_of_the_accept_header_counts() {
        for accept in [
            "text/event-stream",
            "application/json, Text/Event-Stream;q=0.5",
            "*/*",
            "text/*",
            "*/*;q=0, text/event-stream",
            "text/event-stream; q=0, text/event-stream",
        ] {
            assert!(
                accepts(&headers(&[("accept", accept)]), "text/event-stream"),
                "{accept}"
            );
        }
        for accept in [
            "application/json",
            "text/html",
            "",
            "application/*",
            "application/json, text/event-stream;q=0",
            "*/*, text/event-stream; Q=0.000",
        ] {
            assert!(
                !accepts(&headers(&[("accept", accept)]), "text/event-stream"),
                "{accept}"
            );
        }
        assert!(!accepts(&HeaderMap::new(), "text/event-stream"));
    }

    #[test]
    fn a_body_is_json_if_its_media_type_is() {
        for (value, is_json) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("text/plain", false),
            ("application/jsonp", false),
        ] {
            assert_eq!(
                has_content_type(&headers(&[("content-type", value)]), JSON),
                is_json,
                "{value}"
            );
        }
        assert!(!has_content_type(&HeaderMap::new(), JSON));
    }

    #[test]
    fn a_body_that_is_marked_as_identity_is_not_coded() {
        for value in ["identity", "Identity", "", ", identity ,"] {
            let marked = headers(&[("content-encoding", value)]);
            assert!(!has_content_coding(&marked), "{value:?}");
        }
        assert!(!has_content_coding(&HeaderMap::new()));
        for value in ["gzip", "identity, br", "x"] {
            assert!(
                has_content_coding(&headers(&[("content-encoding", value)])),
                "{value:?}"
            );
        }
        let twice = headers(&[
            ("content-encoding", "identity"),
            ("content-encoding", "gzip"),
        ]);
        assert!(has_content_coding(&twice));
    }

    #[test]
    fn a_repeated_session_header_is_ambiguous() {
        let mut twice = headers(&[("mcp-session-id", "a")]);
        assert_eq!(single(&twice, &SESSION_ID), Ok(Some("a")));
        assert_eq!(single(&twice, &PROTOCOL_VERSION), Ok(None));
        twice.append(SESSION_ID, http::HeaderValue::from_static("a"));
        assert_eq!(single(&twice, &SESSION_ID), Err(Ambiguous));
        assert_eq!(exactly_one(&twice, &SESSION_ID), None);
    }

    #[test]
    fn a_revision_has_sessions_if_it_is_an_older_date() {
        for (revision, expected) in [
            ("2025-11-25", true),
            ("2024-11-05", true),
            ("2026-07-28", false),
            ("2027-01-01", false),
            ("DRAFT-2025", false),
            ("2025/11/25", false),
            ("", false),
        ] {
            assert_eq!(has_sessions(revision), expected, "{revision}");
        }
    }
}
