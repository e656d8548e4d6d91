//! Rewrites the `resource_metadata` parameter of `WWW-Authenticate` (RFC 9728, section 5.1).

use http::{HeaderMap, HeaderValue, header};

use crate::origin::Origin;

const PARAMETER: &str = "resource_metadata";

/// Rewrites metadata URLs on the upstream so that they use the public origin.
pub(super) fn rewrite(headers: &mut HeaderMap, upstream: &Origin, public: &Origin) {
    let values = headers
        .iter_mut()
        .filter(|(name, _)| **name == header::WWW_AUTHENTICATE);
    for (_, value) in values {
        let rewritten = value
            .to_str()
            .ok()
            .and_then(|text| rewrite_challenge(text, upstream, public));
        if let Some(rewritten) = rewritten.and_then(|text| HeaderValue::try_from(text).ok()) {
            *value = rewritten;
        }
    }
}

/// Returns the challenge with the public URL substituted.
///
/// Returns `None` if there is nothing to change, or if the challenge is ambiguous.
fn rewrite_challenge(text: &str, upstream: &Origin, public: &Origin) -> Option<String> {
    let mut quoted = text.split('"');
    let mut result = quoted.next()?.to_owned();
    let (mut before, mut count) = (result.clone(), 0);
    // Each iteration handles a quoted string and the text between it and the next one.
    while let Some(value) = quoted.next() {
        // A backslash might escape a quote.
        if value.contains('\\') {
            return None;
        }
        let between = quoted.next()?;
        let rewritten = is_parameter(&before)
            .then(|| public_url(value, upstream, public))
            .flatten();
        count += usize::from(rewritten.is_some());
        result.push('"');
        result.push_str(rewritten.as_deref().unwrap_or(value));
        result.push('"');
        result.push_str(between);
        before = between.to_owned();
    }
    (count > 0).then_some(result)
}

/// Returns `true` if the text before a quoted string ends with the parameter's name and `=`.
fn is_parameter(before: &str) -> bool {
    let Some(before) = before.trim_end().strip_suffix('=') else {
        return false;
    };
    let name = before.trim_end().rsplit([' ', ',', '\t']).next();
    name.is_some_and(|name| name.eq_ignore_ascii_case(PARAMETER))
}

/// Returns `url` with the public origin.
///
/// Returns `None` if `url` is not on the upstream, or if its path is not under `/.well-known/`.
fn public_url(url: &str, upstream: &Origin, public: &Origin) -> Option<String> {
    let public_url = public.replace_origin(upstream, url)?;
    let (_, path) = public_url.split_at_checked(public.to_string().len())?;
    path.starts_with("/.well-known/").then_some(public_url)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rewrite_text(text: &str) -> Option<String> {
        let origin = |url: &str| Origin::of(&url.parse().unwrap()).unwrap();
        let (upstream, public) = (origin("http://up:9000"), origin("https://mcp.example.com"));
        rewrite_challenge(text, &upstream, &public)
    }

    #[test]
    fn only_the_metadata_url_is_rewritten() {
        for (text, expected) in [
            (
                r#"Bearer resource_metadata="http://up:9000/.well-known/oauth-protected-resource/mcp""#,
                r#"Bearer resource_metadata="https://mcp.example.com/.well-known/oauth-protected-resource/mcp""#,
            ),
            (
                r#"Basic realm="http://up:9000/", Bearer error="invalid_token",Resource_Metadata = "http://UP:9000/.well-known/x" , scope="a b""#,
                r#"Basic realm="http://up:9000/", Bearer error="invalid_token",Resource_Metadata = "https://mcp.example.com/.well-known/x" , scope="a b""#,
            ),
        ] {
            assert_eq!(rewrite_text(text).as_deref(), Some(expected));
        }
    }

    #[test]
    fn a_challenge_with_another_url_or_an_ambiguous_one_is_unchanged() {
        for text in [
            "",
            "Bearer",
            r#"Bearer resource_metadata="https://other.example/.well-known/x""#,
            r#"Bearer resource_metadata="http://up:9000/metadata""#,
            r#"Bearer resource_metadata="http://up:9000.evil/.well-known/x""#,
            r#"Bearer my_resource_metadata="http://up:9000/.well-known/x""#,
            r#"Bearer realm="resource_metadata=" , x="http://up:9000/.well-known/x""#,
            r#"Bearer realm="a\"b", resource_metadata="http://up:9000/.well-known/x""#,
            r#"Bearer resource_metadata="http://up:9000/.well-known/x"#,
            "Bearer resource_metadata=http://up:9000/.well-known/x",
        ] {
            assert_eq!(rewrite_text(text), None, "{text}");
        }
    }
}
