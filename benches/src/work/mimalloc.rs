//! Works with mimalloc.

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> Result<(), mcp_cancel_on_disconnect_benches::Failure> {
    mcp_cancel_on_disconnect_benches::work::main()
}
