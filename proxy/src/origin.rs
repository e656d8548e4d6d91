//! Server origins: scheme, host and port.

use std::{fmt, sync::Arc};

use http::{
    HeaderMap, Uri,
    uri::{Authority, Scheme},
};

/// The origin of an http or https URL.
#[derive(Debug, Clone)]
pub(crate) struct Origin {
    scheme: Scheme,
    authority: Authority,
}

/// A request extension with the details of a client's connection that the server needs.
///
/// Clones share the connection. The headers are only added to the request in `forward`, so that they stay hidden from the event
/// store. The store would treat the client's address as a credential, but the address changes whenever the client moves to
/// another network.
#[derive(Debug, Clone)]
pub(crate) struct ClientConnection(pub(crate) Arc<Connection>);

/// A client's connection.
#[derive(Debug)]
pub(crate) struct Connection {
    /// The headers to send in place of the request's own.
    pub(crate) headers: HeaderMap,
    /// The origin at which clients reach the proxy, if known.
    pub(crate) public: Option<Origin>,
}

// === impl Origin ===

impl Origin {
    /// Creates an http or https origin. Returns `None` for any other scheme.
    ///
    /// Also returns `None` if the authority has no host or contains a user name.
    pub(crate) fn new(scheme: Scheme, authority: Authority) -> Option<Self> {
        let is_http = scheme == Scheme::HTTP || scheme == Scheme::HTTPS;
        let is_plain = !authority.as_str().contains('@') && !authority.host().is_empty();
        (is_http && is_plain).then_some(Self { scheme, authority })
    }

    /// Returns a URL's origin, or `None` if the URL is relative or [`new`](Self::new) rejects it.
    pub(crate) fn of(url: &Uri) -> Option<Self> {
        Self::new(url.scheme()?.clone(), url.authority()?.clone())
    }

    pub(crate) fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    pub(crate) fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Returns `true` if both origins have the same scheme, host and port.
    pub(crate) fn is_same_as(&self, other: &Self) -> bool {
        self.scheme == other.scheme
            && self.port() == other.port()
            && self
                .authority
                .host()
                .eq_ignore_ascii_case(other.authority.host())
    }

    /// Returns `true` if this is `server`'s origin, or another origin it may use for itself.
    ///
    /// A server may refer to itself by its `public` origin, if it has one, or by its own host with the public scheme.
    pub(crate) fn is_origin_of(&self, server: &Self, public: Option<&Self>) -> bool {
        let with_scheme = |public: &Self| Self {
            scheme: public.scheme.clone(),
            authority: server.authority.clone(),
        };
        self.is_same_as(server)
            || public.is_some_and(|public| {
                self.is_same_as(public) || self.is_same_as(&with_scheme(public))
            })
    }

    /// Replaces the server's origin in `url` with this one, the public origin.
    ///
    /// Returns `None` if `url` is not on the server.
    pub(crate) fn replace_origin(&self, server: &Self, url: &str) -> Option<String> {
        let parsed: Uri = url.parse().ok()?;
        let origin = Self::of(&parsed)?;
        if !origin.is_origin_of(server, Some(self)) {
            return None;
        }
        let length = origin.to_string().len();
        let (_, rest) = url.split_at_checked(length)?;
        Some(format!("{self}{rest}"))
    }

    fn port(&self) -> u16 {
        let default = if self.scheme == Scheme::HTTPS {
            443
        } else {
            80
        };
        self.authority.port_u16().unwrap_or(default)
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme, self.authority)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(url: &str) -> Origin {
        Origin::of(&url.parse().unwrap()).unwrap()
    }

    #[test]
    fn only_urls_on_the_server_are_moved() {
        let (server, public) = (origin("http://up:9000"), origin("https://mcp.example.com"));
        for (url, expected) in [
            ("http://up:9000/mcp", "https://mcp.example.com/mcp"),
            ("HTTP://UP:9000", "https://mcp.example.com"),
            (
                "http://up:9000/a?b=http://up:9000#c",
                "https://mcp.example.com/a?b=http://up:9000#c",
            ),
            ("https://up:9000/mcp", "https://mcp.example.com/mcp"),
            (
                "https://mcp.example.com:443/mcp",
                "https://mcp.example.com/mcp",
            ),
        ] {
            assert_eq!(
                public.replace_origin(&server, url).as_deref(),
                Some(expected)
            );
        }
        for url in [
            "",
            "/mcp",
            "up:9000",
            "http://up/mcp",
            "http://up:9001/mcp",
            "http://up.evil:9000/",
            "http://up:9000@evil/",
            "http://a@up:9000/",
            "ftp://up:9000/",
            "http://mcp.example.com/",
            "urn:up",
        ] {
            assert_eq!(public.replace_origin(&server, url), None, "{url}");
        }
    }

    #[test]
    fn a_server_without_a_port_may_use_its_clients_scheme_but_no_other() {
        let (server, public) = (origin("http://up"), origin("https://mcp.example.com"));
        let moved = public.replace_origin(&server, "https://up/mcp");
        assert_eq!(moved.as_deref(), Some("https://mcp.example.com/mcp"));
        let plain = origin("http://mcp.example.com");
        assert_eq!(plain.replace_origin(&server, "https://up/mcp"), None);
        let moved = public.replace_origin(&server, "http://up:80/mcp");
        assert_eq!(moved.as_deref(), Some("https://mcp.example.com/mcp"));
    }
}
