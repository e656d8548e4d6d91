//! Shows what a disconnect does to a tool call, with bare rmcp and with this crate.
//!
//! `cargo run --example demo` starts a real server on the loopback interface for every cell of the table. Clients call
//! a tool that works for 5 s, and some of them disconnect mid-call. Each cell shows what happened to the *tool*. The
//! exit code is 0 only if every result is as expected.
//!
//! | file | what it contains |
//! |---|---|
//! | `server.rs` | the three setups |
//! | `tool.rs` | a tool that stops when it is cancelled |
//! | `scenario.rs` | each scenario's calls, and their expected outcomes |
//! | `../shared/disconnects.rs` | clients that disconnect, and the table |

use std::process::ExitCode;

use mcp_cancel_on_disconnect::MIN_GRACE;

use crate::{
    disconnects::{CALL_ID, Result},
    scenario::SCENARIOS,
    server::Setup,
};

#[path = "../shared/disconnects.rs"]
mod disconnects;
#[path = "../shared/raw.rs"]
mod raw;
mod scenario;
mod server;
mod tool;

#[tokio::main]
async fn main() -> Result<ExitCode> {
    println!(
        "A tool works for 5 s; clients hang up after 0.3 s. Times are measured from the hang-up."
    );
    println!(
        "Every call has the JSON-RPC id {CALL_ID}. Unless a row says otherwise, the grace period is Grace::Immediate."
    );
    println!("By default a session call waits {MIN_GRACE:?} for its client to reconnect.\n");
    let setups = |scenario| Setup::ALL.map(|setup| (scenario, setup));
    let runs = SCENARIOS.iter().flat_map(setups);
    let cells = disconnects::run_all(runs.map(|(scenario, setup)| scenario.run(setup))).await?;
    let rows = SCENARIOS.iter().flat_map(|scenario| scenario.clients);
    let rows = rows.map(|&(row, _)| row);
    Ok(disconnects::report(
        rows,
        Setup::ALL.map(Setup::name),
        &cells,
    ))
}
