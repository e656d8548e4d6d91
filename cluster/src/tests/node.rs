//! An instance that runs an rmcp server, set up the way an application would do it.

use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{Router, extract::Request, middleware};
use mcp_cancel_on_disconnect::{Calls, CancelOnDisconnectLayer, CancellableSessionManager, Grace};
use rmcp::{
    RoleServer, service::RequestContext,
    transport::streamable_http_server::session::local::LocalSessionManager,
};
use serde_json::{Value, json};
use test_support::{Connection, Mcp, Mode, PATH, Served, Tools, Witness, router, serve};
use tokio::{
    net::{TcpListener, TcpSocket},
    task::{JoinHandle, yield_now},
    time::{Instant, advance, pause, resume},
};
use tower_service::Service as _;

use super::{fake_owner::reserve_address, steps::directory};
use crate::{
    cluster::{Cluster, Options, join},
    directory::{Directory as _, LEASE_TTL, MemoryDirectory, faulty::Faulty},
    ids::{CallNumber, ClusterEventId, Incarnation, Owner, SessionHash},
    membership::heartbeat::SETTLE_PERIOD,
    relay::{filter::PeersFilter, wire::Secret},
    routing::router::Router as Routing,
};

pub(super) const SECRET: &str = "the secret of all tests";

/// An instance. Once dropped, it accepts no more connections at its public listener.
pub(super) struct Node {
    pub(super) me: Owner,
    pub(super) cluster: Cluster,
    pub(super) witness: Witness,
    pub(super) calls: Calls,
    pub(super) public: Option<Served>,
    pub(super) peers: JoinHandle<()>,
    /// The heads of all requests that the application has received.
    pub(super) received_heads: Arc<Mutex<Vec<http::HeaderMap>>>,
    /// The application that the instance serves.
    pub(super) app: Router,
    addr: SocketAddr,
    #[allow(dead_code, reason = "keeps the address reserved")]
    reserved: Option<TcpSocket>,
}

/// The grace period of [`Setup::with_grace`].
pub(super) const GRACE: Duration = Duration::from_secs(6);

/// An instance's set-up.
pub(super) struct Setup {
    pub(super) manager: CancellableSessionManager<LocalSessionManager>,
    pub(super) layer: CancelOnDisconnectLayer,
    pub(super) grace: Grace,
    pub(super) secret: &'static str,
    pub(super) also_accepts: Option<&'static str>,
    pub(super) filter: PeersFilter,
    pub(super) options: Options,
    /// Whether the service uses the cluster as its session store.
    pub(super) has_session_store: bool,
    #[allow(clippy::type_complexity, reason = "it is what `Tools::on_start` takes")]
    pub(super) on_start: Option<Box<dyn Fn(&str, &RequestContext<RoleServer>) + Send + Sync>>,
    /// Adds application layers between rmcp's service and the cluster's layer.
    pub(super) inner_layers: fn(Router) -> Router,
}

// === impl Setup ===

impl Default for Setup {
    fn default() -> Self {
        Self {
            manager: CancellableSessionManager::default(),
            layer: CancelOnDisconnectLayer::new(),
            grace: Grace::Auto,
            secret: SECRET,
            also_accepts: None,
            filter: PeersFilter::default(),
            options: Options::default(),
            has_session_store: true,
            on_start: None,
            inner_layers: |app| app,
        }
    }
}

impl Setup {
    /// Returns a set-up whose calls continue for [`GRACE`] after their client has disconnected.
    pub(super) fn with_grace() -> Self {
        Self {
            grace: Grace::After(GRACE),
            ..Self::default()
        }
    }

    /// Returns the set-up of an instance that cannot reach any other.
    pub(super) fn without_peers() -> Self {
        Self {
            filter: PeersFilter::new(|_| false),
            ..Self::default()
        }
    }

    /// Returns the set-up of an instance that takes on nothing new while its lease may have lapsed.
    pub(super) fn requiring_lease() -> Self {
        Self {
            options: Options {
                requires_lease: true,
                ..Options::default()
            },
            ..Self::default()
        }
    }

    /// Starts two instances with these inner layers, and waits until both are settled.
    pub(super) async fn start_pair(
        directory: &Faulty,
        inner_layers: fn(Router) -> Router,
    ) -> [Node; 2] {
        let setup = || Self {
            inner_layers,
            ..Self::default()
        };
        let nodes = [
            setup().start(directory).await,
            setup().start(directory).await,
        ];
        for node in &nodes {
            node.until_settled().await;
        }
        nodes
    }

    pub(super) async fn start(self, directory: &Faulty) -> Node {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let me = Owner {
            address: listener.local_addr().unwrap(),
            incarnation: Incarnation::random(),
        };
        let mut secret = Secret::new(self.secret).unwrap();
        if let Some(other) = self.also_accepts {
            secret = secret.also_accept(other).unwrap();
        }
        let cluster = join(me, directory.clone(), self.filter, secret, self.options);
        let witness = Witness::new();
        let mut tools = Tools::new(&witness);
        if let Some(on_start) = self.on_start {
            tools = tools.on_start(on_start);
        }
        let sessions = Arc::new(cluster.sessions(self.manager));
        // rmcp's keep-alive uses the system clock. Where tokio's clock is ahead of that, every comment is due at once.
        let mut config = Mode::Session.config().with_sse_keep_alive(None);
        if self.has_session_store {
            config.session_store = Some(Arc::new(cluster.clone()));
        }
        let service = tools.service_with(config, sessions);
        let layer = cluster.protect(self.layer.grace(self.grace));
        let calls = layer.calls();
        let received_heads = Arc::new(Mutex::new(Vec::new()));
        let recorded = received_heads.clone();
        let record_heads = middleware::map_request(move |request: Request| {
            recorded.lock().unwrap().push(request.headers().clone());
            async { request }
        });
        let app = router(service).layer(layer).layer(record_heads);
        let app = (self.inner_layers)(app).layer(cluster.layer());
        let public = serve(app.clone()).await;
        let (member, peers_app) = (cluster.clone(), app.clone());
        let peers = tokio::spawn(async move { member.serve_peers(listener, peers_app).await });
        Node {
            me,
            cluster,
            witness,
            calls,
            addr: public.addr,
            app,
            public: Some(public),
            peers,
            received_heads,
            reserved: None,
        }
    }
}

// === impl Node ===

impl Node {
    pub(super) async fn start(directory: &Faulty) -> Self {
        Setup::default().start(directory).await
    }

    /// Starts `N` instances and waits until each has found the directory consistent for `SETTLE_PERIOD`.
    pub(super) async fn several<const N: usize>(directory: &Faulty) -> [Self; N] {
        let mut nodes = Vec::new();
        for _ in 0..N {
            nodes.push(Self::start(directory).await);
        }
        for node in &nodes {
            node.until_settled().await;
        }
        nodes.try_into().ok().unwrap()
    }

    /// Starts `N` instances on a new directory, and opens a session on the first one.
    pub(super) async fn with_session<const N: usize>() -> (Faulty, [Self; N], Mcp) {
        let directory = directory();
        let nodes = Self::several(&directory).await;
        let mcp = nodes[0].session().await;
        (directory, nodes, mcp)
    }

    /// Starts two instances on one directory, each over its own link, and waits until both are settled.
    pub(super) async fn two_on_links() -> (MemoryDirectory, [Faulty; 2], [Self; 2]) {
        let memory = MemoryDirectory::default();
        let links = [(); 2].map(|()| Faulty::new(memory.clone()));
        let nodes = [Self::start(&links[0]).await, Self::start(&links[1]).await];
        for node in &nodes {
            node.until_settled().await;
        }
        (memory, links, nodes)
    }

    /// Opens a session on this instance and returns its client.
    pub(super) async fn session(&self) -> Mcp {
        Mcp::session(self.addr, PATH).await
    }

    /// Sends an `initialize`, which the instance may refuse.
    pub(super) async fn initialize(&self) -> Connection {
        let params = json!({
            "protocolVersion": "2025-06-18",
            "capabilities": {},
            "clientInfo": { "name": "test", "version": "0" },
        });
        let client = Mcp::stateless(self.addr, PATH).version("2025-06-18");
        client.request(0, "initialize", params).await
    }

    /// Returns a client of this instance that uses `other`'s session.
    pub(super) fn client_of(&self, other: &Mcp) -> Mcp {
        self.client(other.session_id().unwrap())
    }

    pub(super) fn client(&self, session: &str) -> Mcp {
        Mcp::stateless(self.addr, PATH).in_session(session)
    }

    pub(super) fn routing(&self) -> &Routing {
        self.cluster.router()
    }

    /// Returns `true` if a client's session is local and its gate is open.
    pub(super) fn has(&self, mcp: &Mcp) -> bool {
        self.routing()
            .sessions
            .has_open_gate(mcp.session_id().unwrap())
    }

    /// Starts a call that this instance serves, and reads its response head.
    pub(super) async fn start_call(
        &self,
        mcp: &Mcp,
        id: impl Into<Value>,
        label: &str,
    ) -> Connection {
        let mut call = mcp.call(id, "hold", json!({ "label": label })).await;
        assert_eq!(call.head().await.status, 200);
        self.witness.started(label).await;
        call
    }

    /// Asserts that the application has received none of the headers that instances send to one another.
    pub(super) fn assert_received_no_cluster_header(&self) {
        for request in self.received_heads.lock().unwrap().iter() {
            let mut names = request.keys();
            assert!(
                names.all(|name| !name.as_str().starts_with("mcp-cluster")),
                "{request:?}"
            );
        }
    }

    /// Waits until this instance has no calls in flight.
    pub(super) async fn until_calls_end(&self) {
        while !self.calls.is_empty() {
            yield_now().await;
        }
    }

    /// Waits until one of this instance's calls is detached.
    pub(super) async fn until_detached(&self) {
        while self.calls.detached() == 0 {
            yield_now().await;
        }
    }

    /// Waits until the directory has the answer to one of this instance's calls.
    pub(super) async fn until_stored(&self, directory: &Faulty, mcp: &Mcp, last_event_id: &str) {
        let (session, incarnation) = (hash(mcp), self.me.incarnation);
        while directory
            .memory
            .answer(session, incarnation, call_number(last_event_id))
            .await
            .unwrap()
            .is_none()
        {
            yield_now().await;
        }
    }

    /// Makes a call whose client disconnects, and returns the id of the last event it received.
    pub(super) async fn detach(&self, mcp: &Mcp, id: u32, label: &str) -> String {
        let before = self.calls.detached();
        let mut call = mcp.call(id, "hold", json!({ "label": label })).await;
        call.head().await;
        let event = call.event().await.unwrap();
        self.witness.started(label).await;
        call.fin();
        while self.calls.detached() == before {
            yield_now().await;
        }
        event.id.unwrap()
    }

    /// Waits until this instance has found the directory consistent for `SETTLE_PERIOD`.
    pub(super) async fn until_settled(&self) {
        let heartbeat = &self.routing().heartbeat;
        let is_settled = || {
            let since = heartbeat.consistent_since();
            since.is_some_and(|since| Instant::now() - since >= SETTLE_PERIOD)
        };
        pause();
        while !is_settled() {
            advance(Duration::from_millis(250)).await;
            for _ in 0..20 {
                yield_now().await;
            }
        }
        resume();
    }

    /// Kills the process and waits until its lease has expired.
    pub(super) async fn kill_and_expire(&mut self) {
        self.kill().await;
        pass(LEASE_TTL).await;
    }

    /// Closes the listeners and cuts the connections, as if the process were killed.
    ///
    /// The lease remains until it lapses.
    pub(super) async fn kill(&mut self) {
        self.cluster.stop_heartbeat();
        drop(self.public.take());
        self.peers.abort();
        assert!((&mut self.peers).await.unwrap_err().is_cancelled());
        self.reserved = Some(reserve_address(self.me.address));
    }
}

pub(super) fn hash(mcp: &Mcp) -> SessionHash {
    SessionHash::of(mcp.session_id().unwrap())
}

/// Advances the clock in steps, letting the instances run after each.
pub(super) async fn pass(time: Duration) {
    const STEP: Duration = Duration::from_millis(50);
    pause();
    let mut passed = Duration::ZERO;
    while passed < time {
        advance(STEP).await;
        passed += STEP;
        for _ in 0..20 {
            yield_now().await;
        }
    }
    resume();
}

/// Returns the number of the call on whose stream an event was sent.
pub(super) fn call_number(event_id: &str) -> CallNumber {
    ClusterEventId::parse(event_id)
        .unwrap()
        .call
        .unwrap()
        .number
}

/// Sends a request through the cluster's layer into an application, without using a connection.
pub(super) async fn call_app(
    node: &Node,
    app: Router,
    request: http::Request<axum::body::Body>,
) -> http::Response<axum::body::Body> {
    let mut service = tower_layer::Layer::layer(&node.cluster.layer(), app);
    let response: Result<_, Infallible> = service.call(request).await;
    response.unwrap()
}
