//! A server and its clients: what they do, and how their calls are expected to end.

use std::time::Duration;

use futures_util::future::join_all;
use mcp_cancel_on_disconnect::Grace;
use serde_json::json;
use tokio::net::TcpListener;

use crate::{
    disconnects::{self, Cell, ClientAction, Expected, Result},
    raw::Client,
    server::{self, Mode, Setup},
    tool::{self, CallLog, Log},
};

/// A server, and the clients that call its tool concurrently. Each client has a row in the table.
pub(crate) struct Scenario {
    mode: Mode,
    grace: Grace,
    pub(crate) clients: &'static [(&'static str, ClientAction)],
}

pub(crate) const SCENARIOS: &[Scenario] = &[
    Scenario {
        mode: Mode::Session,
        grace: Grace::Immediate,
        clients: &[("session mode: client hangs up", ClientAction::Disconnects)],
    },
    Scenario {
        mode: Mode::StatelessSse,
        grace: Grace::Immediate,
        clients: &[("stateless SSE: client hangs up", ClientAction::Disconnects)],
    },
    Scenario {
        mode: Mode::StatelessJson,
        grace: Grace::Immediate,
        clients: &[("stateless JSON: client hangs up", ClientAction::Disconnects)],
    },
    Scenario {
        mode: Mode::Session,
        grace: Grace::Immediate,
        clients: &[("session mode: client stays", ClientAction::StaysConnected)],
    },
    Scenario {
        mode: Mode::Session,
        grace: Grace::Immediate,
        clients: &[
            (
                "two sessions, same id 7: one hangs up",
                ClientAction::Disconnects,
            ),
            (
                "two sessions, same id 7: other stays",
                ClientAction::StaysConnected,
            ),
        ],
    },
    Scenario {
        mode: Mode::StatelessSse,
        grace: Grace::Immediate,
        clients: &[
            (
                "two stateless, same id 7: one hangs up",
                ClientAction::Disconnects,
            ),
            (
                "two stateless, same id 7: other stays",
                ClientAction::StaysConnected,
            ),
        ],
    },
    Scenario {
        mode: Mode::Session,
        grace: Grace::After(Duration::from_secs(2)),
        clients: &[(
            "grace of 2 s: client never resumes",
            ClientAction::Disconnects,
        )],
    },
    Scenario {
        mode: Mode::Session,
        grace: Grace::After(Duration::from_secs(2)),
        clients: &[("grace of 2 s: client back after 1 s", ClientAction::Resumes)],
    },
    Scenario {
        mode: Mode::Session,
        grace: Grace::Auto,
        clients: &[(
            "default grace: back after the tool's end",
            ClientAction::ResumesLate,
        )],
    },
];

// === impl Scenario ===

impl Scenario {
    /// Serves on a new port until all of the clients' calls have ended.
    pub(crate) async fn run(&self, setup: Setup) -> Result<Vec<Cell>> {
        let log = Log::default();
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let addr = listener.local_addr()?;
        let server = axum::serve(listener, server::router(setup, self.mode, self.grace, &log));
        let clients = self.clients.iter().enumerate();
        let cells = clients.map(async |(caller, &(row, action))| {
            let client = match self.mode {
                Mode::Session => Client::connect(addr).await,
                Mode::StatelessSse | Mode::StatelessJson => Ok(Client::without_session(addr)),
            };
            let call = CallLog {
                log: &log,
                caller,
                callers: self.clients.len(),
            };
            let arguments = json!({ "caller": caller });
            let answer = tool::answer(caller);
            Cell {
                row,
                column: setup.name(),
                expected: self.expected(action, setup),
                outcome: disconnects::outcome(
                    client.map_err(Into::into),
                    arguments,
                    &answer,
                    action,
                    &call,
                )
                .await,
            }
        });
        tokio::select! {
            served = server.into_future() => Err(format!("the server stopped: {served:?}").into()),
            cells = join_all(cells) => Ok(cells),
        }
    }

    fn expected(&self, action: ClientAction, setup: Setup) -> Expected {
        let cancelled = match self.grace {
            Grace::After(grace) => Expected::Cancelled(grace),
            _ => Expected::Cancelled(Duration::ZERO),
        };
        match (action, setup, self.mode) {
            (ClientAction::StaysConnected | ClientAction::Resumes, _, _) => Expected::Answered,
            (ClientAction::ResumesLate, Setup::LayerAndSessionManager, _) => Expected::Answered,
            (ClientAction::ResumesLate, _, _) => Expected::Unanswered,
            (ClientAction::Disconnects, Setup::Bare, Mode::Session) => Expected::RunsOn,
            // Without sessions, rmcp notices a disconnect on its own.
            (ClientAction::Disconnects, _, _) => cancelled,
        }
    }
}
