//! What one tool call costs in every set-up: instructions with two allocators, and time.

use std::collections::BTreeMap;

use criterion::{Criterion, SamplingMode};
use mcp_cancel_on_disconnect_benches::{
    Failure,
    callgrind::{Allocator, instructions},
    case::{Case, Load, What, Who},
    report::{Axis, Bound, Kind, Plot, Section, Series, Target, folder},
    setup::{Mode, Setup},
    work::Work,
};
use serde_json::Value;

/// How often all set-ups take turns.
const ROUNDS: usize = 5;

const BARE: Who = Who::Setup(Setup::Bare);

/// A figure for each case.
type Figures = BTreeMap<String, f64>;

fn main() -> Result<(), Failure> {
    let glibc = count(Allocator::Glibc)?;
    let mimalloc = count(Allocator::Mimalloc)?;
    with_glibc(&glibc).publish()?;
    with_mimalloc(&mimalloc).publish()?;
    time()?.publish()?;
    Ok(())
}

fn cases() -> impl Iterator<Item = Case> {
    What::ALL.into_iter().flat_map(|what| {
        let whos = std::iter::once(BARE).chain(Who::compared());
        whos.map(move |who| Case::new(who, what))
    })
}

/// Instructions of every case, each time it is asked.
fn count(allocator: Allocator) -> Result<Figures, Failure> {
    let mut figures = Figures::new();
    for case in cases() {
        eprintln!("counting with {}: {case}", allocator.name());
        let (_, repetitions) = case.what.repetitions();
        let total = instructions(allocator, &format!("calls {case}"))?;
        figures.insert(case.to_string(), total as f64 / f64::from(repetitions));
    }
    Ok(figures)
}

fn ratio(figures: &Figures, case: Case) -> f64 {
    figures[&case.to_string()] / figures[&case.bare().to_string()]
}

// === the sections ===

fn with_glibc(figures: &Figures) -> Section {
    let text = "Instructions of one request in process, without sockets: client, server and what watches between them, on one \
        thread, counted by valgrind. Columns but the first are ratios to bare rmcp. *guard* is a drop guard written by \
        hand, which knows no ids and no sessions; *layer* is `CancelOnDisconnectLayer` over rmcp's own session manager; \
        *wrapped* has `CancellableSessionManager` as well; *abortable* has the handler in `AbortOnCancel` on top of that. \
        Without sessions the session manager is not in the way, so *wrapped* is *layer* there. What is kept of calls that \
        ended is as full as it gets when counting starts.\n\n\
        A bad result is a ratio above the targets below. The plots show what is added to a bare call.";
    Section {
        name: "call".to_owned(),
        title: "What a call costs: instructions".to_owned(),
        command: "benches/run call".to_owned(),
        text: text.to_owned(),
        columns: columns("instructions, bare"),
        rows: rows(figures),
        targets: targets(figures),
        plots: vec![
            plot(
                figures,
                "call-session",
                "Calls in a session",
                Some(Mode::Session),
            ),
            plot(
                figures,
                "call-stateless",
                "Calls without a session",
                Some(Mode::Stateless),
            ),
        ],
    }
}

fn with_mimalloc(figures: &Figures) -> Section {
    let text = "The same programs with mimalloc as allocator. What a bare call costs differs more between the two than what the \
        set-ups add: they leave little behind that an allocator has to find its way around.";
    Section {
        name: "call-mimalloc".to_owned(),
        title: "What a call costs: instructions with another allocator".to_owned(),
        command: "benches/run call".to_owned(),
        text: text.to_owned(),
        columns: columns("instructions, bare"),
        rows: rows(figures),
        targets: Vec::new(),
        plots: vec![plot(
            figures,
            "call-session-mimalloc",
            "Calls in a session, mimalloc",
            Some(Mode::Session),
        )],
    }
}

fn columns(bare: &str) -> Vec<String> {
    let first = ["request", "bytes of", bare].map(str::to_owned);
    first
        .into_iter()
        .chain(Who::compared().map(|who| who.name().to_owned()))
        .collect()
}

fn rows(figures: &Figures) -> Vec<Vec<String>> {
    What::ALL.map(|what| row(figures, what)).to_vec()
}

fn row(figures: &Figures, what: What) -> Vec<String> {
    let bare = figures[&Case::new(BARE, what).to_string()];
    let mut row = vec![request(what).to_owned(), load(what), thousands(bare)];
    row.extend(Who::compared().map(|who| format!("{:.3}", ratio(figures, Case::new(who, what)))));
    row
}

fn request(what: What) -> &'static str {
    match what {
        What::Call(Mode::Session, _) => "call in a session",
        What::Call(Mode::Stateless, _) => "call without a session",
        What::Plain => "GET without MCP",
    }
}

fn load(what: What) -> String {
    let (of, bytes) = match what {
        What::Call(_, Load::Arguments(bytes)) => ("arguments", bytes),
        What::Call(_, Load::Result(bytes)) => ("result", bytes),
        What::Plain => return String::new(),
    };
    match bytes {
        1_000_000.. => format!("{} MB {of}", bytes / 1_000_000),
        1_000.. => format!("{} kB {of}", bytes / 1_000),
        _ => format!("{bytes} B {of}"),
    }
}

fn thousands(figure: f64) -> String {
    let digits = format!("{figure:.0}");
    let mut grouped = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// The session manager is held to 5 %, what reads bytes to 10 % of a small call and 15 % of a large one.
fn targets(figures: &Figures) -> Vec<Target> {
    let mut targets = Vec::new();
    for what in What::ALL {
        let (who, bound) = match what {
            What::Call(_, Load::Arguments(10_000)) | What::Plain => continue,
            What::Call(Mode::Session, _) => (Setup::Wrapped, 1.05),
            What::Call(Mode::Stateless, Load::Arguments(100)) => (Setup::Layer, 1.10),
            What::Call(Mode::Stateless, _) => (Setup::Layer, 1.15),
        };
        targets.push(target(figures, who, what, bound));
        if let What::Call(Mode::Session, load) = what {
            let bound = if load == Load::Arguments(100) {
                1.10
            } else {
                1.15
            };
            targets.push(target(figures, Setup::Layer, what, bound));
        }
    }
    targets
}

fn target(figures: &Figures, who: Setup, what: What, bound: f64) -> Target {
    let by = match who {
        Setup::Wrapped => "layer and session manager",
        _ => "layer only",
    };
    Target {
        what: format!(
            "instructions of a {} ({}), {by}, to bare",
            request(what),
            load(what)
        ),
        bound: Bound::AtMost(bound),
        measured: ratio(figures, Case::new(Who::Setup(who), what)),
    }
}

fn plot(figures: &Figures, name: &str, title: &str, mode: Option<Mode>) -> Plot {
    let whats = What::ALL.into_iter().filter(|what| match what {
        What::Call(of, _) => Some(*of) == mode,
        What::Plain => mode.is_none(),
    });
    let whats: Vec<What> = whats.collect();
    let series = Who::compared().map(|who| {
        let points = whats.iter().enumerate().map(|(x, what)| {
            let added = ratio(figures, Case::new(who, *what)) - 1.0;
            (x as f64, added * 100.0)
        });
        Series {
            name: who.name().to_owned(),
            points: points.collect(),
        }
    });
    Plot {
        name: name.to_owned(),
        title: title.to_owned(),
        x: Axis::linear(String::new()),
        y: Axis::linear("instructions added to a bare call (%)"),
        kind: Kind::Bars {
            categories: whats.iter().map(|what| load(*what)).collect(),
        },
        series: series.collect(),
    }
}

// === the time ===

/// Set-ups take turns, so that what else the machine does meets all of them.
fn time() -> Result<Section, Failure> {
    let output = folder().join("../criterion");
    let mut criterion = Criterion::default()
        .without_plots()
        .output_directory(&output);
    for round in 0..ROUNDS {
        let mut group = criterion.benchmark_group(format!("call-{round}"));
        group
            .sample_size(20)
            .sampling_mode(SamplingMode::Flat)
            .warm_up_time(std::time::Duration::from_millis(100))
            .measurement_time(std::time::Duration::from_millis(400));
        for case in cases() {
            let mut work = Work::warm(case)?;
            group.bench_function(case.to_string(), |bencher| {
                bencher.iter_custom(|times| work.time(times).expect("the server answers"));
            });
        }
        group.finish();
    }
    let rounds: Vec<Figures> = (0..ROUNDS)
        .map(|round| medians(&output.join(format!("call-{round}"))))
        .collect::<Result<_, _>>()?;
    let text = format!(
        "Time of the same requests with glibc's allocator, on one thread. All set-ups take turns {ROUNDS} times; Criterion \
        measures each turn. A ratio is that of two medians of one turn, in the table the median of the turns, with the \
        smallest and the largest. Time on a shared machine wavers: the instructions above are what is held to targets."
    );
    Ok(Section {
        name: "call-time".to_owned(),
        title: "What a call costs: time".to_owned(),
        command: "benches/run call".to_owned(),
        text,
        columns: columns("bare (µs)"),
        rows: What::ALL
            .into_iter()
            .map(|what| time_row(&rounds, what))
            .collect(),
        targets: Vec::new(),
        plots: Vec::new(),
    })
}

fn medians(group: &std::path::Path) -> Result<Figures, Failure> {
    let mut figures = Figures::new();
    for case in cases() {
        let file = group.join(case.to_string()).join("new/estimates.json");
        let estimates: Value = serde_json::from_slice(&std::fs::read(&file)?)?;
        let median = estimates["median"]["point_estimate"].as_f64();
        figures.insert(case.to_string(), median.ok_or("no median")?);
    }
    Ok(figures)
}

fn time_row(rounds: &[Figures], what: What) -> Vec<String> {
    let bare = rounds
        .iter()
        .map(|round| round[&Case::new(BARE, what).to_string()] / 1_000.0);
    let mut row = vec![
        request(what).to_owned(),
        load(what),
        format!("{:.1}", middle(bare).1),
    ];
    row.extend(Who::compared().map(|who| {
        let ratios = rounds
            .iter()
            .map(|round| ratio(round, Case::new(who, what)));
        let (least, median, most) = middle(ratios);
        format!("{median:.2} ({least:.2}–{most:.2})")
    }));
    row
}

/// Smallest, median, largest.
fn middle(figures: impl Iterator<Item = f64>) -> (f64, f64, f64) {
    let mut figures: Vec<f64> = figures.collect();
    figures.sort_by(f64::total_cmp);
    (
        figures[0],
        figures[figures.len() / 2],
        figures[figures.len() - 1],
    )
}
