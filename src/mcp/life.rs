//! Whether a session is used, and when it was last: one word, so that it is never closed in between.
//!
//! 1. Closed is for ever, and comes only to a session that nothing uses and nothing has used for its time.
//! 2. Who [touches](Life::touch) it first keeps it open for its time; who comes second is told that it is
//!    closed.
//!
//! Times are milliseconds since whatever the session counts from.

#[cfg(not(loom))]
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

#[cfg(loom)]
use loom::sync::atomic::{AtomicU64, Ordering};

/// The highest bit: closed. The lowest: how many uses are under way, 16 million at most. Between them, in
/// milliseconds, when the last one was: 17 years at most.
#[derive(Debug)]
pub(super) struct Life(AtomicU64);

const CLOSED: u64 = 1 << 63;
const USES: u64 = (1 << USES_BITS) - 1;
const USES_BITS: u32 = 24;
const LATEST: u64 = (CLOSED - 1) >> USES_BITS;

// === impl Life ===

impl Life {
    /// Not used yet. Its time starts at 0.
    pub(super) fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    /// Starts its time anew. `false` if it is closed.
    pub(super) fn touch(&self, now: u64) -> bool {
        self.change(|word| Some(used_at(word, now)))
    }

    /// Something uses it from now on.
    pub(super) fn begin(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Something that used it does no more: its time starts.
    pub(super) fn end(&self, now: u64) {
        let (Ok(_) | Err(_)) = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Relaxed, |word| {
                Some(used_at(word.saturating_sub(1), now))
            });
    }

    /// How long it stays open at least, if it may be idle for `time`. `None` if it is over.
    pub(super) fn left(&self, now: u64, time: Duration) -> Option<Duration> {
        left(self.0.load(Ordering::Acquire), now, time)
    }

    /// Closes it if it was idle for `time`, and says how long it stays open otherwise.
    pub(super) fn close_if_idle(&self, now: u64, time: Duration) -> Option<Duration> {
        let mut lives = None;
        // What it finds closed stays so.
        let _found_open = self.change(|word| {
            lives = left(word, now, time);
            lives.is_none().then_some(word | CLOSED)
        });
        lives
    }

    pub(super) fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & CLOSED > 0
    }

    /// Says whether it was open.
    fn change(&self, mut change: impl FnMut(u64) -> Option<u64>) -> bool {
        let changed = self
            .0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |word| {
                match word & CLOSED {
                    0 => change(word),
                    _ => None,
                }
            });
        let (Ok(before) | Err(before)) = changed;
        before & CLOSED == 0
    }
}

fn left(word: u64, now: u64, time: Duration) -> Option<Duration> {
    if word & CLOSED > 0 {
        return None;
    }
    if word & USES > 0 {
        return Some(time);
    }
    let millis = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let left = last_use(word).saturating_add(millis).saturating_sub(now);
    (left > 0).then(|| Duration::from_millis(left))
}

/// The word, if its session was used at `now`. Clocks of two threads may differ: the later time stays.
fn used_at(word: u64, now: u64) -> u64 {
    let last = now.max(last_use(word)).min(LATEST);
    word & (CLOSED | USES) | last << USES_BITS
}

fn last_use(word: u64) -> u64 {
    (word & !CLOSED) >> USES_BITS
}

// `tests/loom` takes this file into a crate of its own.
#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const TIME: Duration = Duration::from_millis(100);
    const TICK: Duration = Duration::from_millis(1);

    #[test]
    fn its_time_is_over_when_nothing_used_it_for_so_long() {
        let life = Life::new();
        let early = life.close_if_idle(99, TIME);
        assert_eq!(early, Some(TICK));
        assert_eq!(life.left(100, TIME), None, "but nobody closed it");
        assert!(!life.is_closed());
        assert_eq!(life.close_if_idle(100, TIME), None);
        assert!(life.is_closed());
    }

    #[test]
    fn a_touch_starts_its_time_anew() {
        let life = Life::new();
        assert!(life.touch(60));
        let early = life.close_if_idle(159, TIME);
        assert_eq!(early, Some(TICK));
        assert_eq!(life.close_if_idle(160, TIME), None);
    }

    #[test]
    fn a_touch_that_comes_too_late_says_so() {
        let life = Life::new();
        assert_eq!(life.close_if_idle(100, TIME), None);
        assert!(!life.touch(100));
        assert!(life.is_closed());
    }

    #[test]
    fn what_uses_it_keeps_it_however_long() {
        let life = Life::new();
        life.begin();
        life.begin();
        life.end(10);
        assert_eq!(life.close_if_idle(1_000, TIME), Some(TIME));
        life.end(1_000);
        let early = life.close_if_idle(1_099, TIME);
        assert_eq!(early, Some(TICK));
        assert_eq!(life.close_if_idle(1_100, TIME), None);
    }

    #[test]
    fn an_older_time_does_not_count() {
        let life = Life::new();
        assert!(life.touch(50));
        assert!(life.touch(40));
        assert_eq!(last_use(life.0.load(Ordering::Relaxed)), 50);
    }

    #[test]
    fn uses_after_its_end_change_nothing() {
        let life = Life::new();
        assert_eq!(life.close_if_idle(100, TIME), None);
        life.begin();
        assert_eq!(life.close_if_idle(100, TIME), None);
        life.end(200);
        assert!(life.is_closed());
        assert!(!life.touch(300));
    }

    #[test]
    fn a_time_beyond_what_it_can_count_stays_within_its_bits() {
        let life = Life::new();
        life.begin();
        assert!(life.touch(u64::MAX));
        assert!(!life.is_closed());
        life.end(u64::MAX);
        assert_eq!(life.0.load(Ordering::Relaxed) & USES, 0);
    }
}
