//! Calls a second over loopback, beside bare rmcp.
//!
//! `throughput [--quick]`. The server has one processor and the clients have the other, so that the server is what is
//! measured.

use std::net::SocketAddr;

use benches::{
    child::{Child, obey},
    prelude::*,
    sockets::load::Load,
};
use tokio::runtime::Handle;

const CONNECTIONS: usize = 16;

const CANDIDATES: [Setup; 3] = [Setup::Guard, Setup::Layer, Setup::Wrapped];

/// One set-up beside bare rmcp: pairs of runs, bare rmcp's first.
struct Found {
    mode: Mode,
    setup: Setup,
    pairs: Vec<[Run; 2]>,
}

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
    let found = runtime()?.block_on(measure(pairs, millis))?;
    let ours = found.iter().filter(|found| found.setup.is_ours());
    let series = Setup::series(|setup| {
        let rate = move |found: &Found| found.rate_of(setup);
        found.iter().filter_map(rate)
    });
    let axes = [Axis::linear("mode"), Axis::linear("calls a second")];
    let title = "Calls a second, one processor";
    let values =
        json!({ "connections": CONNECTIONS, "pairs": pairs, "millis": millis, "load": load });
    let section = Section {
        rows: found.iter().map(Found::row).collect(),
        targets: ours.map(Found::target).collect(),
        plots: vec![Plot::lines("throughput", title, axes, series).over(Mode::iter())],
        ..Section::new("throughput", values)?
    };
    section.publish()
}

async fn measure(count: usize, millis: u64) -> Result<Vec<Found>> {
    let mut clients = Child::start("clients")?;
    let mut run = async |address: SocketAddr, mode: Mode| -> Result<Run> {
        let command = format!("run {address} {mode} {CONNECTIONS} {millis}");
        let before = machine::processor_time()?;
        let answer = clients.ask(&command).await?;
        let spent = machine::processor_time()? - before;
        let (rate, calls) = answer.split_once(' ').context("no count")?;
        let (rate, cost) = (rate.parse()?, spent * 1e6 / calls.parse::<f64>()?);
        Ok(Run { rate, cost })
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
            let mut pairs = Vec::new();
            // A B B A and so on, so that what drifts favours neither side.
            for pair in 0..count {
                let (bare, own);
                if pair % 2 == 0 {
                    bare = run(reference, mode).await?;
                    own = run(candidate, mode).await?;
                } else {
                    own = run(candidate, mode).await?;
                    bare = run(reference, mode).await?;
                }
                pairs.push([bare, own]);
            }
            found.push(Found { mode, setup, pairs });
        }
    }
    Ok(found)
}

fn start(setup: Setup, mode: Mode) -> Result<SocketAddr> {
    let (tools, layer) = (Tools(Ledger::new(0, 0)), CancelOnDisconnectLayer::new());
    let server = || tools.served(setup, mode, layer);
    Ok(serve(&Handle::current(), 1, server)?[0])
}

// === impl Found ===

impl Found {
    /// A figure of each pair.
    fn each(&self, figure: impl Fn(&Run, &Run) -> f64) -> Sample {
        let pairs = self.pairs.iter();
        pairs.map(|[bare, own]| figure(bare, own)).collect()
    }

    fn ratios(&self) -> Sample {
        self.each(|bare, own| own.rate / bare.rate)
    }

    /// Of this set-up; bare rmcp's are those beside the first candidate.
    fn rate_of(&self, setup: Setup) -> Option<f64> {
        match setup {
            Setup::Bare if self.setup == CANDIDATES[0] => Some(self.each(|bare, _| bare.rate)),
            _ => (self.setup == setup).then(|| self.each(|_, own| own.rate)),
        }
        .map(|rates| rates.median())
    }

    fn row(&self) -> Vec<String> {
        let ratios = self.ratios();
        let span = |from: f64, to: f64| format!("{from:.3} to {to:.3}");
        cells![
            self.mode,
            self.setup,
            format!("{:.0}", self.each(|bare, _| bare.rate).median()),
            format!("{:.0}", self.each(|_, own| own.rate).median()),
            format!("{:.3}", ratios.median()),
            span(ratios.quantile(0.25), ratios.quantile(0.75)),
            span(ratios.min(), ratios.max()),
            format!("{:.1}", self.each(|bare, _| bare.cost).median()),
            format!("{:.1}", self.each(|_, own| own.cost).median()),
            format!(
                "{:.3}",
                self.each(|bare, own| bare.cost / own.cost).median()
            ),
        ]
    }

    fn target(&self) -> Target {
        let what = format!("calls a second, {}, {}, to bare", self.mode, self.setup);
        Target::new(AtLeast(0.97), what, self.ratios().median())
    }
}
