//! Asks for a case and prints how many allocations that took each time, and of how many bytes.

use mcp_cancel_on_disconnect_benches::{Failure, work::Work};

fn main() -> Result<(), Failure> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let mut work = Work::warm(words.join(" ").parse()?)?;
    let mut gone = Ok(());
    let info = allocation_counter::measure(|| gone = work.go());
    gone?;
    let each = |total: u64| total as f64 / f64::from(work.repetitions());
    println!("{} {}", each(info.count_total), each(info.bytes_total));
    Ok(())
}
