//! Whether operations cost more the more calls are in flight.

use std::{collections::BTreeMap, process::Command};

use mcp_cancel_on_disconnect_benches::{
    Failure, callgrind,
    growth::{Operation, REPETITIONS, Scene, Spread},
    report::{Axis, Bound, Kind, Plot, Section, Series, Target},
    setup::Setup,
};

const SETUPS: [Setup; 3] = [Setup::Bare, Setup::Layer, Setup::Wrapped];

/// What an operation takes.
#[derive(Debug, Clone, Copy, Default)]
struct Cost {
    instructions: f64,
    microseconds: f64,
}

struct Found(BTreeMap<String, BTreeMap<String, Cost>>);

fn main() -> Result<(), Failure> {
    let mut found = BTreeMap::new();
    for spread in Spread::ALL {
        for setup in SETUPS {
            for in_flight in sizes(spread) {
                let scene = Scene {
                    setup,
                    spread,
                    in_flight: *in_flight,
                };
                eprintln!("growth: {scene}");
                found.insert(scene.to_string(), costs(scene)?);
            }
        }
    }
    section(&Found(found)).publish()?;
    Ok(())
}

/// One session of bare rmcp needs the square of its calls to start them, so it is not asked for 100,000.
fn sizes(spread: Spread) -> &'static [usize] {
    match spread {
        Spread::Many => &[1, 1_000, 100_000],
        Spread::One => &[1, 1_000, 10_000],
    }
}

fn costs(scene: Scene) -> Result<BTreeMap<String, Cost>, Failure> {
    let arguments = format!("growth {scene}");
    let parts = callgrind::parts(callgrind::Allocator::Glibc, &arguments)?;
    let output = Command::new(callgrind::program("work-glibc")?)
        .args(arguments.split(' '))
        .output()?;
    let printed = String::from_utf8(output.stdout)?;
    let mut costs = BTreeMap::new();
    for line in printed.lines() {
        let (name, nanoseconds) = line.split_once(' ').ok_or("no time")?;
        let total = *parts.get(name).ok_or("no count")? as f64;
        let cost = Cost {
            instructions: total / f64::from(REPETITIONS),
            microseconds: nanoseconds.parse::<f64>()? / 1_000.0,
        };
        costs.insert(name.to_owned(), cost);
    }
    Ok(costs)
}

fn section(found: &Found) -> Section {
    let text = "Single operations in process, while other calls are in flight: 100 in each session, or all in one session, \
        in which the measured call is too. Instructions by valgrind, and the median time of 40 operations without it. The \
        ratio is that of what is added to bare rmcp with the most calls and with one: bare rmcp itself walks over all calls \
        of a session with every request, so that the time in one large session is mostly its own. *delete* deletes a \
        session with one call. *find* is `Calls::find`. A bad result is a ratio above 1.5: something looks at all calls.";
    let columns = [
        "sessions",
        "set-up",
        "operation",
        "calls in flight",
        "instructions",
        "added to bare",
        "time (µs)",
        "ratio",
    ];
    let mut rows = Vec::new();
    for spread in Spread::ALL {
        for setup in SETUPS {
            for operation in Operation::ALL {
                if setup == Setup::Bare && operation == Operation::Find {
                    continue;
                }
                rows.push(found.row(setup, spread, operation));
            }
        }
    }
    Section {
        name: "growth".to_owned(),
        title: "What operations cost beside many calls in flight".to_owned(),
        command: "benches/run growth".to_owned(),
        text: text.to_owned(),
        columns: columns.map(str::to_owned).to_vec(),
        rows,
        targets: Operation::ALL
            .map(|operation| found.target(operation))
            .to_vec(),
        plots: vec![found.plot(Setup::Wrapped), found.plot(Setup::Layer)],
    }
}

// === impl Found ===

impl Found {
    fn cost(&self, setup: Setup, spread: Spread, in_flight: usize, operation: Operation) -> Cost {
        let scene = Scene {
            setup,
            spread,
            in_flight,
        };
        let costs = self.0.get(&scene.to_string());
        costs
            .and_then(|costs| costs.get(operation.name()))
            .copied()
            .unwrap_or_default()
    }

    /// The instructions that are not rmcp's.
    fn added(&self, setup: Setup, spread: Spread, in_flight: usize, operation: Operation) -> f64 {
        let bare = self.cost(Setup::Bare, spread, in_flight, operation);
        self.cost(setup, spread, in_flight, operation).instructions - bare.instructions
    }

    fn ratio(&self, setup: Setup, spread: Spread, operation: Operation) -> f64 {
        let sizes = sizes(spread);
        let at = |size| self.added(setup, spread, size, operation);
        at(sizes[sizes.len() - 1]) / at(sizes[0])
    }

    fn row(&self, setup: Setup, spread: Spread, operation: Operation) -> Vec<String> {
        let sizes = sizes(spread);
        let each = |figure: &dyn Fn(usize) -> f64, digits: usize| {
            let figures = sizes
                .iter()
                .map(|size| format!("{:.digits$}", figure(*size)));
            figures.collect::<Vec<_>>().join(" / ")
        };
        let bare = setup == Setup::Bare;
        let ratio = self.ratio(setup, spread, operation);
        let cost = |size| self.cost(setup, spread, size, operation);
        vec![
            if spread == Spread::One {
                "one"
            } else {
                "of 100 calls"
            }
            .to_owned(),
            setup.name().to_owned(),
            operation.name().to_owned(),
            each(&|size| size as f64, 0),
            each(&|size| cost(size).instructions, 0),
            if bare {
                String::new()
            } else {
                each(&|size| self.added(setup, spread, size, operation), 0)
            },
            each(&|size| cost(size).microseconds, 1),
            if bare {
                String::new()
            } else {
                format!("{ratio:.2}")
            },
        ]
    }

    /// Of the worst set-up and spread.
    fn target(&self, operation: Operation) -> Target {
        let ratios = Spread::ALL.into_iter().flat_map(|spread| {
            [Setup::Layer, Setup::Wrapped].map(|setup| self.ratio(setup, spread, operation))
        });
        Target {
            what: format!(
                "{} beside as many calls as were tried, instructions added, to beside one",
                operation.name()
            ),
            bound: Bound::AtMost(1.5),
            measured: ratios.fold(f64::MIN, f64::max),
        }
    }

    fn plot(&self, setup: Setup) -> Plot {
        let spread = Spread::Many;
        let series = Operation::ALL.into_iter().map(|operation| {
            let points = sizes(spread).iter().map(|size| {
                (
                    *size as f64,
                    self.cost(setup, spread, *size, operation).instructions,
                )
            });
            Series {
                name: operation.name().to_owned(),
                points: points.collect(),
            }
        });
        let axis = |label: &str| Axis::logarithmic(label);
        Plot {
            name: format!("growth-{}", setup.name()),
            title: match setup {
                Setup::Wrapped => "Operations beside many calls, layer and session manager",
                _ => "Operations beside many calls, layer only",
            }
            .to_owned(),
            x: axis("calls in flight, 100 in a session"),
            y: axis("instructions of one operation"),
            kind: Kind::Lines,
            series: series.collect(),
        }
    }
}
