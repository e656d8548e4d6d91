//! A time in which this instance may have had no lease, and others may have claimed its sessions.

use tokio::time::Instant;

/// Each session is verified before it serves anything new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lapse {
    /// It is verified since then.
    pub(crate) since: Instant,
    /// This process stood still. So a write does not verify a session, but only a new epoch.
    pub(crate) by_stall: bool,
}

// === impl Lapse ===

impl Lapse {
    pub(crate) fn by_stall(since: Instant) -> Self {
        let by_stall = true;
        Self { since, by_stall }
    }

    /// Heartbeats were made, and not answered.
    pub(crate) fn by_failures(since: Instant) -> Self {
        let by_stall = false;
        Self { since, by_stall }
    }
}
