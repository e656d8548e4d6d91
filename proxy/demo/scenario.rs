//! Scenarios: a server, what its clients do, and the expected outcomes of their calls.

use std::{
    env, fs,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use mcp_cancel_proxy::{
    event_store::{EventStore, Limits},
    frontend::{Frontend, FrontendLimits, RequestFilter},
    http_service::{HttpService, InnerService, OuterService},
    stdio::{Options, Program, Stdio},
};
use serde_json::json;
use tokio::time::{Instant, sleep};
use tower_layer::Layer as _;

use super::{
    bridge::Bridge,
    disconnects::{self, Cell, ClientAction, End, Expected, Result, ToolLog},
    raw::Client,
    server,
};

/// How long the tool works.
pub(super) const WORK: Duration = Duration::from_secs(4);

/// How long a client stays connected before it disconnects.
const DISCONNECT_AFTER: Duration = Duration::from_millis(300);

/// The reconnect delay sent by the proxy, short enough for the demo's grace periods.
const RETRY: Duration = Duration::from_millis(500);

/// Maximum duration of the shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(12);

/// How often a server's log is checked.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A server, and the clients that call its tool concurrently. Each client has a row in the table.
pub(super) struct Scenario {
    grace: Grace,
    pub(super) clients: &'static [(&'static str, ClientAction)],
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        grace: Grace::Immediate,
        clients: &[("no grace: client disconnects", ClientAction::Disconnects)],
    },
    Scenario {
        grace: Grace::Immediate,
        clients: &[
            (
                "two sessions, same id 7: one disconnects",
                ClientAction::Disconnects,
            ),
            (
                "two sessions, same id 7: other stays",
                ClientAction::StaysConnected,
            ),
        ],
    },
    Scenario {
        grace: Grace::After(Duration::from_secs(2)),
        clients: &[(
            "grace of 2 s: client never resumes",
            ClientAction::Disconnects,
        )],
    },
    Scenario {
        grace: Grace::After(Duration::from_secs(2)),
        clients: &[(
            "grace of 2 s: client resumes after 1 s",
            ClientAction::Resumes,
        )],
    },
    Scenario {
        grace: Grace::Auto,
        clients: &[(
            "default grace: resumes after tool's end",
            ClientAction::ResumesLate,
        )],
    },
];

/// The program in front of the server.
#[derive(Clone, Copy)]
pub(super) enum Setup {
    Bridge,
    Proxy,
}

/// A server's log. Dropping this removes the file.
struct LogFile(PathBuf);

/// The part of the log about a single call.
struct CallLog<'a> {
    file: &'a LogFile,
    label: &'a str,
}

// === impl Scenario ===

impl Scenario {
    /// Runs all clients against a server on a port of its own, until their calls have ended.
    pub(super) async fn run(&self, setup: Setup) -> Result<Vec<Cell>> {
        let log = LogFile::new()?;
        let arguments = [
            server::COMMAND.into(),
            "--notes".into(),
            log.0.clone().into(),
        ];
        let program = env::current_exe()?;
        match setup {
            Setup::Bridge => {
                let bridge = Bridge::new(program, arguments.to_vec());
                self.run_behind(bridge, setup, &log).await
            }
            Setup::Proxy => {
                let limits = Limits {
                    retry: RETRY,
                    ..Limits::default()
                };
                let program = Program::new(program, arguments);
                let stdio = Stdio::new(Options::new(program), EventStore::new(limits))?;
                let layer = CancelOnDisconnectLayer::new().grace(self.grace);
                let service = OuterService(layer.layer(InnerService(stdio.clone())));
                let cells = self.run_behind(service, setup, &log).await;
                stdio.shutdown(SHUTDOWN_TIMEOUT).await;
                cells
            }
        }
    }

    async fn run_behind(
        &self,
        service: impl HttpService,
        setup: Setup,
        log: &LogFile,
    ) -> Result<Vec<Cell>> {
        let frontend = Frontend::bind(
            ([127, 0, 0, 1], 0).into(),
            RequestFilter::new(Vec::new(), Vec::new()),
            FrontendLimits::default(),
        )
        .await?;
        let addr = frontend.local_addr()?;
        let clients = self.clients.iter().enumerate();
        let cells = clients.map(async |(caller, &(row, action))| {
            let label = format!("call-{caller}");
            let call = CallLog {
                file: log,
                label: &label,
            };
            let client = Client::connect(addr).await.map_err(Into::into);
            let arguments = json!({ "seconds": WORK.as_secs(), "label": label });
            let answer = format!("worked for {} s: {label}", WORK.as_secs());
            Cell {
                row,
                column: setup.name(),
                expected: self.expected(action, setup),
                outcome: disconnects::outcome(client, arguments, &answer, action, &call).await,
            }
        });
        tokio::select! {
            () = frontend.serve(service, std::future::pending()) => Err("the server stopped".into()),
            cells = join_all(cells) => Ok(cells),
        }
    }

    fn expected(&self, action: ClientAction, setup: Setup) -> Expected {
        match (action, setup) {
            (ClientAction::StaysConnected, _) => Expected::Answered,
            (ClientAction::Disconnects, Setup::Bridge) => Expected::RunsOn,
            (_, Setup::Bridge) => Expected::Unanswered,
            (ClientAction::Disconnects, Setup::Proxy) => Expected::Cancelled(match self.grace {
                Grace::After(grace) => grace,
                _ => Duration::ZERO,
            }),
            (_, Setup::Proxy) => Expected::Answered,
        }
    }
}

// === impl Setup ===

impl Setup {
    pub(super) const ALL: [Self; 2] = [Self::Bridge, Self::Proxy];

    /// Returns the name to print.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bridge => "bare bridge",
            Self::Proxy => "mcp-cancel-proxy",
        }
    }
}

// === impl LogFile ===

impl LogFile {
    fn new() -> Result<Self> {
        let mut bits = [0; 8];
        getrandom::fill(&mut bits).map_err(|error| error.to_string())?;
        let name = format!("mcp-cancel-proxy-demo-{:016x}", u64::from_ne_bytes(bits));
        Ok(Self(env::temp_dir().join(name)))
    }
}

impl Drop for LogFile {
    fn drop(&mut self) {
        // If this fails, the file stays in the temporary directory.
        let _ = fs::remove_file(&self.0);
    }
}

// === impl CallLog ===

impl CallLog<'_> {
    /// Returns when `event` was logged for this call, or `None` if it has yet to be logged.
    ///
    /// Logged times are truncated to milliseconds, so this is the end of the logged millisecond.
    fn find(&self, event: &str) -> Option<Instant> {
        let text = fs::read_to_string(&self.file.0).unwrap_or_default();
        let logged_at = text.lines().find_map(|line| {
            let mut words = line.split(' ');
            let logged_at: u64 = words.next()?.parse().ok()?;
            let is_event = words.nth(1) == Some(event) && words.next() == Some(self.label);
            is_event.then(|| UNIX_EPOCH + Duration::from_millis(logged_at + 1))
        })?;
        let age = SystemTime::now().duration_since(logged_at);
        Instant::now().checked_sub(age.unwrap_or_default())
    }
}

impl ToolLog for CallLog<'_> {
    async fn wait_until_busy(&self) -> Result<()> {
        while self.find("started").is_none() {
            sleep(POLL_INTERVAL).await;
        }
        sleep(DISCONNECT_AFTER).await;
        Ok(())
    }

    async fn wait_for_end(&self) -> Result<End> {
        loop {
            if let Some(at) = self.find("cancelled") {
                return Ok(End::Cancelled { at });
            }
            if let Some(at) = self.find("finished") {
                return Ok(End::Finished { at });
            }
            sleep(POLL_INTERVAL).await;
        }
    }
}
