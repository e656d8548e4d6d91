//! Every duration and number in a public option at its extremes.
//!
//! The options are tested alone and in pairs, in both orders of the builder.
//!
//! The oracle consists of four sentences. A call whose client is connected is answered, unless a `call_timeout` ends
//! it. A client that returns within its server's reconnect delay gets its answer. A call whose client does not return
//! ends on its own. Nothing polls endlessly.
//!
//! `cargo test` runs each option alone and a sample of the pairs, which can be repeated with `TEST_SEED`.
//! `EXTREMES=all` runs all cells, and `EXTREMES=TEXT` runs those whose name contains the text. [`the_list_is_complete`]
//! compares the list with the public API.

use std::{
    env, fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::Duration,
};

use axum::{
    Router,
    body::{Body, HttpBody as _},
    response::Response,
};
use futures_util::future::poll_fn;
use http::Request as HttpRequest;
use mcp_cancel_on_disconnect::{
    AbortOnCancel, Calls, CancelOnDisconnectLayer, CancellableSessionManager, Confirmation, Grace,
    Limits, Policy,
};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use serde_json::{Value as Json, json};
use tokio::time::{sleep, timeout};
use tower::ServiceExt as _;

use crate::{
    setup::{Scripted, Server, Sessions, paused_runtime},
    support::{Dice, Mode, PATH, handshake},
};

/// The number of pairs that `cargo test` runs.
const SAMPLE: usize = 300;

/// The number of cells that run at the same time.
const THREADS: usize = 2;

/// A cell that takes longer than this in real time is in a busy loop.
const CELL_TIMEOUT: Duration = Duration::from_secs(60);

/// How long a call works while its client is reading.
const WORK: Duration = Duration::from_millis(100);

/// How long a call works if its client disconnects and returns.
const LONG_WORK: Duration = Duration::from_secs(10);

/// How long that client stays connected, and then disconnected.
///
/// It is shorter than rmcp's reconnect delay of 3 s.
const ABSENCE: Duration = Duration::from_secs(1);

/// How long a call works if its client disconnects for good.
const ABANDONED_WORK: Duration = Duration::from_secs(3_600);

/// Longer than the layer ever waits in these tests.
const VERY_LONG: Duration = Duration::from_secs(24 * 3_600);

/// How often a call's body may be polled while the call works for [`WORK`].
///
/// An interval of 1 ms needs 100 polls.
const MAX_POLLS: usize = 300;

/// How often an orphan's cancellation may be postponed.
const MAX_POSTPONES: usize = 100;

const TIMED_OUT: i64 = -32001;

const SERVERS: [Server; 4] = [
    Server::Wrapped,
    Server::LayerOnly,
    Server::StatelessSse,
    Server::StatelessJson,
];

const EXTREMES: [Extreme; 4] = [Extreme::Zero, Extreme::Least, Extreme::Small, Extreme::Most];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Extreme {
    Zero,
    /// 1 ns, or 1.
    Least,
    /// 1 ms, or 1,000.
    Small,
    Most,
}

/// A world's options, some of which a cell sets.
struct Options {
    layer: CancelOnDisconnectLayer,
    policy: Policy,
    limits: Limits,
    idle_timeout: Option<Duration>,
    lost_timeout: Option<Duration>,
    abort_grace: Option<Duration>,
    confirmations: Arc<AtomicUsize>,
}

/// A public option that takes a number.
#[derive(Clone, Copy)]
struct NumericOption {
    /// Its path in `tests/public_api/mcp-cancel-on-disconnect.txt`.
    path: &'static str,
    set: fn(Options, Extreme) -> Options,
}

#[derive(Clone, Copy)]
struct Cell {
    server: Server,
    first: (&'static NumericOption, Extreme),
    second: Option<(&'static NumericOption, Extreme)>,
}

struct World {
    router: Router,
    calls: Calls,
    session: Option<String>,
}

/// A call's stream, and the text that its client has read from it.
struct Reading {
    body: Body,
    text: String,
    polls: usize,
}

// === The list ===

static NUMERIC_OPTIONS: &[NumericOption] = &[
    NumericOption {
        path: "AbortOnCancel::after",
        set: |options, extreme| Options {
            abort_grace: Some(extreme.duration()),
            ..options
        },
    },
    NumericOption {
        path: "CancelOnDisconnectLayer::call_timeout",
        set: |options, extreme| options.layer(|layer| layer.call_timeout(extreme.duration())),
    },
    NumericOption {
        path: "CancelOnDisconnectLayer::commit_after",
        set: |options, extreme| options.layer(|layer| layer.commit_after(extreme.duration())),
    },
    NumericOption {
        path: "CancelOnDisconnectLayer::keep_alive",
        set: |options, extreme| options.layer(|layer| layer.keep_alive(extreme.duration())),
    },
    NumericOption {
        path: "CancelOnDisconnectLayer::stall_timeout",
        set: |options, extreme| options.layer(|layer| layer.stall_timeout(extreme.duration())),
    },
    NumericOption {
        path: "CancellableSessionManager::idle_timeout",
        set: |options, extreme| Options {
            idle_timeout: Some(extreme.duration()),
            ..options
        },
    },
    NumericOption {
        path: "CancellableSessionManager::lost_timeout",
        set: |options, extreme| Options {
            lost_timeout: Some(extreme.duration()),
            ..options
        },
    },
    NumericOption {
        path: "Confirmation::Postpone",
        set: |options, extreme| {
            let confirmations = options.confirmations.clone();
            options.layer(|layer| {
                layer.confirm(move |_| {
                    let earlier = confirmations.fetch_add(1, Ordering::Relaxed);
                    std::future::ready(if earlier < MAX_POSTPONES {
                        Confirmation::Postpone(extreme.duration())
                    } else {
                        Confirmation::Cancel
                    })
                })
            })
        },
    },
    NumericOption {
        path: "Grace::After",
        set: |options, extreme| {
            options.layer(|layer| layer.grace(Grace::After(extreme.duration())))
        },
    },
    NumericOption {
        path: "Grace::AutoAfter",
        set: |options, extreme| {
            options.layer(|layer| layer.grace(Grace::AutoAfter(extreme.duration())))
        },
    },
    NumericOption {
        path: "Limits::calls",
        set: |options, extreme| options.limits(|limits| limits.calls(extreme.number())),
    },
    NumericOption {
        path: "Limits::detached",
        set: |options, extreme| options.limits(|limits| limits.detached(extreme.number())),
    },
    NumericOption {
        path: "Limits::detached_per_session",
        set: |options, extreme| {
            options.limits(|limits| limits.detached_per_session(extreme.number()))
        },
    },
    NumericOption {
        path: "Limits::retained",
        set: |options, extreme| options.limits(|limits| limits.retained(extreme.number())),
    },
    NumericOption {
        path: "Limits::retained_per_session",
        set: |options, extreme| {
            options.limits(|limits| limits.retained_per_session(extreme.number()))
        },
    },
    NumericOption {
        path: "Policy::call_timeout",
        set: |options, extreme| {
            let policy = options.policy.call_timeout(extreme.duration());
            Options { policy, ..options }
        },
    },
];

/// What takes a number but is not in [`NUMERIC_OPTIONS`], and the reason.
const EXCLUDED: &[(&str, &str)] = &[
    ("Calls::drain", "a_drain_with_an_extreme_limit_returns"),
    ("CallState::Detached", "reported, not set"),
    ("Event::AnswerEvicted", "reported, not set"),
    ("Event::Detached", "reported, not set"),
    ("RequestId::Number", "reported, not set"),
];

// === impl Extreme ===

impl Extreme {
    fn duration(self) -> Duration {
        match self {
            Self::Zero => Duration::ZERO,
            Self::Least => Duration::from_nanos(1),
            Self::Small => Duration::from_millis(1),
            Self::Most => Duration::MAX,
        }
    }

    fn number(self) -> usize {
        match self {
            Self::Zero => 0,
            Self::Least => 1,
            Self::Small => 1_000,
            Self::Most => usize::MAX,
        }
    }
}

// === impl Options ===

impl Options {
    fn new() -> Self {
        Self {
            layer: CancelOnDisconnectLayer::new(),
            policy: Policy::new(),
            limits: Limits::default(),
            idle_timeout: None,
            lost_timeout: None,
            abort_grace: None,
            confirmations: Arc::default(),
        }
    }

    fn layer(
        self,
        change: impl FnOnce(CancelOnDisconnectLayer) -> CancelOnDisconnectLayer,
    ) -> Self {
        let layer = change(self.layer);
        Self { layer, ..self }
    }

    fn limits(self, change: impl FnOnce(Limits) -> Limits) -> Self {
        let limits = change(self.limits);
        Self { limits, ..self }
    }
}

// === impl Cell ===

impl Cell {
    fn settings(self) -> impl Iterator<Item = (&'static NumericOption, Extreme)> {
        [self.first].into_iter().chain(self.second)
    }

    fn has(self, path: &str, extremes: &[Extreme]) -> bool {
        self.settings()
            .any(|(option, extreme)| option.path == path && extremes.contains(&extreme))
    }

    /// Returns `true` if every call that works exceeds its `call_timeout`.
    ///
    /// The policy's timeout takes precedence over the layer's.
    fn times_out(self) -> bool {
        use Extreme::{Least, Most, Small, Zero};
        let is_short = |path| self.has(path, &[Zero, Least, Small]);
        let is_tracked = !self.has("Limits::calls", &[Zero]);
        let by_policy = is_short("Policy::call_timeout");
        let by_layer = is_short("CancelOnDisconnectLayer::call_timeout");
        is_tracked && (by_policy || (by_layer && !self.has("Policy::call_timeout", &[Most])))
    }

    /// Returns `true` if its sessions may expire between two requests.
    fn loses_sessions(self) -> bool {
        use Extreme::{Least, Small, Zero};
        self.server == Server::Wrapped
            && self.has(
                "CancellableSessionManager::idle_timeout",
                &[Zero, Least, Small],
            )
    }

    /// Returns `true` if a session may expire once its client has disconnected.
    ///
    /// It does not expire while a call keeps it open.
    fn loses_sessions_of_disconnected_clients(self) -> bool {
        use Extreme::{Least, Small, Zero};
        self.has(
            "CancellableSessionManager::lost_timeout",
            &[Zero, Least, Small],
        )
    }

    /// Returns `true` if a call without a client exceeds a limit.
    ///
    /// Such a call keeps running as it would without the layer, and does not keep its session open.
    fn forgets_detached_calls(self) -> bool {
        ["calls", "detached", "detached_per_session"]
            .iter()
            .any(|limit| self.has(&format!("Limits::{limit}"), &[Extreme::Zero]))
    }

    fn run(self) {
        paused_runtime().block_on(async {
            self.answers_a_client_that_stays().await;
            if self.server.has_sessions() && !self.times_out() {
                self.answers_a_client_that_returns().await;
            }
            self.forgets_a_disconnected_client().await;
        });
    }

    async fn answers_a_client_that_stays(self) {
        let Some(world) = World::start(self).await else {
            return;
        };
        let Some(mut stream) = world.call(1, WORK).await else {
            assert!(self.loses_sessions(), "the call was refused");
            return;
        };
        self.check(&stream.read_to_end().await);
        assert!(stream.polls <= MAX_POLLS, "{} polls", stream.polls);
        sleep(ABSENCE).await;
        assert_eq!(world.calls.len(), 0);
    }

    async fn answers_a_client_that_returns(self) {
        let Some(world) = World::start(self).await else {
            return;
        };
        let Some(mut stream) = world.call(1, LONG_WORK).await else {
            assert!(self.loses_sessions(), "the call was refused");
            return;
        };
        assert!(timeout(ABSENCE, stream.read_to_end()).await.is_err());
        let id = stream.last_event_id().expect("an event").to_owned();
        drop(stream);
        sleep(ABSENCE).await;
        let last = [("last-event-id", id.as_str())];
        let resumed = world.send("GET", &last, String::new()).await;
        if self.forgets_detached_calls()
            && (self.loses_sessions() || self.loses_sessions_of_disconnected_clients())
        {
            return;
        }
        assert_eq!(resumed.status(), 200);
        let mut resumed = Reading::of(resumed);
        self.check(&resumed.read_to_end().await);
    }

    async fn forgets_a_disconnected_client(self) {
        let Some(world) = World::start(self).await else {
            return;
        };
        {
            // The head might not arrive until the answer does.
            let call = pin!(world.call(1, ABANDONED_WORK));
            match timeout(ABSENCE, call).await {
                Ok(Some(mut stream)) => {
                    let _left_or_timed_out = timeout(ABSENCE, stream.read_to_end()).await;
                }
                Ok(None) => assert!(self.loses_sessions(), "the call was refused"),
                Err(_) => {}
            }
        }
        sleep(VERY_LONG).await;
        // The operator keeps postponing the cancellation, so only a session manager can see that the call has ended.
        let is_postponed = self.has("Confirmation::Postpone", &[Extreme::Most]);
        if self.server == Server::Wrapped || !is_postponed {
            assert_eq!(world.calls.len(), 0, "the call is tracked forever");
        }
    }

    fn check(self, answer: &Json) {
        if self.times_out() {
            assert_eq!(answer["error"]["code"], TIMED_OUT, "{answer}");
        } else {
            assert_eq!(answer["result"]["content"][0]["text"], "done", "{answer}");
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.server)?;
        for (option, extreme) in self.settings() {
            write!(f, " {}({extreme:?})", option.path)?;
        }
        Ok(())
    }
}

// === impl World ===

impl World {
    /// Returns `None` if its session has expired before the client could use it.
    async fn start(cell: Cell) -> Option<Self> {
        let mut options = Options::new();
        for (option, extreme) in cell.settings() {
            options = (option.set)(options, extreme);
        }
        let mut local = LocalSessionManager::default();
        local.session_config = SessionConfig::default();
        local.session_config.keep_alive = None;
        let sessions = match cell.server {
            Server::Wrapped => {
                let mut sessions = CancellableSessionManager::new(local);
                if let Some(idle) = options.idle_timeout {
                    sessions = sessions.idle_timeout(idle);
                }
                if let Some(lost) = options.lost_timeout {
                    sessions = sessions.lost_timeout(lost);
                }
                Sessions::Wrapped(Arc::new(sessions))
            }
            _ => Sessions::Local(Arc::new(local)),
        };
        let handler = Scripted::labelled(async |ms, context| {
            let works = sleep(Duration::from_millis(ms.parse().expect("a number")));
            tokio::select! {
                () = context.ct.cancelled() => {}
                () = works => {}
            }
            Ok("done".to_owned())
        });
        let mode = match cell.server {
            Server::StatelessSse => Mode::StatelessSse,
            Server::StatelessJson => Mode::StatelessJson,
            _ => Mode::Session,
        };
        let config = mode.config().with_sse_keep_alive(None);
        let policy = options.policy;
        let layer = options.layer.policy(move |_| policy).limits(options.limits);
        let calls = layer.calls();
        let router = match options.abort_grace {
            Some(abort_grace) => {
                sessions.router(AbortOnCancel::new(handler).after(abort_grace), config)
            }
            None => sessions.router(handler, config),
        };
        let mut world = Self {
            router: router.layer(layer),
            calls,
            session: None,
        };
        if cell.server.has_sessions() {
            let is_there = world.connect().await;
            assert!(is_there || cell.loses_sessions(), "its session has ended");
            return is_there.then_some(world);
        }
        Some(world)
    }

    async fn connect(&mut self) -> bool {
        let [initialize, initialized] = handshake("2025-11-25");
        let response = self.send("POST", &[], initialize.to_string()).await;
        let session = response.headers().get("mcp-session-id");
        self.session = session.map(|id| id.to_str().expect("visible").to_owned());
        let mut stream = Reading::of(response);
        stream.read_to_end().await;
        let response = self.send("POST", &[], initialized.to_string()).await;
        response.status() == 202
    }

    /// Returns `None` if the session has expired.
    async fn call(&self, id: u64, work: Duration) -> Option<Reading> {
        let message = json!({
            "jsonrpc": "2.0", "id": id, "method": "tools/call",
            "params": { "name": "work", "arguments": { "label": work.as_millis().to_string() } },
        });
        let response = self.send("POST", &[], message.to_string()).await;
        if response.status() == 404 {
            return None;
        }
        assert_eq!(response.status(), 200);
        Some(Reading::of(response))
    }

    async fn send(&self, method: &str, headers: &[(&str, &str)], body: String) -> Response {
        let mut request = HttpRequest::builder()
            .method(method)
            .uri(PATH)
            .header("host", "localhost")
            .header("accept", "application/json, text/event-stream")
            .header("content-type", "application/json")
            .header("mcp-protocol-version", "2025-11-25");
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body)).expect("a request");
        let Ok(response) = self.router.clone().oneshot(request).await;
        response
    }
}

// === impl Reading ===

impl Reading {
    fn of(response: Response) -> Self {
        Self {
            body: response.into_body(),
            text: String::new(),
            polls: 0,
        }
    }

    /// Returns the answer, or null.
    async fn read_to_end(&mut self) -> Json {
        let (body, polls) = (&mut self.body, &mut self.polls);
        let mut body = pin!(body);
        while let Some(frame) = poll_fn(|cx| {
            *polls += 1;
            body.as_mut().poll_frame(cx)
        })
        .await
        {
            let data = frame.expect("a frame").into_data().unwrap_or_default();
            self.text += str::from_utf8(&data).expect("whole characters");
        }
        let lines = self.text.lines().map(|line| line.strip_prefix("data: "));
        let mut messages = lines
            .map(|data| data.unwrap_or(&self.text))
            .filter_map(|data| serde_json::from_str::<Json>(data).ok());
        let answer = messages.find(|message| message.get("method").is_none());
        answer.unwrap_or_default()
    }

    fn last_event_id(&self) -> Option<&str> {
        let mut ids = self
            .text
            .lines()
            .filter_map(|line| line.strip_prefix("id: "));
        ids.next_back()
    }
}

// === The tests ===

fn alone() -> Vec<Cell> {
    let servers = SERVERS.into_iter();
    let cells = servers.flat_map(|server| {
        settings().map(move |first| Cell {
            server,
            first,
            second: None,
        })
    });
    cells.collect()
}

fn pairs() -> Vec<Cell> {
    let pairs = alone().into_iter().flat_map(|cell| {
        let others = settings().filter(move |(option, _)| option.path != cell.first.0.path);
        others.map(move |second| Cell {
            second: Some(second),
            ..cell
        })
    });
    pairs.collect()
}

fn settings() -> impl Iterator<Item = (&'static NumericOption, Extreme)> {
    NUMERIC_OPTIONS
        .iter()
        .flat_map(|option| EXTREMES.into_iter().map(move |extreme| (option, extreme)))
}

#[test]
fn no_extreme_of_an_option_ends_a_call_of_a_connected_client() {
    let chosen = env::var("EXTREMES").unwrap_or_default();
    let (mut cells, mut pairs) = (alone(), pairs());
    let mut dice = Dice::new();
    if chosen.is_empty() {
        dice.shuffle(&mut pairs);
        pairs.truncate(SAMPLE);
    }
    cells.append(&mut pairs);
    if !["", "all"].contains(&&*chosen) {
        cells.retain(|cell| cell.to_string().contains(&chosen));
    }
    assert!(!cells.is_empty(), "no cell has {chosen:?} in its name");

    let count = cells.len();
    let (send, results) = mpsc::channel();
    let mut running = Vec::new();
    for nth in 0..THREADS {
        let own_cells: Vec<Cell> = cells.iter().skip(nth).step_by(THREADS).copied().collect();
        running.push(own_cells.clone());
        let send = send.clone();
        thread::spawn(move || {
            for cell in own_cells {
                let has_failed = catch_unwind(AssertUnwindSafe(|| cell.run())).is_err();
                send.send((nth, has_failed.then(|| cell.to_string())))
                    .expect("the test is waiting");
            }
        });
    }
    drop(send);
    let mut failed = Vec::new();
    let mut done = [0; THREADS];
    for _ in 0..count {
        let Ok((nth, failure)) = results.recv_timeout(CELL_TIMEOUT) else {
            let stuck = running
                .iter()
                .zip(done)
                .filter_map(|(own_cells, done)| own_cells.get(done));
            let stuck: Vec<String> = stuck.map(ToString::to_string).collect();
            panic!("these cells do not end: {stuck:#?}");
        };
        done[nth] += 1;
        failed.extend(failure);
    }
    let failures = failed.len();
    assert!(failed.is_empty(), "{failures} of {count}: {failed:#?}");
}

#[test]
fn the_list_is_complete() {
    let api = include_str!("../../public_api/mcp-cancel-on-disconnect.txt");
    let mut found = Vec::new();
    for line in api.lines() {
        let given = line.split(" -> ").next().unwrap_or(line);
        let numbers = ["Duration", "usize", "u16", "u32", "u64", "i64", "NonZero"];
        let is_setter = ["fn ", "async fn ", "variant "]
            .iter()
            .any(|kind| given.starts_with(kind));
        let Some((path, parameters)) = given.split_once('(') else {
            continue;
        };
        if is_setter && numbers.iter().any(|number| parameters.contains(number)) {
            let path: Vec<&str> = path.rsplitn(3, "::").collect();
            found.push(format!("{}::{}", path[1], path[0]));
        }
    }
    let mut listed: Vec<&str> = NUMERIC_OPTIONS.iter().map(|option| option.path).collect();
    listed.extend(EXCLUDED.iter().map(|(path, _)| *path));
    listed.sort_unstable();
    found.sort_unstable();
    assert_eq!(listed, found);
}

#[tokio::test(start_paused = true)]
async fn a_drain_with_an_extreme_limit_returns() {
    for server in SERVERS {
        for extreme in EXTREMES {
            let option = NUMERIC_OPTIONS.last().expect("an option");
            let cell = Cell {
                server,
                first: (option, Extreme::Most),
                second: None,
            };
            let world = World::start(cell).await.expect("a session");
            let call = world.call(1, WORK);
            let drain = async {
                sleep(Duration::from_millis(10)).await;
                world.calls.drain(extreme.duration()).await
            };
            let (stream, report) = tokio::join!(
                async { call.await.expect("a response").read_to_end().await },
                drain
            );
            let (ended, cancelled) = if extreme == Extreme::Most {
                assert_eq!(stream["result"]["content"][0]["text"], "done");
                (1, 0)
            } else {
                (0, 1)
            };
            assert_eq!(
                (report.ended, report.cancelled),
                (ended, cancelled),
                "{server:?} {extreme:?}"
            );
        }
    }
}
