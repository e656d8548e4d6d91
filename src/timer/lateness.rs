//! Lateness: how long after its time a keeper notices it, also while there is more to do than fits into one turn.
//!
//! A keeper does what is due in turns, and others are served in between. So it may come to something long after its
//! time, and yet its runtime never stood still. What counts as late is therefore the time until the first turn at which
//! the keeper could have come to it. Between two turns no more than [`ON_TIME`] apart nothing is later than that, and once
//! clients have been served for a [`GLANCE`] since, it is not late at all: those that were in time have been heard.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// When to look again at what was noticed late: after 100 ms, in which a runtime that is back hears its clients.
pub(crate) const GLANCE: Duration = Duration::from_millis(100);

/// How late such a second look may come itself: 20 ms.
pub(crate) const ON_TIME: Duration = Duration::from_millis(20);

/// How many stalls are told apart while a keeper is behind: 16. Of more, the oldest count as one.
const MAX_STALLS: usize = 16;

/// How it was noticed that a time has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Noticed {
    /// The keeper in charge noticed it on time.
    InTime,
    /// The keeper in charge noticed it some time after: clients that were in time may not be heard yet.
    Delayed,
    /// The runtime in charge stood still. Clients may wait there to be heard.
    Late,
}

/// What a keeper knows of time in one of its turns.
#[derive(Debug)]
pub(crate) struct Watch {
    now: Instant,
    /// When its first turn of those without a rest in between began, and how it noticed what was due by then.
    first: (Instant, Noticed),
    /// From one turn to the next, where that took too long.
    stalls: VecDeque<Pause>,
    /// From the last turn to this one.
    last: Pause,
    /// Clients have been served for a [`GLANCE`] since this turn.
    heard: Instant,
    /// The turn for which that is found out next, and for how long they have been served since.
    served: (Instant, Duration),
}

/// After one moment and up to another.
#[derive(Debug, Clone, Copy)]
struct Pause {
    from: Instant,
    to: Instant,
}

// === impl Watch ===

impl Watch {
    pub(crate) fn new(now: Instant, noticed: Noticed) -> Self {
        Self {
            now,
            first: (now, noticed),
            stalls: VecDeque::new(),
            last: Pause { from: now, to: now },
            heard: now,
            served: (now, Duration::ZERO),
        }
    }

    /// The keeper is behind, and goes on with its next turn.
    pub(crate) fn go_on(&mut self, now: Instant) {
        if self.last.length() > ON_TIME {
            if self.stalls.len() == MAX_STALLS
                && let Some(oldest) = self.stalls.pop_front()
            {
                self.first.0 = oldest.to;
            }
            self.stalls.push_back(self.last);
        }
        let from = self.now;
        self.last = Pause { from, to: now };
        self.now = now;
        self.serve();
    }

    /// Notes that clients were served since the last turn, unless the runtime stood still.
    fn serve(&mut self) {
        let (since, served) = &mut self.served;
        if self.last.length() <= ON_TIME {
            *served += self.last.length();
        }
        if *served >= GLANCE {
            self.heard = *since;
            self.served = (self.now, Duration::ZERO);
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.now
    }

    /// How late it was noticed that this time had come.
    pub(crate) fn late(&self, at: Instant) -> Duration {
        let (first, _) = self.first;
        let mut stalls = self.stalls.iter().chain([&self.last]);
        let stall = stalls.find(|stall| stall.has(at));
        let noticed = match stall {
            _ if at <= first => first,
            Some(stall) => stall.to,
            None if at <= self.heard => at,
            // It is not known any more.
            None => self.now.min(at + ON_TIME),
        };
        noticed.saturating_duration_since(at)
    }

    /// Whether it is known that the runtime in charge stood still when this time came.
    pub(crate) fn was_starved(&self, at: Instant) -> bool {
        let (first, noticed) = self.first;
        at <= first && noticed == Noticed::Late
    }
}

// === impl Pause ===

impl Pause {
    fn length(self) -> Duration {
        self.to.saturating_duration_since(self.from)
    }

    fn has(self, at: Instant) -> bool {
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
        let mut watch = Watch::new(start, Noticed::InTime);
        for turn in 1..=100 {
            assert_eq!(watch.late(start - 7 * MS), 7 * MS, "{turn}");
            assert!(!watch.was_starved(start - 7 * MS));
            watch.go_on(start + turn * 5 * MS);
        }
        let mut watch = Watch::new(start, Noticed::Late);
        watch.go_on(start + 5 * MS);
        assert!(watch.was_starved(start));
        assert!(!watch.was_starved(start + MS), "it works again");
    }

    #[test]
    fn what_falls_due_while_a_keeper_is_behind_is_late_until_clients_were_served_for_a_while() {
        let start = Instant::now();
        let mut watch = Watch::new(start, Noticed::InTime);
        watch.go_on(start + 5 * MS);
        assert_eq!(watch.late(start + 2 * MS), 3 * MS);
        watch.go_on(start + 10 * MS);
        assert_eq!(watch.late(start + 2 * MS), 8 * MS);
        assert_eq!(watch.late(start + 9 * MS), MS);
        // They are not served while the runtime stands still.
        let stall = 3_000 * MS;
        for turn in 0..38 {
            watch.go_on(start + stall + turn * 5 * MS);
            assert_eq!(watch.late(start + 2 * MS), ON_TIME, "{turn}");
        }
        watch.go_on(start + stall + 200 * MS);
        assert_eq!(watch.late(start + 2 * MS), Duration::ZERO);
        assert_eq!(watch.late(start + stall + 150 * MS), ON_TIME);
    }

    #[test]
    fn what_fell_due_while_the_runtime_stood_still_stays_late() {
        let start = Instant::now();
        let mut watch = Watch::new(start, Noticed::InTime);
        watch.go_on(start + 5 * MS);
        watch.go_on(start + 1_005 * MS);
        for turn in 1..=100 {
            assert_eq!(watch.late(start + 6 * MS), 999 * MS, "{turn}");
            assert!(watch.late(start + 5 * MS) <= ON_TIME, "noticed");
            watch.go_on(start + (1_005 + turn) * MS);
        }
        assert_eq!(watch.late(start + 1_006 * MS), ON_TIME);
    }

    /// Rather too late than in time.
    #[test]
    fn of_many_stalls_the_oldest_count_as_one() {
        let start = Instant::now();
        let mut watch = Watch::new(start, Noticed::InTime);
        let mut now = start;
        for _ in 0..MAX_STALLS + 3 {
            now += 100 * MS;
            watch.go_on(now);
        }
        assert!(watch.stalls.len() <= MAX_STALLS);
        for stall in 0..u32::try_from(MAX_STALLS).unwrap() + 3 {
            let at = start + stall * 100 * MS + 10 * MS;
            assert!(watch.late(at) >= 90 * MS, "{stall}");
        }
    }
}
