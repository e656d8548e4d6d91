//! The set-ups that every bench compares.

use std::{convert::Infallible, fmt, sync::Arc};

use anyhow::Result;
use bytes::Bytes;
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use mcp_cancel_cluster::{Cluster, MemoryDirectory};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, body::TeeBody};
use rmcp::{
    ServerHandler,
    transport::streamable_http_server::{
        SessionManager, StreamableHttpServerConfig, StreamableHttpService,
        session::local::{LocalSessionManager, SessionConfig},
    },
};
use strum::{Display, EnumIter, EnumString};
use tower::{BoxError, Layer, Service, ServiceExt, util::BoxCloneSyncService};

use crate::guard::guarded;

/// A server with any layers around it.
pub type Server<A> = BoxCloneSyncService<Request<A>, Response<axum::body::Body>, Infallible>;

/// rmcp's configuration.
pub type Config = (StreamableHttpServerConfig, SessionConfig);

/// The set-up that watches the calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter, EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Setup {
    /// Plain rmcp, without a watcher.
    Bare,
    /// A hand-written guard, see [`crate::guard`].
    Guard,
    /// The layer, over rmcp's own session manager.
    Layer,
    /// The layer together with its session manager.
    Wrapped,
}

/// rmcp's session mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Display, EnumIter, EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum Mode {
    Session,
    Stateless,
}

// === impl Setup ===

impl Setup {
    /// Returns `true` if the set-up includes this crate.
    pub fn is_ours(self) -> bool {
        matches!(self, Self::Layer | Self::Wrapped)
    }

    /// Wraps a service in this set-up, leaving out rmcp's parts. Only this crate's set-ups use `layer`.
    pub fn around<S, A, B>(self, service: S, layer: CancelOnDisconnectLayer) -> Server<A>
    where
        S: Service<Request<TeeBody<A>>, Response = Response<B>, Error = Infallible>,
        S: Service<Request<A>, Response = Response<B>, Error = Infallible>,
        S: Clone + Send + Sync + 'static,
        <S as Service<Request<TeeBody<A>>>>::Future: Send + 'static,
        <S as Service<Request<A>>>::Future: Send + 'static,
        A: Body<Data = Bytes, Error: Into<BoxError> + fmt::Display> + Send + 'static,
        B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        match self {
            Self::Bare => boxed(service),
            Self::Guard => guarded(service),
            Self::Layer | Self::Wrapped => boxed(layer.layer(service)),
        }
    }

    /// Serves `handler` in this set-up. Only this crate's set-ups use `layer`.
    pub fn serve<H, A>(
        self,
        config: Config,
        handler: H,
        layer: CancelOnDisconnectLayer,
    ) -> Server<A>
    where
        H: ServerHandler + Clone,
        A: Body<Data = Bytes, Error: Into<BoxError> + fmt::Display> + Send + 'static,
    {
        if self == Self::Wrapped {
            let manager = CancellableSessionManager::local(config.1);
            return boxed(layer.layer(mcp(config.0, handler, manager)));
        }
        self.around(bare(config, handler), layer)
    }
}

// === impl Mode ===

impl Mode {
    /// Returns rmcp's default configuration for this mode.
    pub fn config(self) -> Config {
        let mut config = StreamableHttpServerConfig::default();
        config.legacy_session_mode = self == Self::Session;
        (config, SessionConfig::default())
    }
}

/// Serves `handler` as a cluster's only member, which owns every session.
pub async fn clustered<H: ServerHandler + Clone>(
    (mut config, sessions): Config,
    handler: H,
    layer: CancelOnDisconnectLayer,
) -> Result<Server<Full<Bytes>>> {
    let member = Cluster::in_memory(&MemoryDirectory::default()).advertise("127.0.0.1:9");
    let cluster = member.connect().await?;
    config.session_store = Some(Arc::new(cluster.clone()));
    let manager = cluster.sessions(CancellableSessionManager::local(sessions));
    let served = cluster.protect(layer).layer(mcp(config, handler, manager));
    Ok(boxed(routed(cluster.layer().layer(served))))
}

/// Passes bodies to the service as axum's body type.
pub fn routed<S, R>(
    service: S,
) -> impl Service<Request<Full<Bytes>>, Response = R, Error = Infallible, Future: Send>
+ Clone
+ Send
+ Sync
+ 'static
where
    S: Service<Request<axum::body::Body>, Response = R, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    R: 'static,
{
    service.map_request(|request: Request<Full<Bytes>>| request.map(axum::body::Body::new))
}

/// Serves `handler` with plain rmcp.
pub fn bare<H: ServerHandler + Clone>(
    (config, sessions): Config,
    handler: H,
) -> StreamableHttpService<H, LocalSessionManager> {
    let mut manager = LocalSessionManager::default();
    manager.session_config = sessions;
    mcp(config, handler, manager)
}

fn mcp<H: ServerHandler + Clone, M: SessionManager>(
    config: StreamableHttpServerConfig,
    handler: H,
    sessions: M,
) -> StreamableHttpService<H, M> {
    StreamableHttpService::new(move || Ok(handler.clone()), Arc::new(sessions), config)
}

/// Boxes a service as a server.
pub fn boxed<S, A, B>(service: S) -> Server<A>
where
    S: Service<Request<A>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
    A: Send + 'static,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let response = |response: Response<B>| response.map(axum::body::Body::new);
    BoxCloneSyncService::new(service.map_response(response))
}
