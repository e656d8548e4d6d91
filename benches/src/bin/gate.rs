//! Fails if a call costs more instructions than `gate.toml` allows. Counts only, no time.
//!
//! Each run also proves that it can fail: a layer that wastes 3 % must be over the limit. If it is not, the limits have
//! become too loose, because calls cost less than they did; `gate --write` sets them anew.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    env,
    process::ExitCode,
};

use mcp_cancel_on_disconnect_benches::{
    Failure,
    callgrind::{Allocator, instructions},
    case::{Case, Load, What, Who},
    gate::Limits,
    setup::{Mode, Setup},
};

/// Counts each case once.
#[derive(Default)]
struct Counter(BTreeMap<String, f64>);

fn main() -> Result<ExitCode, Failure> {
    let write = match env::args().nth(1).as_deref() {
        None => false,
        Some("--write") => true,
        Some(_) => return Err("usage: gate [--write]".into()),
    };
    let mut limits = Limits::read()?;
    let mut counter = Counter::default();
    let mut failures = Vec::new();
    println!("| instructions to bare | measured | limit | target | |");
    println!("| --- | --- | --- | --- | --- |");
    for limit in &mut limits.limit {
        let ratio = counter.ratio(limit.case.parse()?)?;
        if write {
            limit.tighten(ratio);
        }
        let target = limit
            .target
            .map_or(String::new(), |target| format!("{target:.2}"));
        let verdict = if limit.allows(ratio) { "ok" } else { "OVER" };
        println!(
            "| {} | {ratio:.4} | {:.3} | {target} | {verdict} |",
            limit.case, limit.most
        );
        if !limit.allows(ratio) {
            failures.push(format!(
                "{}: {ratio:.4}, at most {:.3}",
                limit.case, limit.most
            ));
        }
    }
    failures.extend(prove(&mut counter, &limits)?);
    if write {
        limits.write()?;
    }
    for failure in &failures {
        println!("FAILED: {failure}");
    }
    Ok(if failures.is_empty() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

/// Says what is wrong if the gate would let a slower call through.
fn prove(counter: &mut Counter, limits: &Limits) -> Result<Option<String>, Failure> {
    let what = What::Call(Mode::Session, Load::Arguments(100));
    let guarded = Case::new(Who::Setup(Setup::Wrapped), what).to_string();
    let limit = limits.limit.iter().find(|limit| limit.case == guarded);
    let limit = limit.ok_or_else(|| format!("no limit for {guarded}"))?;
    let slowed = Case::new(Who::Slowed, what);
    let ratio = counter.ratio(slowed)?;
    println!(
        "| {slowed} | {ratio:.4} | {:.3} | | must be over |",
        limit.most
    );
    let loose =
        "the limits let through what is 3 % slower; set them anew with `benches/run gate --write`";
    Ok(limit.allows(ratio).then(|| loose.to_owned()))
}

// === impl Counter ===

impl Counter {
    fn ratio(&mut self, case: Case) -> Result<f64, Failure> {
        Ok(self.count(case)? / self.count(case.bare())?)
    }

    fn count(&mut self, case: Case) -> Result<f64, Failure> {
        match self.0.entry(case.to_string()) {
            Entry::Occupied(counted) => Ok(*counted.get()),
            Entry::Vacant(vacant) => {
                let total = instructions(Allocator::Glibc, &format!("calls {case}"))?;
                Ok(*vacant.insert(total as f64))
            }
        }
    }
}
