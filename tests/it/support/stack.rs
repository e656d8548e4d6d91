//! The ways to combine the layer with rmcp, each on a real socket.

#![allow(
    unreachable_pub,
    reason = "nothing in a test binary is reachable, so `pub` means that it is for the tests"
)]
#![allow(
    clippy::expect_used,
    clippy::panic,
    reason = "a failed expectation should end the test, but clippy only exempts functions marked #[test]"
)]

use std::{any::Any, net::SocketAddr, sync::Arc};

use axum::Router;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancellableSessionManager, Grace,
};
use rmcp::transport::streamable_http_server::{
    StreamableHttpService,
    session::local::{LocalSessionManager, SessionConfig},
};

use super::{log::Log, *};

/// rmcp with a session manager that binds calls.
pub type Wrapped = StreamableHttpService<Tools, CancellableSessionManager<LocalSessionManager>>;

/// rmcp without changes.
pub type Bare = StreamableHttpService<Tools, LocalSessionManager>;

/// How the layer and rmcp are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionMode {
    /// Sessions whose manager binds the calls.
    Wrapped,
    /// Sessions with rmcp's own manager. Calls are read from the body, and cancelled by replaying a cancellation.
    LayerOnly,
    /// No sessions, and responses are event streams.
    Stateless,
}

/// A running server whose layer has no grace period, and everything that can be observed about it.
pub struct Bench {
    pub mode: SessionMode,
    pub witness: Witness,
    pub log: Log,
    pub layer: CancelOnDisconnectLayer,
    pub addr: SocketAddr,
    _server: Box<dyn Any>,
}

// === impl SessionMode ===

impl SessionMode {
    pub const ALL: [Self; 3] = [Self::Wrapped, Self::LayerOnly, Self::Stateless];

    pub fn mode(self) -> Mode {
        match self {
            Self::Wrapped | Self::LayerOnly => Mode::Session,
            Self::Stateless => Mode::StatelessSse,
        }
    }

    /// Returns rmcp in this mode at [`PATH`], without any layer.
    pub fn router(self, witness: &Witness) -> Router {
        let tools = listening(witness);
        match self {
            Self::Wrapped => router(tools.service(self.mode(), wrapped())),
            Self::LayerOnly | Self::Stateless => router(tools.service(self.mode(), bare())),
        }
    }

    /// Returns a client for that server, with a session if the server has sessions.
    pub async fn client(self, addr: SocketAddr, headers: &[(&str, &str)]) -> Mcp {
        let client = Mcp::stateless(addr, PATH);
        let client = headers
            .iter()
            .fold(client, |client, (name, value)| client.header(name, value));
        match self {
            Self::Wrapped | Self::LayerOnly => client.connect().await,
            Self::Stateless => client,
        }
    }
}

/// Returns tools whose handlers ask for their call's token.
///
/// A call whose token has been requested ends as cancelled, even without a session. Otherwise it would end as
/// abandoned.
pub fn listening(witness: &Witness) -> Tools {
    Tools::new(witness).on_start(|_, context| drop(CallToken::of(context)))
}

/// Returns a session manager that binds calls.
pub fn wrapped() -> Arc<CancellableSessionManager<LocalSessionManager>> {
    Arc::new(CancellableSessionManager::local(SessionConfig::default()))
}

/// Returns rmcp's own session manager.
pub fn bare() -> Arc<LocalSessionManager> {
    Arc::new(LocalSessionManager::default())
}

// === impl Bench ===

impl Bench {
    /// Serves the app that `build` makes from the bare router and the layer.
    pub async fn new(
        mode: SessionMode,
        build: impl FnOnce(Router, CancelOnDisconnectLayer) -> Router,
    ) -> Self {
        let start = async |witness: &Witness, layer| {
            let served = serve(build(mode.router(witness), layer)).await;
            (served.addr, served)
        };
        Self::start(mode, start).await
    }

    /// Serves the app made from rmcp's service and the layer. Both functions must do the same.
    pub async fn wired(
        mode: SessionMode,
        wire_wrapped: fn(Wrapped, CancelOnDisconnectLayer) -> Router,
        wire_bare: fn(Bare, CancelOnDisconnectLayer) -> Router,
    ) -> Self {
        let start = async |witness: &Witness, layer| {
            let tools = listening(witness);
            let router = match mode {
                SessionMode::Wrapped => wire_wrapped(tools.service(mode.mode(), wrapped()), layer),
                SessionMode::LayerOnly | SessionMode::Stateless => {
                    wire_bare(tools.service(mode.mode(), bare()), layer)
                }
            };
            let served = serve(router).await;
            (served.addr, served)
        };
        Self::start(mode, start).await
    }

    /// Runs the server with `start`, and keeps its result until the bench is dropped.
    pub async fn start<S: 'static>(
        mode: SessionMode,
        start: impl AsyncFnOnce(&Witness, CancelOnDisconnectLayer) -> (SocketAddr, S),
    ) -> Self {
        let witness = Witness::new();
        let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate));
        let (addr, server) = start(&witness, layer.clone()).await;
        Self {
            mode,
            witness,
            log,
            layer,
            addr,
            _server: Box::new(server),
        }
    }

    /// Returns a client, with a session if the server has sessions.
    pub async fn client(&self, headers: &[(&str, &str)]) -> Mcp {
        self.mode.client(self.addr, headers).await
    }
}
