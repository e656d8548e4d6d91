//! The server's process. It serves every kind of call with and without the options, stops the network under all of them
//! at once, and checks the results.

use std::{
    fmt::Write as _, io::Write as _, net::SocketAddr, process::Stdio, sync::Arc, time::Duration,
};

use axum::{Extension, Router, extract::Path, routing::get};
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancellableSessionManager, Grace,
    socket::{DeadPeer, Peer, WatchedListener},
};
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use test_support::{Mode, Tools, Witness, router, within};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::TcpListener,
    process::{Child, ChildStdin, ChildStdout, Command},
    time::Instant,
};

use crate::{
    calls::{Calls, Kind, ROUNDS, ROWS},
    client,
    namespace::{CLIENT, LOOPBACK, Role, SERVER, Unshare},
};

/// A call within the server's namespace, which must keep running.
const LIVE_CALL: u32 = ROUNDS;

const IDLE: Duration = Duration::from_secs(2);
const INTERVAL: Duration = Duration::from_secs(1);
const PROBES: u32 = 3;
const USER_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a silent stream is written to.
const WRITES: Duration = Duration::from_secs(1);

/// How far a busy machine may exceed the documented bound.
const MARGIN: Duration = Duration::from_secs(5);

/// How long the bare server is observed. The kernel's own timeout is about 15 minutes.
const OBSERVATION_TIME: Duration = Duration::from_secs(20);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Setup {
    Bare,
    WithOptions,
}

/// One row of the table: the same calls to both servers.
struct Row {
    bare: Calls,
    with_options: Calls,
}

/// How long after the network failed each of a cell's handlers was notified, sorted. `None` for those that were not.
struct Seen(Vec<Option<Duration>>);

/// The client's process.
struct Client {
    _process: Child,
    orders: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
}

pub(crate) async fn run() {
    let mut client = Client::start().await;
    let witness = Witness::new();
    let mut rows = Vec::new();
    for (kind, protocol) in ROWS {
        let calls = async |setup| Calls {
            kind,
            protocol,
            addr: serve(kind, setup, &witness).await,
        };
        rows.push(Row {
            bare: calls(Setup::Bare).await,
            with_options: calls(Setup::WithOptions).await,
        });
    }
    let calls: Vec<_> = rows.iter().flat_map(Row::both).collect();
    client.order(&serde_json::to_string(&calls).unwrap()).await;
    let mut live = Vec::new();
    for row in &rows {
        live.push(row.with_options.call(LIVE_CALL).await);
    }
    let running = calls.len() * ROUNDS as usize + live.len();
    witness.running_reaches(running).await;

    let silent = Instant::now();
    client.order(client::SILENCE).await;
    tokio::time::sleep_until(silent + OBSERVATION_TIME).await;

    let mut table = format!(
        "\nThe network dies under {ROUNDS} calls a cell. Seconds until their handlers know: min / median / max.\n\n\
         {:32} | {:16} | with the options\n{:-<32} | {:-<16} | {:-<16}\n",
        "", "bare rmcp", "", "", "",
    );
    let mut broken = Vec::new();
    for row in &rows {
        let bare = Seen::by(&row.bare, &witness, silent);
        let with_options = Seen::by(&row.with_options, &witness, silent);
        let name = format!("{}, {}", row.bare.kind, row.bare.protocol);
        writeln!(
            table,
            "{name:32} | {:16} | {}",
            bare.show(),
            with_options.show()
        )
        .unwrap();
        if bare.0.iter().any(Option::is_some) {
            broken.push(format!(
                "{name}: a bare server noticed, so the network was not silent"
            ));
        }
        if !witness.is_running(&row.with_options.label(LIVE_CALL)) {
            broken.push(format!(
                "{name}: the options ended the call of a client that lives"
            ));
        }
        let bound = bound(row.bare.kind);
        if !with_options.is_within(bound + MARGIN) {
            broken.push(format!(
                "{name}: not every handler knew within {bound:?} and {MARGIN:?}"
            ));
        }
    }
    // Written straight to stderr, because the test harness captures what a passing test prints.
    let mut out = std::io::stderr();
    writeln!(out, "{table}").unwrap();
    assert!(broken.is_empty(), "{broken:#?}");
}

/// `DeadPeer`'s documented bound. It counts from the client's last packet, which was sent before the failure.
fn bound(kind: Kind) -> Duration {
    match kind {
        Kind::Session | Kind::Sse => WRITES + USER_TIMEOUT,
        Kind::Json | Kind::Pipelined => IDLE + INTERVAL * PROBES,
    }
}

/// Serves one cell on a port of its own.
async fn serve(kind: Kind, setup: Setup, witness: &Witness) -> SocketAddr {
    let listener = TcpListener::bind((SERVER.address, 0)).await.unwrap();
    let addr = listener.local_addr().unwrap();
    let app = app(kind, setup, witness);
    match setup {
        Setup::Bare => spawn(async move { axum::serve(listener, app).await.unwrap() }),
        Setup::WithOptions => {
            let options = DeadPeer::new()
                .idle(IDLE)
                .interval(INTERVAL)
                .probes(PROBES)
                .user_timeout(USER_TIMEOUT);
            assert!(options.apply(&listener).unwrap().is_complete());
            let make = app.into_make_service_with_connect_info::<Peer>();
            let listener = WatchedListener::new(listener);
            spawn(async move { axum::serve(listener, make).await.unwrap() });
        }
    }
    addr
}

fn app(kind: Kind, setup: Setup, witness: &Witness) -> Router {
    let mode = match kind {
        Kind::Session => Mode::Session,
        Kind::Sse => Mode::StatelessSse,
        Kind::Json => Mode::StatelessJson,
        Kind::Pipelined => return waiting(setup, witness),
    };
    let tools = Tools::new(witness);
    let config = mode.config().disable_allowed_hosts();
    let config = config.with_sse_keep_alive(None);
    match setup {
        Setup::Bare => {
            let sessions = Arc::new(LocalSessionManager::default());
            router(tools.service_with(config, sessions))
        }
        Setup::WithOptions => {
            let sessions = Arc::new(CancellableSessionManager::local(SessionConfig::default()));
            router(tools.service_with(config, sessions)).layer(layer())
        }
    }
}

/// A layer whose probes are the only writes to silent streams.
fn layer() -> CancelOnDisconnectLayer {
    CancelOnDisconnectLayer::new()
        .grace(Grace::Immediate)
        .keep_alive(WRITES)
}

/// A router whose handler waits until its token fires or it is dropped.
fn waiting(setup: Setup, witness: &Witness) -> Router {
    let witness = witness.clone();
    let wait = async move |Path(label): Path<String>, token: Option<Extension<CallToken>>| {
        let running = witness.begin(&label);
        match token {
            Some(Extension(token)) => running.held(token.cancelled()).await,
            None => running.held(std::future::pending()).await,
        };
        running.cancel();
    };
    let router = Router::new().route("/wait/{label}", get(wait));
    match setup {
        Setup::Bare => router,
        Setup::WithOptions => router.layer(layer()),
    }
}

#[allow(
    clippy::disallowed_methods,
    reason = "the server needs a task of its own"
)]
fn spawn(server: impl Future<Output = ()> + Send + 'static) {
    tokio::spawn(server);
}

// === impl Row ===

impl Row {
    fn both(&self) -> [&Calls; 2] {
        [&self.bare, &self.with_options]
    }
}

// === impl Seen ===

impl Seen {
    fn by(calls: &Calls, witness: &Witness, silent: Instant) -> Self {
        let times = (0..ROUNDS).map(|round| {
            let life = witness.find(&calls.label(round)).expect("it was running");
            let known = life.token_fired.or(life.end.map(|end| end.at()));
            known.map(|at| at.duration_since(silent))
        });
        let mut times: Vec<_> = times.collect();
        times.sort();
        Self(times)
    }

    fn is_within(&self, bound: Duration) -> bool {
        let mut times = self.0.iter();
        times.all(|time| time.is_some_and(|time| time <= bound))
    }

    /// Returns the minimum, median and maximum. If not every handler was notified, returns how many were.
    fn show(&self) -> String {
        let times: Option<Vec<_>> = self.0.iter().copied().collect();
        match times.as_deref() {
            Some([min, .., max]) => {
                let median = self.0[self.0.len() / 2].unwrap_or_default();
                let [min, median, max] = [*min, median, *max].map(|time| time.as_secs_f64());
                format!("{min:.1} / {median:.1} / {max:.1}")
            }
            _ => {
                let notified = self.0.iter().flatten().count();
                format!("{notified} of {ROUNDS} in {OBSERVATION_TIME:?}")
            }
        }
    }
}

// === impl Client ===

impl Client {
    /// Starts the process and joins the two namespaces.
    async fn start() -> Self {
        let mut process = Command::from(Unshare::AS_ROOT.command(Role::Client))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let id = process.id().expect("it was just started");
        let mut client = Self {
            orders: process.stdin.take().unwrap(),
            answers: BufReader::new(process.stdout.take().unwrap()).lines(),
            _process: process,
        };
        // Once it has written, the process is in its namespace.
        client.until_done("start").await;
        SERVER.join(&CLIENT, id);
        SERVER.up();
        LOOPBACK.up();
        client.order(client::UP).await;
        client
    }

    /// Sends an order and waits until it has been carried out.
    async fn order(&mut self, order: &str) {
        let line = format!("{order}\n");
        self.orders.write_all(line.as_bytes()).await.unwrap();
        self.until_done(order).await;
    }

    async fn until_done(&mut self, order: &str) {
        let what = format!("the client to do: {order}");
        let answered = async {
            while self.answers.next_line().await.unwrap().expect("it exists") != client::DONE {}
        };
        within(what, answered).await;
    }
}
