//! An instance's membership of a cluster, and how it is set up.

use std::{
    error::Error,
    fmt,
    net::{IpAddr, SocketAddr},
    sync::{Arc, Mutex, PoisonError},
};

use async_trait::async_trait;
use axum::body::Body;
use http::{Request, Response};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancellableSessionManager, Confirmation, Event, Outcome,
};
use rmcp::transport::streamable_http_server::{
    SessionManager,
    session::{SessionState, SessionStore, SessionStoreError},
};
use tokio::{net::TcpListener, sync::watch, task::JoinHandle};
use tower_service::Service;
use tracing::info;

use crate::{
    answers::Answers,
    arrivals::Arrivals,
    closers::Closers,
    directory::{Directory, DirectoryError, Limited, MemoryDirectory, RedisDirectory},
    filter::PeersFilter,
    heart::Heart,
    ids::{Incarnation, Owner, SessionHash},
    layer::ClusterLayer,
    manager::ClusterSessionManager,
    meter,
    owners::Owners,
    peers::{self, Gate},
    proof,
    relay::Relay,
    router::Router,
    sessions::Sessions,
    store::ClusterStore,
    wire::Secret,
};

/// An instance's membership of a cluster. Clones are the same membership.
///
/// ```no_run
/// use axum::Router;
/// use mcp_cancel_cluster::Cluster;
/// use tokio::net::TcpListener;
///
/// # async fn serve(app: Router) -> Result<(), Box<dyn std::error::Error>> {
/// let peers = TcpListener::bind("10.0.0.7:9000").await?;
/// let cluster = Cluster::redis("redis://cache:6379").advertise("10.0.0.7:9000").connect().await?;
/// let app = app.layer(cluster.layer());
/// let public = TcpListener::bind("0.0.0.0:8000").await?;
/// let (served, ()) = tokio::join!(axum::serve(public, app.clone()), cluster.serve_peers(peers, app));
/// # served?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Cluster {
    shared: Arc<Shared>,
}

struct Shared {
    router: Arc<Router>,
    gate: Arc<Gate>,
    store: ClusterStore,
    answers: Arc<Answers>,
    closers: Closers,
    closing: JoinHandle<()>,
    /// Until the instance leaves.
    beating: Mutex<Option<JoinHandle<()>>>,
}

/// What an instance needs to be a member. [`Cluster::redis`] begins one.
#[derive(Clone)]
#[must_use = "nothing happens before `connect`"]
pub struct ClusterBuilder {
    engine: Engine,
    advertised: Option<String>,
    secret: Option<String>,
    filter: PeersFilter,
}

/// Where the directory is.
#[derive(Clone)]
enum Engine {
    Memory(MemoryDirectory),
    Redis(String),
}

/// Why an instance cannot be a member.
#[derive(Debug)]
pub struct ConnectError {
    what: What,
}

#[derive(Debug)]
enum What {
    Engine(DirectoryError),
    NotAdvertised,
    NotAnAddress(String),
    NotAPeer(IpAddr),
    Secret,
}

// === impl Cluster ===

impl Cluster {
    /// A cluster whose directory is in a Redis or a Valkey, at a URL such as `redis://cache:6379`. All instances have the same one.
    pub fn redis(url: impl Into<String>) -> ClusterBuilder {
        ClusterBuilder::new(Engine::Redis(url.into()))
    }

    /// A cluster whose instances are all in this process.
    pub fn in_memory(directory: &MemoryDirectory) -> ClusterBuilder {
        ClusterBuilder::new(Engine::Memory(directory.clone()))
    }

    /// The layer for the application, the outermost of all.
    pub fn layer(&self) -> ClusterLayer {
        ClusterLayer::new(self.shared.router.clone())
    }

    /// Has a session manager take part: its sessions are this instance's, and its event ids say so.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    /// use mcp_cancel_on_disconnect::CancellableSessionManager;
    /// use rmcp::transport::streamable_http_server::SessionManager;
    ///
    /// let member = Cluster::in_memory(&MemoryDirectory::default()).advertise("127.0.0.1:9000");
    /// let cluster = member.connect().await?;
    /// let sessions = cluster.sessions(CancellableSessionManager::default());
    /// let (id, _transport) = sessions.create_session().await?;
    /// assert!(sessions.has_session(&id).await?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn sessions<M: SessionManager>(
        &self,
        manager: CancellableSessionManager<M>,
    ) -> ClusterSessionManager<M> {
        let sessions = self.shared.router.sessions.clone();
        let answers = self.shared.answers.clone();
        let (manager, closes) = ClusterSessionManager::new(manager, sessions, answers);
        self.shared.closers.add(closes);
        manager
    }

    /// Has a layer cancel abandoned calls of sessions only with proof that their clients cannot have come back to another
    /// instance. It takes the place of the layer's own [`confirm`](CancelOnDisconnectLayer::confirm).
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let member = Cluster::in_memory(&MemoryDirectory::default()).advertise("127.0.0.1:9000");
    /// let layer = member.connect().await?.guard(CancelOnDisconnectLayer::new());
    /// assert!(format!("{layer:?}").contains("confirm: true"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn guard(&self, layer: CancelOnDisconnectLayer) -> CancelOnDisconnectLayer {
        let (answers, router) = (self.shared.answers.clone(), self.shared.router.clone());
        answers.watch(layer.calls());
        let observed = layer.observe_fn(move |event| match event {
            Event::Ended {
                outcome: Outcome::Completed,
                ..
            } => {}
            Event::Ended { call, .. } => answers.ended(call),
            _ => {}
        });
        observed.confirm(move |orphan| {
            let session = orphan.call().session().map(SessionHash::of);
            let (router, grace) = (router.clone(), orphan.grace());
            async move {
                match session {
                    Some(session) => proof::prove(&router, session, grace).await,
                    // A call without a session is here or nowhere.
                    None => Confirmation::Cancel,
                }
            }
        })
    }

    /// Serves the application to the other instances, on a listener at the address that is advertised. The application is
    /// the one that clients are served, with [`layer`](Self::layer) around it.
    ///
    /// It returns after [`leave`](Self::leave). Dropped, it closes all connections of peers at once.
    pub async fn serve_peers<S>(&self, listener: TcpListener, app: S)
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = std::convert::Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        let leaving = self.shared.router.leaving.subscribe();
        peers::serve(listener, app, self.shared.gate.clone(), leaving).await;
    }

    /// Hands the sessions of this instance over: from now on peers that ask for one are told to claim it. Then it closes the
    /// listener for peers, and returns when [`serve_peers`](Self::serve_peers) has.
    ///
    /// Call it when the calls have ended: first the public listener is closed, then `Calls::drain` lets calls end while peers still
    /// relay to them, then the instance leaves.
    ///
    /// # Cancel safety
    ///
    /// The instance leaves all the same when this is dropped, but without its lease given up: its sessions are claimed when
    /// that is over.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use axum::Router;
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    /// use tokio::net::TcpListener;
    ///
    /// let peers = TcpListener::bind("127.0.0.1:0").await?;
    /// let address = peers.local_addr()?.to_string();
    /// let directory = MemoryDirectory::default();
    /// let cluster = Cluster::in_memory(&directory).advertise(address).connect().await?;
    /// let app = Router::new().layer(cluster.layer());
    /// let (member, served) = (cluster.clone(), app);
    /// let serving = tokio::spawn(async move { member.serve_peers(peers, served).await });
    /// cluster.leave().await;
    /// serving.await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn leave(&self) {
        let router = &self.shared.router;
        if router.leaving.send_replace(true) {
            return router.leaving.closed().await;
        }
        info!(target: "mcp_cancel_cluster", "this instance leaves");
        self.shared.answers.settle().await;
        router.heart.leave();
        if let Some(beating) = self.shared.beating() {
            // It ends when the lease is given up. If it panicked, the lease ends by itself.
            let _ended = beating.await;
        }
        router.leaving.closed().await;
    }
}

#[cfg(test)]
impl Cluster {
    pub(crate) fn router(&self) -> &Router {
        &self.shared.router
    }

    /// As when the process ends, but that the lease stays until it lapses.
    pub(crate) fn stop_heart(&self) {
        self.shared.stop_heart();
    }
}

/// What a session needs to go on elsewhere is in the directory: give rmcp's service a clone as its `session_store`.
#[async_trait]
impl SessionStore for Cluster {
    async fn load(&self, session_id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        self.shared.store.load(session_id).await
    }

    async fn store(&self, session_id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        self.shared.store.store(session_id, state).await
    }

    async fn delete(&self, session_id: &str) -> Result<(), SessionStoreError> {
        self.shared.store.delete(session_id).await
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("me", &self.shared.router.me)
            .finish_non_exhaustive()
    }
}

// === impl Shared ===

impl Shared {
    fn beating(&self) -> Option<JoinHandle<()>> {
        let mut beating = self.beating.lock().unwrap_or_else(PoisonError::into_inner);
        beating.take()
    }

    fn stop_heart(&self) {
        if let Some(beating) = self.beating() {
            beating.abort();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop_heart();
        self.closing.abort();
    }
}

// === impl ClusterBuilder ===

impl fmt::Debug for ClusterBuilder {
    /// Without the secret, and without the URL, which may have a password.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClusterBuilder")
            .field("advertised", &self.advertised)
            .finish_non_exhaustive()
    }
}

impl ClusterBuilder {
    fn new(engine: Engine) -> Self {
        Self {
            engine,
            advertised: None,
            secret: None,
            filter: PeersFilter::default(),
        }
    }

    /// Sets the address at which the other instances reach the listener for peers: an IP address and a port.
    pub fn advertise(mut self, address: impl Into<String>) -> Self {
        self.advertised = Some(address.into());
        self
    }

    /// Sets a secret that all instances share. Without it, everybody who reaches the listener for peers from an address that
    /// [`peers_filter`](Self::peers_filter) admits counts as one. It is sent in clear, as the requests are.
    pub fn secret(mut self, secret: impl Into<String>) -> Self {
        self.secret = Some(secret.into());
        self
    }

    /// Sets which addresses may be peers', those that connect and those that the directory names. By default they are those of
    /// private networks (RFC 1918, RFC 4193) and of this machine.
    pub fn peers_filter(mut self, admits: impl Fn(IpAddr) -> bool + Send + Sync + 'static) -> Self {
        self.filter = PeersFilter::new(admits);
        self
    }

    /// Becomes a member.
    ///
    /// It does not need the directory to be there: until it is, sessions of other instances are not found.
    ///
    /// # Errors
    ///
    /// The URL of the directory cannot be read; there is no address to advertise, it is none, or
    /// [`peers_filter`](Self::peers_filter) does not admit it; or the secret has characters that a header field cannot have.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    ///
    /// let directory = MemoryDirectory::default();
    /// let nowhere = Cluster::in_memory(&directory).advertise("0.0.0.0:9000").connect().await;
    /// assert!(nowhere.unwrap_err().to_string().contains("0.0.0.0:9000"));
    /// let strange = Cluster::in_memory(&directory).advertise("203.0.113.7:9000");
    /// assert!(strange.clone().connect().await.is_err(), "not an address of a private network");
    /// let member = strange.peers_filter(|_| true).secret("of all instances").connect().await;
    /// assert!(member.is_ok());
    /// # }
    /// ```
    pub async fn connect(self) -> Result<Cluster, ConnectError> {
        let me = Owner {
            address: self.address()?,
            incarnation: Incarnation::random(),
        };
        let secret = self
            .secret
            .as_deref()
            .map_or(Ok(Secret::default()), Secret::new);
        let secret = secret.map_err(|_| What::Secret)?;
        match self.engine {
            Engine::Memory(directory) => Ok(join(me, directory, self.filter, secret)),
            Engine::Redis(url) => {
                let directory = RedisDirectory::new(&url).map_err(What::Engine)?;
                Ok(join(me, directory, self.filter, secret))
            }
        }
    }

    fn address(&self) -> Result<SocketAddr, What> {
        let text = self.advertised.as_deref().ok_or(What::NotAdvertised)?;
        let address: SocketAddr = text
            .parse()
            .map_err(|_| What::NotAnAddress(text.to_owned()))?;
        if address.port() == 0 || address.ip().is_unspecified() {
            return Err(What::NotAnAddress(text.to_owned()));
        }
        // The others, which have the same filter, would never come.
        if !self.filter.admits(address.ip()) {
            return Err(What::NotAPeer(address.ip()));
        }
        Ok(address)
    }
}

/// Everything that an instance is, over any directory.
#[allow(clippy::disallowed_methods, reason = "the heart beats on its own")]
pub(crate) fn join(
    me: Owner,
    directory: impl Directory,
    filter: PeersFilter,
    secret: Secret,
) -> Cluster {
    meter::describe();
    let directory = Limited::new(directory);
    let (sessions, lost) = Sessions::new();
    let closers = Closers::default();
    let heart = Heart::new(me, directory.clone(), sessions.clone());
    let router = Arc::new(Router {
        me,
        owners: Owners::new(me.incarnation, directory.clone()),
        relay: Relay::new(filter.clone(), secret.clone()),
        heart: heart.clone(),
        sessions: sessions.clone(),
        arrivals: Arrivals::default(),
        leaving: watch::Sender::new(false),
        directory: directory.clone(),
    });
    info!(target: "mcp_cancel_cluster", address = %me.address, incarnation = %me.incarnation, "this instance joins");
    Cluster {
        shared: Arc::new(Shared {
            router,
            gate: Arc::new(Gate { filter, secret }),
            answers: Answers::new(me.incarnation, directory.clone()),
            closing: tokio::spawn(closers.clone().run(lost)),
            closers,
            store: ClusterStore::new(me.incarnation, directory, sessions),
            beating: Mutex::new(Some(tokio::spawn(heart.run()))),
        }),
    }
}

// === impl ConnectError ===

impl From<What> for ConnectError {
    fn from(what: What) -> Self {
        Self { what }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.what {
            What::Engine(error) => write!(f, "the directory cannot be used: {error}"),
            What::NotAdvertised => f.write_str("no address to advertise to the other instances"),
            What::NotAnAddress(text) => {
                write!(
                    f,
                    "not an address that other instances can reach, such as 10.0.0.7:9000: {text}"
                )
            }
            What::NotAPeer(ip) => write!(
                f,
                "the filter of peers does not admit the advertised address {ip}"
            ),
            What::Secret => f.write_str(
                "the secret is empty, or has characters that a header field cannot have",
            ),
        }
    }
}

impl Error for ConnectError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.what {
            What::Engine(error) => error.source(),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn refused(builder: ClusterBuilder) -> String {
        builder.connect().await.unwrap_err().to_string()
    }

    #[tokio::test]
    async fn an_address_that_peers_cannot_reach_is_refused() {
        let directory = MemoryDirectory::default();
        let builder = || Cluster::in_memory(&directory);
        assert!(refused(builder()).await.contains("no address"));
        for address in [
            "",
            "peer:9000",
            "10.0.0.7",
            "10.0.0.7:0",
            "0.0.0.0:9000",
            "[::]:9000",
        ] {
            let error = refused(builder().advertise(address)).await;
            assert!(error.ends_with(&format!(": {address}")), "{error}");
        }
        let error = refused(builder().advertise("8.8.8.8:9000")).await;
        assert!(error.contains("does not admit"), "{error}");
        let open = builder().advertise("8.8.8.8:9000").peers_filter(|_| true);
        assert!(open.connect().await.is_ok());
    }

    #[tokio::test]
    async fn a_secret_or_a_url_that_cannot_be_is_refused() {
        let memory = Cluster::in_memory(&MemoryDirectory::default()).advertise("10.0.0.7:9000");
        assert!(refused(memory.clone().secret("")).await.contains("secret"));
        assert!(memory.clone().secret("a secret").connect().await.is_ok());
        let redis = Cluster::redis("not a url").advertise("10.0.0.7:9000");
        assert!(refused(redis).await.contains("directory"));
        let debug = format!("{:?}", memory.secret("a secret"));
        assert!(!debug.contains("a secret"), "{debug}");
    }
}
