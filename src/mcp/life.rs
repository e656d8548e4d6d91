//! The life of a session: its uses, and the time of the last one, under one lock.
//!
//! 1. A session is closed only if nothing uses it and nothing has used it for its time. It then stays closed.
//! 2. Of a [touch](Life::touch) and a close, the first wins: the session stays open for its time, or the touch is told
//!    that it is closed.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;

use crate::lock::lock;

#[derive(Debug)]
pub(super) struct Life(Mutex<OpenOrClosed>);

/// A closed session has no uses and no last use, so nothing can bring it back.
#[derive(Debug)]
enum OpenOrClosed {
    Open {
        /// How many uses are under way.
        uses: usize,
        last_use: Instant,
    },
    Closed,
}

// === impl Life ===

impl Life {
    /// A session that starts now and is not used yet.
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(OpenOrClosed::Open {
            uses: 0,
            last_use: now,
        }))
    }

    /// Starts its time anew. `false` if it is closed.
    pub(super) fn touch(&self, now: Instant) -> bool {
        self.state().use_at(now, |uses| uses)
    }

    /// A use begins. It does not open a closed session.
    pub(super) fn begin(&self) {
        if let OpenOrClosed::Open { uses, .. } = &mut *self.state() {
            *uses += 1;
        }
    }

    /// A use ends, and the time starts anew.
    pub(super) fn end(&self, now: Instant) {
        self.state().use_at(now, |uses| uses.saturating_sub(1));
    }

    /// How long it stays open at least, if it may be idle for `time`. `None` if it is over.
    pub(super) fn left(&self, now: Instant, time: Duration) -> Option<Duration> {
        self.state().left(now, time)
    }

    /// Closes it if it was idle for `time`. Otherwise says how long it stays open at least.
    pub(super) fn close_if_idle(&self, now: Instant, time: Duration) -> Option<Duration> {
        let mut state = self.state();
        let left = state.left(now, time);
        if left.is_none() {
            *state = OpenOrClosed::Closed;
        }
        left
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(*self.state(), OpenOrClosed::Closed)
    }

    fn state(&self) -> MutexGuard<'_, OpenOrClosed> {
        lock(&self.0)
    }
}

// === impl OpenOrClosed ===

impl OpenOrClosed {
    /// Says whether it is open. Of the times that two threads read, the later one stays.
    fn use_at(&mut self, now: Instant, change: impl FnOnce(usize) -> usize) -> bool {
        match self {
            Self::Open { uses, last_use } => {
                *uses = change(*uses);
                *last_use = now.max(*last_use);
                true
            }
            Self::Closed => false,
        }
    }

    fn left(&self, now: Instant, time: Duration) -> Option<Duration> {
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

    /// A session, and when it started.
    fn new() -> (Life, Instant) {
        let start = Instant::now();
        (Life::new(start), start)
    }

    #[test]
    fn its_time_is_over_when_nothing_used_it_for_so_long() {
        let (life, start) = new();
        assert_eq!(life.close_if_idle(start + ms(99), TIME), Some(TICK));
        assert_eq!(life.left(start + TIME, TIME), None, "but nobody closed it");
        assert!(!life.is_closed());
        assert_eq!(life.close_if_idle(start + TIME, TIME), None);
        assert!(life.is_closed());
    }

    #[test]
    fn a_touch_starts_its_time_anew() {
        let (life, start) = new();
        assert!(life.touch(start + ms(60)));
        assert_eq!(life.close_if_idle(start + ms(159), TIME), Some(TICK));
        assert_eq!(life.close_if_idle(start + ms(160), TIME), None);
    }

    #[test]
    fn a_touch_that_comes_first_keeps_it_open_for_all_of_its_time() {
        let (life, start) = new();
        assert!(life.touch(start + TIME));
        assert_eq!(life.close_if_idle(start + TIME, TIME), Some(TIME));
        assert!(!life.is_closed());
    }

    #[test]
    fn a_touch_that_comes_too_late_says_so() {
        let (life, start) = new();
        assert_eq!(life.close_if_idle(start + TIME, TIME), None);
        assert!(!life.touch(start + TIME));
        assert!(life.is_closed());
        assert_eq!(life.left(start + TIME, TIME), None);
    }

    /// As the session manager does: touched, then in use until it is answered.
    #[test]
    fn a_request_is_never_closed_upon_at_any_of_its_steps() {
        let steps: [fn(&Life, Instant); 3] = [
            |life, start| assert!(life.touch(start + TIME)),
            |life, _| life.begin(),
            |life, start| life.end(start + ms(101)),
        ];
        for closes_after in 1..=steps.len() {
            let (life, start) = new();
            for (step, run) in steps.iter().enumerate() {
                run(&life, start);
                if step + 1 == closes_after {
                    assert!(life.close_if_idle(start + ms(101), TIME).is_some());
                }
            }
            assert_eq!(life.left(start + ms(150), TIME), Some(ms(51)));
        }
    }

    #[test]
    fn what_uses_it_keeps_it_however_long_and_whoever_else_comes_and_goes() {
        let (life, start) = new();
        life.begin();
        life.begin();
        life.end(start + ms(10));
        let second = start + ms(1_000);
        assert_eq!(life.close_if_idle(second, TIME), Some(TIME));
        life.end(second);
        assert_eq!(life.close_if_idle(second + ms(99), TIME), Some(TICK));
        assert_eq!(life.close_if_idle(second + TIME, TIME), None);
    }

    #[test]
    fn of_two_times_the_later_stays() {
        let (life, start) = new();
        assert!(life.touch(start + ms(60)));
        life.begin();
        life.end(start + ms(50));
        assert!(life.touch(start + ms(40)));
        assert_eq!(life.left(start + TIME, TIME), Some(ms(60)));
    }

    #[test]
    fn uses_after_its_end_change_nothing() {
        let (life, start) = new();
        assert_eq!(life.close_if_idle(start + TIME, TIME), None);
        life.begin();
        assert_eq!(life.close_if_idle(start + TIME, TIME), None);
        life.end(start + ms(200));
        assert!(life.is_closed());
        assert!(!life.touch(start + ms(300)));
    }
}
