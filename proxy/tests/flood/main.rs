//! Floods: memory stays within its bounds, no matter how much data is left unread.
//!
//! The allocator counts for the whole process, so this is a process of its own, which runs one test at a time.
#![cfg(unix)]
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a failed expectation ends the test; clippy only spares functions marked #[test]"
)]

use std::sync::{Mutex, PoisonError};

use peak_alloc::PeakAlloc;
use tokio::runtime::Builder;

mod event_store;
mod program;

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Runs a test on its own, once all of the previous one's memory has been freed.
///
/// The memory used by its runtime counts as well.
fn run_alone(test: impl AsyncFnOnce()) {
    static LOCK: Mutex<()> = Mutex::new(());
    let _locked = LOCK.lock().unwrap_or_else(PoisonError::into_inner);
    let runtime = Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(test());
}
