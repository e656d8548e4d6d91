//! A clock that only moves when a test moves it, while sockets work in real time.
//!
//! Tokio's paused clock is not enough, because it jumps to the next timer whenever all tasks are waiting, even if one
//! of them is waiting for a socket. A task that is always busy prevents that.

use std::time::Duration;

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

use crate::support::limit::LIMIT;

/// The delay after which the layer rechecks a deadline that fired late, plus the rounding.
const RECHECK_DELAY: Duration = Duration::from_millis(101);

/// How late a recheck can be and still count as on time.
const STEP: Duration = Duration::from_millis(20);

/// Stops the current runtime's clock until it is dropped.
#[derive(Debug)]
pub(crate) struct StoppedClock(JoinHandle<()>);

// === impl StoppedClock ===

impl StoppedClock {
    /// Stops the clock. This needs a single-threaded runtime.
    #[allow(clippy::disallowed_methods, reason = "the test needs its own task")]
    pub(crate) fn stop() -> Self {
        tokio::time::pause();
        Self(tokio::spawn(stay_busy()))
    }

    /// Advances the clock in small steps, so that every deadline fires on time.
    ///
    /// The layer postpones a deadline that fires late, so a test that jumped past a wrong deadline could not detect it.
    pub(crate) async fn advance(&self, duration: Duration) {
        let mut left = duration;
        while !left.is_zero() {
            let step = left.min(STEP);
            tokio::time::advance(step).await;
            tokio::task::yield_now().await;
            left -= step;
        }
    }

    /// Advances the clock in a single step, so that any deadlines in between fire late.
    pub(crate) async fn jump(&self, duration: Duration) {
        tokio::time::advance(duration).await;
    }

    /// Advances the clock past any deadlines, and then on to their recheck.
    ///
    /// The recheck is needed for deadlines that fire less than a second late.
    pub(crate) async fn advance_past(&self, duration: Duration) {
        advance_past(duration).await;
    }
}

impl Drop for StoppedClock {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Returns a single-threaded runtime whose clock jumps to the next deadline.
pub(crate) fn paused_runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    builder.build().expect("a runtime")
}

/// Like [`StoppedClock::advance_past`], for a clock that has been paused in another way.
pub(crate) async fn advance_past(duration: Duration) {
    for step in [duration, RECHECK_DELAY] {
        tokio::time::advance(step).await;
        // Without these polls the check would only run after the next step, and so be late.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }
}

/// Returns once no wait can succeed any more.
///
/// That lets the clock jump, so that the wait fails with its own message.
#[allow(
    clippy::disallowed_types,
    reason = "the limit must not follow the stopped clock"
)]
async fn stay_busy() {
    let started = std::time::Instant::now();
    while started.elapsed() < LIMIT {
        tokio::task::yield_now().await;
    }
}
