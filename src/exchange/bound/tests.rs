use std::{
    pin::pin,
    sync::{Barrier, atomic::AtomicUsize},
    thread,
};

use bytes::Bytes;
use futures_util::FutureExt;
use http::Request;
use tokio::runtime::Builder;

use super::{
    super::state::{Instance, Registry},
    *,
};
use crate::{
    call::{RequestId, Scope},
    calls::{Calls, DrainReport},
    cancel::Injection,
    envelope::Frames,
    fields::Fields,
    options::Options,
};

/// A session manager that counts what it is told.
struct Counts {
    scope: u64,
    cancels: AtomicUsize,
}

impl Counts {
    fn of(scope: u64) -> Self {
        let cancels = AtomicUsize::new(0);
        Self { scope, cancels }
    }
}

impl Canceller for Counts {
    fn scope(&self) -> Scope {
        Scope::Manager(self.scope)
    }

    fn cancel(self: Arc<Self>, _call: &CallInfo, _reason: CancelReason) -> Injection {
        self.cancels.fetch_add(1, Ordering::Relaxed);
        Box::pin(async { Ok(()) })
    }
}

/// What would cancel a call that no session manager binds.
struct Replays;

impl Canceller for Replays {
    fn scope(&self) -> Scope {
        Scope::Path("/mcp".into())
    }

    fn cancel(self: Arc<Self>, _call: &CallInfo, _reason: CancelReason) -> Injection {
        Box::pin(async { Ok(()) })
    }
}

const BODY: &str = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a"}}"#;

/// An exchange of which no body was read.
fn unread(registry: &Arc<Registry>) -> Arc<Exchange> {
    let request = Request::post("/mcp").header("mcp-session-id", "s");
    let request = request.body(()).unwrap();
    let instance = Arc::new(Instance::new(Options::default(), registry.clone()));
    let fields = Fields::of(request.headers());
    Arc::new(Exchange::new(instance, &request, &fields))
}

/// An exchange whose call was read from its body.
fn settled(registry: &Arc<Registry>) -> Arc<Exchange> {
    let exchange = unread(registry);
    read(&exchange);
    exchange
}

fn read(exchange: &Arc<Exchange>) {
    let mut frames = Frames::default();
    assert!(frames.push(Bytes::from_static(BODY.as_bytes())));
    exchange.body_ended(Ok(frames));
    exchange.settle();
    assert!(exchange.info().is_some());
}

fn typed() -> CallInfo {
    let mut call = CallInfo::new(RequestId::Number(1), "tools/call");
    call.set_session(Some("s".into()));
    call
}

/// How often the session manager is told of a cancel that comes while it binds the call.
fn cancelled_while_bound(spins: usize) -> usize {
    let registry = Arc::new(Registry::new());
    let exchange = settled(&registry);
    let id = exchange.info().unwrap().id();
    let manager = Arc::new(Counts::of(7));
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let bound = scope.spawn(|| {
            barrier.wait();
            exchange.bind(typed(), manager.clone(), || 0)
        });
        barrier.wait();
        for _ in 0..spins {
            std::hint::spin_loop();
        }
        assert!(exchange.end_here(id, CancelReason::TimedOut));
        assert_eq!(bound.join().unwrap(), Some(id), "it is handed over");
    });
    exchange.opened(id);
    assert_eq!(registry.len(), 0);
    manager.cancels.load(Ordering::Relaxed)
}

/// A call is read from its body, and a session manager binds it while somebody asks for it.
fn all_the_time_while_bound(is_seen: impl Fn(&Calls, CallId) -> bool + Sync) -> bool {
    let registry = Arc::new(Registry::new());
    let calls = Calls::new(registry.clone());
    let exchange = unread(&registry);
    exchange.set_replay(Arc::new(Replays));
    read(&exchange);
    let id = exchange.info().unwrap().id();
    let barrier = Barrier::new(2);
    thread::scope(|scope| {
        let seen = scope.spawn(|| {
            barrier.wait();
            (0..50).all(|_| is_seen(&calls, id))
        });
        barrier.wait();
        exchange.bind(typed(), Arc::new(Counts::of(7)), || 0);
        seen.join().unwrap()
    })
}

#[test]
fn a_call_is_found_by_its_id_also_while_a_session_manager_binds_it() {
    let request = RequestId::Number(1);
    for round in 0..2_000 {
        let is_found = all_the_time_while_bound(|calls, id| calls.find("s", &request) == Some(id));
        assert!(is_found, "round {round}");
    }
}

#[test]
fn a_snapshot_has_a_call_once_also_while_a_session_manager_binds_it() {
    for round in 0..2_000 {
        let is_there = all_the_time_while_bound(|calls, _| calls.snapshot().len() == 1);
        assert!(is_there, "round {round}");
    }
}

/// Whose cancel would meet a call that is not accepted yet waits until it is, or is gone from there.
#[test]
fn who_waits_for_a_call_to_be_accepted_hears_that_a_session_manager_bound_it() {
    let registry = Arc::new(Registry::new());
    let exchange = unread(&registry);
    exchange.set_replay(Arc::new(Replays));
    read(&exchange);
    let id = exchange.info().unwrap().id();
    let mut decided = pin!(exchange.until_decided(id));
    assert!(decided.as_mut().now_or_never().is_none());
    assert_eq!(
        exchange.bind(typed(), Arc::new(Counts::of(7)), || 0),
        Some(id)
    );
    assert!(!exchange.at_home(|core| core.is_undecided(id)).unwrap());
    assert!(decided.now_or_never().is_some(), "it waits on");
}

/// As two session managers do, one around the other.
#[test]
fn a_call_that_two_session_managers_bind_ends() {
    for is_read_first in [false, true] {
        let registry = Arc::new(Registry::new());
        let exchange = match is_read_first {
            false => unread(&registry),
            true => settled(&registry),
        };
        let outer = exchange.bind(typed(), Arc::new(Counts::of(7)), || 0);
        let inner = exchange.bind(typed(), Arc::new(Counts::of(8)), || 0);
        let id = outer.unwrap();
        assert_eq!(inner, Some(id));
        exchange.opened(id);
        assert_eq!(registry.len(), 1);
        assert!(exchange.is_in_flight(id), "read first: {is_read_first}");
        exchange.answered(id, None);
        assert_eq!(registry.len(), 0, "read first: {is_read_first}");
    }
}

/// Drains while a session manager binds a call, which is answered after that.
fn drained_while_bound(spins: usize) -> DrainReport {
    let registry = Arc::new(Registry::new());
    let calls = Calls::new(registry.clone());
    let exchange = settled(&registry);
    let id = exchange.info().unwrap().id();
    let manager = Arc::new(Counts::of(7));
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
        exchange.bind(typed(), manager, || 0);
        exchange.opened(id);
        for _ in 0..100 {
            thread::yield_now();
        }
        exchange.answered(id, None);
        drained.join().unwrap()
    })
}

#[test]
fn a_drain_waits_for_a_call_that_a_session_manager_binds_meanwhile() {
    for round in 0..2_000 {
        let report = drained_while_bound(round % 1_000);
        assert_eq!(report.cancelled, 0, "round {round}");
    }
}

/// The server gets its request after that, and nobody else tells it that nobody waits for the answer.
#[test]
fn a_call_that_is_cancelled_while_a_session_manager_binds_it_is_cancelled_there() {
    for round in 0..5_000 {
        let told = cancelled_while_bound(round % 500);
        assert_eq!(told, 1, "round {round}: its handler runs for nobody");
    }
}
