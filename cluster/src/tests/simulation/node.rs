//! A simulated instance: an rmcp server on its own runtime, set up the way an application would do it.

use std::{sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, Grace};
use rmcp::transport::streamable_http_server::{
    StreamableHttpServerConfig, StreamableHttpService, session::local::LocalSessionManager,
};

use super::{
    directory_link::DirectoryLink,
    handler::Server,
    ingress::{self, Ingress},
    net::{Connector, Machine, Net, address_of},
    time::{Host, HostId, Ms},
    watcher::Watcher,
};
use crate::{
    cluster::{Cluster, Options, join_over},
    directory::faulty::Faulty,
    ids::{Incarnation, Owner},
    relay::{filter::PeersFilter, network::Network, wire::Secret},
};

/// How long a detached call waits for its client.
pub(super) const GRACE: Ms = 5_000;

/// The limit for `leave`.
pub(super) const LEAVE_LIMIT: Ms = 15_000;

/// How long a stream is silent before it gets a comment.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// How long a client waits to resume after its stream has ended.
pub(super) const RETRY: Ms = 1_000;

/// State shared by all instances.
#[derive(Clone)]
pub(super) struct Environment {
    pub(super) net: Net,
    pub(super) directory_link: DirectoryLink,
    pub(super) directory: Faulty,
    pub(super) watcher: Watcher,
}

/// A process that is an instance.
pub(super) struct Node {
    pub(super) host: Host,
    pub(super) machine: Machine,
    pub(super) incarnation: Incarnation,
    pub(super) ingress: Ingress,
    pub(super) cluster: Option<Cluster>,
}

// === impl Node ===

impl Node {
    #[allow(clippy::disallowed_methods, reason = "an instance consists of tasks")]
    pub(super) fn start(environment: &Environment, id: HostId, machine: Machine, now: Ms) -> Self {
        let host = Host::new(id, now);
        let address = address_of(machine);
        let incarnation = Incarnation::random();
        let me = Owner {
            address,
            incarnation,
        };
        let (ingress, arriving) = Ingress::new(id, environment.net.post.clone());
        let cluster = host.run(async {
            let connector = Connector {
                net: environment.net.clone(),
                host: id,
                machine,
            };
            let directory = environment
                .directory
                .behind(environment.directory_link.of_instance(id, machine));
            let secret = Secret::new("the secret of the simulation").unwrap();
            let network = Network::Simulated(Box::new(connector));
            let cluster = join_over(
                network,
                me,
                directory,
                PeersFilter::default(),
                secret,
                Options::default(),
            );
            let app = app(&cluster, id, &environment.watcher);
            let listener = environment.net.listen(id, machine, address);
            let (member, peers_app) = (cluster.clone(), app.clone());
            tokio::spawn(async move { member.serve_peers_on(listener, peers_app).await });
            tokio::spawn(ingress::serve(app, arriving));
            cluster
        });
        let sessions = &cluster.router().sessions;
        environment
            .watcher
            .started(id, machine, incarnation, sessions);
        Self {
            host,
            machine,
            incarnation,
            ingress,
            cluster: Some(cluster),
        }
    }

    /// Adds sessions that are not used by any client.
    pub(super) fn add_sessions(&self, count: usize) {
        let Some(cluster) = &self.cluster else {
            return;
        };
        let runtime = self.host.handle();
        let _entered = runtime.enter();
        let params: Arc<[u8]> = Arc::from(&b"{}"[..]);
        for number in 0..count {
            let id = format!("{number} on {}", self.host.id);
            let sessions = &cluster.router().sessions;
            sessions.on_opened(&id, false);
            sessions.on_initialized(&id, params.clone());
        }
    }

    /// Ends the process as if it were killed.
    pub(super) fn kill(&mut self) {
        drop(self.cluster.take());
        self.host.kill();
    }
}

fn app(cluster: &Cluster, host: HostId, watcher: &Watcher) -> Router {
    let mut manager = LocalSessionManager::default();
    manager.session_config.sse_retry = Some(Duration::from_millis(RETRY));
    let sessions = cluster.sessions(CancellableSessionManager::new(manager));
    // rmcp's own keep-alive uses the `std` clock, which does not follow the simulated one.
    let mut config = StreamableHttpServerConfig::default()
        .with_sse_keep_alive(None)
        .with_sse_retry(Some(Duration::from_millis(RETRY)));
    config.session_store = Some(Arc::new(cluster.clone()));
    let watcher = watcher.clone();
    let service = StreamableHttpService::new(
        move || {
            Ok(Server {
                host,
                watcher: watcher.clone(),
            })
        },
        Arc::new(sessions),
        config,
    );
    let grace = Grace::AutoAfter(Duration::from_millis(GRACE));
    let layer = CancelOnDisconnectLayer::new()
        .grace(grace)
        .keep_alive(KEEP_ALIVE);
    Router::new()
        .nest_service("/mcp", service)
        .layer(cluster.protect(layer))
        .layer(cluster.layer())
}
