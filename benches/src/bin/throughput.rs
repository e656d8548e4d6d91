//! Calls per second over loopback, compared with bare rmcp.
//!
//! `throughput [--quick]`. Server and clients get one processor each, so the server is the bottleneck.

use benches::{
    prelude::*,
    sockets::side::{self, Path, Run, Side},
};

const CONNECTIONS: usize = 16;

const CANDIDATES: [Setup; 3] = [Setup::Guard, Setup::Layer, Setup::Wrapped];

/// One set-up compared with bare rmcp in pairs of runs, bare rmcp's first.
struct Comparison {
    mode: Mode,
    setup: Setup,
    pairs: Vec<[Run; 2]>,
}

fn main() -> Result<()> {
    let role = role();
    match role.as_str() {
        "" => compare(&machine::load()),
        _ => side::play(&role),
    }
}

fn compare(load: &str) -> Result<()> {
    let (pairs, millis) = if is_quick() { (2, 200) } else { (20, 1_000) };
    let comparisons = runtime()?.block_on(measure(pairs, millis))?;
    let ours = comparisons
        .iter()
        .filter(|comparison| comparison.setup.is_ours());
    let values =
        json!({ "connections": CONNECTIONS, "pairs": pairs, "millis": millis, "load": load });
    let section = Section {
        rows: comparisons.iter().map(Comparison::row).collect(),
        targets: ours.map(Comparison::target).collect(),
        ..Section::new("throughput", values)?
    };
    section.publish()
}

async fn measure(count: usize, millis: u64) -> Result<Vec<Comparison>> {
    let mut comparisons = Vec::new();
    for mode in Mode::iter() {
        for setup in CANDIDATES {
            eprintln!("{mode}, {setup}");
            let start = async |setup| Side::start(Path::Sockets, mode, setup, 1).await;
            let mut sides = [start(Setup::Bare).await?, start(setup).await?];
            let mut run = async |side: usize| sides[side].run(CONNECTIONS, millis).await;
            // This opens the connections and warms up.
            run(0).await?;
            run(1).await?;
            let pairs = alternate(count, run).await?;
            comparisons.push(Comparison { mode, setup, pairs });
        }
    }
    Ok(comparisons)
}

// === impl Comparison ===

impl Comparison {
    /// Returns one figure per pair.
    fn sample(&self, figure: impl Fn(&Run, &Run) -> f64) -> Sample {
        let pairs = self.pairs.iter();
        pairs
            .map(|[bare, candidate]| figure(bare, candidate))
            .collect()
    }

    fn ratios(&self) -> Sample {
        self.sample(|bare, candidate| candidate.rate / bare.rate)
    }

    fn row(&self) -> Vec<String> {
        let ratios = self.ratios();
        let span = |from: f64, to: f64| format!("{from:.3} to {to:.3}");
        cells![
            self.mode,
            self.setup,
            format!("{:.0}", self.sample(|bare, _| bare.rate).median()),
            format!("{:.0}", self.sample(|_, candidate| candidate.rate).median()),
            format!("{:.3}", ratios.median()),
            span(ratios.quantile(0.25), ratios.quantile(0.75)),
            span(ratios.min(), ratios.max()),
            format!("{:.1}", self.sample(|bare, _| bare.cost).median()),
            format!("{:.1}", self.sample(|_, candidate| candidate.cost).median()),
            format!(
                "{:.3}",
                self.sample(|bare, candidate| bare.cost / candidate.cost)
                    .median()
            ),
        ]
    }

    fn target(&self) -> Target {
        let what = format!("calls a second, {}, {}, to bare", self.mode, self.setup);
        let is_wrapped = (self.setup, self.mode) == (Setup::Wrapped, Mode::Session);
        let least = AtLeast(if is_wrapped { 0.97 } else { 0.95 });
        Target::new(least, what, self.ratios().median())
    }
}
