//! The Redis keys, and the parts of their values shared by several modules.

use std::time::Duration;

use crate::ids::{CallNumber, Incarnation, SessionHash};

/// The key of the hash containing the leases.
pub(super) const LEASES: &str = "mcp:i";

/// The only field in that hash that is not a lease.
///
/// It holds the time at which an instance last turned a client away or a lease last lapsed.
pub(super) const TURNED_AWAY: &str = "turned-away";

/// Stands for a missing time, run, or list of marks.
pub(super) const NONE: &str = "-";

/// Marks a settled instance's lease.
pub(super) const SETTLED: &str = "settled";

/// Marks a lease as [`Lease::has_late_answers`](crate::directory::Lease::has_late_answers).
pub(super) const LATE_ANSWERS: &str = "late-answers";

/// How far a lease may be ahead of the backend's clock.
///
/// A lease further ahead was written by a backend with a different clock, or before the clock was set back.
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

/// Returns `duration` in milliseconds, the backend's unit of time, saturating at `u64::MAX`.
pub(super) fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}
