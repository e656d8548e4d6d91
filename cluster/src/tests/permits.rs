//! A concurrency limit inside the cluster's layer. Requests that are waiting or being relayed hold none of its permits.

use std::{
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{Router, body::Body, extract::Request, response::Response, routing::get};
use futures_util::{
    FutureExt as _,
    future::{join, join_all, pending},
};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Served, Tools, Witness, serve, within};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tower_layer::Layer as _;
use tower_service::Service;

use super::{
    node::{GRACE, Node, Setup, pass},
    steps::{SECOND, directory, join_as, run_other_tasks, status},
};
use crate::{
    Cluster, ClusterService,
    directory::faulty::Faulty,
    ids::{Incarnation, Owner},
    membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD},
};

/// Like tower's `ConcurrencyLimit`: `poll_ready` acquires a permit, which the response future then holds.
pub(super) struct ConcurrencyLimit<S> {
    inner: S,
    semaphore: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
    acquiring: Option<Pin<Box<dyn Future<Output = OwnedSemaphorePermit> + Send + Sync>>>,
}

impl<S> ConcurrencyLimit<S> {
    pub(super) fn new(inner: S, permits: usize) -> Self {
        let semaphore = Arc::new(Semaphore::new(permits));
        Self {
            inner,
            semaphore,
            permit: None,
            acquiring: None,
        }
    }
}

impl<S: Clone> Clone for ConcurrencyLimit<S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            semaphore: self.semaphore.clone(),
            permit: None,
            acquiring: None,
        }
    }
}

impl<S> Service<Request> for ConcurrencyLimit<S>
where
    S: Service<Request, Response = Response, Error = Infallible, Future: Send + 'static>,
{
    type Response = Response;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response, Infallible>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if self.permit.is_none() {
            let semaphore = self.semaphore.clone();
            let acquiring = self.acquiring.get_or_insert_with(|| {
                Box::pin(async move { semaphore.acquire_owned().await.unwrap() })
            });
            self.permit = Some(ready!(acquiring.as_mut().poll(cx)));
            self.acquiring = None;
        }
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let permit = self.permit.take().expect("poll_ready first");
        let answered = self.inner.call(request);
        Box::pin(async move {
            let answered = answered.await;
            drop(permit);
            answered
        })
    }
}

/// An instance with a concurrency limit inside the cluster's layer.
///
/// Its service is `ServiceBuilder::new().layer(cluster.layer()).concurrency_limit(permits).service(router)`.
struct LimitedInstance {
    cluster: Cluster,
    app: ClusterService<ConcurrencyLimit<Router>>,
    public: Served,
    witness: Witness,
}

impl LimitedInstance {
    async fn start(directory: &Faulty, permits: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let me = Owner {
            address: listener.local_addr().unwrap(),
            incarnation: Incarnation::random(),
        };
        let cluster = join_as(me, directory);
        let witness = Witness::new();
        let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
        let mut config = Mode::Session.config().with_sse_keep_alive(None);
        config.session_store = Some(Arc::new(cluster.clone()));
        let service = Tools::new(&witness).service_with(config, sessions);
        let router = test_support::router(service)
            .route("/report", get(async || pending::<()>().await))
            .layer(cluster.protect(CancelOnDisconnectLayer::new()));
        let app = cluster
            .layer()
            .layer(ConcurrencyLimit::new(router, permits));
        let public = serve(Router::new().fallback_service(app.clone())).await;
        let (member, served) = (cluster.clone(), app.clone());
        let _peers = tokio::spawn(async move { member.serve_peers(listener, served).await });
        Self {
            cluster,
            app,
            public,
            witness,
        }
    }

    fn client(&self, session: &str) -> Mcp {
        Mcp::stateless(self.public.addr, PATH).in_session(session)
    }

    /// Starts a request that holds a permit and never ends.
    async fn begin_report(&self) {
        let mut app = self.app.clone();
        poll_fn(|cx| app.poll_ready(cx)).await.unwrap();
        tokio::spawn(app.call(report()));
        run_other_tasks().await;
    }
}

/// Starts an instance with a session, and one with `permits` permits that relays calls in that session.
///
/// Returns both instances, and one of the session's clients at each.
async fn start_relaying(permits: usize) -> (Node, LimitedInstance, Mcp, Mcp) {
    let directory = directory();
    let a = Setup::with_grace().start(&directory).await;
    let b = LimitedInstance::start(&directory, permits).await;
    pass(SETTLE_PERIOD + 3 * HEARTBEAT_INTERVAL).await;
    let mcp = a.session().await;
    let at_b = b.client(mcp.session_id().unwrap());
    assert_eq!(status(&at_b, 7).await, 200, "B relays");
    (a, b, mcp, at_b)
}

fn report() -> Request {
    Request::get("/report").body(Body::empty()).unwrap()
}

/// Resumes a call through B, while B is relaying another call.
///
/// The other call is waiting for the owner to transfer its session. If it held one of B's permits in the meantime, the resume would not be
/// relayed.
///
/// Returns whether the call is still running, and whether the resume's response head has arrived.
async fn is_running_although_resumed(permits: usize) -> (bool, bool) {
    let (a, b, mcp, at_b) = start_relaying(permits).await;
    let last_event_id = a.detach(&mcp, 1, "long").await;
    let _shutdown = a.routing().shutdown.begin();
    // Waits on A until the first call is over.
    let _waiting = at_b.call(2, "echo", json!({ "text": "x" })).await;
    run_other_tasks().await;
    // The client resumes at once.
    let mut resumed = at_b.resume(&last_event_id).await;
    run_other_tasks().await;
    pass(3 * GRACE).await;
    let is_running = a.witness.is_running("long");
    let has_head = resumed.head().now_or_never().is_some();
    drop(b.cluster);
    (is_running, has_head)
}

#[tokio::test]
async fn a_call_whose_client_has_resumed_is_not_cancelled_because_relays_have_the_permits() {
    assert_eq!(
        is_running_although_resumed(20).await,
        (true, true),
        "control"
    );
    assert!(is_running_although_resumed(1).await.0);
}

/// A is shutting down. Calls in its sessions wait on B, which has no other requests.
#[tokio::test]
async fn an_instance_that_shuts_down_does_not_block_the_others() {
    for permits in [20, 4] {
        let directory = directory();
        let a = Node::start(&directory).await;
        let b = LimitedInstance::start(&directory, permits).await;
        pass(SETTLE_PERIOD + 3 * HEARTBEAT_INTERVAL).await;
        let mcp = a.session().await;
        let at_b = b.client(mcp.session_id().unwrap());
        let _long = a.start_call(&mcp, 1, "long").await;
        let _shutdown = a.routing().shutdown.begin();
        let waiting = (10..14).map(|id| at_b.call(id, "echo", json!({ "text": "x" })));
        let _waiting = join_all(waiting).await;
        run_other_tasks().await;
        let opened = timeout(5 * SECOND, Mcp::session(b.public.addr, PATH)).await;
        assert!(
            opened.is_ok(),
            "{permits} permits: no session can be opened on B"
        );
    }
}

/// README: "Calls in flight continue on this instance, with their resumes, cancels and answers to the server's requests."
#[tokio::test]
async fn calls_that_wait_on_an_instance_in_shutdown_do_not_block_its_resumes() {
    for permits in [20, 4] {
        let directory = directory();
        let a = LimitedInstance::start(&directory, permits).await;
        let b = Node::start(&directory).await;
        b.until_settled().await;
        let mcp = Mcp::session(a.public.addr, PATH).await;
        let at_b = b.client_of(&mcp);
        let mut long = at_b.call(1, "hold", json!({ "label": "long" })).await;
        assert_eq!(long.head().await.status, 200);
        let last_event_id = long.event().await.unwrap().id.unwrap();
        a.witness.started("long").await;
        let _shutdown = a.cluster.router().shutdown.begin();
        let waiting = (10..14).map(|id| at_b.call(id, "echo", json!({ "text": "x" })));
        let _waiting = join_all(waiting).await;
        run_other_tasks().await;
        long.fin();
        let mut resumed = at_b.resume(&last_event_id).await;
        let head = timeout(8 * SECOND, resumed.head()).await;
        let head = head.map(|head| head.status);
        assert_eq!(head.ok(), Some(200), "{permits} permits");
    }
}

/// Two instances relay to each other. A relayed call needs one of its owner's permits. If the relaying instance also took one of its own,
/// the calls could block one another.
#[tokio::test]
async fn instances_with_a_concurrency_limit_can_relay_to_each_other() {
    for (permits, calls) in [(20, 4), (4, 8)] {
        let directory = directory();
        let a = LimitedInstance::start(&directory, permits).await;
        let b = LimitedInstance::start(&directory, permits).await;
        pass(SETTLE_PERIOD + 3 * HEARTBEAT_INTERVAL).await;
        let session_a = Mcp::session(a.public.addr, PATH).await;
        let session_b = Mcp::session(b.public.addr, PATH).await;
        let (through_b, through_a) = (
            b.client(session_a.session_id().unwrap()),
            a.client(session_b.session_id().unwrap()),
        );
        let through_b = join_all((0..calls).map(|id| status(&through_b, id)));
        let through_a = join_all((0..calls).map(|id| status(&through_a, id)));
        let statuses = timeout(8 * SECOND, join(through_b, through_a)).await;
        let statuses = statuses.map(|(through_b, through_a)| [through_b, through_a].concat());
        assert_eq!(
            statuses,
            Ok(vec![200; 2 * calls as usize]),
            "{permits} permits"
        );
    }
}

/// Relays calls to a limited instance. Returns each response's status and how many calls have started.
async fn relayed_through(permits: usize, calls: u32) -> (Vec<u16>, usize) {
    let directory = directory();
    let a = LimitedInstance::start(&directory, permits).await;
    let b = Node::start(&directory).await;
    b.until_settled().await;
    let mcp = Mcp::session(a.public.addr, PATH).await;
    assert_eq!(status(&mcp, 1).await, 200, "direct");
    let at_b = b.client_of(&mcp);
    let relayed = (0..calls).map(|id| {
        let at_b = &at_b;
        async move {
            let label = format!("call {id}");
            let mut call = at_b.call(100 + id, "hold", json!({ "label": label })).await;
            within("a response head", call.head()).await.status
        }
    });
    let relayed = join_all(relayed).await;
    run_other_tasks().await;
    let started = (0..calls).map(|id| a.witness.starts(&format!("call {id}")));
    (relayed, started.sum())
}

#[tokio::test]
async fn relayed_requests_need_one_permit_of_a_concurrency_limit_each() {
    for (permits, calls) in [(20, 5), (1, 1), (8, 32)] {
        let (answered, started) = relayed_through(permits, calls).await;
        assert!(answered.iter().all(|status| *status == 200), "{answered:?}");
        assert_eq!(started, calls as usize);
    }
}

/// Returns whether a call continues after its grace period when its client has resumed through B.
///
/// An unrelated request holds a permit of B's inner service, which is not ready if there is only one. To serve the resume, B only has to
/// relay it.
async fn is_running_after_resume_through(permits: usize) -> bool {
    let (a, b, mcp, at_b) = start_relaying(permits).await;
    b.begin_report().await;

    let last_event_id = a.detach(&mcp, 1, "long").await;
    let _resumed = at_b.resume(&last_event_id).await;
    run_other_tasks().await;
    pass(4 * GRACE).await;
    a.witness.is_running("long")
}

#[tokio::test]
async fn a_client_that_resumes_while_the_inner_service_is_not_ready_keeps_its_call() {
    assert!(is_running_after_resume_through(2).await, "control");
    assert!(is_running_after_resume_through(1).await);
}

/// An outer layer may clone a service that is ready.
#[tokio::test]
async fn the_clone_of_a_ready_service_takes_a_permit_of_its_own() {
    let directory = directory();
    let instance = LimitedInstance::start(&directory, 1).await;
    let mut ready = instance.app.clone();
    poll_fn(|cx| ready.poll_ready(cx)).await.unwrap();
    let mut clone = ready.clone();
    let request = Request::get("/nothing").body(Body::empty()).unwrap();
    let mut answered = Box::pin(clone.call(request));
    assert!((&mut answered).now_or_never().is_none());
    drop(ready);
    let answered = within("the permit", answered).await.unwrap();
    assert_eq!(answered.status(), 404);
}
