//! Runs with the default allocator of Rust programs.

fn main() -> anyhow::Result<()> {
    benches::work::main()
}
