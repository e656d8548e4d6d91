//! Notes of limits that were met, which are logged from time to time.

use std::{mem, sync::Mutex, time::Duration};

use tokio::time::Instant;

use crate::{limits::Limit, lock::lock};

/// How often a limit that is reached is logged: once a minute. A flood of calls is no flood of lines.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// How often what was said last.
#[derive(Debug, Default)]
pub(crate) struct Notes {
    reached: Mutex<[Unsaid; Limit::ALL.len()]>,
    dropped: Mutex<Unsaid>,
}

/// How often something happened that was not said yet.
#[derive(Debug, Clone, Copy, Default)]
struct Unsaid {
    said_at: Option<Instant>,
    since: u64,
}

// === impl Notes ===

impl Notes {
    /// A call met a limit. How many did since that was said last, if it is time to say so.
    pub(crate) fn reached(&self, limit: Limit, now: Instant) -> Option<u64> {
        let mut reached = lock(&self.reached);
        let of = Limit::ALL.iter().position(|one| *one == limit);
        reached.get_mut(of?)?.add(1, now)
    }

    /// Answers were dropped. How many were since that was said last, if it is time to say so.
    pub(crate) fn dropped(&self, answers: usize, now: Instant) -> Option<u64> {
        let mut dropped = lock(&self.dropped);
        dropped.add(answers as u64, now)
    }
}

// === impl Unsaid ===

impl Unsaid {
    /// How often it happened since that was said last, if it is time to say so.
    fn add(&mut self, times: u64, now: Instant) -> Option<u64> {
        self.since += times;
        let is_time = |at: Instant| now.saturating_duration_since(at) >= SAID_EVERY;
        let is_due = self.since > 0 && self.said_at.is_none_or(is_time);
        is_due.then(|| {
            self.said_at = Some(now);
            mem::take(&mut self.since)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_that_is_met_again_and_again_is_said_once_a_minute() {
        let notes = Notes::default();
        let start = Instant::now();
        assert_eq!(notes.reached(Limit::Detached, start), Some(1));
        for _ in 0..1_000 {
            let soon = start + SAID_EVERY - Duration::from_millis(1);
            assert_eq!(notes.reached(Limit::Detached, soon), None);
        }
        assert_eq!(notes.reached(Limit::Calls, start), Some(1), "another limit");
        let later = start + SAID_EVERY;
        assert_eq!(notes.reached(Limit::Detached, later), Some(1_001));
        assert_eq!(notes.reached(Limit::Detached, later), None);
    }

    #[test]
    fn answers_that_are_dropped_are_said_once_a_minute() {
        let notes = Notes::default();
        let start = Instant::now();
        assert_eq!(notes.dropped(0, start), None);
        assert_eq!(notes.dropped(3, start), Some(3));
        assert_eq!(notes.dropped(4, start), None);
        assert_eq!(notes.dropped(1, start + SAID_EVERY), Some(5));
    }
}
