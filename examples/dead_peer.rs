//! A server that detects dead client connections, served in one of two ways.
//!
//! ```sh
//! cargo run --example dead_peer --features axum,socket
//! cargo run --example dead_peer --features axum,socket -- --pings
//! ```
//!
//! Both ways set [`DeadPeer`]'s socket options and watch the connections. The first uses `axum::serve` and sets the
//! options on the listening socket. The second is an accept loop around hyper-util that sets them on every accepted
//! socket. HTTP/2 pings require this kind of loop.
//!
//! To try it, call the tool `wait`. `examples/README.md` lists curl commands. This server has no sessions, so it needs
//! no `initialize`. Once the call has started, drop the client's packets with
//! `iptables -I INPUT -p tcp --dport 8766 -j DROP`. The tool is cancelled within 106 s.

use std::{error::Error, io, sync::Arc, time::Duration};

use axum::{Router, body::Body, extract::Request};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancellableSessionManager,
    socket::{DeadPeer, Peer, WatchedListener},
};
use rmcp::{
    RoleServer, ServerHandler,
    handler::server::router::tool::ToolRouter,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService},
};
use tokio::{net::TcpListener, time::Instant};
use tower::ServiceExt as _;
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

const ADDRESS: &str = "127.0.0.1:8766";
const LOG: &str = "warn,dead_peer=info,mcp_cancel_on_disconnect=info";

#[derive(Clone)]
struct Waiter {
    tool_router: ToolRouter<Self>,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(LOG))
        .init();
    let sessions = Arc::new(CancellableSessionManager::default());
    let config = StreamableHttpServerConfig::default().with_legacy_session_mode(false);
    let mcp = StreamableHttpService::new(|| Ok(Waiter::new()), sessions, config);
    let app = Router::new()
        .nest_service("/mcp", mcp)
        .layer(CancelOnDisconnectLayer::new());

    let listener = TcpListener::bind(ADDRESS).await?;
    match std::env::args().nth(1).as_deref() {
        None => serve(listener, app).await?,
        Some("--pings") => serve_with_pings(listener, app).await,
        Some(_) => return Err("usage: dead_peer [--pings]".into()),
    }
    Ok(())
}

/// On Linux, accepted sockets inherit the listening socket's options.
async fn serve(listener: TcpListener, app: Router) -> io::Result<()> {
    let applied = DeadPeer::new().apply(&listener)?;
    info!("listening on http://{ADDRESS}/mcp: {applied}");
    let make = app.into_make_service_with_connect_info::<Peer>();
    axum::serve(WatchedListener::new(listener), make).await
}

/// HTTP/2 pings end a dead peer's streams even without the socket options. The options are still needed, because
/// otherwise the connection's task hangs in its last write until the kernel gives up.
async fn serve_with_pings(listener: TcpListener, app: Router) {
    let listener = WatchedListener::new(listener);
    let mut builder = Builder::new(TokioExecutor::new());
    builder
        .http2()
        .timer(TokioTimer::new()) // without a timer, hyper panics on the first connection
        .keep_alive_interval(Duration::from_secs(15))
        .keep_alive_timeout(Duration::from_secs(15));
    info!("listening on http://{ADDRESS}/mcp, with HTTP/2 pings");
    loop {
        let (stream, addr) = listener.accept().await;
        if let Err(error) = DeadPeer::new().apply(&stream) {
            warn!(%error, "could not set the socket options for {addr}");
        }
        let peer = stream.peer();
        let service = app.clone().map_request(move |request: Request<Incoming>| {
            let mut request = request.map(Body::new);
            // Insert the peer outside the layer, so that the layer can read it.
            request.extensions_mut().insert(peer.clone());
            request
        });
        let builder = builder.clone();
        #[allow(clippy::disallowed_methods, reason = "a server spawns its connections")]
        tokio::spawn(async move {
            let service = TowerToHyperService::new(service);
            let connection = builder.serve_connection(TokioIo::new(stream), service);
            if let Err(error) = connection.await {
                info!(%error, "the connection from {addr} ended");
            }
        });
    }
}

// === impl Waiter ===

#[tool_router]
impl Waiter {
    fn new() -> Self {
        Self {
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Waits until it is cancelled")]
    async fn wait(&self, context: RequestContext<RoleServer>) -> String {
        let started = Instant::now();
        info!("wait started");
        context.ct.cancelled().await;
        info!("wait was cancelled after {:?}", started.elapsed());
        "waited".to_owned()
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Waiter {}
