//! Fails if a call costs more instructions than `gate.toml` allows. Counts only, no time.
//!
//! Each run also proves that it can fail: a layer that wastes 3 % must be over the limit. If it is not, the limits have
//! become too loose, because calls cost less than they did; `gate --write` sets them anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    process::ExitCode,
    sync::{Mutex, PoisonError},
    thread,
};

use mcp_cancel_on_disconnect_benches::{
    Failure,
    callgrind::{Allocator, instructions},
    case::{Case, Load, What, Who},
    gate::Limits,
    setup::{Mode, Setup},
};

/// What the gate proves itself with.
const PROOF: What = What::Call(Mode::Session, Load::Arguments(100));

/// The counts, by case.
struct Counter(BTreeMap<String, f64>);

fn main() -> Result<ExitCode, Failure> {
    let write = match env::args().nth(1).as_deref() {
        None => false,
        Some("--write") => true,
        Some(_) => return Err("usage: gate [--write]".into()),
    };
    let mut limits = Limits::read()?;
    let counter = Counter::of(&cases(&limits)?)?;
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
    failures.extend(prove(&counter, &limits)?);
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
fn prove(counter: &Counter, limits: &Limits) -> Result<Option<String>, Failure> {
    let guarded = Case::new(Who::Setup(Setup::Wrapped), PROOF).to_string();
    let limit = limits.limit.iter().find(|limit| limit.case == guarded);
    let limit = limit.ok_or_else(|| format!("no limit for {guarded}"))?;
    let slowed = Case::new(Who::Slowed, PROOF);
    let ratio = counter.ratio(slowed)?;
    println!(
        "| {slowed} | {ratio:.4} | {:.3} | | must be over |",
        limit.most
    );
    let loose =
        "the limits let through what is 3 % slower; set them anew with `benches/run gate --write`";
    Ok(limit.allows(ratio).then(|| loose.to_owned()))
}

/// All that is to be counted.
fn cases(limits: &Limits) -> Result<BTreeSet<String>, Failure> {
    let mut cases = vec![Case::new(Who::Slowed, PROOF)];
    for limit in &limits.limit {
        cases.push(limit.case.parse()?);
    }
    let with_bare = cases.into_iter().flat_map(|case| [case, case.bare()]);
    Ok(with_bare.map(|case| case.to_string()).collect())
}

// === impl Counter ===

impl Counter {
    /// Counts as many at a time as there are processors: a count does not mind what else runs.
    fn of(cases: &BTreeSet<String>) -> Result<Self, Failure> {
        let queue = Mutex::new(cases.iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || -> Result<Vec<(String, f64)>, Failure> {
            let mut counted = Vec::new();
            while let Some(case) = next() {
                let total = instructions(Allocator::Glibc, &format!("calls {case}"))?;
                counted.push((case.clone(), total as f64));
            }
            Ok(counted)
        };
        let processors = thread::available_parallelism().map_or(1, usize::from);
        let counted: Vec<_> = thread::scope(|scope| {
            let workers: Vec<_> = (0..processors).map(|_| scope.spawn(work)).collect();
            let joined = workers.into_iter().map(|worker| worker.join());
            joined.collect()
        });
        let mut all = BTreeMap::new();
        for counted in counted {
            all.extend(counted.map_err(|_| "a count panicked")??);
        }
        Ok(Self(all))
    }

    fn ratio(&self, case: Case) -> Result<f64, Failure> {
        Ok(self.count(case)? / self.count(case.bare())?)
    }

    fn count(&self, case: Case) -> Result<f64, Failure> {
        let count = self.0.get(&case.to_string());
        Ok(*count.ok_or_else(|| format!("{case} was not counted"))?)
    }
}
