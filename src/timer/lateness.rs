//! Lateness: how long after its time a keeper notices it, also while there is more to do than fits into one turn.
//!
//! A keeper does what is due in turns, and others are served in between. So it may come to something long after its
//! time, and yet its runtime never stood still. What counts as late is therefore the time until the first turn at which
//! the keeper could have come to it. Between two turns no more than [`ON_TIME`] apart nothing is later than that, and once
//! clients have been served for a [`GLANCE`] since, it is not late at all: those that were in time have been heard.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// When to look again at what was noticed late: after 100 ms, in which a runtime that is back hears its clients.
pub(crate) const RECHECK_DELAY: Duration = Duration::from_millis(100);

/// How late such a second look may come itself: 20 ms.
pub(crate) const RECHECK_TOLERANCE: Duration = Duration::from_millis(20);

/// How many stalls are told apart while a keeper is behind: 16. Of more, the oldest count as one.
const MAX_STALLS: usize = 16;

/// How it was noticed that a time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Timeliness {
    /// The keeper in charge noticed it on time.
    OnTime,
    /// The keeper in charge noticed it some time after: clients that were in time may not be heard yet.
    Delayed,
    /// The runtime in charge stood still. Clients may wait there to be heard.
    Late,
}

/// What a keeper knows of time in one of its turns.
#[derive(Debug)]
pub(crate) struct LatenessTracker {
    now: Instant,
    /// When its first turn of those without a rest in between began, and how it noticed what was due by then.
    first_turn: (Instant, Timeliness),
    /// From one turn to the next, where that took too long.
    stalls: VecDeque<Gap>,
    /// From the last turn to this one.
    last_gap: Gap,
    /// Clients have been served for a [`GLANCE`] since this turn.
    settled: Instant,
    /// The turn for which that is found out next, and for how long they have been served since.
    polled: (Instant, Duration),
}

/// After one moment and up to another.
#[derive(Debug, Clone, Copy)]
struct Gap {
    from: Instant,
    to: Instant,
}

// === impl Watch ===

impl LatenessTracker {
    pub(crate) fn new(now: Instant, noticed: Timeliness) -> Self {
        Self {
            now,
            first_turn: (now, noticed),
            stalls: VecDeque::new(),
            last_gap: Gap { from: now, to: now },
            settled: now,
            polled: (now, Duration::ZERO),
        }
    }

    /// The keeper is behind, and goes on with its next turn.
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

    /// Notes that clients were served since the last turn, unless the runtime stood still.
    fn record_polled(&mut self) {
        let (since, served) = &mut self.polled;
        if self.last_gap.length() <= RECHECK_TOLERANCE {
            *served += self.last_gap.length();
        }
        if *served >= RECHECK_DELAY {
            self.settled = *since;
            self.polled = (self.now, Duration::ZERO);
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// How late it was noticed that this time had come.
    pub(crate) fn lateness(&self, at: Instant) -> Duration {
        let (first, _) = self.first_turn;
        let mut stalls = self.stalls.iter().chain([&self.last_gap]);
        let stall = stalls.find(|stall| stall.contains(at));
        let noticed = match stall {
            _ if at <= first => first,
            Some(stall) => stall.to,
            None if at <= self.settled => at,
            // It is not known any more.
            None => self.now.min(at + RECHECK_TOLERANCE),
        };
        noticed.saturating_duration_since(at)
    }

    /// Whether it is known that the runtime in charge stood still when this time came.
    pub(crate) fn was_stalled(&self, at: Instant) -> bool {
        let (first, noticed) = self.first_turn;
        at <= first && noticed == Timeliness::Late
    }
}

// === impl Pause ===

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
    fn what_was_due_before_is_as_late_as_the_first_turn() {
        let start = Instant::now();
        let mut watch = LatenessTracker::new(start, Timeliness::OnTime);
        for turn in 1..=100 {
            assert_eq!(watch.lateness(start - 7 * MS), 7 * MS, "{turn}");
            assert!(!watch.was_stalled(start - 7 * MS));
            watch.next_turn(start + turn * 5 * MS);
        }
        let mut watch = LatenessTracker::new(start, Timeliness::Late);
        watch.next_turn(start + 5 * MS);
        assert!(watch.was_stalled(start));
        assert!(!watch.was_stalled(start + MS), "it works again");
    }

    #[test]
    fn what_falls_due_while_a_keeper_is_behind_is_late_until_clients_were_served_for_a_while() {
        let start = Instant::now();
        let mut watch = LatenessTracker::new(start, Timeliness::OnTime);
        watch.next_turn(start + 5 * MS);
        assert_eq!(watch.lateness(start + 2 * MS), 3 * MS);
        watch.next_turn(start + 10 * MS);
        assert_eq!(watch.lateness(start + 2 * MS), 8 * MS);
        assert_eq!(watch.lateness(start + 9 * MS), MS);
        // They are not served while the runtime stands still.
        let stall = 3_000 * MS;
        for turn in 0..38 {
            watch.next_turn(start + stall + turn * 5 * MS);
            assert_eq!(watch.lateness(start + 2 * MS), RECHECK_TOLERANCE, "{turn}");
        }
        watch.next_turn(start + stall + 200 * MS);
        assert_eq!(watch.lateness(start + 2 * MS), Duration::ZERO);
        assert_eq!(watch.lateness(start + stall + 150 * MS), RECHECK_TOLERANCE);
    }

    #[test]
    fn what_fell_due_while_the_runtime_stood_still_stays_late() {
        let start = Instant::now();
        let mut watch = LatenessTracker::new(start, Timeliness::OnTime);
        watch.next_turn(start + 5 * MS);
        watch.next_turn(start + 1_005 * MS);
        for turn in 1..=100 {
            assert_eq!(watch.lateness(start + 6 * MS), 999 * MS, "{turn}");
            assert!(
                watch.lateness(start + 5 * MS) <= RECHECK_TOLERANCE,
                "noticed"
            );
            watch.next_turn(start + (1_005 + turn) * MS);
        }
        assert_eq!(watch.lateness(start + 1_006 * MS), RECHECK_TOLERANCE);
    }

    /// Rather too late than in time.
    #[test]
    fn of_many_stalls_the_oldest_count_as_one() {
        let start = Instant::now();
        let mut watch = LatenessTracker::new(start, Timeliness::OnTime);
        let mut now = start;
        for _ in 0..MAX_STALLS + 3 {
            now += 100 * MS;
            watch.next_turn(now);
        }
        assert!(watch.stalls.len() <= MAX_STALLS);
        for stall in 0..u32::try_from(MAX_STALLS).unwrap() + 3 {
            let at = start + stall * 100 * MS + 10 * MS;
            assert!(watch.lateness(at) >= 90 * MS, "{stall}");
        }
    }
}
