//! The peer listener, which serves requests relayed by other instances or responds with 421.
//!
//! 1. Only connections from admitted addresses are accepted, and only requests with the cluster's secret are processed.
//! 2. A peer's request is marked by an extension, and its internal header fields are stripped before any other code reads the request. If
//!    the peer reports the client's address, the request carries `ConnectInfo<SocketAddr>` and `ConnectInfo<Peer>` with that address.
//! 3. During a shutdown, the listener stays open while calls finish and sessions are transferred. Once it closes, established connections
//!    are still served, and have 5 s to complete. Each connection carries one request.

use std::{
    convert::Infallible, future::poll_fn, net::SocketAddr, pin::pin, sync::Arc, time::Duration,
};

use axum::{body::Body, extract::ConnectInfo};
use http::{HeaderMap, Request, Response, StatusCode, header};
use http_body_util::{BodyExt as _, Limited};
use hyper::{body::Incoming, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use mcp_cancel_on_disconnect::socket::{DeadPeer, Peer, WatchedListener};
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::timeout};
use tower_service::Service;
use tracing::{debug, warn};

use crate::{
    ids::Incarnation,
    rate_limited_warning::RateLimitedWarning,
    relay::{
        filter::PeersFilter,
        network::{Accepted, Listener},
        wire::{self, FromPeer, Secret},
    },
    shutdown::{CONNECTION_END_TIMEOUT, ShutdownStage},
};

/// Timeout for receiving a request head.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of header fields in a request or response head.
///
/// Any head that hyper accepts from a client by default must fit: up to 100 fields over HTTP/1.1, or up to 16 KiB over HTTP/2, where each
/// field counts for 32 bytes in addition to its name and value.
pub(crate) const MAX_FIELDS: usize = 512;

/// Maximum number of bytes to read from a refused request's body.
///
/// The body is read because closing a connection with unread bytes could lose the response.
const MAX_DRAINED: usize = 64 * 1024;

/// Timeout for reading a refused request's body.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Decides which connections and requests are accepted.
#[derive(Debug)]
pub(crate) struct PeerAuth {
    filter: PeersFilter,
    secret: Secret,
    untrusted_address_warning: RateLimitedWarning,
    untrusted_request_warning: RateLimitedWarning,
}

/// The application served to peers.
pub(crate) trait App:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
    + Clone
    + Send
    + 'static
{
}

impl<S> App for S where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send>
        + Clone
        + Send
        + 'static
{
}

// === impl PeerAuth ===

impl PeerAuth {
    pub(crate) fn new(filter: PeersFilter, secret: Secret) -> Self {
        Self {
            filter,
            secret,
            untrusted_address_warning: RateLimitedWarning::default(),
            untrusted_request_warning: RateLimitedWarning::default(),
        }
    }

    /// Returns `true` if a peer may connect from `address`. Logs a warning otherwise.
    fn admits(&self, address: SocketAddr) -> bool {
        let admits = self.filter.admits(address.ip());
        if !admits {
            let message = "connection from a disallowed address";
            self.untrusted_address_warning
                .warn(&format_args!("{message}: {address}"));
        }
        admits
    }

    /// Returns `true` if a request carries the cluster's secret. Logs a warning otherwise.
    fn verify(&self, headers: &HeaderMap) -> bool {
        let is_peer = self.secret.verify(headers);
        if !is_peer {
            self.untrusted_request_warning
                .warn(&"request to the peer listener without the cluster's secret");
        }
        is_peer
    }
}

/// Prepares a peer listener.
pub(crate) fn watch_peers(listener: TcpListener) -> WatchedListener {
    match DeadPeer::new().apply(&listener) {
        Ok(applied) => debug!(target: "mcp_cancel_cluster", "{applied}"),
        Err(error) => {
            debug!(target: "mcp_cancel_cluster", %error, "could not set the socket options that detect dead peers");
        }
    }
    WatchedListener::new(listener)
}

/// Serves peers until `shutdown` reaches [`ShutdownStage::Closed`] or its sender is dropped.
///
/// After that, waits up to [`CONNECTION_END_TIMEOUT`] for open connections to end.
pub(crate) async fn serve(
    listener: impl Listener,
    app: impl App,
    peer_auth: Arc<PeerAuth>,
    mut shutdown: watch::Receiver<ShutdownStage>,
) {
    let mut connections = JoinSet::new();
    let mut closed = pin!(shutdown.wait_for(|stage| *stage == ShutdownStage::Closed));
    loop {
        tokio::select! {
            // Accept first, so that connections established before the listener closes are served.
            biased;
            (stream, address) = listener.accept() => {
                if peer_auth.admits(address) {
                    connections.spawn(serve_connection(stream, app.clone(), peer_auth.clone()));
                }
            }
            Some(_) = connections.join_next() => {}
            // An error means that the sender has been dropped, so no shutdown can follow.
            _ = &mut closed => break,
        }
    }
    drop(listener);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    if timeout(CONNECTION_END_TIMEOUT, all_ended).await.is_err() {
        warn!(target: "mcp_cancel_cluster", connections = connections.len(), "closing peer connections with unfinished requests");
    }
}

/// Returns the 421 response for a non-local session.
///
/// Unless the peer defers the body with `Expect`, this reads and discards up to [`MAX_DRAINED`] of it, for at most [`DRAIN_TIMEOUT`].
pub(crate) async fn moved_response(
    headers: &HeaderMap,
    body: Body,
    this_instance: Incarnation,
) -> Response<Body> {
    if !headers.contains_key(header::EXPECT) {
        let rest = Limited::new(body, MAX_DRAINED).collect();
        let _ = timeout(DRAIN_TIMEOUT, rest).await;
    }
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::MISDIRECTED_REQUEST;
    wire::mark_moved(response.headers_mut(), this_instance);
    response
}

async fn serve_connection(stream: impl Accepted, app: impl App, peer_auth: Arc<PeerAuth>) {
    let peer = stream.peer();
    let service = service_fn(move |mut request: Request<Incoming>| {
        if let Some(peer) = &peer {
            request.extensions_mut().insert(peer.clone());
        }
        serve_request(app.clone(), peer_auth.clone(), request)
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(MAX_FIELDS);
    // Without keep-alive there are no idle connections to close, and no connection is closed while a request is still arriving on it.
    let connection = builder
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        debug!(target: "mcp_cancel_cluster", %error, "peer connection failed");
    }
}

async fn serve_request(
    mut app: impl App,
    peer_auth: Arc<PeerAuth>,
    mut request: Request<Incoming>,
) -> Result<Response<Body>, Infallible> {
    if !peer_auth.verify(request.headers()) {
        let mut response = Response::new(Body::empty());
        *response.status_mut() = StatusCode::FORBIDDEN;
        return Ok(response);
    }
    let client = wire::client(request.headers());
    wire::strip(request.headers_mut());
    let extensions = request.extensions_mut();
    extensions.insert(FromPeer);
    if let Some(client) = client {
        extensions.insert(ConnectInfo(client));
        // This `Peer` still watches the peer's connection, which ends when the client's connection does.
        if let Some(peer) = extensions.remove::<Peer>() {
            let peer = peer.with_addr(client);
            extensions.insert(peer.clone());
            extensions.insert(ConnectInfo(peer));
        }
    }
    poll_fn(|cx| app.poll_ready(cx)).await?;
    let response = app.call(request.map(Body::new));
    // `app` may hold a concurrency permit, so don't hold on to it while waiting for the response.
    drop(app);
    response.await
}
