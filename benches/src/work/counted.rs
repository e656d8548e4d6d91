//! Runs a case and prints how many allocations, and how many bytes, each request takes.

use benches::{case::Case, role, work::Work};

fn main() -> anyhow::Result<()> {
    let case = Case::named(&role())?;
    let (_, repetitions) = case.what.repetitions();
    let mut work = Work::warm(case)?;
    let mut result = Ok(());
    let info = allocation_counter::measure(|| result = work.run(repetitions));
    result?;
    let each = |total: u64| total as f64 / f64::from(repetitions);
    println!("{} {}", each(info.count_total), each(info.bytes_total));
    Ok(())
}
