//! Whether operations cost more the more calls are in flight.

use std::collections::BTreeMap;

use benches::{
    growth::{Operation, REPETITIONS, Scene, Spread},
    prelude::*,
    valgrind::{self, Allocator},
};

/// What an operation takes.
#[derive(Debug, Clone, Copy)]
struct Cost {
    instructions: f64,
    microseconds: f64,
}

/// By the operation's name.
type Costs = BTreeMap<String, Cost>;

/// An operation in scenes that differ in the number of calls in flight.
struct Growth<'a> {
    found: &'a BTreeMap<Scene, Costs>,
    spread: Spread,
    setup: Setup,
    operation: Operation,
}

fn main() -> Result<()> {
    let mut found = BTreeMap::new();
    for scene in Scene::all() {
        eprintln!("growth: {scene}");
        found.insert(scene, costs(scene)?);
    }
    let growth = |spread, setup, operation| Growth {
        found: &found,
        spread,
        setup,
        operation,
    };
    let mut section = Section::new("growth", &[])?;
    for spread in Spread::iter() {
        for setup in Scene::SETUPS {
            let operations = Operation::iter().map(|operation| growth(spread, setup, operation));
            section
                .rows
                .extend(operations.filter_map(|each| each.row()));
        }
    }
    section.targets.extend(Operation::iter().map(|operation| {
        // Of the worst set-up and spread.
        let ours = Scene::all().filter(|scene| scene.setup.is_ours());
        let ratios = ours.map(|scene| growth(scene.spread, scene.setup, operation).ratio());
        let what = format!(
            "{operation} beside as many calls as were tried, instructions added, to beside one"
        );
        Target::at_most(1.5, what, ratios.fold(f64::MIN, f64::max))
    }));
    for (setup, of) in [
        (Setup::Wrapped, "layer and session manager"),
        (Setup::Layer, "layer only"),
    ] {
        let series = |operation| growth(Spread::Many, setup, operation).series();
        let title = format!("Operations beside many calls, {of}");
        section.plots.push(Plot::lines(
            &format!("growth-{setup}"),
            &title,
            Axis::logarithmic("calls in flight, 100 in a session"),
            Axis::logarithmic("instructions of one operation"),
            Operation::iter().map(series).collect(),
        ));
    }
    section.publish()
}

fn costs(scene: Scene) -> Result<Costs> {
    let arguments = format!("growth {scene}");
    let parts = valgrind::parts(Allocator::Glibc, &arguments)?;
    let mut costs = Costs::new();
    for line in valgrind::printed(Allocator::Glibc, &arguments)?.lines() {
        let (name, nanoseconds) = line.split_once(' ').context("no time")?;
        let total = *parts.get(name).context("no count")? as f64;
        let cost = Cost {
            instructions: total / f64::from(REPETITIONS),
            microseconds: nanoseconds.parse::<f64>()? / 1_000.0,
        };
        costs.insert(name.to_owned(), cost);
    }
    Ok(costs)
}

// === impl Growth ===

impl Growth<'_> {
    fn cost(&self, setup: Setup, in_flight: usize) -> Cost {
        let spread = self.spread;
        let scene = Scene {
            spread,
            setup,
            in_flight,
        };
        self.found[&scene][&self.operation.to_string()]
    }

    fn instructions(&self) -> [f64; 3] {
        let sizes = self.spread.sizes();
        sizes.map(|size| self.cost(self.setup, size).instructions)
    }

    /// The instructions that are not rmcp's.
    fn added(&self) -> [f64; 3] {
        let sizes = self.spread.sizes();
        sizes.map(|size| {
            let bare = self.cost(Setup::Bare, size).instructions;
            self.cost(self.setup, size).instructions - bare
        })
    }

    fn ratio(&self) -> f64 {
        let [one, _, most] = self.added();
        most / one
    }

    /// Bare rmcp has nothing to find.
    fn row(&self) -> Option<Vec<String>> {
        let is_bare = self.setup == Setup::Bare;
        if is_bare && self.operation == Operation::Find {
            return None;
        }
        let sizes = self.spread.sizes();
        let each = |figures: [f64; 3], digits: usize| {
            let figures = figures.map(|figure| format!("{figure:.digits$}"));
            figures.join(" / ")
        };
        let unless_bare = |cell: String| if is_bare { String::new() } else { cell };
        let sessions = match self.spread {
            Spread::One => "one",
            Spread::Many => "of 100 calls",
        };
        Some(cells![
            sessions,
            self.setup,
            self.operation,
            sizes.map(|size| size.to_string()).join(" / "),
            each(self.instructions(), 0),
            unless_bare(each(self.added(), 0)),
            each(
                sizes.map(|size| self.cost(self.setup, size).microseconds),
                1
            ),
            unless_bare(format!("{:.2}", self.ratio())),
        ])
    }

    fn series(&self) -> Series {
        let sizes = self.spread.sizes().map(|size| size as f64);
        let points = sizes.into_iter().zip(self.instructions());
        Series::new(self.operation, points)
    }
}
