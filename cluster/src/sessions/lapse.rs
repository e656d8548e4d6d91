//! A period in which this instance may have had no lease.
//!
//! Other instances may have claimed its sessions in the meantime.

use tokio::time::Instant;

/// The last lapse. Each session must be verified before it serves anything new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lapse {
    /// A session is verified if it was confirmed since then.
    pub(crate) since: Instant,
    /// Whether this process stalled. If so, only a new epoch verifies a session, and a mere write does not.
    pub(crate) by_stall: bool,
}

// === impl Lapse ===

impl Lapse {
    /// Returns the lapse of an instance whose process stalled.
    pub(crate) fn by_stall(since: Instant) -> Self {
        let by_stall = true;
        Self { since, by_stall }
    }

    /// Returns the lapse of an instance whose heartbeats were not answered.
    pub(crate) fn by_failures(since: Instant) -> Self {
        let by_stall = false;
        Self { since, by_stall }
    }
}
