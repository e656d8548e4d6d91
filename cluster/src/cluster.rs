//! An instance's membership in a cluster, and its setup.

use std::{
    fmt, io,
    sync::{Arc, Mutex},
    time::Duration,
};

use async_trait::async_trait;
use axum::body::Body;
use http::{Request, Response};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancellableSessionManager, Confirmation, Event,
};
use rmcp::transport::streamable_http_server::{
    SessionManager,
    session::{SessionState, SessionStore, SessionStoreError},
};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle, time::Instant};
use tower_service::Service;
use tracing::info;

use crate::{
    answers::Answers,
    directory::{Directory, Limited},
    ids::{Owner, SessionHash},
    layer::ClusterLayer,
    lock::lock,
    manager::ClusterSessionManager,
    membership::{
        heartbeat::Heartbeat,
        turned_away::{CLIENT_BACKOFF, TurnedAway},
    },
    metrics,
    orphan_confirmation::{self, MAX_CONFIRMATIONS, OrphanWait},
    relay::{
        client::Relay,
        filter::PeersFilter,
        network::Network,
        server::{self, PeerAuth},
        wire::Secret,
    },
    routing::{
        owner_cache::OwnerCache,
        request_context::{has_no_session, may_restore},
        router::{FormerOwners, Router, WaitingCalls},
    },
    session_closers::SessionClosers,
    sessions::{
        Sessions, generations::Generations, pending_restores::PendingRestores, store::ClusterStore,
    },
    shutdown::Shutdown,
};

/// An instance's membership in a cluster. All clones share the same membership.
///
/// Several services can share one membership, but a service cannot find the sessions open on another service. After an instance dies, each
/// of its sessions is restored by the first service that receives a request for it.
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
    peer_auth: Arc<PeerAuth>,
    store: ClusterStore,
    answers: Arc<Answers>,
    session_closers: SessionClosers,
    closer_task: JoinHandle<()>,
    /// The task that writes answers, even after the instance has left.
    writer_task: JoinHandle<()>,
    /// The heartbeat task, or `None` once [`Cluster::leave`] is waiting for it to end.
    heartbeat_task: Mutex<Option<JoinHandle<()>>>,
}

// === impl Cluster ===

impl Cluster {
    /// Returns the layer for the application. It must be the application's outermost layer.
    pub fn layer(&self) -> ClusterLayer {
        ClusterLayer::new(self.shared.router.clone())
    }

    /// Wraps a session manager, so that this instance owns its sessions and tags their event ids.
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
        let (generations, heartbeat) = (
            self.shared.router.generations.clone(),
            self.shared.router.heartbeat.clone(),
        );
        let waiting_calls = self.shared.router.waiting_calls.clone();
        let (manager, closer) = ClusterSessionManager::new(
            manager,
            sessions,
            answers,
            generations,
            heartbeat,
            waiting_calls,
        );
        self.shared.session_closers.add(closer);
        manager
    }

    /// Makes a layer cancel an orphaned call only if its client cannot have resumed elsewhere.
    ///
    /// This applies to calls that belong to a session, and replaces any [`confirm`](CancelOnDisconnectLayer::confirm) set on the layer.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use mcp_cancel_cluster::{Cluster, MemoryDirectory};
    /// use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
    ///
    /// let member = Cluster::in_memory(&MemoryDirectory::default()).advertise("127.0.0.1:9000");
    /// let layer = member.connect().await?.protect(CancelOnDisconnectLayer::new());
    /// assert!(format!("{layer:?}").contains("confirm: true"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn protect(&self, layer: CancelOnDisconnectLayer) -> CancelOnDisconnectLayer {
        let (answers, router) = (self.shared.answers.clone(), self.shared.router.clone());
        answers.add_calls(layer.calls());
        router.shutdown.add_calls(layer.calls());
        let observer_router = router.clone();
        let observed = layer.observe_fn(move |event| {
            // Include completed calls, because a call may be marked pending after its answer has been sent.
            if let Event::Ended { call, .. } = event {
                answers.on_call_ended(call);
                observer_router.shutdown.on_call_ended(call.session());
            }
        });
        observed.confirm(move |orphan| {
            let session = orphan.call().session().map(SessionHash::of);
            let (router, wait) = (
                router.clone(),
                OrphanWait::from_orphan(orphan, router.turned_away.backoff),
            );
            async move {
                match session {
                    Some(session) => orphan_confirmation::confirm(&router, session, wait).await,
                    // A call without a session exists only on this instance.
                    None => Confirmation::Cancel,
                }
            }
        })
    }

    /// Serves the application to the other instances, on a listener at the advertised address.
    ///
    /// `app` is the same application that serves the clients, wrapped in [`layer`](Self::layer). Returns after [`leave`](Self::leave).
    ///
    /// # Cancel safety
    ///
    /// Dropping the future closes all peer connections immediately.
    pub async fn serve_peers<S>(&self, listener: TcpListener, app: S)
    where
        S: Service<Request<Body>, Response = Response<Body>, Error = std::convert::Infallible>
            + Clone
            + Send
            + 'static,
        S::Future: Send,
    {
        let shutdown = self.shared.router.shutdown.subscribe();
        let listener = server::watch_peers(listener);
        server::serve(listener, app, self.shared.peer_auth.clone(), shutdown).await;
    }

    /// Leaves the cluster without losing any call that ends within `limit`.
    ///
    /// Returns the number of calls that had to be cancelled.
    ///
    /// Remove the instance from the load balancer first, and call this when the public listener closes.
    ///
    /// Calls in flight, including those this instance is relaying, keep running and can still be resumed, cancelled and answered. A new
    /// call relayed by another instance waits until its session has no calls in flight, at which point the other instance claims the
    /// session. After `limit`, the calls on the [protected](Self::protect) layers are cancelled as in a
    /// [drain](mcp_cancel_on_disconnect::Calls::drain), which also closes all event streams. Finally the peer listener closes, and
    /// [`serve_peers`](Self::serve_peers) returns.
    ///
    /// # Timing
    ///
    /// Leaving takes at least 1 s (or `limit`, if that is shorter), because requests may still arrive on open connections. If the directory
    /// is not accepting the answers to ended calls, this keeps trying until `limit` has passed. Writing the answers to cancelled calls may
    /// take another 2 s.
    ///
    /// # Cancel safety
    ///
    /// Dropping the future ends the membership immediately, without waiting for calls in flight. The other instances then claim the
    /// sessions.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
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
    /// let cancelled = cluster.leave(Duration::from_secs(30)).await;
    /// serving.await?;
    /// assert_eq!(cancelled, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub async fn leave(&self, limit: Duration) -> usize {
        let router = &self.shared.router;
        let until = Instant::now().checked_add(limit);
        // Stop the heartbeat even if this future is dropped.
        let heartbeat_guard = HeartbeatGuard(&router.heartbeat);
        let leaving = router.shutdown.begin();
        leaving.transfer_sessions(limit, until).await;
        leaving.stop_serving();
        let cancelled = leaving.drain(until).await;
        drop(heartbeat_guard);
        if let Some(heartbeat_task) = self.shared.take_heartbeat_task() {
            // The task ends once it has released the lease. If it has panicked, the lease lapses instead.
            let _ = heartbeat_task.await;
        }
        leaving.close().await;
        cancelled
    }
}

#[cfg(test)]
impl Cluster {
    /// Like [`serve_peers`](Self::serve_peers), but with any kind of listener.
    pub(crate) async fn serve_peers_on<S: server::App>(
        &self,
        listener: impl crate::relay::network::Listener,
        app: S,
    ) {
        let shutdown = self.shared.router.shutdown.subscribe();
        server::serve(listener, app, self.shared.peer_auth.clone(), shutdown).await;
    }

    pub(crate) fn router(&self) -> &Router {
        &self.shared.router
    }

    pub(crate) fn answers(&self) -> &Arc<Answers> {
        &self.shared.answers
    }

    /// Returns the number of calls whose answers will have to be stored.
    pub(crate) fn pending_answers(&self) -> usize {
        self.shared.answers.pending_count()
    }

    /// Adds a session manager. The managers close a session in the order in which they were added.
    pub(crate) fn add_closer(&self, closer: std::sync::Weak<dyn crate::manager::CloseSession>) {
        self.shared.session_closers.add(closer);
    }

    /// Stops sending heartbeats and writing answers, as if the process had been killed.
    ///
    /// The lease is not released, so it lapses.
    pub(crate) fn stop_heartbeat(&self) {
        self.shared.stop_heartbeat();
        self.shared.writer_task.abort();
    }
}

/// The cluster's session store. Pass a clone to rmcp's service as its `session_store`.
///
/// It uses the directory to store what another instance needs to restore a session.
#[async_trait]
impl SessionStore for Cluster {
    async fn load(&self, session_id: &str) -> Result<Option<SessionState>, SessionStoreError> {
        let session = SessionHash::of(session_id);
        let sessions = &self.shared.router.sessions;
        // The calling service does not have the session. If another service on this instance has it, the session must not be restored a
        // second time.
        let load = sessions.restore_attempts.begin_load(session);
        let is_open = self.shared.session_closers.has_session(session_id).await;
        load.complete();
        if is_open {
            return Ok(None);
        }
        // The session was open when the request arrived, but was closed while a layer was delaying the request. A peer may be about to
        // claim it.
        let is_deleted = sessions.is_deleted(session);
        if !is_deleted && !may_restore() && !has_no_session() {
            return Err(io::Error::other("the session has not been claimed").into());
        }
        self.shared.store.load(session_id).await
    }

    async fn store(&self, session_id: &str, state: &SessionState) -> Result<(), SessionStoreError> {
        self.shared.store.store(session_id, state).await
    }

    async fn delete(&self, session_id: &str) -> Result<(), SessionStoreError> {
        // Do not write tombstones for ids made up by clients.
        if has_no_session() {
            return Ok(());
        }
        self.shared.store.delete(session_id).await
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cluster")
            .field("this_instance", &self.shared.router.this_instance)
            .finish_non_exhaustive()
    }
}

/// Stops the heartbeat when dropped, which releases the lease.
struct HeartbeatGuard<'a>(&'a Heartbeat);

impl Drop for HeartbeatGuard<'_> {
    fn drop(&mut self) {
        self.0.stop();
    }
}

// === impl Shared ===

impl Shared {
    /// Takes the heartbeat task, or returns `None` if it has already been taken.
    fn take_heartbeat_task(&self) -> Option<JoinHandle<()>> {
        let mut heartbeat_task = lock(&self.heartbeat_task);
        heartbeat_task.take()
    }

    fn stop_heartbeat(&self) {
        if let Some(heartbeat_task) = self.take_heartbeat_task() {
            heartbeat_task.abort();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.stop_heartbeat();
        self.closer_task.abort();
        self.writer_task.abort();
    }
}

/// An instance's options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// See [`ClusterBuilder::client_backoff`](crate::ClusterBuilder::client_backoff).
    pub(crate) client_backoff: Duration,
    /// See [`ClusterBuilder::require_lease`](crate::ClusterBuilder::require_lease).
    pub(crate) requires_lease: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            client_backoff: CLIENT_BACKOFF,
            requires_lease: false,
        }
    }
}

/// Creates an instance that uses the given directory.
pub(crate) fn join(
    this_instance: Owner,
    directory: impl Directory,
    filter: PeersFilter,
    secret: Secret,
    options: Options,
) -> Cluster {
    join_over(
        Network::Tcp,
        this_instance,
        directory,
        filter,
        secret,
        options,
    )
}

/// Like [`join`], but on the given network.
#[allow(
    clippy::disallowed_methods,
    reason = "the heartbeat, the answer writer and the session closers run as tasks"
)]
pub(crate) fn join_over(
    network: Network,
    this_instance: Owner,
    directory: impl Directory,
    filter: PeersFilter,
    secret: Secret,
    options: Options,
) -> Cluster {
    metrics::describe();
    let directory = Limited::new(directory);
    let (sessions, relinquished) = Sessions::new(this_instance.incarnation);
    let session_closers = SessionClosers::default();
    let turned_away = Arc::new(TurnedAway::new(options.client_backoff));
    let (pending_restores, answers) = (PendingRestores::default(), Answers::new(directory.clone()));
    let heartbeat = Heartbeat::new(
        this_instance,
        directory.clone(),
        sessions.clone(),
        turned_away.clone(),
        answers.clone(),
        options.requires_lease,
    );
    let router = Arc::new(Router {
        this_instance,
        owners: OwnerCache::new(this_instance.incarnation, directory.clone()),
        relay: Relay::new(network, filter.clone(), secret.clone()),
        turned_away,
        heartbeat: heartbeat.clone(),
        sessions: sessions.clone(),
        shutdown: Shutdown::new(sessions.clone(), pending_restores.clone(), answers.clone()),
        restores: pending_restores,
        former_owners: FormerOwners::default(),
        waiting_calls: WaitingCalls::default(),
        confirmation_permits: Semaphore::new(MAX_CONFIRMATIONS),
        generations: Arc::new(Generations::new(this_instance.incarnation)),
        directory: directory.clone(),
    });
    info!(target: "mcp_cancel_cluster", address = %this_instance.address, incarnation = %this_instance.incarnation, "this instance is joining the cluster");
    Cluster {
        shared: Arc::new(Shared {
            router,
            peer_auth: Arc::new(PeerAuth::new(filter, secret)),
            writer_task: tokio::spawn(answers.write()),
            answers,
            closer_task: tokio::spawn(session_closers.clone().run(relinquished, sessions.clone())),
            session_closers,
            store: ClusterStore::new(this_instance.incarnation, directory, sessions),
            heartbeat_task: Mutex::new(Some(tokio::spawn(heartbeat.run()))),
        }),
    }
}
