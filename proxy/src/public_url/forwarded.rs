//! `Forwarded` (RFC 7239) and `X-Forwarded-*`: a client's address and the origin it used.

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
};

use axum::body::Body;
use http::{
    HeaderMap, HeaderName, HeaderValue, Request, header,
    uri::{Authority, Scheme},
};
use mcp_cancel_on_disconnect::socket::Peer;

use crate::{
    config::{Network, PublicOptions},
    frontend::RequestFilter,
    headers::exactly_one,
    origin::{ClientConnection, Connection, Origin},
};

const FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const HOST: HeaderName = HeaderName::from_static("x-forwarded-host");
const PORT: HeaderName = HeaderName::from_static("x-forwarded-port");
const PROTO: HeaderName = HeaderName::from_static("x-forwarded-proto");
const REAL_IP: HeaderName = HeaderName::from_static("x-real-ip");

/// Headers containing a client's address.
///
/// They are removed from the request, because they change when the client moves to another network.
const ADDRESSES: [HeaderName; 3] = [header::FORWARDED, FOR, REAL_IP];

/// Headers stripped unless the client that sent them is trusted.
///
/// Other `X-Forwarded-*` headers identify users and are passed through.
const UNTRUSTED: [HeaderName; 12] = [
    header::FORWARDED,
    FOR,
    HOST,
    PORT,
    PROTO,
    HeaderName::from_static("x-forwarded-by"),
    HeaderName::from_static("x-forwarded-prefix"),
    HeaderName::from_static("x-forwarded-protocol"),
    HeaderName::from_static("x-forwarded-scheme"),
    HeaderName::from_static("x-forwarded-server"),
    HeaderName::from_static("x-forwarded-ssl"),
    REAL_IP,
];

/// The rules for a request's forwarding headers.
pub(super) struct Forwarded {
    public: Option<Origin>,
    trusted: Vec<Network>,
    filter: RequestFilter,
}

// === impl Forwarded ===

impl Forwarded {
    pub(super) fn new(options: &PublicOptions, filter: RequestFilter) -> Self {
        Self {
            public: options.public_url.as_ref().and_then(Origin::of),
            trusted: options.trust_forwarded.clone(),
            filter,
        }
    }

    /// Strips an untrusted client's forwarding headers, and returns the headers to send instead.
    ///
    /// A trusted client's headers stay in the request, except for the headers with addresses, which are part of the result
    /// instead. The result contains the public origin if `--public-url` or a trusted client provides it.
    pub(super) fn apply(&self, request: &mut Request<Body>) -> ClientConnection {
        let peer = Peer::of(request.extensions()).map(|peer| peer.addr().ip().to_canonical());
        let is_trusted = peer.is_some_and(|peer| self.trusts(peer));
        remove_untrusted(request.headers_mut(), is_trusted);
        let named = self.named_origin(request.headers());
        let received = received_origin(request);
        let public = self.public.clone().or_else(|| {
            let (scheme, authority) = named?;
            let host = authority.or_else(|| Some(received.as_ref()?.authority().clone()));
            Origin::new(scheme, host?)
        });
        if self.public.is_some() {
            // Remove the port sent by the client, which belongs to a URL other than the public one.
            request.headers_mut().remove(PORT);
        }
        let origin = peer.zip(public.clone().or(received));
        let headers =
            origin.map(|(peer, origin)| headers_to_send(request.headers(), peer, &origin));
        for name in &ADDRESSES {
            request.headers_mut().remove(name);
        }
        ClientConnection(Arc::new(Connection {
            headers: headers.unwrap_or_default(),
            public,
        }))
    }

    fn trusts(&self, peer: IpAddr) -> bool {
        self.trusted.iter().any(|network| network.contains(peer))
    }

    /// Returns the scheme given in the remaining headers, and the host if it is allowed.
    ///
    /// If the headers contain an allowed host but no scheme, the scheme is http. Returns `None` if they contain no scheme and
    /// no allowed host.
    fn named_origin(&self, headers: &HeaderMap) -> Option<(Scheme, Option<Authority>)> {
        let scheme = first_value(headers, &PROTO).and_then(parse_scheme);
        let host = first_value(headers, &HOST)
            .and_then(|host| host.parse::<Authority>().ok())
            .filter(|host| self.filter.allows_host(host));
        let is_named = scheme.is_some() || host.is_some();
        is_named.then(|| (scheme.unwrap_or(Scheme::HTTP), host))
    }
}

/// Strips a client's forwarding headers, unless the client is trusted.
///
/// Headers spelled with underscores are always stripped. No proxy sends them, and some servers treat `_` as `-`.
fn remove_untrusted(headers: &mut HeaderMap, is_trusted: bool) {
    let should_strip = |name: &HeaderName| {
        let is_known = || UNTRUSTED.iter().any(|known| is_same_variable(name, known));
        if UNTRUSTED.contains(name) {
            !is_trusted
        } else {
            name.as_str().contains('_') && is_known()
        }
    };
    let names: Vec<HeaderName> = headers
        .keys()
        .filter(|name| should_strip(name))
        .cloned()
        .collect();
    for name in names {
        headers.remove(name);
    }
}

/// Returns `true` if CGI, WSGI and the like would map both names to the same variable.
fn is_same_variable(name: &HeaderName, other: &HeaderName) -> bool {
    let (name, other) = (name.as_str().bytes(), other.as_str().bytes());
    name.map(|byte| if byte == b'_' { b'-' } else { byte })
        .eq(other)
}

/// Returns the first value in a list. The first proxy set it; later proxies may append theirs.
fn first_value<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Option<&'a str> {
    let list = headers.get(name)?.to_str().ok()?;
    list.split(',').next().map(str::trim)
}

fn parse_scheme(text: &str) -> Option<Scheme> {
    match text.to_ascii_lowercase().as_str() {
        "http" => Some(Scheme::HTTP),
        "https" => Some(Scheme::HTTPS),
        _ => None,
    }
}

/// Returns the origin that the request was sent to. Its scheme is http, because the proxy does not use TLS.
fn received_origin(request: &Request<Body>) -> Option<Origin> {
    let host = match request.uri().authority() {
        Some(authority) => authority.clone(),
        None => exactly_one(request.headers(), &header::HOST)?
            .parse()
            .ok()?,
    };
    Origin::new(Scheme::HTTP, host)
}

/// Returns the headers that carry the client's address and the origin it used.
///
/// If the request already lists addresses, the client's address is appended. The request's `X-Real-IP` is preserved.
fn headers_to_send(headers: &HeaderMap, peer: IpAddr, origin: &Origin) -> HeaderMap {
    let earlier_clients = join_values(headers, &FOR);
    let elements = join_values(headers, &header::FORWARDED);
    // Most proxies set X-Forwarded-For, but pass on whatever Forwarded the client sent. So prefer the former.
    let forwarded = if elements.is_empty() || !earlier_clients.is_empty() {
        let clients = earlier_clients
            .split(',')
            .map(str::trim)
            .filter(|text| !text.is_empty());
        let mut nodes = clients.map(node).chain([node(&peer.to_string())]);
        let first = nodes.next().unwrap_or_default();
        let (host, proto) = (origin.authority(), origin.scheme());
        let first = format!("for={first};host=\"{host}\";proto={proto}");
        nodes.fold(first, |list, node| format!("{list}, for={node}"))
    } else {
        format!("{elements}, for={}", node(&peer.to_string()))
    };
    let clients = if earlier_clients.is_empty() {
        peer.to_string()
    } else {
        format!("{earlier_clients}, {peer}")
    };
    let fields = [
        (header::FORWARDED, forwarded),
        (FOR, clients),
        (HOST, origin.authority().to_string()),
        (PROTO, origin.scheme().to_string()),
    ];
    let valid = fields
        .into_iter()
        .filter_map(|(name, value)| Some((name, HeaderValue::try_from(value).ok()?)));
    let real_ip = headers.get(REAL_IP).map(|value| (REAL_IP, value.clone()));
    valid.chain(real_ip).collect()
}

/// Joins the values of a repeated header into one list.
fn join_values(headers: &HeaderMap, name: &HeaderName) -> String {
    let fields = headers.get_all(name).iter();
    let fields: Vec<&str> = fields.filter_map(|value| value.to_str().ok()).collect();
    fields.join(", ")
}

/// Converts a client in `X-Forwarded-For` to a node in `Forwarded`.
///
/// A client that is not an address becomes `unknown`.
fn node(client: &str) -> String {
    let address = client.trim_start_matches('[').trim_end_matches(']').parse();
    let address = address.or_else(|_| client.parse().map(|address: SocketAddr| address.ip()));
    match address {
        Ok(IpAddr::V4(address)) => address.to_string(),
        Ok(IpAddr::V6(address)) => format!("\"[{address}]\""),
        Err(_) => "unknown".to_owned(),
    }
}
