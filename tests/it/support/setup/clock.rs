//! A clock that moves only when a test moves it, while sockets go on.
//!
//! Tokio's paused clock is not enough: it jumps to the next timer whenever all tasks wait, be it for a
//! socket. A task that is always busy prevents that.

use std::time::Duration;

use tokio::task::JoinHandle;

use crate::support::limit::LIMIT;

/// Stops the clock of the current runtime as long as it lives.
#[derive(Debug)]
pub(crate) struct StoppedClock(JoinHandle<()>);

// === impl StoppedClock ===

impl StoppedClock {
    /// Stops the clock. Needs a runtime of one thread.
    #[allow(clippy::disallowed_methods, reason = "a task of the test's own")]
    pub(crate) fn stop() -> Self {
        tokio::time::pause();
        Self(tokio::spawn(stay_busy()))
    }

    /// Moves the clock on.
    pub(crate) async fn advance(&self, duration: Duration) {
        tokio::time::advance(duration).await;
    }
}

impl Drop for StoppedClock {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Ends when no wait can succeed any more: then the clock jumps, and the wait fails with its reason.
#[allow(
    clippy::disallowed_types,
    reason = "the limit must not follow the stopped clock"
)]
async fn stay_busy() {
    let begun = std::time::Instant::now();
    while begun.elapsed() < LIMIT {
        tokio::task::yield_now().await;
    }
}
