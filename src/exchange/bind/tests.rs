use std::{
    pin::pin,
    sync::{Barrier, Weak, atomic::AtomicUsize},
    thread,
    time::Duration,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::{Method, Request};
use tokio::runtime::Builder;

use super::{
    super::{
        cancel::Cancel,
        response::{BodyPlan, Head},
        state::{LayerShared, Registry},
        tap::Tap,
    },
    *,
};
use crate::{
    call::{CancelReason, RequestId, Scope},
    calls::{Calls, DrainReport},
    cancel::Injection,
    envelope::Frames,
    headers::McpHeaders,
    options::Options,
    registry::{EventIdFormat, Manager, StreamHandle},
};

/// A session manager that counts its cancels.
struct CountingManager {
    scope: u64,
    cancels: AtomicUsize,
}

impl CountingManager {
    fn new(scope: u64) -> Self {
        let cancels = AtomicUsize::new(0);
        Self { scope, cancels }
    }
}

impl Canceller for CountingManager {
    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn cancel(self: Arc<Self>, _call: &CallInfo, _reason: CancelReason) -> Injection {
        self.cancels.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(()) })
    }
}

/// Counts the cancellations of a call that no session manager has bound.
#[derive(Default)]
struct CountingReplay(AtomicUsize);

impl Canceller for CountingReplay {
    fn scope(&self) -> Scope {
        Scope::Path("/mcp".into())
    }

    fn cancel(self: Arc<Self>, _call: &CallInfo, _reason: CancelReason) -> Injection {
        self.0.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(()) })
    }
}

const BODY: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a"}}"#;

/// Returns an exchange whose body has not been parsed.
fn unparsed_exchange(registry: &Arc<Registry>) -> Arc<Exchange> {
    session_request(registry, Method::POST, None)
}

/// Returns the exchange of a request in session "s".
fn session_request(
    registry: &Arc<Registry>,
    method: Method,
    last_event_id: Option<&str>,
) -> Arc<Exchange> {
    let mut request = Request::builder().method(method).uri("/mcp");
    request = request.header("mcp-session-id", "s");
    if let Some(id) = last_event_id {
        request = request.header("last-event-id", id);
    }
    let request = request.body(()).unwrap();
    let shared = Arc::new(LayerShared {
        options: Options::default(),
        registry: registry.clone(),
    });
    let headers = McpHeaders::from_map(request.headers());
    Arc::new(Exchange::new(shared, &request, &headers))
}

/// Returns an exchange whose call has been parsed from its body.
fn parsed_exchange(registry: &Arc<Registry>) -> Arc<Exchange> {
    let exchange = unparsed_exchange(registry);
    read_body(&exchange);
    exchange
}

fn read_body(exchange: &Arc<Exchange>) {
    let mut frames = Frames::default();
    assert!(frames.push(Bytes::from_static(BODY.as_bytes())));
    exchange.on_body_ended(Ok(frames));
    exchange.parse_body();
    assert!(exchange.info().is_some());
}

fn typed_call() -> CallInfo {
    let mut call = CallInfo::new(RequestId::Number(1), "tools/call");
    call.set_session(Some("s".into()));
    call
}

/// Cancels a call while a session manager is binding it. Returns how many cancels the manager gets.
fn count_cancels_while_bound(spins: usize) -> usize {
    let registry = Arc::new(Registry::new());
    let exchange = parsed_exchange(&registry);
    let id = exchange.info().unwrap().id();
    let manager = Arc::new(CountingManager::new(7));
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let bound = scope.spawn(|| {
            barrier.wait();
            exchange.bind(typed_call(), manager.clone(), || 0)
        });
        barrier.wait();
        for _ in 0..spins {
            std::hint::spin_loop();
        }
        assert!(exchange.cancel(id, Cancel::now(CancelReason::TimedOut)));
        let bound = bound.join().unwrap().map(|bound| bound.id);
        assert_eq!(bound, Some(id), "the cancelled call is dispatched");
    });
    exchange.on_dispatched(id);
    assert_eq!(registry.len(), 0);
    manager.cancels.load(Ordering::Relaxed)
}

/// Binds a call that was parsed from its body while another thread looks it up. Returns `true` if every lookup succeeds.
fn is_always_found_while_bound(finds_call: impl Fn(&Calls, CallId) -> bool + Sync) -> bool {
    let registry = Arc::new(Registry::new());
    let calls = Calls::new(registry.clone());
    let exchange = unparsed_exchange(&registry);
    exchange.set_replay(Arc::new(CountingReplay::default()));
    read_body(&exchange);
    let id = exchange.info().unwrap().id();
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let seen = scope.spawn(|| {
            barrier.wait();
            (0..50).all(|_| finds_call(&calls, id))
        });
        barrier.wait();
        exchange.bind(typed_call(), Arc::new(CountingManager::new(7)), || 0);
        seen.join().unwrap()
    })
}

#[test]
fn a_call_is_found_by_its_id_even_while_a_session_manager_binds_it() {
    let request = RequestId::Number(1);
    for round in 0..2_000 {
        let is_found =
            is_always_found_while_bound(|calls, id| calls.find("s", &request) == Some(id));
        assert!(is_found, "round {round}");
    }
}

#[test]
fn a_snapshot_has_a_call_once_even_while_a_session_manager_binds_it() {
    for round in 0..2_000 {
        let is_there = is_always_found_while_bound(|calls, _| calls.snapshot().len() == 1);
        assert!(is_there, "round {round}");
    }
}

/// An injection that could hit another call waits until that call is accepted or has ended.
#[test]
fn a_wait_for_a_call_to_be_accepted_ends_when_a_session_manager_binds_it() {
    let registry = Arc::new(Registry::new());
    let exchange = unparsed_exchange(&registry);
    exchange.set_replay(Arc::new(CountingReplay::default()));
    read_body(&exchange);
    let id = exchange.info().unwrap().id();
    let mut wait = pin!(exchange.wait_until_accepted_or_ended(id));
    assert!(wait.as_mut().now_or_never().is_none());
    let bound = exchange.bind(typed_call(), Arc::new(CountingManager::new(7)), || 0);
    assert_eq!(bound.unwrap().id, id);
    exchange.set_pending_cancel(PendingCancel::None);
    assert!(
        !exchange
            .with_session(|session| session.is_unaccepted(id))
            .unwrap()
    );
    assert!(wait.now_or_never().is_some(), "the task is still waiting");
}

/// Binds the call twice, as two nested session managers would.
#[test]
fn a_call_that_two_session_managers_bind_ends() {
    for is_read_first in [false, true] {
        let registry = Arc::new(Registry::new());
        let exchange = if !is_read_first {
            unparsed_exchange(&registry)
        } else {
            parsed_exchange(&registry)
        };
        let outer = exchange.bind(typed_call(), Arc::new(CountingManager::new(7)), || 0);
        let inner = exchange.bind(typed_call(), Arc::new(CountingManager::new(8)), || 0);
        let id = outer.unwrap().id;
        assert_eq!(inner.unwrap().id, id);
        exchange.on_dispatched(id);
        assert_eq!(registry.len(), 1);
        assert!(exchange.is_in_flight(id), "read first: {is_read_first}");
        exchange.on_answered(id, || None);
        assert_eq!(registry.len(), 0, "read first: {is_read_first}");
    }
}

/// Drains while a session manager is binding a call that is answered afterwards.
fn drain_while_bound(spins: usize) -> DrainReport {
    let registry = Arc::new(Registry::new());
    let calls = Calls::new(registry.clone());
    let exchange = parsed_exchange(&registry);
    let id = exchange.info().unwrap().id();
    let manager = Arc::new(CountingManager::new(7));
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let drained = scope.spawn(|| {
            let runtime = Builder::new_current_thread().enable_time().build();
            let drain = calls.drain(Duration::from_secs(3_600));
            barrier.wait();
            runtime.unwrap().block_on(drain)
        });
        barrier.wait();
        for _ in 0..spins {
            std::hint::spin_loop();
        }
        exchange.bind(typed_call(), manager, || 0);
        exchange.on_dispatched(id);
        for _ in 0..100 {
            thread::yield_now();
        }
        exchange.on_answered(id, || None);
        drained.join().unwrap()
    })
}

#[test]
fn a_drain_waits_for_a_call_that_a_session_manager_binds_in_the_meantime() {
    for round in 0..2_000 {
        let report = drain_while_bound(round % 1_000);
        assert_eq!(report.cancelled, 0, "round {round}");
    }
}

/// The server gets the request after the cancellation. By then, only the session manager can cancel the call.
#[test]
fn a_call_cancelled_during_its_bind_is_cancelled_at_the_session_manager() {
    for round in 0..5_000 {
        let sent = count_cancels_while_bound(round % 500);
        assert_eq!(sent, 1, "round {round}: its handler keeps running");
    }
}

/// A session manager that has the session "s".
struct HasSession(u64);

impl Manager for HasSession {
    fn begin_use(&self, _session: &str) -> Option<Box<dyn Send + Sync>> {
        None
    }

    fn scope(&self) -> Scope {
        Scope::Manager(self.0)
    }

    fn has(&self, session: &str) -> bool {
        session == "s"
    }
}

/// A stream that counts the messages sent on it.
#[derive(Default)]
struct SentCount(AtomicUsize);

impl StreamHandle for SentCount {
    fn send(&self, _message: Bytes) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn close(&self) {}
}

/// Returns an accepted call that no session manager has bound. It has one event if `event` is set.
fn streamed_call(
    registry: &Arc<Registry>,
    event: bool,
) -> (Arc<Exchange>, Arc<CountingReplay>, Option<Box<Tap>>) {
    let exchange = unparsed_exchange(registry);
    let replay = Arc::new(CountingReplay::default());
    if exchange.may_need_replay() {
        exchange.set_replay(replay.clone());
    }
    read_body(&exchange);
    let BodyPlan::Tap(mut tap) = exchange.on_head(Head::Stream { readable: true }) else {
        panic!("its events are to be read");
    };
    if event {
        tap.read(&Bytes::from_static(b"id: 1\ndata: {}\n\n"));
    }
    (exchange, replay, Some(tap))
}

#[tokio::test(start_paused = true)]
async fn a_client_that_resumes_on_a_path_keeps_its_call() {
    let registry = Arc::new(Registry::new());
    let (exchange, _, tap) = streamed_call(&registry, true);
    let id = exchange.info().unwrap().id();
    exchange.on_dropped(DetachCause::Disconnected, tap);
    assert!(exchange.is_detached(id));
    let resume = session_request(&registry, Method::GET, Some("1"));
    let _stream = resume.on_head(Head::Stream { readable: true });
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert_eq!(exchange.signal.reason(), None);
    assert!(exchange.is_in_flight(id));
}

#[tokio::test(start_paused = true)]
async fn the_server_of_a_path_gets_the_cancel_of_a_disconnect() {
    let registry = Arc::new(Registry::new());
    let (exchange, replay, tap) = streamed_call(&registry, false);
    exchange.on_dropped(DetachCause::Disconnected, tap);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(
        exchange.signal.reason(),
        Some(CancelReason::ClientDisconnected)
    );
    assert_eq!(
        replay.0.load(Ordering::Relaxed),
        1,
        "the work keeps running"
    );
}

#[test]
fn a_delete_ends_the_calls_of_its_session_on_its_path() {
    let registry = Arc::new(Registry::new());
    let (exchange, ..) = streamed_call(&registry, true);
    let delete = session_request(&registry, Method::DELETE, None);
    let _body = delete.on_head(Head::Answer);
    assert_eq!(exchange.signal.reason(), Some(CancelReason::SessionClosed));
}

/// Returns a call that a session manager with this scope has bound, with an event from rmcp.
fn bound_call(registry: &Arc<Registry>, scope: u64) -> (Arc<Exchange>, Attachment) {
    let exchange = unparsed_exchange(registry);
    let id = exchange.bind(typed_call(), Arc::new(CountingManager::new(scope)), || 0);
    let id = id.unwrap().id;
    exchange.on_dispatched(id);
    let _body = exchange.on_head(Head::Stream { readable: true });
    exchange.with_session(|session| session.record_event_id(id, b"0/0", EventIdFormat::Rmcp));
    exchange.record_stream_meta(true, None);
    let generation = POST_GENERATION;
    let attachment = Attachment {
        exchange: exchange.clone(),
        id,
        generation,
    };
    (exchange, attachment)
}

/// Returns two managers that both have the session.
///
/// They resemble the managers of two services that restore from the same store or share an inner manager.
fn two_managers(first: u64) -> (Arc<Registry>, [Arc<HasSession>; 2]) {
    let registry = Arc::new(Registry::new());
    let managers = [first, 15 - first].map(|scope| Arc::new(HasSession(scope)));
    for manager in &managers {
        let weak: Weak<HasSession> = Arc::downgrade(manager);
        registry.add_manager(weak);
    }
    (registry, managers)
}

/// The call is in scope 8. Its client resumes within the grace period, and the resume is answered a second later.
async fn a_pending_resume_keeps_the_call(first: u64) {
    let (registry, _managers) = two_managers(first);
    let (exchange, attachment) = bound_call(&registry, 8);
    attachment.detach(DetachCause::Disconnected, false);
    assert!(exchange.is_detached(attachment.id));
    tokio::time::sleep(crate::policy::MIN_GRACE - Duration::from_millis(100)).await;
    let _resume = session_request(&registry, Method::GET, Some("0/0"));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(exchange.signal.reason(), None);
    assert!(exchange.attach(attachment.id).is_some());
}

#[tokio::test(start_paused = true)]
async fn a_pending_resume_keeps_the_call_of_the_first_of_two_managers() {
    a_pending_resume_keeps_the_call(8).await;
}

#[tokio::test(start_paused = true)]
async fn a_pending_resume_keeps_the_call_of_the_second_of_two_managers() {
    a_pending_resume_keeps_the_call(7).await;
}

/// A stream resumes the call in scope 8, and the call in scope 7 is cancelled.
fn a_resumed_stream_gets_the_error_of_its_own_call_only(first: u64) {
    let (registry, _managers) = two_managers(first);
    let (victim, _stream) = bound_call(&registry, 8);
    let (other, attachment) = bound_call(&registry, 7);
    let resume = session_request(&registry, Method::GET, Some("0/0"));
    let _body = resume.on_head(Head::Stream { readable: true });
    let id = victim.info().unwrap().id();
    let _newest = victim.attach(id);
    let sent = Arc::new(SentCount::default());
    let stream: Weak<SentCount> = Arc::downgrade(&sent);
    resume.on_stream_opened(stream);
    assert!(other.cancel(attachment.id, Cancel::now(CancelReason::TimedOut)));
    assert!(victim.is_in_flight(id));
    assert_eq!(
        sent.0.load(Ordering::Relaxed),
        0,
        "the error belongs to another call"
    );
}

#[test]
fn a_resumed_stream_gets_the_error_of_its_own_call_where_its_manager_is_the_first() {
    a_resumed_stream_gets_the_error_of_its_own_call_only(8);
}

#[test]
fn a_resumed_stream_gets_the_error_of_its_own_call_where_its_manager_is_the_second() {
    a_resumed_stream_gets_the_error_of_its_own_call_only(7);
}

#[test]
fn a_call_is_found_by_its_id_even_while_a_request_with_the_same_id_may_be_refused() {
    let registry = Arc::new(Registry::new());
    let (exchange, ..) = streamed_call(&registry, false);
    let id = exchange.info().unwrap().id();
    let calls = Calls::new(registry.clone());
    let request = RequestId::Number(1);
    assert_eq!(calls.find("s", &request), Some(id));
    let refused = unparsed_exchange(&registry);
    refused.set_replay(Arc::new(CountingReplay::default()));
    read_body(&refused);
    assert_eq!(calls.find("s", &request), Some(id), "in one session");
}

/// Asserts that a call that was answered externally is neither in flight nor cancelled.
fn assert_ended(registry: &Registry, exchange: &Arc<Exchange>, manager: &CountingManager) {
    assert_eq!(registry.len(), 0);
    if let Some(call) = exchange.info() {
        exchange.on_dispatched(call.id());
        assert!(!exchange.cancel(call.id(), Cancel::now(CancelReason::TimedOut)));
    }
    exchange.on_dropped(DetachCause::Disconnected, None);
    assert_eq!(exchange.signal.reason(), None);
    assert_eq!(manager.cancels.load(Ordering::Relaxed), 0);
}

#[test]
fn a_call_answered_before_a_session_manager_binds_it_is_not_in_flight() {
    for is_read_first in [false, true] {
        let registry = Arc::new(Registry::new());
        let manager = Arc::new(CountingManager::new(7));
        let older = unparsed_exchange(&registry);
        let older_id = older.bind(typed_call(), manager.clone(), || 0).unwrap().id;
        let exchange = if !is_read_first {
            unparsed_exchange(&registry)
        } else {
            parsed_exchange(&registry)
        };
        exchange.on_answered_externally();
        exchange.bind(typed_call(), manager.clone(), || 0);
        // The session manager may still refuse the request: see `attempts`.
        assert!(older.is_in_flight(older_id));
        older.on_answered_externally();
        assert_ended(&registry, &exchange, &manager);
    }
}

/// Runs `other` on another thread while this one reports the answer.
fn race_with_answer(exchange: &Arc<Exchange>, spins: usize, other: impl FnOnce() + Send) {
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            other();
        });
        barrier.wait();
        for _ in 0..spins {
            std::hint::spin_loop();
        }
        exchange.on_answered_externally();
    });
}

#[test]
fn a_call_answered_during_its_bind_has_ended() {
    for round in 0..2_000 {
        let registry = Arc::new(Registry::new());
        let manager = Arc::new(CountingManager::new(7));
        let exchange = match round % 2 {
            0 => unparsed_exchange(&registry),
            _ => parsed_exchange(&registry),
        };
        race_with_answer(&exchange, round % 500, || {
            exchange.bind(typed_call(), manager.clone(), || 0);
        });
        assert_ended(&registry, &exchange, &manager);
    }
}

#[test]
fn a_call_that_is_answered_while_its_body_is_read_has_ended() {
    for round in 0..1_000 {
        let registry = Arc::new(Registry::new());
        let exchange = unparsed_exchange(&registry);
        let mut frames = Frames::default();
        assert!(frames.push(Bytes::from_static(BODY.as_bytes())));
        exchange.on_body_ended(Ok(frames));
        race_with_answer(&exchange, round % 500, || exchange.parse_body());
        assert_ended(&registry, &exchange, &CountingManager::new(7));
    }
}

#[test]
fn of_an_answer_and_a_deadline_one_wins() {
    for round in 0..1_000 {
        let registry = Arc::new(Registry::new());
        let exchange = parsed_exchange(&registry);
        let id = exchange.info().unwrap().id();
        let replays = Arc::new(CountingReplay::default());
        exchange.set_replay(replays.clone());
        let mut is_cancelled = false;
        race_with_answer(&exchange, round % 500, || {
            is_cancelled = exchange
                .begin_cancel(id, Cancel::now(CancelReason::TimedOut), None)
                .is_some();
        });
        assert_eq!(
            exchange.signal.reason().is_some(),
            is_cancelled,
            "round {round}"
        );
        let sent = usize::from(is_cancelled && exchange.cancellation_error().is_some());
        assert_eq!(usize::from(is_cancelled), sent, "round {round}");
        assert_eq!(registry.len(), 0);
    }
}

/// If a client disconnects at the same moment, either the token and its hooks fire, or neither.
#[test]
fn of_an_answer_and_a_plain_disconnect_only_one_takes_effect() {
    for round in 0..1_000 {
        let registry = Arc::new(Registry::new());
        let request = Request::get("/").body(()).unwrap();
        let shared = Arc::new(LayerShared {
            options: Options::default(),
            registry,
        });
        let headers = McpHeaders::from_map(request.headers());
        let exchange = Arc::new(Exchange::new(shared, &request, &headers));
        let linked = tokio_util::sync::CancellationToken::new();
        exchange.link(linked.clone());
        race_with_answer(&exchange, round % 500, || {
            exchange.on_dropped(DetachCause::Disconnected, None);
        });
        assert_eq!(
            exchange.signal.reason().is_some(),
            linked.is_cancelled(),
            "round {round}"
        );
    }
}
