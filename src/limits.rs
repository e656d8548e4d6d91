//! How much is kept track of, and what is said when it is more.
//!
//! A call beyond a limit runs on as it would without the layer: it is not refused, and no other call is cancelled or
//! forgotten to make room for it. One session comes to its own limit long before all sessions together come to
//! theirs.
//!
//! What ended calls leave behind is limited in [`memory`](super::core), in bytes.

/// How many calls a layer keeps track of.
///
/// Beyond a limit a call runs on as it would without the layer: it is neither refused nor cancelled, and no other
/// call makes room for it. [`Event::Untracked`](crate::Event::Untracked) tells of each, the log of the first and
/// then once a minute. [The manual](crate::manual::defaults) has the reasons for the numbers.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Limits};
///
/// let limits = Limits::default().detached(1_000).detached_of_session(20);
/// assert_eq!(limits.most(mcp_cancel_on_disconnect::Limit::DetachedOfSession), 20);
/// let layer = CancelOnDisconnectLayer::new().limits(limits);
/// # drop(layer);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    calls: usize,
    detached: usize,
    detached_of_session: usize,
}

/// Which of the [`Limits`] a call met.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Limit {
    /// Of calls in flight: the call was never tracked.
    Calls,
    /// Of calls without a client: the call is tracked no longer, and ended as unknown.
    Detached,
    /// Of calls of one session without a client: likewise.
    DetachedOfSession,
}

// === impl Limits ===

impl Limits {
    /// Calls in flight, with a client or without: 262,144 by default.
    pub fn calls(mut self, most: usize) -> Self {
        self.calls = most;
        self
    }

    /// Calls that are without a client and go on: 65,536 by default.
    pub fn detached(mut self, most: usize) -> Self {
        self.detached = most;
        self
    }

    /// The same of one session: 2,048 by default. Calls without a session count in [`detached`](Self::detached) only.
    pub fn detached_of_session(mut self, most: usize) -> Self {
        self.detached_of_session = most;
        self
    }

    /// How many a limit lets in.
    pub fn most(&self, limit: Limit) -> usize {
        match limit {
            Limit::Calls => self.calls,
            Limit::Detached => self.detached,
            Limit::DetachedOfSession => self.detached_of_session,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            calls: 262_144,
            detached: 65_536,
            detached_of_session: 2_048,
        }
    }
}

// === impl Limit ===

impl Limit {
    pub(crate) const ALL: [Self; 3] = [Self::Calls, Self::Detached, Self::DetachedOfSession];

    /// Its name in logs and metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Detached => "detached",
            Self::DetachedOfSession => "detached_of_session",
        }
    }
}
