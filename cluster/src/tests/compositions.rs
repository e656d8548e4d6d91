//! An instance with slow handlers, a concurrency limit, and responses with many fields.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use axum::{
    Router,
    extract::Request,
    middleware::{Next, from_fn, map_response},
    response::{IntoResponse as _, Response},
};
use futures_util::future::{join, join_all};
use http::StatusCode;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{InitializeRequestParams, InitializeResult, ListToolsResult, PaginatedRequestParams},
    service::RequestContext,
    transport::streamable_http_server::StreamableHttpService,
};
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Tools, Witness, serve, within};
use tokio::{
    net::TcpListener,
    sync::{Notify, OwnedSemaphorePermit, Semaphore},
    task::yield_now,
    time::timeout,
};
use tower_layer::Layer as _;
use tower_service::Service;

use super::{
    fake_owner::FakeOwner,
    node::{Node, ask, hash, pass},
    steps::{
        close_session, directory, join_as, post_echo, run_other_tasks, status, unreachable_owner,
    },
};
use crate::{
    directory::{
        LEASE_TTL, MemoryDirectory,
        faulty::{Fault, Faulty},
    },
    ids::{Incarnation, Owner},
    membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD},
};

const SECOND: Duration = Duration::from_secs(1);

/// A handler whose `initialize` waits while it is slow.
#[derive(Clone, Default)]
struct Slow {
    is_slow: Arc<AtomicBool>,
    fails: Arc<AtomicBool>,
    begun: Arc<AtomicUsize>,
    wake: Arc<Notify>,
}

impl ServerHandler for Slow {
    async fn initialize(
        &self,
        _request: InitializeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        self.begun.fetch_add(1, Ordering::SeqCst);
        while self.is_slow.load(Ordering::SeqCst) {
            self.wake.notified().await;
        }
        if self.fails.swap(false, Ordering::SeqCst) {
            return Err(ErrorData::internal_error("once", None));
        }
        Ok(self.get_info())
    }

    async fn list_tools(
        &self,
        _request: Option<PaginatedRequestParams>,
        _context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        Ok(ListToolsResult::default())
    }
}

async fn list(mcp: &Mcp, id: u32) -> u16 {
    let mut listed = mcp.request(id, "tools/list", json!({})).await;
    within("a head", listed.head()).await.status
}

/// The client has a timeout that is shorter than its handler takes to begin, and tries again. No restore has failed: each was given up
/// by its client. Then the directory fails once, or the handler does.
async fn after_hang_ups(is_handler: bool, hang_ups: u32) -> [u16; 2] {
    let directory = directory();
    let cluster = join_as(unreachable_owner(), &directory);
    let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
    let mut config = Mode::Session.config();
    config.session_store = Some(Arc::new(cluster.clone()));
    let handler = Slow::default();
    let made = handler.clone();
    let service = StreamableHttpService::new(move || Ok(made.clone()), sessions, config);
    let app = Router::new().nest_service(PATH, service);
    let served = serve(app.layer(cluster.layer())).await;
    pass(SETTLE_PERIOD + 2 * HEARTBEAT_INTERVAL).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    let router = cluster.router();
    router
        .sessions
        .relinquish_to_owner(hash(&mcp), unreachable_owner());
    router.sessions.relinquished.until_closed(hash(&mcp)).await;

    handler.is_slow.store(true, Ordering::SeqCst);
    for id in 0..hang_ups {
        let before = handler.begun.load(Ordering::SeqCst);
        let call = mcp.request(id, "tools/list", json!({})).await;
        let begun = async {
            while handler.begun.load(Ordering::SeqCst) == before {
                yield_now().await;
            }
        };
        within("initialize", begun).await;
        call.rst();
        let over = async {
            while !router.restores.is_empty() {
                yield_now().await;
            }
        };
        within("the end of the restore", over).await;
        router.sessions.relinquished.until_closed(hash(&mcp)).await;
    }
    handler.is_slow.store(false, Ordering::SeqCst);
    handler.wake.notify_waiters();
    pass(2 * SECOND).await;

    if is_handler {
        handler.fails.store(true, Ordering::SeqCst);
    } else {
        directory.set(Fault::FailsAt("load"));
    }
    let first = list(&mcp, 10).await;
    directory.set(Fault::None);
    [first, list(&mcp, 11).await]
}

#[tokio::test]
async fn a_session_whose_clients_hung_up_during_its_restore_is_not_given_up() {
    for is_handler in [false, true] {
        for hang_ups in [1, 3] {
            assert_eq!(after_hang_ups(is_handler, hang_ups).await, [503, 200]);
        }
    }
}

/// The owner has ended, and its address belongs to a server that asks for bodies, for example one of Node.js or a proxy.
#[tokio::test]
async fn a_session_whose_owner_has_ended_is_claimed_by_a_call_whatever_answers_at_its_address() {
    let directory = directory();
    let [b] = Node::several(&directory).await;
    let mut owner = FakeOwner::new(&directory).await;
    let mcp = owner.session(&b).await;
    owner.release_lease().await;
    pass(2 * LEASE_TTL).await;
    let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
    let answer = async {
        let answer = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        owner.request().await.write(answer).await;
    };
    let (head, ()) = join(within("a head", call.head()), answer).await;
    assert_eq!(head.status, 502, "it may have begun");
    assert_eq!(status(&mcp, 2).await, 200);
}

/// An instance was cut off, and is back. Another instance has claimed its session meanwhile. The call still runs, and its answer will be
/// written. If the session had been restored before on that instance, its generation is not the incarnation of a lease.
async fn resumed_while_running(is_restored: bool) -> (u16, String) {
    let memory = MemoryDirectory::default();
    let (of_a, of_b) = (Faulty::new(memory.clone()), Faulty::new(memory.clone()));
    let (a, b) = (Node::start(&of_a).await, Node::start(&of_b).await);
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    if is_restored {
        close_session(&a, &mcp).await;
        assert_eq!(status(&mcp, 7).await, 200);
        assert!(a.has(&mcp));
    }
    let named = a.detach(&mcp, 1, "first").await;
    // A is cut off from the directory and from B.
    a.peers.abort();
    of_a.set(Fault::Fails);
    pass(LEASE_TTL + HEARTBEAT_INTERVAL + SECOND).await;
    let at_b = b.client_of(&mcp);
    let mut claimed = 0;
    for id in 20..24 {
        claimed = status(&at_b, id).await;
        if claimed == 200 {
            break;
        }
        pass(SECOND).await;
    }
    assert_eq!(claimed, 200);
    assert!(b.has(&mcp));
    // It is back, and its question who has a lease is not answered for a moment.
    of_a.set(Fault::FailsAt("leases"));
    pass(2 * HEARTBEAT_INTERVAL).await;
    assert!(a.witness.is_running("first"));

    let mut resumed = at_b.resume(&named).await;
    let head = within("a head", resumed.head()).await.status;
    let body = within("the body", resumed.body_to_end()).await;
    assert!(a.witness.is_running("first"));
    // The call ends, and its answer is there.
    a.witness.release("first");
    pass(SECOND).await;
    of_a.set(Fault::None);
    pass(2 * HEARTBEAT_INTERVAL).await;
    let mut again = at_b.resume(&named).await;
    let messages = within("the answer", again.messages()).await;
    assert_eq!(messages.last().unwrap()["id"], 1);
    (head, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn a_call_that_still_runs_is_not_lost() {
    for is_restored in [false, true] {
        let (status, body) = resumed_while_running(is_restored).await;
        assert_eq!(status, 503, "{body}");
    }
}

/// Like tower's `ConcurrencyLimit`: `poll_ready` takes a permit, and the response future has it.
pub(super) struct Limit<S> {
    inner: S,
    semaphore: Arc<Semaphore>,
    permit: Option<OwnedSemaphorePermit>,
    acquiring: Option<Pin<Box<dyn Future<Output = OwnedSemaphorePermit> + Send + Sync>>>,
}

impl<S> Limit<S> {
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

impl<S: Clone> Clone for Limit<S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            semaphore: self.semaphore.clone(),
            permit: None,
            acquiring: None,
        }
    }
}

impl<S> Service<Request> for Limit<S>
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

/// Relays calls to `ServiceBuilder::new().layer(cluster.layer()).concurrency_limit(permits).service(router)`, whose responses have further
/// fields. Returns the status of each response, and how many calls have begun.
async fn relayed_through(permits: usize, calls: u32, fields: u32) -> (Vec<u16>, usize) {
    let directory = directory();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let me = Owner {
        address: listener.local_addr().unwrap(),
        incarnation: Incarnation::random(),
    };
    let cluster = join_as(me, &directory);
    let witness = Witness::new();
    let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
    let mut config = Mode::Session.config().with_sse_keep_alive(None);
    config.session_store = Some(Arc::new(cluster.clone()));
    let service = Tools::new(&witness).service_with(config, sessions);
    let router =
        test_support::router(service).layer(cluster.protect(CancelOnDisconnectLayer::new()));
    let router = router.layer(map_response(move |mut response: Response| async move {
        for at in 0..fields {
            let cookie = format!("c{at}=1").parse().unwrap();
            response.headers_mut().append("set-cookie", cookie);
        }
        response
    }));
    let app = cluster.layer().layer(Limit::new(router, permits));
    let public = serve(Router::new().fallback_service(app.clone())).await;
    let member = cluster.clone();
    let _peers = tokio::spawn(async move { member.serve_peers(listener, app).await });
    let b = Node::start(&directory).await;
    b.until_settled().await;
    let mcp = Mcp::session(public.addr, PATH).await;
    assert_eq!(status(&mcp, 1).await, 200, "direct");
    let at_b = b.client_of(&mcp);
    let relayed = (0..calls).map(|id| {
        let at_b = &at_b;
        async move {
            let label = format!("of {id}");
            let mut call = at_b.call(100 + id, "hold", json!({ "label": label })).await;
            within("a head", call.head()).await.status
        }
    });
    let relayed = join_all(relayed).await;
    run_other_tasks().await;
    let begun = (0..calls).map(|id| witness.starts(&format!("of {id}")));
    (relayed, begun.sum())
}

#[tokio::test]
async fn relayed_requests_need_one_permit_of_a_concurrency_limit_each() {
    for (permits, calls) in [(20, 5), (1, 1), (8, 32)] {
        let (answered, begun) = relayed_through(permits, calls, 0).await;
        assert!(answered.iter().all(|status| *status == 200), "{answered:?}");
        assert_eq!(begun, calls as usize);
    }
}

#[tokio::test]
async fn a_response_with_many_fields_is_relayed() {
    for fields in [80, 120, 480] {
        assert_eq!(relayed_through(20, 1, fields).await, (vec![200], 1));
    }
}

/// A layer inside has a timeout that is shorter than the handler takes to begin. No restore has failed: each was given up.
#[tokio::test]
async fn a_session_whose_restore_timed_out_in_a_layer_is_not_given_up() {
    let directory = directory();
    let cluster = join_as(unreachable_owner(), &directory);
    let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
    let mut config = Mode::Session.config();
    config.session_store = Some(Arc::new(cluster.clone()));
    let handler = Slow::default();
    let made = handler.clone();
    let service = StreamableHttpService::new(move || Ok(made.clone()), sessions, config);
    let limit = from_fn(async |request: Request, next: Next| -> Response {
        let served = timeout(SECOND, next.run(request)).await;
        served.unwrap_or_else(|_| StatusCode::GATEWAY_TIMEOUT.into_response())
    });
    let app = Router::new().nest_service(PATH, service).layer(limit);
    let served = serve(app.layer(cluster.layer())).await;
    pass(SETTLE_PERIOD + 2 * HEARTBEAT_INTERVAL).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    let router = cluster.router();
    router
        .sessions
        .relinquish_to_owner(hash(&mcp), unreachable_owner());
    router.sessions.relinquished.until_closed(hash(&mcp)).await;
    handler.is_slow.store(true, Ordering::SeqCst);
    for id in 0..3 {
        assert_eq!(list(&mcp, id).await, 504);
        pass(2 * SECOND).await;
        router.sessions.relinquished.until_closed(hash(&mcp)).await;
    }
    handler.is_slow.store(false, Ordering::SeqCst);
    handler.wake.notify_waiters();
    pass(2 * SECOND).await;
    directory.set(Fault::FailsAt("load"));
    let first = list(&mcp, 10).await;
    directory.set(Fault::None);
    assert_eq!([first, list(&mcp, 11).await], [503, 200]);
}

/// The layer is around the whole application, and around one of its routers.
#[tokio::test]
async fn a_session_is_restored_through_two_layers_of_its_cluster() {
    let directory = directory();
    let [a, b] = Node::several(&directory).await;
    let mcp = a.session().await;
    close_session(&a, &mcp).await;
    let app = a.app.clone();
    let request = post_echo(&mcp, 1);
    let answered = timeout(8 * SECOND, ask(&a, app, request)).await;
    assert_eq!(answered.map(|answered| answered.status().as_u16()), Ok(200));
    drop(b);
}
