//! Whether another call may be tracked, and what is said when it may not.

use std::{
    mem,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::limits::{Limit, Limits};

/// How often a limit that is reached is logged: once a minute. A flood of calls is no flood of lines.
const SAID_EVERY: Duration = Duration::from_secs(60);

/// Whether there is room for another call. Asked without the registry's lock, so at the limit a few may slip in that
/// come at the same moment.
#[derive(Debug)]
pub(super) struct Room {
    in_flight: AtomicUsize,
    most: AtomicUsize,
    reached: Mutex<[Unsaid; Limit::ALL.len()]>,
    dropped: Mutex<Unsaid>,
}

/// How often something happened that was not said yet.
#[derive(Debug, Clone, Copy, Default)]
struct Unsaid {
    said_at: Option<Instant>,
    since: u64,
}

// === impl Room ===

impl Room {
    pub(super) fn new() -> Self {
        Self {
            in_flight: AtomicUsize::new(0),
            most: AtomicUsize::new(Limits::default().most(Limit::Calls)),
            reached: Mutex::default(),
            dropped: Mutex::default(),
        }
    }

    pub(super) fn set_limit(&self, most: usize) {
        self.most.store(most, Ordering::Relaxed);
    }

    /// So many calls are in flight now.
    pub(super) fn note(&self, in_flight: usize) {
        self.in_flight.store(in_flight, Ordering::Relaxed);
    }

    pub(super) fn is_for(&self, calls: usize) -> bool {
        let in_flight = self.in_flight.load(Ordering::Relaxed);
        in_flight.saturating_add(calls) <= self.most.load(Ordering::Relaxed)
    }

    /// A call met a limit. How many did since that was said last, if it is time to say so.
    pub(super) fn reached(&self, limit: Limit, now: Instant) -> Option<u64> {
        let mut reached = self.reached.lock().unwrap_or_else(PoisonError::into_inner);
        let of = Limit::ALL.iter().position(|one| *one == limit);
        reached.get_mut(of?)?.add(1, now)
    }

    /// Answers were dropped. How many were since that was said last, if it is time to say so.
    pub(super) fn dropped(&self, answers: usize, now: Instant) -> Option<u64> {
        let mut dropped = self.dropped.lock().unwrap_or_else(PoisonError::into_inner);
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
        let room = Room::new();
        let start = Instant::now();
        assert_eq!(room.reached(Limit::Detached, start), Some(1));
        for _ in 0..1_000 {
            let soon = start + SAID_EVERY - Duration::from_millis(1);
            assert_eq!(room.reached(Limit::Detached, soon), None);
        }
        assert_eq!(room.reached(Limit::Calls, start), Some(1), "another limit");
        let later = start + SAID_EVERY;
        assert_eq!(room.reached(Limit::Detached, later), Some(1_001));
        assert_eq!(room.reached(Limit::Detached, later), None);
    }

    #[test]
    fn answers_that_are_dropped_are_said_once_a_minute() {
        let room = Room::new();
        let start = Instant::now();
        assert_eq!(room.dropped(0, start), None);
        assert_eq!(room.dropped(3, start), Some(3));
        assert_eq!(room.dropped(4, start), None);
        assert_eq!(room.dropped(1, start + SAID_EVERY), Some(5));
    }

    #[test]
    fn there_is_room_up_to_the_limit_and_not_beyond() {
        let room = Room::new();
        room.set_limit(3);
        room.note(1);
        assert!(room.is_for(2));
        assert!(!room.is_for(3));
        room.note(3);
        assert!(!room.is_for(1));
        assert!(room.is_for(0));
        room.set_limit(usize::MAX);
        assert!(room.is_for(usize::MAX));
    }
}
