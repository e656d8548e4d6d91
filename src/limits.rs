//! Limits on tracked calls and retained answers.
//!
//! A session reaches its own limits long before all sessions together reach theirs.

/// Limits on the calls that a layer tracks and on the bytes of answers that it retains.
///
/// A call over a limit keeps running as it would without the layer: it is neither refused nor cancelled, and no other call is evicted to
/// make room for it. Every such call is reported as [`Event::Untracked`](crate::Event::Untracked), and a warning is logged at most once a
/// minute per limit. [The manual](crate::manual::defaults) explains the numbers.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Limits, observe::Limit};
///
/// let limits = Limits::default()
///     .calls(10_000)
///     .detached(1_000)
///     .detached_of_session(20)
///     .retained(64 << 20)
///     .retained_of_session(4 << 20);
/// assert_eq!(limits.get(Limit::Calls), 10_000);
/// assert_eq!(limits.get(Limit::DetachedOfSession), 20);
/// let layer = CancelOnDisconnectLayer::new().limits(limits);
/// # drop(layer);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    calls: usize,
    detached: usize,
    detached_of_session: usize,
    pub(crate) retained: usize,
    pub(crate) retained_of_session: usize,
}

/// The limit that a call has exceeded, one of the [`Limits`].
///
/// ```
/// use mcp_cancel_on_disconnect::{Limits, observe::Limit};
///
/// assert_eq!(Limits::default().get(Limit::Calls), 262_144);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Limit {
    /// There are too many calls in flight. The call was never tracked.
    Calls,
    /// There are too many detached calls. The call is no longer tracked, and has ended as unknown.
    Detached,
    /// There are too many detached calls in one session. The call is no longer tracked, and has ended as unknown.
    DetachedOfSession,
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
    pub fn detached_of_session(mut self, max: usize) -> Self {
        self.detached_of_session = max;
        self
    }

    /// Sets how many bytes of answers may be retained (16 MiB by default).
    ///
    /// An answer counts as half a KiB, plus a quarter of a KiB per content block, plus the size of its text and the size of everything else
    /// as JSON. A session's first retained answer counts another 0.8 KiB.
    ///
    /// A quarter of the space is for answers whose client was connected when they were sent, and the rest for answers that a client may
    /// still resume for. Of each kind, a session may retain only as many bytes as remain free for all other sessions.
    ///
    /// An answer that exceeds the remaining space or its session's limit evicts older answers from the same session, starting with those
    /// whose client was connected. If that is not enough, the new answer is not retained. Whenever an answer that a client may still resume
    /// for is evicted or not retained, [`Event::AnswerEvicted`](crate::Event::AnswerEvicted) reports it.
    pub fn retained(mut self, bytes: usize) -> Self {
        self.retained = bytes;
        self
    }

    /// Sets how many bytes of answers may be retained for one session id (1 MiB by default).
    pub fn retained_of_session(mut self, bytes: usize) -> Self {
        self.retained_of_session = bytes;
        self
    }

    /// Returns the value of `limit`.
    pub fn get(&self, limit: Limit) -> usize {
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
            // A busy server can spare this much, and no session can take it all.
            retained: 16 * 1024 * 1024,
            retained_of_session: 1024 * 1024,
        }
    }
}

// === impl Limit ===

impl Limit {
    pub(crate) const ALL: [Self; 3] = [Self::Calls, Self::Detached, Self::DetachedOfSession];

    /// Returns the name used in logs and metrics.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Calls => "calls",
            Self::Detached => "detached",
            Self::DetachedOfSession => "detached_of_session",
        }
    }
}
