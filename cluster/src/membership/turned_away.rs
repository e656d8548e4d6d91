//! Tracks when this instance last turned a client away.
//!
//! A client counts as turned away if its session's request gets 503 from the cluster's layer. So does a client whose resume of a local call
//! gets 408, 429 or 5xx from any layer. A client also counts while it is waiting for an unresponsive owner or inner service, and afterwards
//! if it was not served. A stall of this process, a suspended machine, or a forward step of the directory's clock counts as well, because
//! clients may have waited.
//!
//! Each heartbeat reports how long ago a client was last turned away ([`Status`](crate::directory::Status)). A turned-away client brings
//! the next heartbeat forward, so even an instance that dies soon afterwards will usually have reported the client. The directory has the
//! latest time that any instance reported, including instances that no longer run. For a while after that time, owners do not cancel any
//! orphan, because the call may be that client's. The report does not identify a session, so one time covers all clients and is sent with
//! the heartbeat.

use std::{
    pin::pin,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout},
};

use crate::{directory::DIRECTORY_TIMEOUT, lock::lock};

/// Default time within which a turned-away client may return: 40 s.
///
/// Chosen because the client is asked to retry after 1 s, and SDKs with their own delays wait at most 30 s.
pub(crate) const CLIENT_BACKOFF: Duration = Duration::from_secs(40);

/// Time after which a client that has not been served counts as turned away: 250 ms.
///
/// Applies to relayed requests other than POST, and to reading the body of such a request before a restore. Also applies to resumes
/// that wait for the inner service or its response. The call's grace may expire in the meantime.
const SLOW_THRESHOLD: Duration = Duration::from_millis(250);

/// Maximum time until an unserved client counts as turned away: 750 ms.
///
/// This is the timeout of one lookup plus [`SLOW_THRESHOLD`].
pub(crate) const MAX_RECORD_DELAY: Duration = DIRECTORY_TIMEOUT.saturating_add(SLOW_THRESHOLD);

/// Tracks when a client was last turned away.
#[derive(Debug)]
pub(crate) struct TurnedAway {
    /// Time within which a turned-away client may return.
    pub(crate) backoff: Duration,
    state: Mutex<State>,
    /// Wakes the task that sends heartbeats.
    unreported: Notify,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    /// Number of waiting clients.
    waiting: usize,
}

/// Counts a client as waiting until dropped.
///
/// The client is then recorded as turned away unless [marked as served](Self::mark_served).
#[derive(Debug)]
pub(crate) struct Waiting {
    turned_away: Arc<TurnedAway>,
    is_served: bool,
}

// === impl TurnedAway ===

impl TurnedAway {
    pub(crate) fn new(backoff: Duration) -> Self {
        Self {
            backoff,
            state: Mutex::default(),
            unreported: Notify::new(),
        }
    }

    /// Waits for a client to be turned away or to start waiting.
    ///
    /// Returns at once if that has happened since this last returned.
    pub(crate) async fn until_unreported(&self) {
        self.unreported.notified().await;
    }

    /// Records that a client was, or may have been, turned away.
    pub(crate) fn record(&self) {
        self.state().last = Some(Instant::now());
        self.unreported.notify_one();
    }

    /// Records that a client is waiting for an owner or an inner service that may not answer.
    pub(crate) fn begin_wait(self: &Arc<Self>) -> Waiting {
        self.state().waiting += 1;
        self.unreported.notify_one();
        Waiting {
            turned_away: self.clone(),
            is_served: false,
        }
    }

    /// Awaits `serving`, and counts the client as waiting after [`SLOW_THRESHOLD`].
    ///
    /// After that time, the client is recorded as turned away if `serving` fails or is dropped.
    pub(crate) async fn record_if_slow<T, E>(
        self: &Arc<Self>,
        serving: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let mut serving = pin!(serving);
        if let Ok(result) = timeout(SLOW_THRESHOLD, &mut serving).await {
            return result;
        }
        let waiting = self.begin_wait();
        let result = serving.await;
        if result.is_ok() {
            waiting.mark_served();
        }
        result
    }

    /// Returns how long ago a client was last turned away.
    ///
    /// Returns zero while one is waiting, or `None` if none ever was turned away.
    pub(crate) fn age(&self, now: Instant) -> Option<Duration> {
        let state = self.state();
        let since = if state.waiting > 0 {
            Some(now)
        } else {
            state.last
        };
        since.map(|since| now.saturating_duration_since(since))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

// === impl Waiting ===

impl Waiting {
    /// Records that the client was served.
    pub(crate) fn mark_served(mut self) {
        self.is_served = true;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.turned_away.state();
        state.waiting -= 1;
        if !self.is_served {
            state.last = Some(Instant::now());
            self.turned_away.unreported.notify_one();
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_age_counts_from_the_last_client_that_was_turned_away_or_waited() {
        let turned_away = Arc::new(TurnedAway::new(CLIENT_BACKOFF));
        let age = || turned_away.age(Instant::now());
        assert_eq!(age(), None);
        turned_away.record();
        advance(Duration::from_secs(3)).await;
        assert_eq!(age(), Some(Duration::from_secs(3)));
        let waiting = [(); 2].map(|()| turned_away.begin_wait());
        advance(Duration::from_secs(1)).await;
        assert_eq!(age(), Some(Duration::ZERO));
        let [served, unserved] = waiting;
        drop(unserved);
        advance(Duration::from_secs(2)).await;
        served.mark_served();
        assert_eq!(age(), Some(Duration::from_secs(2)));
    }
}
