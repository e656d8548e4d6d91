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

/// Runs a test alone: all memory of the previous one, that of its runtime included, is freed before.
fn alone(test: impl AsyncFnOnce()) {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test());
}
