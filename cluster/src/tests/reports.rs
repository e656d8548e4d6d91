//! What instances report to one another about clients, leases and sessions.
//!
//! The reports are late or lost, or a clock steps.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use serde_json::json;
use test_support::within;
use tokio::{sync::watch, time::Instant};

use super::{
    fake_owner::FakeOwner,
    node::{GRACE, Node, Setup, hash, pass},
    steps::{MS, SECOND, SlowLink, directory, phases, status, until, until_heartbeat},
};
use crate::directory::{
    Claim, Directory as _, DirectoryError, MemoryDirectory,
    contract::claim_from,
    faulty::{ErasedRequest, Fault, Faulty, Gate},
};

/// Returns the phases in which a call is cancelled although its client resumed in time.
///
/// B's requests arrive `late`, and the directory's clock is set back by `step`, `before` the grace period ends. The client resumes at B 100
/// ms before its grace period ends and gets 503. If `before` is less than 100 ms, the clock is not set back.
async fn cancelled_phases(late: Duration, step: Duration, before: Duration) -> Vec<u32> {
    let mut cancelled = Vec::new();
    for phase in phases() {
        let link = SlowLink(Arc::default(), late);
        let link_a = Faulty::new(MemoryDirectory::default());
        let link_b = Faulty::new(link_a.memory.clone()).behind(link.clone());
        let a = Setup::with_grace().start(&link_a).await;
        let b = Setup::without_peers().start(&link_b).await;
        a.until_settled().await;
        b.until_settled().await;
        link.0.store(true, SeqCst);
        pass(20 * SECOND).await;
        let mcp = a.session().await;
        pass(phase * 100 * MS).await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        let started = Instant::now();
        if before >= 100 * MS {
            until(started, GRACE - before).await;
            link_a.memory.set_clock_back(step);
        }
        until(started, GRACE - 100 * MS).await;
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        pass(1_500 * MS).await;
        assert_eq!(resumed.head().await.status, 503);
        pass(6 * SECOND).await;
        let leases = link_a.memory.leases().await.unwrap();
        assert!(leases.get(b.me.incarnation).is_some());
        if !a.witness.is_running("a") {
            cancelled.push(phase);
        }
    }
    cancelled
}

#[tokio::test]
async fn setting_the_clock_back_does_not_make_a_heartbeat_newer_than_it_is() {
    let mut results = Vec::new();
    for (late, step, before) in [
        (450, 0, 1_000),
        (450, 900, 1_000),
        (450, 900, 200),
        (1_000, 0, 1_000),
        (1_000, 900, 1_000),
        (1_000, 900, 5_000),
        (1_000, 500, 5_000),
    ] {
        let cancelled = cancelled_phases(late * MS, step * MS, before * MS).await;
        results.push((late, step, before, cancelled));
    }
    assert!(
        results.iter().all(|(.., cancelled)| cancelled.is_empty()),
        "{results:?}"
    );
}

/// A lookup by B takes 1 s. The client resumes at B 100 ms before its grace period ends, but does not get its 503 until 400 ms after. A
/// heartbeat from B was executed shortly before that, and the next one takes 1 s. In the meantime the directory's clock is set back.
#[tokio::test]
async fn setting_the_clock_back_does_not_make_an_executed_heartbeat_newer() {
    let mut cancelled = Vec::new();
    for (step, phase) in [0, 900]
        .into_iter()
        .flat_map(|step| phases().map(move |phase| (step, phase)))
    {
        let link_a = directory();
        let link = SlowLink(Arc::default(), SECOND);
        let a = Setup::with_grace().start(&link_a).await;
        let b = Setup::without_peers()
            .start(&link_a.behind(link.clone()))
            .await;
        a.until_settled().await;
        b.until_settled().await;
        let mcp = a.session().await;
        pass(SECOND + phase * 100 * MS).await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        let started = Instant::now();
        until(started, GRACE - 100 * MS).await;
        link.0.store(true, SeqCst);
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        until(started, GRACE).await;
        link.0.store(false, SeqCst);
        until(started, GRACE + 350 * MS).await;
        link.0.store(true, SeqCst);
        pass(150 * MS).await;
        link_a.memory.set_clock_back(step * MS);
        until(started, GRACE + 8 * SECOND).await;
        assert_eq!(resumed.head().await.status, 503);
        if !a.witness.is_running("a") {
            cancelled.push((step, phase));
        }
    }
    assert_eq!(cancelled, []);
}

/// Holds back the reply to the next request with the given name.
#[derive(Debug, Clone)]
struct HoldsReply(Arc<Mutex<Option<&'static str>>>, watch::Sender<u32>);

impl Gate for HoldsReply {
    fn pass(&self, command: &'static str, request: ErasedRequest) -> ErasedRequest {
        let holds = self
            .0
            .lock()
            .unwrap()
            .take_if(|held| *held == command)
            .is_some();
        if !holds {
            return request;
        }
        let state = self.1.clone();
        Box::pin(async move {
            let reply = request.await;
            state.send_modify(|state| *state = 1);
            drop(state.subscribe().wait_for(|state| *state == 2).await);
            reply
        })
    }
}

/// D has claimed a session from A, and relinquishes it while shutting down. A has found D's record. While A is reading the leases, it
/// claims the session from D for a call, which starts.
#[tokio::test]
async fn a_session_reclaimed_in_the_meantime_is_not_relinquished() {
    let directory = directory();
    let gate = HoldsReply(Arc::default(), watch::Sender::new(0));
    let link_a = directory.behind(gate.clone());
    let a = Node::start(&link_a).await;
    a.until_settled().await;
    let mcp = a.session().await;
    let mut d = FakeOwner::new(&directory).await;
    let claimed = claim_from(&directory.memory, hash(&mcp), a.me, d.me).await;
    assert_eq!(claimed, Claim::Won);
    *gate.0.lock().unwrap() = Some("leases");
    a.routing().sessions.write_again(hash(&mcp));
    let held = async { drop(gate.1.subscribe().wait_for(|state| *state == 1).await) };
    // The session is queued, to be written at the next wake-up.
    a.routing().sessions.on_deleted("another");
    within("the leases to be read", held).await;
    assert!(a.routing().sessions.has_contested());
    let mut call = mcp.call(1, "hold", json!({ "label": "a" })).await;
    d.head().await.answer_moved(d.me).await;
    within("the call", a.witness.started("a")).await;
    gate.1.send_modify(|state| *state = 2);
    pass(SECOND).await;
    assert!(a.witness.is_running("a"));
    a.witness.release("a");
    assert_eq!(call.answer().await.unwrap()["id"], 1);
}

/// Loses heartbeats while set, as if their connection had been reset.
#[derive(Debug, Clone, Default)]
struct LosesHeartbeats(Arc<AtomicBool>, Arc<AtomicUsize>);

impl Gate for LosesHeartbeats {
    fn pass(&self, command: &'static str, request: ErasedRequest) -> ErasedRequest {
        if command == "heartbeat" && self.0.load(SeqCst) {
            self.1.fetch_add(1, SeqCst);
            return Box::pin(async { Err(DirectoryError::failed("connection reset")) });
        }
        request
    }
}

/// B turns a client away and shuts down, but the connection on which it last reports this is reset.
#[tokio::test]
async fn a_client_that_was_turned_away_before_a_shutdown_whose_report_was_lost_keeps_its_call() {
    let link_a = directory();
    let gate = LosesHeartbeats::default();
    let link_b = link_a.behind(gate.clone());
    let a = Setup::with_grace().start(&link_a).await;
    let b = Setup::without_peers().start(&link_b).await;
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    pass(3 * SECOND).await;
    gate.0.store(true, SeqCst);
    let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
    assert_eq!(resumed.head().await.status, 503);
    within("the shutdown", b.cluster.leave(Duration::ZERO)).await;
    assert!(gate.1.load(SeqCst) > 0, "a heartbeat has been lost");
    pass(30 * SECOND).await;
    assert!(a.witness.is_running("a"));
}

/// B starts 900 ms before the grace period ends, turns the client away 400 ms later and reports that at once. The primary then fails, and
/// its replica lacks the last second's writes. The grace period ends before A's next heartbeat.
#[tokio::test]
async fn a_client_that_was_turned_away_by_a_new_instance_keeps_its_call_after_a_failover() {
    let mut cancelled = Vec::new();
    for (is_lost, phase) in [false, true]
        .into_iter()
        .flat_map(|is_lost| phases().map(move |phase| (is_lost, phase)))
    {
        let directory = Faulty::new(MemoryDirectory::default());
        let a = Setup::with_grace().start(&directory).await;
        a.until_settled().await;
        pass(10 * SECOND + phase * 100 * MS).await;
        let mcp = a.session().await;
        pass(SECOND).await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        let started = Instant::now();
        until(started, GRACE - 1_000 * MS).await;
        let replica = directory.memory.take_snapshot();
        until(started, GRACE - 900 * MS).await;
        let b = Setup::without_peers().start(&directory).await;
        until(started, GRACE - 500 * MS).await;
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        pass(100 * MS).await;
        assert_eq!(resumed.head().await.status, 503);
        until(started, GRACE - 50 * MS).await;
        let leases = directory.memory.leases().await.unwrap();
        assert!(
            leases.get(b.me.incarnation).is_some() && leases.turned_away.is_some(),
            "control"
        );
        if is_lost {
            directory.memory.load_snapshot(&replica);
        }
        until(started, GRACE + 5 * SECOND).await;
        if !a.witness.is_running("a") {
            cancelled.push((is_lost, phase));
        }
    }
    assert_eq!(cancelled, []);
}

/// B starts 500 ms before the grace period ends, and its requests to the directory take 450 ms. The client arrives 100 ms before its grace
/// period ends.
#[tokio::test]
async fn a_client_that_was_turned_away_by_an_instance_that_starts_keeps_its_call() {
    let mut cancelled = Vec::new();
    for (is_new, phase) in [false, true]
        .into_iter()
        .flat_map(|is_new| phases().map(move |phase| (is_new, phase)))
    {
        let directory = Faulty::new(MemoryDirectory::default());
        let link_b = directory.behind(SlowLink(Arc::new(AtomicBool::new(true)), 450 * MS));
        let a = Setup::with_grace().start(&directory).await;
        a.until_settled().await;
        let mut b = None;
        if !is_new {
            b = Some(Setup::without_peers().start(&link_b).await);
            pass(10 * SECOND).await;
        }
        let mcp = a.session().await;
        pass(SECOND + phase * 100 * MS).await;
        let last_event_id = a.detach(&mcp, 1, "a").await;
        let started = Instant::now();
        until(started, GRACE - 500 * MS).await;
        if is_new {
            b = Some(Setup::without_peers().start(&link_b).await);
        }
        let b = b.unwrap();
        until(started, GRACE - 100 * MS).await;
        let mut resumed = b.client_of(&mcp).resume(&last_event_id).await;
        pass(1_500 * MS).await;
        assert_eq!(resumed.head().await.status, 503);
        pass(6 * SECOND).await;
        if !a.witness.is_running("a") {
            cancelled.push((is_new, phase));
        }
    }
    assert_eq!(cancelled, []);
}

/// Between two of A's heartbeats the directory's clock is stepped forward by less than 1 s. After the second one A is cut off from the
/// directory. B cannot reach A.
#[tokio::test]
async fn a_lease_lasts_as_long_as_its_owner_relies_on_it_after_a_small_step_of_the_clock() {
    for step in [0, 900] {
        let memory = MemoryDirectory::default();
        let [link_a, link_b] = [(); 2].map(|()| Faulty::new(memory.clone()));
        let a = Setup::requiring_lease().start(&link_a).await;
        let b = Setup::without_peers().start(&link_b).await;
        a.until_settled().await;
        b.until_settled().await;
        let mcp = a.session().await;
        let at_b = b.client_of(&mcp);
        pass(4 * SECOND).await;
        until_heartbeat(&link_a).await;
        pass(500 * MS).await;
        memory.step_clock(step * MS);
        until_heartbeat(&link_a).await;
        let started = Instant::now();
        link_a.set(Fault::Fails);
        until(started, 5_200 * MS).await;
        let status_at_b = status(&at_b, 1).await;
        let status_at_a = status(&mcp, 2).await;
        assert!(started.elapsed() < 5_450 * MS);
        assert_eq!((step, status_at_b, status_at_a), (step, 503, 200));
    }
}
