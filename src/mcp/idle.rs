//! Determines when a session is idle, based on its current uses and the time of its last use.
//!
//! Both are behind a single lock. The tracker replaces rmcp's own timer (`idle_session` in ARCHITECTURE.md, Workarounds).
//!
//! 1. A session is closed for being idle only after a full timeout without any use. Once closed, it stays closed.
//! 2. When a [touch](IdleTracker::touch) and a close race, whichever takes the lock first wins: either the session stays open for
//!    another idle timeout, or the touch returns `false`.
//! 3. A client is considered lost from the moment it disconnects from its last stream until its next request. Streams are
//!    counted, because the disconnect from an old stream might go unnoticed until after the client has resumed.
//! 4. Once a client has disconnected from a call that might keep running unobserved, the client is never considered lost again,
//!    because closing the session could end the call's handler.

use std::{
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use tokio::time::Instant;

use crate::lock::lock;

/// Tracks a session's uses and its client's streams.
#[derive(Debug)]
pub(super) struct IdleTracker(Mutex<IdleState>);

/// A closed session has neither uses nor a last use, so nothing can reopen it.
#[derive(Debug)]
enum IdleState {
    Open {
        uses: usize,
        last_use: Instant,
        /// Number of streams the client is reading.
        streams: usize,
        is_lost: bool,
        /// Whether the client has disconnected from an untracked call, which might still be running. Never reset.
        has_unobserved_call: bool,
    },
    Closed {
        /// Whether the lost timeout closed the session.
        is_lost: bool,
    },
}

/// Why a client is no longer reading a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientStreamEnd {
    /// The server has ended the stream, or the client has received what it was waiting for.
    Ended,
    /// The client has disconnected.
    Disconnected,
    /// The client has disconnected from a call that might keep running unobserved.
    Unobserved,
}

/// How long an unused session stays open. `None` means no limit.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct IdleTimeouts {
    pub(super) idle: Option<Duration>,
    /// How long an unused session stays open while its client is lost.
    pub(super) lost: Option<Duration>,
    /// Whether to ignore standalone streams instead of counting them as uses.
    pub(super) ignore_standalone_streams: bool,
}

// === impl IdleTracker ===

impl IdleTracker {
    /// Creates a tracker for an unused session starting now.
    pub(super) fn new(now: Instant) -> Self {
        Self(Mutex::new(IdleState::Open {
            uses: 0,
            last_use: now,
            streams: 0,
            is_lost: false,
            has_unobserved_call: false,
        }))
    }

    /// Records a request, which restarts the idle timeout. Returns `false` if the session is already closed.
    pub(super) fn touch(&self, now: Instant) -> bool {
        let mut state = self.state();
        if let IdleState::Open { is_lost, .. } = &mut *state {
            *is_lost = false;
        }
        state.record_use(now, |uses| uses)
    }

    /// Restarts the idle timeout without a request.
    pub(super) fn extend(&self, now: Instant) {
        self.state().record_use(now, |uses| uses);
    }

    /// Records that the client has started reading another stream.
    pub(super) fn begin_stream(&self) {
        if let IdleState::Open {
            streams, is_lost, ..
        } = &mut *self.state()
        {
            *streams += 1;
            // The client is connected, even if the server only notices afterwards that an older stream has been closed.
            *is_lost = false;
        }
    }

    /// Records that the client has stopped reading a stream. Returns `true` if this starts the lost timeout.
    pub(super) fn end_stream(&self, end: ClientStreamEnd, now: Instant) -> bool {
        let mut state = self.state();
        if let IdleState::Open {
            last_use,
            streams,
            is_lost,
            has_unobserved_call,
            ..
        } = &mut *state
        {
            *streams = streams.saturating_sub(1);
            *has_unobserved_call |= end == ClientStreamEnd::Unobserved;
            if end == ClientStreamEnd::Disconnected && *streams == 0 && !*has_unobserved_call {
                *is_lost = true;
                // Restart the timeout here, too: if the stream does not count as a use, nothing else restarts it.
                *last_use = now.max(*last_use);
                return state.is_abandoned();
            }
        }
        false
    }

    /// Begins a use, unless the session is already closed.
    pub(super) fn begin_use(&self) {
        if let IdleState::Open { uses, .. } = &mut *self.state() {
            *uses += 1;
        }
    }

    /// Ends a use and restarts the idle timeout. Returns `true` if this starts the lost timeout.
    pub(super) fn end_use(&self, now: Instant) -> bool {
        let mut state = self.state();
        state.record_use(now, |uses| uses.saturating_sub(1));
        state.is_abandoned()
    }

    /// Returns the minimum time for which the session will stay open.
    ///
    /// Returns `None` if it is already closed or its timeout has expired.
    pub(super) fn time_left(&self, now: Instant, timeouts: IdleTimeouts) -> Option<Duration> {
        self.state().time_left(now, timeouts)
    }

    /// Closes the session if its timeout has expired.
    ///
    /// Otherwise, returns the minimum time for which it will stay open.
    pub(super) fn close_if_idle(&self, now: Instant, timeouts: IdleTimeouts) -> Option<Duration> {
        let mut state = self.state();
        let left = state.time_left(now, timeouts);
        if left.is_none() {
            let is_lost = state.is_lost() && timeouts.lost_is_shorter();
            *state = IdleState::Closed { is_lost };
        }
        left
    }

    pub(super) fn is_closed(&self) -> bool {
        matches!(*self.state(), IdleState::Closed { .. })
    }

    /// Returns `true` if the client is lost, or if that is why the session was closed.
    pub(super) fn is_lost(&self) -> bool {
        self.state().is_lost()
    }

    fn state(&self) -> MutexGuard<'_, IdleState> {
        lock(&self.0)
    }
}

// === impl IdleState ===

impl IdleState {
    /// Updates the number of uses and the last use. Returns `true` if the session is open.
    ///
    /// Two threads might read the clock in one order and take the lock in the other, so the later time wins.
    fn record_use(&mut self, now: Instant, change: impl FnOnce(usize) -> usize) -> bool {
        match self {
            Self::Open { uses, last_use, .. } => {
                *uses = change(*uses);
                *last_use = now.max(*last_use);
                true
            }
            Self::Closed { .. } => false,
        }
    }

    fn time_left(&self, now: Instant, timeouts: IdleTimeouts) -> Option<Duration> {
        let Self::Open {
            uses,
            last_use,
            is_lost,
            ..
        } = self
        else {
            return None;
        };
        // While the session is in use, there is no need to check for the lost timeout, which only starts when the last use ends.
        let next_check = timeouts.idle.unwrap_or(Duration::MAX);
        match timeouts.effective(*is_lost) {
            Some(timeout) if *uses == 0 => {
                let left = timeout.saturating_sub(now.saturating_duration_since(*last_use));
                (!left.is_zero()).then_some(left)
            }
            _ => Some(next_check),
        }
    }

    fn is_lost(&self) -> bool {
        match self {
            Self::Open { is_lost, .. } | Self::Closed { is_lost } => *is_lost,
        }
    }

    /// Returns `true` if the client is lost and nothing is using the session any more.
    fn is_abandoned(&self) -> bool {
        matches!(
            self,
            Self::Open {
                uses: 0,
                is_lost: true,
                ..
            }
        )
    }
}

// === impl IdleTimeouts ===

impl IdleTimeouts {
    pub(super) fn shortest(self) -> Option<Duration> {
        [self.idle, self.lost].into_iter().flatten().min()
    }

    fn lost_is_shorter(self) -> bool {
        self.lost
            .is_some_and(|lost| self.idle.is_none_or(|idle| lost < idle))
    }

    /// Returns the timeout that applies to an unused session.
    fn effective(self, is_lost: bool) -> Option<Duration> {
        if is_lost { self.shortest() } else { self.idle }
    }

    /// Raises each timeout to at least `min`.
    pub(super) fn at_least(self, min: Duration) -> Self {
        Self {
            idle: self.idle.map(|timeout| timeout.max(min)),
            lost: self.lost.map(|timeout| timeout.max(min)),
            ..self
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE_ONLY: IdleTimeouts = IdleTimeouts {
        idle: Some(ms(100)),
        lost: None,
        ignore_standalone_streams: false,
    };
    const TICK: Duration = ms(1);

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns a tracker and the time at which its session started.
    fn tracker() -> (IdleTracker, Instant) {
        let start = Instant::now();
        (IdleTracker::new(start), start)
    }

    #[test]
    fn a_session_without_uses_expires_after_its_timeout() {
        let (idle, start) = tracker();
        assert_eq!(idle.close_if_idle(start + ms(99), IDLE_ONLY), Some(TICK));
        assert_eq!(
            idle.time_left(start + ms(100), IDLE_ONLY),
            None,
            "it has expired, but it has not been closed yet"
        );
        assert!(!idle.is_closed());
        assert_eq!(idle.close_if_idle(start + ms(100), IDLE_ONLY), None);
        assert!(idle.is_closed());
    }

    #[test]
    fn a_touch_restarts_the_timeout() {
        let (idle, start) = tracker();
        assert!(idle.touch(start + ms(60)));
        assert_eq!(idle.close_if_idle(start + ms(159), IDLE_ONLY), Some(TICK));
        assert_eq!(idle.close_if_idle(start + ms(160), IDLE_ONLY), None);
    }

    #[test]
    fn a_touch_before_the_close_keeps_the_session_open_for_the_timeout() {
        let (idle, start) = tracker();
        assert!(idle.touch(start + ms(100)));
        assert_eq!(
            idle.close_if_idle(start + ms(100), IDLE_ONLY),
            Some(ms(100))
        );
        assert!(!idle.is_closed());
    }

    #[test]
    fn a_touch_after_the_close_returns_false() {
        let (idle, start) = tracker();
        assert_eq!(idle.close_if_idle(start + ms(100), IDLE_ONLY), None);
        assert!(!idle.touch(start + ms(100)));
        assert!(idle.is_closed());
        assert_eq!(idle.time_left(start + ms(100), IDLE_ONLY), None);
    }

    /// The steps of a request in the session manager: a touch, then a use until the response.
    #[test]
    fn a_session_is_open_at_each_step_of_a_request() {
        let steps: [fn(&IdleTracker, Instant); 3] = [
            |idle, start| assert!(idle.touch(start + ms(100))),
            |idle, _| idle.begin_use(),
            |idle, start| assert!(!idle.end_use(start + ms(101))),
        ];
        for steps_before_close in 1..=steps.len() {
            let (idle, start) = tracker();
            for (step, run) in steps.iter().enumerate() {
                run(&idle, start);
                if step + 1 == steps_before_close {
                    assert!(idle.close_if_idle(start + ms(101), IDLE_ONLY).is_some());
                }
            }
            assert_eq!(idle.time_left(start + ms(150), IDLE_ONLY), Some(ms(51)));
        }
    }

    #[test]
    fn a_use_keeps_the_session_open_while_other_uses_begin_and_end() {
        let (idle, start) = tracker();
        idle.begin_use();
        idle.begin_use();
        idle.end_use(start + ms(10));
        let second = start + ms(1_000);
        assert_eq!(idle.close_if_idle(second, IDLE_ONLY), Some(ms(100)));
        idle.end_use(second);
        assert_eq!(idle.close_if_idle(second + ms(99), IDLE_ONLY), Some(TICK));
        assert_eq!(idle.close_if_idle(second + ms(100), IDLE_ONLY), None);
    }

    #[test]
    fn the_later_of_two_use_times_counts() {
        let (idle, start) = tracker();
        assert!(idle.touch(start + ms(60)));
        idle.begin_use();
        idle.end_use(start + ms(50));
        assert!(idle.touch(start + ms(40)));
        assert_eq!(idle.time_left(start + ms(100), IDLE_ONLY), Some(ms(60)));
    }

    #[test]
    fn uses_after_the_close_change_nothing() {
        let (idle, start) = tracker();
        assert_eq!(idle.close_if_idle(start + ms(100), IDLE_ONLY), None);
        idle.begin_use();
        assert_eq!(idle.close_if_idle(start + ms(100), IDLE_ONLY), None);
        idle.end_use(start + ms(200));
        assert!(idle.is_closed());
        assert!(!idle.touch(start + ms(300)));
    }

    const BOTH_TIMEOUTS: IdleTimeouts = IdleTimeouts {
        lost: Some(ms(10)),
        ..IDLE_ONLY
    };

    #[test]
    fn a_lost_client_has_the_lost_timeout_until_its_next_request() {
        for timeouts in [
            BOTH_TIMEOUTS,
            IdleTimeouts {
                idle: None,
                ..BOTH_TIMEOUTS
            },
        ] {
            let (idle, start) = tracker();
            assert!(idle.time_left(start + ms(50), timeouts).is_some());
            idle.begin_stream();
            idle.end_stream(ClientStreamEnd::Disconnected, start);
            assert_eq!(idle.time_left(start + ms(50), timeouts), None);
            assert_eq!(idle.close_if_idle(start + ms(9), timeouts), Some(TICK));
            idle.begin_use();
            assert!(idle.close_if_idle(start + ms(50), timeouts).is_some());
            assert!(idle.end_use(start + ms(50)));
            idle.extend(start + ms(60));
            assert_eq!(idle.time_left(start + ms(69), timeouts), Some(TICK));
            assert!(idle.touch(start + ms(70)));
            assert!(idle.close_if_idle(start + ms(90), timeouts).is_some());
            idle.begin_stream();
            idle.end_stream(ClientStreamEnd::Disconnected, start);
            assert_eq!(idle.close_if_idle(start + ms(90), timeouts), None);
            idle.end_stream(ClientStreamEnd::Disconnected, start);
            assert!(idle.is_closed());
        }
    }

    #[test]
    fn a_client_is_lost_only_with_its_last_stream_and_only_if_it_disconnects() {
        let (idle, start) = tracker();
        idle.begin_stream();
        // The client resumed before its old connection was found to be closed.
        idle.begin_stream();
        idle.end_stream(ClientStreamEnd::Disconnected, start);
        idle.end_stream(ClientStreamEnd::Ended, start);
        assert!(idle.time_left(start + ms(50), BOTH_TIMEOUTS).is_some());
        idle.begin_stream();
        idle.end_stream(ClientStreamEnd::Disconnected, start);
        assert_eq!(idle.time_left(start + ms(50), BOTH_TIMEOUTS), None);
        assert!(idle.time_left(start + ms(50), IDLE_ONLY).is_some());
        idle.begin_stream();
        idle.end_stream(ClientStreamEnd::Ended, start);
        assert!(idle.time_left(start + ms(50), BOTH_TIMEOUTS).is_some());
    }

    #[test]
    fn a_client_that_left_an_unobserved_call_is_never_lost() {
        let (idle, start) = tracker();
        idle.begin_stream();
        idle.begin_stream();
        idle.end_stream(ClientStreamEnd::Unobserved, start);
        idle.end_stream(ClientStreamEnd::Disconnected, start);
        assert!(idle.time_left(start + ms(50), BOTH_TIMEOUTS).is_some());
        assert!(idle.touch(start));
        idle.begin_stream();
        idle.end_stream(ClientStreamEnd::Disconnected, start);
        assert!(idle.time_left(start + ms(50), BOTH_TIMEOUTS).is_some());
        assert_eq!(idle.time_left(start + ms(100), BOTH_TIMEOUTS), None);
    }
}
