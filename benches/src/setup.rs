//! The set-ups that every bench compares.

use std::{convert::Infallible, fmt::Display, sync::Arc};

use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, TeeBody};
use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{
        SessionManager, StreamableHttpServerConfig, StreamableHttpService,
        session::local::{LocalSessionManager, SessionConfig},
    },
};
use tower::{BoxError, ServiceExt, util::BoxCloneSyncService};
use tower_layer::Layer;

use crate::{guard::GuardLayer, report::Series};

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

    /// This service, watched over as far as that goes without rmcp. `layer` counts only where it is used.
    pub fn around<S, A, B>(self, service: S, layer: CancelOnDisconnectLayer) -> Server<A>
    where
        S: tower_service::Service<Request<TeeBody<A>>, Response = Response<B>, Error = Infallible>,
        S: tower_service::Service<Request<A>, Response = Response<B>, Error = Infallible>,
        S: Clone + Send + Sync + 'static,
        <S as tower_service::Service<Request<TeeBody<A>>>>::Future: Send + 'static,
        <S as tower_service::Service<Request<A>>>::Future: Send + 'static,
        A: Body<Data = Bytes, Error: Into<BoxError> + Display> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        match self {
            Self::Bare => boxed(service),
            Self::Guard => boxed(GuardLayer.layer(service)),
            Self::Layer | Self::Wrapped => boxed(layer.layer(service)),
        }
    }

    /// A series of a plot for each set-up.
    pub fn series(points: impl Fn(Self) -> Vec<(f64, f64)>) -> Vec<Series> {
        let series = |setup: Self| Series {
            name: setup.name().to_owned(),
            points: points(setup),
        };
        Self::ALL.map(series).to_vec()
    }

    /// `handler` as a server. `layer` counts only where it is used.
    pub fn serve<H, A>(self, mode: Mode, handler: H, layer: CancelOnDisconnectLayer) -> Server<A>
    where
        H: ServerHandler + Clone,
        A: Body<Data = Bytes, Error: Into<BoxError> + Display> + Send + 'static,
    {
        self.serve_with(mode.config(), SessionConfig::default(), handler, layer)
    }

    /// The same, with a configuration of rmcp that may differ from the default in more than its mode.
    pub fn serve_with<H, A>(
        self,
        config: StreamableHttpServerConfig,
        sessions: SessionConfig,
        handler: H,
        layer: CancelOnDisconnectLayer,
    ) -> Server<A>
    where
        H: ServerHandler + Clone,
        A: Body<Data = Bytes, Error: Into<BoxError> + Display> + Send + 'static,
    {
        let bare = || {
            let mut manager = LocalSessionManager::default();
            manager.session_config = sessions.clone();
            mcp(config.clone(), handler.clone(), Arc::new(manager))
        };
        match self {
            Self::Bare => boxed(bare()),
            Self::Guard => boxed(GuardLayer.layer(bare())),
            Self::Layer => boxed(layer.layer(bare())),
            Self::Wrapped => {
                let sessions = CancellableSessionManager::local(sessions.clone());
                boxed(layer.layer(mcp(config.clone(), handler.clone(), Arc::new(sessions))))
            }
        }
    }
}

// === impl Mode ===

impl Mode {
    pub const ALL: [Self; 2] = [Self::Session, Self::Stateless];

    pub fn name(self) -> &'static str {
        match self {
            Self::Session => "session",
            Self::Stateless => "stateless",
        }
    }

    /// rmcp's defaults, in this mode.
    pub fn config(self) -> StreamableHttpServerConfig {
        let mut config = StreamableHttpServerConfig::default();
        config.legacy_session_mode = self == Self::Session;
        config
    }
}

fn mcp<H: ServerHandler + Clone, M: SessionManager>(
    config: StreamableHttpServerConfig,
    handler: H,
    sessions: Arc<M>,
) -> StreamableHttpService<H, M> {
    StreamableHttpService::new(move || Ok(handler.clone()), sessions, config)
}

/// Any service as a server.
pub fn boxed<S, A, B>(service: S) -> Server<A>
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
