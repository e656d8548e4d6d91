//! The cost of one tool call in every set-up: instructions with two allocators.

use std::collections::BTreeMap;

use benches::{prelude::*, valgrind};

/// A figure for each case.
type Figures = BTreeMap<Case, f64>;

fn main() -> Result<()> {
    let figures = count(Allocator::Glibc)?;
    let plots = [
        ("call-session", "Calls in a session", Mode::Session),
        ("call-stateless", "Calls without a session", Mode::Stateless),
    ];
    let section = Section {
        rows: rows(&figures),
        targets: targets(&figures),
        plots: plots.map(|plot| self::plot(&figures, plot)).to_vec(),
        ..Section::new("call", json!({}))?
    };
    section.publish()?;

    let figures = count(Allocator::Mimalloc)?;
    let session = (
        "call-session-mimalloc",
        "Calls in a session, mimalloc",
        Mode::Session,
    );
    let section = Section {
        rows: rows(&figures),
        plots: vec![plot(&figures, session)],
        ..Section::new("call-mimalloc", json!({}))?
    };
    section.publish()
}

/// Counts the instructions of one request of every case.
fn count(allocator: Allocator) -> Result<Figures> {
    let wanted = Case::compared().map(|case| (case, Count::Instructions));
    let counts = valgrind::counts(allocator, wanted.collect())?;
    Ok(counts
        .into_iter()
        .map(|((case, _), count)| (case, count))
        .collect())
}

fn ratio(figures: &Figures, case: Case) -> f64 {
    figures[&case] / figures[&case.bare()]
}

fn rows(figures: &Figures) -> Vec<Vec<String>> {
    let each = |what| {
        let ratio = |candidate| format!("{:.3}", ratio(figures, Case::new(candidate, what)));
        let bare = thousands(figures[&Case::new(Candidate::BARE, what)]);
        row(what, bare, ratio)
    };
    Workload::all().map(each).collect()
}

fn row(what: Workload, bare: String, ratio: impl Fn(Candidate) -> String) -> Vec<String> {
    let first = [what.request().to_owned(), what.load(), bare];
    first
        .into_iter()
        .chain(Candidate::COMPARED.map(ratio))
        .collect()
}

fn thousands(figure: f64) -> String {
    let digits = format!("{figure:.0}").into_bytes();
    let groups = digits.rchunks(3).rev().map(String::from_utf8_lossy);
    Vec::from_iter(groups).join(",")
}

/// The session manager may cost 5 %. A set-up that reads bytes may cost 10 % of a small call and 15 % of a large one.
fn targets(figures: &Figures) -> Vec<Target> {
    let target = |setup, what: Workload, most| {
        let by = match setup {
            Setup::Wrapped => "layer and session manager",
            _ => "layer only",
        };
        let (request, load) = (what.request(), what.load());
        let name = format!("instructions of a {request} ({load}), {by}, to bare");
        let measured = ratio(figures, Case::new(Candidate::Setup(setup), what));
        Target::new(AtMost(most), name, measured)
    };
    let mut targets = Vec::new();
    for what in Workload::all() {
        let (mode, of_layer) = match what {
            Workload::Plain | Workload::Call(_, Load::Arguments(10_000)) => continue,
            Workload::Call(mode, Load::Arguments(100)) => (mode, 1.10),
            Workload::Call(mode, _) => (mode, 1.15),
        };
        if mode == Mode::Session {
            targets.push(target(Setup::Wrapped, what, 1.05));
        }
        targets.push(target(Setup::Layer, what, of_layer));
    }
    targets
}

/// Plots the instructions added to the calls in one mode.
fn plot(figures: &Figures, (name, title, mode): (&str, &str, Mode)) -> Plot {
    let is_shown = |what: &Workload| matches!(what, Workload::Call(of, _) if *of == mode);
    let whats = || Workload::all().filter(is_shown);
    let series = Candidate::COMPARED.map(|candidate| {
        let ratios = whats().map(|what| ratio(figures, Case::new(candidate, what)));
        Series::of(candidate, ratios.map(|ratio| (ratio - 1.0) * 100.0))
    });
    let y = Axis::linear("instructions added to a bare call (%)");
    Plot::lines(name, title, [Axis::linear(""), y], series.to_vec())
        .over(whats().map(Workload::load))
}
