//! The keys, and the parts of their values that several modules use.

use std::time::Duration;

use crate::ids::{CallNumber, Incarnation, SessionHash};

/// The key of the leases.
pub(super) const LEASES: &str = "mcp:i";

/// A field of the leases that is not a lease: when an instance last turned a client away.
pub(super) const TURNED_AWAY: &str = "turned-away";

/// The placeholder for no time, no run or no marks.
pub(super) const NONE: &str = "-";

/// The mark in the lease of a settled instance.
pub(super) const SETTLED: &str = "settled";

/// The mark in the lease of an instance that has late answers.
pub(super) const LATE_ANSWERS: &str = "late-answers";

/// Maximum time that a lease may be ahead of the backend's clock: 1 s.
///
/// A lease that is further ahead is from a backend with another clock.
pub(super) const CLOCK_SKEW: Duration = Duration::from_secs(1);

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

/// Returns a duration in the backend's unit of time.
pub(super) fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}
