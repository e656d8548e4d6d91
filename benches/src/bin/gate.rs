//! Fails if a call costs more instructions than `gate.toml` allows. Counts only, no time.
//!
//! Each run also proves that it can fail: a layer that wastes 3 % must be over the limit. If it is not, the limits have
//! become too loose, because calls cost less than they did; `gate --write` sets them anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    sync::{Mutex, PoisonError},
    thread,
};

use benches::{
    case::{Case, Load, What, Who},
    gate::Limits,
    prelude::*,
    valgrind::{Allocator, instructions},
};

/// What the gate proves itself with.
const PROOF: What = What::Call(Mode::Session, Load::Arguments(100));

/// Instructions.
type Counts = BTreeMap<Case, f64>;

fn main() -> Result<ExitCode> {
    let write = match role().as_str() {
        "" => false,
        "--write" => true,
        _ => bail!("usage: gate [--write]"),
    };
    let mut limits = Limits::read()?;
    let slowed = Case::new(Who::Slowed, PROOF);
    let mut cases = vec![slowed];
    for limit in &limits.limit {
        cases.push(limit.case.parse()?);
    }
    let counts = count(cases.iter().flat_map(|case| [*case, case.bare()]))?;
    let ratio = |case: Case| counts[&case] / counts[&case.bare()];
    let mut failures = Vec::new();
    println!("| instructions to bare | measured | limit | target | |");
    println!("| --- | --- | --- | --- | --- |");
    for limit in &mut limits.limit {
        let ratio = ratio(limit.case.parse()?);
        if write {
            limit.tighten(ratio);
        }
        let (case, most) = (&limit.case, limit.most);
        let target = limit.target.map(|target| format!("{target:.2}"));
        let target = target.unwrap_or_default();
        let verdict = if limit.allows(ratio) { "ok" } else { "OVER" };
        println!("| {case} | {ratio:.4} | {most:.3} | {target} | {verdict} |");
        if !limit.allows(ratio) {
            failures.push(format!("{case}: {ratio:.4}, at most {most:.3}"));
        }
    }
    let guarded = limits.of(Case::new(Who::Setup(Setup::Wrapped), PROOF))?;
    let (ratio, most) = (ratio(slowed), guarded.most);
    println!("| {slowed} | {ratio:.4} | {most:.3} | | must be over |");
    if guarded.allows(ratio) {
        failures.push("the limits let through what is 3 % slower; set them anew with `benches/run gate --write`".to_owned());
    }
    if write {
        limits.write()?;
    }
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    Ok(match failures.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    })
}

/// Counts as many at a time as there are processors: a count does not mind what else runs.
fn count(cases: impl Iterator<Item = Case>) -> Result<Counts> {
    let left = Mutex::new(cases.collect::<BTreeSet<_>>());
    let next = || {
        left.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .pop_first()
    };
    let work = || -> Result<Counts> {
        let mut counts = Counts::new();
        while let Some(case) = next() {
            let count = instructions(Allocator::Glibc, &format!("calls {case}"))?;
            counts.insert(case, count as f64);
        }
        Ok(counts)
    };
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let mut all = Counts::new();
    thread::scope(|scope| {
        let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
        for worker in workers {
            all.append(&mut worker.join().ok().context("a count panicked")??);
        }
        Ok(all)
    })
}
