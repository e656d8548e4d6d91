//! A period during which this instance may have had no lease.
//!
//! Other instances may have claimed its sessions in the meantime.

use tokio::time::Instant;

/// The most recent lapse.
///
/// After a lapse, each session must be verified before it serves anything new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Lapse {
    /// A session is verified once it has been confirmed at or after this time.
    pub(crate) since: Instant,
    /// Whether this process stalled. If so, only a new epoch verifies a session, not a mere write.
    pub(crate) by_stall: bool,
}

// === impl Lapse ===

impl Lapse {
    /// Creates the lapse for an instance whose process has stalled.
    pub(crate) fn by_stall(since: Instant) -> Self {
        let by_stall = true;
        Self { since, by_stall }
    }

    /// Creates the lapse for an instance whose heartbeats went unanswered.
    pub(crate) fn by_failures(since: Instant) -> Self {
        let by_stall = false;
        Self { since, by_stall }
    }
}
