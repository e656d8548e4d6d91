//! The user's rules for calls: how long a call may last, and how long without its client.

use std::time::Duration;

/// Minimum time a session call waits for a resume under [`Grace::Auto`]: 20 s.
///
/// Both the TypeScript SDK and the Python SDK 1.x resume after the server's `retry` (3 s with rmcp) and try twice. One attempt
/// over a dead network takes up to 10 s.
///
/// ```
/// use std::time::Duration;
/// use mcp_cancel_on_disconnect::MIN_GRACE;
///
/// let retry = Duration::from_secs(3);
/// let dead_attempt = Duration::from_secs(10);
/// assert!(MIN_GRACE > retry + dead_attempt + retry);
/// ```
pub const MIN_GRACE: Duration = Duration::from_secs(20);

/// How long a call keeps running after its client disconnected.
///
/// Under every grace, a disconnect cancels `subscriptions/listen` at once, and never a call that runs as a task.
///
/// This is how long the *layer* lets the call run. rmcp 3 itself stops the handler of a stateless call as soon as the call's stream
/// is dropped, unless the call's events are stored.
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
    /// The call keeps running while its client may resume for the answer. [The manual](crate::manual::disconnect) has the
    /// table of all cases.
    #[default]
    Auto,
    /// The call is cancelled when its client disconnects. This breaks clients that resume. If the *server* ended the stream, the
    /// call still waits as with `Auto`, because the server asked the client to resume.
    Immediate,
    /// As `Auto`, but a call whose client may resume waits this long.
    ///
    /// If the server sent a `retry`, the call waits for at least `retry` + min(`retry`, 5 s).
    AutoAfter(Duration),
    /// The call keeps running this long after a disconnect, even if its client cannot resume.
    ///
    /// If the client can resume, `retry` counts as with `AutoAfter`. The layer cannot observe that a client without a session resumes
    /// its call from an event store. Use another grace for such calls.
    After(Duration),
    /// A disconnect does not end the call. A [`call_timeout`](Policy::call_timeout) and explicit cancels still do.
    ///
    /// The SHOULD NOT of revisions up to 2025-11-25 asks for this, but later revisions require a cancel.
    Never,
}

/// The rules for one call, chosen when the call becomes known. Where a policy sets nothing, the layer's rules apply.
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

/// The rules that apply to a call, from its policy and from the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct EffectivePolicy {
    pub(crate) grace: Grace,
    pub(crate) call_timeout: Option<Duration>,
    pub(crate) supersede: bool,
    /// `true` if neither a disconnect nor `supersede` cancels the call. A subscription still ends with its stream.
    pub(crate) is_exempt: bool,
}

// === impl Policy ===

impl Policy {
    /// Creates a policy that sets nothing, so the layer's options apply.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how long the call keeps running after its client disconnected.
    ///
    /// It replaces the layer's [`grace`](crate::CancelOnDisconnectLayer::grace).
    pub fn grace(mut self, grace: Grace) -> Self {
        self.grace = Some(grace);
        self
    }

    /// Limits how long the call may last, attached or detached, from when it becomes known.
    ///
    /// A call that exceeds the limit is cancelled as [`TimedOut`](crate::CancelReason::TimedOut), and its client receives the
    /// JSON-RPC error -32001.
    ///
    /// The limit does not apply to `subscriptions/listen`, nor to calls that run as tasks. It replaces the layer's
    /// [`call_timeout`](crate::CancelOnDisconnectLayer::call_timeout). [`Duration::MAX`] means no limit.
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = Some(timeout);
        self
    }

    /// Cancels the call if its client sends the same call again while this one is detached.
    ///
    /// Two calls are the same if their session, method and parameters are equal, apart from `_meta`. An
    /// [exempt](crate::CancelOnDisconnectLayer::exempt) call is not superseded. Nor is a call while a resume of it is pending. A call
    /// that is sent again with the same JSON-RPC id is untracked instead.
    ///
    /// This needs [`CancellableSessionManager`](crate::CancellableSessionManager) and has no effect without it. Both calls need this
    /// policy: a call whose policy does not set it is not superseded, and supersedes no other call. The layer has no such option.
    pub fn supersede(mut self) -> Self {
        self.supersede = true;
        self
    }

    /// Adds the layer's rules where this policy sets nothing.
    pub(crate) fn or(self, layer: EffectivePolicy) -> EffectivePolicy {
        EffectivePolicy {
            grace: self.grace.unwrap_or(layer.grace),
            call_timeout: self.call_timeout.or(layer.call_timeout),
            supersede: self.supersede,
            is_exempt: layer.is_exempt,
        }
    }
}

// === impl EffectivePolicy ===

impl EffectivePolicy {
    /// Returns these rules, changed for an exempt call.
    pub(crate) fn exempt(self) -> Self {
        Self {
            grace: Grace::Never,
            is_exempt: true,
            ..self
        }
    }
}
