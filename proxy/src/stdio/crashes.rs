//! A count of failed starts, after which sessions are refused for a while.

use std::{collections::VecDeque, time::Duration};

use tokio::time::Instant;

/// So many crashes within a [`PERIOD`] are too many: 3.
const TOO_MANY: usize = 3;

const PERIOD: Duration = Duration::from_secs(10);

/// The latest crashes. What counts is a server that ended before it answered anything: one that ends later does so because of
/// what a client asked, and other clients must not suffer from that.
#[derive(Debug, Default)]
pub(super) struct Crashes(VecDeque<Instant>);

// === impl Crashes ===

impl Crashes {
    pub(super) fn add(&mut self, now: Instant) {
        if self.0.len() == TOO_MANY {
            self.0.pop_front();
        }
        self.0.push_back(now);
    }

    /// How long no server is started, if there were too many.
    pub(super) fn wait(&self, now: Instant) -> Option<Duration> {
        let first = self.0.front().filter(|_| self.0.len() == TOO_MANY)?;
        let last = self.0.back()?;
        let is_often = *last < *first + PERIOD;
        let until = *last + PERIOD;
        (is_often && now < until).then(|| until - now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_third_crash_in_ten_seconds_is_one_too_many() {
        let (mut crashes, now) = (Crashes::default(), Instant::now());
        crashes.add(now);
        crashes.add(now + SECOND);
        assert_eq!(crashes.wait(now + SECOND), None);
        crashes.add(now + SECOND * 9);
        assert_eq!(crashes.wait(now + SECOND * 9), Some(PERIOD));
        assert_eq!(crashes.wait(now + SECOND * 18), Some(SECOND));
        assert_eq!(crashes.wait(now + SECOND * 19), None);
        crashes.add(now + SECOND * 19);
        assert_eq!(crashes.wait(now + SECOND * 19), None, "only two are recent");
    }

    #[test]
    fn rare_crashes_do_not_add_up() {
        let (mut crashes, now) = (Crashes::default(), Instant::now());
        for crash in 0..10 {
            crashes.add(now + SECOND * 6 * crash);
            assert_eq!(crashes.wait(now + SECOND * 6 * crash), None);
        }
    }
}
