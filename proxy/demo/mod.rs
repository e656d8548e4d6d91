//! Demonstrates the effect of a disconnect, behind a bare bridge and behind the proxy.
//!
//! `mcp-cancel-proxy --demo` needs no other program. It runs each scenario once behind the bridge and once behind the proxy, with
//! a [scripted server](server) on stdin and stdout. Clients call a tool that runs for 4 s, and some of them disconnect mid-call.
//! Each cell in the printed table shows what happened to the *tool*, as the server recorded it, or to the answer. The exit code
//! is 0 only if all outcomes are as expected.
//!
//! `shared` is a link to the folder containing the library demo's clients and table.

use std::{ffi::OsString, process::ExitCode};

use self::{
    disconnects::print,
    scenario::{SCENARIOS, Setup, WORK},
};

mod bridge;
#[path = "shared/disconnects.rs"]
mod disconnects;
#[path = "shared/raw.rs"]
mod raw;
mod scenario;
mod server;

/// The option that runs the demo.
const OPTION: &str = "--demo";

/// Runs the demo or its server if the first argument requests it.
pub(crate) async fn run_if_requested(
    mut arguments: impl Iterator<Item = OsString>,
) -> Option<ExitCode> {
    let first = arguments.next()?;
    match first.to_str() {
        Some(server::COMMAND) => Some(server::run(arguments)),
        Some(OPTION) => Some(run().await),
        _ => None,
    }
}

/// Runs all scenarios and prints their outcomes, or only the error if one cannot be run.
async fn run() -> ExitCode {
    print(format_args!(
        "A tool runs for {WORK:?}. Clients that disconnect do so after 0.3 s. Times are measured from the disconnect."
    ));
    print(format_args!(
        "The bridge and the proxy run the same server over stdio.\n"
    ));
    let setups = |scenario| Setup::ALL.map(|setup| (scenario, setup));
    let runs = SCENARIOS.iter().flat_map(setups);
    let cells = disconnects::run_all(runs.map(|(scenario, setup)| scenario.run(setup))).await;
    let cells = match cells {
        Ok(cells) => cells,
        Err(error) => {
            print(format_args!("{error}"));
            return ExitCode::FAILURE;
        }
    };
    let rows = SCENARIOS.iter().flat_map(|scenario| scenario.clients);
    disconnects::report(
        rows.map(|&(row, _)| row),
        Setup::ALL.map(Setup::name),
        &cells,
    )
}
