//! Tracks when a client was last turned away, so that its call is not cancelled too early.
//!
//! A turned-away client is expected to reconnect, and a call that looks orphaned to its owner may belong to that client. Each heartbeat
//! therefore reports how long ago a client was last turned away ([`Status`](crate::directory::Status)), and the directory stores the latest
//! time reported by any instance, including those no longer running. For a while after that time, owners do not cancel any orphans. The
//! report does not identify a session, so a single time covers all clients and fits in the heartbeat. Turning a client away brings the next
//! heartbeat forward, so even an instance that dies soon afterwards has usually reported it.
//!
//! A client counts as turned away in any of these cases:
//!
//! - The cluster's layer responds with 503 to a request belonging to a session.
//! - Any layer responds with 408, 429 or 5xx to a request that resumes a local call.
//! - The client is waiting for an owner or an inner service that does not respond, or has stopped waiting without being served.
//! - This process stalls, the machine is suspended, or the directory's clock steps forward, because clients may have been waiting in the
//!   meantime.

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

/// How long a turned-away client may take to reconnect, by default.
///
/// Clients are asked to retry after 1 s, and SDKs with their own delays wait at most 30 s.
pub(crate) const CLIENT_BACKOFF: Duration = Duration::from_secs(40);

/// How long a client may go unserved before it counts as turned away.
///
/// This applies while:
///
/// - a request other than POST is being relayed
/// - the body of a request other than POST is being read before a restore
/// - a request that resumes a call is waiting for the inner service or its response
///
/// In each of these cases, a call's grace period may expire while its client is waiting.
const SLOW_THRESHOLD: Duration = Duration::from_millis(250);

/// Maximum time before an unserved client counts as turned away.
///
/// This is the timeout of one lookup plus [`SLOW_THRESHOLD`].
pub(crate) const MAX_RECORD_DELAY: Duration = DIRECTORY_TIMEOUT.saturating_add(SLOW_THRESHOLD);

/// Tracks when a client was last turned away.
#[derive(Debug)]
pub(crate) struct TurnedAway {
    /// How long a turned-away client may take to reconnect.
    pub(crate) backoff: Duration,
    state: Mutex<State>,
    /// Wakes the task that sends heartbeats.
    unreported: Notify,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    /// The number of waiting clients.
    waiting: usize,
}

/// Counts a client as waiting until dropped.
///
/// Unless it has been [marked as served](Self::mark_served), the client is then recorded as turned away.
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

    /// Waits until a client is turned away or starts waiting.
    ///
    /// Returns immediately if either has happened since this last returned.
    pub(crate) async fn wait_until_unreported(&self) {
        self.unreported.notified().await;
    }

    /// Records that a client has been, or may have been, turned away.
    pub(crate) fn record(&self) {
        self.state().last = Some(Instant::now());
        self.unreported.notify_one();
    }

    /// Records that a client is waiting for an owner or an inner service that may never answer.
    pub(crate) fn begin_wait(self: &Arc<Self>) -> Waiting {
        self.state().waiting += 1;
        self.unreported.notify_one();
        Waiting {
            turned_away: self.clone(),
            is_served: false,
        }
    }

    /// Awaits `serving`, and counts the client as waiting once [`SLOW_THRESHOLD`] has passed.
    ///
    /// After that, the client is recorded as turned away if `serving` fails or is dropped.
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

    /// Returns how long ago a client was last turned away, or `None` if none ever was.
    ///
    /// While any client is waiting, this is zero.
    pub(crate) fn age(&self, now: Instant) -> Option<Duration> {
        let state = self.state();
        let last = if state.waiting > 0 {
            Some(now)
        } else {
            state.last
        };
        last.map(|last| now.saturating_duration_since(last))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

// === impl Waiting ===

impl Waiting {
    /// Records that the client has been served.
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
