//! How long it takes from a client's hang-up until its handler sees the token, by component.
//!
//! `latency [--quick]`. Clients and server share this process and its clock, on separate runtimes.

use std::{fmt, ops::Range};

use benches::prelude::*;
use tokio::runtime::Handle;

/// How many calls share a session.
const PER_SESSION: usize = 100;

/// Timeout for a token that never fires.
const NEVER: Duration = Duration::from_secs(2);

/// Timeout for any other token.
const LIMIT: Duration = Duration::from_secs(30);

/// In what order the clients hang up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, Display)]
#[strum(serialize_all = "lowercase")]
enum Pace {
    /// One call at a time.
    Alone,
    /// Many calls at once, whose clients hang up one by one.
    #[strum(to_string = "one by one")]
    OneByOne,
    /// Many calls at once, whose clients all hang up at once.
    #[strum(to_string = "at once")]
    AtOnce,
}

/// One combination to measure.
#[derive(Debug, Clone, Copy)]
struct Cell {
    mode: Mode,
    setup: Setup,
    close: Close,
    pace: Pace,
    /// How many calls run concurrently.
    calls_at_once: usize,
    /// How often the measurement is repeated.
    rounds: usize,
}

/// When things happened to each of a cell's calls.
///
/// These are the close, the response being dropped, the set-up's own token and the handler's token.
struct Measured {
    cell: Cell,
    moments: Vec<[Option<Duration>; 4]>,
}

fn main() -> Result<()> {
    let clients = runtime()?;
    let load = machine::load();
    let mut measured = Vec::new();
    for cell in cells() {
        let server = workers()?;
        measured.push(clients.block_on(measure(cell, server.handle()))?);
        server.shutdown_background();
        eprintln!("{cell}");
    }
    let ours = measured
        .iter()
        .filter(|measured| measured.cell.setup.is_ours());
    let section = Section {
        rows: measured.iter().map(Measured::row).collect(),
        targets: ours.flat_map(Measured::targets).collect(),
        ..Section::new("latency", json!({ "load": load }))?
    };
    section.publish()
}

fn cells() -> Vec<Cell> {
    let many = if is_quick() { 100 } else { 1_000 };
    let mut cells = Vec::new();
    for mode in Mode::iter() {
        for pace in Pace::iter() {
            let (calls_at_once, rounds) = match pace {
                Pace::Alone => (1, many),
                Pace::OneByOne => (many, 1),
                Pace::AtOnce => (many, 10),
            };
            for close in Close::iter() {
                cells.extend(Setup::iter().map(|setup| Cell {
                    mode,
                    setup,
                    close,
                    pace,
                    calls_at_once,
                    rounds,
                }));
            }
        }
    }
    // A call whose token never fires takes the full timeout.
    cells.retain(|cell| !cell.never_fires() || cell.pace != Pace::OneByOne);
    for cell in cells.iter_mut().filter(|cell| cell.never_fires()) {
        cell.rounds = 1;
    }
    cells
}

async fn measure(cell: Cell, server: &Handle) -> Result<Measured> {
    let ledger = Ledger::new(cell.calls_at_once * cell.rounds, 1);
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::Immediate)
        .observe(ledger.observer());
    let tools = Tools(ledger.clone());
    let stack = || record_drops(tools.served(cell.setup, cell.mode, layer), &ledger);
    let transport = Transport::Socket(serve(server, 1, stack)?[0]);
    let sessions = cell.calls_at_once.div_ceil(PER_SESSION);
    let sessions = Client::open_many(&transport, cell.mode, sessions).await?;
    let mut closed = Vec::new();
    for round in 0..cell.rounds {
        let calls = round * cell.calls_at_once..(round + 1) * cell.calls_at_once;
        closed.extend(hang_up(cell, calls, &sessions, &ledger).await?);
    }
    ledger.release(0).cancel();
    let moments = closed.into_iter().enumerate().map(|(call, closed)| {
        let CallTimes {
            dropped,
            cancelled,
            token,
            ..
        } = ledger.times_of(call);
        let [dropped, fired, token] = [dropped, cancelled, token].map(|stamp| stamp.get().copied());
        [Some(closed), dropped, fired, token]
    });
    let moments = moments.collect();
    Ok(Measured { cell, moments })
}

/// Starts the calls, disconnects their clients and waits for the tokens. Returns when the clients disconnected.
///
/// # Errors
///
/// Fails unless every token that should fire in this cell has fired.
async fn hang_up(
    cell: Cell,
    calls: Range<usize>,
    sessions: &[Client],
    ledger: &Ledger,
) -> Result<Vec<Duration>> {
    let mut streams = Vec::new();
    for call in calls.clone() {
        let client = &sessions[call % sessions.len()];
        let (stream, _) = client.begin(call, "work", json!({ "call": call })).await?;
        streams.push(stream);
    }
    let started = ledger.expect_all(calls.clone(), |times_of| &times_of.started, LIMIT);
    started.await?;
    // This lets both sides go idle, as they would be in the middle of a long call.
    tokio::time::sleep(Duration::from_millis(2)).await;
    let limit = if cell.never_fires() { NEVER } else { LIMIT };
    let fire = |calls: Range<usize>| ledger.reaches(calls, |times_of| &times_of.token, limit);
    let (mut closed, mut fired) = (Vec::new(), 0);
    for (call, mut stream) in calls.clone().zip(streams) {
        stream.before_close(cell.close)?;
        closed.push(ledger.now());
        drop(stream);
        if cell.pace != Pace::AtOnce {
            fired += fire(call..call + 1).await;
        }
    }
    if cell.pace == Pace::AtOnce {
        fired = fire(calls).await;
    }
    let is_right = fired == cell.calls_at_once || cell.never_fires();
    ensure!(is_right, "{cell}: {fired} of {} tokens", cell.calls_at_once);
    Ok(closed)
}

// === impl Cell ===

impl Cell {
    /// Returns `true` if the token never fires.
    fn never_fires(self) -> bool {
        self.setup == Setup::Bare && self.mode == Mode::Session
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (setup, mode, close) = (self.setup, self.mode, self.close);
        write!(
            f,
            "{setup}, {mode}, {close:?}, {} {}",
            self.calls_at_once, self.pace
        )
    }
}

// === impl Measured ===

impl Measured {
    /// Returns the milliseconds between two moments, for the calls that reached both.
    fn spans(&self, from: usize, to: usize) -> Sample {
        let span = |moments: &[Option<Duration>; 4]| {
            let span = moments[to]?.saturating_sub(moments[from]?);
            Some(span.as_secs_f64() * 1e3)
        };
        self.moments.iter().filter_map(span).collect()
    }

    /// Returns the milliseconds from the close to the handler's token.
    fn close_to_handler(&self) -> Sample {
        self.spans(0, 3)
    }

    fn row(&self) -> Vec<String> {
        let cell = self.cell;
        let mut row = cells![
            cell.mode,
            cell.setup,
            format!("{:?}", cell.close).to_uppercase(),
            format!("{} {}", cell.calls_at_once, cell.pace),
            self.moments.len(),
        ];
        let spans = self.close_to_handler();
        let quantiles = [0.5, 0.99, 1.0].map(|share| spans.quantile(share));
        // How long until hyper drops the response, then from there to the set-up's token and to the handler's token.
        let parts = [(0, 1), (1, 2), (1, 3)].map(|(from, to)| self.spans(from, to).median());
        let figures = quantiles.into_iter().chain(parts);
        row.extend(figures.map(|figure| format!("{figure:.3}").replace("NaN", "–")));
        if spans.median().is_nan() {
            row[5] = format!("not in {} s", NEVER.as_secs());
        }
        row
    }

    fn targets(&self) -> [Target; 2] {
        [("p50", 0.5, 1.0), ("p99", 0.99, 5.0)].map(|(name, share, most)| {
            let what = format!("{}: {name} (ms)", self.cell);
            Target::new(AtMost(most), what, self.close_to_handler().quantile(share))
        })
    }
}
