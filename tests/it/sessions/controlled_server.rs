//! Cancels, resumes and the end of sessions while the inner manager is slow.

use std::{
    convert::Infallible,
    future::poll_fn,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use axum::{
    Router,
    body::{Body, to_bytes},
    middleware::{Next, from_fn},
};
use futures_util::{
    FutureExt, Stream,
    future::{BoxFuture, MaybeDone, maybe_done},
};
use http::{Request, Response};
use http_body_util::BodyExt;
use mcp_cancel_on_disconnect::{
    Calls, CancelOnDisconnectLayer, CancelReason, CancellableSessionManager, Event, Grace, Limits,
    Outcome, Policy, RetainAnswers,
};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ClientJsonRpcMessage,
        ClientNotification, ContentBlock, NumberOrString, ProgressNotificationParam, ProgressToken,
    },
    service::RequestContext,
    transport::{
        Transport,
        streamable_http_server::{
            SessionManager, StreamableHttpService,
            session::{
                EventStore, ServerSseMessage, SessionId,
                local::{LocalSessionManager, LocalSessionManagerError},
            },
        },
    },
};
use serde_json::{Value, json};
use tokio::{
    runtime::Handle,
    sync::{Notify, Semaphore},
    task::yield_now,
};
use tower::ServiceExt;

use crate::{
    log::{Log, number},
    setup::{GRACE, StoppedClock, TICK, paused_runtime},
    support::{forward_sessions, handshake, within},
};

/// How long a session may be idle.
const IDLE: Duration = Duration::from_secs(60);

/// How long a resume waits for the previous one.
const RESUME_QUEUE_TIMEOUT: Duration = Duration::from_secs(4);

const SECOND: Duration = Duration::from_secs(1);

/// The delay after which the layer rechecks a deadline that it has handled late.
///
/// `RECHECK_TOO_LATE` is more than such a recheck may be late.
const RECHECK_DELAY: Duration = Duration::from_millis(100);
const RECHECK_TOO_LATE: Duration = Duration::from_millis(30);

/// How long the layer keeps a call whose end it cannot observe.
const UNOBSERVED_TTL: Duration = Duration::from_secs(60 * 60);

/// The capacity of a session's queue and of each of its streams.
const CAPACITY: usize = 2;

/// A session manager that waits at a gate and logs what it has done.
struct GatedManager {
    inner: LocalSessionManager,
    at: GateAt,
    gate: Semaphore,
    waiting: Semaphore,
    resumed: AtomicBool,
    log: Mutex<Vec<&'static str>>,
    /// If set, calls are refused.
    refuses: AtomicBool,
    /// Runs once, when the manager is asked for its event store.
    on_event_store: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

/// A request that is first polled by an observer.
type PendingRequest = Pin<Box<MaybeDone<BoxFuture<'static, Result<Response<Body>, Infallible>>>>>;

/// A call that does not reach its session until the test lets it.
type PendingCall = Pin<Box<MaybeDone<BoxFuture<'static, Response<Body>>>>>;

/// Where the gate is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum GateAt {
    /// Before a cancellation, and after a resume.
    CancelsAndResumes,
    /// Before the first resume. Later resumes pass.
    FirstResume,
    /// After a cancellation.
    AfterCancels,
    /// Before a session is closed.
    Close,
}

/// A tool that answers when the test notifies it.
#[derive(Clone, Default)]
struct WaitTool(Arc<Notify>);

impl ServerHandler for WaitTool {
    async fn call_tool(
        &self,
        _request: CallToolRequestParams,
        _context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.0.notified().await;
        Ok(CallToolResult::success(vec![ContentBlock::text("done")]).into())
    }
}

/// Like [`WaitTool`], plus a tool that sends more than fits into a stream.
#[derive(Clone, Default)]
struct FloodTool {
    waits: WaitTool,
    sending: Arc<AtomicUsize>,
}

impl ServerHandler for FloodTool {
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if request.name == "flood" {
            let token = ProgressToken(NumberOrString::String("flood".into()));
            // rmcp itself sends a stream's first event.
            for _ in 0..CAPACITY {
                self.sending.fetch_add(1, Ordering::Relaxed);
                let progress = ProgressNotificationParam::new(token.clone(), 1.0);
                let _ = context.peer.notify_progress(progress).await;
            }
        }
        self.waits.call_tool(request, context).await
    }
}

/// Like [`FloodTool`], plus a tool that records its start and its cancellation.
#[derive(Clone, Default)]
struct RecordingTool {
    floods: FloodTool,
    records: Arc<Mutex<Vec<&'static str>>>,
}

impl ServerHandler for RecordingTool {
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        if matches!(&*request.name, "note" | "note forever") {
            self.records.lock().unwrap().push("started");
            context.ct.cancelled().await;
            self.records.lock().unwrap().push("cancelled");
            if request.name == "note forever" {
                std::future::pending::<()>().await;
            }
            return Ok(CallToolResult::success(vec![]).into());
        }
        self.floods.call_tool(request, context).await
    }
}

impl FloodTool {
    /// Waits until the tool cannot send any more.
    async fn until_blocked(&self) {
        while self.sending.load(Ordering::Relaxed) < CAPACITY {
            yield_now().await;
        }
        yield_until_idle().await;
    }
}

#[tokio::test]
async fn a_session_is_closed_after_the_cancel_has_arrived() {
    let gated = Arc::new(GatedManager::new(GateAt::CancelsAndResumes));
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    let app = serve(&gated, WaitTool::default(), layer);
    let session = open(&app).await;
    let response = call(&app, &session).await;

    drop(response);
    drop(gated.waiting.acquire().await);
    let deleted = Handle::current().spawn(app.clone().oneshot(delete(&session)));
    yield_until_idle().await;
    assert_eq!(*gated.log.lock().unwrap(), [] as [&str; 0]);

    gated.gate.add_permits(1);
    let deleted = deleted.await.unwrap().unwrap();
    assert!(deleted.status().is_success(), "{}", deleted.status());
    assert_eq!(*gated.log.lock().unwrap(), ["cancelled", "closed"]);
}

/// An observer can be fast.
///
/// This one deletes the session before anything else is notified that the call has ended.
#[tokio::test]
async fn a_cancel_reaches_its_handler_though_the_session_is_deleted_as_the_call_ends() {
    for hangs_up in [false, true] {
        let gated = Arc::new(GatedManager::new(GateAt::CancelsAndResumes));
        gated.gate.add_permits(1);
        let deleting: Arc<Mutex<Option<PendingRequest>>> = Arc::default();
        let at_the_end = deleting.clone();
        let layer = CancelOnDisconnectLayer::new()
            .grace(Grace::Immediate)
            .observe(move |event: &Event<'_>| {
                if let Event::Ended { .. } = event
                    && let Some(delete) = &mut *at_the_end.lock().unwrap()
                {
                    let mut context = Context::from_waker(Waker::noop());
                    let _started = delete.as_mut().poll(&mut context);
                }
            });
        let calls = layer.calls();
        let app = serve(&gated, WaitTool::default(), layer);
        let session = open(&app).await;
        let response = call(&app, &session).await;
        let delete = request("DELETE", Some(&session));
        let delete = delete.body(Body::empty()).unwrap();
        let delete = app.clone().oneshot(delete).boxed();
        *deleting.lock().unwrap() = Some(Box::pin(maybe_done(delete)));

        if hangs_up {
            drop(response);
        } else {
            let call = calls.snapshot().pop().unwrap();
            assert!(calls.cancel(call.info().id(), CancelReason::Requested));
        }

        let mut delete = deleting.lock().unwrap().take().unwrap();
        delete.as_mut().await;
        let deleted = delete.as_mut().take_output().unwrap().unwrap();
        assert!(deleted.status().is_success(), "{}", deleted.status());
        let log = gated.log.lock().unwrap().clone();
        assert_eq!(log, ["cancelled", "closed"], "hangs up: {hangs_up}");
    }
}

/// The specification forbids reusing an id.
///
/// A client that does so must still keep its new call.
#[tokio::test]
async fn a_pending_cancel_does_not_hit_a_new_call_with_the_same_id() {
    let gated = Arc::new(GatedManager::new(GateAt::CancelsAndResumes));
    let waits = WaitTool::default();
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    let calls = layer.calls();
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    drop(call(&app, &session).await);
    gated.waiting.acquire().await.unwrap().forget();

    let mut again = Box::pin(call(&app, &session));
    for _ in 0..100 {
        assert!(
            (&mut again).now_or_never().is_none(),
            "the new call waits for the cancel"
        );
        yield_now().await;
    }
    gated.gate.add_permits(1);
    let response = again.await;
    let mut whole = Box::pin(to_bytes(response.into_body(), usize::MAX));
    let whole = loop {
        // The former handler might consume a notification.
        waits.0.notify_one();
        if let Some(whole) = (&mut whole).now_or_never() {
            break whole.unwrap();
        }
        yield_now().await;
    };
    assert!(calls.is_empty());
    let whole = String::from_utf8(whole.to_vec()).unwrap();
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
}

/// The cancellation checks which call it would hit just as the new call is about to wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_cancel_is_not_dropped_for_a_call_that_is_about_to_wait_for_it() {
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let recording = RecordingTool::default();
    let starts = AtomicUsize::new(0);
    let (unblock, blocked) = std::sync::mpsc::channel::<()>();
    let (_keep, never) = std::sync::mpsc::channel::<()>();
    let never = Mutex::new(never);
    let given_up = Arc::new(AtomicBool::new(false));
    let is_given_up = given_up.clone();
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::Immediate)
        .observe(move |event: &Event<'_>| match event {
            Event::Started { .. } if starts.fetch_add(1, Ordering::Relaxed) == 1 => {
                // Let the blocked cancel run, and give it time for its check.
                unblock.send(()).unwrap();
                let _in_time = never.lock().unwrap().recv_timeout(50 * TICK);
            }
            Event::CancelFailed { .. } => is_given_up.store(true, Ordering::Relaxed),
            _ => {}
        });
    let sessions = CancellableSessionManager::new(Shared(gated));
    let app = serve_with(sessions, recording.clone(), layer);
    let session = open(&app).await;
    // Never answers, because rmcp cancels a call with the same id as one that answers after its cancellation.
    let first = send(&app, post(call_of("note forever", 1), Some(&session))).await;
    let records = |what: &'static [&'static str]| {
        let records = recording.records.clone();
        within(format!("{what:?}"), async move {
            while *records.lock().unwrap() != what {
                yield_now().await;
            }
        })
    };
    records(&["started"]).await;
    // The only worker is blocked, so the cancellation has to wait.
    let (is_blocked, blocks) = std::sync::mpsc::channel();
    let _blocking = Handle::current().spawn(async move {
        is_blocked.send(()).unwrap();
        blocked.recv().unwrap();
    });
    blocks.recv().unwrap();
    drop(first);

    let second = send(&app, post(call_of("wait", 1), Some(&session))).await;

    records(&["started", "cancelled"]).await;
    assert!(!given_up.load(Ordering::Relaxed));
    recording.floods.waits.0.notify_one();
    let answer = whole(second).await;
    assert!(answer.contains(r#""text":"done""#), "{answer}");
}

#[tokio::test]
async fn a_request_that_the_manager_refuses_does_not_supersede_a_call() {
    let superseded = Outcome::Cancelled(CancelReason::Superseded);
    assert_refused_supersedes_nothing(CancelOnDisconnectLayer::new(), &[superseded]).await;
}

#[tokio::test]
async fn a_request_over_the_limit_does_not_supersede_a_call_whether_refused_or_not() {
    let layer = CancelOnDisconnectLayer::new().limits(Limits::default().calls(1));
    assert_refused_supersedes_nothing(layer, &[]).await;
}

/// Asserts that a refused request supersedes nothing.
///
/// `accepted` is how the call has ended once the same request is accepted.
async fn assert_refused_supersedes_nothing(layer: CancelOnDisconnectLayer, accepted: &[Outcome]) {
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let policy = |_: &_| Policy::new().grace(Grace::After(GRACE)).supersede();
    let (layer, log) = Log::of(layer.policy(policy));
    let calls = layer.calls();
    let app = serve(&gated, WaitTool::default(), layer);
    let session = open(&app).await;
    cut(&app, &session).await;
    gated.refuses.store(true, Ordering::Relaxed);

    let refused = send(&app, post(call_of("wait", 2), Some(&session))).await;

    assert!(refused.status().is_server_error(), "{}", refused.status());
    assert_eq!(log.ends(&number(1)), []);
    assert_eq!((calls.len(), calls.detached()), (1, 1));
    gated.refuses.store(false, Ordering::Relaxed);
    let second = send(&app, post(call_of("wait", 2), Some(&session))).await;
    assert_eq!(second.status(), 200);
    assert_eq!(log.ends(&number(1)), accepted);
}

#[tokio::test]
async fn a_request_that_the_manager_refuses_does_not_untrack_an_older_call_with_its_id() {
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate));
    let calls = layer.calls();
    let app = serve(&gated, WaitTool::default(), layer);
    let session = open(&app).await;
    let response = call(&app, &session).await;
    let older = calls.find(&session, &number(1)).unwrap();
    gated.refuses.store(true, Ordering::Relaxed);

    let refused = send(&app, post(call_of("wait", 1), Some(&session))).await;

    assert!(refused.status().is_server_error(), "{}", refused.status());
    assert_eq!(log.ends(&number(1)), [Outcome::Failed]);
    assert_eq!(calls.find(&session, &number(1)), Some(older));
    drop(response);
    gated.assert_log(&["cancelled"]).await;
    let disconnected = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(log.ends(&number(1)), [Outcome::Failed, disconnected]);
}

/// The inner manager has handled the cancellation but returns late.
#[tokio::test]
async fn a_cancel_by_the_client_that_is_accepted_slowly_does_not_hit_a_new_call_with_the_same_id() {
    let gated = Arc::new(GatedManager::new(GateAt::AfterCancels));
    let waits = WaitTool::default();
    let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate));
    let calls = layer.calls();
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    let _older = call(&app, &session).await;
    let cancel = json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": 1 } });
    let cancel = start_pending(send(&app, post(cancel, Some(&session)))).await;
    let newer = call(&app, &session).await;

    gated.gate.add_permits(1);
    assert_eq!(cancel.await.status(), 202);

    assert_eq!(calls.len(), 1);
    let whole = notify_and_read(&waits, newer).await;
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
    assert_eq!(log.ends(&number(1)), [Outcome::Unknown, Outcome::Completed]);
}

/// The inner manager shares its sessions with another server, or restores them on its own.
#[tokio::test]
async fn a_resume_in_time_keeps_the_call_of_a_session_that_was_opened_elsewhere() {
    let clock = StoppedClock::stop();
    let gated = Arc::new(GatedManager::new(GateAt::FirstResume));
    let waits = WaitTool::default();
    let layer = CancelOnDisconnectLayer::new().grace(Grace::After(GRACE));
    let app = serve(&gated, waits.clone(), layer);
    let tools = waits.clone();
    let tools = move || Ok(tools.clone());
    let shared = Arc::new(Shared(gated.clone()));
    let elsewhere = StreamableHttpService::new(tools, shared, Default::default());
    let elsewhere = Router::new().nest_service("/mcp", elsewhere);
    let session = open(&elsewhere).await;
    let id = cut(&app, &session).await;
    clock.advance(GRACE - TICK).await;
    let resumed = start_pending(send(&app, resume(&session, &id))).await;

    clock.advance(2 * TICK).await;
    yield_until_idle().await;
    assert_eq!(*gated.log.lock().unwrap(), [] as [&str; 0]);
    gated.gate.add_permits(1);
    let resumed = within("the resume to be answered", resumed).await;
    waits.0.notify_one();

    assert_done(resumed).await;
}

/// rmcp drops the `task` parameter and serves such a call like any other.
///
/// The call therefore ends like any other.
#[test]
fn a_typed_call_has_no_task_parameter() {
    let mut message = call_of("wait", 1);
    message["params"]["task"] = json!({ "ttl": 60_000 });
    let typed: ClientJsonRpcMessage = serde_json::from_value(message).unwrap();
    let back = serde_json::to_value(&typed).unwrap();
    assert_eq!(back["params"]["name"], "wait");
    assert_eq!(back["params"]["task"], Value::Null);
}

/// The client disconnects while its session's queue is full.
///
/// The call still reaches its handler if a service inside the layer serves requests in their own tasks, but not
/// otherwise.
#[tokio::test]
async fn a_call_whose_client_disconnects_before_its_session_has_room_does_not_keep_running() {
    for serves_in_own_tasks in [true, false] {
        let mut local = LocalSessionManager::default();
        local.session_config.channel_capacity = CAPACITY;
        let sessions = CancellableSessionManager::new(local);
        let tools = RecordingTool::default();
        let handler = tools.clone();
        let make = move || Ok(handler.clone());
        let service = StreamableHttpService::new(make, sessions.into(), Default::default());
        let router = Router::new().nest_service("/mcp", service);
        let router = if serves_in_own_tasks {
            router.layer(from_fn(async |request, next: Next| {
                Handle::current().spawn(next.run(request)).await.unwrap()
            }))
        } else {
            router
        };
        let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate));
        let calls = layer.calls();
        let app = router.layer(layer);
        let session = open(&app).await;
        let unread = send(&app, post(call_of("flood", 2), Some(&session))).await;
        within("the stream to be full", tools.floods.until_blocked()).await;
        for _ in 0..CAPACITY {
            let accepted = send(&app, post(initialized(), Some(&session))).await;
            assert_eq!(accepted.status(), 202);
        }
        let waiting = start_pending(send(&app, post(call_of("note", 3), Some(&session)))).await;
        assert_eq!(calls.len(), 2);

        drop(waiting);
        yield_until_idle().await;
        assert_eq!(*tools.records.lock().unwrap(), [] as [&str; 0]);
        drop(unread);

        let over = async {
            while !calls.is_empty() {
                yield_now().await;
            }
        };
        within("both calls to end", over).await;
        yield_until_idle().await;
        let records = tools.records.lock().unwrap().clone();
        if serves_in_own_tasks {
            assert_eq!(records, ["started", "cancelled"])
        } else {
            assert_eq!(records, [] as [&str; 0])
        }
        let disconnected = Outcome::Cancelled(CancelReason::ClientDisconnected);
        assert_eq!(log.ends(&number(3)), [disconnected]);
        assert_eq!(log.ends(&number(2)), [disconnected]);
        let usable = send(&app, post(call_of("wait", 4), Some(&session))).await;
        let usable = notify_and_read(&tools.floods.waits, usable).await;
        assert!(usable.contains(r#""text":"done""#), "{usable:?}");
    }
}

/// The inner manager has moved the call to the abandoned resume's stream.
#[tokio::test]
async fn an_answer_after_an_aborted_resume_is_retained() {
    let gated = Arc::new(GatedManager::new(GateAt::CancelsAndResumes));
    let waits = WaitTool::default();
    let layer = CancelOnDisconnectLayer::new();
    let calls = layer.calls();
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    let id = cut(&app, &session).await;

    drop_at_gate(&gated, send(&app, resume(&session, &id))).await;
    gated.gate.add_permits(2);
    waits.0.notify_one();
    while !calls.is_empty() {
        yield_now().await;
    }

    assert_done(send(&app, resume(&session, &id)).await).await;
}

/// If the session stayed half closed, a request after the DELETE would still find it.
#[tokio::test]
async fn a_session_is_closed_though_its_client_disconnects_before_the_cancel_has_arrived() {
    let gated = Arc::new(GatedManager::new(GateAt::CancelsAndResumes));
    let app = serve(&gated, WaitTool::default(), CancelOnDisconnectLayer::new());
    let session = open(&app).await;
    let _response = call(&app, &session).await;

    drop_at_gate(&gated, send(&app, delete(&session))).await;
    gated.gate.add_permits(1);

    gated.assert_log(&["cancelled", "closed"]).await;
    assert_eq!(gated.inner.sessions.read().await.len(), 0);
}

#[tokio::test]
async fn a_session_is_closed_though_its_client_disconnects_during_the_close() {
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let app = serve(&gated, WaitTool::default(), CancelOnDisconnectLayer::new());
    let session = open(&app).await;

    drop_at_gate(&gated, send(&app, delete(&session))).await;
    gated.gate.add_permits(1);

    gated.assert_log(&["closed"]).await;
    assert_eq!(gated.inner.sessions.read().await.len(), 0);
}

/// A late request waits for the session to end.
#[tokio::test]
async fn an_idle_session_is_closed_once_though_a_request_that_waits_for_that_is_dropped() {
    let clock = StoppedClock::stop();
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let sessions = CancellableSessionManager::new(Shared(gated.clone())).idle_timeout(IDLE);
    let app = serve_with(
        sessions,
        WaitTool::default(),
        CancelOnDisconnectLayer::new(),
    );
    let session = open(&app).await;
    clock.advance(IDLE + TICK).await;
    gated.waiting.acquire().await.unwrap().forget();

    for _ in 0..2 {
        drop(start_pending(send(&app, resume(&session, "0/0"))).await);
    }
    assert_eq!(gated.waiting.available_permits(), 0);
    gated.gate.add_permits(9);

    gated.assert_log(&["closed"]).await;
    let response = send(&app, resume(&session, "0/0")).await;
    assert_eq!(response.status(), 404);
}

/// The close has started on the first runtime.
#[test]
fn a_request_does_not_wait_for_a_runtime_that_stalls_while_it_closes_a_session() {
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let sessions = CancellableSessionManager::new(Shared(gated.clone())).idle_timeout(IDLE);
    let (first, second) = (paused_runtime(), paused_runtime());
    let (id, _transport) = first.block_on(async {
        let created = sessions.create_session().await.unwrap();
        gated.waiting.acquire().await.unwrap().forget();
        created
    });

    gated.gate.add_permits(9);
    let has_session = within("an answer", sessions.has_session(&id));
    assert!(!second.block_on(has_session).unwrap());

    assert_eq!(*gated.log.lock().unwrap(), ["closed"]);
    drop(first);
}

/// On a slow machine, every check of a stream is slightly late.
#[tokio::test]
async fn an_unread_stream_is_closed_though_every_check_of_it_is_late() {
    let clock = StoppedClock::stop();
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::Immediate)
        .stall_timeout(GRACE);
    let (layer, log) = Log::of(layer);
    let sessions = CancellableSessionManager::local(Default::default());
    let app = serve_with(sessions, WaitTool::default(), layer);
    let session = open(&app).await;
    let mut unread = call(&app, &session).await.into_body();
    unread.frame().await.unwrap().unwrap();

    clock.jump(GRACE + RECHECK_TOO_LATE).await;
    for _ in 0..1_000 {
        yield_until_idle().await;
        clock.jump(RECHECK_DELAY + RECHECK_TOO_LATE).await;
    }
    yield_until_idle().await;

    let disconnected = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(log.ends(&number(1)), [disconnected]);
}

#[tokio::test]
async fn an_idle_session_is_closed_though_every_check_of_it_is_late() {
    let clock = StoppedClock::stop();
    let sessions = CancellableSessionManager::local(Default::default()).idle_timeout(IDLE);
    let sessions = Arc::new(sessions);
    let service = || Ok(WaitTool::default());
    let service = StreamableHttpService::new(service, sessions.clone(), Default::default());
    let app = Router::new().nest_service("/mcp", service);
    let _session = open(&app.layer(CancelOnDisconnectLayer::new())).await;

    clock.jump(IDLE + RECHECK_TOO_LATE).await;
    for _ in 0..1_000 {
        yield_until_idle().await;
        clock.jump(RECHECK_DELAY + RECHECK_TOO_LATE).await;
    }
    yield_until_idle().await;

    assert_eq!(sessions.inner().sessions.read().await.len(), 0);
}

/// If the later resume were handled first, it would take the connected client's stream.
#[tokio::test]
async fn an_abandoned_resume_does_not_end_the_stream_of_the_next() {
    let (gated, waits, app, session, id) =
        with_cut_call(GateAt::FirstResume, CancelOnDisconnectLayer::new()).await;
    drop_at_gate(&gated, send(&app, resume(&session, &id))).await;

    let next = Handle::current().spawn(app.clone().oneshot(resume(&session, &id)));
    yield_until_idle().await;
    gated.gate.add_permits(1);
    gated.assert_log(&["resumed", "resumed"]).await;
    waits.0.notify_one();

    assert_done(next.await.unwrap().unwrap()).await;
}

/// The limit is the same whether or not the client of the hanging resume is connected.
#[tokio::test]
async fn a_resume_that_hangs_delays_the_next_one_for_a_limited_time() {
    let clock = StoppedClock::stop();
    for disconnects in [false, true] {
        let (_gated, waits, app, session, id) =
            with_cut_call(GateAt::FirstResume, CancelOnDisconnectLayer::new()).await;
        let mut hangs = Some(start_pending(send(&app, resume(&session, &id))).await);
        hangs.take_if(|_| disconnects);
        let next = start_pending(send(&app, resume(&session, &id))).await;

        clock.advance(RESUME_QUEUE_TIMEOUT + TICK).await;
        let next = within("the resume to be answered", next).await;
        waits.0.notify_one();

        assert_done(next).await;
    }
}

/// The resume has arrived in time, and the inner manager would accept it at once.
#[tokio::test]
async fn a_call_is_not_cancelled_while_a_resume_waits_for_one_that_hangs() {
    let clock = StoppedClock::stop();
    let layer = CancelOnDisconnectLayer::new().grace(Grace::After(GRACE));
    let (_gated, waits, app, session, id) = with_cut_call(GateAt::FirstResume, layer).await;
    clock.advance(GRACE - SECOND).await;
    let _hangs = start_pending(send(&app, resume(&session, &id))).await;
    let next = Handle::current().spawn(app.clone().oneshot(resume(&session, &id)));

    for _ in 0..GRACE.as_secs() {
        clock.advance(SECOND).await;
        yield_until_idle().await;
    }
    let next = within("the resume to be answered", next)
        .await
        .unwrap()
        .unwrap();
    waits.0.notify_one();

    assert_done(next).await;
}

/// The former reader ends when the manager moves the call.
///
/// The next reader has nothing to read yet.
#[tokio::test]
async fn a_call_whose_resume_was_aborted_stays_tracked() {
    let clock = StoppedClock::stop();
    let mut gated = GatedManager::new(GateAt::CancelsAndResumes);
    gated.inner.session_config.keep_alive = None;
    let gated = Arc::new(gated);
    let waits = WaitTool::default();
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Never);
    let calls = layer.calls();
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    let id = cut(&app, &session).await;
    drop_at_gate(&gated, send(&app, resume(&session, &id))).await;
    yield_until_idle().await;
    gated.gate.add_permits(9);
    yield_until_idle().await;

    clock.advance(UNOBSERVED_TTL + TICK).await;
    yield_until_idle().await;
    assert_eq!(calls.len(), 1, "the call is still tracked");
    waits.0.notify_one();
    yield_until_idle().await;

    assert!(calls.is_empty());
    assert_done(send(&app, resume(&session, &id)).await).await;
}

/// A service that serves requests in their own tasks can reach the session at any moment.
///
/// In this test it does so while the cancellation is being reported.
#[tokio::test]
async fn a_call_that_reaches_its_session_as_it_is_cancelled_is_cancelled_in_it() {
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let serving: Arc<Mutex<Option<PendingCall>>> = Arc::default();
    let (at_the_end, held) = (serving.clone(), serving.clone());
    let layer = CancelOnDisconnectLayer::new().observe(move |event: &Event<'_>| {
        if let Event::Ended { .. } = event
            && let Some(served) = &mut *at_the_end.lock().unwrap()
        {
            let mut context = Context::from_waker(Waker::noop());
            let _started = served.as_mut().poll(&mut context);
        }
    });
    let calls = layer.calls();
    let holds = from_fn(move |request: Request<Body>, next: Next| {
        let held = held.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = to_bytes(body, usize::MAX).await.unwrap();
            let is_call = str::from_utf8(&body).unwrap().contains("tools/call");
            let request = Request::from_parts(parts, Body::from(body));
            if !is_call {
                return next.run(request).await;
            }
            *held.lock().unwrap() = Some(Box::pin(maybe_done(next.run(request).boxed())));
            std::future::pending().await
        }
    });
    let sessions = CancellableSessionManager::new(Shared(gated.clone()));
    let tools = || Ok(WaitTool::default());
    let service = StreamableHttpService::new(tools, sessions.into(), Default::default());
    let app = Router::new().nest_service("/mcp", service);
    let app = app.layer(holds).layer(layer);
    let session = open(&app).await;
    let call = start_pending(send(&app, post(call_of("wait", 1), Some(&session)))).await;
    assert_eq!(calls.len(), 1, "the call is known from its body");

    drop(call);

    let mut served = serving.lock().unwrap().take().unwrap();
    served.as_mut().await;
    gated.assert_log(&["cancelled"]).await;
    assert!(calls.is_empty());
}

/// The task that has served a session might close other sessions, too.
#[tokio::test]
async fn a_task_that_has_served_a_session_closes_another() {
    let sessions = Arc::new(CancellableSessionManager::local(Default::default()));
    let (served, mut transport) = sessions.create_session().await.unwrap();
    let (other, _its_transport) = sessions.create_session().await.unwrap();
    let serves = async move {
        let first = std::pin::pin!(transport.receive()).now_or_never();
        assert!(first.is_none());
        let theirs = sessions.clone();
        let closes = async move { theirs.close_session(&served).await };
        Handle::current().spawn(closes).await.unwrap().unwrap();

        sessions.close_session(&other).await.unwrap();
        assert_eq!(sessions.inner().sessions.read().await.len(), 0);
    };
    Handle::current().spawn(serves).await.unwrap();
}

/// Both resumes are waiting for room in their session's queue.
///
/// The first client disconnects just when there is room.
#[tokio::test]
async fn a_resume_that_was_abandoned_in_a_full_queue_does_not_end_the_stream_of_the_next() {
    let mut local = LocalSessionManager::default();
    local.session_config.channel_capacity = CAPACITY;
    let sessions = CancellableSessionManager::new(local);
    let tools = FloodTool::default();
    let app = serve_with(sessions, tools.clone(), CancelOnDisconnectLayer::new());
    let session = open(&app).await;
    let id = cut(&app, &session).await;
    // The client does not read this stream, so the session waits for it.
    let unread = send(&app, post(call_of("flood", 2), Some(&session))).await;
    within("the stream to be full", tools.until_blocked()).await;
    for _ in 0..CAPACITY {
        let accepted = send(&app, post(initialized(), Some(&session))).await;
        assert_eq!(accepted.status(), 202);
    }
    let first = start_pending(send(&app, resume(&session, &id))).await;
    let next = start_pending(send(&app, resume(&session, &id))).await;

    drop(unread);
    yield_until_idle().await;
    drop(first);
    let next = within("the resume to be answered", next).await;
    yield_until_idle().await;
    tools.waits.0.notify_one();

    assert_done(next).await;
}

/// A client's calls and cancels in a session whose queue is full.
struct FullSession {
    tools: RecordingTool,
    app: Router,
    session: String,
    calls: Calls,
    log: Log,
    unread: Response<Body>,
}

impl FullSession {
    async fn with(layer: CancelOnDisconnectLayer) -> Self {
        let mut local = LocalSessionManager::default();
        local.session_config.channel_capacity = CAPACITY;
        // rmcp's own timer would end the session, and its remaining calls with it.
        local.session_config.keep_alive = None;
        let sessions = CancellableSessionManager::new(local);
        let tools = RecordingTool::default();
        let (layer, log) = Log::of(layer);
        let calls = layer.calls();
        let app = serve_with(sessions, tools.clone(), layer);
        let session = open(&app).await;
        let unread = send(&app, post(call_of("flood", 2), Some(&session))).await;
        within("the stream to be full", tools.floods.until_blocked()).await;
        for _ in 0..CAPACITY {
            let accepted = send(&app, post(initialized(), Some(&session))).await;
            assert_eq!(accepted.status(), 202);
        }
        Self {
            tools,
            app,
            session,
            calls,
            log,
            unread,
        }
    }
}

/// The client sends its cancellation while its call is waiting for room. rmcp receives the cancellation before the call.
#[tokio::test]
async fn a_call_that_its_client_cancels_before_its_session_has_room_does_not_keep_running() {
    let full = FullSession::with(CancelOnDisconnectLayer::new()).await;
    let (app, session) = (&full.app, Some(&*full.session));
    let waiting = start_pending(send(app, post(call_of("note", 3), session))).await;
    let cancel = json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": 3 } });
    let cancel = start_pending(send(app, post(cancel, session))).await;

    drop(full.unread);
    let (call, cancel) = within("both requests to be answered", async {
        tokio::join!(waiting, cancel)
    })
    .await;
    assert_eq!(cancel.status(), 202);
    yield_until_idle().await;

    assert_eq!(full.log.ends(&number(3)), [Outcome::ClientCancelled]);
    let records = full.tools.records.lock().unwrap().clone();
    assert_ne!(
        records,
        ["started"],
        "the call keeps running and is never cancelled"
    );
    drop(call);
}

/// The call has never reached its session, so its end cannot be observed.
#[tokio::test]
async fn a_call_that_may_run_on_is_untracked_though_its_client_disconnected_before_its_session_had_room()
 {
    let clock = StoppedClock::stop();
    let full = FullSession::with(CancelOnDisconnectLayer::new().grace(Grace::Never)).await;
    let (app, session) = (&full.app, Some(&*full.session));
    let waiting = start_pending(send(app, post(call_of("note", 3), session))).await;
    drop(waiting);
    yield_until_idle().await;
    // The layer keeps reading for the flooding call, which completes.
    drop(full.unread);
    let ended = async {
        while full.calls.len() > 1 {
            full.tools.floods.waits.0.notify_one();
            yield_now().await;
        }
    };
    within("the other call to end", ended).await;
    yield_until_idle().await;
    assert_eq!(*full.tools.records.lock().unwrap(), [] as [&str; 0]);

    clock.jump(2 * UNOBSERVED_TTL).await;
    yield_until_idle().await;
    clock.jump(2 * UNOBSERVED_TTL).await;
    yield_until_idle().await;

    assert_eq!(full.calls.len(), 0, "the call is kept forever");
}

/// The new call waits for the cancellation, so the cancellation must not be dropped on its account.
#[tokio::test]
async fn a_call_is_cancelled_though_its_id_is_reused_before_its_cancel_is_sent() {
    let tools = RecordingTool::default();
    let layer = CancelOnDisconnectLayer::new().grace(Grace::Immediate);
    let (layer, log) = Log::of(layer);
    let sessions = CancellableSessionManager::local(Default::default());
    let app = serve_with(sessions, tools.clone(), layer);
    let session = open(&app).await;
    let older = send(&app, post(call_of("note", 1), Some(&session))).await;
    yield_until_idle().await;
    assert_eq!(*tools.records.lock().unwrap(), ["started"]);

    drop(older);
    let newer = send(&app, post(call_of("wait", 1), Some(&session))).await;
    yield_until_idle().await;

    let disconnected = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(log.ends(&number(1)), [disconnected]);
    let records = tools.records.lock().unwrap().clone();
    assert_eq!(
        records,
        ["started", "cancelled"],
        "the older call is cancelled"
    );
    let whole = notify_and_read(&tools.floods.waits, newer).await;
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
}

/// A cancellation can take up to 10 s, and a new call waits for it that long.
#[tokio::test]
async fn a_cancel_that_is_accepted_after_seconds_does_not_hit_a_new_call_with_the_same_id() {
    let clock = StoppedClock::stop();
    let gated = Arc::new(GatedManager::new(GateAt::CancelsAndResumes));
    let waits = WaitTool::default();
    let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::Immediate));
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    drop(call(&app, &session).await);
    gated.waiting.acquire().await.unwrap().forget();
    let again = start_pending(call(&app, &session)).await;
    clock.advance(2 * SECOND).await;
    yield_until_idle().await;

    gated.gate.add_permits(1);
    gated.assert_log(&["cancelled"]).await;
    let response = within("the new call to be answered", again).await;

    let whole = notify_and_read(&waits, response).await;
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
    let disconnected = Outcome::Cancelled(CancelReason::ClientDisconnected);
    assert_eq!(log.ends(&number(1)), [disconnected, Outcome::Completed]);
}

/// A session keeps the answers to more than 256 calls whose streams its server has ended.
#[tokio::test]
async fn answers_of_many_calls_whose_streams_the_server_has_ended_are_retained() {
    const CALLS: u64 = 257;
    let clock = StoppedClock::stop();
    let sessions = Arc::new(CancellableSessionManager::local(Default::default()));
    let waits = WaitTool::default();
    let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::After(GRACE)));
    let tools = waits.clone();
    let service = move || Ok(tools.clone());
    let service = StreamableHttpService::new(service, sessions.clone(), Default::default());
    let app = Router::new().nest_service("/mcp", service).layer(layer);
    let session = open(&app).await;
    for id in 0..CALLS {
        let response = send(&app, post(call_of("wait", id + 1), Some(&session))).await;
        let handle = sessions.inner().sessions.read().await[&*session].clone();
        handle.close_sse_stream(id, None).await.unwrap();
        // The stream has its first event and then ends.
        assert!(whole(response).await.contains("id:"));
    }
    yield_until_idle().await;

    waits.0.notify_waiters();
    yield_until_idle().await;
    let mut resumed = Vec::new();
    for id in 0..CALLS {
        let answer = with_ticks(&clock, send(&app, resume(&session, &format!("0/{id}")))).await;
        resumed.push(whole(answer).now_or_never().unwrap_or_default());
    }
    clock.advance(2 * GRACE).await;

    let lost = (0..CALLS).filter(|id| log.ends(&number(*id as i64 + 1)) != [Outcome::Completed]);
    let lost: Vec<_> = lost
        .map(|id| (id + 1, log.ends(&number(id as i64 + 1))))
        .collect();
    assert_eq!(lost, []);
    assert!(resumed.iter().all(|text| text.contains(r#""text":"done""#)));
}

/// Returns the response, advancing the clock while it is pending.
async fn with_ticks(
    clock: &StoppedClock,
    request: impl Future<Output = Response<Body>>,
) -> Response<Body> {
    let ticks = async {
        loop {
            clock.advance(TICK).await;
        }
    };
    tokio::select! {
        response = request => response,
        () = ticks => unreachable!(),
    }
}

/// The client's old connection is full, and the server has not noticed that it is dead.
///
/// The client resumes on a new connection.
#[tokio::test]
async fn a_resume_gets_the_answer_that_is_queued_in_an_unread_stream() {
    let clock = StoppedClock::stop();
    let sessions = CancellableSessionManager::local(Default::default());
    let _second_reference = sessions.inner();
    let waits = WaitTool::default();
    let app = serve_with(sessions, waits.clone(), CancelOnDisconnectLayer::new());
    let session = open(&app).await;
    let mut unread = call(&app, &session).await.into_body();
    let first = unread.frame().await.unwrap().unwrap().into_data().unwrap();
    assert!(str::from_utf8(&first).unwrap().contains("id: 0/0"));
    waits.0.notify_one();
    yield_until_idle().await;

    let resumed = with_ticks(&clock, send(&app, resume(&session, "0/0"))).await;

    let whole = whole(resumed).now_or_never().unwrap_or_default();
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
    drop(unread);
}

/// The answer is sent after its stream has ended.
///
/// At that point the call is not known to be detached yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(
    clippy::disallowed_methods,
    reason = "one of two threads is held up on purpose"
)]
async fn an_answer_just_after_its_stream_has_ended_is_retained_by_detached_only() {
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let waits = WaitTool::default();
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::After(GRACE))
        .retain(RetainAnswers::Detached);
    let (layer, log) = Log::of(layer);
    let calls = layer.calls();
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    let response = call(&app, &session).await;
    let handle = gated.inner.sessions.read().await[&*session].clone();
    handle.close_sse_stream(0, None).await.unwrap();
    let in_flight = calls.clone();
    *gated.on_event_store.lock().unwrap() = Some(Box::new(move || {
        waits.0.notify_one();
        for _ in 0..1_000 {
            if in_flight.is_empty() {
                return;
            }
            std::thread::sleep(TICK);
        }
    }));

    assert!(whole(response).await.contains("id: 0/0"));

    assert!(
        gated.on_event_store.lock().unwrap().is_none(),
        "the callback has run"
    );
    assert_eq!(log.ends(&number(1)), [Outcome::Completed]);
    let resumed = whole(send(&app, resume(&session, "0/0")).await).await;
    assert!(resumed.contains(r#""text":"done""#), "{resumed:?}");
}

/// Two of a call's streams have ended.
///
/// The end of each is noticed while the end of the other is being processed.
#[tokio::test]
async fn an_answer_after_two_streams_of_its_call_have_ended_at_once_is_retained() {
    let clock = StoppedClock::stop();
    let gated = Arc::new(GatedManager::new(GateAt::Close));
    let waits = WaitTool::default();
    let (layer, log) = Log::of(CancelOnDisconnectLayer::new().grace(Grace::After(GRACE)));
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    let mut first = call(&app, &session).await.into_body();
    first.frame().await.unwrap().unwrap();
    let resumed = send(&app, resume(&session, "0/0")).await;
    let handle = gated.inner.sessions.read().await[&*session].clone();
    handle.close_sse_stream(0, None).await.unwrap();
    *gated.on_event_store.lock().unwrap() = Some(Box::new(move || {
        let first = first.frame().now_or_never();
        assert!(first.unwrap().is_none(), "the first stream has ended");
    }));

    let _delivered = whole(resumed).now_or_never().unwrap();
    assert!(
        gated.on_event_store.lock().unwrap().is_none(),
        "the callback has run"
    );
    waits.0.notify_one();
    yield_until_idle().await;
    clock.advance(2 * GRACE).await;

    assert_eq!(log.ends(&number(1)), [Outcome::Completed]);
    let resumed = with_ticks(&clock, send(&app, resume(&session, "0/0"))).await;
    let whole = whole(resumed).now_or_never().unwrap_or_default();
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
}

fn serve(gated: &Arc<GatedManager>, tools: WaitTool, layer: CancelOnDisconnectLayer) -> Router {
    serve_with(
        CancellableSessionManager::new(Shared(gated.clone())),
        tools,
        layer,
    )
}

fn serve_with<M: SessionManager, H: ServerHandler + Clone>(
    sessions: CancellableSessionManager<M>,
    tools: H,
    layer: CancelOnDisconnectLayer,
) -> Router {
    let tools = move || Ok(tools.clone());
    let service = StreamableHttpService::new(tools, sessions.into(), Default::default());
    Router::new().nest_service("/mcp", service).layer(layer)
}

async fn call(app: &Router, session: &str) -> Response<Body> {
    let response = send(app, post(call_of("wait", 1), Some(session))).await;
    assert_eq!(response.status(), 200);
    response
}

fn call_of(tool: &str, id: u64) -> Value {
    let params = json!({ "name": tool, "_meta": { "progressToken": tool } });
    json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params })
}

/// Serves a manager that is slow at this point, with a call whose client has disconnected.
///
/// Returns the id of the call's event as well.
async fn with_cut_call(
    at: GateAt,
    layer: CancelOnDisconnectLayer,
) -> (Arc<GatedManager>, WaitTool, Router, String, String) {
    let gated = Arc::new(GatedManager::new(at));
    let waits = WaitTool::default();
    let app = serve(&gated, waits.clone(), layer);
    let session = open(&app).await;
    let id = cut(&app, &session).await;
    (gated, waits, app, session, id)
}

/// Asserts that a stream has the tool's result.
async fn assert_done(response: Response<Body>) {
    let whole = whole(response).await;
    assert!(whole.contains(r#""text":"done""#), "{whole:?}");
}

/// Starts a call and disconnects its client after the first event, whose id is returned.
async fn cut(app: &Router, session: &str) -> String {
    let mut body = call(app, session).await.into_body();
    let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
    let first = String::from_utf8(first.to_vec()).unwrap();
    let id = first.lines().find_map(|line| line.strip_prefix("id:"));
    id.unwrap().trim().to_owned()
}

/// Drops a request while it is waiting at the gate.
async fn drop_at_gate(gated: &GatedManager, request: impl Future<Output = Response<Body>>) {
    tokio::select! {
        response = request => panic!("the request must not be answered: {response:?}"),
        permit = gated.waiting.acquire() => permit.unwrap().forget(),
    }
}

/// Polls a request until all other tasks are idle, by which time it must still be waiting.
async fn start_pending<R>(
    request: impl Future<Output = R> + Send,
) -> Pin<Box<impl Future<Output = R>>> {
    let mut request = Box::pin(request);
    for _ in 0..100 {
        let waits = poll_fn(|cx| Poll::Ready(request.as_mut().poll(cx).is_pending()));
        assert!(waits.await, "the request was answered");
        yield_now().await;
    }
    request
}

/// Yields until all other tasks are idle.
async fn yield_until_idle() {
    for _ in 0..100 {
        yield_now().await;
    }
}

async fn whole(response: Response<Body>) -> String {
    let whole = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    String::from_utf8(whole.to_vec()).unwrap()
}

/// Reads the whole response to a call to `wait`.
///
/// It notifies repeatedly, because another handler might consume a notification.
async fn notify_and_read(waits: &WaitTool, response: Response<Body>) -> String {
    let reading = async {
        let mut whole = Box::pin(whole(response));
        loop {
            waits.0.notify_one();
            if let Some(whole) = (&mut whole).now_or_never() {
                return whole;
            }
            yield_now().await;
        }
    };
    within("the answer", reading).await
}

fn delete(session: &str) -> Request<Body> {
    let request = request("DELETE", Some(session));
    request.body(Body::empty()).unwrap()
}

fn resume(session: &str, last_event_id: &str) -> Request<Body> {
    let request = request("GET", Some(session)).header("last-event-id", last_event_id);
    request.body(Body::empty()).unwrap()
}

async fn open(app: &Router) -> String {
    let [initialize, _] = handshake("2025-06-18");
    let response = send(app, post(initialize, None)).await;
    let session = response.headers()["mcp-session-id"]
        .to_str()
        .unwrap()
        .to_owned();
    let _whole = to_bytes(response.into_body(), usize::MAX).await;
    let accepted = send(app, post(initialized(), Some(&session))).await;
    assert_eq!(accepted.status(), 202);
    session
}

fn initialized() -> Value {
    json!({ "jsonrpc": "2.0", "method": "notifications/initialized" })
}

async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    app.clone().oneshot(request).await.unwrap()
}

fn post(message: Value, session: Option<&str>) -> Request<Body> {
    let request = request("POST", session).header("content-type", "application/json");
    request.body(Body::from(message.to_string())).unwrap()
}

fn request(method: &str, session: Option<&str>) -> http::request::Builder {
    let request = Request::builder()
        .method(method)
        .uri("/mcp")
        .header("host", "localhost")
        .header("accept", "application/json, text/event-stream");
    match session {
        Some(session) => request.header("mcp-session-id", session),
        None => request,
    }
}

impl GatedManager {
    fn new(at: GateAt) -> Self {
        Self {
            inner: LocalSessionManager::default(),
            at,
            gate: Semaphore::new(0),
            waiting: Semaphore::new(0),
            resumed: AtomicBool::new(false),
            log: Mutex::default(),
            refuses: AtomicBool::new(false),
            on_event_store: Mutex::default(),
        }
    }

    async fn pass(&self) {
        self.waiting.add_permits(1);
        self.gate.acquire().await.unwrap().forget();
    }

    fn record(&self, done: &'static str) {
        self.log.lock().unwrap().push(done);
    }

    /// Waits until the log has at least these entries, and asserts that it starts with them.
    ///
    /// There may be more, because rmcp closes a session again when its service ends.
    async fn assert_log(&self, first: &[&str]) {
        let enough = async {
            while self.log.lock().unwrap().len() < first.len() {
                yield_now().await;
            }
        };
        within(format!("{first:?}"), enough).await;
        assert!(self.log.lock().unwrap().starts_with(first));
    }
}

/// Shares one manager between the service and the test.
struct Shared(Arc<GatedManager>);

impl SessionManager for Shared {
    forward_sessions!(|this| this.0.inner =>
        create_session, initialize_session, has_session, create_standalone_stream, restore_session,
    );

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        if self.0.at == GateAt::Close {
            self.0.pass().await;
        }
        self.0.record("closed");
        self.0.inner.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        if self.0.refuses.load(Ordering::Relaxed) {
            return Err(LocalSessionManagerError::SessionNotFound(id.clone()));
        }
        self.0.inner.create_stream(id, message).await
    }

    async fn accept_message(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<(), Self::Error> {
        let cancels = matches!(
            &message,
            ClientJsonRpcMessage::Notification(message)
                if matches!(message.notification, ClientNotification::CancelledNotification(_))
        );
        if cancels {
            if self.0.at == GateAt::CancelsAndResumes {
                self.0.pass().await;
            }
            self.0.record("cancelled");
        }
        self.0.inner.accept_message(id, message).await?;
        if cancels && self.0.at == GateAt::AfterCancels {
            self.0.pass().await;
        }
        Ok(())
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let is_first = !self.0.resumed.swap(true, Ordering::Relaxed);
        if self.0.at == GateAt::FirstResume && is_first {
            self.0.pass().await;
        }
        let stream = self.0.inner.resume(id, last_event_id).await?;
        if self.0.at == GateAt::CancelsAndResumes {
            self.0.pass().await;
        }
        self.0.record("resumed");
        Ok(stream)
    }

    fn event_store(&self) -> Option<Arc<dyn EventStore>> {
        let on_event_store = self.0.on_event_store.lock().unwrap().take();
        if let Some(on_event_store) = on_event_store {
            on_event_store();
        }
        None
    }
}
