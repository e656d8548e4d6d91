//! Decides what a disconnect means for a call.
//!
//! [`Grace::Auto`] follows the table in [`manual::disconnect`](crate::manual::disconnect), which a test checks against this module. Its
//! rows for tasks and subscriptions apply to every grace period. Otherwise:
//!
//! - [`Grace::AutoAfter`] follows the table too, and only changes how long a call waits.
//! - [`Grace::Immediate`] follows the table if the server has ended the stream, and otherwise cancels the call at once.
//! - [`Grace::After`] and [`Grace::Never`] replace the other rows altogether.

use std::time::Duration;

use crate::{
    call::{CallInfo, LISTEN},
    policy::{Grace, MIN_GRACE},
};

/// Cap on the `retry` used for a default grace period, because a server can send any value.
const MAX_RETRY: Duration = Duration::from_secs(600);

/// Maximum allowance for network delays on top of `retry`. A shorter `retry` is simply doubled.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// What is known about a call's stream when it ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct StreamEnd {
    /// Whether the stream has carried an event id, which its client can use to resume it.
    pub(crate) replayable: bool,
    /// The server's `retry`: how long the client waits before resuming.
    pub(crate) retry: Option<Duration>,
    /// Whether the server ended the stream.
    pub(crate) by_server: bool,
    /// Whether the stream's events are in a store that may be shared with other servers.
    pub(crate) stored: bool,
}

/// What to do with a call whose stream has just ended before the answer was delivered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DisconnectAction {
    CancelNow,
    CancelAfter(Duration),
    KeepRunning,
}

// === impl StreamEnd ===

impl StreamEnd {
    /// Returns `true` if the client may resume on another server, unnoticed by this server.
    pub(crate) fn may_be_resumed_elsewhere(self, call: &CallInfo) -> bool {
        // Without a session, only an event store issues event ids.
        let without_session = call.session().is_none() && !call.is_cancelled_on_disconnect();
        self.replayable && (self.stored || without_session)
    }

    /// Returns the resume window of a call that keeps running.
    pub(crate) fn resume_window(self) -> Duration {
        if self.replayable {
            default_grace(self.retry)
        } else {
            Duration::ZERO
        }
    }

    /// Returns how long a client that honours `retry` takes to resume, or zero if it cannot.
    fn retry_delay(self) -> Duration {
        retry_delay(self.retry.filter(|_| self.replayable))
    }
}

// === impl DisconnectAction ===

impl DisconnectAction {
    /// Returns the call's resume window under this action.
    pub(crate) fn resume_window(self, stream_end: StreamEnd) -> Duration {
        match self {
            Self::CancelNow => Duration::ZERO,
            Self::CancelAfter(grace) => grace,
            Self::KeepRunning => stream_end.resume_window(),
        }
    }
}

// === impl Grace ===

impl Grace {
    /// Returns the longest resume window that [`decide`](Self::decide) can result in.
    pub(crate) fn max_grace(self, retry: Option<Duration>) -> Duration {
        match self {
            Self::After(grace) | Self::AutoAfter(grace) => grace.max(default_grace(retry)),
            Self::Auto | Self::Immediate | Self::Never => default_grace(retry),
        }
    }

    /// Decides what to do with a call whose stream ended before the answer was delivered.
    pub(crate) fn decide(self, call: &CallInfo, stream_end: StreamEnd) -> DisconnectAction {
        if call.is_task() {
            return DisconnectAction::KeepRunning;
        }
        if call.method() == LISTEN {
            return DisconnectAction::CancelNow;
        }
        match self {
            Self::Auto => decide_auto(call, stream_end),
            Self::Immediate if stream_end.by_server => decide_auto(call, stream_end),
            Self::Immediate => DisconnectAction::CancelNow,
            Self::AutoAfter(grace) => match decide_auto(call, stream_end) {
                DisconnectAction::CancelAfter(_) => {
                    DisconnectAction::CancelAfter(grace.max(stream_end.retry_delay()))
                }
                action => action,
            },
            Self::After(grace) => {
                DisconnectAction::CancelAfter(grace.max(stream_end.retry_delay()))
            }
            Self::Never => DisconnectAction::KeepRunning,
        }
    }
}

/// Returns the default grace period for a client that can resume.
fn default_grace(retry: Option<Duration>) -> Duration {
    let capped_retry = retry.unwrap_or_default().min(MAX_RETRY);
    let attempts = 5 * capped_retry + Duration::from_secs(5);
    // Even a `retry` beyond the cap counts once, so that the client can resume.
    MIN_GRACE.max(attempts).max(retry_delay(retry))
}

/// Returns how long a client that honours `retry` takes to resume.
fn retry_delay(retry: Option<Duration>) -> Duration {
    let retry = retry.unwrap_or_default();
    retry.saturating_add(retry.min(MAX_DELAY))
}

/// Applies [`Grace::Auto`] to a call that is neither a task nor a subscription.
fn decide_auto(call: &CallInfo, stream_end: StreamEnd) -> DisconnectAction {
    if call.is_cancelled_on_disconnect() || !stream_end.replayable {
        // If the server has ended the stream, the client has not disconnected.
        return if stream_end.by_server {
            DisconnectAction::KeepRunning
        } else {
            DisconnectAction::CancelNow
        };
    }
    if stream_end.may_be_resumed_elsewhere(call) {
        return DisconnectAction::KeepRunning;
    }
    DisconnectAction::CancelAfter(default_grace(stream_end.retry))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::RequestId;

    const SECOND: Duration = Duration::from_secs(1);

    const STREAMING: StreamEnd = StreamEnd {
        replayable: true,
        retry: Some(Duration::from_secs(3)),
        by_server: false,
        stored: false,
    };

    fn call(method: &str, session: bool) -> CallInfo {
        let mut call = CallInfo::new(RequestId::Number(1), method);
        call.set_session(session.then(|| "s".into()));
        call
    }

    fn auto(stream_end: StreamEnd) -> DisconnectAction {
        Grace::Auto.decide(&call("tools/call", true), stream_end)
    }

    #[test]
    fn auto_waits_only_for_a_client_that_can_resume() {
        assert_eq!(auto(STREAMING), DisconnectAction::CancelAfter(MIN_GRACE));
        let silent = StreamEnd {
            replayable: false,
            ..STREAMING
        };
        assert_eq!(auto(silent), DisconnectAction::CancelNow);
        let stateless = call("tools/call", false);
        assert_eq!(
            Grace::Auto.decide(&stateless, silent),
            DisconnectAction::CancelNow
        );
    }

    #[test]
    fn auto_does_not_wait_from_2026_07_28_on() {
        let mut call = call("tools/call", false);
        call.set_cancelled_on_disconnect(true);
        assert_eq!(
            Grace::Auto.decide(&call, STREAMING),
            DisconnectAction::CancelNow
        );
        let ended = StreamEnd {
            by_server: true,
            ..STREAMING
        };
        assert_eq!(
            Grace::Auto.decide(&call, ended),
            DisconnectAction::KeepRunning
        );
    }

    #[test]
    fn auto_after_changes_the_grace_and_nothing_else() {
        let after = |session, stream_end| {
            Grace::AutoAfter(9 * SECOND).decide(&call("tools/call", session), stream_end)
        };
        let lost = StreamEnd {
            replayable: false,
            ..STREAMING
        };
        let ended = StreamEnd {
            by_server: true,
            ..lost
        };
        assert_eq!(
            after(true, STREAMING),
            DisconnectAction::CancelAfter(9 * SECOND)
        );
        for (session, stream_end) in [
            (true, lost),
            (false, lost),
            (true, ended),
            (false, STREAMING),
        ] {
            let as_auto = Grace::Auto.decide(&call("tools/call", session), stream_end);
            assert_eq!(after(session, stream_end), as_auto, "{stream_end:?}");
        }
    }

    #[test]
    fn auto_gives_a_slow_client_five_times_its_retry() {
        let retry = |seconds| StreamEnd {
            retry: Some(seconds * SECOND),
            ..STREAMING
        };
        assert_eq!(auto(retry(0)), DisconnectAction::CancelAfter(MIN_GRACE));
        assert_eq!(auto(retry(10)), DisconnectAction::CancelAfter(55 * SECOND));
        assert_eq!(
            auto(retry(3_000)),
            DisconnectAction::CancelAfter(3005 * SECOND)
        );
        // Even a longer `retry` counts once, so that the client can resume.
        assert_eq!(
            auto(retry(4_000)),
            DisconnectAction::CancelAfter(4005 * SECOND)
        );
        assert_eq!(
            auto(StreamEnd {
                retry: None,
                ..STREAMING
            }),
            DisconnectAction::CancelAfter(MIN_GRACE)
        );
    }

    #[test]
    fn auto_does_not_count_a_stream_ended_by_the_server_as_a_disconnect() {
        let ended = StreamEnd {
            by_server: true,
            replayable: false,
            ..STREAMING
        };
        assert_eq!(auto(ended), DisconnectAction::KeepRunning);
        let stateless = call("tools/call", false);
        let ended = StreamEnd {
            by_server: true,
            ..STREAMING
        };
        assert_eq!(
            Grace::Auto.decide(&stateless, ended),
            DisconnectAction::KeepRunning
        );
    }

    #[test]
    fn auto_keeps_calls_running_that_may_be_resumed_elsewhere() {
        assert_eq!(
            auto(StreamEnd {
                stored: true,
                ..STREAMING
            }),
            DisconnectAction::KeepRunning
        );
        // Without a session, only an event store issues event ids.
        let stateless = call("tools/call", false);
        assert_eq!(
            Grace::Auto.decide(&stateless, STREAMING),
            DisconnectAction::KeepRunning
        );
        assert_eq!(
            Grace::Immediate.decide(&stateless, STREAMING),
            DisconnectAction::CancelNow
        );
        let after = Grace::After(9 * SECOND).decide(&stateless, STREAMING);
        assert_eq!(after, DisconnectAction::CancelAfter(9 * SECOND));
    }

    #[test]
    fn a_disconnect_cancels_a_subscription_but_never_a_task() {
        for grace in [
            Grace::Auto,
            Grace::Immediate,
            Grace::After(SECOND),
            Grace::Never,
        ] {
            let listen = call("subscriptions/listen", false);
            assert_eq!(
                grace.decide(&listen, STREAMING),
                DisconnectAction::CancelNow
            );
            let mut task = call("tools/call", true);
            task.set_task(true);
            assert_eq!(
                grace.decide(&task, STREAMING),
                DisconnectAction::KeepRunning
            );
        }
    }

    #[test]
    fn an_explicit_grace_replaces_the_table() {
        let call = call("tools/call", false);
        assert_eq!(
            Grace::After(9 * SECOND).decide(&call, STREAMING),
            DisconnectAction::CancelAfter(9 * SECOND)
        );
        assert_eq!(
            Grace::Never.decide(&call, STREAMING),
            DisconnectAction::KeepRunning
        );
        assert_eq!(
            Grace::Immediate.decide(&call, STREAMING),
            DisconnectAction::CancelNow
        );
    }

    #[test]
    fn no_grace_is_shorter_than_the_retry_of_a_client_that_can_resume() {
        for grace in [Grace::After(30 * SECOND), Grace::AutoAfter(30 * SECOND)] {
            let action = |retry, replayable| {
                let stream_end = StreamEnd {
                    retry: Some(retry),
                    replayable,
                    ..STREAMING
                };
                grace.decide(&call("tools/call", true), stream_end)
            };
            let cancel_after = |seconds| DisconnectAction::CancelAfter(seconds * SECOND);
            assert_eq!(action(3 * SECOND, true), cancel_after(30));
            assert_eq!(action(25 * SECOND, true), cancel_after(30));
            assert_eq!(action(60 * SECOND, true), cancel_after(65));
        }
        let cannot = StreamEnd {
            retry: Some(60 * SECOND),
            replayable: false,
            ..STREAMING
        };
        let after = Grace::After(SECOND).decide(&call("tools/call", true), cannot);
        assert_eq!(after, DisconnectAction::CancelAfter(SECOND));
    }

    #[test]
    fn immediate_does_not_cancel_a_call_whose_server_ended_the_stream() {
        let polling = StreamEnd {
            by_server: true,
            ..STREAMING
        };
        let action = Grace::Immediate.decide(&call("tools/call", true), polling);
        assert_eq!(action, DisconnectAction::CancelAfter(MIN_GRACE));
    }
}
