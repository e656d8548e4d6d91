//! How the cost of operations grows with the number of calls in flight.

use std::collections::BTreeMap;

use benches::{
    growth::{Operation, REPETITIONS, Scene, Spread},
    prelude::*,
    valgrind::{parts, run_natively},
};

/// What one operation costs.
#[derive(Debug, Clone, Copy)]
struct Cost {
    instructions: f64,
    microseconds: f64,
}

/// What an operation costs at each number of calls in flight.
struct Growth {
    spread: Spread,
    setup: Setup,
    operation: Operation,
    costs: Vec<Cost>,
    /// The instructions on top of bare rmcp's.
    added: Vec<f64>,
}

fn main() -> Result<()> {
    let mut costs = BTreeMap::new();
    for scene in Scene::all() {
        eprintln!("growth: {scene}");
        for (operation, cost) in costs_of(scene)? {
            let growth = costs.entry((scene.spread, scene.setup, operation));
            growth.or_insert_with(Vec::new).push(cost);
        }
    }
    let growth = |(&(spread, setup, operation), costs_of_setup): (&_, &Vec<Cost>)| {
        let pairs = costs_of_setup
            .iter()
            .zip(&costs[&(spread, Setup::Bare, operation)]);
        let added = pairs.map(|(cost, bare)| cost.instructions - bare.instructions);
        Growth {
            spread,
            setup,
            operation,
            costs: costs_of_setup.clone(),
            added: added.collect(),
        }
    };
    let growths = Vec::from_iter(costs.iter().map(growth));
    let section = Section {
        rows: growths.iter().filter_map(Growth::row).collect(),
        targets: Operation::iter()
            .map(|operation| target(&growths, operation))
            .collect(),
        ..Section::new("growth", json!({}))?
    };
    section.publish()
}

fn costs_of(scene: Scene) -> Result<Vec<(Operation, Cost)>> {
    let arguments = format!("growth {scene}");
    let instructions = parts(Allocator::Glibc, &arguments)?;
    let printed = run_natively(Allocator::Glibc, &arguments)?;
    let cost = |line: &str| {
        let (name, nanoseconds) = line.split_once(' ').context("no time")?;
        let instructions = instructions.get(name).context("no count")?;
        let cost = Cost {
            instructions: *instructions as f64 / f64::from(REPETITIONS),
            microseconds: nanoseconds.parse::<f64>()? / 1_000.0,
        };
        Ok((name.parse()?, cost))
    };
    printed.lines().map(cost).collect()
}

/// Returns an operation's target, with the figure for the worst set-up and spread.
fn target(growths: &[Growth], operation: Operation) -> Target {
    let is_compared = |growth: &&Growth| growth.operation == operation && growth.setup.is_ours();
    let worst = growths.iter().filter(is_compared).map(Growth::ratio);
    let what = "beside as many calls as were tried, instructions added, to beside one";
    let worst = worst.fold(f64::MIN, f64::max);
    let most = match operation {
        // Just two lookups, in single-entry lists or in trees.
        Operation::Find => 4.0,
        _ => 1.5,
    };
    Target::new(AtMost(most), format!("{operation} {what}"), worst)
}

// === impl Growth ===

impl Growth {
    /// Returns how much more is added at the largest size than at the smallest, as a ratio of
    /// instructions.
    fn ratio(&self) -> f64 {
        self.added[self.added.len() - 1] / self.added[0]
    }

    /// Returns `None` for [`Operation::Find`] with bare rmcp, which has no such lookup.
    fn row(&self) -> Option<Vec<String>> {
        let (mut added, mut ratio) = (joined(&self.added, 0), format!("{:.2}", self.ratio()));
        match (self.setup, self.operation) {
            (Setup::Bare, Operation::Find) => return None,
            (Setup::Bare, _) => (added, ratio) = Default::default(),
            _ => {}
        }
        let sessions = match self.spread {
            Spread::One => "one",
            Spread::Many => "of 100 calls",
        };
        let costs = |figure: fn(&Cost) -> f64| Vec::from_iter(self.costs.iter().map(figure));
        Some(cells![
            sessions,
            self.setup,
            self.operation,
            joined(&self.spread.sizes().map(|size| size as f64), 0),
            joined(&costs(|cost| cost.instructions), 0),
            added,
            joined(&costs(|cost| cost.microseconds), 1),
            ratio,
        ])
    }
}

fn joined(figures: &[f64], digits: usize) -> String {
    let figures = figures.iter().map(|figure| format!("{figure:.digits$}"));
    Vec::from_iter(figures).join(" / ")
}
