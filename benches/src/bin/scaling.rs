//! Contention: many sessions on several threads, and the locks that a call takes.
//!
//! `scaling [--quick]`. Servers and clients are separate processes.

use std::{collections::BTreeMap, thread::available_parallelism};

use benches::{
    locks::Attributed,
    prelude::*,
    sockets::side::{self, Path, Side},
    valgrind,
};

const THREADS: [usize; 4] = [1, 2, 4, 8];
const SESSIONS: [usize; 3] = [1, 16, 256];
const CANDIDATES: [Setup; 2] = [Setup::Layer, Setup::Wrapped];

/// The cases whose locks are listed, in column order.
const LISTED: [(Candidate, Mode); 5] = [
    (Candidate::BARE, Mode::Session),
    (Candidate::Setup(Setup::Wrapped), Mode::Session),
    (Candidate::Setup(Setup::Layer), Mode::Session),
    (Candidate::BARE, Mode::Stateless),
    (Candidate::Setup(Setup::Layer), Mode::Stateless),
];

fn main() -> Result<()> {
    let role = role();
    if !role.is_empty() {
        return side::play(&role);
    }
    locks()?;
    runtime()?.block_on(compare())
}

/// Lists the locks that a call takes, and where its locked instructions are.
fn locks() -> Result<()> {
    let (mut places, mut locks) = (BTreeMap::new(), BTreeMap::new());
    for (column, (candidate, mode)) in LISTED.into_iter().enumerate() {
        let case = Case::new(candidate, Workload::Call(mode, Load::Arguments(100)));
        eprintln!("locks: {case}");
        let Attributed {
            places: of_places,
            locks: of_locks,
        } = valgrind::locked(case)?.resolve()?;
        for (table, counts) in [(&mut places, of_places), (&mut locks, of_locks)] {
            for (name, count) in counts {
                let row = table.entry(name).or_insert([0.0; LISTED.len()]);
                row[column] = count as f64 / case.calls();
            }
        }
    }
    for (name, counts) in [("scaling-locks", locks), ("scaling-places", places)] {
        let section = Section {
            rows: table(counts),
            ..Section::new(name, json!({}))?
        };
        section.publish()?;
    }
    Ok(())
}

/// Returns the total, then the rows in descending order. Omits rows whose sum is 0.01 or less.
fn table(counts: BTreeMap<String, [f64; LISTED.len()]>) -> Vec<Vec<String>> {
    let mut totals = [0.0; LISTED.len()];
    for row in counts.values() {
        for (total, count) in totals.iter_mut().zip(row) {
            *total += count;
        }
    }
    let mut rows = Vec::from_iter(counts);
    let weight = |row: &[f64]| row.iter().sum::<f64>();
    rows.retain(|(_, row)| weight(row) > 0.01);
    rows.sort_by(|a, b| weight(&b.1).total_cmp(&weight(&a.1)));
    rows.insert(0, ("all".to_owned(), totals));
    let cell = |count: f64| {
        if count == 0.0 {
            String::new()
        } else {
            format!("{count:.2}")
        }
    };
    let row = |(name, row): (String, [f64; LISTED.len()])| {
        [format!("`{name}`")]
            .into_iter()
            .chain(row.map(cell))
            .collect()
    };
    rows.into_iter().map(row).collect()
}

async fn compare() -> Result<()> {
    let (count, millis) = if is_quick() { (2, 200) } else { (8, 400) };
    let available = available_parallelism()?.get();
    let values = json!({ "pairs": count, "millis": millis, "load": machine::load() });
    let mut section = Section::new("scaling", values)?;
    let threads = THREADS.into_iter().filter(|threads| *threads <= available);
    let mut alone = BTreeMap::new();
    for (path, threads) in
        Path::iter().flat_map(|path| threads.clone().map(move |threads| (path, threads)))
    {
        let mut rows = SESSIONS.map(|sessions| cells![path, threads, sessions, ""]);
        for setup in CANDIDATES {
            eprintln!("{path}, {threads} threads, {setup}");
            let start = async |setup| Side::start(path, Mode::Session, setup, threads).await;
            let mut sides = [start(Setup::Bare).await?, start(setup).await?];
            for (row, sessions) in rows.iter_mut().zip(SESSIONS) {
                let mut run = async |side: usize| Ok(sides[side].run(sessions, millis).await?.rate);
                // This opens the sessions and warms up.
                run(0).await?;
                run(1).await?;
                let pairs = alternate(count, run).await?;
                let bare: Sample = pairs.iter().map(|[bare, _]| *bare).collect();
                row[3] = format!("{:.0}", bare.median());
                let ratios = ratios(&pairs);
                row.push(ratios.spread());
                let alone = *alone
                    .entry((path, setup, sessions))
                    .or_insert(ratios.median());
                if threads > 1 && sessions > 1 {
                    let what = format!(
                        "{path}, {sessions} sessions, {setup}: ratio with {threads} threads, less that with one"
                    );
                    let less = ratios.median() - alone;
                    section
                        .targets
                        .push(Target::new(AtLeast(-0.02), what, less));
                }
            }
        }
        section.rows.extend(rows);
    }
    section.publish()
}
