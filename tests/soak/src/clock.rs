//! The clock that all processes use: `CLOCK_MONOTONIC`, in microseconds.

use rustix::time::{ClockId, clock_gettime};

/// Microseconds since the machine started.
pub type Micros = u64;

/// A millisecond.
pub const MILLI: Micros = 1_000;
/// A second.
pub const SECOND: Micros = 1_000_000;

/// Returns the current time.
#[must_use]
pub fn now() -> Micros {
    let time = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (time.tv_sec.unsigned_abs(), time.tv_nsec.unsigned_abs());
    seconds * SECOND + nanos / 1_000
}
