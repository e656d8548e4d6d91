//! A server behind a proxy, with all kinds of calls, with and without probes.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, Grace};
use rmcp::transport::streamable_http_server::session::local::SessionConfig;
use serde_json::json;
use test_support::{Connection, Mcp, Mode, Served, Tools, Witness, serve};

use crate::proxy::{Kind, Proxy};

/// The grace period given to a [`Client::Graced`].
pub(crate) const GRACE: Duration = Duration::from_millis(500);

/// A proxy and the server behind it.
pub(crate) struct Behind {
    pub(crate) witness: Witness,
    proxy: Proxy,
    _served: Served,
}

/// What kind of client it is, and how the server answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    /// In a session whose calls are cancelled at once.
    Session,
    /// In a session whose calls have a grace period.
    Graced,
    /// Without a session.
    Sse,
    /// Without a session; the answer is not a stream.
    Json,
    /// With revision 2026-07-28, so there is no head before the handler's first message.
    Sessionless,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Probing {
    Off,
    On,
}

// === impl Behind ===

impl Behind {
    /// Starts both. `idle_limit` is how long the proxy tolerates silence; `probe_every` is how often the
    /// layer probes.
    pub(crate) async fn start(kind: Kind, idle_limit: Duration, probe_every: Duration) -> Self {
        let witness = Witness::new();
        let served = serve(app(&witness, probe_every)).await;
        Self {
            witness,
            proxy: kind.start(served.addr, idle_limit),
            _served: served,
        }
    }

    /// Calls a tool that sends nothing until it is released, and waits until the tool is running.
    pub(crate) async fn hold(&self, client: Client, probing: Probing, label: &str) -> Connection {
        let mcp = client.connect(self.proxy.addr, probing).await;
        let call = mcp.call(7, "hold", json!({ "label": label })).await;
        self.witness.started(label).await;
        call
    }
}

/// Serves each kind of client on two paths, with and without probes.
fn app(witness: &Witness, probe_every: Duration) -> Router {
    let mut router = Router::new();
    for client in Client::ALL {
        for probing in [Probing::Off, Probing::On] {
            let layer = CancelOnDisconnectLayer::new().grace(client.grace());
            let layer = match probing {
                Probing::Off => layer,
                Probing::On => layer.keep_alive(probe_every).commit_after(probe_every),
            };
            let sessions = CancellableSessionManager::local(SessionConfig::default());
            let mut config = client.mode().config();
            // Only the layer probes.
            config.sse_keep_alive = None;
            let service = Tools::new(witness).service_with(config, Arc::new(sessions));
            let path = client.path(probing);
            router = router.merge(Router::new().nest_service(&path, service).layer(layer));
        }
    }
    router
}

// === impl Client ===

impl Client {
    pub(crate) const ALL: [Self; 5] = [
        Self::Session,
        Self::Graced,
        Self::Sse,
        Self::Json,
        Self::Sessionless,
    ];

    /// Returns `true` if the answer's head is sent as soon as the call starts.
    pub(crate) fn has_a_head_at_once(self) -> bool {
        matches!(self, Self::Session | Self::Graced | Self::Sse)
    }

    async fn connect(self, addr: SocketAddr, probing: Probing) -> Mcp {
        let path = self.path(probing);
        match self {
            Self::Session | Self::Graced => Mcp::session(addr, &path).await,
            Self::Sse | Self::Json => Mcp::stateless(addr, &path),
            Self::Sessionless => Mcp::sessionless(addr, &path),
        }
    }

    fn path(self, probing: Probing) -> String {
        format!("/{self:?}/{probing:?}/mcp")
    }

    fn mode(self) -> Mode {
        match self {
            Self::Session | Self::Graced | Self::Sessionless => Mode::Session,
            Self::Sse => Mode::StatelessSse,
            Self::Json => Mode::StatelessJson,
        }
    }

    fn grace(self) -> Grace {
        match self {
            Self::Graced => Grace::After(GRACE),
            _ => Grace::Immediate,
        }
    }
}
