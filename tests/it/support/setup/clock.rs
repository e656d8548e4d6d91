//! A clock that moves only when a test moves it, while sockets work in real time.
//!
//! Tokio's paused clock is not enough, because it jumps to the next timer whenever all tasks wait, even for a socket. A
//! task that is always busy prevents that.

use std::time::Duration;

use tokio::{
    runtime::{Builder, Runtime},
    task::JoinHandle,
};

use crate::support::limit::LIMIT;

/// Delay after which the layer rechecks a deadline that ran late, plus tokio's rounding.
const RECHECK_DELAY: Duration = Duration::from_millis(101);

/// Maximum lateness at which a recheck counts as on time.
const STEP: Duration = Duration::from_millis(20);

/// Stops the clock of the current runtime until it is dropped.
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

    /// Advances the clock in small steps, so that every deadline runs on time.
    ///
    /// A deadline that runs late is postponed. So a test that jumps past a wrong deadline could not detect it.
    pub(crate) async fn advance(&self, duration: Duration) {
        let mut left = duration;
        while !left.is_zero() {
            let step = left.min(STEP);
            tokio::time::advance(step).await;
            tokio::task::yield_now().await;
            left -= step;
        }
    }

    /// Advances the clock in one step. Deadlines in between run late.
    pub(crate) async fn jump(&self, duration: Duration) {
        tokio::time::advance(duration).await;
    }

    /// Advances the clock past deadlines, and then to their recheck.
    ///
    /// A deadline that runs late by less than a second is rechecked.
    pub(crate) async fn advance_past(&self, duration: Duration) {
        advance_past(duration).await;
    }
}

impl Drop for StoppedClock {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Returns a runtime of one thread whose clock jumps to the next deadline.
pub(crate) fn paused_runtime() -> Runtime {
    let mut builder = Builder::new_current_thread();
    builder.enable_all().start_paused(true);
    builder.build().expect("a runtime")
}

/// Does what [`StoppedClock::advance_past`] does, for a clock that is paused in another way.
pub(crate) async fn advance_past(duration: Duration) {
    for step in [duration, RECHECK_DELAY] {
        tokio::time::advance(step).await;
        // Without these polls the check would run after the next step, and late.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }
}

/// Returns when no wait can succeed any more. Then the clock jumps, and the wait fails with its reason.
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
