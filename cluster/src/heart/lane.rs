//! How many batches of one kind may be on their way to the directory.

use std::{future::pending, time::Duration};

use tokio::time::{Instant, sleep_until};

/// What is written to the directory.
#[derive(Debug, Clone, Copy)]
pub(super) enum Kind {
    Entries,
    Deletions,
}

/// The batches of one kind that are on their way to the directory.
pub(super) struct Lane {
    most: usize,
    pub(super) under_way: usize,
    /// After a failure, when the next one may begin.
    resumed: Option<Instant>,
    /// How long after a failure that is.
    pause: Duration,
}

// === impl Lane ===

impl Lane {
    pub(super) fn new(most: usize, pause: Duration) -> Self {
        Self {
            most,
            under_way: 0,
            resumed: None,
            pause,
        }
    }

    pub(super) fn has_room(&self) -> bool {
        let is_paused = self.resumed.is_some_and(|at| Instant::now() < at);
        self.under_way < self.most && !is_paused
    }

    pub(super) fn ended(&mut self, is_done: bool) {
        self.under_way -= 1;
        if !is_done {
            self.resumed = Some(Instant::now() + self.pause);
        }
    }

    /// Returns when the next one may begin after a failure. Never, if that is already so.
    pub(super) async fn resumes(&self) {
        match self.resumed.filter(|at| Instant::now() < *at) {
            Some(at) => sleep_until(at).await,
            None => pending().await,
        }
    }
}
