//! What a disconnect means for a call.
//!
//! | at the hang-up | [`Grace::Auto`] |
//! |---|---|
//! | no session, or protocol 2026-07-28 and later | cancel now: nothing can be resumed, and that revision says MUST |
//! | no response head yet | cancel now: the client has no event id to come back with |
//! | a session call whose stream had begun | cancel after [`DEFAULT_GRACE`], unless the session resumes a stream before |
//! | `subscriptions/listen` | cancel now: closing it is its end |
//! | a request with `params.task` (2025-11-25) | runs on: only `tasks/cancel` may end it |
//!
//! The other graces replace the first three rows.

use std::time::Duration;

use crate::call::CallInfo;

/// How long [`Grace::Auto`] lets a session call wait for its client: 20 s.
///
/// Both the TypeScript SDK and the Python SDK 1.x come back after the server's `retry` (3 s for rmcp)
/// and try twice, and one attempt into a dead network takes up to 10 s.
pub const DEFAULT_GRACE: Duration = Duration::from_secs(20);

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
    /// As long as the client may still come back for its answer, see the [crate docs](crate#what-a-disconnect-means).
    #[default]
    Auto,
    /// Not at all: the call is cancelled when the client hangs up. Breaks clients that resume.
    Immediate,
    /// This long, counted from the hang-up, also where the client cannot resume.
    After(Duration),
    /// To its end. Revisions up to 2025-11-25 ask for this with their SHOULD NOT.
    Never,
}

/// What to do with a call whose client has just gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    CancelNow,
    CancelAfter(Duration),
    RunOn,
}

// === impl Grace ===

impl Grace {
    /// `streaming`: the response head was sent, so the client may hold an event id.
    pub(crate) fn verdict(self, call: &CallInfo, streaming: bool) -> Verdict {
        if call.must_run_on() {
            return Verdict::RunOn;
        }
        if call.method() == "subscriptions/listen" {
            return Verdict::CancelNow;
        }
        match self {
            Self::Auto if streaming && call.session().is_some() => {
                Verdict::CancelAfter(DEFAULT_GRACE)
            }
            Self::Auto | Self::Immediate => Verdict::CancelNow,
            Self::After(grace) => Verdict::CancelAfter(grace),
            Self::Never => Verdict::RunOn,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::call::RequestId;

    fn call(method: &str, session: bool) -> CallInfo {
        CallInfo::new(RequestId::Number(1), method).with_session(session.then(|| "s".into()))
    }

    #[test]
    fn auto_waits_only_for_a_client_that_can_come_back() {
        let auto =
            |method, session, streaming| Grace::Auto.verdict(&call(method, session), streaming);
        assert_eq!(
            auto("tools/call", true, true),
            Verdict::CancelAfter(DEFAULT_GRACE)
        );
        assert_eq!(auto("tools/call", true, false), Verdict::CancelNow);
        assert_eq!(auto("tools/call", false, true), Verdict::CancelNow);
    }

    #[test]
    fn a_listen_ends_with_its_stream_and_a_task_with_nothing() {
        for grace in [
            Grace::Auto,
            Grace::Immediate,
            Grace::After(DEFAULT_GRACE),
            Grace::Never,
        ] {
            let listen = call("subscriptions/listen", false);
            assert_eq!(grace.verdict(&listen, true), Verdict::CancelNow);
            let task = call("tools/call", true).running_as_task(true);
            assert_eq!(grace.verdict(&task, true), Verdict::RunOn);
        }
    }

    #[test]
    fn an_explicit_grace_replaces_the_table() {
        let call = call("tools/call", false);
        let second = Duration::from_secs(1);
        assert_eq!(
            Grace::After(second).verdict(&call, false),
            Verdict::CancelAfter(second)
        );
        assert_eq!(Grace::Never.verdict(&call, false), Verdict::RunOn);
        assert_eq!(Grace::Immediate.verdict(&call, true), Verdict::CancelNow);
    }
}
