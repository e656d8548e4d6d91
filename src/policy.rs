//! What a disconnect means for a call.
//!
//! | at the hang-up | [`Grace::Auto`] |
//! |---|---|
//! | protocol 2026-07-28 and later | cancel now: that revision says MUST |
//! | no response head, or no event with an id yet | cancel now: the client has nothing to come back with |
//! | no session, but event ids | runs on: only an event store makes them, and the client may resume elsewhere |
//! | a session call with event ids | cancel after max([`MIN_GRACE`], 5 × `retry` + 5 s) without a resume |
//! | the same, its stream ended by the server (SEP-1699 polling) | likewise |
//! | the session manager has an event store | runs on: the client may resume elsewhere |
//! | `subscriptions/listen` | cancel now: closing it is its end |
//! | a request with `params.task` (2025-11-25) | runs on: only `tasks/cancel` may end it |
//!
//! The other graces replace the first six rows.

use std::time::Duration;

use crate::call::{CallInfo, LISTEN};

/// The least that [`Grace::Auto`] lets a session call wait for its client: 20 s.
///
/// Both the TypeScript SDK and the Python SDK 1.x come back after the server's `retry` (3 s for rmcp) and
/// try twice, and one attempt into a dead network takes up to 10 s.
pub const MIN_GRACE: Duration = Duration::from_secs(20);

/// The longest `retry` that counts for a grace: 10 min. A server may say anything.
const MAX_RETRY: Duration = Duration::from_secs(600);

/// How long a call goes on after its client went away.
///
/// That is, how long the *layer* lets it. rmcp itself stops the handler of a stateless call as soon as its
/// stream is dropped.
///
/// ```
/// use std::time::Duration;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace};
///
/// assert_eq!(Grace::default(), Grace::Auto);
///
/// let patient = CancelOnDisconnectLayer::new().grace(Grace::After(Duration::from_secs(60)));
/// let strict = patient.clone().grace(Grace::Immediate); // for another route, same registry
/// # let _ = strict;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Grace {
    /// As long as the client may still come back for its answer, see the
    /// [crate docs](crate#what-a-disconnect-means).
    #[default]
    Auto,
    /// Not at all: the call is cancelled when the client hangs up. Breaks clients that resume. A stream that
    /// the *server* ended still waits as with `Auto`: its client was told to come back.
    Immediate,
    /// This long, counted from the hang-up, also where the client cannot resume.
    After(Duration),
    /// To its end. Revisions up to 2025-11-25 ask for this with their SHOULD NOT.
    Never,
}

/// What is to become of a call, chosen when it is known. What a policy does not set is as the layer says.
///
/// ```
/// use std::time::Duration;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace, Policy};
///
/// let layer = CancelOnDisconnectLayer::new()
///     .call_timeout(Duration::from_secs(600))
///     .policy(|call| match call.tool() {
///         Some("approve") => Policy::new().grace(Grace::Never), // and 600 s
///         Some("report") => Policy::new().supersede(),
///         _ => Policy::new(), // as without a policy
///     });
/// # drop(layer);
/// assert_ne!(Policy::new(), Policy::new().grace(Grace::Auto)); // which replaces the layer's grace
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    grace: Option<Grace>,
    call_timeout: Option<Duration>,
    supersede: bool,
}

/// What was decided for a call, by its policy and by the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Rules {
    pub(crate) grace: Grace,
    pub(crate) call_timeout: Option<Duration>,
    pub(crate) supersede: bool,
    /// Nothing that its client does ends it.
    pub(crate) is_exempt: bool,
}

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
    /// Its client may come back to another server, and nobody here will know.
    pub(crate) fn may_be_resumed_elsewhere(self, call: &CallInfo) -> bool {
        let without_session = call.session().is_none() && !call.ends_with_its_stream();
        self.replayable && (self.stored || without_session)
    }
}

// === impl Policy ===

impl Policy {
    /// Sets nothing: the call is treated as the layer says.
    pub fn new() -> Self {
        Self::default()
    }

    /// How long the call goes on after its client went away, in place of the layer's
    /// [`grace`](crate::CancelOnDisconnectLayer::grace).
    pub fn grace(mut self, grace: Grace) -> Self {
        self.grace = Some(grace);
        self
    }

    /// How long the call may last, counted from when it is known, whether its client is there or not.
    /// Then it is cancelled as [`TimedOut`](crate::CancelReason::TimedOut), and its client gets the JSON-RPC
    /// error -32001. Not for `subscriptions/listen`, nor for what runs as a task. It replaces the layer's
    /// [`call_timeout`](crate::CancelOnDisconnectLayer::call_timeout); [`Duration::MAX`] is no limit.
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = Some(timeout);
        self
    }

    /// When the client sends the same call again (session, method, tool and arguments) while this one is
    /// detached, this one is cancelled first, unless it is [exempt](crate::CancelOnDisconnectLayer::exempt). Needs
    /// [`CancellableSessionManager`](crate::CancellableSessionManager); else it has no effect. The layer has no such
    /// option: a call whose policy does not set it is not superseded.
    pub fn supersede(mut self) -> Self {
        self.supersede = true;
        self
    }

    /// With `layer` for what is not set.
    pub(crate) fn or(self, layer: Rules) -> Rules {
        Rules {
            grace: self.grace.unwrap_or(layer.grace),
            call_timeout: self.call_timeout.or(layer.call_timeout),
            supersede: self.supersede,
            is_exempt: layer.is_exempt,
        }
    }
}

// === impl Rules ===

impl Rules {
    /// The same for a call that is exempt.
    pub(crate) fn exempt(self) -> Self {
        Self {
            grace: Grace::Never,
            is_exempt: true,
            ..self
        }
    }
}

// === impl Grace ===

impl Grace {
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
            Self::After(grace) => Verdict::CancelAfter(grace),
            Self::Never => Verdict::RunOn,
        }
    }
}

fn auto(call: &CallInfo, going: Going) -> Verdict {
    if call.ends_with_its_stream() || !going.replayable {
        // That its stream ended on purpose is no hang-up.
        return if going.by_server {
            Verdict::RunOn
        } else {
            Verdict::CancelNow
        };
    }
    if going.may_be_resumed_elsewhere(call) {
        return Verdict::RunOn;
    }
    let retry = going.retry.unwrap_or_default().min(MAX_RETRY);
    Verdict::CancelAfter(MIN_GRACE.max(5 * retry + Duration::from_secs(5)))
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
    fn auto_gives_a_slow_client_five_times_its_retry() {
        let retry = |seconds| Going {
            retry: Some(seconds * SECOND),
            ..STREAMING
        };
        assert_eq!(auto(retry(0)), Verdict::CancelAfter(MIN_GRACE));
        assert_eq!(auto(retry(10)), Verdict::CancelAfter(55 * SECOND));
        assert_eq!(auto(retry(u32::MAX)), Verdict::CancelAfter(3005 * SECOND));
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
        let after = Grace::After(SECOND).verdict(&stateless, STREAMING);
        assert_eq!(after, Verdict::CancelAfter(SECOND));
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
            Grace::After(SECOND).verdict(&call, STREAMING),
            Verdict::CancelAfter(SECOND)
        );
        assert_eq!(Grace::Never.verdict(&call, STREAMING), Verdict::RunOn);
        assert_eq!(
            Grace::Immediate.verdict(&call, STREAMING),
            Verdict::CancelNow
        );
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
