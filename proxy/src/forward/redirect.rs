//! Interprets the server's redirects.
//!
//! A redirect to a path that the proxy serves is rewritten to point back at the proxy, without the configured query.

use http::{HeaderValue, StatusCode, Uri, header, response, uri::PathAndQuery};

use crate::origin::Origin;

/// A redirect's target.
#[derive(Debug, Clone, Copy)]
pub(super) struct Redirect<'a>(&'a HeaderValue);

// === impl Redirect ===

impl<'a> Redirect<'a> {
    /// Returns a response's redirect, or `None` if it is not a redirect or has no `Location`.
    pub(super) fn from_head(head: &'a response::Parts) -> Option<Self> {
        let may_redirect = head.status.is_redirection() && head.status != StatusCode::NOT_MODIFIED;
        head.headers
            .get(header::LOCATION)
            .filter(|_| may_redirect)
            .map(Self)
    }

    /// Returns the target as a path at the origin of `requested`.
    ///
    /// `requested` is the URI sent to the server. `public` is the origin that clients use, if known. Returns `None` if the
    /// target is at another origin, if its origin is ambiguous, or if the redirect would repeat forever.
    pub(super) fn path_at_origin(
        self,
        requested: &Uri,
        public: Option<&Origin>,
    ) -> Option<PathAndQuery> {
        let text = self.0.to_str().ok()?.trim();
        let text = text.split('#').next().unwrap_or_default();
        // Browsers treat `\` as `/`, so another host might follow it.
        if text.is_empty() || text.contains('\\') {
            return None;
        }
        let scheme = requested.scheme_str()?;
        // The forms of a URI reference (RFC 3986, section 4.2): `//host/path`, `/path`, `?query`, an absolute URI, and a
        // relative path.
        let path = if text.starts_with("//") {
            path_at(requested, public, &format!("{scheme}:{text}"))?
        } else if text.starts_with('/') {
            text.parse().ok()?
        } else if text.starts_with('?') {
            format!("{}{text}", requested.path()).parse().ok()?
        } else if text.split(['/', '?']).next()?.contains(':') {
            path_at(requested, public, text)?
        } else {
            let (folder, _) = requested.path().rsplit_once('/')?;
            format!("{folder}/{text}").parse().ok()?
        };
        // In a `Location`, `//` at the start would be followed by a host.
        (!path.as_str().starts_with("//")).then_some(path)
    }
}

/// Returns an absolute URI's path, if the URI is on the server that `requested` was sent to.
///
/// Returns `None` if it is on another server, or if the redirect would repeat forever.
fn path_at(requested: &Uri, public: Option<&Origin>, text: &str) -> Option<PathAndQuery> {
    let uri: Uri = text.parse().ok()?;
    let (target, server) = (Origin::of(&uri)?, Origin::of(requested)?);
    // The proxy would send the next request for this path to the same URI, and the server would redirect it again.
    let is_loop = !target.is_same_as(&server) && uri.path() == requested.path();
    let is_rewritable = target.is_origin_of(&server, public) && !is_loop;
    let path = uri.into_parts().path_and_query;
    is_rewritable.then(|| path.unwrap_or(PathAndQuery::from_static("/")))
}

/// Removes the parameters also present in the `configured` query. Returns `None` if no parameters are left.
pub(super) fn remove_parameters(query: &str, configured: &str) -> Option<String> {
    let names: Vec<Vec<u8>> = configured.split('&').map(name).collect();
    let rest: Vec<&str> = query
        .split('&')
        .filter(|parameter| !names.contains(&name(parameter)))
        .collect();
    (!rest.is_empty()).then(|| rest.join("&"))
}

/// Returns a parameter's name. It is decoded, because the server may encode it differently.
fn name(parameter: &str) -> Vec<u8> {
    decode(parameter.split('=').next().unwrap_or_default())
}

/// Returns `true` if a string contains a value from the `configured` query.
///
/// A value is found even if it has been percent-encoded several times. Values shorter than 4 bytes are ignored.
pub(super) fn contains_value_of(text: &str, configured: &str) -> bool {
    let text = decode(text);
    configured.split('&').any(|parameter| {
        let (_, value) = parameter.split_once('=').unwrap_or(("", parameter));
        let value = decode(value);
        // Shorter values can hardly be secrets, and would match by chance.
        value.len() >= 4 && text.windows(value.len()).any(|part| part == value)
    })
}

/// Decodes percent-encoding repeatedly until none is left. A `+` becomes a space.
fn decode(text: &str) -> Vec<u8> {
    let mut bytes = text.as_bytes().to_vec();
    loop {
        let once = decode_once(&bytes);
        if once == bytes {
            return once;
        }
        bytes = once;
    }
}

fn decode_once(bytes: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, after)) = rest.split_first() {
        let (byte, after) = match (first, after) {
            (b'%', [high, low, after @ ..]) => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => (high << 4 | low, after),
                _ => (b'%', after),
            },
            (b'+', after) => (b' ', after),
            (byte, after) => (*byte, after),
        };
        decoded.push(byte);
        rest = after;
    }
    decoded
}

fn digit(hex: u8) -> Option<u8> {
    let digit = char::from(hex).to_digit(16)?;
    u8::try_from(digit).ok()
}

#[cfg(test)]
mod tests {
    use http::Response;

    use super::*;

    fn path_of(location: &str) -> Option<String> {
        path_behind(None, location)
    }

    fn path_behind(public: Option<&str>, location: &str) -> Option<String> {
        let public = public.map(|url| Origin::of(&url.parse().unwrap()).unwrap());
        let requested = Uri::from_static("http://up:9000/a/mcp?key=1");
        let response = Response::builder()
            .status(307)
            .header(header::LOCATION, location);
        let (head, ()) = response.body(()).unwrap().into_parts();
        let path = Redirect::from_head(&head)?.path_at_origin(&requested, public.as_ref())?;
        Some(path.to_string())
    }

    #[test]
    fn a_redirect_to_the_origin_of_the_server_is_a_path() {
        for (location, expected) in [
            ("/a/mcp/", "/a/mcp/"),
            ("/a/mcp/?key=1#part", "/a/mcp/?key=1"),
            ("mcp/", "/a/mcp/"),
            ("?b", "/a/mcp?b"),
            ("//up:9000/b", "/b"),
            ("http://UP:9000", "/"),
            ("HTTP://up:9000/b?c=d:e", "/b?c=d:e"),
        ] {
            assert_eq!(path_of(location).as_deref(), Some(expected), "{location}");
        }
    }

    #[test]
    fn a_redirect_to_the_public_origin_is_a_path_as_well() {
        let path_of = |location| path_behind(Some("https://mcp.example.com"), location);
        for location in [
            "https://mcp.example.com/a/mcp/",
            "https://up:9000/a/mcp/",
            "http://up:9000/a/mcp/",
        ] {
            assert_eq!(path_of(location).as_deref(), Some("/a/mcp/"), "{location}");
        }
        for location in ["http://mcp.example.com/a/mcp/", "https://up/a/mcp/"] {
            assert_eq!(path_of(location), None, "{location}");
        }
    }

    /// For example, uvicorn redirects from `http://up/mcp` to `https://up/mcp/`.
    ///
    /// It takes the scheme from `X-Forwarded-Proto`, which the proxy sends, and the host from `Host`.
    #[test]
    fn a_server_on_the_default_port_that_believes_the_public_scheme_redirects_to_itself() {
        let public = Origin::of(&Uri::from_static("https://mcp.example.com")).unwrap();
        let requested = Uri::from_static("http://up/mcp");
        let response = Response::builder()
            .status(307)
            .header(header::LOCATION, "https://up/mcp/");
        let (head, ()) = response.body(()).unwrap().into_parts();
        let path = Redirect::from_head(&head)
            .unwrap()
            .path_at_origin(&requested, Some(&public));
        assert_eq!(path.unwrap(), "/mcp/");
    }

    #[test]
    fn a_redirect_to_the_same_path_with_the_public_scheme_would_never_end() {
        let path_of = |location| path_behind(Some("https://mcp.example.com"), location);
        for location in [
            "https://up:9000/a/mcp?key=1",
            "https://mcp.example.com/a/mcp",
        ] {
            assert_eq!(path_of(location), None, "{location}");
        }
    }

    #[test]
    fn a_redirect_to_another_or_an_ambiguous_origin_has_no_path() {
        for location in [
            "",
            "#part",
            "https://up:9000/b",
            "http://up/b",
            "http://up:9001/b",
            "http://other:9000/b",
            "http://up:9000@other/b",
            "http://other@up:9000/b",
            "//other/b",
            "http://up:9000//other/b",
            "/\\other/b",
            "\\\\other/b",
            "javascript:x",
            "http:b",
        ] {
            assert_eq!(path_of(location), None, "{location}");
        }
    }

    #[test]
    fn the_configured_parameters_are_removed_from_a_query() {
        let configured = "key=s3cret&v=1";
        assert_eq!(remove_parameters("key=s3cret&v=1", configured), None);
        assert_eq!(
            remove_parameters("v=1&a=b&k%65y=s3cret", configured).as_deref(),
            Some("a=b")
        );
        assert_eq!(
            remove_parameters("keys=1", configured).as_deref(),
            Some("keys=1")
        );
        assert!(contains_value_of(
            "/mcp/?next=%2Fmcp%3Fkey%3Ds3%2563ret",
            configured
        ));
        assert!(!contains_value_of("/v/1?a=%zz%", configured));
    }
}
