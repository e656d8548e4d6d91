//! A clock that moves only when a test moves it, while sockets go on.
//!
//! Tokio's paused clock is not enough: it jumps to the next timer whenever all tasks wait, be it for a
//! socket. A task that is always busy prevents that.

use std::time::Duration;

use tokio::task::JoinHandle;

use crate::support::limit::LIMIT;

/// After this, and what tokio rounds up, the layer looks again at a deadline that it noticed late.
const GLANCE: Duration = Duration::from_millis(101);

/// As late as such a second look may come.
const STEP: Duration = Duration::from_millis(20);

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

    /// Moves the clock on, so slowly that whatever is due is noticed in time: a deadline that is noticed late is put
    /// off, and a test that jumps past one could not see that it was wrong.
    pub(crate) async fn advance(&self, duration: Duration) {
        let mut left = duration;
        while !left.is_zero() {
            let step = left.min(STEP);
            tokio::time::advance(step).await;
            tokio::task::yield_now().await;
            left -= step;
        }
    }

    /// Moves the clock as if nobody had looked at it meanwhile.
    pub(crate) async fn jump(&self, duration: Duration) {
        tokio::time::advance(duration).await;
    }

    /// Moves the clock on so that deadlines pass, and in time for the second look at those that were noticed late
    /// by less than a second.
    pub(crate) async fn advance_past(&self, duration: Duration) {
        advance_past(duration).await;
    }
}

impl Drop for StoppedClock {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// The same, where the clock is paused otherwise.
pub(crate) async fn advance_past(duration: Duration) {
    for step in [duration, GLANCE] {
        tokio::time::advance(step).await;
        // Else the look comes after the next step, and is late.
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
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
