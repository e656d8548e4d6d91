//! Prints what a disconnect does to a tool call, with bare rmcp and with this crate.
//!
//! `cargo run --example demo` starts a real server on the loopback interface for every cell of the table. Clients call
//! a tool that works for 5 s, and some disconnect in the middle. A cell shows what happened to the *tool*. The exit
//! code is 0 only if every result was as expected.
//!
//! | file | what to see there |
//! |---|---|
//! | `server.rs` | the three set-ups |
//! | `tool.rs` | a tool that stops when it is cancelled |
//! | `client.rs` | a client that disconnects |
//! | `scenario.rs` | the calls of each scenario, and their expected results |

use std::{error::Error, process::ExitCode, time::Duration};

use mcp_cancel_on_disconnect::{Grace, MIN_GRACE};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::{
    client::CALL_ID,
    scenario::{Cell, ClientAction, Scenario},
    server::{Mode, SetUp},
};

mod client;
#[path = "../shared/raw.rs"]
mod raw;
mod scenario;
mod server;
mod tool;

type Result<T, E = Box<dyn Error + Send + Sync>> = std::result::Result<T, E>;

const SCENARIOS: &[Scenario] = &[
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

/// Delay between the starts of two scenarios. Chosen so that no two clients disconnect at the same time.
const STAGGER: Duration = Duration::from_millis(75);

#[tokio::main]
async fn main() -> Result<ExitCode> {
    println!("A tool works for 5 s; clients hang up after 0.3 s. Times count from the hang-up.");
    println!(
        "Every call has the JSON-RPC id {CALL_ID}. Unless a row names a grace, it is Grace::Immediate."
    );
    println!("By default a session call waits {MIN_GRACE:?} for its client to reconnect.\n");
    let cells = play_all().await?;
    print_table(&cells);
    let unexpected: Vec<_> = cells.iter().filter(|cell| !cell.is_as_expected()).collect();
    if unexpected.is_empty() {
        println!("\nAll {} calls ended as expected.", cells.len());
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("\nNot as expected:");
    for cell in unexpected {
        eprintln!("- {cell}; expected: {}", cell.expected);
    }
    Ok(ExitCode::FAILURE)
}

/// Plays every scenario with every set-up, and reports each cell as soon as it is known.
async fn play_all() -> Result<Vec<Cell>> {
    let begun = Instant::now();
    let mut plays = JoinSet::new();
    let mut delay = Duration::ZERO;
    for scenario in SCENARIOS {
        for set_up in SetUp::ALL {
            plays.spawn(async move {
                sleep(delay).await;
                scenario.play(set_up).await
            });
            delay += STAGGER;
        }
    }
    let mut cells = Vec::new();
    while let Some(played) = plays.join_next().await {
        for cell in played?? {
            println!("{:4.1} s  {cell}", begun.elapsed().as_secs_f32());
            cells.push(cell);
        }
    }
    Ok(cells)
}

fn print_table(cells: &[Cell]) {
    let line = |row: &str, [bare, layer, both]: [String; 3]| {
        println!("{row:40} | {bare:22} | {layer:22} | {both}");
    };
    let rule = |width| "-".repeat(width);
    println!();
    line("set-up", SetUp::ALL.map(|set_up| set_up.to_string()));
    line(&rule(40), [rule(22), rule(22), rule(22)]);
    for (row, _) in SCENARIOS.iter().flat_map(|scenario| scenario.clients) {
        let columns = SetUp::ALL.map(|set_up| {
            let mut cells = cells.iter();
            let cell = cells.find(|cell| cell.row == *row && cell.set_up == set_up);
            cell.map(|cell| cell.outcome.to_string())
                .unwrap_or_default()
        });
        line(row, columns);
    }
}
