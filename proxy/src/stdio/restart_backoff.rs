//! Refuses new sessions for a while if the server keeps failing to start.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// Number of crashes within a [`PERIOD`] that trigger the backoff.
const MAX_CRASHES: usize = 3;

/// The period in which crashes are counted, and the backoff's length after the last crash.
const PERIOD: Duration = Duration::from_secs(10);

/// The most recent crashes.
///
/// Only record a crash if the server could not be started, or if it ended before its first answer. If it ends later, a client's
/// request may be the cause, and other clients must not suffer for it.
#[derive(Debug, Default)]
pub(super) struct RestartBackoff(VecDeque<Instant>);

// === impl RestartBackoff ===

impl RestartBackoff {
    pub(super) fn record_crash(&mut self, now: Instant) {
        if self.0.len() == MAX_CRASHES {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }

    /// Returns the remaining backoff, if any.
    pub(super) fn delay(&self, now: Instant) -> Option<Duration> {
        let first = self.0.front().filter(|_| self.0.len() == MAX_CRASHES)?;
        let last = self.0.back()?;
        let are_frequent = *last < *first + PERIOD;
        let until = *last + PERIOD;
        (are_frequent && now < until).then(|| until - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_third_crash_in_ten_seconds_delays_the_next_start() {
        let (mut backoff, now) = (RestartBackoff::default(), Instant::now());
        backoff.record_crash(now);
        backoff.record_crash(now + SECOND);
        assert_eq!(backoff.delay(now + SECOND), None);
        backoff.record_crash(now + SECOND * 9);
        assert_eq!(backoff.delay(now + SECOND * 9), Some(PERIOD));
        assert_eq!(backoff.delay(now + SECOND * 18), Some(SECOND));
        assert_eq!(backoff.delay(now + SECOND * 19), None);
        backoff.record_crash(now + SECOND * 19);
        assert_eq!(
            backoff.delay(now + SECOND * 19),
            None,
            "only two are recent"
        );
    }

    #[test]
    fn rare_crashes_do_not_add_up() {
        let (mut backoff, now) = (RestartBackoff::default(), Instant::now());
        for crash in 0..10 {
            backoff.record_crash(now + SECOND * 6 * crash);
            assert_eq!(backoff.delay(now + SECOND * 6 * crash), None);
        }
    }
}
