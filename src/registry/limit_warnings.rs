//! Rate-limits warnings about exceeded limits to one per minute for each limit.

use std::{mem, sync::Mutex, time::Duration};

use tokio::time::Instant;

use crate::{limits::Limit, lock::lock};

/// Minimum time between two log lines about the same limit.
///
/// This keeps a flood of calls from becoming a flood of log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// Counters for calls over a limit and for evicted answers.
#[derive(Debug, Default)]
pub(crate) struct LimitWarnings {
    limits: Mutex<[RateLimitedCounter; Limit::ALL.len()]>,
    evictions: Mutex<RateLimitedCounter>,
}

/// Counts occurrences between two log lines.
#[derive(Debug, Clone, Copy, Default)]
struct RateLimitedCounter {
    logged_at: Option<Instant>,
    unlogged: u64,
}

// === impl LimitWarnings ===

impl LimitWarnings {
    /// Counts a call over a limit. If another log line is due, returns the count since the last line.
    pub(crate) fn record(&self, limit: Limit, now: Instant) -> Option<u64> {
        let mut limits = lock(&self.limits);
        let index = Limit::ALL.iter().position(|other| *other == limit);
        limits.get_mut(index?)?.add(1, now)
    }

    /// Counts evicted answers. If another log line is due, returns the count since the last line.
    pub(crate) fn record_evictions(&self, answers: usize, now: Instant) -> Option<u64> {
        let mut evictions = lock(&self.evictions);
        evictions.add(answers as u64, now)
    }
}

// === impl RateLimitedCounter ===

impl RateLimitedCounter {
    /// Adds occurrences. If another log line is due, returns the count since the last line.
    fn add(&mut self, count: u64, now: Instant) -> Option<u64> {
        self.unlogged += count;
        let has_elapsed = |at: Instant| now.saturating_duration_since(at) >= LOG_INTERVAL;
        let is_due = self.unlogged > 0 && self.logged_at.is_none_or(has_elapsed);
        is_due.then(|| {
            self.logged_at = Some(now);
            mem::take(&mut self.unlogged)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_reached_many_times_is_logged_once_a_minute() {
        let warnings = LimitWarnings::default();
        let start = Instant::now();
        assert_eq!(warnings.record(Limit::Detached, start), Some(1));
        for _ in 0..1_000 {
            let soon = start + LOG_INTERVAL - Duration::from_millis(1);
            assert_eq!(warnings.record(Limit::Detached, soon), None);
        }
        assert_eq!(
            warnings.record(Limit::Calls, start),
            Some(1),
            "another limit"
        );
        let later = start + LOG_INTERVAL;
        assert_eq!(warnings.record(Limit::Detached, later), Some(1_001));
        assert_eq!(warnings.record(Limit::Detached, later), None);
    }

    #[test]
    fn evicted_answers_are_logged_once_a_minute() {
        let warnings = LimitWarnings::default();
        let start = Instant::now();
        assert_eq!(warnings.record_evictions(0, start), None);
        assert_eq!(warnings.record_evictions(3, start), Some(3));
        assert_eq!(warnings.record_evictions(4, start), None);
        assert_eq!(warnings.record_evictions(1, start + LOG_INTERVAL), Some(5));
    }
}
