//! How a call ended, and why it was cancelled.

use std::fmt;

/// Why a call was cancelled.
///
/// Its `Display` form is sent as the `reason` in the injected `notifications/cancelled`.
///
/// ```
/// use mcp_cancel_on_disconnect::CancelReason;
///
/// assert_eq!(CancelReason::ClientDisconnected.to_string(), "client disconnected");
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CancelReason {
    /// The client disconnected or stopped reading, and the call had no grace period.
    ClientDisconnected,
    /// The call was detached, and its client did not resume it within the grace period.
    Orphaned,
    /// The client resent the same call while this one was detached.
    Superseded,
    /// The call lasted longer than its policy allowed.
    TimedOut,
    /// The server requested the cancellation, for example through [`Calls::cancel`](crate::Calls::cancel).
    Requested,
    /// The server is shutting down: [`Calls::drain`](crate::Calls::drain) was called.
    ShuttingDown,
    /// The call's session was closed.
    SessionClosed,
    /// The client cancelled the call itself by sending `notifications/cancelled`.
    ClientCancelled,
    /// A service between the layer and the handler dropped the call's stream, or its body failed.
    ///
    /// This can be caused by a timeout service inside the layer, for example.
    ResponseDropped,
    /// The inner service panicked while the call was in flight.
    ServicePanicked,
}

/// How a call ended, as far as the layer could tell.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelReason, Outcome};
///
/// assert_ne!(Outcome::Completed, Outcome::Cancelled(CancelReason::Orphaned));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Outcome {
    /// The call's answer was observed.
    ///
    /// An answer is a JSON-RPC result or error, or a complete 2xx body that is not an event stream. A gateway may also have reported it
    /// with [`CallToken::answered`](crate::CallToken::answered).
    Completed,
    /// The call was cancelled.
    ///
    /// Without a session manager, the call may have completed unnoticed while it was detached.
    Cancelled(CancelReason),
    /// The layer gave up on the call for this reason, but could not notify the server.
    ///
    /// All of the following apply:
    ///
    /// - No cancellation can be injected, because the call has no session or another request has the same id.
    /// - No handler has observed the [`CallToken`](crate::CallToken).
    /// - In the call's protocol revision, closing the stream does not cancel the call.
    ///
    /// The call keeps running, unless its server stops calls whose streams are dropped, as rmcp 3 does if the call's events are not stored.
    Abandoned(CancelReason),
    /// The client cancelled the call.
    ClientCancelled,
    /// The inner service failed or refused the request, for example with a status other than 2xx.
    Failed,
    /// The layer stopped observing the call without cancelling it.
    ///
    /// This can happen for several reasons:
    ///
    /// - The call is detached and keeps running behind a layer without a session manager.
    /// - The call exceeded a limit.
    /// - The call's answer cannot be distinguished from other messages.
    /// - The client reused the call's id, which the specification forbids.
    Unknown,
}

// === impl CancelReason ===

impl CancelReason {
    /// Returns the name used in metrics and serialized data.
    #[cfg(any(feature = "metrics", feature = "serde"))]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::ClientDisconnected => "client_disconnected",
            Self::Orphaned => "orphaned",
            Self::Superseded => "superseded",
            Self::TimedOut => "timed_out",
            Self::Requested => "requested",
            Self::ShuttingDown => "shutting_down",
            Self::SessionClosed => "session_closed",
            Self::ClientCancelled => "client_cancelled",
            Self::ResponseDropped => "response_dropped",
            Self::ServicePanicked => "service_panicked",
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::ClientDisconnected => "client disconnected",
            Self::Orphaned => "client did not resume within the grace period",
            Self::Superseded => "superseded by a repeated call",
            Self::TimedOut => "timed out",
            Self::Requested => "requested by the server",
            Self::ShuttingDown => "server shutting down",
            Self::SessionClosed => "session closed",
            Self::ClientCancelled => "requested by the client",
            Self::ResponseDropped => "response dropped by the server",
            Self::ServicePanicked => "service panicked",
        }
    }
}

impl fmt::Display for CancelReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

// === impl Outcome ===

#[cfg(any(feature = "metrics", feature = "serde"))]
impl Outcome {
    /// Returns the name used in metrics and serialized data.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Completed => "completed",
            Self::Cancelled(_) => "cancelled",
            Self::Abandoned(_) => "abandoned",
            Self::ClientCancelled => "client_cancelled",
            Self::Failed => "failed",
            Self::Unknown => "unknown",
        }
    }
}
