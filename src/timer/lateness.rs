//! Measures lateness: how long after a deadline the timer could first have handled it.
//!
//! The timer task yields between turns, so under load it may handle a deadline late even though the runtime never stalled. Lateness is
//! therefore only measured up to the first turn in which the deadline could have been handled.
//!
//! A backlog lasts as long as each turn leaves expired entries for the next. A deadline that passes during a backlog is measured as
//! follows:
//!
//! - If the turns before and after the deadline were at most [`RECHECK_TOLERANCE`] apart, it counts as at most that late. Its lateness
//!   drops to zero once the runtime has polled other tasks for [`RECHECK_DELAY`], because by then the runtime has read every request that
//!   arrived in time.
//! - If they were further apart, the runtime has stalled, so the deadline is late by the time until the second of these turns.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// Delay before a late deadline is rechecked.
///
/// This is long enough for a runtime to read the waiting requests.
pub(crate) const RECHECK_DELAY: Duration = Duration::from_millis(100);

/// Maximum lateness at which a deadline still counts as on time.
pub(crate) const RECHECK_TOLERANCE: Duration = Duration::from_millis(20);

/// Maximum number of stalls tracked during a backlog. Beyond that, the oldest stalls are merged.
const MAX_STALLS: usize = 16;

/// How promptly a deadline is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Timeliness {
    /// The leader handles it on time.
    OnTime,
    /// The leader handles it late, so requests that arrived in time may still be unread.
    Delayed,
    /// The leader's runtime has stalled, so requests on it may be unread.
    Late,
}

/// Tracks a timer task's turns during a backlog.
#[derive(Debug)]
pub(crate) struct LatenessTracker {
    now: Instant,
    /// Start of the backlog's first turn, and the timeliness of deadlines up to that point.
    first_turn: (Instant, Timeliness),
    /// Gaps between two turns that exceed [`RECHECK_TOLERANCE`].
    stalls: VecDeque<Gap>,
    /// The gap between the last turn and this one.
    last_gap: Gap,
    /// The latest turn since which the runtime has polled other tasks for [`RECHECK_DELAY`].
    settled: Instant,
    /// The next candidate for `settled`, and how long other tasks have been polled since then.
    polled: (Instant, Duration),
}

/// The interval after `from`, up to and including `to`.
#[derive(Debug, Clone, Copy)]
struct Gap {
    from: Instant,
    to: Instant,
}

// === impl LatenessTracker ===

impl LatenessTracker {
    pub(crate) fn new(now: Instant, timeliness: Timeliness) -> Self {
        Self {
            now,
            first_turn: (now, timeliness),
            stalls: VecDeque::new(),
            last_gap: Gap { from: now, to: now },
            settled: now,
            polled: (now, Duration::ZERO),
        }
    }

    /// Starts the backlog's next turn.
    pub(crate) fn next_turn(&mut self, now: Instant) {
        if self.last_gap.length() > RECHECK_TOLERANCE {
            if self.stalls.len() == MAX_STALLS
                && let Some(oldest) = self.stalls.pop_front()
            {
                self.first_turn.0 = oldest.to;
            }
            self.stalls.push_back(self.last_gap);
        }
        let from = self.now;
        self.last_gap = Gap { from, to: now };
        self.now = now;
        self.record_polled();
    }

    /// Records that the runtime has polled other tasks since the last turn. A gap beyond the tolerance is a stall, and is ignored.
    fn record_polled(&mut self) {
        let (since, polled) = &mut self.polled;
        if self.last_gap.length() <= RECHECK_TOLERANCE {
            *polled += self.last_gap.length();
        }
        if *polled >= RECHECK_DELAY {
            self.settled = *since;
            self.polled = (self.now, Duration::ZERO);
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// Returns how long after `at` the timer could first have handled a deadline at that time.
    pub(crate) fn lateness(&self, at: Instant) -> Duration {
        let (first, _) = self.first_turn;
        let mut stalls = self.stalls.iter().chain([&self.last_gap]);
        let stall = stalls.find(|stall| stall.contains(at));
        let handled = match stall {
            _ if at <= first => first,
            Some(stall) => stall.to,
            None if at <= self.settled => at,
            // The exact gap is no longer tracked.
            None => self.now.min(at + RECHECK_TOLERANCE),
        };
        handled.saturating_duration_since(at)
    }

    /// Returns `true` if the leader's runtime is known to have been stalled at this deadline.
    pub(crate) fn was_stalled(&self, at: Instant) -> bool {
        let (first, timeliness) = self.first_turn;
        at <= first && timeliness == Timeliness::Late
    }
}

// === impl Gap ===

impl Gap {
    fn length(self) -> Duration {
        self.to.saturating_duration_since(self.from)
    }

    fn contains(self, at: Instant) -> bool {
        self.from < at && at <= self.to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn the_lateness_of_an_earlier_deadline_ends_with_the_first_turn() {
        let start = Instant::now();
        let mut lateness = LatenessTracker::new(start, Timeliness::OnTime);
        for turn in 1..=100 {
            assert_eq!(lateness.lateness(start - 7 * MS), 7 * MS, "{turn}");
            assert!(!lateness.was_stalled(start - 7 * MS));
            lateness.next_turn(start + turn * 5 * MS);
        }
        let mut lateness = LatenessTracker::new(start, Timeliness::Late);
        lateness.next_turn(start + 5 * MS);
        assert!(lateness.was_stalled(start));
        assert!(!lateness.was_stalled(start + MS), "the runtime works again");
    }

    #[test]
    fn a_deadline_during_a_backlog_is_late_until_other_tasks_were_polled_for_the_recheck_delay() {
        let start = Instant::now();
        let mut lateness = LatenessTracker::new(start, Timeliness::OnTime);
        lateness.next_turn(start + 5 * MS);
        assert_eq!(lateness.lateness(start + 2 * MS), 3 * MS);
        lateness.next_turn(start + 10 * MS);
        assert_eq!(lateness.lateness(start + 2 * MS), 8 * MS);
        assert_eq!(lateness.lateness(start + 9 * MS), MS);
        // A stalled runtime polls no tasks.
        let stall = 3_000 * MS;
        for turn in 0..38 {
            lateness.next_turn(start + stall + turn * 5 * MS);
            assert_eq!(
                lateness.lateness(start + 2 * MS),
                RECHECK_TOLERANCE,
                "{turn}"
            );
        }
        lateness.next_turn(start + stall + 200 * MS);
        assert_eq!(lateness.lateness(start + 2 * MS), Duration::ZERO);
        assert_eq!(
            lateness.lateness(start + stall + 150 * MS),
            RECHECK_TOLERANCE
        );
    }

    #[test]
    fn a_deadline_during_a_stall_stays_late() {
        let start = Instant::now();
        let mut lateness = LatenessTracker::new(start, Timeliness::OnTime);
        lateness.next_turn(start + 5 * MS);
        lateness.next_turn(start + 1_005 * MS);
        for turn in 1..=100 {
            assert_eq!(lateness.lateness(start + 6 * MS), 999 * MS, "{turn}");
            assert!(
                lateness.lateness(start + 5 * MS) <= RECHECK_TOLERANCE,
                "noticed"
            );
            lateness.next_turn(start + (1_005 + turn) * MS);
        }
        assert_eq!(lateness.lateness(start + 1_006 * MS), RECHECK_TOLERANCE);
    }

    /// When in doubt, a deadline counts as later than it was.
    #[test]
    fn the_oldest_of_many_stalls_count_as_one() {
        let start = Instant::now();
        let mut lateness = LatenessTracker::new(start, Timeliness::OnTime);
        let mut now = start;
        for _ in 0..MAX_STALLS + 3 {
            now += 100 * MS;
            lateness.next_turn(now);
        }
        assert!(lateness.stalls.len() <= MAX_STALLS);
        for stall in 0..u32::try_from(MAX_STALLS).unwrap() + 3 {
            let at = start + stall * 100 * MS + 10 * MS;
            assert!(lateness.lateness(at) >= 90 * MS, "{stall}");
        }
    }
}
