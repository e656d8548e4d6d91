//! The batches of one kind that are on their way to the directory.

use std::{future::pending, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    select,
    time::{Instant, sleep_until},
};

/// Writes that end with whether the directory took them. A failure pauses the lane.
pub(super) struct Lane<F> {
    max: usize,
    in_flight: FuturesUnordered<F>,
    /// After a failure, when the next one may begin.
    resumes_at: Option<Instant>,
    /// How long after a failure that is.
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

    /// Returns when there may be room again: a write has ended, or the pause after a failure. Never, if there is nothing of the kind.
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
