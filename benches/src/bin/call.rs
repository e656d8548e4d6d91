//! What one tool call costs in every set-up: instructions with two allocators, and time.

use std::collections::BTreeMap;

use benches::{prelude::*, valgrind::instructions, work::Work};

/// How often all set-ups take turns.
const ROUNDS: usize = 5;

/// How often the time is taken in a turn, and how long it is taken.
const SAMPLES: usize = 20;
const SAMPLE: Duration = Duration::from_millis(20);

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
    section.publish()?;

    let rounds = (0..ROUNDS).map(time).collect::<Result<Vec<_>, _>>()?;
    let values = json!({ "rounds": ROUNDS, "samples": SAMPLES });
    let section = Section {
        rows: What::all().map(|what| time_row(&rounds, what)).collect(),
        ..Section::new("call-time", values)?
    };
    section.publish()
}

/// Instructions of every case, each time it is asked.
fn count(allocator: Allocator) -> Result<Figures> {
    let count = |case: Case| {
        eprintln!("counting with {allocator}: {case}");
        let (_, repetitions) = case.what.repetitions();
        let total = instructions(allocator, &format!("calls {case}"))?;
        Ok((case, total as f64 / f64::from(repetitions)))
    };
    Case::compared().map(count).collect()
}

fn ratio(figures: &Figures, case: Case) -> f64 {
    figures[&case] / figures[&case.bare()]
}

fn rows(figures: &Figures) -> Vec<Vec<String>> {
    let each = |what| {
        let ratio = |who| format!("{:.3}", ratio(figures, Case::new(who, what)));
        let bare = thousands(figures[&Case::new(Who::BARE, what)]);
        row(what, bare, ratio)
    };
    What::all().map(each).collect()
}

fn row(what: What, bare: String, ratio: impl Fn(Who) -> String) -> Vec<String> {
    let first = [request(what).to_owned(), load(what), bare];
    first.into_iter().chain(Who::COMPARED.map(ratio)).collect()
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
    let digits = format!("{figure:.0}").into_bytes();
    let groups = digits.rchunks(3).rev().map(String::from_utf8_lossy);
    Vec::from_iter(groups).join(",")
}

/// The session manager is held to 5 %, what reads bytes to 10 % of a small call and 15 % of a large one.
fn targets(figures: &Figures) -> Vec<Target> {
    let target = |setup, what, most| {
        let by = match setup {
            Setup::Wrapped => "layer and session manager",
            _ => "layer only",
        };
        let (request, load) = (request(what), load(what));
        let name = format!("instructions of a {request} ({load}), {by}, to bare");
        let measured = ratio(figures, Case::new(Who::Setup(setup), what));
        Target::new(AtMost(most), name, measured)
    };
    let mut targets = Vec::new();
    for what in What::all() {
        let (mode, of_layer) = match what {
            What::Plain | What::Call(_, Load::Arguments(10_000)) => continue,
            What::Call(mode, Load::Arguments(100)) => (mode, 1.10),
            What::Call(mode, _) => (mode, 1.15),
        };
        if mode == Mode::Session {
            targets.push(target(Setup::Wrapped, what, 1.05));
        }
        targets.push(target(Setup::Layer, what, of_layer));
    }
    targets
}

/// What is added to the calls in one mode.
fn plot(figures: &Figures, (name, title, mode): (&str, &str, Mode)) -> Plot {
    let is_shown = |what: &What| matches!(what, What::Call(of, _) if *of == mode);
    let whats = || What::all().filter(is_shown);
    let series = Who::COMPARED.map(|who| {
        let ratios = whats().map(|what| ratio(figures, Case::new(who, what)));
        Series::of(who, ratios.map(|ratio| (ratio - 1.0) * 100.0))
    });
    let y = Axis::linear("instructions added to a bare call (%)");
    Plot::lines(name, title, [Axis::linear(""), y], series.to_vec()).over(whats().map(load))
}

/// Nanoseconds of every case, once. Set-ups take turns, so that what else the machine does meets all of them.
fn time(round: usize) -> Result<Figures> {
    let time = |case: Case| {
        eprintln!("timing, round {round}: {case}");
        let mut work = Work::warm(case)?;
        let mut times = 1;
        // A few samples' time, to see how many calls are in one.
        while work.time(times)? < SAMPLE {
            times *= 2;
        }
        let each = |_| Ok(work.time(times)?.as_secs_f64() * 1e9 / f64::from(times));
        let sample = (0..SAMPLES).map(each).collect::<Result<Sample>>()?;
        Ok((case, sample.median()))
    };
    Case::compared().map(time).collect()
}

fn time_row(rounds: &[Figures], what: What) -> Vec<String> {
    let bare = rounds
        .iter()
        .map(|round| round[&Case::new(Who::BARE, what)] / 1_000.0);
    let bare = format!("{:.1}", bare.collect::<Sample>().median());
    row(what, bare, |who| {
        let ratios = rounds
            .iter()
            .map(|round| ratio(round, Case::new(who, what)));
        let ratios: Sample = ratios.collect();
        let (least, median, most) = (ratios.min(), ratios.median(), ratios.max());
        format!("{median:.2} ({least:.2}–{most:.2})")
    })
}
