//! A demonstration of what a disconnect does, behind a bare bridge and behind the proxy.
//!
//! `mcp-cancel-proxy --demo` needs no other program. It runs each scenario once behind the bridge and once behind the proxy, with
//! a [scripted server](server) on stdin and stdout. Clients call a tool that runs for 4 s, and some disconnect during the call.
//! Each cell of the printed table shows what happened to the *tool*, as the server recorded it, or to the answer.
//! The exit code is 0 only if all outcomes are as expected.

use std::{ffi::OsString, process::ExitCode, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

/// Writes a line to standard output, and ignores errors.
macro_rules! out {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _written = writeln!(std::io::stdout(), $($text)*);
    }};
}

/// Writes a line to standard error, and ignores errors.
macro_rules! err {
    ($($text:tt)*) => {{
        use std::io::Write as _;
        let _written = writeln!(std::io::stderr(), $($text)*);
    }};
}

mod bridge;
mod client;
mod scenario;
pub mod server;

use self::{
    client::Error,
    scenario::{Cell, SCENARIOS, Setup, WORK},
};

/// The option that requests the demo.
pub const OPTION: &str = "--demo";

/// Time between the starts of two runs, which are then concurrent: 75 ms.
const STAGGER: Duration = Duration::from_millis(75);

/// Runs the demo, or its server, if the arguments request it.
pub async fn run_if_requested(mut arguments: impl Iterator<Item = OsString>) -> Option<ExitCode> {
    let first = arguments.next()?;
    match first.to_str() {
        Some(server::COMMAND) => Some(server::run(arguments)),
        Some(OPTION) => Some(run().await),
        _ => None,
    }
}

/// Runs all scenarios, and prints their outcomes.
pub async fn run() -> ExitCode {
    out!(
        "A tool runs for {WORK:?}. Clients that disconnect do so after 0.3 s. Times are measured from the disconnect."
    );
    out!("The bridge and the proxy run the same server over stdio.\n");
    let cells = match run_all().await {
        Ok(cells) => cells,
        Err(error) => {
            err!("{error}");
            return ExitCode::FAILURE;
        }
    };
    print_table(&cells);
    let mut unexpected = cells
        .iter()
        .filter(|cell| !cell.is_as_expected())
        .peekable();
    if unexpected.peek().is_none() {
        out!("\nAll {} calls ended as expected.", cells.len());
        return ExitCode::SUCCESS;
    }
    err!("\nNot as expected:");
    for cell in unexpected {
        err!("- {cell}; expected: {}", cell.expected);
    }
    ExitCode::FAILURE
}

/// Runs every scenario in every setup, and prints each cell once it is known.
async fn run_all() -> Result<Vec<Cell>, Error> {
    let begun = Instant::now();
    let mut runs = JoinSet::new();
    let mut delay = Duration::ZERO;
    for scenario in SCENARIOS {
        for setup in Setup::ALL {
            runs.spawn(async move {
                sleep(delay).await;
                scenario.run(setup).await
            });
            delay += STAGGER;
        }
    }
    let mut cells = Vec::new();
    while let Some(finished) = runs.join_next().await {
        for cell in finished?? {
            out!("{:4.1} s  {cell}", begun.elapsed().as_secs_f32());
            cells.push(cell);
        }
    }
    Ok(cells)
}

fn print_table(cells: &[Cell]) {
    out!("\n{:40} | {:20} | {}", "", Setup::Bridge, Setup::Proxy);
    out!("{:-<40} | {:-<20} | {:-<20}", "", "", "");
    for (row, _) in SCENARIOS.iter().flat_map(|scenario| scenario.clients) {
        let outcome = |setup| {
            let cell = cells
                .iter()
                .find(|cell| cell.row == *row && cell.setup == setup);
            cell.map(|cell| cell.outcome.to_string())
                .unwrap_or_default()
        };
        out!(
            "{row:40} | {:20} | {}",
            outcome(Setup::Bridge),
            outcome(Setup::Proxy)
        );
    }
}
