//! The set-ups that every bench compares.

use std::{convert::Infallible, fmt::Display, sync::Arc};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{
        SessionManager, StreamableHttpServerConfig, StreamableHttpService,
        session::local::{LocalSessionManager, SessionConfig},
    },
};
use tower::{BoxError, ServiceExt, util::BoxCloneSyncService};
use tower_layer::Layer;

use crate::guard::GuardLayer;

/// A server, whatever is around it.
pub type Server<A> = BoxCloneSyncService<Request<A>, Response<axum::body::Body>, Infallible>;

/// Who watches over the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Setup {
    /// Nobody: rmcp as it is.
    Bare,
    /// What one would write by hand, see [`crate::guard`].
    Guard,
    /// The layer, over rmcp's own session manager.
    Layer,
    /// The layer and its session manager.
    Wrapped,
}

/// Whether rmcp keeps sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    Session,
    Stateless,
}

// === impl Setup ===

impl Setup {
    pub const ALL: [Self; 4] = [Self::Bare, Self::Guard, Self::Layer, Self::Wrapped];

    pub fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Guard => "guard",
            Self::Layer => "layer",
            Self::Wrapped => "wrapped",
        }
    }

    /// `handler` as a server. `layer` counts only where it is used.
    pub fn serve<H, A>(self, mode: Mode, handler: H, layer: CancelOnDisconnectLayer) -> Server<A>
    where
        H: ServerHandler + Clone,
        A: Body<Data = Bytes, Error: Into<BoxError> + Display> + Send + 'static,
    {
        let bare = || {
            mcp(
                mode,
                handler.clone(),
                Arc::new(LocalSessionManager::default()),
            )
        };
        match self {
            Self::Bare => boxed(bare()),
            Self::Guard => boxed(GuardLayer.layer(bare())),
            Self::Layer => boxed(layer.layer(bare())),
            Self::Wrapped => {
                let sessions = CancellableSessionManager::local(SessionConfig::default());
                boxed(layer.layer(mcp(mode, handler.clone(), Arc::new(sessions))))
            }
        }
    }
}

fn mcp<H: ServerHandler + Clone, M: SessionManager>(
    mode: Mode,
    handler: H,
    sessions: Arc<M>,
) -> StreamableHttpService<H, M> {
    let mut config = StreamableHttpServerConfig::default();
    config.legacy_session_mode = mode == Mode::Session;
    StreamableHttpService::new(move || Ok(handler.clone()), sessions, config)
}

fn boxed<S, A, B>(service: S) -> Server<A>
where
    S: tower_service::Service<Request<A>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    A: Send + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let response = |response: Response<B>| response.map(axum::body::Body::new);
    BoxCloneSyncService::new(service.map_response(response))
}
