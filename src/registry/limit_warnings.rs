//! Notes of limits that were met, which are logged from time to time.

use std::{mem, sync::Mutex, time::Duration};

use tokio::time::Instant;

use crate::{limits::Limit, lock::lock};

/// How often a limit that is reached is logged: once a minute. A flood of calls is no flood of lines.
const LOG_INTERVAL: Duration = Duration::from_secs(60);

/// How often what was said last.
#[derive(Debug, Default)]
pub(crate) struct LimitWarnings {
    limits: Mutex<[RateLimitedCounter; Limit::ALL.len()]>,
    evictions: Mutex<RateLimitedCounter>,
}

/// How often something happened that was not said yet.
#[derive(Debug, Clone, Copy, Default)]
struct RateLimitedCounter {
    logged_at: Option<Instant>,
    unlogged: u64,
}

// === impl Notes ===

impl LimitWarnings {
    /// A call met a limit. How many did since that was said last, if it is time to say so.
    pub(crate) fn record(&self, limit: Limit, now: Instant) -> Option<u64> {
        let mut reached = lock(&self.limits);
        let of = Limit::ALL.iter().position(|one| *one == limit);
        reached.get_mut(of?)?.add(1, now)
    }

    /// Answers were dropped. How many were since that was said last, if it is time to say so.
    pub(crate) fn record_evictions(&self, answers: usize, now: Instant) -> Option<u64> {
        let mut dropped = lock(&self.evictions);
        dropped.add(answers as u64, now)
    }
}

// === impl Unsaid ===

impl RateLimitedCounter {
    /// How often it happened since that was said last, if it is time to say so.
    fn add(&mut self, times: u64, now: Instant) -> Option<u64> {
        self.unlogged += times;
        let is_time = |at: Instant| now.saturating_duration_since(at) >= LOG_INTERVAL;
        let is_due = self.unlogged > 0 && self.logged_at.is_none_or(is_time);
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
    fn a_limit_that_is_met_again_and_again_is_said_once_a_minute() {
        let notes = LimitWarnings::default();
        let start = Instant::now();
        assert_eq!(notes.record(Limit::Detached, start), Some(1));
        for _ in 0..1_000 {
            let soon = start + LOG_INTERVAL - Duration::from_millis(1);
            assert_eq!(notes.record(Limit::Detached, soon), None);
        }
        assert_eq!(notes.record(Limit::Calls, start), Some(1), "another limit");
        let later = start + LOG_INTERVAL;
        assert_eq!(notes.record(Limit::Detached, later), Some(1_001));
        assert_eq!(notes.record(Limit::Detached, later), None);
    }

    #[test]
    fn answers_that_are_dropped_are_said_once_a_minute() {
        let notes = LimitWarnings::default();
        let start = Instant::now();
        assert_eq!(notes.record_evictions(0, start), None);
        assert_eq!(notes.record_evictions(3, start), Some(3));
        assert_eq!(notes.record_evictions(4, start), None);
        assert_eq!(notes.record_evictions(1, start + LOG_INTERVAL), Some(5));
    }
}
