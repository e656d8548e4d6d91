//! Makes calls whose clients disconnect, and prints a table of the outcomes.

use std::{
    fmt,
    io::{self, Write as _},
    process::ExitCode,
    time::Duration,
};

use serde_json::Value;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use super::raw::{Client, Connection};

/// The JSON-RPC id of every call. Calls can only be distinguished by their sessions.
pub(crate) const CALL_ID: u32 = 7;

/// How late a cancellation may be, to allow for a busy machine.
const TOLERANCE: Duration = Duration::from_secs(1);

/// How long a client waits to resume after it has disconnected, or after the tool has ended.
const RESUME_DELAY: Duration = Duration::from_secs(1);

/// How long a client may take in total.
const LIMIT: Duration = Duration::from_secs(12);

/// Time between the starts of two runs, so that no two clients disconnect at the same time.
const STAGGER: Duration = Duration::from_millis(75);

pub(crate) type Error = Box<dyn std::error::Error + Send + Sync>;
pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// What a client does mid-call.
#[derive(Clone, Copy)]
pub(crate) enum ClientAction {
    Disconnects,
    StaysConnected,
    /// Disconnects, and resumes while the tool is still working.
    Resumes,
    /// Disconnects, and resumes once the tool has finished.
    ResumesLate,
}

/// What a tool has recorded about one call. A disconnected client cannot observe this.
pub(crate) trait ToolLog {
    /// Waits until the tool is mid-call for all of the server's clients.
    async fn wait_until_busy(&self) -> Result<()>;

    /// Waits until the tool has ended, and returns how it ended.
    async fn wait_for_end(&self) -> Result<End>;
}

/// How and when a tool ended.
#[derive(Clone, Copy)]
pub(crate) enum End {
    Cancelled { at: Instant },
    Finished { at: Instant },
}

/// The outcome of one client's call, which is one cell of the table.
pub(crate) struct Cell {
    pub(crate) row: &'static str,
    pub(crate) column: &'static str,
    pub(crate) expected: Expected,
    pub(crate) outcome: Outcome,
}

/// How a call is expected to end.
#[derive(Clone, Copy)]
pub(crate) enum Expected {
    /// Cancelled this long after the disconnect.
    Cancelled(Duration),
    RunsOn,
    Answered,
    Unanswered,
}

/// How a call ended.
pub(crate) enum Outcome {
    /// The tool was cancelled this long after the disconnect.
    Cancelled(Duration),
    /// The tool ran to completion, finishing this long after the disconnect.
    RanOn(Duration),
    /// The client got the answer.
    Answered,
    /// The tool ran to completion, but the client did not get the answer.
    Unanswered,
    /// The tool was cancelled even though the client stayed connected or resumed in time.
    CancelledWrongly,
    /// The scenario failed.
    Failed(String),
}

/// Calls the tool `work`, and returns the call's outcome.
pub(crate) async fn outcome(
    client: Result<Client>,
    arguments: Value,
    answer: &str,
    action: ClientAction,
    tool: &impl ToolLog,
) -> Outcome {
    let timed_out = || Err(format!("did not end within {LIMIT:?}").into());
    let run = async { run(client?, arguments, answer, action, tool).await };
    let finished = timeout(LIMIT, run).await.unwrap_or_else(|_| timed_out());
    finished.unwrap_or_else(|error| Outcome::Failed(error.to_string()))
}

async fn run(
    client: Client,
    arguments: Value,
    answer: &str,
    action: ClientAction,
    tool: &impl ToolLog,
) -> Result<Outcome> {
    let call = client.call(CALL_ID, "work", arguments).await?;
    if let ClientAction::StaysConnected = action {
        return read_answer(Some(call), answer, tool).await;
    }
    tool.wait_until_busy().await?;
    let disconnected = Instant::now();
    let received = call.hang_up();
    match action {
        ClientAction::StaysConnected | ClientAction::Disconnects => {
            return Ok(match tool.wait_for_end().await? {
                End::Cancelled { at } if at < disconnected => Outcome::CancelledWrongly,
                End::Cancelled { at } => Outcome::Cancelled(at - disconnected),
                End::Finished { at } => Outcome::RanOn(at - disconnected),
            });
        }
        ClientAction::Resumes => {}
        ClientAction::ResumesLate => {
            tool.wait_for_end().await?;
        }
    }
    sleep(RESUME_DELAY).await;
    // A client without an event id cannot resume.
    let mut ids = received
        .lines()
        .filter_map(|line| line.strip_prefix("id: "));
    let resumed = match ids.next_back() {
        Some(last) => Some(client.resume(last).await?),
        None => None,
    };
    read_answer(resumed, answer, tool).await
}

/// Reads a response in full, and checks whether it contains the tool's answer.
async fn read_answer(
    response: Option<Connection>,
    answer: &str,
    tool: &impl ToolLog,
) -> Result<Outcome> {
    let response = match response {
        Some(response) => response.expect_accepted().await?.read_to_end().await?,
        None => String::new(),
    };
    Ok(match tool.wait_for_end().await? {
        End::Cancelled { .. } => Outcome::CancelledWrongly,
        End::Finished { .. } if response.contains(answer) => Outcome::Answered,
        End::Finished { .. } => Outcome::Unanswered,
    })
}

/// Runs everything concurrently, and prints each cell as soon as it is known.
pub(crate) async fn run_all<F>(runs: impl IntoIterator<Item = F>) -> Result<Vec<Cell>>
where
    F: Future<Output = Result<Vec<Cell>>> + Send + 'static,
{
    let started = Instant::now();
    let mut running = JoinSet::new();
    let mut delay = Duration::ZERO;
    for run in runs {
        running.spawn(async move {
            sleep(delay).await;
            run.await
        });
        delay += STAGGER;
    }
    let mut cells = Vec::new();
    while let Some(finished) = running.join_next().await {
        for cell in finished?? {
            let seconds = started.elapsed().as_secs_f32();
            print(format_args!("{seconds:4.1} s  {cell}"));
            cells.push(cell);
        }
    }
    Ok(cells)
}

/// Prints a table of all cells, followed by any unexpected outcomes. Returns success if there are none.
pub(crate) fn report<const COLUMNS: usize>(
    rows: impl Iterator<Item = &'static str>,
    columns: [&'static str; COLUMNS],
    cells: &[Cell],
) -> ExitCode {
    print(format_args!(""));
    print_row("", columns);
    print_row(&"-".repeat(40), columns.map(|_| "-".repeat(22)));
    for row in rows {
        let outcome_in = |column| {
            let mut cells = cells.iter();
            let cell = cells.find(|cell| cell.row == row && cell.column == column);
            cell.map(|cell| cell.outcome.to_string())
                .unwrap_or_default()
        };
        print_row(row, columns.map(outcome_in));
    }
    let mut unexpected = cells
        .iter()
        .filter(|cell| !cell.is_as_expected())
        .peekable();
    if unexpected.peek().is_none() {
        let count = cells.len();
        print(format_args!("\nAll {count} calls ended as expected."));
        return ExitCode::SUCCESS;
    }
    print(format_args!("\nNot as expected:"));
    for cell in unexpected {
        print(format_args!("- {cell}; expected: {}", cell.expected));
    }
    ExitCode::FAILURE
}

fn print_row<const COLUMNS: usize>(row: &str, cells: [impl fmt::Display; COLUMNS]) {
    let cells = cells.map(|cell| format!(" | {cell:22}")).concat();
    print(format_args!("{row:40}{}", cells.trim_end()));
}

/// Prints a line. Unlike `println!`, this does not panic if standard output is closed.
pub(crate) fn print(line: fmt::Arguments<'_>) {
    let _ = writeln!(io::stdout(), "{line}");
}

// === impl Cell ===

impl Cell {
    fn is_as_expected(&self) -> bool {
        match (self.expected, &self.outcome) {
            (Expected::Cancelled(delay), Outcome::Cancelled(elapsed)) => {
                delay <= *elapsed && *elapsed < delay + TOLERANCE
            }
            (Expected::RunsOn, Outcome::RanOn(_))
            | (Expected::Answered, Outcome::Answered)
            | (Expected::Unanswered, Outcome::Unanswered) => true,
            _ => false,
        }
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { row, column, .. } = self;
        write!(f, "{row:40}  {column:22}  {}", self.outcome)
    }
}

// === impl Expected ===

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cancelled(delay) => {
                write!(f, "cancelled after {delay:?}, at most {TOLERANCE:?} late")
            }
            Self::RunsOn => f.write_str("runs on"),
            Self::Answered => f.write_str("gets its answer"),
            Self::Unanswered => f.write_str("gets no answer"),
        }
    }
}

// === impl Outcome ===

impl fmt::Display for Outcome {
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
            Self::Failed(reason) => write!(f, "failed: {reason}"),
        }
    }
}
