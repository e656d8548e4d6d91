//! Whether this instance turns clients away: it answers 503, or has a client wait for an owner that does not answer.
//!
//! Each heartbeat carries how long ago that was ([`Status`](crate::directory::Status)). The directory has the last time for all
//! instances, also for those that are gone. An owner then cancels no call: the client
//! that was turned away may be the one that it waits for. Which session that client asked for is not said. A client that
//! cannot be routed may be of any session, and the mark costs no command of its own.

use std::{
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;

use crate::{directory::DIRECTORY_TIMEOUT, lock::lock};

/// For how long a client that was turned away counts as on its way, if no other time is set: 40 s. It is to come again after 1 s; SDKs
/// that keep their own time wait 30 s at most before their next try.
pub(crate) const CLIENT_BACKOFF: Duration = Duration::from_secs(40);

/// How long a resume may take to the owner before its client counts as turned away: 250 ms. Its call's grace may end meanwhile.
pub(crate) const SLOW_RELAY_THRESHOLD: Duration = Duration::from_millis(250);

/// How long after its arrival a client that is not served counts as turned away: 750 ms, a look-up and [`SLOW_RELAY_THRESHOLD`].
pub(crate) const MAX_RECORD_DELAY: Duration =
    DIRECTORY_TIMEOUT.saturating_add(SLOW_RELAY_THRESHOLD);

/// When clients were turned away last.
#[derive(Debug)]
pub(crate) struct TurnedAway {
    /// For how long such a client counts as on its way.
    pub(crate) backoff: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<Instant>,
    /// How many clients wait.
    waiting: usize,
}

/// A client waits until this is dropped. If it was not [served](Self::served), it counts as turned away.
#[derive(Debug)]
pub(crate) struct Waiting {
    turned_away: Arc<TurnedAway>,
    is_served: bool,
}

// === impl TurnedAway ===

impl TurnedAway {
    pub(crate) fn new(backoff: Duration) -> Self {
        let state = Mutex::default();
        Self { backoff, state }
    }

    /// A client is asked to come again later.
    pub(crate) fn record(&self) {
        self.state().last = Some(Instant::now());
    }

    /// A client waits for an owner that may not answer.
    pub(crate) fn wait(self: &Arc<Self>) -> Waiting {
        self.state().waiting += 1;
        Waiting {
            turned_away: self.clone(),
            is_served: false,
        }
    }

    /// How long ago a client was turned away last; zero while one waits. `None` if none was.
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
    /// The owner answered.
    pub(crate) fn served(mut self) {
        self.is_served = true;
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let mut state = self.turned_away.state();
        state.waiting -= 1;
        if !self.is_served {
            state.last = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_is_known_how_long_ago_a_client_was_turned_away_or_waited() {
        let turned_away = Arc::new(TurnedAway::new(CLIENT_BACKOFF));
        let age = || turned_away.age(Instant::now());
        assert_eq!(age(), None);
        turned_away.record();
        advance(Duration::from_secs(3)).await;
        assert_eq!(age(), Some(Duration::from_secs(3)));
        let waiting = [(); 2].map(|()| turned_away.wait());
        advance(Duration::from_secs(1)).await;
        assert_eq!(age(), Some(Duration::ZERO));
        let [served, gives_up] = waiting;
        drop(gives_up);
        advance(Duration::from_secs(2)).await;
        served.served();
        assert_eq!(age(), Some(Duration::from_secs(2)));
    }
}
