//! What the user chose.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    call::CallInfo,
    observe::Observers,
    policy::{Policy, Rules},
    quietly::quietly,
};

/// Which answers are kept for clients that come back for them. Needs
/// [`CancellableSessionManager`](crate::CancellableSessionManager), which sees the answers; keeping one is
/// a reference count, not a copy.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Retain};
///
/// let frugal = CancelOnDisconnectLayer::new().retain(Retain::Detached);
/// # drop(frugal);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Retain {
    /// All, for 60 s at least: also one that was on its way when the link broke. Such an answer is the first to go
    /// when there is no room.
    #[default]
    All,
    /// Those that came while nobody was there to take them.
    Detached,
    /// None: who comes back too late gets what rmcp gives, an empty stream.
    Off,
}

/// What the user chose.
#[derive(Clone, Default)]
pub(crate) struct Options {
    pub(crate) observers: Observers,
    pub(crate) retain: Retain,
    pub(crate) keep_alive: Option<Duration>,
    pub(crate) commit_after: Option<Duration>,
    pub(crate) stall_timeout: Option<Duration>,
    /// What holds where no policy says otherwise.
    pub(crate) rules: Rules,
    pub(crate) policy: Option<Arc<PolicyByCall>>,
    pub(crate) exempt: Vec<Arc<Exempt>>,
}

type PolicyByCall = dyn Fn(&CallInfo) -> Policy + Send + Sync;
type Exempt = dyn Fn(&CallInfo) -> bool + Send + Sync;

// === impl Options ===

impl Options {
    pub(crate) fn policy_for(&self, call: &CallInfo) -> Rules {
        let policy = self.policy.as_ref();
        let policy = policy.and_then(|policy| quietly(|| policy(call)));
        let rules = policy.unwrap_or_default().or(self.rules);
        let mut exempt = self.exempt.iter();
        match exempt.any(|exempt| quietly(|| exempt(call)).unwrap_or(false)) {
            true => rules.exempt(),
            false => rules,
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("grace", &self.rules.grace)
            .field("call_timeout", &self.rules.call_timeout)
            .field("policy", &self.policy.is_some())
            .field("exempt", &self.exempt.len())
            .field("retain", &self.retain)
            .field("keep_alive", &self.keep_alive)
            .field("commit_after", &self.commit_after)
            .field("stall_timeout", &self.stall_timeout)
            .field("observers", &self.observers)
            .finish()
    }
}
