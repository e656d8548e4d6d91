//! Checks requests before their bodies are read.

use std::{collections::HashSet, net::IpAddr};

use http::{HeaderMap, Method, StatusCode, Uri, Version, header, request::Parts, uri::Authority};

use crate::{config::normal_origin, headers::exactly_one};

/// This host's names and the origins whose pages may call the server.
#[derive(Debug, Default)]
pub struct RequestFilter {
    /// In lower case, with or without a port.
    hosts: HashSet<String>,
    origins: HashSet<String>,
    /// Whether any IP address is accepted as `Host`.
    allows_ip_addresses: bool,
}

/// The accepted methods: those that MCP uses, and those for inspecting an endpoint.
const METHODS: [Method; 5] = [
    Method::GET,
    Method::POST,
    Method::DELETE,
    Method::OPTIONS,
    Method::HEAD,
];

/// The accepted methods, for a refusal's `Allow` header.
pub(super) const ALLOW: &str = "GET, POST, DELETE, OPTIONS, HEAD";

/// The default ports of http and https.
const DEFAULT_PORTS: [u16; 2] = [80, 443];

/// The status and text of a refusal.
type Refused = (StatusCode, &'static str);

// === impl RequestFilter ===

impl RequestFilter {
    /// Creates a filter that allows this machine's names and the given hosts and origins.
    ///
    /// Hosts and origins must be in lower case, and origins must omit their scheme's default port.
    pub fn new(
        hosts: impl IntoIterator<Item = String>,
        origins: impl IntoIterator<Item = String>,
    ) -> Self {
        Self {
            hosts: hosts.into_iter().collect(),
            origins: origins.into_iter().collect(),
            allows_ip_addresses: false,
        }
    }

    /// Allows IP addresses as `Host`, because that is what probes and scrapers send.
    ///
    /// This does not make DNS rebinding possible, because a rebound page sends a name as `Host`.
    #[must_use]
    pub fn allow_ip_addresses(mut self) -> Self {
        self.allows_ip_addresses = true;
        self
    }

    /// Checks a request whose body may be up to `body_size` bytes long. The error is the refusal.
    ///
    /// The size of a body without a `Content-Length` is not checked yet.
    pub(super) fn check(&self, request: &Parts, body_size: usize) -> Result<(), Refused> {
        // Refuse all other methods: their effect is unknown, and TRACE would echo the configured headers.
        if !METHODS.contains(&request.method) {
            return Err((
                StatusCode::METHOD_NOT_ALLOWED,
                "only GET, POST, DELETE, OPTIONS and HEAD are accepted\n",
            ));
        }
        let is_absolute = request.version < Version::HTTP_2 && request.uri.authority().is_some();
        if is_absolute || !request.uri.path().starts_with('/') {
            return Err((
                StatusCode::BAD_REQUEST,
                "the request target must be a path\n",
            ));
        }
        let unreadable = (
            StatusCode::BAD_REQUEST,
            "the request must have exactly one valid Host\n",
        );
        let host = host(request).ok_or(unreadable)?;
        if !self.is_own_host(&host) {
            return Err((
                StatusCode::FORBIDDEN,
                "this Host is not allowed (see --allow-host)\n",
            ));
        }
        if !self.allows_origin(&request.headers) {
            return Err((
                StatusCode::FORBIDDEN,
                "this Origin is not allowed (see --allow-origin)\n",
            ));
        }
        if length(&request.headers).is_some_and(|length| length > body_size as u64) {
            return Err((
                StatusCode::PAYLOAD_TOO_LARGE,
                "the request is larger than this proxy accepts\n",
            ));
        }
        Ok(())
    }

    /// Returns `true` if clients may use `host`.
    pub(crate) fn allows_host(&self, host: &Authority) -> bool {
        !host.as_str().contains('@') && self.is_own_host(host)
    }

    /// Returns `true` for one of this machine's names or an allowed host.
    fn is_own_host(&self, authority: &Authority) -> bool {
        // Clients omit their scheme's default port.
        let is_allowed_with_default_port = |host: &str| {
            let mut ports = DEFAULT_PORTS.iter();
            authority.port().is_none()
                && ports.any(|port| self.hosts.contains(&format!("{host}:{port}")))
        };
        let host = authority.host().to_ascii_lowercase();
        is_this_machine(&host)
            || (self.allows_ip_addresses && address(&host).is_some())
            || self.hosts.contains(&host)
            || is_allowed_with_default_port(&host)
            || self
                .hosts
                .contains(&authority.as_str().to_ascii_lowercase())
    }

    /// Returns `true` if the request is not from a page, or if the page may call the server.
    ///
    /// Pages may call the server if their origin is allowed, or if the origin's host is one of this host's names.
    fn allows_origin(&self, headers: &HeaderMap) -> bool {
        if !headers.contains_key(header::ORIGIN) {
            return true;
        }
        let Some(origin) = exactly_one(headers, &header::ORIGIN) else {
            return false;
        };
        let Ok(origin) = origin.parse::<Uri>() else {
            return false;
        };
        self.origins.contains(&normal_origin(&origin))
            || is_web(&origin)
                && origin
                    .authority()
                    .is_some_and(|host| self.is_own_host(host))
    }
}

/// Returns `true` for a web page's origin. Other schemes belong to extensions and programs.
fn is_web(origin: &Uri) -> bool {
    matches!(origin.scheme_str(), Some("http" | "https"))
}

fn is_this_machine(host: &str) -> bool {
    host == "localhost" || address(host).is_some_and(|address| address.is_loopback())
}

fn address(host: &str) -> Option<IpAddr> {
    let address = host.trim_start_matches('[').trim_end_matches(']');
    address.parse().ok()
}

/// Returns a request's host, or `None` if the host is missing or ambiguous.
///
/// An HTTP/2 request carries its host in the URI, and may repeat it in `Host`.
fn host(request: &Parts) -> Option<Authority> {
    let in_header = if request.headers.contains_key(header::HOST) {
        Some(exactly_one(&request.headers, &header::HOST)?.parse().ok()?)
    } else {
        None
    };
    let host: Authority = match (request.uri.authority().cloned(), in_header) {
        (Some(in_uri), Some(in_header)) if in_uri != in_header => return None,
        (Some(host), _) | (None, Some(host)) => host,
        (None, None) => return None,
    };
    (!host.as_str().contains('@')).then_some(host)
}

fn length(headers: &HeaderMap) -> Option<u64> {
    exactly_one(headers, &header::CONTENT_LENGTH)?.parse().ok()
}
