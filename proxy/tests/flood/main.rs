//! Floods: memory stays within its bounds, however much data is not read.
//!
//! The allocator counts for the whole process, so this is a process of its own. One test at a time.
#![cfg(unix)]
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a broken expectation ends the test; clippy only spares functions marked #[test]"
)]

use std::sync::{Mutex, PoisonError};

use peak_alloc::PeakAlloc;
use tokio::runtime::Builder;

mod event_store;
mod program;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Runs a test alone, once all memory of the previous one is freed.
///
/// The memory of its runtime counts as well.
fn run_alone(test: impl AsyncFnOnce()) {
    static LOCK: Mutex<()> = Mutex::new(());
    let _locked = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test());
}
