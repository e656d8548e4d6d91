//! The sessions that peers were told to claim, for as long as they may be about to do so.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{ids::SessionHash, recent::Recent};

/// For how long a peer that was told to claim a session may be about to do so: 750 ms. It waits 500 ms for the directory.
const CLAIMS_WITHIN: Duration = Duration::from_millis(750);

/// Of how many sessions that is remembered: 4,096.
const MAX_SENT_ON: usize = 4 * 1024;

#[derive(Debug)]
pub(crate) struct SentOn(Mutex<Recent<()>>);

// === impl SentOn ===

impl SentOn {
    /// A peer is told.
    pub(crate) fn insert(&self, session: SessionHash) {
        self.lock().insert(session, (), Instant::now());
    }

    /// Whether a peer was told, and may be about to claim the session.
    pub(crate) fn contains(&self, session: SessionHash) -> bool {
        self.lock().get(session, Instant::now()).is_some()
    }

    fn lock(&self) -> MutexGuard<'_, Recent<()>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for SentOn {
    fn default() -> Self {
        Self(Mutex::new(Recent::new(MAX_SENT_ON, CLAIMS_WITHIN)))
    }
}
