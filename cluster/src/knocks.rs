//! Clients at the door of this instance: their sessions live on others, which are not reached from here.
//!
//! 1. The owner learns of it through the directory, while the client waits and before it is told to come again. So it does not
//!    cancel a call whose client is on its way.
//! 2. That a client waits is known for a moment longer than it does: it may go for good once the owner was reached.
//! 3. However many requests come, the directory is told once a second of each session, and once more if one is turned away that
//!    has waited.

use std::{
    convert::Infallible,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep};
use tracing::debug;

use crate::{
    directory::{Directory as _, Limited, TURNED_AWAY},
    ids::SessionHash,
    recent::Recent,
};

/// How often the directory is told of one session: once a second.
const EVERY: Duration = Duration::from_secs(1);

/// For how long a client that waits counts as at the door: 2 s, until the directory was told again, and took its time.
const WAITS: Duration = Duration::from_secs(2);

/// Of how many sessions it is remembered that the directory was told: 16,384.
const MAX_TOLD: usize = 16 * 1024;

/// The clients at the door. It is a handle: clones are the same.
#[derive(Clone)]
pub(crate) struct Knocks(Arc<Inner>);

struct Inner {
    directory: Limited,
    /// For how long.
    told: Mutex<Recent<Duration>>,
}

// === impl Knocks ===

impl Knocks {
    pub(crate) fn new(directory: Limited) -> Self {
        let told = Mutex::new(Recent::new(MAX_TOLD, EVERY));
        Self(Arc::new(Inner { directory, told }))
    }

    /// A client is told to come again.
    pub(crate) async fn turn_away(&self, session: SessionHash) {
        self.knock(session, TURNED_AWAY).await;
    }

    /// A client waits, until this is dropped.
    pub(crate) async fn wait(&self, session: SessionHash) -> Infallible {
        loop {
            self.knock(session, WAITS).await;
            sleep(EVERY).await;
        }
    }

    /// Tells the directory that a client is here, unless it was told a moment ago. It does so also if this is dropped.
    #[allow(
        clippy::disallowed_methods,
        reason = "whoever comes next relies on what was begun here"
    )]
    async fn knock(&self, session: SessionHash, time: Duration) {
        if !self.is_first(session, time) {
            return;
        }
        let this = self.clone();
        let told = tokio::spawn(async move {
            if let Err(error) = this.0.directory.knock(session, time).await {
                debug!(target: "mcp_cancel_cluster", %session, %error, "an owner does not learn of a client at the door");
                this.told().remove(session);
            }
        });
        // It ends early with its runtime only.
        let _ended = told.await;
    }

    fn is_first(&self, session: SessionHash, time: Duration) -> bool {
        let now = Instant::now();
        let mut told = self.told();
        let is_first = told.get(session, now).is_none_or(|told| *told < time);
        if is_first {
            told.insert(session, time, now);
        }
        is_first
    }

    fn told(&self) -> MutexGuard<'_, Recent<Duration>> {
        self.0.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Knocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Knocks").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;
    use tokio::time::{advance, timeout};

    use super::*;
    use crate::{
        directory::{
            MemoryDirectory,
            faulty::{Fault, Faulty},
        },
        ids::Incarnation,
    };

    #[tokio::test(start_paused = true)]
    async fn the_directory_is_told_once_a_second_of_each_session() {
        let directory = Faulty::new(MemoryDirectory::default());
        let knocks = Knocks::new(Limited::new(directory.clone()));
        let [one, two] = ["a", "b"].map(SessionHash::of);
        join_all((0..100).map(|_| knocks.turn_away(one))).await;
        assert_eq!(directory.asked("knock"), 1);
        knocks.turn_away(two).await;
        assert_eq!(directory.asked("knock"), 2);
        advance(EVERY).await;
        knocks.turn_away(one).await;
        assert_eq!(directory.asked("knock"), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn who_waits_counts_for_a_moment_longer_and_who_is_turned_away_until_it_can_be_back() {
        let directory = Faulty::new(MemoryDirectory::default());
        let knocks = Knocks::new(Limited::new(directory.clone()));
        let (session, asker) = (SessionHash::of("a"), Incarnation::random());
        let at_the_door = async || {
            let standing = directory.memory.standing(session, asker).await;
            standing.unwrap().at_the_door
        };
        let waited = 10 * EVERY;
        assert!(timeout(waited, knocks.wait(session)).await.is_err());
        assert!(at_the_door().await.is_some_and(|left| left <= WAITS));
        assert!((10..=11).contains(&directory.asked("knock")));
        // Also within the second.
        knocks.turn_away(session).await;
        assert_eq!(at_the_door().await, Some(TURNED_AWAY));
        advance(TURNED_AWAY).await;
        assert!(timeout(EVERY / 2, knocks.wait(session)).await.is_err());
        advance(WAITS).await;
        assert_eq!(at_the_door().await, None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_directory_did_not_take_is_told_again() {
        let directory = Faulty::new(MemoryDirectory::default());
        let knocks = Knocks::new(Limited::new(directory.clone()));
        directory.set(Fault::Fails);
        for asked in 1..=3 {
            knocks.turn_away(SessionHash::of("a")).await;
            assert_eq!(directory.asked("knock"), asked);
        }
    }
}
