//! Tracks whether a session is idle: its uses, and the time of the last one, under one lock. Replaces rmcp's timer
//! (`idle_session` in ARCHITECTURE.md, Workarounds).
//!
//! 1. A session is closed as idle only if it has had no use for the idle timeout. A closed session stays closed.
//! 2. If a [touch](IdleTracker::touch) and a close race, the first one to take the lock wins. Either the session stays open for
//!    the idle timeout, or the touch returns `false`.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;

use crate::lock::lock;

#[derive(Debug)]
pub(super) struct IdleTracker(Mutex<IdleState>);

/// A closed session has no uses and no last use, so it cannot be reopened.
#[derive(Debug)]
enum IdleState {
    Open {
        /// Number of current uses.
        uses: usize,
        last_use: Instant,
    },
    Closed,
}

// === impl IdleTracker ===

impl IdleTracker {
    /// Returns the tracker of a session that starts now, without uses.
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(IdleState::Open {
            uses: 0,
            last_use: now,
        }))
    }

    /// Restarts the idle timeout. Returns `false` if the session is closed.
    pub(super) fn touch(&self, now: Instant) -> bool {
        self.state().record_use(now, |uses| uses)
    }

    /// Begins a use. It does not reopen a closed session.
    pub(super) fn begin_use(&self) {
        if let IdleState::Open { uses, .. } = &mut *self.state() {
            *uses += 1;
        }
    }

    /// Ends a use, and restarts the idle timeout.
    pub(super) fn end_use(&self, now: Instant) {
        self.state().record_use(now, |uses| uses.saturating_sub(1));
    }

    /// Returns the minimum time that the session stays open. `None` if it is closed, or was idle for `time`.
    pub(super) fn time_left(&self, now: Instant, time: Duration) -> Option<Duration> {
        self.state().time_left(now, time)
    }

    /// Closes the session if it was idle for `time`. Otherwise returns the minimum time that it stays open.
    pub(super) fn close_if_idle(&self, now: Instant, time: Duration) -> Option<Duration> {
        let mut state = self.state();
        let left = state.time_left(now, time);
        if left.is_none() {
            *state = IdleState::Closed;
        }
        left
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(*self.state(), IdleState::Closed)
    }

    fn state(&self) -> MutexGuard<'_, IdleState> {
        lock(&self.0)
    }
}

// === impl IdleState ===

impl IdleState {
    /// Changes the number of uses. Returns `true` if the session is open.
    ///
    /// Two threads may read their times in one order and take the lock in the other, so the later time counts.
    fn record_use(&mut self, now: Instant, change: impl FnOnce(usize) -> usize) -> bool {
        match self {
            Self::Open { uses, last_use } => {
                *uses = change(*uses);
                *last_use = now.max(*last_use);
                true
            }
            Self::Closed => false,
        }
    }

    fn time_left(&self, now: Instant, time: Duration) -> Option<Duration> {
        match self {
            Self::Open { uses: 0, last_use } => {
                let left = time.saturating_sub(now.saturating_duration_since(*last_use));
                (!left.is_zero()).then_some(left)
            }
            Self::Open { .. } => Some(time),
            Self::Closed => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIME: Duration = ms(100);
    const TICK: Duration = ms(1);

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns a tracker, and when its session started.
    fn new() -> (IdleTracker, Instant) {
        let start = Instant::now();
        (IdleTracker::new(start), start)
    }

    #[test]
    fn a_session_without_uses_expires_after_its_timeout() {
        let (idle, start) = new();
        assert_eq!(idle.close_if_idle(start + ms(99), TIME), Some(TICK));
        assert_eq!(
            idle.time_left(start + TIME, TIME),
            None,
            "but it was not closed"
        );
        assert!(!idle.is_closed());
        assert_eq!(idle.close_if_idle(start + TIME, TIME), None);
        assert!(idle.is_closed());
    }

    #[test]
    fn a_touch_restarts_the_timeout() {
        let (idle, start) = new();
        assert!(idle.touch(start + ms(60)));
        assert_eq!(idle.close_if_idle(start + ms(159), TIME), Some(TICK));
        assert_eq!(idle.close_if_idle(start + ms(160), TIME), None);
    }

    #[test]
    fn a_touch_before_the_close_keeps_it_open_for_the_timeout() {
        let (idle, start) = new();
        assert!(idle.touch(start + TIME));
        assert_eq!(idle.close_if_idle(start + TIME, TIME), Some(TIME));
        assert!(!idle.is_closed());
    }

    #[test]
    fn a_touch_after_the_close_returns_false() {
        let (idle, start) = new();
        assert_eq!(idle.close_if_idle(start + TIME, TIME), None);
        assert!(!idle.touch(start + TIME));
        assert!(idle.is_closed());
        assert_eq!(idle.time_left(start + TIME, TIME), None);
    }

    /// A request as the session manager handles it: a touch, then a use until the response.
    #[test]
    fn a_session_is_open_at_each_step_of_a_request() {
        let steps: [fn(&IdleTracker, Instant); 3] = [
            |idle, start| assert!(idle.touch(start + TIME)),
            |idle, _| idle.begin_use(),
            |idle, start| idle.end_use(start + ms(101)),
        ];
        for closes_after in 1..=steps.len() {
            let (idle, start) = new();
            for (step, run) in steps.iter().enumerate() {
                run(&idle, start);
                if step + 1 == closes_after {
                    assert!(idle.close_if_idle(start + ms(101), TIME).is_some());
                }
            }
            assert_eq!(idle.time_left(start + ms(150), TIME), Some(ms(51)));
        }
    }

    #[test]
    fn a_use_keeps_it_open_while_other_uses_begin_and_end() {
        let (idle, start) = new();
        idle.begin_use();
        idle.begin_use();
        idle.end_use(start + ms(10));
        let second = start + ms(1_000);
        assert_eq!(idle.close_if_idle(second, TIME), Some(TIME));
        idle.end_use(second);
        assert_eq!(idle.close_if_idle(second + ms(99), TIME), Some(TICK));
        assert_eq!(idle.close_if_idle(second + TIME, TIME), None);
    }

    #[test]
    fn of_two_times_the_later_counts() {
        let (idle, start) = new();
        assert!(idle.touch(start + ms(60)));
        idle.begin_use();
        idle.end_use(start + ms(50));
        assert!(idle.touch(start + ms(40)));
        assert_eq!(idle.time_left(start + TIME, TIME), Some(ms(60)));
    }

    #[test]
    fn uses_after_the_close_change_nothing() {
        let (idle, start) = new();
        assert_eq!(idle.close_if_idle(start + TIME, TIME), None);
        idle.begin_use();
        assert_eq!(idle.close_if_idle(start + TIME, TIME), None);
        idle.end_use(start + ms(200));
        assert!(idle.is_closed());
        assert!(!idle.touch(start + ms(300)));
    }
}
