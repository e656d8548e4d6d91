//! A server and its clients: their actions, and the actual and expected results of their calls.

use std::{fmt, net::SocketAddr, time::Duration};

use futures_util::future::join_all;
use mcp_cancel_on_disconnect::Grace;
use tokio::{
    net::TcpListener,
    time::{Instant, sleep, timeout},
};

use crate::{
    Result,
    client::Client,
    raw::Connection,
    server::{self, Mode, SetUp},
    tool::{self, End, Log},
};

/// Tolerance for a late cancel. It is generous because the machine may be busy.
const TOLERANCE: Duration = Duration::from_secs(1);

/// Pause before a client resumes: after its disconnect, or after the tool has finished.
const AWAY: Duration = Duration::from_secs(1);

/// Timeout of a call. The tool works for 5 s.
const LIMIT: Duration = Duration::from_secs(12);

/// A server, and the clients that call its tool concurrently. Each client has a row in the table.
pub(crate) struct Scenario {
    pub(crate) mode: Mode,
    pub(crate) grace: Grace,
    pub(crate) clients: &'static [(&'static str, Then)],
}

/// What a client does in the middle of its call.
#[derive(Clone, Copy)]
pub(crate) enum Then {
    HangsUp,
    Stays,
    /// Disconnects, and resumes while the tool works.
    ComesBack,
    /// Disconnects, and resumes when the tool has finished.
    ComesBackLate,
}

/// The result of one client's call.
pub(crate) struct Cell {
    pub(crate) row: &'static str,
    pub(crate) set_up: SetUp,
    pub(crate) expected: Expected,
    pub(crate) fate: Fate,
}

#[derive(Clone, Copy)]
pub(crate) enum Expected {
    /// Cancelled this long after the disconnect.
    Cancelled(Duration),
    RunsOn,
    Answered,
    Unanswered,
}

pub(crate) enum Fate {
    /// The tool was cancelled this long after the disconnect.
    Cancelled(Duration),
    /// The tool ran to its end, this long after the disconnect.
    RanOn(Duration),
    /// The tool ran to its end, and the answer was delivered.
    Answered,
    /// The tool ran to its end, but the answer was lost.
    Unanswered,
    /// The tool was cancelled although the client was connected.
    CancelledWrongly,
    /// The scenario failed.
    Broken(String),
}

// === impl Scenario ===

impl Scenario {
    /// Serves on a new port until the calls of all clients have ended.
    pub(crate) async fn play(&self, set_up: SetUp) -> Result<Vec<Cell>> {
        let log = Log::default();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let server = axum::serve(
            listener,
            server::router(set_up, self.mode, self.grace, &log),
        );
        let clients = self.clients.iter().enumerate();
        let cells = clients.map(async |(caller, &(row, then))| Cell {
            row,
            set_up,
            expected: self.expected(then, set_up),
            fate: self.fate(addr, caller, then, &log).await,
        });
        tokio::select! {
            served = server.into_future() => Err(format!("the server stopped: {served:?}").into()),
            cells = join_all(cells) => Ok(cells),
        }
    }

    async fn fate(&self, addr: SocketAddr, caller: usize, then: Then, log: &Log) -> Fate {
        let call = async {
            let client = Client::connect(addr, self.mode).await?;
            let call = client.call(caller).await?;
            match then {
                Then::HangsUp => {
                    log.busy_for(self.clients.len()).await?;
                    let gone = Instant::now();
                    call.hang_up();
                    Ok(match log.end_for(caller).await? {
                        End::Cancelled { at } if at < gone => Fate::CancelledWrongly,
                        End::Cancelled { at } => Fate::Cancelled(at - gone),
                        End::Finished { at } => Fate::RanOn(at - gone),
                    })
                }
                Then::Stays => answered(call, caller, log).await,
                Then::ComesBack => {
                    log.busy_for(self.clients.len()).await?;
                    call.hang_up();
                    sleep(AWAY).await;
                    answered(client.resume().await?, caller, log).await
                }
                Then::ComesBackLate => {
                    log.busy_for(self.clients.len()).await?;
                    call.hang_up();
                    log.end_for(caller).await?;
                    sleep(AWAY).await;
                    answered(client.resume().await?, caller, log).await
                }
            }
        };
        let late = || Err(format!("did not end within {LIMIT:?}").into());
        let played: Result<Fate> = timeout(LIMIT, call).await.unwrap_or_else(|_| late());
        played.unwrap_or_else(|error| Fate::Broken(error.to_string()))
    }

    fn expected(&self, then: Then, set_up: SetUp) -> Expected {
        let cancelled = match self.grace {
            Grace::After(grace) => Expected::Cancelled(grace),
            _ => Expected::Cancelled(Duration::ZERO),
        };
        match (then, set_up, self.mode) {
            (Then::Stays | Then::ComesBack, _, _) => Expected::Answered,
            (Then::ComesBackLate, SetUp::LayerAndSessionManager, _) => Expected::Answered,
            (Then::ComesBackLate, _, _) => Expected::Unanswered,
            (Then::HangsUp, SetUp::Bare, Mode::Session) => Expected::RunsOn,
            // Without sessions, rmcp notices a disconnect itself.
            (Then::HangsUp, _, _) => cancelled,
        }
    }
}

/// Reads a response to its end, and checks whether it contains the tool's answer.
async fn answered(response: Connection, caller: usize, log: &Log) -> Result<Fate> {
    let response = response.accepted().await?.response().await?;
    Ok(match log.end_for(caller).await? {
        End::Cancelled { .. } => Fate::CancelledWrongly,
        _ if response.contains(&tool::answer(caller)) => Fate::Answered,
        End::Finished { .. } => Fate::Unanswered,
    })
}

// === impl Cell ===

impl Cell {
    pub(crate) fn is_as_expected(&self) -> bool {
        match (self.expected, &self.fate) {
            (Expected::Cancelled(due), Fate::Cancelled(after)) => {
                due <= *after && *after < due + TOLERANCE
            }
            (Expected::RunsOn, Fate::RanOn(_))
            | (Expected::Answered, Fate::Answered)
            | (Expected::Unanswered, Fate::Unanswered) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, set_up, .. } = self;
        write!(f, "{row:40}  {set_up:15}  {}", self.fate)
    }
}

// === impl Expected ===

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled(due) => {
                write!(f, "cancelled after {due:?}, {TOLERANCE:?} late at most")
            }
            Self::RunsOn => f.write_str("runs on"),
            Self::Answered => f.write_str("gets its answer"),
            Self::Unanswered => f.write_str("gets no answer"),
        }
    }
}

// === impl Fate ===

impl fmt::Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled(after) if *after < TOLERANCE => {
                write!(f, "cancelled after {:.1} ms", after.as_secs_f64() * 1e3)
            }
            Self::Cancelled(after) => write!(f, "cancelled after {:.1} s", after.as_secs_f64()),
            Self::RanOn(after) => write!(f, "ran on for {:.1} s", after.as_secs_f64()),
            Self::Answered => f.write_str("got its answer"),
            Self::Unanswered => f.write_str("got no answer"),
            Self::CancelledWrongly => f.write_str("cancelled wrongly"),
            Self::Broken(why) => write!(f, "broken: {why}"),
        }
    }
}
