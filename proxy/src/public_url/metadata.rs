//! Rewrites the `resource` field of a protected resource's metadata (RFC 9728, section 2).

use http::{HeaderName, header};
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::origin::Origin;

/// Headers that describe a body's exact bytes, so they are wrong once it has been rewritten.
pub(super) const BODY_HEADERS: [HeaderName; 6] = [
    header::ACCEPT_RANGES,
    header::CONTENT_LENGTH,
    header::ETAG,
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("digest"),
    HeaderName::from_static("repr-digest"),
];

/// The field to rewrite. If it is duplicated, the metadata can't be parsed.
#[derive(Deserialize)]
struct Metadata<'a> {
    #[serde(borrow)]
    resource: &'a RawValue,
}

/// Moves the `resource` to the public origin. No other bytes are changed.
///
/// Returns `None` if the `resource` is not a URL on the upstream.
pub(super) fn rewrite(text: &[u8], upstream: &Origin, public: &Origin) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(text).ok()?;
    let metadata: Metadata<'_> = serde_json::from_str(text).ok()?;
    let resource = metadata.resource.get();
    let url: String = serde_json::from_str(resource).ok()?;
    let rewritten = serde_json::to_string(&public.replace_origin(upstream, &url)?).ok()?;
    // This works because `resource` is borrowed from the text.
    let start = (resource.as_ptr() as usize).checked_sub(text.as_ptr() as usize)?;
    let (before, rest) = text.split_at_checked(start)?;
    let after = rest.strip_prefix(resource)?;
    Some([before, &rewritten, after].concat().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewrite_text(text: &str) -> Option<String> {
        let origin = |url: &str| Origin::of(&url.parse().unwrap()).unwrap();
        let (upstream, public) = (origin("http://up:9000"), origin("https://mcp.example.com"));
        let rewritten = rewrite(text.as_bytes(), &upstream, &public)?;
        Some(String::from_utf8(rewritten).unwrap())
    }

    #[test]
    fn only_the_resource_is_rewritten() {
        for (text, expected) in [
            (
                r#"{ "x": 1.0, "resource":"http://up:9000/mcp" , "authorization_servers":["http://up:9000"]}"#,
                r#"{ "x": 1.0, "resource":"https://mcp.example.com/mcp" , "authorization_servers":["http://up:9000"]}"#,
            ),
            (
                r#"{"resource":"http:\/\/up:9000\/"}"#,
                r#"{"resource":"https://mcp.example.com/"}"#,
            ),
        ] {
            assert_eq!(rewrite_text(text).as_deref(), Some(expected));
        }
        for text in [
            "",
            "[]",
            "{}",
            r#"{"resource":1}"#,
            r#"{"resource":"https://other.example/mcp"}"#,
            r#"{"resource":"http://up:9000/a","resource":"http://up:9000/b"}"#,
            r#"{"a":{"resource":"http://up:9000/a"}}"#,
            r#"{"resource":"http://up:9000/a"} x"#,
        ] {
            assert_eq!(rewrite_text(text), None, "{text}");
        }
    }
}
