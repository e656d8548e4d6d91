//! Fails if a call costs more instructions than `gate.toml` allows. Counts only, no time.
//!
//! Each run also proves that it can fail: a layer that wastes 3 % must be over the limit. If it is not, the limits have
//! become too loose, because calls cost less than they did; `gate --write` sets them anew.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::ExitCode,
    thread::available_parallelism,
};

use benches::{gate::Limits, prelude::*, valgrind::instructions};
use futures_util::{StreamExt, TryStreamExt, stream};
use tokio::task::spawn_blocking;

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
    let mut cases = BTreeSet::from([slowed, slowed.bare()]);
    for limit in &limits.limit {
        let case = Case::named(&limit.case)?;
        cases.extend([case, case.bare()]);
    }
    let counts = runtime()?.block_on(count(cases))?;
    let ratio = |case: Case| counts[&case] / counts[&case.bare()];
    let mut failures = Vec::new();
    println!("| instructions to bare | measured | limit | target | |");
    println!("| --- | --- | --- | --- | --- |");
    for limit in &mut limits.limit {
        let ratio = ratio(Case::named(&limit.case)?);
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
    Ok(ExitCode::from(u8::from(!failures.is_empty())))
}

/// Counts as many at a time as there are processors: a count does not mind what else runs.
async fn count(cases: BTreeSet<Case>) -> Result<Counts> {
    let count = |case: Case| {
        let count = move || instructions(Allocator::Glibc, &format!("calls {case}"));
        let counting = spawn_blocking(count);
        async move { anyhow::Ok((case, counting.await?? as f64)) }
    };
    let processors = available_parallelism().map_or(1, usize::from);
    let counting = stream::iter(cases).map(count).buffer_unordered(processors);
    counting.try_collect().await
}
