//! Failures of a relay.

/// The reason why a relay failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failure {
    /// The connection was refused. Nothing was sent. The owner may be alive behind a firewall that rejects.
    Refused,
    /// The owner answered that it relinquished the session.
    Moved,
    /// Another instance answered at the owner's address and does not have the session.
    Misdirected,
    /// The address is not admitted, no peer answered there, or the connection ended before the body of a call was asked for.
    Unreachable,
    /// No head arrived in time, and no call can have started.
    Silent,
    /// The connection ended before the head, or a POST that may have started has no head. Or the body cannot be sent again.
    ///
    /// Also used if the client has disconnected, because the result is not used in that case.
    Broken,
    /// The body of the request stalled while it was being sent.
    Stalled,
}

// === impl Failure ===

impl Failure {
    /// Returns the label of the metric.
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
