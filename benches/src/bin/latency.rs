//! How long after its client has hung up a handler knows it, and who needed that time.
//!
//! `latency [--quick]`. Clients and server are in this process, on runtimes of their own, so that one clock serves both.

use std::{fmt, ops::Range, time::Duration};

use benches::{
    client::{Client, Close, Way},
    prelude::*,
    sockets::{
        ledger::Ledger,
        serve::{serve, witnessed},
        tools::Tools,
    },
    workers,
};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use serde_json::json;
use strum::EnumIter;
use tokio::runtime::Handle;

/// How many calls share a session.
const PER_SESSION: usize = 100;

/// How long one waits for a token that never fires.
const NEVER: Duration = Duration::from_secs(2);

/// How long one waits for any other.
const LIMIT: Duration = Duration::from_secs(30);

/// Who hangs up when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, EnumIter, strum::Display)]
enum Pace {
    /// There is one call at a time.
    #[strum(to_string = "alone")]
    Alone,
    /// There are many, and they hang up one by one.
    #[strum(to_string = "one by one")]
    OneByOne,
    /// There are many, and all hang up at once.
    #[strum(to_string = "at once")]
    AtOnce,
}

/// What is measured at a time.
#[derive(Debug, Clone, Copy)]
struct Cell {
    mode: Mode,
    setup: Setup,
    close: Close,
    pace: Pace,
    /// Calls that are in flight at the same time, and how often.
    crowd: usize,
    rounds: usize,
}

/// Milliseconds.
struct Found {
    cell: Cell,
    calls: usize,
    /// From the close to the handler.
    all: Sample,
    /// From the close until hyper drops the response.
    outside: Sample,
    /// From there until the set-up has fired its own token.
    fired: Sample,
    /// From the drop until the handler runs, and has seen its token.
    inside: Sample,
}

fn main() -> Result<()> {
    let clients = runtime()?;
    let load = machine::load();
    let mut found = Vec::new();
    for cell in cells() {
        let server = workers()?;
        found.push(clients.block_on(measure(cell, server.handle()))?);
        server.shutdown_background();
        eprintln!("{}", cell);
    }
    let mut section = Section::new("latency", &[("load", &load)])?;
    section.rows = found.iter().map(Found::row).collect();
    let ours = found.iter().filter(|found| found.cell.setup.is_ours());
    section.targets = ours.flat_map(Found::targets).collect();
    for mode in Mode::iter() {
        let plots = [Pace::Alone, Pace::AtOnce].map(|pace| curves(&found, mode, pace));
        section.plots.extend(plots);
    }
    section.publish()
}

fn cells() -> Vec<Cell> {
    let many = if is_quick() { 100 } else { 1_000 };
    let mut cells = Vec::new();
    for mode in Mode::iter() {
        for pace in Pace::iter() {
            let (crowd, rounds) = match pace {
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
                    crowd,
                    rounds,
                }));
            }
        }
    }
    cells.retain(|cell| !cell.is_in_vain() || cell.pace != Pace::OneByOne);
    for cell in cells.iter_mut().filter(|cell| cell.is_in_vain()) {
        cell.rounds = 1;
    }
    cells
}

async fn measure(cell: Cell, server: &Handle) -> Result<Found> {
    let ledger = Ledger::new(cell.crowd * cell.rounds, 1);
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::Immediate)
        .observe(ledger.observer());
    let way = {
        let _inside = server.enter();
        let stack = Tools::new(&ledger).served(cell.setup, cell.mode, layer);
        Way::Socket(serve(witnessed(stack, &ledger), 1)?[0])
    };
    let mut sessions = Vec::new();
    for _ in 0..cell.crowd.div_ceil(PER_SESSION) {
        sessions.push(Client::open(way.clone(), cell.mode).await?);
    }
    let mut closed = Vec::new();
    for round in 0..cell.rounds {
        let crowd = round * cell.crowd..(round + 1) * cell.crowd;
        closed.extend(hang_up(cell, crowd, &sessions, &ledger).await?);
    }
    ledger.release(0).cancel();
    Ok(Found::new(cell, &closed, &ledger))
}

/// Starts these calls and gives them up. The moments at which that was.
async fn hang_up(
    cell: Cell,
    crowd: Range<usize>,
    sessions: &[Client],
    ledger: &Ledger,
) -> Result<Vec<Duration>> {
    let mut streams = Vec::new();
    for call in crowd.clone() {
        let client = &sessions[call % sessions.len()];
        let mut stream = client.begin(call, "work", json!({ "call": call })).await?;
        if cell.mode == Mode::Session {
            stream.event_id().await?;
        }
        streams.push(stream);
    }
    let started = ledger.all(crowd.clone(), |life| &life.started, LIMIT);
    started.await?;
    // Until both sides are idle, as they are in the middle of a long call.
    tokio::time::sleep(Duration::from_millis(2)).await;
    let limit = if cell.is_in_vain() { NEVER } else { LIMIT };
    let fire = |calls: Range<usize>| ledger.reaches(calls, |life| &life.token, limit);
    let (mut closed, mut fired) = (Vec::new(), 0);
    for (call, mut stream) in crowd.clone().zip(streams) {
        stream.before_close(cell.close)?;
        closed.push(ledger.now());
        stream.close();
        if cell.pace != Pace::AtOnce {
            fired += fire(call..call + 1).await;
        }
    }
    if cell.pace == Pace::AtOnce {
        fired = fire(crowd).await;
    }
    let all = cell.crowd;
    ensure!(
        fired == all || cell.is_in_vain(),
        "{cell}: {fired} of {all} tokens"
    );
    Ok(closed)
}

/// How many calls of each cell of one plot had their token after how long.
fn curves(found: &[Found], mode: Mode, pace: Pace) -> Plot {
    let shown = found.iter().filter(|found| {
        let cell = found.cell;
        (cell.mode, cell.pace, cell.close) == (mode, pace, Close::Fin) && !cell.is_in_vain()
    });
    let series = |found: &Found| Series::new(found.cell.setup, found.all.cumulated(200));
    let name = format!("latency-{mode}-{pace}").replace(' ', "-");
    let title = format!("From close to token: {mode}, {pace}, with a FIN");
    let x = Axis::logarithmic("time to the token (ms)");
    let y = Axis::linear("share of the calls");
    Plot::lines(&name, &title, x, y, shown.map(series).collect())
}

// === impl Cell ===

impl Cell {
    /// The token never fires.
    fn is_in_vain(self) -> bool {
        self.setup == Setup::Bare && self.mode == Mode::Session
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            setup, mode, close, ..
        } = self;
        write!(
            f,
            "{setup}, {mode}, {close:?}, {} {}",
            self.crowd, self.pace
        )
    }
}

// === impl Found ===

impl Found {
    fn new(cell: Cell, closed: &[Duration], ledger: &Ledger) -> Self {
        type Moment<'a> = &'a dyn Fn(usize) -> Option<Duration>;
        let between = |from: Moment<'_>, to: Moment<'_>| -> Sample {
            let spans = (0..closed.len()).filter_map(|call| {
                let span = to(call)?.saturating_sub(from(call)?);
                Some(span.as_secs_f64() * 1e3)
            });
            spans.collect()
        };
        let close = |call: usize| closed.get(call).copied();
        let dropped = |call| ledger.life(call).dropped.get().copied();
        let fired = |call| ledger.life(call).cancelled.get().copied();
        let token = |call| ledger.life(call).token.get().copied();
        Self {
            cell,
            calls: closed.len(),
            all: between(&close, &token),
            outside: between(&close, &dropped),
            fired: between(&dropped, &fired),
            inside: between(&dropped, &token),
        }
    }

    fn row(&self) -> Vec<String> {
        let cell = self.cell;
        let milliseconds = |value: f64| match value.is_nan() {
            true => "–".to_owned(),
            false => format!("{value:.3}"),
        };
        let mut row = cells![
            cell.mode,
            cell.setup,
            format!("{:?}", cell.close).to_uppercase(),
            format!("{} {}", cell.crowd, cell.pace),
            self.calls,
        ];
        let quantiles = [0.5, 0.99, 1.0].map(|share| self.all.quantile(share));
        let parts = [&self.outside, &self.fired, &self.inside].map(Sample::median);
        row.extend(quantiles.into_iter().chain(parts).map(milliseconds));
        if self.all.is_empty() {
            row[5] = format!("not in {} s", NEVER.as_secs());
        }
        row
    }

    fn targets(&self) -> [Target; 2] {
        [("p50", 0.5, 1.0), ("p99", 0.99, 5.0)].map(|(name, share, most)| {
            let what = format!("{}: {name} (ms)", self.cell);
            Target::at_most(most, what, self.all.quantile(share))
        })
    }
}
