//! Works with the allocator that Rust programs have if they do not say otherwise.

fn main() -> anyhow::Result<()> {
    benches::work::main()
}
