//! Calls a second over loopback, beside bare rmcp.
//!
//! `throughput [--quick]`. The server has one processor and the clients have the other, so that the server is what is
//! measured.

use std::net::SocketAddr;

use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use mcp_cancel_on_disconnect_benches::{
    Failure,
    report::{Axis, Bound, Kind, Plot, Section, Target},
    setup::{Mode, Setup},
    sockets::{
        child::{Child, obey},
        ledger::Ledger,
        load::Load,
        machine,
        serve::serve,
        stats::{Sample, Side, in_turn},
        tools::Tools,
    },
};
use tokio::{runtime::Builder, task::JoinSet};

const CONNECTIONS: usize = 16;

const MODES: [(Mode, &str); 2] = [(Mode::Session, "session"), (Mode::Stateless, "stateless")];

const CANDIDATES: [Setup; 3] = [Setup::Guard, Setup::Layer, Setup::Wrapped];

#[derive(Debug, Clone, Copy)]
struct Size {
    pairs: usize,
    millis: u64,
}

/// One set-up beside bare rmcp.
struct Found {
    mode: &'static str,
    setup: Setup,
    bare: Sample,
    own: Sample,
    /// Of each pair, in calls a second.
    ratios: Sample,
    /// Microseconds of the server's processor for a call.
    bare_cost: Sample,
    own_cost: Sample,
    /// Of each pair, bare to own.
    cost_ratios: Sample,
}

#[derive(Debug, Clone, Copy)]
struct Rate {
    /// Calls a second.
    rate: f64,
    /// Microseconds of the server's processor for a call.
    cost: f64,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let size = match words.as_slice() {
        ["clients"] => {
            machine::stay_on(1)?;
            let runtime = Builder::new_current_thread().enable_all().build()?;
            let mut load = Load::default();
            return runtime.block_on(obey(async |words| load.act(words).await));
        }
        ["--quick"] => Size {
            pairs: 2,
            millis: 200,
        },
        [] => Size {
            pairs: 20,
            millis: 1_000,
        },
        _ => return Err("usage: throughput [--quick]".into()),
    };
    let before = machine::load();
    machine::stay_on(0)?;
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let found = runtime.block_on(compare(size))?;
    section(&found, size, &before).publish()?;
    Ok(())
}

async fn compare(size: Size) -> Result<Vec<Found>, Failure> {
    let mut clients = Child::start(&["clients"])?;
    let mut found = Vec::new();
    for (mode, name) in MODES {
        let mut serving = JoinSet::new();
        let bare = start(Setup::Bare, mode, &mut serving)?;
        for setup in CANDIDATES {
            let own = start(setup, mode, &mut serving)?;
            eprintln!("{name}, {}", setup.name());
            let mut run = async |address: SocketAddr| -> Result<Rate, Failure> {
                let command = format!("run {address} {name} {CONNECTIONS} {}", size.millis);
                let before = machine::processor_time()?;
                let answer = clients.ask(&command).await?;
                let spent = machine::processor_time()? - before;
                let (rate, calls) = answer.split_once(' ').ok_or("no count")?;
                Ok(Rate {
                    rate: rate.parse()?,
                    cost: spent * 1e6 / calls.parse::<f64>()?,
                })
            };
            // Opens the connections, and warms up.
            run(bare).await?;
            run(own).await?;
            let (mut bares, mut owns) = (Vec::new(), Vec::new());
            for pair in in_turn(size.pairs) {
                for side in pair {
                    match side {
                        Side::Reference => bares.push(run(bare).await?),
                        Side::Candidate => owns.push(run(own).await?),
                    }
                }
            }
            found.push(Found::new(name, setup, &bares, &owns));
        }
    }
    Ok(found)
}

fn start(setup: Setup, mode: Mode, serving: &mut JoinSet<()>) -> Result<SocketAddr, Failure> {
    let tools = Tools::new(&Ledger::new(0, 0));
    let server = tools.served(setup, mode, CancelOnDisconnectLayer::new());
    let (addresses, tasks) = serve(server, 1)?;
    serving.spawn(async move { drop(tasks.join_all().await) });
    Ok(*addresses.first().ok_or("no address")?)
}

fn section(found: &[Found], size: Size, load: &str) -> Section {
    let columns = [
        "mode",
        "set-up",
        "bare (calls/s)",
        "with it (calls/s)",
        "ratio, median of the pairs",
        "quartiles",
        "least and greatest",
        "server's CPU time, bare (µs a call)",
        "with it (µs a call)",
        "ratio of these",
    ];
    let ours = found
        .iter()
        .filter(|found| matches!(found.setup, Setup::Layer | Setup::Wrapped));
    let Size { pairs, millis } = size;
    Section {
        name: "throughput".to_owned(),
        title: "Calls a second".to_owned(),
        command: "benches/run throughput".to_owned(),
        text: format!(
            "`tools/call` with 100 B of arguments on {CONNECTIONS} keep-alive connections, each with a session of its own, one call \
             after the other. Server and load generator are processes of one thread and, where there are two, one processor each. \
             {pairs} pairs of runs of {millis} ms, bare rmcp and the set-up in turn (A B B A …), so that what drifts meets both; each \
             pair gives a ratio. A ratio below 1 is what the set-up costs. The processor time of \
             the server, kernel and all, is the same in other words, and depends less on what else the machine does. Load before the run: {load}."
        ),
        columns: columns.map(str::to_owned).to_vec(),
        rows: found.iter().map(Found::row).collect(),
        targets: ours
            .map(|found| Target {
                what: format!(
                    "calls a second, {}, {}, to bare",
                    found.mode,
                    found.setup.name()
                ),
                bound: Bound::AtLeast(0.97),
                measured: found.ratios.median(),
            })
            .collect(),
        plots: vec![bars(found)],
    }
}

fn bars(found: &[Found]) -> Plot {
    let of = |setup: Setup| {
        let rates = MODES.iter().filter_map(move |(_, mode)| {
            let mut found = found.iter().filter(|found| found.mode == *mode);
            match setup {
                Setup::Bare => found.next().map(|found| found.bare.median()),
                other => found
                    .find(|found| found.setup == other)
                    .map(|found| found.own.median()),
            }
        });
        (0..).map(f64::from).zip(rates).collect()
    };
    Plot {
        name: "throughput".to_owned(),
        title: "Calls a second, one processor".to_owned(),
        x: Axis::linear("mode"),
        y: Axis::linear("calls a second"),
        kind: Kind::Bars {
            categories: MODES.map(|(_, mode)| mode.to_owned()).to_vec(),
        },
        series: Setup::series(of),
    }
}

// === impl Found ===

impl Found {
    fn new(mode: &'static str, setup: Setup, bare: &[Rate], own: &[Rate]) -> Self {
        let pairs = || own.iter().zip(bare);
        Self {
            mode,
            setup,
            ratios: pairs().map(|(own, bare)| own.rate / bare.rate).collect(),
            cost_ratios: pairs().map(|(own, bare)| bare.cost / own.cost).collect(),
            bare: bare.iter().map(|run| run.rate).collect(),
            own: own.iter().map(|run| run.rate).collect(),
            bare_cost: bare.iter().map(|run| run.cost).collect(),
            own_cost: own.iter().map(|run| run.cost).collect(),
        }
    }

    fn row(&self) -> Vec<String> {
        let span = |from: f64, to: f64| format!("{from:.3} to {to:.3}");
        let ratios = &self.ratios;
        vec![
            self.mode.to_owned(),
            self.setup.name().to_owned(),
            format!("{:.0}", self.bare.median()),
            format!("{:.0}", self.own.median()),
            format!("{:.3}", ratios.median()),
            span(ratios.quantile(0.25), ratios.quantile(0.75)),
            span(ratios.min(), ratios.max()),
            format!("{:.1}", self.bare_cost.median()),
            format!("{:.1}", self.own_cost.median()),
            format!("{:.3}", self.cost_ratios.median()),
        ]
    }
}
