//! An instance with slow handlers, and with layers around its service.

use std::{
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use axum::{
    Extension, Router,
    body::Body,
    extract::Request,
    middleware::{Next, from_fn},
    response::IntoResponse as _,
};
use futures_util::{future::join, stream};
use http::{Method, StatusCode};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{InitializeRequestParams, InitializeResult, ListToolsResult, PaginatedRequestParams},
    service::RequestContext,
    transport::streamable_http_server::StreamableHttpService,
};
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Served, serve, within};
use tokio::{
    sync::Notify,
    task::yield_now,
    time::{sleep, timeout},
};

use super::{
    fake_owner::FakeOwner,
    node::{Node, call_app, hash, pass},
    steps::{SECOND, close_session, directory, join_as, post_echo, status, unreachable_owner},
};
use crate::{
    Cluster,
    directory::{
        LEASE_TTL, MemoryDirectory,
        faulty::{Fault, Faulty},
    },
    ids::SessionHash,
    manager::CloseSession,
    membership::heartbeat::{HEARTBEAT_INTERVAL, SETTLE_PERIOD},
};

/// A handler whose `initialize` blocks while `is_slow` is set.
#[derive(Clone, Default)]
struct SlowHandler {
    is_slow: Arc<AtomicBool>,
    fails_once: Arc<AtomicBool>,
    started: Arc<AtomicUsize>,
    wake: Arc<Notify>,
}

impl SlowHandler {
    fn block(&self) {
        self.is_slow.store(true, Ordering::SeqCst);
    }

    fn unblock(&self) {
        self.is_slow.store(false, Ordering::SeqCst);
        self.wake.notify_waiters();
    }

    /// Waits until more than `before` `initialize` requests have started.
    async fn until_started_after(&self, before: usize) {
        let started = async {
            while self.started.load(Ordering::SeqCst) == before {
                yield_now().await;
            }
        };
        within("initialize", started).await;
    }
}

impl ServerHandler for SlowHandler {
    async fn initialize(
        &self,
        _request: InitializeRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        self.started.fetch_add(1, Ordering::SeqCst);
        while self.is_slow.load(Ordering::SeqCst) {
            self.wake.notified().await;
        }
        if self.fails_once.swap(false, Ordering::SeqCst) {
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

/// A manager without sessions, which takes this long for each lookup and each close.
#[derive(Default)]
struct OtherManager {
    has_delay: Duration,
    close_delay: Duration,
}

#[async_trait]
impl CloseSession for OtherManager {
    async fn has(&self, _session: &str) -> bool {
        sleep(self.has_delay).await;
        false
    }

    async fn close(&self, _session: &str) {
        sleep(self.close_delay).await;
    }
}

/// An instance running a [`SlowHandler`]. The next request in its session has to restore that session.
struct SlowInstance {
    directory: Faulty,
    cluster: Cluster,
    handler: SlowHandler,
    served: Served,
    mcp: Mcp,
}

impl SlowInstance {
    async fn start(wrap: fn(Router) -> Router) -> Self {
        Self::start_after(&Arc::default(), wrap).await
    }

    /// Starts an instance with another manager, which gets to close sessions first.
    ///
    /// Opens a session, which the instance then relinquishes and closes.
    async fn start_after(other: &Arc<OtherManager>, wrap: fn(Router) -> Router) -> Self {
        let directory = directory();
        let cluster = join_as(unreachable_owner(), &directory);
        cluster.add_closer(Arc::<OtherManager>::downgrade(other));
        let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
        let mut config = Mode::Session.config();
        config.session_store = Some(Arc::new(cluster.clone()));
        let handler = SlowHandler::default();
        let handler_clone = handler.clone();
        let service =
            StreamableHttpService::new(move || Ok(handler_clone.clone()), sessions, config);
        let app = wrap(Router::new().nest_service(PATH, service));
        let app = app.layer(Extension(cluster.clone())).layer(cluster.layer());
        let served = serve(app).await;
        pass(SETTLE_PERIOD + 2 * HEARTBEAT_INTERVAL).await;
        let mcp = Mcp::session(served.addr, PATH).await;
        let sessions = &cluster.router().sessions;
        sessions.relinquish_to_owner(hash(&mcp), unreachable_owner());
        sessions.relinquished.wait_until_closed(hash(&mcp)).await;
        Self {
            directory,
            cluster,
            handler,
            served,
            mcp,
        }
    }

    /// Waits until no restores are pending and the session is closed.
    async fn until_closed(&self) {
        let router = self.cluster.router();
        let ended = async {
            while !router.restores.is_empty() {
                yield_now().await;
            }
        };
        within("the restore to end", ended).await;
        let closed = router
            .sessions
            .relinquished
            .wait_until_closed(hash(&self.mcp));
        closed.await;
    }
}

/// Adds a layer that sends response heads while the handler is still starting.
fn with_early_heads(app: Router) -> Router {
    app.layer(CancelOnDisconnectLayer::new().commit_after(Duration::from_millis(100)))
}

async fn list(mcp: &Mcp, id: u32) -> u16 {
    let mut listed = mcp.request(id, "tools/list", json!({})).await;
    within("a response head", listed.head()).await.status
}

/// Returns the statuses of the next two requests after this many abandoned restores.
///
/// The handler takes longer to start than the client waits before retrying. No restore has failed, as the client has given up on each of
/// them. Then the directory fails once, or the handler if `handler_fails`.
async fn statuses_after_disconnects(handler_fails: bool, disconnects: u32) -> [u16; 2] {
    let instance = SlowInstance::start(|app| app).await;
    let SlowInstance {
        directory,
        handler,
        mcp,
        ..
    } = &instance;
    handler.block();
    for id in 0..disconnects {
        let before = handler.started.load(Ordering::SeqCst);
        let call = mcp.request(id, "tools/list", json!({})).await;
        handler.until_started_after(before).await;
        call.rst();
        instance.until_closed().await;
    }
    handler.unblock();
    pass(2 * SECOND).await;

    if handler_fails {
        handler.fails_once.store(true, Ordering::SeqCst);
    } else {
        directory.set(Fault::FailsAt("load"));
    }
    let first = list(mcp, 10).await;
    directory.set(Fault::None);
    [first, list(mcp, 11).await]
}

#[tokio::test]
async fn a_session_whose_clients_disconnected_during_its_restore_is_not_given_up() {
    for handler_fails in [false, true] {
        for disconnects in [1, 3] {
            assert_eq!(
                statuses_after_disconnects(handler_fails, disconnects).await,
                [503, 200]
            );
        }
    }
}

/// The owner has exited, and its address now belongs to another server, such as a proxy, that asks for bodies.
#[tokio::test]
async fn a_session_whose_owner_has_ended_is_claimed_by_a_call_whatever_answers_at_its_address() {
    let (_directory, _b, mut owner, mcp) = FakeOwner::with_session().await;
    owner.release_lease().await;
    pass(2 * LEASE_TTL).await;
    let mut call = mcp.call(1, "echo", json!({ "text": "x" })).await;
    let answer = async {
        let answer = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";
        owner.request().await.write(answer).await;
    };
    let (head, ()) = join(within("a response head", call.head()), answer).await;
    assert_eq!(head.status, 502, "the call may have started");
    assert_eq!(status(&mcp, 2).await, 200);
}

/// Returns the response to a resume at the other instance before the call ends: status and body.
///
/// An instance has been cut off, and reaches the directory again `cut_off_for` after another instance claimed its session. The call is
/// still running, and its answer has yet to be written. If the session was restored on the first instance, its generation is not the
/// incarnation of a lease.
async fn resumed_while_running(is_restored: bool, cut_off_for: Duration) -> (u16, String) {
    let memory = MemoryDirectory::default();
    let (link_a, link_b) = (Faulty::new(memory.clone()), Faulty::new(memory.clone()));
    let (a, b) = (Node::start(&link_a).await, Node::start(&link_b).await);
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    if is_restored {
        close_session(&a, &mcp).await;
        assert_eq!(status(&mcp, 7).await, 200);
        assert!(a.has(&mcp));
    }
    let last_event_id = a.detach(&mcp, 1, "first").await;
    // Cut A off from the directory and from B.
    a.peers.abort();
    link_a.set(Fault::Fails);
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
    pass(cut_off_for).await;
    // A can reach the directory again, but cannot read the leases at first.
    link_a.set(Fault::FailsAt("leases"));
    pass(2 * HEARTBEAT_INTERVAL).await;
    assert!(a.witness.is_running("first"));

    let mut resumed = at_b.resume(&last_event_id).await;
    let head = within("a response head", resumed.head()).await.status;
    let body = within("the body", resumed.body_to_end()).await;
    assert!(a.witness.is_running("first"));
    // The call ends, and its answer is stored.
    a.witness.release("first");
    pass(SECOND).await;
    link_a.set(Fault::None);
    pass(2 * HEARTBEAT_INTERVAL).await;
    let mut resumed_later = at_b.resume(&last_event_id).await;
    let messages = within("the answer", resumed_later.messages()).await;
    assert_eq!(messages.last().unwrap()["id"], 1);
    (head, String::from_utf8_lossy(&body).into_owned())
}

#[tokio::test]
async fn a_call_that_still_runs_is_not_lost() {
    for (is_restored, cut_off_for) in [(false, 0), (true, 0), (false, 20), (true, 20)] {
        let (status, body) = resumed_while_running(is_restored, cut_off_for * SECOND).await;
        assert_eq!(status, 503, "{cut_off_for} s: {body}");
    }
}

/// Adds a layer whose timeout is shorter than the handler takes to start.
fn with_timeout(app: Router, status: StatusCode) -> Router {
    app.layer(from_fn(move |request: Request, next: Next| async move {
        let served = timeout(SECOND, next.run(request)).await;
        served.unwrap_or_else(|_| status.into_response())
    }))
}

/// No restore has failed, as an inner layer has given up on each of them.
#[tokio::test]
async fn a_session_whose_restore_timed_out_in_a_layer_is_not_given_up() {
    let gateway_timeout: fn(_) -> _ = |app| with_timeout(app, StatusCode::GATEWAY_TIMEOUT);
    let internal_error: fn(_) -> _ = |app| with_timeout(app, StatusCode::INTERNAL_SERVER_ERROR);
    for (expected, layer) in [(504, gateway_timeout), (503, internal_error)] {
        let instance = SlowInstance::start(layer).await;
        let SlowInstance {
            directory,
            handler,
            mcp,
            ..
        } = &instance;
        handler.block();
        for id in 0..3 {
            assert_eq!(list(mcp, id).await, expected);
            pass(2 * SECOND).await;
            instance.until_closed().await;
        }
        handler.unblock();
        pass(2 * SECOND).await;
        directory.set(Fault::FailsAt("load"));
        let first = list(mcp, 10).await;
        directory.set(Fault::None);
        assert_eq!([first, list(mcp, 11).await], [503, 200]);
    }
}

/// The response head is sent while the handler is starting. Requests that arrive in the meantime wait until it has started.
#[tokio::test]
async fn a_restore_continues_after_the_head_of_its_response() {
    let instance = SlowInstance::start(with_early_heads).await;
    let SlowInstance { handler, mcp, .. } = &instance;
    let router = instance.cluster.router();
    handler.block();
    let mut first = mcp.request(1, "tools/list", json!({})).await;
    assert_eq!(within("a response head", first.head()).await.status, 200);
    assert!(router.restores.contains(hash(mcp)));
    let mut second = mcp.request(2, "tools/list", json!({})).await;
    let until_both_wait = async {
        while router.restores.requests(hash(mcp)) < 2 {
            yield_now().await;
        }
    };
    within("the second request", until_both_wait).await;
    handler.unblock();
    assert_eq!(within("a response head", second.head()).await.status, 200);
    for response in [&mut first, &mut second] {
        let answer = within("an answer", response.answer()).await.unwrap();
        assert!(answer["result"].is_object(), "{answer}");
    }
    assert_eq!(handler.started.load(Ordering::SeqCst), 2);
    assert!(router.restores.is_empty());
}

/// The response head is sent before the handler refuses the restored session.
#[tokio::test]
async fn a_session_that_cannot_be_restored_is_reported_missing_even_after_early_heads() {
    let instance = SlowInstance::start(with_early_heads).await;
    let SlowInstance { handler, mcp, .. } = &instance;
    for id in 1..=3 {
        handler.block();
        let mut listed = mcp.request(id, "tools/list", json!({})).await;
        assert_eq!(within("a response head", listed.head()).await.status, 200);
        handler.fails_once.store(true, Ordering::SeqCst);
        handler.unblock();
        let answer = within("an answer", listed.answer()).await.unwrap();
        assert!(answer["error"].is_object(), "{answer}");
        instance.until_closed().await;
    }
    assert_eq!(list(mcp, 4).await, 404);
}

/// An inner layer answers one of the session's requests with its own stream, so rmcp does not restore the session.
#[tokio::test]
async fn a_stream_from_a_layer_does_not_lock_its_session() {
    let streams = |app: Router| {
        app.layer(from_fn(async |request: Request, next: Next| {
            if request.method() == Method::GET {
                return Body::from_stream(stream::pending::<Result<&str, Infallible>>())
                    .into_response();
            }
            next.run(request).await
        }))
    };
    let instance = SlowInstance::start(streams).await;
    let SlowInstance { mcp, .. } = &instance;
    let router = instance.cluster.router();
    let mut stream = mcp.listen().await;
    assert_eq!(within("a response head", stream.head()).await.status, 200);
    assert!(router.restores.contains(hash(mcp)));
    let (status, ()) = join(list(mcp, 1), pass(61 * SECOND)).await;
    assert_eq!(status, 200);
}

/// A session is relinquished, but not yet closed, while one of its requests is in a layer.
#[tokio::test]
async fn a_request_does_not_begin_in_a_session_that_is_about_to_be_closed() {
    let relinquishes = |app: Router| {
        app.layer(from_fn(async |request: Request, next: Next| {
            if request.headers().contains_key("x-late") {
                let cluster = request.extensions().get::<Cluster>().unwrap();
                let id = request.headers()["mcp-session-id"].to_str().unwrap();
                let sessions = &cluster.router().sessions;
                sessions.relinquish_to_owner(SessionHash::of(id), unreachable_owner());
            }
            next.run(request).await
        }))
    };
    let other = Arc::new(OtherManager {
        close_delay: SECOND,
        ..OtherManager::default()
    });
    let instance = SlowInstance::start_after(&other, relinquishes).await;
    assert_eq!(list(&instance.mcp, 1).await, 200);
    let late = instance.mcp.clone().header("x-late", "1");
    let (status, ()) = join(list(&late, 2), pass(2 * SECOND)).await;
    assert_eq!(status, 503);
}

/// A layer delays a request, and in the meantime its session is closed, as happens to idle ones. rmcp makes a second request wait for the
/// first, whose client disconnects while another manager is being asked for the session.
#[tokio::test]
async fn a_request_that_waits_for_an_abandoned_one_must_be_sent_again() {
    let delays = |app: Router| {
        app.layer(from_fn(async |request: Request, next: Next| {
            if request.headers().contains_key("x-late") {
                sleep(SECOND).await;
            }
            next.run(request).await
        }))
    };
    let other = Arc::new(OtherManager {
        has_delay: SECOND,
        ..OtherManager::default()
    });
    let instance = SlowInstance::start_after(&other, delays).await;
    let SlowInstance { cluster, mcp, .. } = &instance;
    let router = cluster.router();
    let restored = async |id| join(list(mcp, id), pass(2 * SECOND)).await.0;
    assert_eq!(restored(1).await, 200);
    let late = mcp.clone().header("x-late", "1");
    let first = late.request(2, "tools/list", json!({})).await;
    pass(SECOND / 2).await;
    router
        .sessions
        .relinquish_to_owner(hash(mcp), unreachable_owner());
    router
        .sessions
        .relinquished
        .wait_until_closed(hash(mcp))
        .await;
    pass(SECOND * 7 / 10).await;
    let mut second = mcp.request(3, "tools/list", json!({})).await;
    pass(SECOND / 5).await;
    assert!(router.restores.contains(hash(mcp)), "control");
    first.rst();
    let head = within("a response head", second.head()).await;
    assert_eq!(
        (head.status, head.header("retry-after").is_some()),
        (503, true)
    );
    assert_eq!(restored(4).await, 200);
}

/// One layer wraps the whole application, the other one of its routers.
#[tokio::test]
async fn a_session_is_restored_through_two_layers_of_its_cluster() {
    let (_directory, [a, b], mcp) = Node::with_session().await;
    close_session(&a, &mcp).await;
    let app = a.app.clone();
    let request = post_echo(&mcp, 1);
    let answered = timeout(8 * SECOND, call_app(&a, app, request)).await;
    assert_eq!(answered.map(|answered| answered.status().as_u16()), Ok(200));
    drop(b);
}

/// A client does not read the response to the request that restores its session, so its HTTP/2 window is closed. The handler takes 20 s to
/// start, and in the meantime the layer sends a comment, which has to wait for the window. No task is driving the restore.
#[tokio::test]
async fn a_client_that_reads_nothing_does_not_lock_its_session() {
    for reads_response in [true, false] {
        let instance = SlowInstance::start(with_early_heads).await;
        let SlowInstance { handler, mcp, .. } = &instance;
        let router = instance.cluster.router();
        handler.block();
        let window = (!reads_response).then_some(0);
        let mut h2 = test_support::h2::H2::open_with_window(instance.served.addr, window).await;
        let message = json!({ "jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {} });
        let mut first = h2.send(&mcp.message_request(&message)).await;
        assert_eq!(first.head().await.status, 200);
        assert!(router.restores.contains(hash(mcp)));
        pass(20 * SECOND).await;
        handler.unblock();
        let mut second = mcp.request(2, "tools/list", json!({})).await;
        pass(180 * SECOND).await;
        let head = timeout(SECOND, second.head()).await;
        assert!(
            head.is_ok(),
            "no answer for three minutes, reads: {reads_response}"
        );
    }
}

/// Two attempts to restore a session have failed. During the third the instance is cut off, and another instance claims the session.
#[tokio::test]
async fn a_session_that_another_instance_has_claimed_is_not_ended_by_a_failed_restore() {
    let instance = SlowInstance::start(|app| app).await;
    let SlowInstance {
        handler,
        mcp,
        directory,
        ..
    } = &instance;
    let router = instance.cluster.router();
    for id in 1..=2 {
        handler.fails_once.store(true, Ordering::SeqCst);
        assert_eq!(list(mcp, id).await, 503);
        instance.until_closed().await;
    }
    handler.block();
    let before = handler.started.load(Ordering::SeqCst);
    let mut third = mcp.request(3, "tools/list", json!({})).await;
    handler.until_started_after(before).await;
    directory.set(Fault::Fails);
    pass(LEASE_TTL + SECOND).await;
    let other = FakeOwner::new(directory).await;
    let memory = &directory.memory;
    let claimed =
        crate::directory::contract::claim_from(memory, hash(mcp), router.this_instance, other.me);
    assert_eq!(claimed.await, crate::directory::Claim::Won);
    directory.set(Fault::None);
    for _ in 0..5 {
        pass(SECOND).await;
        other.renew_lease().await;
    }
    handler.fails_once.store(true, Ordering::SeqCst);
    handler.unblock();
    pass(SECOND).await;
    let status = within("a response head", third.head()).await.status;
    pass(2 * SECOND).await;
    assert_eq!(
        (status, memory.owner(hash(mcp))),
        (503, Some(other.me.incarnation))
    );
}
