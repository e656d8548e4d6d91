//! What one tool call costs in every set-up: instructions with two allocators.

use std::collections::BTreeMap;

use benches::{prelude::*, valgrind};

/// One figure per case.
type Figures = BTreeMap<Case, f64>;

fn main() -> Result<()> {
    let figures = count(Allocator::Glibc)?;
    let section = Section {
        rows: rows(&figures),
        targets: targets(&figures),
        ..Section::new("call", json!({}))?
    };
    section.publish()?;

    let figures = count(Allocator::Mimalloc)?;
    let section = Section {
        rows: rows(&figures),
        ..Section::new("call-mimalloc", json!({}))?
    };
    section.publish()
}

/// Counts the instructions of one request for every case.
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

/// Returns the targets.
///
/// The session manager may cost 5 %. A set-up that reads bytes may cost 10 % for a small call and 15 % for a large
/// one. Calls with 10 kB and the GET have no target.
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
