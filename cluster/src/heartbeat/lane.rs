//! The batches of one kind that are on their way to the directory.

use std::{future::pending, time::Duration};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::{
    select,
    time::{Instant, sleep_until},
};

/// Writes that end with whether the directory took them. A failure pauses the lane.
pub(super) struct Lane<F> {
    most: usize,
    under_way: FuturesUnordered<F>,
    /// After a failure, when the next one may begin.
    resumed: Option<Instant>,
    /// How long after a failure that is.
    pause: Duration,
}

// === impl Lane ===

impl<F: Future<Output = bool>> Lane<F> {
    pub(super) fn new(most: usize, pause: Duration) -> Self {
        Self {
            most,
            under_way: FuturesUnordered::new(),
            resumed: None,
            pause,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        let is_paused = self.resumed.is_some_and(|at| Instant::now() < at);
        self.under_way.len() < self.most && !is_paused
    }

    pub(super) fn push(&self, write: F) {
        self.under_way.push(write);
    }

    /// Returns when there may be room again: a write has ended, or the pause after a failure. Never, if there is nothing of the kind.
    pub(super) async fn next_change(&mut self) {
        let now = Instant::now();
        let resumed = self.resumed.filter(|at| now < *at);
        select! {
            Some(is_done) = self.under_way.next() => if !is_done {
                self.resumed = Some(Instant::now() + self.pause);
            },
            () = sleep_until(resumed.unwrap_or(now)), if resumed.is_some() => {}
            else => pending().await,
        }
    }
}
