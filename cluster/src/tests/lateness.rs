//! Stalls, heartbeats that are late or overtaken, clocks that step, and links that break.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::Router;
use futures_util::future::join_all;
use mcp_cancel_on_disconnect::Grace;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::model::ProgressNotificationParam;
use serde_json::json;
use test_support::{Mcp, Mode, PATH, Tools, Witness, serve};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

use super::{
    node::{GRACE, Node, SECRET, Setup, hash, pass},
    steps::{MS, SECOND, phases, status, until_heartbeat},
};
use crate::{
    cluster::{Options, join},
    directory::{
        Directory as _, DirectoryError, MemoryDirectory,
        faulty::{ErasedRequest, Fault, Faulty, Gate},
    },
    ids::{Incarnation, Owner},
    relay::filter::PeersFilter,
    relay::wire::Secret,
};

/// Counts an instance's heartbeats. On request, it stalls the process before the reply to one is read.
#[derive(Debug, Clone, Default)]
struct StallsAtReply(Arc<AtomicUsize>, Arc<Mutex<Option<Duration>>>);

impl StallsAtReply {
    /// Waits until the instance has sent another heartbeat.
    async fn next_heartbeat(&self) {
        let before = self.0.load(SeqCst);
        while self.0.load(SeqCst) == before {
            sleep(5 * MS).await;
        }
    }
}

impl Gate for StallsAtReply {
    fn pass(&self, command: &'static str, request: ErasedRequest) -> ErasedRequest {
        if command == "look_up" {
            return Box::pin(async move {
                sleep(400 * MS).await;
                request.await
            });
        }
        if command != "heartbeat" {
            return request;
        }
        let Self(count, stall) = self.clone();
        Box::pin(async move {
            let reply = request.await;
            count.fetch_add(1, SeqCst);
            let stall = stall.lock().unwrap().take();
            if let Some(time) = stall {
                std::thread::sleep(time);
            }
            reply
        })
    }
}

#[derive(Debug, Clone, Copy)]
enum Stall {
    /// Starts 30 ms after a heartbeat has been answered.
    After(Duration),
    /// Starts after the directory has executed the heartbeat, but before the instance reads the reply.
    AtReply(Duration),
}

/// Has a client resume at B while B stalls, and then at A.
///
/// B runs on its own thread, which stalls for a while, and its lookups take 400 ms. The client connects to B during the stall, within its
/// grace period. No clock is paused.
///
/// Returns the status that B answers, whether the call is running then and after the resume at A, and the status that A answers.
async fn resume_during_stall(stall: Stall, can_reach_a: bool) -> (u16, [bool; 2], u16) {
    let link_a = Faulty::new(MemoryDirectory::default());
    let gate = StallsAtReply::default();
    let link_b = Faulty::new(link_a.memory.clone()).behind(gate.clone());
    let a = Setup::with_grace().start(&link_a).await;
    let (start_sender, started) = tokio::sync::oneshot::channel();
    let (stall_sender, mut stalls) = tokio::sync::mpsc::unbounded_channel::<Stall>();
    let thread_gate = gate.clone();
    let thread = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap();
        runtime.block_on(async {
            let setup = Setup {
                filter: PeersFilter::new(move |_| can_reach_a),
                ..Setup::default()
            };
            let b = setup.start(&link_b).await;
            start_sender
                .send((b.public.as_ref().unwrap().addr, b.me.incarnation))
                .unwrap();
            while let Some(stall) = stalls.recv().await {
                match stall {
                    Stall::AtReply(time) => *thread_gate.1.lock().unwrap() = Some(time),
                    Stall::After(time) => {
                        thread_gate.next_heartbeat().await;
                        sleep(30 * MS).await;
                        std::thread::sleep(time);
                    }
                }
            }
        });
    });
    let (addr, incarnation) = started.await.unwrap();
    sleep(10 * SECOND).await;
    let mcp = a.session().await;
    gate.next_heartbeat().await;
    sleep(600 * MS).await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    let detached = Instant::now();
    // The grace period ends 600 ms after the third heartbeat from now.
    gate.next_heartbeat().await;
    gate.next_heartbeat().await;
    stall_sender.send(stall).unwrap();
    gate.next_heartbeat().await;
    sleep(200 * MS).await;
    let at_b = Mcp::stateless(addr, PATH).in_session(mcp.session_id().unwrap());
    let mut resumed = at_b.resume(&last_event_id).await;
    assert!(
        detached.elapsed() < GRACE - 100 * MS,
        "control: still within its grace"
    );
    let head = tokio::time::timeout(6 * SECOND, resumed.head())
        .await
        .unwrap();
    if head.status == 503 {
        assert_eq!(head.header("retry-after"), Some("1"));
    }
    let leases = link_a.memory.leases().await.unwrap();
    assert!(leases.get(incarnation).is_some(), "B still has its lease");
    sleep(SECOND).await;
    let was_running = a.witness.is_running("a");
    let mut resumed_at_a = mcp.resume(&last_event_id).await;
    let status = resumed_at_a.head().await.status;
    let is_running = a.witness.is_running("a");
    drop(stall_sender);
    thread.join().unwrap();
    (head.status, [was_running, is_running], status)
}

/// With a stall of 3.5 s, B sends a heartbeat as soon as it runs again, and only then reads the request, which it turns away. That
/// heartbeat is sent more than 2.15 s after the grace period.
#[tokio::test]
async fn a_client_that_waited_for_an_instance_that_stalled_keeps_its_call() {
    let stalls = [
        // The second heartbeat is sent in time.
        ("between two heartbeats", Stall::After(1_990 * MS), false),
        ("in its grace", Stall::After(3_500 * MS), false),
        // The second heartbeat is 230 ms late.
        ("a little late", Stall::After(2_200 * MS), false),
        ("waiting for a reply", Stall::AtReply(3_500 * MS), false),
        // The call must still be running when the resume reaches A.
        ("B reaches A", Stall::After(2_200 * MS), true),
    ];
    let seen = join_all(stalls.map(async |(name, stall, is_reached)| {
        let resumed_at_b = if is_reached { 200 } else { 503 };
        let expected = (resumed_at_b, [true, true], 200);
        (name, resume_during_stall(stall, is_reached).await, expected)
    }));
    for (name, seen, expected) in seen.await {
        assert_eq!(seen, expected, "{name}");
    }
}

/// The directory restarts empty. D cannot reach it for at most 5.9 s, which is less than its lease, and then writes its session again.
/// Before that, a client asks C and gets 503. It retries once C has settled, by which time D has written its session.
#[tokio::test]
async fn a_rewritten_session_is_not_reported_missing_because_of_an_older_lookup() {
    let (memory, [link_c, link_d], [c, d]) = Node::two_on_links().await;
    let mcp = d.session().await;
    let at_c = c.client_of(&mcp);
    until_heartbeat(&link_c).await;
    let started = Instant::now();
    let until = async |at: u32| {
        while started.elapsed() < at * MS {
            pass(10 * MS).await;
        }
    };
    until(1_750).await;
    // Makes D send a heartbeat now.
    let heartbeats = link_d.request_count("heartbeat");
    d.routing().turned_away.record();
    until(1_800).await;
    assert!(link_d.request_count("heartbeat") > heartbeats);
    link_d.set(Fault::Fails);
    until(1_850).await;
    memory.restart();
    // Makes C send a heartbeat now.
    c.routing().turned_away.record();
    until(7_100).await;
    let first = status(&at_c, 1).await;
    until(7_150).await;
    link_d.set(Fault::None);
    until(7_700).await;
    assert!(memory.has_owner(hash(&mcp)), "D has written it again");
    let mut results = Vec::new();
    for at in (7_700..9_000).step_by(25) {
        until(at).await;
        let answer = status(&at_c, at).await;
        let since = c.routing().heartbeat.consistent_since();
        let settled = since.map(|since| {
            (since + crate::membership::heartbeat::SETTLE_PERIOD)
                .saturating_duration_since(started)
                .as_millis()
        });
        results.push((
            started.elapsed().as_millis(),
            link_c.request_count("look_up"),
            settled,
            answer,
        ));
    }
    assert_eq!(first, 503, "{results:?}");
    assert!(
        results.iter().all(|(.., status)| *status != 404),
        "{results:?}"
    );
}

/// Delays the next heartbeat's execution, and refuses `register` while set.
#[derive(Debug, Clone, Default)]
struct OldConnection(Arc<Mutex<(Option<Duration>, bool)>>, Arc<AtomicUsize>);

impl Gate for OldConnection {
    fn pass(&self, command: &'static str, request: ErasedRequest) -> ErasedRequest {
        let (delay, refuses) = {
            let mut state = self.0.lock().unwrap();
            let delay = (command == "heartbeat").then(|| state.0.take()).flatten();
            (delay, state.1 && command == "register")
        };
        if command == "heartbeat" {
            self.1.fetch_add(1, SeqCst);
        }
        if refuses {
            return Box::pin(async {
                Err(DirectoryError::failed("the directory is switched off"))
            });
        }
        let Some(delay) = delay else { return request };
        let late = tokio::spawn(async move {
            sleep(delay).await;
            request.await
        });
        Box::pin(async move { late.await.unwrap() })
    }
}

/// The directory loses its data (FLUSHALL). One of D's earlier heartbeats, sent on an older connection, arrives after the next one. Its
/// status, according to which all sessions have been written, must not replace the newer status, because D has not written its session
/// again yet.
#[tokio::test]
async fn a_heartbeat_that_was_overtaken_does_not_prove_that_nothing_was_lost() {
    assert!(!statuses_after_loss(false).await.contains(&404), "control");
    let results = statuses_after_loss(true).await;
    assert!(!results.contains(&404), "{results:?}");
}

/// Returns the statuses that a client of the lost session gets within 2.8 s of the loss.
async fn statuses_after_loss(is_overtaken: bool) -> Vec<u16> {
    let memory = MemoryDirectory::default();
    let link_c = Faulty::new(memory.clone());
    let gate = OldConnection::default();
    let link_d = Faulty::new(memory.clone()).behind(gate.clone());
    let (c, d) = (Node::start(&link_c).await, Node::start(&link_d).await);
    c.until_settled().await;
    d.until_settled().await;
    let mcp = d.session().await;
    let at_c = c.client_of(&mcp);
    pass(8 * SECOND).await;
    gate.0.lock().unwrap().0 = is_overtaken.then_some(SECOND);
    let before = gate.1.load(SeqCst);
    while gate.1.load(SeqCst) == before {
        pass(10 * MS).await;
    }
    // The heartbeat is in transit when the directory loses all data.
    memory.flush();
    gate.0.lock().unwrap().1 = true;
    pass(300 * MS).await;
    c.routing().turned_away.record();
    let mut results = Vec::new();
    for id in 0..50 {
        pass(50 * MS).await;
        results.push(status(&at_c, id).await);
    }
    gate.0.lock().unwrap().1 = false;
    pass(12 * SECOND).await;
    assert_eq!(status(&at_c, 99).await, 200, "control");
    results
}

/// The directory's clock is stepped forward by 3.5 s, or the owner's machine has been suspended for as long. After that, the owner cannot
/// reach the directory for 2.7 s, less than half of its lease.
#[tokio::test]
async fn a_lease_lasts_as_long_as_its_owner_relies_on_it_after_a_step_of_the_clock() {
    for has_stepped in [false, true] {
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
        if has_stepped {
            memory.step_clock(3_500 * MS);
        }
        until_heartbeat(&link_a).await;
        link_a.set(Fault::Fails);
        pass(2_700 * MS).await;
        let status_at_b = status(&at_b, 1).await;
        let status_at_a = status(&mcp, 2).await;
        assert_eq!(
            (has_stepped, status_at_b, status_at_a),
            (has_stepped, 503, 200)
        );
    }
}

/// Packets from B's machine no longer reach the owner's, but the owner's still reach B's. After 90 s the owner gives up on the connection,
/// because B's acknowledgements are lost. Until then B keeps receiving the owner's packets. The client is connected to B.
/// Run in a separate network namespace:
/// unshare -n sh -c 'ip link set lo up; exec $TEST a_call_whose_client_is_connected --ignored --nocapture'
#[tokio::test]
#[ignore = "needs iptables, and minutes"]
async fn a_call_whose_client_is_connected_to_a_living_instance_is_not_cancelled() {
    let directory = Faulty::new(MemoryDirectory::default());
    let on_start = |_: &str, context: &rmcp::service::RequestContext<rmcp::RoleServer>| {
        let (peer, token) = (context.peer.clone(), context.meta.get_progress_token());
        let Some(token) = token else { return };
        tokio::spawn(async move {
            for event in 0..100 {
                sleep(5 * SECOND).await;
                let progress = ProgressNotificationParam::new(token.clone(), f64::from(event));
                let _ = peer.notify_progress(progress).await;
            }
        });
    };
    let setup = Setup {
        grace: Grace::After(20 * SECOND),
        on_start: Some(Box::new(on_start)),
        ..Setup::default()
    };
    let a = setup.start(&directory).await;
    let b = Node::start(&directory).await;
    sleep(10 * SECOND).await;
    let mcp = a.session().await;
    let mut call = b
        .client_of(&mcp)
        .call(1, "hold", json!({ "label": "a" }))
        .await;
    assert_eq!(call.head().await.status, 200);
    a.witness.started("a").await;
    sleep(7 * SECOND).await;
    let rule = |operation: &str| {
        let port = a.me.address.port().to_string();
        let rule = [
            "-w", operation, "INPUT", "-p", "tcp", "--dport", &port, "-j", "DROP",
        ];
        let done = std::process::Command::new("iptables").args(rule).status();
        assert!(done.unwrap().success());
    };
    rule("-I");
    let began = Instant::now();
    let mut cancelled_at = None;
    let mut broke_at = None;
    let mut events = Vec::new();
    while began.elapsed() < 240 * SECOND && (cancelled_at.is_none() || broke_at.is_none()) {
        if cancelled_at.is_none() && !a.witness.is_running("a") {
            cancelled_at = Some(began.elapsed());
        }
        if broke_at.is_some() {
            sleep(100 * MS).await;
            continue;
        }
        match tokio::time::timeout(100 * MS, call.data()).await {
            Ok(Some(_)) => events.push(began.elapsed().as_secs()),
            Ok(None) => broke_at = Some(began.elapsed()),
            Err(_) => {}
        }
    }
    rule("-D");
    assert!(
        cancelled_at.is_none() || broke_at.is_some_and(|at| at < cancelled_at.unwrap()),
        "cancelled at {cancelled_at:?}, its client was connected until {broke_at:?}, with events at {events:?} s"
    );
}

/// A link on which each request takes effect at once, but its reply takes this long.
#[derive(Debug, Clone)]
struct SlowReplies(Duration);

impl Gate for SlowReplies {
    fn pass(&self, _command: &'static str, request: ErasedRequest) -> ErasedRequest {
        let time = self.0;
        Box::pin(async move {
            let reply = request.await;
            sleep(time).await;
            reply
        })
    }
}

/// Returns the longest time from the end of the grace period to the cancellation.
async fn longest_delay(reply: Duration, instances: usize) -> Duration {
    let mut longest_delay = Duration::ZERO;
    for phase in phases() {
        let directory = Faulty::new(MemoryDirectory::default()).behind(SlowReplies(reply));
        let a = Setup::with_grace().start(&directory).await;
        a.until_settled().await;
        let mut others = Vec::new();
        for _ in 1..instances {
            others.push(Node::start(&directory).await);
        }
        for other in &others {
            other.until_settled().await;
        }
        let mcp = a.session().await;
        pass(phase * 100 * MS).await;
        a.detach(&mcp, 1, "a").await;
        let detached = Instant::now();
        while a.witness.is_running("a") {
            pass(50 * MS).await;
            assert!(detached.elapsed() < 60 * SECOND);
        }
        longest_delay = longest_delay.max(detached.elapsed() - GRACE);
    }
    longest_delay
}

/// README: "A cancellation is therefore up to 5 s later than with one instance".
#[tokio::test]
async fn a_cancel_is_up_to_5_s_later_than_with_one_instance() {
    let mut results = Vec::new();
    for reply in [0, 100, 250, 400] {
        let alone = longest_delay(reply * MS, 1).await;
        let with_peer = longest_delay(reply * MS, 2).await;
        results.push((reply, alone, with_peer));
    }
    assert!(
        results
            .iter()
            .all(|(_, alone, with_peer)| *with_peer <= *alone + 5 * SECOND),
        "{results:?}"
    );
}

/// Has B turn a client away shortly after B has lost its connection to the directory.
///
/// B loses the connection 2 s before the grace period ends. 1 s later, while it still has its lease, it turns the client away. B keeps
/// running, but cannot report the client, which retries after `pause`.
///
/// Returns the status of the first attempt, whether B had its lease at that point, whether the call is still running, and the status of the
/// retry.
async fn turned_away_by_a_cut_off_instance(pause: Duration) -> (u16, bool, bool, u16) {
    let memory = MemoryDirectory::default();
    let [link_a, link_b] = [(); 2].map(|()| Faulty::new(memory.clone()));
    let (a, b) = (
        Setup::with_grace().start(&link_a).await,
        Node::start(&link_b).await,
    );
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    let last_event_id = a.detach(&mcp, 1, "a").await;
    pass(GRACE - 2 * SECOND).await;
    link_b.set(Fault::Fails);
    pass(SECOND).await;
    let status = b
        .client_of(&mcp)
        .resume(&last_event_id)
        .await
        .head()
        .await
        .status;
    let has_lease = memory
        .leases()
        .await
        .unwrap()
        .get(b.me.incarnation)
        .is_some();
    pass(pause).await;
    let is_running = a.witness.is_running("a");
    link_b.set(Fault::None);
    pass(SECOND).await;
    let status_of_retry = b
        .client_of(&mcp)
        .resume(&last_event_id)
        .await
        .head()
        .await
        .status;
    (status, has_lease, is_running, status_of_retry)
}

#[tokio::test]
async fn a_client_that_was_turned_away_by_an_instance_with_a_lease_keeps_its_call() {
    for pause in [3, 5, 8, 20, 35] {
        let results = turned_away_by_a_cut_off_instance(pause * SECOND).await;
        assert_eq!((pause, results), (pause, (503, true, true, 200)));
    }
}

/// Returns whether a health check failed, and whether the call was cancelled.
///
/// B has a concurrency limit inside the cluster's layer. Every second two `GET /health` requests, which belong to no session, arrive
/// together and take 20 ms each. With a single permit the second one waits for 20 ms. No instance answers 503.
async fn outcome_beside_health_checks(permits: usize) -> (bool, bool) {
    use tower_layer::Layer as _;
    use tower_service::Service as _;
    let directory = Faulty::new(MemoryDirectory::default());
    let a = Setup::with_grace().start(&directory).await;
    let b = Node::start(&directory).await;
    a.until_settled().await;
    b.until_settled().await;
    let health = axum::routing::get(async || sleep(20 * MS).await);
    let app = Router::new().route("/health", health);
    let app = b
        .cluster
        .layer()
        .layer(super::permits::ConcurrencyLimit::new(app, permits));
    let mcp = a.session().await;
    a.detach(&mcp, 1, "a").await;
    let statuses = Arc::new(Mutex::new(Vec::new()));
    for _ in 0..120 {
        for _ in 0..2 {
            let (mut app, statuses) = (app.clone(), statuses.clone());
            tokio::spawn(async move {
                std::future::poll_fn(|cx| app.poll_ready(cx)).await.unwrap();
                let request = http::Request::get("/health").body(axum::body::Body::empty());
                let status = app.call(request.unwrap()).await.unwrap().status();
                statuses.lock().unwrap().push(status.as_u16());
            });
        }
        pass(SECOND).await;
    }
    let has_refused = statuses.lock().unwrap().iter().any(|status| *status != 200);
    (has_refused, !a.witness.is_running("a"))
}

/// README: "cancels wait while any instance answers 503".
#[tokio::test]
async fn cancels_do_not_wait_because_a_health_check_waited_for_a_permit() {
    assert_eq!(
        outcome_beside_health_checks(20).await,
        (false, true),
        "control"
    );
    assert_eq!(
        outcome_beside_health_checks(1).await,
        (false, true),
        "after two minutes"
    );
}

/// Makes a call to A after a stall in which B has claimed its session.
///
/// A heartbeat from A is answered at 0 s, and the next one is refused if `is_refused`. A is then suspended until `resumes_at`. B claims the
/// session at 6.2 s, when A's lease has lapsed. A call that has been waiting at A is read when A resumes.
///
/// Returns the status of the claiming request, how often the call's handler was started at A, and whether B has the session.
async fn started_after_a_stall(is_refused: bool, resumes_at: Duration) -> (u16, usize, bool) {
    let memory = MemoryDirectory::default();
    let [link_a, link_b] = [(); 2].map(|()| Faulty::new(memory.clone()));
    let a = Node::start(&link_a).await;
    let b = Setup::without_peers().start(&link_b).await;
    a.until_settled().await;
    b.until_settled().await;
    let mcp = a.session().await;
    pass(4 * SECOND).await;
    until_heartbeat(&link_a).await;
    let started = Instant::now();
    if is_refused {
        link_a.set(Fault::Fails);
        until_heartbeat(&link_a).await;
    }
    // Begins the stall.
    a.cluster.stop_heartbeat();
    link_a.set(Fault::None);
    while started.elapsed() < 6_200 * MS {
        pass(50 * MS).await;
    }
    let claimed = status(&b.client_of(&mcp), 1).await;
    while started.elapsed() < resumes_at {
        pass(50 * MS).await;
    }
    // A runs again, and its first heartbeat takes 200 ms.
    link_a.set(Fault::SlowAt("heartbeat", 200 * MS));
    let heartbeat = tokio::spawn(a.routing().heartbeat.clone().run());
    let _call = mcp.call(2, "hold", json!({ "label": "late" })).await;
    for _ in 0..20 {
        pass(50 * MS).await;
    }
    let started = a.witness.starts("late");
    heartbeat.abort();
    (claimed, started, b.has(&mcp))
}

#[tokio::test]
async fn no_call_begins_after_a_stall_in_which_the_lease_lapsed() {
    assert_eq!(
        started_after_a_stall(false, 6_400 * MS).await,
        (200, 0, true),
        "control"
    );
    assert_eq!(
        started_after_a_stall(true, 6_400 * MS).await,
        (200, 0, true)
    );
}

/// Returns, as text, what a client receives when its call overlaps with a shutdown.
///
/// If `commits`, the layer sends the response heads of silent calls after 1 s. A layer inside it takes 3 s to check the call's client. In
/// the meantime the instance starts to shut down, with a limit of 30 s. The client has a few seconds to receive the answer.
async fn answer_during_shutdown(commits: bool, through_b: bool) -> String {
    let directory = Faulty::new(MemoryDirectory::default());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let me = Owner {
        address: listener.local_addr().unwrap(),
        incarnation: Incarnation::random(),
    };
    let secret = Secret::new(SECRET).unwrap();
    let (filter, options) = (PeersFilter::default(), Options::default());
    let cluster = join(me, directory.clone(), filter, secret, options);
    let witness = Witness::new();
    let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
    let mut config = Mode::Session.config().with_sse_keep_alive(None);
    config.session_store = Some(Arc::new(cluster.clone()));
    let service = Tools::new(&witness).service_with(config, sessions);
    let mut layer = CancelOnDisconnectLayer::new();
    if commits {
        layer = layer.commit_after(SECOND);
    }
    let slow = async |request: axum::extract::Request, next: axum::middleware::Next| {
        if request.headers().contains_key("x-slow") {
            sleep(3 * SECOND).await;
        }
        next.run(request).await
    };
    let app = test_support::router(service)
        .layer(axum::middleware::from_fn(slow))
        .layer(cluster.protect(layer))
        .layer(cluster.layer());
    let public = serve(app.clone()).await;
    let member = cluster.clone();
    tokio::spawn(async move { member.serve_peers(listener, app).await });
    let b = Node::start(&directory).await;
    b.until_settled().await;
    pass(8 * SECOND).await;
    let mcp = Mcp::session(public.addr, PATH).await;
    let slow = if through_b {
        b.client_of(&mcp)
    } else {
        Mcp::stateless(public.addr, PATH).in_session(mcp.session_id().unwrap())
    };
    let mut call = slow
        .header("x-slow", "1")
        .call(1, "echo", json!({ "text": "x" }))
        .await;
    pass(1_300 * MS).await;
    let member = cluster.clone();
    let shutdown = tokio::spawn(async move { member.leave(30 * SECOND).await });
    pass(10 * SECOND).await;
    let answer = tokio::time::timeout(3 * SECOND, call.answer()).await;
    shutdown.abort();
    drop(public);
    format!("{answer:?}")
}

#[tokio::test]
async fn a_call_that_the_layer_committed_is_in_flight_for_a_shutdown() {
    for through_b in [false, true] {
        let answer = answer_during_shutdown(false, through_b).await;
        assert!(answer.contains("result"), "control: {through_b} {answer}");
        let answer = answer_during_shutdown(true, through_b).await;
        assert!(answer.contains("result"), "{through_b} {answer}");
    }
}
