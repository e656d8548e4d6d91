//! Limits on tracked calls and retained answers.
//!
//! The limits for a single session are far below those across all sessions, so a session hits its own limit first.

/// Limits on how many calls a layer tracks, and on how many bytes of answers it retains.
///
/// A call over a limit keeps running as it would without the layer: it is neither refused nor cancelled, and no other call is evicted to
/// make room for it. Each of these calls is reported as [`Event::Untracked`](crate::Event::Untracked), and a warning is logged at most once
/// a minute per limit. [The manual](crate::manual::defaults) explains the numbers.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Limits, observe::Limit};
///
/// let limits = Limits::default()
///     .calls(10_000)
///     .detached(1_000)
///     .detached_per_session(20)
///     .retained(64 << 20)
///     .retained_per_session(4 << 20);
/// assert_eq!(limits.get(Limit::Calls), 10_000);
/// assert_eq!(limits.get(Limit::DetachedPerSession), 20);
/// let layer = CancelOnDisconnectLayer::new().limits(limits);
/// # drop(layer);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    calls: usize,
    detached: usize,
    detached_per_session: usize,
    pub(crate) retained: usize,
    pub(crate) retained_per_session: usize,
}

/// One of the [`Limits`] that a call can exceed.
///
/// ```
/// use mcp_cancel_on_disconnect::{Limits, observe::Limit};
///
/// assert_eq!(Limits::default().get(Limit::Calls), 262_144);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Limit {
    /// Too many calls were in flight, so the call was never tracked.
    Calls,
    /// Too many calls were detached, so the call is no longer tracked. It is recorded with an unknown outcome.
    Detached,
    /// Too many of the session's calls were detached, so the call is no longer tracked. It is recorded with an unknown outcome.
    DetachedPerSession,
}

// === impl Limits ===

impl Limits {
    /// Sets how many calls may be in flight, attached or detached (262,144 by default).
    pub fn calls(mut self, max: usize) -> Self {
        self.calls = max;
        self
    }

    /// Sets how many calls may be detached (65,536 by default).
    pub fn detached(mut self, max: usize) -> Self {
        self.detached = max;
        self
    }

    /// Sets how many of a session's calls may be detached (2,048 by default).
    ///
    /// Calls without a session only count toward [`detached`](Self::detached).
    pub fn detached_per_session(mut self, max: usize) -> Self {
        self.detached_per_session = max;
        self
    }

    /// Sets how many bytes of answers may be retained (16 MiB by default).
    ///
    /// Each answer is counted as half a KiB, plus a quarter of a KiB per content block, plus its text and the JSON size of everything else.
    /// A session's first retained answer costs an extra 0.8 KiB.
    ///
    /// A quarter of the space is reserved for answers sent while their client was connected, and the rest for answers whose client may
    /// still resume. In each part, no session may take up more bytes than are still free for all the others.
    ///
    /// If a new answer exceeds the remaining space or its session's limit, other answers from the same session are evicted, starting with
    /// those whose client was connected. If that is not enough, the new answer is not retained.
    /// [`Event::AnswerEvicted`](crate::Event::AnswerEvicted) reports every answer that is evicted or not retained although its client may
    /// still resume.
    pub fn retained(mut self, bytes: usize) -> Self {
        self.retained = bytes;
        self
    }

    /// Sets how many bytes of answers may be retained for one session id (1 MiB by default).
    pub fn retained_per_session(mut self, bytes: usize) -> Self {
        self.retained_per_session = bytes;
        self
    }

    /// Returns the value of `limit`.
    pub fn get(&self, limit: Limit) -> usize {
        match limit {
            Limit::Calls => self.calls,
            Limit::Detached => self.detached,
            Limit::DetachedPerSession => self.detached_per_session,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            calls: 262_144,
            detached: 65_536,
            detached_per_session: 2_048,
            // A busy server can spare this much, and no session can take it all.
            retained: 16 * 1024 * 1024,
            retained_per_session: 1024 * 1024,
        }
    }
}

// === impl Limit ===

impl Limit {
    pub(crate) const ALL: [Self; 3] = [Self::Calls, Self::Detached, Self::DetachedPerSession];

    /// Returns the name used in logs and metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Detached => "detached",
            Self::DetachedPerSession => "detached_per_session",
        }
    }
}
