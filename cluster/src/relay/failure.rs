//! The reasons a relay can fail.

/// Why a relay failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was refused, so nothing has been sent.
    ///
    /// The owner may still be alive, behind a firewall that rejects connections.
    Refused,
    /// The owner answered that it had relinquished the session.
    Moved,
    /// Another instance, which does not have the session, answered at the owner's address.
    Misdirected,
    /// No peer answered, so no call can have started.
    ///
    /// The address was not admitted, no peer answered there, or the connection ended before a call's body was requested.
    Unreachable,
    /// No response head arrived in time, and no call can have started.
    Silent,
    /// The request may have started but got no response, or its body cannot be resent.
    ///
    /// The connection ended before the response head arrived, or a POST that may have started got no response head in time. A relay also
    /// fails with this if the client has disconnected, but the result is then unused.
    Broken,
    /// The request's body stalled while it was being sent.
    Stalled,
}

// === impl Failure ===

impl Failure {
    /// Returns the metric's label.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Refused => "refused",
            Self::Moved => "moved",
            Self::Misdirected => "misdirected",
            Self::Unreachable => "unreachable",
            Self::Silent => "silent",
            Self::Broken => "broken",
            Self::Stalled => "stalled",
        }
    }
}
