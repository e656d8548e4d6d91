//! Clients at the door of this instance: their sessions live on others, which cannot be reached from here.
//!
//! 1. The owner learns of it through the directory before the client is told to come again. So it does not cancel a call whose client
//!    is on its way.
//! 2. However many requests come, the directory is told once a second of each session.

use std::{
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;
use tracing::debug;

use crate::{
    directory::{Directory as _, Limited},
    ids::SessionHash,
    recent::Recent,
};

/// How often the directory is told of one session: once a second.
const EVERY: Duration = Duration::from_secs(1);

/// Of how many sessions it is remembered that the directory was told: 16,384.
const MAX_TOLD: usize = 16 * 1024;

/// The clients at the door. It is a handle: clones are the same.
#[derive(Clone)]
pub(crate) struct Doors(Arc<Inner>);

struct Inner {
    directory: Limited,
    told: Mutex<Recent<()>>,
}

// === impl Doors ===

impl Doors {
    pub(crate) fn new(directory: Limited) -> Self {
        let told = Mutex::new(Recent::new(MAX_TOLD, EVERY));
        Self(Arc::new(Inner { directory, told }))
    }

    /// Tells the directory that a client of a session is here, unless it was told a moment ago. It does so also if this is dropped.
    #[allow(
        clippy::disallowed_methods,
        reason = "whoever comes next relies on what was begun here"
    )]
    pub(crate) async fn knock(&self, session: SessionHash) {
        if !self.is_first(session) {
            return;
        }
        let this = self.clone();
        let told = tokio::spawn(async move {
            if let Err(error) = this.0.directory.knock(session).await {
                debug!(target: "mcp_cancel_cluster", %session, %error, "an owner does not learn of a client at the door");
                this.told().remove(session);
            }
        });
        // It ends early with its runtime only.
        let _ended = told.await;
    }

    fn is_first(&self, session: SessionHash) -> bool {
        let now = Instant::now();
        let mut told = self.told();
        let is_first = told.get(session, now).is_none();
        if is_first {
            told.insert(session, (), now);
        }
        is_first
    }

    fn told(&self) -> MutexGuard<'_, Recent<()>> {
        self.0.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Doors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Doors").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::join_all;
    use tokio::time::advance;

    use super::*;
    use crate::directory::{
        MemoryDirectory,
        faulty::{Fault, Faulty},
    };

    #[tokio::test(start_paused = true)]
    async fn the_directory_is_told_once_a_second_of_each_session() {
        let directory = Faulty::new(MemoryDirectory::default());
        let doors = Doors::new(Limited::new(directory.clone()));
        let [one, two] = ["a", "b"].map(SessionHash::of);
        join_all((0..100).map(|_| doors.knock(one))).await;
        assert_eq!(directory.asked("knock"), 1);
        doors.knock(two).await;
        assert_eq!(directory.asked("knock"), 2);
        advance(EVERY).await;
        doors.knock(one).await;
        assert_eq!(directory.asked("knock"), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn what_the_directory_did_not_take_is_told_again() {
        let directory = Faulty::new(MemoryDirectory::default());
        let doors = Doors::new(Limited::new(directory.clone()));
        directory.set(Fault::Fails);
        for asked in 1..=3 {
            doors.knock(SessionHash::of("a")).await;
            assert_eq!(directory.asked("knock"), asked);
        }
    }
}
