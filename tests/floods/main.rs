//! Floods: whatever comes, and however much of it, memory and descriptors stay within their bounds, and the call of
//! somebody else is untouched.
//!
//! A binary of its own: the allocator counts for the whole process, and so do descriptors. One test at a time.

#![allow(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::panic,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

use std::sync::{Mutex, PoisonError};

use peak_alloc::PeakAlloc;
use tokio::runtime::Builder;

mod calls;
mod connections;
mod ids;
mod server;
#[path = "../it/support/mod.rs"]
mod support;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

const KIB: usize = 1024;
const MIB: usize = 1024 * KIB;

/// Runs a test when those before it have ended and all that they had is freed, their runtime too.
fn alone(test: impl AsyncFnOnce()) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test());
}

/// How many bytes are allocated that were not when this was made.
struct Growth(usize);

impl Growth {
    fn since_now() -> Self {
        Self(MEMORY.current_usage())
    }

    fn bytes(&self) -> usize {
        MEMORY.current_usage().saturating_sub(self.0)
    }

    /// What is said of it with `--nocapture`.
    fn assert_below(&self, limit: usize, what: &str) {
        let bytes = self.bytes();
        println!("{what}: {} KiB, at most {} KiB", bytes / KIB, limit / KIB);
        assert!(bytes < limit, "{what}: {bytes} bytes, not below {limit}");
    }
}
