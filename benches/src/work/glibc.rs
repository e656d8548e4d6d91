//! Runs with the allocator that Rust programs use by default.

fn main() -> anyhow::Result<()> {
    benches::work::main()
}
