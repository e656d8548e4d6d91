//! How long after its client has hung up a handler knows it, and who needed that time.
//!
//! `latency [--quick]`. Clients and server are in this process, on runtimes of their own, so that one clock serves both.

use std::{ops::Range, time::Duration};

use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
use mcp_cancel_on_disconnect_benches::{
    Failure, is_quick,
    report::{Axis, Bound, Kind, Plot, Section, Series, Target},
    setup::{Mode, Setup},
    sockets::{
        client::{Client, Stream, Way},
        ledger::Ledger,
        machine,
        serve::{serve, witnessed},
        stats::Sample,
        tools::Tools,
    },
};
use serde_json::json;
use tokio::runtime::{Builder, Runtime};

/// How many calls share a session.
const PER_SESSION: usize = 100;

/// How long one waits for a token that never fires.
const NEVER: Duration = Duration::from_secs(2);

/// How long one waits for any other.
const LIMIT: Duration = Duration::from_secs(30);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Close {
    Fin,
    Rst,
}

/// Who hangs up when.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Pace {
    /// There is one call at a time.
    Alone,
    /// There are many, and they hang up one by one.
    OneByOne,
    /// There are many, and all hang up at once.
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

fn main() -> Result<(), Failure> {
    let quick = is_quick();
    machine::allow_files(4_096)?;
    let clients = Builder::new_current_thread().enable_all().build()?;
    let load = machine::load();
    let mut found = Vec::new();
    for cell in cells(quick) {
        let server = Builder::new_multi_thread()
            .worker_threads(2)
            .enable_all()
            .build()?;
        found.push(clients.block_on(measure(cell, &server))?);
        server.shutdown_background();
        eprintln!("{}", Found::name(&found[found.len() - 1]));
    }
    section(&found, &load).publish()?;
    Ok(())
}

fn cells(quick: bool) -> Vec<Cell> {
    let many = if quick { 100 } else { 1_000 };
    let paces = [
        (Pace::Alone, 1, many),
        (Pace::OneByOne, many, 1),
        (Pace::AtOnce, many, 10),
    ];
    let mut cells = Vec::new();
    for mode in [Mode::Session, Mode::Stateless] {
        for (pace, crowd, rounds) in paces {
            for close in [Close::Fin, Close::Rst] {
                for setup in Setup::ALL {
                    let cell = Cell {
                        mode,
                        setup,
                        close,
                        pace,
                        crowd,
                        rounds,
                    };
                    match cell.is_in_vain() {
                        true if pace == Pace::OneByOne => {}
                        true => cells.push(Cell { rounds: 1, ..cell }),
                        false => cells.push(cell),
                    }
                }
            }
        }
    }
    cells
}

async fn measure(cell: Cell, server: &Runtime) -> Result<Found, Failure> {
    let calls = cell.crowd * cell.rounds;
    let ledger = Ledger::new(calls, 1);
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::Immediate)
        .observe(ledger.observer());
    let (addresses, _serving) = {
        let _inside = server.enter();
        let stack = Tools::new(&ledger).served(cell.setup, cell.mode, layer);
        serve(witnessed(stack, &ledger), 1)?
    };
    let way = Way::Socket(addresses[0]);
    let mut sessions = Vec::new();
    for _ in 0..cell.crowd.div_ceil(PER_SESSION) {
        sessions.push(Client::open(way.clone(), cell.mode).await?);
    }
    let mut closed = Vec::new();
    for round in 0..cell.rounds {
        let crowd = round * cell.crowd..(round + 1) * cell.crowd;
        let mut streams = Vec::new();
        for call in crowd.clone() {
            let client = &sessions[call % sessions.len()];
            let mut stream = client.call(call, "work", json!({ "call": call })).await?;
            if cell.mode == Mode::Session {
                stream.event_id().await?;
            }
            streams.push(stream);
        }
        ledger
            .reaches(cell.crowd, crowd.clone(), |life| &life.started, LIMIT)
            .await;
        // Until both sides are idle, as they are in the middle of a long call.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let limit = if cell.is_in_vain() { NEVER } else { LIMIT };
        let fire =
            |calls: Range<usize>| ledger.reaches(calls.len(), calls, |life| &life.token, limit);
        let mut fired = 0;
        for (call, mut stream) in crowd.clone().zip(streams) {
            prepare(&mut stream, cell.close)?;
            closed.push(ledger.now());
            stream.close();
            if cell.pace != Pace::AtOnce {
                fired += fire(call..call + 1).await;
            }
        }
        if cell.pace == Pace::AtOnce {
            fired = fire(crowd).await;
        }
        if fired < cell.crowd && !cell.is_in_vain() {
            return Err(format!("{cell:?}: {fired} of {} tokens", cell.crowd).into());
        }
    }
    ledger.release(0).cancel();
    Ok(Found::new(cell, &closed, &ledger))
}

fn prepare(stream: &mut Stream, close: Close) -> Result<(), Failure> {
    match close {
        Close::Fin => stream.drain(),
        Close::Rst => stream.reset_when_closed()?,
    }
    Ok(())
}

// === impl Cell ===

impl Cell {
    /// The token never fires.
    fn is_in_vain(self) -> bool {
        self.setup == Setup::Bare && self.mode == Mode::Session
    }
}

// === impl Pace ===

impl Pace {
    fn name(self) -> &'static str {
        match self {
            Self::Alone => "alone",
            Self::OneByOne => "one by one",
            Self::AtOnce => "at once",
        }
    }
}

// === impl Found ===

impl Found {
    fn new(cell: Cell, closed: &[Duration], ledger: &Ledger) -> Self {
        let between = |from: &dyn Fn(usize) -> Option<Duration>,
                       to: &dyn Fn(usize) -> Option<Duration>| {
            let spans = (0..closed.len()).filter_map(|call| {
                let span = to(call)?.saturating_sub(from(call)?);
                Some(span.as_secs_f64() * 1e3)
            });
            spans.collect::<Sample>()
        };
        let close = |call: usize| closed.get(call).copied();
        let dropped = |call| ledger.life(call).dropped.get();
        let fired = |call| ledger.life(call).cancelled.get();
        let token = |call| ledger.life(call).token.get();
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
        let Cell {
            mode,
            setup,
            close,
            crowd,
            ..
        } = cell;
        let milliseconds = |value: f64| match value.is_nan() {
            true => "–".to_owned(),
            false => format!("{value:.3}"),
        };
        let mut row = vec![
            mode_name(mode).to_owned(),
            setup.name().to_owned(),
            format!("{close:?}").to_uppercase(),
            format!("{crowd} {}", cell.pace.name()),
            self.calls.to_string(),
        ];
        if self.all.is_empty() {
            row.push(format!("not in {} s", NEVER.as_secs()));
            row.extend(["–".to_owned(), "–".to_owned()]);
        } else {
            let quantiles = [0.5, 0.99, 1.0].map(|share| self.all.quantile(share));
            row.extend(quantiles.map(milliseconds));
        }
        row.push(milliseconds(self.outside.median()));
        row.push(milliseconds(self.fired.median()));
        row.push(milliseconds(self.inside.median()));
        row
    }

    fn name(&self) -> String {
        let Cell {
            mode,
            setup,
            close,
            pace,
            crowd,
            ..
        } = self.cell;
        let (mode, setup, pace) = (mode_name(mode), setup.name(), pace.name());
        format!("{setup}, {mode}, {close:?}, {crowd} {pace}")
    }

    fn targets(&self) -> [Target; 2] {
        [("p50", 0.5, 1.0), ("p99", 0.99, 5.0)].map(|(name, share, most)| Target {
            what: format!("{}: {name} (ms)", self.name()),
            bound: Bound::AtMost(most),
            measured: self.all.quantile(share),
        })
    }
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Session => "session",
        Mode::Stateless => "stateless",
    }
}

fn section(found: &[Found], load: &str) -> Section {
    let watched = |found: &&Found| matches!(found.cell.setup, Setup::Layer | Setup::Wrapped);
    let columns = [
        "mode",
        "set-up",
        "close",
        "in flight, hanging up",
        "calls",
        "p50",
        "p99",
        "max",
        "kernel and hyper, p50",
        "then to the layer's token, p50",
        "then to the handler's, p50",
    ];
    let plots = [Mode::Session, Mode::Stateless]
        .into_iter()
        .flat_map(|mode| [(mode, Pace::Alone), (mode, Pace::AtOnce)])
        .map(|(mode, pace)| curves(found, mode, pace));
    Section {
        name: "latency".to_owned(),
        title: "From the client's close to the handler's token".to_owned(),
        command: "benches/run latency".to_owned(),
        text: format!(
            "Milliseconds over loopback, where nothing can be resumed: `Grace::Immediate`, or no sessions. The clock starts \
             right before the client's `close`, with a FIN or with an RST, and stops when the handler runs and has seen its \
             token (`RequestContext::ct`; for the guard its own). A witness around the whole server notes when hyper drops the \
             response: what was before is the kernel's and hyper's, what comes after is the set-up's and rmcp's. In session mode \
             the layer's own `CallToken` fires at the drop; rmcp's token fires after a cancel has gone through the session. Bare \
             rmcp never cancels there: its handlers were waited for in vain. Those that hang up at once do so as fast as one thread can \
             close; the last token of them cannot fire before two workers have torn down all the other connections, so \
             compare these rows with the guard's, which is as little as anyone can do. Two workers serve; clients have a thread \
             of their own. Load before the run: {load}."
        ),
        columns: columns.map(str::to_owned).to_vec(),
        rows: found.iter().map(Found::row).collect(),
        targets: found
            .iter()
            .filter(watched)
            .flat_map(Found::targets)
            .collect(),
        plots: plots.collect(),
    }
}

fn curves(found: &[Found], mode: Mode, pace: Pace) -> Plot {
    let shown = found.iter().filter(|found| {
        let cell = found.cell;
        (cell.mode, cell.pace, cell.close) == (mode, pace, Close::Fin) && !cell.is_in_vain()
    });
    let series = shown.map(|found| Series {
        name: found.cell.setup.name().to_owned(),
        points: found.all.cumulated(200),
    });
    let (mode, pace) = (mode_name(mode), pace.name());
    Plot {
        name: format!("latency-{mode}-{}", pace.replace(' ', "-")),
        title: format!("From close to token: {mode}, {pace}, with a FIN"),
        x: Axis::logarithmic("time to the token (ms)"),
        y: Axis::linear("share of the calls"),
        kind: Kind::Lines,
        series: series.collect(),
    }
}
