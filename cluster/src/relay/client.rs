//! Relays a request to its session's owner, on a new connection.
//!
//! 1. The response owns the connection, so dropping the response closes it. This is how the owner notices that the client has disconnected.
//! 2. Frames are passed on as they arrive, without reading ahead, so that backpressure from a slow client reaches the owner.
//! 3. Each connection carries one request, and a POST's body is sent only when the peer requests it. That way no call starts twice, and a
//!    call whose body has not been requested has not started.
//! 4. The response head must arrive within [`HEAD_TIMEOUT`], unless a POST's body has been requested. In that case a call may have started,
//!    and since calls have no time limit, detecting a dead peer is left to the kernel.
//! 5. A response that does not identify its sender as a peer is discarded.

use std::{
    future::poll_fn,
    io,
    net::{IpAddr, SocketAddr},
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use axum::{
    body::Body,
    extract::{ConnectInfo, OriginalUri},
};
use bytes::Bytes;
use http::{
    Extensions, HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode, Uri,
    Version, header, request::Parts, uri::PathAndQuery,
};
use http_body::{Body as _, Frame, SizeHint};
use hyper::{
    body::Incoming,
    client::conn::http1::{self, Connection},
    ext,
};
use hyper_util::rt::TokioIo;
use mcp_cancel_on_disconnect::socket::Peer;
use tokio::time::timeout;
use tracing::debug;

use crate::{
    ids::Owner,
    rate_limited_warning::RateLimitedWarning,
    refusals::Refusal,
    relay::{
        body_idle::is_stalled,
        continue_body::ContinueSignal,
        failure::Failure,
        filter::PeersFilter,
        network::{Network, Stream},
        replayable_request::ReplayableRequest,
        server::MAX_FIELDS,
        wire::{Responder, Secret},
    },
    sessions::drain_gate::InFlightGuard,
};

/// Timeout for connecting to a peer.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Timeout for the response head, unless a POST's body has been requested.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// If a relay is still waiting after this long, its call may have started.
///
/// A call that cannot have started has failed by then, because both the connection timeout and the response head timeout have expired.
pub(crate) const UNSTARTED_TIMEOUT: Duration = CONNECT_TIMEOUT
    .saturating_add(HEAD_TIMEOUT)
    .saturating_add(Duration::from_secs(1));

/// Maximum number of fields a relay adds to a request head.
const MAX_ADDED: usize = 8;

/// Fields that apply to a single connection, in addition to those listed in `Connection`.
///
/// `Expect` is included because the relay handles it itself.
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    header::EXPECT,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
];

/// Fields a relay retains even if `Connection` lists them. [`is_end_to_end`] adds more.
const END_TO_END: [HeaderName; 17] = [
    header::ACCEPT,
    header::ACCEPT_ENCODING,
    header::ACCEPT_LANGUAGE,
    header::AUTHORIZATION,
    header::CACHE_CONTROL,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_TYPE,
    header::COOKIE,
    header::FORWARDED,
    header::HOST,
    header::ORIGIN,
    header::REFERER,
    header::USER_AGENT,
    header::VIA,
    HeaderName::from_static("last-event-id"),
    HeaderName::from_static("x-real-ip"),
];

/// The state shared by all of an instance's relays.
#[derive(Debug)]
pub(crate) struct Relay {
    network: Network,
    filter: PeersFilter,
    secret: Secret,
    untrusted_address_warning: RateLimitedWarning,
    untrusted_answer_warning: RateLimitedWarning,
}

/// A response body, with the connection on which it arrives.
struct HopBody {
    /// Dropped first, so that the connection is closed before anything else is dropped.
    connection: Option<HopConnection>,
    incoming: Incoming,
    disconnect: Option<ClientDisconnect>,
    /// Keeps a POST in flight at this instance until this body is dropped.
    in_flight: Option<InFlightGuard>,
}

type HopConnection = Connection<TokioIo<Stream>, Body>;

/// Completes when the kernel reports that the client's connection has ended.
type ClientDisconnect = Pin<Box<dyn Future<Output = ()> + Send>>;

// === impl Relay ===

impl Relay {
    pub(crate) fn new(network: Network, filter: PeersFilter, secret: Secret) -> Self {
        Self {
            network,
            filter,
            secret,
            untrusted_address_warning: RateLimitedWarning::default(),
            untrusted_answer_warning: RateLimitedWarning::default(),
        }
    }

    /// Reads the body if it is short enough to be buffered.
    ///
    /// # Errors
    ///
    /// Returns an error if the body cannot be read, or if the request head has more fields than a peer accepts.
    pub(crate) async fn prepare(&self, replayable: &mut ReplayableRequest) -> Result<(), Refusal> {
        if replayable.head.headers.len() + MAX_ADDED > MAX_FIELDS {
            return Err(Refusal::TooManyFields);
        }
        replayable.read().await
    }

    /// Sends a request to an owner. The response holds on to `in_flight` until its body is dropped.
    ///
    /// After a failure, `replayable` can be resent if it is still intact. A body the peer has not requested counts as unsent.
    pub(crate) async fn send(
        &self,
        replayable: &mut ReplayableRequest,
        owner: Owner,
        in_flight: Option<InFlightGuard>,
    ) -> Result<Response<Body>, Failure> {
        if !self.filter.admits(owner.address.ip()) {
            let message = "the directory contains a disallowed peer address";
            let address = owner.address;
            self.untrusted_address_warning
                .warn(&format_args!("{message}: {address}"));
            return Err(Failure::Unreachable);
        }
        let stream = self.connect(owner.address).await?;
        let Some(body) = replayable.body_for_attempt() else {
            return Err(Failure::Broken);
        };
        let is_call = replayable.head.method == Method::POST;
        let mut request = self.peer_request(&replayable.head, body);
        let signal =
            (is_call && !request.body().is_end_stream()).then(|| expect_continue(&mut request));
        let disconnect = client_disconnect(&replayable.head.extensions);
        let response = self.await_response(stream, request, disconnect, owner, signal.as_ref());
        let failure = match response.await {
            Ok(mut response) => {
                response.body_mut().in_flight = in_flight;
                return Ok(response.map(Body::new));
            }
            Err(failure) => failure,
        };
        let unsent = signal.and_then(|signal| signal.take_back());
        let is_unsent = unsent.is_some();
        if let Some(body) = unsent {
            replayable.restore_body(body);
        }
        Err(match failure {
            // The peer never requested the body, so the call cannot have started.
            Failure::Broken if is_unsent => Failure::Unreachable,
            // A POST without a body may have started too.
            Failure::Silent | Failure::Unreachable if is_call && !is_unsent => Failure::Broken,
            failure => failure,
        })
    }

    async fn connect(&self, address: SocketAddr) -> Result<Stream, Failure> {
        match timeout(CONNECT_TIMEOUT, self.network.connect(address)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Err(Failure::Refused)
            }
            Ok(Err(error)) => {
                debug!(target: "mcp_cancel_cluster", owner = %address, %error, "could not connect to the owner");
                Err(Failure::Unreachable)
            }
            Err(_) => Err(Failure::Unreachable),
        }
    }

    /// Sends a request and returns the owner's response, or the reason there is no response.
    async fn await_response(
        &self,
        stream: Stream,
        request: Request<Body>,
        disconnect: Option<ClientDisconnect>,
        owner: Owner,
        signal: Option<&ContinueSignal>,
    ) -> Result<Response<HopBody>, Failure> {
        let mut exchange = pin!(exchange(stream, request, disconnect));
        let mut response = match timeout(HEAD_TIMEOUT, &mut exchange).await {
            Ok(response) => response?,
            // The call may have started, and calls have no time limit.
            Err(_) if signal.is_some_and(ContinueSignal::is_signalled) => exchange.await?,
            Err(_) => return Err(Failure::Silent),
        };
        let responder = Responder::take(response.headers_mut());
        match responder {
            Responder::Peer(_) => {}
            Responder::Moved(by) if response.status() == StatusCode::MISDIRECTED_REQUEST => {
                return Err(if by == owner.incarnation {
                    Failure::Moved
                } else {
                    Failure::Misdirected
                });
            }
            Responder::Moved(_) | Responder::Unmarked => {
                let message =
                    "the server at a peer's address is not a peer, or has a different secret";
                let (address, status) = (owner.address, response.status());
                self.untrusted_answer_warning
                    .warn(&format_args!("{message}: {address}, {status}"));
                return Err(Failure::Unreachable);
            }
        }
        remove_hop_by_hop(response.headers_mut());
        *response.version_mut() = Version::default();
        Ok(response)
    }

    /// Creates the request to send to a peer.
    fn peer_request(&self, head: &Parts, body: Body) -> Request<Body> {
        let mut request = Request::new(body);
        *request.method_mut() = head.method.clone();
        *request.uri_mut() = origin_form(head);
        let headers = request.headers_mut();
        headers.clone_from(&head.headers);
        remove_hop_by_hop(headers);
        // hyper announces the length of the body actually sent, whatever length the client's field specified.
        headers.remove(header::CONTENT_LENGTH);
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        // An HTTP/2 request carries the host in its URI. Copy it, because the application on the peer checks the host just as it would
        // here.
        let authority = head.uri.authority();
        if !headers.contains_key(header::HOST)
            && let Some(host) = authority.and_then(|host| HeaderValue::from_str(host.as_str()).ok())
        {
            headers.insert(header::HOST, host);
        }
        let client = client_address(&head.extensions);
        if let Some(client) = client {
            headers.append(header::FORWARDED, forwarded_element(client));
        }
        self.secret.attach(headers, client);
        request
    }
}

/// Defers a request's body until the peer requests it.
fn expect_continue(request: &mut Request<Body>) -> ContinueSignal {
    let (signal, body) = ContinueSignal::defer(std::mem::take(request.body_mut()));
    *request.body_mut() = body;
    let expectation = HeaderValue::from_static("100-continue");
    request.headers_mut().insert(header::EXPECT, expectation);
    let continue_signal = signal.clone();
    ext::on_informational(request, move |informational| {
        if informational.status() == StatusCode::CONTINUE {
            continue_signal.on_continue();
        }
    });
    signal
}

/// Writes a request and waits for the response head.
async fn exchange(
    stream: Stream,
    request: Request<Body>,
    mut disconnect: Option<ClientDisconnect>,
) -> Result<Response<HopBody>, Failure> {
    let mut builder = http1::Builder::new();
    builder.max_headers(MAX_FIELDS);
    let handshake = builder.handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(|_| Failure::Unreachable)?;
    let mut connection = Some(connection);
    let mut sending = pin!(sender.send_request(request));
    let response = poll_fn(|cx| {
        if is_disconnected(&mut disconnect, cx) {
            return Poll::Ready(None);
        }
        drive(&mut connection, cx);
        sending.as_mut().poll(cx).map(Some)
    });
    match response.await {
        Some(Ok(response)) => Ok(response.map(|incoming| HopBody {
            connection,
            incoming,
            disconnect,
            in_flight: None,
        })),
        Some(Err(error)) => {
            debug!(target: "mcp_cancel_cluster", %error, "no response from the owner");
            Err(if is_stalled(&error) {
                Failure::Stalled
            } else {
                Failure::Broken
            })
        }
        // The client has disconnected, so the result is unused.
        None => Err(Failure::Broken),
    }
}

/// Drives a connection for as long as it is open.
fn drive(connection: &mut Option<HopConnection>, cx: &mut Context<'_>) {
    if let Some(open) = connection
        && let Poll::Ready(ended) = Pin::new(open).poll(cx)
    {
        if let Err(error) = ended {
            debug!(target: "mcp_cancel_cluster", %error, "the connection to a peer failed");
        }
        *connection = None;
    }
}

/// Returns `true` if the client has disconnected. The listener reports this even while hyper is not reading.
fn is_disconnected(disconnect: &mut Option<ClientDisconnect>, cx: &mut Context<'_>) -> bool {
    let is_disconnected = disconnect
        .as_mut()
        .is_some_and(|disconnect| disconnect.as_mut().poll(cx).is_ready());
    if is_disconnected {
        *disconnect = None;
    }
    is_disconnected
}

fn client_disconnect(extensions: &Extensions) -> Option<ClientDisconnect> {
    let peer = Peer::of(extensions)?.clone();
    Some(Box::pin(async move { peer.closed().await }))
}

/// Returns the client's address, or `None` if the server does not provide it.
fn client_address(extensions: &Extensions) -> Option<SocketAddr> {
    let connect_info: Option<&ConnectInfo<SocketAddr>> = extensions.get();
    connect_info
        .map(|info| info.0)
        .or_else(|| Some(Peer::of(extensions)?.addr()))
}

/// Creates the element that a proxy appends to `Forwarded` (RFC 7239, section 4).
fn forwarded_element(client: SocketAddr) -> HeaderValue {
    let value = match client.ip().to_canonical() {
        IpAddr::V4(ip) => format!("for={ip}"),
        IpAddr::V6(ip) => format!("for=\"[{ip}]\""),
    };
    HeaderValue::try_from(value).unwrap_or(HeaderValue::from_static("for=unknown"))
}

/// Returns the URI in origin form, as it was before any router removed a prefix.
fn origin_form(head: &Parts) -> Uri {
    let original: Option<&OriginalUri> = head.extensions.get();
    let uri = original.map_or(&head.uri, |original| &original.0);
    let path = uri.path_and_query().cloned();
    Uri::from(path.unwrap_or(PathAndQuery::from_static("/")))
}

/// Removes the known hop-by-hop fields and any fields listed in `Connection`.
///
/// Fields meant for all recipients are retained, because `Connection` must not list them (RFC 9110, section 7.6.1).
fn remove_hop_by_hop(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .filter(|name| !is_end_to_end(name))
        .collect();
    for name in named.iter().chain(&HOP_BY_HOP) {
        headers.remove(name);
    }
}

fn is_end_to_end(name: &HeaderName) -> bool {
    let text = name.as_str();
    END_TO_END.contains(name) || text.starts_with("mcp-") || text.starts_with("x-forwarded-")
}

// === impl HopBody ===

impl http_body::Body for HopBody {
    type Data = Bytes;
    type Error = axum::BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::BoxError>>> {
        let this = &mut *self;
        if is_disconnected(&mut this.disconnect, cx) {
            this.connection = None;
            return Poll::Ready(Some(Err("the client has disconnected".into())));
        }
        drive(&mut this.connection, cx);
        let frame = Pin::new(&mut this.incoming).poll_frame(cx);
        frame.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use mcp_cancel_on_disconnect::socket::WatchedListener;

    use super::*;
    use crate::relay::wire;

    fn head(uri: &str) -> Parts {
        let request = Request::get(uri)
            .header("connection", "close, X-Hop, Mcp-Session-Id")
            .header("x-hop", "1")
            .header("te", "trailers")
            .header("expect", "100-continue")
            .header("content-length", "3")
            .header("authorization", "Bearer token")
            .header("mcp-session-id", "a session")
            .header("mcp-cluster", "forged")
            .header("mcp-cluster-client", "10.0.0.1:1");
        request.body(()).unwrap().into_parts().0
    }

    fn relay() -> Relay {
        Relay::new(
            Network::Tcp,
            PeersFilter::default(),
            Secret::new("secret").unwrap(),
        )
    }

    #[test]
    fn hop_by_hop_fields_are_removed_and_all_others_are_relayed() {
        let peer_request = relay().peer_request(&head("http://host/mcp?a=1"), Body::empty());
        assert_eq!(peer_request.uri(), "/mcp?a=1");
        let headers = peer_request.headers();
        assert_eq!(headers["authorization"], "Bearer token");
        assert_eq!(headers["mcp-session-id"], "a session");
        assert_eq!(headers["connection"], "close");
        assert_eq!(headers["host"], "host");
        assert_eq!(headers["mcp-cluster"], "secret");
        assert_eq!(headers.len(), 5, "{headers:?}");
    }

    /// An outer layer may have added these fields, or the inner application may need them.
    #[test]
    fn a_client_cannot_make_a_relay_remove_a_field_that_is_meant_for_all_recipients() {
        let mut headers = HeaderMap::new();
        for name in [
            "authorization",
            "content-type",
            "cookie",
            "forwarded",
            "host",
            "last-event-id",
            "mcp-protocol-version",
            "mcp-session-id",
            "x-forwarded-for",
        ] {
            headers.append("connection", HeaderValue::from_static(name));
            headers.insert(name, HeaderValue::from_static("kept"));
        }
        let end_to_end = headers.len() / 2;
        for name in ["keep-alive", "te", "x-of-this-hop"] {
            headers.append("connection", HeaderValue::from_static(name));
            headers.insert(name, HeaderValue::from_static("removed"));
        }
        remove_hop_by_hop(&mut headers);
        assert_eq!(headers.len(), end_to_end, "{headers:?}");
        assert!(headers.values().all(|value| value == "kept"));
    }

    #[test]
    fn the_peer_receives_the_address_of_the_client() {
        let mut head = head("/mcp");
        let client: SocketAddr = "192.0.2.1:4711".parse().unwrap();
        head.extensions.insert(ConnectInfo(client));
        head.headers
            .insert("forwarded", "for=198.51.100.7".parse().unwrap());
        let peer_request = relay().peer_request(&head, Body::empty());
        assert_eq!(wire::client(peer_request.headers()), Some(client));
        let forwarded = peer_request.headers().get_all("forwarded").iter();
        assert!(forwarded.eq(["for=198.51.100.7", "for=192.0.2.1"]));
    }

    #[test]
    fn an_address_is_forwarded_as_rfc_7239_specifies() {
        for (client, value) in [
            ("192.0.2.1:80", "for=192.0.2.1"),
            ("[::ffff:192.0.2.1]:80", "for=192.0.2.1"),
            ("[2001:db8::1]:80", "for=\"[2001:db8::1]\""),
        ] {
            assert_eq!(forwarded_element(client.parse().unwrap()), value);
        }
    }

    /// `into_make_service_with_connect_info::<Peer>()`, which the manual recommends, sets this up.
    #[tokio::test]
    async fn the_address_of_a_watched_connection_is_the_clients() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let listener = WatchedListener::new(listener);
        let connecting = tokio::net::TcpStream::connect(listener.local_addr().unwrap());
        let (client, (stream, _)) = tokio::join!(connecting, listener.accept());
        let address = client.unwrap().local_addr().unwrap();
        for is_axum in [true, false] {
            let mut head = head("/mcp");
            if is_axum {
                head.extensions.insert(ConnectInfo(stream.peer()));
            } else {
                head.extensions.insert(stream.peer());
            }
            let peer_request = relay().peer_request(&head, Body::empty());
            assert_eq!(wire::client(peer_request.headers()), Some(address));
        }
    }

    #[test]
    fn the_path_before_a_nest_is_relayed() {
        let mut head = head("/");
        head.extensions
            .insert(OriginalUri("http://host/tenant/mcp".parse().unwrap()));
        assert_eq!(origin_form(&head), "/tenant/mcp");
    }
}
