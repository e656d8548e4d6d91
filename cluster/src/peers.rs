//! The listener for peers. What comes here was relayed by another instance, and is served here or sent back.
//!
//! 1. Only addresses that may be peers' are accepted, and only requests with the secret of the cluster are looked at.
//! 2. A request is marked as a peer's by an extension. What its head said to this instance alone is gone before anything reads it.
//!    If the peer names the address of the client, the request has both kinds of `ConnectInfo`, with that address.
//! 3. It stays open while calls end and sessions are handed over. When it closes, whoever has connected by then is answered, and
//!    connections may end what they are at, for 5 s at most. Each has one request.

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
    filter::PeersFilter,
    ids::Incarnation,
    network::{Accepted, Listener},
    rate_limited_warning::RateLimitedWarning,
    shutdown::ShutdownStage,
    wire::{self, FromPeer, Secret},
};

/// How long the head of a request may take to come: 10 s.
const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of fields of a head: 512. By default hyper takes 100 of a client over HTTP/1.1, and over HTTP/2 as many as fit into
/// 16 KiB, which counts 32 bytes for each field beside its name and value.
pub(crate) const MAX_FIELDS: usize = 512;

/// How long connections may take to end what they are at when the instance leaves: 5 s.
const CONNECTION_END_TIMEOUT: Duration = Duration::from_secs(5);

/// How much of a request that is sent back is read: 64 KiB. A connection that is closed on unread bytes may lose its answer.
const MAX_DRAINED: usize = 64 * 1024;

/// How long that may take: 1 s.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Which connections and requests are accepted.
#[derive(Debug)]
pub(crate) struct PeerAuth {
    filter: PeersFilter,
    secret: Secret,
    untrusted_address: RateLimitedWarning,
    untrusted_request: RateLimitedWarning,
}

/// The application, as it is served to peers.
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
            untrusted_address: RateLimitedWarning::default(),
            untrusted_request: RateLimitedWarning::default(),
        }
    }

    fn admits(&self, address: SocketAddr) -> bool {
        let admits = self.filter.admits(address.ip());
        if !admits {
            let what = "an address that no peer may have connected";
            self.untrusted_address
                .warn(&format_args!("{what}: {address}"));
        }
        admits
    }

    fn verify(&self, request: &HeaderMap) -> bool {
        let is_peer = self.secret.verify(request);
        if !is_peer {
            self.untrusted_request
                .warn(&"a request to the listener for peers is none of a peer's");
        }
        is_peer
    }
}

/// Prepares a listener for peers.
pub(crate) fn watched(listener: TcpListener) -> WatchedListener {
    match DeadPeer::new().apply(&listener) {
        Ok(applied) => debug!(target: "mcp_cancel_cluster", "{applied}"),
        Err(error) => {
            debug!(target: "mcp_cancel_cluster", %error, "no options for dead peers");
        }
    }
    WatchedListener::new(listener)
}

/// Serves peers until `shutdown` says so or is dropped.
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
            // First: who has connected before it closes is answered.
            biased;
            (stream, address) = listener.accept() => {
                if peer_auth.admits(address) {
                    connections.spawn(connection(stream, app.clone(), peer_auth.clone()));
                }
            }
            Some(_ended) = connections.join_next() => {}
            // An error says that nobody is there any more who could leave.
            _closed = &mut closed => break,
        }
    }
    drop(listener);
    let all_ended = async { while connections.join_next().await.is_some() {} };
    if timeout(CONNECTION_END_TIMEOUT, all_ended).await.is_err() {
        warn!(target: "mcp_cancel_cluster", connections = connections.len(), "relays are cut off");
    }
}

/// Says that a session is not here. That is known from the head alone; a body that does not wait to be asked for is only taken
/// off the connection.
pub(crate) async fn moved(headers: &HeaderMap, body: Body, me: Incarnation) -> Response<Body> {
    if !headers.contains_key(header::EXPECT) {
        let rest = Limited::new(body, MAX_DRAINED).collect();
        let _whole_or_not = timeout(DRAIN_TIMEOUT, rest).await;
    }
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::MISDIRECTED_REQUEST;
    wire::mark_moved(response.headers_mut(), me);
    response
}

async fn connection(stream: impl Accepted, app: impl App, peer_auth: Arc<PeerAuth>) {
    let peer = stream.peer();
    let service = service_fn(move |mut request: Request<Incoming>| {
        if let Some(peer) = &peer {
            request.extensions_mut().insert(peer.clone());
        }
        answer(app.clone(), peer_auth.clone(), request)
    });
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .max_headers(MAX_FIELDS);
    // Without keep-alive there is no need to end idle ones, and none is ended on which a request is on its way.
    let connection = builder
        .keep_alive(false)
        .serve_connection(TokioIo::new(stream), service);
    if let Err(error) = connection.await {
        debug!(target: "mcp_cancel_cluster", %error, "peer");
    }
}

async fn answer(
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
        // It still watches the connection of the peer, which ends with that of the client.
        if let Some(peer) = extensions.remove::<Peer>() {
            let peer = peer.with_addr(client);
            extensions.insert(peer.clone());
            extensions.insert(ConnectInfo(peer));
        }
    }
    poll_fn(|cx| app.poll_ready(cx)).await?;
    app.call(request.map(Body::new)).await
}
