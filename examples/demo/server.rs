//! The three setups and their shared configuration.

use std::{sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, Grace};
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService,
    session::{
        SessionManager,
        local::{LocalSessionManager, SessionConfig},
    },
};

use crate::tool::{Log, Worker};

/// What a server uses: bare rmcp, or rmcp with parts of this crate.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Setup {
    Bare,
    Layer,
    LayerAndSessionManager,
}

/// The reconnect delay sent by the server, short because the demo's grace periods are short.
const RETRY: Duration = Duration::from_millis(500);

/// The mode in which rmcp runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mode {
    Session,
    StatelessSse,
    StatelessJson,
}

pub(crate) fn router(setup: Setup, mode: Mode, grace: Grace, log: &Log) -> Router {
    let layer = CancelOnDisconnectLayer::new().grace(grace);
    match setup {
        Setup::Bare => mcp(mode, log, bare_sessions()),
        Setup::Layer => mcp(mode, log, bare_sessions()).layer(layer),
        Setup::LayerAndSessionManager => {
            let sessions = CancellableSessionManager::local(session_config());
            mcp(mode, log, sessions).layer(layer)
        }
    }
}

fn bare_sessions() -> LocalSessionManager {
    let mut sessions = LocalSessionManager::default();
    sessions.session_config = session_config();
    sessions
}

/// Returns a configuration with a short reconnect delay.
///
/// The delay is short because no grace period can be shorter than that.
fn session_config() -> SessionConfig {
    let mut config = SessionConfig::default();
    config.sse_retry = Some(RETRY);
    config
}

fn mcp(mode: Mode, log: &Log, sessions: impl SessionManager) -> Router {
    let config = StreamableHttpServerConfig::default()
        .with_legacy_session_mode(mode == Mode::Session)
        .with_json_response(mode == Mode::StatelessJson);
    let worker = Worker::new(log);
    let service =
        StreamableHttpService::new(move || Ok(worker.clone()), Arc::new(sessions), config);
    Router::new().nest_service("/mcp", service)
}

// === impl Setup ===

impl Setup {
    pub(crate) const ALL: [Self; 3] = [Self::Bare, Self::Layer, Self::LayerAndSessionManager];

    /// Returns the name to print.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare rmcp",
            Self::Layer => "layer only",
            Self::LayerAndSessionManager => "layer, session manager",
        }
    }
}
