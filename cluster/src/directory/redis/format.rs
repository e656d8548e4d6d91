//! The Redis keys, and the parts of their values that several modules share.

use std::time::Duration;

use crate::ids::{CallNumber, Incarnation, SessionHash};

/// The key of the hash that holds the leases.
pub(super) const LEASES: &str = "mcp:i";

/// The field of that hash that is not a lease: when an instance last turned a client away or a lease lapsed.
pub(super) const TURNED_AWAY: &str = "turned-away";

/// The placeholder for a missing time, run, or list of marks.
pub(super) const NONE: &str = "-";

/// Marks the lease of a settled instance.
pub(super) const SETTLED: &str = "settled";

/// Marks a lease as [`Lease::has_late_answers`](crate::directory::Lease::has_late_answers).
pub(super) const LATE_ANSWERS: &str = "late-answers";

/// Maximum time a lease may be ahead of the backend's clock: 1 s.
///
/// A lease that is further ahead was written by a backend with another clock, or before the clock was set back.
pub(super) const MAX_CLOCK_SKEW: Duration = Duration::from_secs(1);

pub(super) fn session_key(session: SessionHash) -> String {
    format!("mcp:s:{session}")
}

pub(super) fn answer_key(
    session: SessionHash,
    incarnation: Incarnation,
    call: CallNumber,
) -> String {
    format!("mcp:a:{session}:{incarnation}:{call}")
}

/// Returns `duration` in milliseconds, the backend's unit of time. Saturates at `u64::MAX`.
pub(super) fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}
