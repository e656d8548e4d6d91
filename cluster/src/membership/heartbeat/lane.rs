//! A lane: a limited number of concurrent directory writes.

use std::{future::pending, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    select,
    time::{Instant, sleep_until},
};

/// Runs writes concurrently, pausing after any that the directory does not accept.
pub(super) struct Lane<F> {
    max: usize,
    in_flight: FuturesUnordered<F>,
    /// When the next write may start after a failure.
    resumes_at: Option<Instant>,
    /// How long the lane pauses after a failure.
    pause: Duration,
}

// === impl Lane ===

impl<F: Future<Output = bool>> Lane<F> {
    pub(super) fn new(max: usize, pause: Duration) -> Self {
        Self {
            max,
            in_flight: FuturesUnordered::new(),
            resumes_at: None,
            pause,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        let is_paused = self.resumes_at.is_some_and(|at| Instant::now() < at);
        self.in_flight.len() < self.max && !is_paused
    }

    pub(super) fn push(&self, write: F) {
        self.in_flight.push(write);
    }

    /// Waits until there may be room again, because a write or the pause has ended.
    ///
    /// Never completes if no write is in flight and the lane is not paused.
    pub(super) async fn next_change(&mut self) {
        let now = Instant::now();
        let resumes_at = self.resumes_at.filter(|at| now < *at);
        select! {
            Some(is_done) = self.in_flight.next() => if !is_done {
                self.resumes_at = Some(Instant::now() + self.pause);
            },
            () = sleep_until(resumes_at.unwrap_or(now)), if resumes_at.is_some() => {}
            else => pending().await,
        }
    }
}
