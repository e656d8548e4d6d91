//! Verdicts: what a disconnect means for a call.
//!
//! [`manual::disconnect`](crate::manual::disconnect) has the table for [`Grace::Auto`], and a test compares the two. The other
//! graces replace all of its rows but those for tasks and subscriptions; [`Grace::AutoAfter`] only replaces its times.

use std::time::Duration;

use crate::{
    call::{CallInfo, LISTEN},
    policy::{Grace, MIN_GRACE},
};

/// The longest `retry` that counts several times for a grace: 10 min. A server may say anything.
const MAX_RETRY: Duration = Duration::from_secs(600);

/// How late a client may be that comes back after `retry`, for the network: 5 s, or `retry` if that is shorter.
const MAX_DELAY: Duration = Duration::from_secs(5);

/// What is known of a call's stream when it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Going {
    /// The stream had an event id, so its client can ask for the rest.
    pub(crate) replayable: bool,
    /// How long the server told its client to wait before it comes back.
    pub(crate) retry: Option<Duration>,
    /// The server ended it.
    pub(crate) by_server: bool,
    /// Its events are in a store that other servers may share.
    pub(crate) stored: bool,
}

/// What to do with a call whose client has just gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    CancelNow,
    CancelAfter(Duration),
    RunOn,
}

// === impl Going ===

impl Going {
    /// Whether its client may resume on another server, unseen by this one.
    pub(crate) fn may_be_resumed_elsewhere(self, call: &CallInfo) -> bool {
        let without_session = call.session().is_none() && !call.ends_with_its_stream();
        self.replayable && (self.stored || without_session)
    }

    /// How long the answer of a call that runs on is owed to its client.
    pub(crate) fn patience(self) -> Duration {
        if self.replayable {
            after(self.retry)
        } else {
            Duration::ZERO
        }
    }

    /// How long a client stays away that does as it was told.
    fn as_told(self) -> Duration {
        as_told(self.retry.filter(|_| self.replayable))
    }
}

// === impl Verdict ===

impl Verdict {
    /// How long the answer of a call is owed to a client that goes so.
    pub(crate) fn patience(self, going: Going) -> Duration {
        match self {
            Self::CancelNow => Duration::ZERO,
            Self::CancelAfter(grace) => grace,
            Self::RunOn => going.patience(),
        }
    }
}

// === impl Grace ===

impl Grace {
    /// No verdict owes an answer for longer than this.
    pub(crate) fn longest(self, retry: Option<Duration>) -> Duration {
        match self {
            Self::After(grace) | Self::AutoAfter(grace) => grace.max(after(retry)),
            Self::Auto | Self::Immediate | Self::Never => after(retry),
        }
    }

    pub(crate) fn verdict(self, call: &CallInfo, going: Going) -> Verdict {
        if call.must_run_on() {
            return Verdict::RunOn;
        }
        if call.method() == LISTEN {
            return Verdict::CancelNow;
        }
        match self {
            Self::Auto => auto(call, going),
            Self::Immediate if going.by_server => auto(call, going),
            Self::Immediate => Verdict::CancelNow,
            Self::AutoAfter(grace) => match auto(call, going) {
                Verdict::CancelAfter(_) => Verdict::CancelAfter(grace.max(going.as_told())),
                verdict => verdict,
            },
            Self::After(grace) => Verdict::CancelAfter(grace.max(going.as_told())),
            Self::Never => Verdict::RunOn,
        }
    }
}

/// How long a client that may come back is waited for.
fn after(retry: Option<Duration>) -> Duration {
    let counted = retry.unwrap_or_default().min(MAX_RETRY);
    let attempts = 5 * counted + Duration::from_secs(5);
    MIN_GRACE.max(attempts).max(as_told(retry))
}

/// How long a client stays away that comes back after `retry`.
fn as_told(retry: Option<Duration>) -> Duration {
    let retry = retry.unwrap_or_default();
    retry.saturating_add(retry.min(MAX_DELAY))
}

fn auto(call: &CallInfo, going: Going) -> Verdict {
    if call.ends_with_its_stream() || !going.replayable {
        // A stream that the server ended on purpose was not hung up.
        return if going.by_server {
            Verdict::RunOn
        } else {
            Verdict::CancelNow
        };
    }
    if going.may_be_resumed_elsewhere(call) {
        return Verdict::RunOn;
    }
    Verdict::CancelAfter(after(going.retry))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::RequestId;

    const SECOND: Duration = Duration::from_secs(1);

    const STREAMING: Going = Going {
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

    fn auto(going: Going) -> Verdict {
        Grace::Auto.verdict(&call("tools/call", true), going)
    }

    #[test]
    fn auto_waits_only_for_a_client_that_can_come_back() {
        assert_eq!(auto(STREAMING), Verdict::CancelAfter(MIN_GRACE));
        let silent = Going {
            replayable: false,
            ..STREAMING
        };
        assert_eq!(auto(silent), Verdict::CancelNow);
        let stateless = call("tools/call", false);
        assert_eq!(Grace::Auto.verdict(&stateless, silent), Verdict::CancelNow);
    }

    #[test]
    fn auto_waits_for_nobody_from_2026_07_28_on() {
        let mut call = call("tools/call", false);
        call.set_ends_with_its_stream(true);
        assert_eq!(Grace::Auto.verdict(&call, STREAMING), Verdict::CancelNow);
        let ended = Going {
            by_server: true,
            ..STREAMING
        };
        assert_eq!(Grace::Auto.verdict(&call, ended), Verdict::RunOn);
    }

    #[test]
    fn auto_after_changes_how_long_a_client_is_waited_for_and_nothing_else() {
        let after = |session, going| {
            Grace::AutoAfter(9 * SECOND).verdict(&call("tools/call", session), going)
        };
        let lost = Going {
            replayable: false,
            ..STREAMING
        };
        let ended = Going {
            by_server: true,
            ..lost
        };
        assert_eq!(after(true, STREAMING), Verdict::CancelAfter(9 * SECOND));
        for (session, going) in [
            (true, lost),
            (false, lost),
            (true, ended),
            (false, STREAMING),
        ] {
            let as_auto = Grace::Auto.verdict(&call("tools/call", session), going);
            assert_eq!(after(session, going), as_auto, "{going:?}");
        }
    }

    #[test]
    fn auto_gives_a_slow_client_five_times_its_retry() {
        let retry = |seconds| Going {
            retry: Some(seconds * SECOND),
            ..STREAMING
        };
        assert_eq!(auto(retry(0)), Verdict::CancelAfter(MIN_GRACE));
        assert_eq!(auto(retry(10)), Verdict::CancelAfter(55 * SECOND));
        assert_eq!(auto(retry(3_000)), Verdict::CancelAfter(3005 * SECOND));
        // It counts once at least.
        assert_eq!(auto(retry(4_000)), Verdict::CancelAfter(4005 * SECOND));
        assert_eq!(
            auto(Going {
                retry: None,
                ..STREAMING
            }),
            Verdict::CancelAfter(MIN_GRACE)
        );
    }

    #[test]
    fn auto_reads_no_hang_up_into_a_stream_that_the_server_ended() {
        let ended = Going {
            by_server: true,
            replayable: false,
            ..STREAMING
        };
        assert_eq!(auto(ended), Verdict::RunOn);
        let stateless = call("tools/call", false);
        let ended = Going {
            by_server: true,
            ..STREAMING
        };
        assert_eq!(Grace::Auto.verdict(&stateless, ended), Verdict::RunOn);
    }

    #[test]
    fn auto_lets_run_what_may_be_resumed_elsewhere() {
        assert_eq!(
            auto(Going {
                stored: true,
                ..STREAMING
            }),
            Verdict::RunOn
        );
        // Without a session only a store makes event ids.
        let stateless = call("tools/call", false);
        assert_eq!(Grace::Auto.verdict(&stateless, STREAMING), Verdict::RunOn);
        assert_eq!(
            Grace::Immediate.verdict(&stateless, STREAMING),
            Verdict::CancelNow
        );
        let after = Grace::After(9 * SECOND).verdict(&stateless, STREAMING);
        assert_eq!(after, Verdict::CancelAfter(9 * SECOND));
    }

    #[test]
    fn a_listen_ends_with_its_stream_and_a_task_with_nothing() {
        for grace in [
            Grace::Auto,
            Grace::Immediate,
            Grace::After(SECOND),
            Grace::Never,
        ] {
            let listen = call("subscriptions/listen", false);
            assert_eq!(grace.verdict(&listen, STREAMING), Verdict::CancelNow);
            let mut task = call("tools/call", true);
            task.set_must_run_on(true);
            assert_eq!(grace.verdict(&task, STREAMING), Verdict::RunOn);
        }
    }

    #[test]
    fn an_explicit_grace_replaces_the_table() {
        let call = call("tools/call", false);
        assert_eq!(
            Grace::After(9 * SECOND).verdict(&call, STREAMING),
            Verdict::CancelAfter(9 * SECOND)
        );
        assert_eq!(Grace::Never.verdict(&call, STREAMING), Verdict::RunOn);
        assert_eq!(
            Grace::Immediate.verdict(&call, STREAMING),
            Verdict::CancelNow
        );
    }

    #[test]
    fn no_grace_is_shorter_than_what_the_server_told_a_client_that_can_come_back() {
        for grace in [Grace::After(30 * SECOND), Grace::AutoAfter(30 * SECOND)] {
            let verdict = |retry, replayable| {
                let going = Going {
                    retry: Some(retry),
                    replayable,
                    ..STREAMING
                };
                grace.verdict(&call("tools/call", true), going)
            };
            let cancel_after = |seconds| Verdict::CancelAfter(seconds * SECOND);
            assert_eq!(verdict(3 * SECOND, true), cancel_after(30));
            assert_eq!(verdict(25 * SECOND, true), cancel_after(30));
            assert_eq!(verdict(60 * SECOND, true), cancel_after(65));
        }
        let cannot = Going {
            retry: Some(60 * SECOND),
            replayable: false,
            ..STREAMING
        };
        let after = Grace::After(SECOND).verdict(&call("tools/call", true), cannot);
        assert_eq!(after, Verdict::CancelAfter(SECOND));
    }

    #[test]
    fn immediate_does_not_mean_a_client_that_was_told_to_come_back() {
        let polling = Going {
            by_server: true,
            ..STREAMING
        };
        let verdict = Grace::Immediate.verdict(&call("tools/call", true), polling);
        assert_eq!(verdict, Verdict::CancelAfter(MIN_GRACE));
    }
}
