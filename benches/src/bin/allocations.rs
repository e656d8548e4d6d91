//! How much a call allocates in every set-up, and where the crate's own allocations are made.

use std::collections::BTreeMap;

use benches::{
    dhat::{self, Allocated},
    prelude::*,
    valgrind::run_natively,
};

/// The cases whose allocations are listed by location, in column order.
const LISTED: [(Candidate, Mode); 4] = [
    (Candidate::Setup(Setup::Wrapped), Mode::Session),
    (Candidate::Setup(Setup::Layer), Mode::Session),
    (Candidate::Setup(Setup::Layer), Mode::Stateless),
    (Candidate::Abortable, Mode::Session),
];

fn main() -> Result<()> {
    let section = Section {
        rows: Workload::all().map(totals).collect::<Result<_>>()?,
        ..Section::new("allocations", json!({}))?
    };
    section.publish()?;
    let section = Section {
        rows: places()?,
        ..Section::new("allocations-places", json!({}))?
    };
    section.publish()
}

/// Returns a request's row: bare rmcp's allocations, and those that each set-up adds.
fn totals(what: Workload) -> Result<Vec<String>> {
    let bare = allocated(Case::new(Candidate::BARE, what))?;
    let Allocated { count, bytes } = bare;
    let mut row = vec![what.to_string(), format!("{count:.1}, {bytes:.0} B")];
    for candidate in Candidate::COMPARED {
        let total = allocated(Case::new(candidate, what))?;
        let (count, bytes) = (total.count - bare.count, total.bytes - bare.bytes);
        row.push(format!("+{count:.1}, +{bytes:.0} B"));
    }
    Ok(row)
}

fn allocated(case: Case) -> Result<Allocated> {
    eprintln!("allocations: {case}");
    let printed = run_natively(Allocator::Counted, &case.to_string())?;
    let (count, bytes) = printed.trim().split_once(' ').context("not two figures")?;
    let (count, bytes) = (count.parse()?, bytes.parse()?);
    Ok(Allocated { count, bytes })
}

/// Returns a row per location, in descending order of allocations.
fn places() -> Result<Vec<Vec<String>>> {
    let mut rows: BTreeMap<String, [Allocated; LISTED.len()]> = BTreeMap::new();
    for (column, (candidate, mode)) in LISTED.into_iter().enumerate() {
        let case = Case::new(candidate, Workload::Call(mode, Load::Arguments(100)));
        for (place, allocated) in dhat::places(case)? {
            rows.entry(place).or_default()[column] = allocated;
        }
    }
    let mut rows = Vec::from_iter(rows);
    let weight = |row: &[Allocated]| row.iter().map(|allocated| allocated.count).sum::<f64>();
    rows.sort_by(|a, b| weight(&b.1).total_cmp(&weight(&a.1)));
    let cell = |Allocated { count, bytes }| match count {
        0.0 => String::new(),
        count => format!("{count:.2}, {bytes:.0} B"),
    };
    let row = |(place, row): (String, [Allocated; LISTED.len()])| {
        [format!("`{place}`")]
            .into_iter()
            .chain(row.map(cell))
            .collect()
    };
    Ok(rows.into_iter().map(row).collect())
}
