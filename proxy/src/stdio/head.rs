//! The head of a client's request.

use http::{HeaderMap, header};

/// The field that names a session.
pub(super) const SESSION_ID: &str = "mcp-session-id";

/// What a request of a client has besides its body.
pub(super) struct Head<'a> {
    pub(super) session: Option<&'a str>,
    pub(super) revision: Option<&'a str>,
}

// === impl Head ===

impl<'a> Head<'a> {
    pub(super) fn read(headers: &'a HeaderMap) -> Result<Self, &'static str> {
        Ok(Self {
            session: only(headers, SESSION_ID).map_err(|()| "there must be one Mcp-Session-Id")?,
            revision: only(headers, "mcp-protocol-version")
                .map_err(|()| "there must be one MCP-Protocol-Version")?,
        })
    }
}

/// The value of a field that may be there once.
fn only<'a>(headers: &'a HeaderMap, name: &str) -> Result<Option<&'a str>, ()> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Ok(None),
        (Some(value), None) => value.to_str().map(Some).map_err(|_| ()),
        (Some(_), Some(_)) => Err(()),
    }
}

/// Whether a client takes this media type. Parameters do not matter.
pub(super) fn accepts(headers: &HeaderMap, wanted: &str) -> bool {
    let fields = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let mut ranges = fields.flat_map(|field| field.split(',')).map(media_type);
    ranges.any(|range| {
        let family = range.strip_suffix("/*");
        range.eq_ignore_ascii_case(wanted)
            || range == "*/*"
            || family.is_some_and(|family| {
                wanted
                    .split('/')
                    .next()
                    .is_some_and(|its| its.eq_ignore_ascii_case(family))
            })
    })
}

pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let content_type = headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    content_type.is_some_and(|value| media_type(value).eq_ignore_ascii_case("application/json"))
}

fn media_type(value: &str) -> &str {
    value.split(';').next().unwrap_or_default().trim()
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
    fn a_client_accepts_what_it_says_in_any_spelling() {
        for accept in [
            "text/event-stream",
            "application/json, Text/Event-Stream;q=0.5",
            "*/*",
            "text/*",
        ] {
            assert!(
                accepts(&headers(&[("accept", accept)]), "text/event-stream"),
                "{accept}"
            );
        }
        for accept in ["application/json", "text/html", "", "application/*"] {
            assert!(
                !accepts(&headers(&[("accept", accept)]), "text/event-stream"),
                "{accept}"
            );
        }
        assert!(!accepts(&HeaderMap::new(), "text/event-stream"));
    }

    #[test]
    fn a_body_is_json_if_its_type_says_so() {
        for (value, json) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("text/plain", false),
            ("application/jsonp", false),
        ] {
            assert_eq!(
                is_json(&headers(&[("content-type", value)])),
                json,
                "{value}"
            );
        }
        assert!(!is_json(&HeaderMap::new()));
    }

    #[test]
    fn a_session_that_is_named_twice_is_none() {
        let mut twice = headers(&[("mcp-session-id", "a")]);
        assert_eq!(
            Head::read(&twice).ok().and_then(|head| head.session),
            Some("a")
        );
        twice.append("mcp-session-id", http::HeaderValue::from_static("a"));
        assert!(Head::read(&twice).is_err());
    }
}
