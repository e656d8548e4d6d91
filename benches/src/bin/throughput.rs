//! Calls a second over loopback, beside bare rmcp.
//!
//! `throughput [--quick]`. The server has one processor and the clients have the other, so that the server is what is
//! measured.

use std::net::SocketAddr;

use benches::{
    child::{Child, obey},
    prelude::*,
    sockets::{ledger::Ledger, load::Load, serve::serve, tools::Tools},
};
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;

const CONNECTIONS: usize = 16;

const CANDIDATES: [Setup; 3] = [Setup::Guard, Setup::Layer, Setup::Wrapped];

#[derive(Debug, Clone, Copy)]
struct Size {
    pairs: usize,
    millis: u64,
}

/// One set-up beside bare rmcp: pairs of runs.
struct Found {
    mode: Mode,
    setup: Setup,
    bare: Vec<Run>,
    own: Vec<Run>,
}

#[derive(Debug, Clone, Copy)]
struct Run {
    /// Calls a second.
    rate: f64,
    /// Microseconds of the server's processor for a call.
    cost: f64,
}

fn main() -> Result<()> {
    match role().as_str() {
        "" => {
            let load = machine::load();
            machine::stay_on(0)?;
            compare(&load)
        }
        "clients" => {
            machine::stay_on(1)?;
            let mut load = Load::default();
            runtime()?.block_on(obey(async |words| load.act(words).await))
        }
        _ => bail!("usage: throughput [--quick]"),
    }
}

fn compare(load: &str) -> Result<()> {
    let (pairs, millis) = if is_quick() { (2, 200) } else { (20, 1_000) };
    let found = runtime()?.block_on(measure(Size { pairs, millis }))?;
    let mut section = Section::new(
        "throughput",
        &[
            ("connections", &CONNECTIONS),
            ("pairs", &pairs),
            ("millis", &millis),
            ("load", &load),
        ],
    )?;
    section.rows = found.iter().map(Found::row).collect();
    let ours = found.iter().filter(|found| found.setup.is_ours());
    section.targets = ours.map(Found::target).collect();
    let series = Setup::series(|setup| {
        let rate = move |found: &Found| found.rate_of(setup);
        found.iter().filter_map(rate)
    });
    let title = "Calls a second, one processor";
    let (x, y) = (Axis::linear("mode"), Axis::linear("calls a second"));
    section.plots = vec![Plot::lines("throughput", title, x, y, series).over(Mode::iter())];
    section.publish()
}

async fn measure(size: Size) -> Result<Vec<Found>> {
    let mut clients = Child::start("clients")?;
    let mut run = async |address: SocketAddr, mode: Mode| -> Result<Run> {
        let command = format!("run {address} {mode} {CONNECTIONS} {}", size.millis);
        let before = machine::processor_time()?;
        let answer = clients.ask(&command).await?;
        let spent = machine::processor_time()? - before;
        let (rate, calls) = answer.split_once(' ').context("no count")?;
        Ok(Run {
            rate: rate.parse()?,
            cost: spent * 1e6 / calls.parse::<f64>()?,
        })
    };
    let mut found = Vec::new();
    for mode in Mode::iter() {
        let reference = start(Setup::Bare, mode)?;
        for setup in CANDIDATES {
            let candidate = start(setup, mode)?;
            eprintln!("{mode}, {setup}");
            // Opens the connections, and warms up.
            run(reference, mode).await?;
            run(candidate, mode).await?;
            let (mut bare, mut own) = (Vec::new(), Vec::new());
            // A B B A and so on, so that what drifts favours neither side.
            for pair in 0..size.pairs {
                if pair % 2 == 0 {
                    bare.push(run(reference, mode).await?);
                    own.push(run(candidate, mode).await?);
                } else {
                    own.push(run(candidate, mode).await?);
                    bare.push(run(reference, mode).await?);
                }
            }
            found.push(Found {
                mode,
                setup,
                bare,
                own,
            });
        }
    }
    Ok(found)
}

fn start(setup: Setup, mode: Mode) -> Result<SocketAddr> {
    let tools = Tools::new(&Ledger::new(0, 0));
    let server = tools.served(setup, mode, CancelOnDisconnectLayer::new());
    Ok(serve(server, 1)?[0])
}

// === impl Found ===

impl Found {
    /// Of each pair.
    fn ratios(&self) -> Sample {
        let pairs = self.own.iter().zip(&self.bare);
        pairs.map(|(own, bare)| own.rate / bare.rate).collect()
    }

    /// Of this set-up; bare rmcp's are those beside the first candidate.
    fn rate_of(&self, setup: Setup) -> Option<f64> {
        let runs = match setup {
            Setup::Bare if self.setup == CANDIDATES[0] => &self.bare,
            _ if self.setup == setup => &self.own,
            _ => return None,
        };
        Some(median(runs, |run| run.rate))
    }

    fn row(&self) -> Vec<String> {
        let (bare, own, ratios) = (&self.bare, &self.own, self.ratios());
        let span = |from: f64, to: f64| format!("{from:.3} to {to:.3}");
        let costs = bare.iter().zip(own);
        let costs: Sample = costs.map(|(bare, own)| bare.cost / own.cost).collect();
        cells![
            self.mode,
            self.setup,
            format!("{:.0}", median(bare, |run| run.rate)),
            format!("{:.0}", median(own, |run| run.rate)),
            format!("{:.3}", ratios.median()),
            span(ratios.quantile(0.25), ratios.quantile(0.75)),
            span(ratios.min(), ratios.max()),
            format!("{:.1}", median(bare, |run| run.cost)),
            format!("{:.1}", median(own, |run| run.cost)),
            format!("{:.3}", costs.median()),
        ]
    }

    fn target(&self) -> Target {
        let what = format!("calls a second, {}, {}, to bare", self.mode, self.setup);
        Target::at_least(0.97, what, self.ratios().median())
    }
}

fn median(runs: &[Run], figure: impl Fn(&Run) -> f64) -> f64 {
    runs.iter().map(figure).collect::<Sample>().median()
}
