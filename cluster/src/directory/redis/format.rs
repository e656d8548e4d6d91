//! The keys, and what all parts of the directory know of their values.

use std::time::Duration;

use crate::ids::{CallNumber, Incarnation, SessionHash};

/// The key of the leases.
pub(super) const LEASES: &str = "mcp:i";

/// The field of the leases that is none: when an instance last turned a client away.
pub(super) const TURNED_AWAY: &str = "turned-away";

/// What a lease has where there is no time, or no run.
pub(super) const NONE: &str = "-";

/// What the lease of a settled instance has among its marks.
pub(super) const SETTLED: &str = "settled";

/// What the lease of an instance that owes answers has among its marks.
pub(super) const LATE_ANSWERS: &str = "owes-answers";

/// How far ahead of the backend's clock a lease may be: 1 s. One that is further ahead is from a backend with another clock.
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

/// The backend's unit of time.
pub(super) fn millis(duration: Duration) -> u64 {
    duration.as_millis().try_into().unwrap_or(u64::MAX)
}
