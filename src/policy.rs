//! Per-call rules: how long a call may last, and how long it may keep running without its client.

use std::time::Duration;

/// The shortest grace period that [`Grace::Auto`] grants a resumable call.
///
/// Long enough for two resume attempts, which is how many the TypeScript SDK and the Python SDK 1.x make. Each attempt starts after the
/// server's `retry` (3 s with rmcp), and over a dead network it takes up to 10 s.
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

/// How long a call keeps running after its client has disconnected.
///
/// Regardless of the grace period, a disconnect cancels `subscriptions/listen` at once, and never cancels a call that runs as a task.
///
/// The grace period only governs what the *layer* does. rmcp 3 fires a stateless call's `RequestContext::ct` as soon as the call's stream
/// is dropped, unless the call's events are stored. `AbortOnCancel` ignores that for [`Grace::Never`] and exempt calls, but a handler that
/// watches `ct` stops, and should watch its [`CallToken`](crate::CallToken) instead.
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
    /// The call waits for its client to resume, for [`MIN_GRACE`] or longer. If its client has no way to resume, the call is cancelled at
    /// once.
    ///
    /// [The manual](crate::manual::disconnect) has a table of all cases, including those in which the call simply keeps running.
    #[default]
    Auto,
    /// The call is cancelled as soon as its client disconnects, which breaks clients that resume. If it was the *server* that ended the
    /// stream, the call is still treated as with `Auto`, because the server has asked the client to resume.
    Immediate,
    /// Like `Auto`, but a call waits this long for its client to resume.
    ///
    /// If the server has sent a `retry`, the call waits for at least `retry` + min(`retry`, 5 s).
    AutoAfter(Duration),
    /// The call keeps running this long after a disconnect, even if its client cannot resume.
    ///
    /// If the client can resume, the minimum described under `AutoAfter` applies here too. Do not use this for calls without a session
    /// whose events are stored: the layer cannot tell when their clients resume from the store.
    After(Duration),
    /// A disconnect does not end the call, but a [`call_timeout`](Policy::call_timeout) or an explicit cancellation still does.
    ///
    /// This is what revisions up to 2025-11-25 ask for (SHOULD NOT), but later ones require the call to be cancelled.
    Never,
}

/// Overrides some of the layer's rules for a single call.
///
/// The closure passed to [`policy`](crate::CancelOnDisconnectLayer::policy) chooses a policy when the layer learns of a call. Anything the
/// policy does not set is inherited from the layer.
///
/// ```
/// use std::time::Duration;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Grace, Policy};
///
/// let layer = CancelOnDisconnectLayer::new()
///     .call_timeout(Duration::from_secs(600))
///     .policy(|call| match call.tool() {
///         Some("approve") => Policy::new().grace(Grace::Never), // still with the 600 s
///         Some("report") => Policy::new().supersede(),
///         _ => Policy::new(), // the layer's rules
///     });
/// # drop(layer);
/// assert_ne!(Policy::new(), Policy::new().grace(Grace::Auto)); // this one overrides the layer's grace
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Policy {
    grace: Option<Grace>,
    call_timeout: Option<Duration>,
    supersede: bool,
}

/// The rules that apply to a call.
///
/// They are taken from the call's policy or, if the policy does not set them, from the layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct EffectivePolicy {
    pub(crate) grace: Grace,
    pub(crate) call_timeout: Option<Duration>,
    pub(crate) supersede: bool,
    /// Whether the call is exempt from being cancelled by a disconnect or `supersede`. A subscription still ends with its stream.
    pub(crate) is_exempt: bool,
}

// === impl Policy ===

impl Policy {
    /// Creates a policy that sets nothing, so that the layer's options apply.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets how long the call keeps running after its client has disconnected.
    ///
    /// This overrides the layer's [`grace`](crate::CancelOnDisconnectLayer::grace).
    pub fn grace(mut self, grace: Grace) -> Self {
        self.grace = Some(grace);
        self
    }

    /// Limits how long the call may last, whether or not its client is connected.
    ///
    /// The time is counted from when the layer learns of the call. A call that exceeds the limit is cancelled as
    /// [`TimedOut`](crate::CancelReason::TimedOut), and its client receives the JSON-RPC error -32001.
    ///
    /// The limit applies neither to `subscriptions/listen` nor to calls that run as tasks. It overrides the layer's
    /// [`call_timeout`](crate::CancelOnDisconnectLayer::call_timeout), and [`Duration::MAX`] means no limit.
    pub fn call_timeout(mut self, timeout: Duration) -> Self {
        self.call_timeout = Some(timeout);
        self
    }

    /// Cancels the call if its client resends the same call while this one is detached.
    ///
    /// Two calls are the same if they have the same session, method and parameters, apart from `_meta`. An
    /// [exempt](crate::CancelOnDisconnectLayer::exempt) call is never superseded, and neither is a call with a pending resume. If the
    /// client reuses the JSON-RPC id when resending the call, the older call is untracked instead.
    ///
    /// Both calls need this policy: a call without it neither supersedes another call nor is superseded. There is no layer-wide option for
    /// this. Without [`CancellableSessionManager`](crate::CancellableSessionManager), this has no effect.
    pub fn supersede(mut self) -> Self {
        self.supersede = true;
        self
    }

    /// Fills in the layer's rules for whatever this policy does not set.
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
    /// Returns these rules as they apply to an exempt call.
    pub(crate) fn exempt(self) -> Self {
        Self {
            grace: Grace::Never,
            is_exempt: true,
            ..self
        }
    }
}
