//! Fails if a call costs more than `gate.toml` allows. Only compares counts, not times.
//!
//! Each run also proves that it can fail: one layer wastes 3 % of the instructions, and another wastes everything else
//! that is counted, except last-level misses. Both must exceed the limits. If one no longer does, calls have become
//! cheaper and the limits are now too loose, so they need to be set again with `gate --write`.

use std::{collections::BTreeSet, process::ExitCode};

use benches::{
    gate::{Limit, Limits},
    prelude::*,
    valgrind,
};

/// The wasteful layers' request.
const PROOF: Workload = Workload::Call(Mode::Session, Load::Arguments(100));

fn main() -> Result<ExitCode> {
    let write = match role().as_str() {
        "" => false,
        "--write" => true,
        _ => bail!("usage: gate [--write]"),
    };
    let mut limits = Limits::read()?;
    let mut wanted = BTreeSet::new();
    for limit in &limits.limit {
        let cases = [limit.case, limit.case.bare()]
            .into_iter()
            .chain(proof(limit));
        wanted.extend(cases.map(|case| (case, limit.count)));
    }
    let counts = valgrind::counts(Allocator::Glibc, wanted)?;
    let mut failures = Vec::new();
    println!("| to bare | | measured | limit | target | |");
    println!("| --- | --- | --- | --- | --- | --- |");
    for limit in &mut limits.limit {
        let count = limit.count;
        let figure = |case: Case| counts[&(case, count)];
        let to_bare = |case: Case| count.to_bare(figure(case), figure(case.bare()));
        let measured = to_bare(limit.case);
        if write {
            limit.tighten(measured);
        }
        let (case, most) = (limit.case, limit.most);
        let target = limit.target.map(|target| format!("{target:.2}"));
        let target = target.unwrap_or_default();
        let verdict = if limit.allows(measured) { "ok" } else { "OVER" };
        println!("| {case} | {count} | {measured:.4} | {most:.3} | {target} | {verdict} |");
        if !limit.allows(measured) {
            failures.push(format!("{case}, {count}: {measured:.4}, at most {most:.3}"));
        }
        if let Some(wasteful) = proof(limit) {
            let measured = to_bare(wasteful);
            println!("| {wasteful} | {count} | {measured:.4} | {most:.3} | | must be over |");
            if limit.allows(measured) {
                failures.push(format!("the limit does not catch what wastes {count}; set it again with `benches/run gate --write`"));
            }
        }
    }
    if write {
        limits.write()?;
    }
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    Ok(ExitCode::from(u8::from(!failures.is_empty())))
}

/// Returns the case that must exceed `limit`, or `None` if there is none.
fn proof(limit: &Limit) -> Option<Case> {
    let candidate = match limit.count {
        _ if limit.case != Case::new(Candidate::Setup(Setup::Wrapped), PROOF) => return None,
        Count::Instructions => Candidate::Slowed,
        // The memory that calls retain may exceed the last-level cache anyway.
        Count::LastLevelMisses => return None,
        _ => Candidate::Sprawling,
    };
    Some(Case::new(candidate, PROOF))
}
