//! Floods of input. Memory and descriptors must stay within bounds, and another client's call must not be affected.
//!
//! This is a separate binary, because allocations and descriptors are counted per process. Tests run one at a time.

#![allow(
    clippy::restriction,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

use std::sync::{Arc, Mutex, PoisonError};

use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use peak_alloc::PeakAlloc;
use rmcp::transport::streamable_http_server::session::local::SessionConfig;
use test_support::{Mcp, Mode, PATH, Served, Tools, Witness, router, serve};
use tokio::runtime::Builder;

mod calls;
mod connections;
mod ids;
mod leftovers;
mod server;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Runs a test alone, after all memory of previous tests, including their runtime, has been freed.
fn run_alone(test: impl AsyncFnOnce()) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test());
}

/// A server on a real socket with the layer and its session manager, and one session.
async fn wrapped(layer: CancelOnDisconnectLayer) -> (Witness, Served, Mcp) {
    let witness = Witness::new();
    let sessions = CancellableSessionManager::local(SessionConfig::default());
    let service = Tools::new(&witness).service(Mode::Session, Arc::new(sessions));
    let served = serve(router(service).layer(layer)).await;
    let mcp = Mcp::session(served.addr, PATH).await;
    (witness, served, mcp)
}

/// How many bytes were allocated when this was created.
struct Growth(usize);

impl Growth {
    fn since_now() -> Self {
        Self(MEMORY.current_usage())
    }

    fn bytes(&self) -> usize {
        MEMORY.current_usage().saturating_sub(self.0)
    }

    /// Prints the growth, which `--nocapture` shows, and asserts that it is below the limit.
    fn assert_below(&self, limit: usize, what: &str) {
        let bytes = self.bytes();
        println!("{what}: {} KiB, at most {} KiB", bytes / KIB, limit / KIB);
        assert!(bytes < limit, "{what}: {bytes} bytes, not below {limit}");
    }
}
