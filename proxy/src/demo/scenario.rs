//! Scenarios: a server, the steps of its clients, and the outcomes of their calls.

use std::{
    env, fmt, fs,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use futures_util::future::join_all;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use tokio::time::{sleep, timeout};
use tower_layer::Layer as _;

use super::{
    bridge::Bridge,
    client::{Client, Error},
    server,
};
use crate::{
    event_store::{EventStore, Limits},
    frontend::{Frontend, FrontendLimits, RequestFilter},
    http_service::{HttpService, InnerService, OuterService},
    stdio::{Options, Program, Stdio},
};

/// How long the tool works.
pub(super) const WORK: Duration = Duration::from_secs(4);

/// How long a client is connected before it disconnects.
const DISCONNECT_AFTER: Duration = Duration::from_millis(300);

/// How long a client waits before it resumes, after its disconnect or after the tool's end.
const RESUME_AFTER: Duration = Duration::from_secs(1);

/// The reconnect delay that the proxy sends. Chosen because the graces here are short.
const RETRY: Duration = Duration::from_millis(500);

/// Maximum delay of a cancel: 1 s. Chosen because the machine may be busy.
const TOLERANCE: Duration = Duration::from_secs(1);

/// Maximum duration of a client's steps: 12 s.
const LIMIT: Duration = Duration::from_secs(12);

/// Interval of the checks of a server's log.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A server, and the clients that call its tool at the same time. Each client has a row in the table.
pub(super) struct Scenario {
    grace: Grace,
    pub(super) clients: &'static [(&'static str, ClientStep)],
}

pub(super) const SCENARIOS: &[Scenario] = &[
    Scenario {
        grace: Grace::Immediate,
        clients: &[("no grace: client disconnects", ClientStep::Disconnects)],
    },
    Scenario {
        grace: Grace::Immediate,
        clients: &[
            (
                "two sessions, same id 7: one disconnects",
                ClientStep::Disconnects,
            ),
            ("two sessions, same id 7: other stays", ClientStep::Stays),
        ],
    },
    Scenario {
        grace: Grace::After(Duration::from_secs(2)),
        clients: &[(
            "grace of 2 s: client never resumes",
            ClientStep::Disconnects,
        )],
    },
    Scenario {
        grace: Grace::After(Duration::from_secs(2)),
        clients: &[(
            "grace of 2 s: client resumes after 1 s",
            ClientStep::Resumes,
        )],
    },
    Scenario {
        grace: Grace::Auto,
        clients: &[(
            "default grace: resumes after tool's end",
            ClientStep::ResumesLate,
        )],
    },
];

/// What a client does in the middle of its call.
#[derive(Clone, Copy)]
pub(super) enum ClientStep {
    Disconnects,
    Stays,
    /// Disconnects, and resumes while the tool is working.
    Resumes,
    /// Disconnects, and resumes when the tool has finished.
    ResumesLate,
}

/// The program in front of the server.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum SetUp {
    Bridge,
    Proxy,
}

/// The outcome of one client's call.
pub(super) struct Cell {
    pub(super) row: &'static str,
    pub(super) set_up: SetUp,
    pub(super) expected: Expected,
    pub(super) outcome: CallOutcome,
}

#[derive(Clone, Copy)]
pub(super) enum Expected {
    /// Cancelled after this time from the disconnect.
    Cancelled(Duration),
    KeepRunning,
    Answered,
    Unanswered,
}

pub(super) enum CallOutcome {
    /// The tool was cancelled, after this time from the disconnect.
    Cancelled(Duration),
    /// The tool worked to its end, for this time after the disconnect.
    Completed(Duration),
    /// The client got the answer.
    Answered,
    /// The tool worked to its end, but the client did not get the answer.
    Unanswered,
    /// The tool was cancelled, although the client stayed or resumed in time.
    CancelledWrongly,
    /// The scenario failed.
    Broken(String),
}

/// The log that a server writes. Dropping it removes the file.
struct ToolLog(PathBuf);

// === impl Scenario ===

impl Scenario {
    /// Plays all clients against a server on a port of its own, until their calls have ended.
    pub(super) async fn play(&self, set_up: SetUp) -> Result<Vec<Cell>, Error> {
        let tool_log = ToolLog::new()?;
        let arguments = [
            server::COMMAND.into(),
            "--notes".into(),
            tool_log.0.clone().into(),
        ];
        let program = Program::new(env::current_exe()?, arguments);
        match set_up {
            SetUp::Bridge => {
                self.play_behind(Bridge::new(program), set_up, &tool_log)
                    .await
            }
            SetUp::Proxy => {
                let limits = Limits {
                    retry: RETRY,
                    ..Limits::default()
                };
                let stdio = Stdio::new(Options::new(program), EventStore::new(limits))?;
                let layer = CancelOnDisconnectLayer::new().grace(self.grace);
                let service = OuterService(layer.layer(InnerService(stdio.clone())));
                let cells = self.play_behind(service, set_up, &tool_log).await;
                stdio.shutdown(LIMIT).await;
                cells
            }
        }
    }

    async fn play_behind(
        &self,
        service: impl HttpService,
        set_up: SetUp,
        tool_log: &ToolLog,
    ) -> Result<Vec<Cell>, Error> {
        let frontend = Frontend::bind(
            ([127, 0, 0, 1], 0).into(),
            RequestFilter::new(Vec::new(), Vec::new()),
            FrontendLimits::default(),
        )
        .await?;
        let addr = frontend.local_addr()?;
        let clients = self.clients.iter().enumerate();
        let cells = clients.map(async |(caller, &(row, step))| Cell {
            row,
            set_up,
            expected: self.expected(step, set_up),
            outcome: outcome(addr, step, &format!("call-{caller}"), tool_log).await,
        });
        tokio::select! {
            () = frontend.serve(service, std::future::pending()) => Err("the server stopped".into()),
            cells = join_all(cells) => Ok(cells),
        }
    }

    fn expected(&self, step: ClientStep, set_up: SetUp) -> Expected {
        match (step, set_up) {
            (ClientStep::Stays, _) => Expected::Answered,
            (ClientStep::Disconnects, SetUp::Bridge) => Expected::KeepRunning,
            (_, SetUp::Bridge) => Expected::Unanswered,
            (ClientStep::Disconnects, SetUp::Proxy) => Expected::Cancelled(match self.grace {
                Grace::After(grace) => grace,
                _ => Duration::ZERO,
            }),
            (_, SetUp::Proxy) => Expected::Answered,
        }
    }
}

/// Returns the outcome of a call whose client does this step.
async fn outcome(
    addr: SocketAddr,
    step: ClientStep,
    label: &str,
    tool_log: &ToolLog,
) -> CallOutcome {
    let late = || Err(format!("still not over after {LIMIT:?}").into());
    let played = timeout(LIMIT, play(addr, step, label, tool_log)).await;
    let played: Result<CallOutcome, Error> = played.unwrap_or_else(|_| late());
    played.unwrap_or_else(|error| CallOutcome::Broken(error.to_string()))
}

async fn play(
    addr: SocketAddr,
    step: ClientStep,
    label: &str,
    tool_log: &ToolLog,
) -> Result<CallOutcome, Error> {
    let client = Client::begin(addr).await?;
    let mut events = client.call(WORK.as_secs_f64(), label).await?;
    tool_log.find("started", label).await?;
    if let ClientStep::Stays = step {
        return Ok(outcome_of(&events.rest().await?, label, tool_log));
    }
    if let Ok(ended) = timeout(DISCONNECT_AFTER, events.read()).await {
        ended?;
        return Err("the stream ended early".into());
    }
    let last = events.last_id().map(str::to_owned);
    let disconnected_at = now();
    drop(events);
    match step {
        ClientStep::Stays | ClientStep::Disconnects => {
            let (what, at) = tool_log.end(label).await?;
            let after = at.saturating_sub(disconnected_at);
            return Ok(match &*what {
                "cancelled" => CallOutcome::Cancelled(after),
                _ => CallOutcome::Completed(after),
            });
        }
        ClientStep::Resumes => sleep(RESUME_AFTER).await,
        ClientStep::ResumesLate => {
            tool_log.end(label).await?;
            sleep(RESUME_AFTER).await;
        }
    }
    let text = match last {
        Some(last) => client.resume(&last).await?.rest().await?,
        // The client has no event id to resume from.
        None => String::new(),
    };
    tool_log.end(label).await?;
    Ok(outcome_of(&text, label, tool_log))
}

fn outcome_of(text: &str, label: &str, tool_log: &ToolLog) -> CallOutcome {
    match text.contains(&format!("worked for {} s: {label}", WORK.as_secs())) {
        true => CallOutcome::Answered,
        false if tool_log.find_now("cancelled", label).is_some() => CallOutcome::CancelledWrongly,
        false => CallOutcome::Unanswered,
    }
}

fn now() -> Duration {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default()
}

// === impl ToolLog ===

impl ToolLog {
    fn new() -> Result<Self, Error> {
        let mut bits = [0; 8];
        getrandom::fill(&mut bits).map_err(|error| error.to_string())?;
        let name = format!("mcp-cancel-proxy-demo-{:016x}", u64::from_ne_bytes(bits));
        Ok(Self(env::temp_dir().join(name)))
    }

    /// Returns when the event `what` was logged for this call.
    fn find_now(&self, what: &str, label: &str) -> Option<Duration> {
        let text = read(&self.0);
        text.lines().find_map(|line| {
            let mut words = line.split(' ');
            let at = words.next()?.parse().ok()?;
            let is_it = words.nth(1) == Some(what) && words.next() == Some(label);
            is_it.then(|| Duration::from_millis(at))
        })
    }

    async fn find(&self, what: &str, label: &str) -> Result<Duration, Error> {
        loop {
            if let Some(at) = self.find_now(what, label) {
                return Ok(at);
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Waits for the end of a call, and returns how and when it ended.
    async fn end(&self, label: &str) -> Result<(String, Duration), Error> {
        tokio::select! {
            at = self.find("cancelled", label) => Ok(("cancelled".into(), at?)),
            at = self.find("finished", label) => Ok(("finished".into(), at?)),
        }
    }
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

impl Drop for ToolLog {
    fn drop(&mut self) {
        // A file that is left behind is in the directory for temporary files.
        let _removed = fs::remove_file(&self.0);
    }
}

// === impl Cell ===

impl Cell {
    pub(super) fn is_as_expected(&self) -> bool {
        match (self.expected, &self.outcome) {
            (Expected::Cancelled(due), CallOutcome::Cancelled(after)) => {
                // The tool log has whole milliseconds.
                due <= *after + Duration::from_millis(2) && *after < due + TOLERANCE
            }
            (Expected::KeepRunning, CallOutcome::Completed(_))
            | (Expected::Answered, CallOutcome::Answered)
            | (Expected::Unanswered, CallOutcome::Unanswered) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, set_up, .. } = self;
        write!(f, "{row:40}  {set_up:16}  {}", self.outcome)
    }
}

// === impl SetUp ===

impl SetUp {
    pub(super) const ALL: [Self; 2] = [Self::Bridge, Self::Proxy];
}

impl fmt::Display for SetUp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Bridge => "bare bridge",
            Self::Proxy => "mcp-cancel-proxy",
        })
    }
}

// === impl Expected ===

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled(due) => {
                write!(f, "cancelled after {due:?}, {TOLERANCE:?} late at most")
            }
            Self::KeepRunning => f.write_str("keeps running"),
            Self::Answered => f.write_str("gets its answer"),
            Self::Unanswered => f.write_str("gets no answer"),
        }
    }
}

// === impl CallOutcome ===

impl fmt::Display for CallOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self {
            Self::Cancelled(after) if *after < TOLERANCE => {
                format!("cancelled after {} ms", after.as_millis())
            }
            Self::Cancelled(after) => format!("cancelled after {:.1} s", after.as_secs_f64()),
            Self::Completed(after) => format!("kept running {:.1} s", after.as_secs_f64()),
            Self::Answered => "got its answer".into(),
            Self::Unanswered => "got no answer".into(),
            Self::CancelledWrongly => "cancelled for no reason".into(),
            Self::Broken(why) => format!("broken: {why}"),
        };
        f.pad(&text)
    }
}
