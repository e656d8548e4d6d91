//! Works with the allocator that Rust programs have if they do not say otherwise.

fn main() -> Result<(), mcp_cancel_on_disconnect_benches::Failure> {
    mcp_cancel_on_disconnect_benches::work::main()
}
