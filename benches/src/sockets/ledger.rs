//! Records what happens to each of a bench's calls, and when, as the server sees it.

use std::{
    ops::Range,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Result, ensure};
use mcp_cancel_on_disconnect::{Event, Outcome, RequestId};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// A bench's calls by number, which is also the JSON-RPC id.
#[derive(Debug, Clone)]
pub struct Ledger(Arc<Records>);

#[derive(Debug)]
struct Records {
    epoch: Instant,
    call_times: Vec<CallTimes>,
    releases: Vec<CancellationToken>,
    /// How many calls have been assigned.
    calls: AtomicUsize,
    /// How many groups have been assigned.
    groups: AtomicUsize,
}

/// Calls that act alike and whose handlers are released together.
#[derive(Debug, Clone)]
pub struct Group {
    pub number: usize,
    pub calls: Range<usize>,
}

/// When things happened to one call.
#[derive(Debug, Default)]
pub struct CallTimes {
    /// When the handler started.
    pub started: Stamp,
    /// When hyper dropped the response.
    pub dropped: Stamp,
    /// When the layer reported the cancellation, right after the token fired.
    pub cancelled: Stamp,
    /// When the handler saw its token.
    pub token: Stamp,
    /// When the handler ended, for any reason.
    pub ended: Stamp,
}

/// When an event happened, counted from the ledger's epoch. Empty until then.
pub type Stamp = OnceLock<Duration>;

/// Selects one of a call's stamps.
pub type SelectStamp = fn(&CallTimes) -> &Stamp;

// === impl Ledger ===

impl Ledger {
    /// Creates a ledger for up to `calls` calls in up to `groups` groups.
    pub fn new(calls: usize, groups: usize) -> Self {
        Self(Arc::new(Records {
            epoch: Instant::now(),
            call_times: (0..calls).map(|_| CallTimes::default()).collect(),
            releases: (0..groups).map(|_| CancellationToken::new()).collect(),
            calls: AtomicUsize::new(0),
            groups: AtomicUsize::new(0),
        }))
    }

    /// Assigns the next `count` calls to a new group.
    pub fn group(&self, count: usize) -> Group {
        let first = self.0.calls.fetch_add(count, Ordering::Relaxed);
        let number = self.0.groups.fetch_add(1, Ordering::Relaxed);
        let calls = first..first + count;
        Group { number, calls }
    }

    pub fn now(&self) -> Duration {
        self.0.epoch.elapsed()
    }

    pub fn times_of(&self, call: usize) -> &CallTimes {
        &self.0.call_times[call]
    }

    /// Returns the token that makes a group's handlers complete their work.
    pub fn release(&self, group: usize) -> &CancellationToken {
        &self.0.releases[group]
    }

    /// Records the current time, unless the stamp already has one.
    pub fn stamp(&self, stamp: &Stamp) {
        let _ = stamp.set(self.now());
    }

    /// Returns when each of the calls reached the event `which`, skipping those that have not.
    pub fn times(&self, calls: Range<usize>, which: SelectStamp) -> Vec<Duration> {
        let call_times = self.0.call_times[calls].iter();
        call_times
            .filter_map(|times_of| which(times_of).get())
            .copied()
            .collect()
    }

    /// Waits for up to `limit` until all calls have reached the event `which`. Returns how many have.
    pub async fn reaches(&self, calls: Range<usize>, which: SelectStamp, limit: Duration) -> usize {
        let end = Instant::now() + limit;
        loop {
            let reached = self.times(calls.clone(), which).len();
            if reached == calls.len() || Instant::now() >= end {
                return reached;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    /// Waits like [`reaches`](Self::reaches), but fails if a call has not reached the event.
    pub async fn expect_all(
        &self,
        calls: Range<usize>,
        which: SelectStamp,
        limit: Duration,
    ) -> Result<()> {
        let count = calls.len();
        let reached = self.reaches(calls, which, limit).await;
        ensure!(
            reached == count,
            "{reached} of {count} calls have reached the event"
        );
        Ok(())
    }

    /// Returns an observer that records when the layer cancels a call.
    pub fn observer(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let ledger = self.clone();
        move |event| {
            if let Event::Ended { call, outcome, .. } = event
                && let (RequestId::Number(id), Outcome::Cancelled(_)) = (call.request_id(), outcome)
                && let Some(times_of) = usize::try_from(*id)
                    .ok()
                    .and_then(|id| ledger.0.call_times.get(id))
            {
                ledger.stamp(&times_of.cancelled);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn waiting_ends_when_all_calls_are_there_or_at_the_limit() {
        let ledger = Ledger::new(3, 0);
        let wait =
            |calls| ledger.reaches(calls, |times_of| &times_of.token, Duration::from_secs(1));
        ledger.stamp(&ledger.times_of(1).token);
        assert_eq!(wait(1..2).await, 1);
        assert_eq!(ledger.now(), Duration::ZERO);
        assert_eq!(wait(0..2).await, 1);
        assert_eq!(ledger.now().as_secs(), 1);
    }
}
