//! The interface of everything that injects a cancel into a server.

use std::{fmt, pin::Pin, sync::Arc};

use http::StatusCode;

use crate::call::{CallInfo, CancelReason, Scope};

/// A cancel on its way into the server.
pub(crate) type Injection = Pin<Box<dyn Future<Output = Result<(), CancelError>> + Send>>;

/// Announces that a cancel may follow. The session of the call is not closed while this guard exists.
pub(crate) type CancelGuard = Box<dyn Send>;

/// Injects a cancel into the server that runs a call.
pub(crate) trait Canceller: Send + Sync {
    /// Returns the scope in which the session ids of its calls are unique.
    fn scope(&self) -> Scope;

    /// Returns `true` if another server may continue the streams of its calls.
    fn has_event_store(&self) -> bool {
        false
    }

    /// Returns `true` if the answer to `call` is observed even if no stream of it is read.
    fn observes_answers(&self, _call: &CallInfo) -> bool {
        false
    }

    /// Announces that `call` may be about to be cancelled. Returns `None` if no task would wait for the guard.
    fn announce_cancel(&self, _call: &CallInfo) -> Option<CancelGuard> {
        None
    }

    /// Sends the cancel of `call` to the server once. `Ok` means that the server accepted the message, not that the handler has
    /// ended.
    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection;
}

/// The error of a cancel that was not delivered to the server.
///
/// The call's [`CallToken`](crate::CallToken) has fired nevertheless.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event};
///
/// let layer = CancelOnDisconnectLayer::new().observe_fn(|event| {
///     if let Event::CancelFailed { call, error, .. } = event {
///         match error.status() {
///             Some(status) => eprintln!("{} keeps running: refused with {status}", call.request_id()),
///             None if error.is_timeout() => eprintln!("{} keeps running: its session is stuck", call.request_id()),
///             None => eprintln!("{} keeps running: {error}", call.request_id()),
///         }
///     }
/// });
/// assert!(layer.calls().is_empty());
/// ```
#[derive(Debug)]
pub struct CancelError(Kind);

#[derive(Debug)]
enum Kind {
    Refused(StatusCode),
    Failed(Box<str>),
    TimedOut,
    Undelivered,
    Reused,
}

// === impl CancelError ===

impl CancelError {
    pub(crate) const TIMED_OUT: Self = Self(Kind::TimedOut);
    pub(crate) const UNDELIVERED: Self = Self(Kind::Undelivered);
    /// The cancel would have hit another call that reused the id.
    pub(crate) const REUSED: Self = Self(Kind::Reused);

    pub(crate) fn refused(status: StatusCode) -> Self {
        Self(Kind::Refused(status))
    }

    pub(crate) fn failed(cause: impl Into<Box<str>>) -> Self {
        Self(Kind::Failed(cause.into()))
    }

    /// Returns the status with which the inner service refused the replayed cancel.
    ///
    /// Returns `None` if the cancel failed in any other way.
    pub fn status(&self) -> Option<StatusCode> {
        match self.0 {
            Kind::Refused(status) => Some(status),
            _ => None,
        }
    }

    /// Returns `true` if the same cancel may be accepted a little later: 429, 502, 503 or 504.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self.status(),
            Some(
                StatusCode::TOO_MANY_REQUESTS
                    | StatusCode::BAD_GATEWAY
                    | StatusCode::SERVICE_UNAVAILABLE
                    | StatusCode::GATEWAY_TIMEOUT
            )
        )
    }

    /// Returns `true` if the server did not accept the cancel in time. Its session may be blocked.
    pub fn is_timeout(&self) -> bool {
        matches!(self.0, Kind::TimedOut)
    }
}

impl fmt::Display for CancelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Refused(status) => write!(f, "the service refused the cancel with {status}"),
            Kind::Failed(cause) => write!(f, "the cancel could not be delivered: {cause}"),
            Kind::TimedOut => f.write_str("the service did not accept the cancel in time"),
            Kind::Undelivered => {
                f.write_str("no runtime polled the delivery of the cancel until its end")
            }
            Kind::Reused => f.write_str("another call has reused the request id"),
        }
    }
}

impl std::error::Error for CancelError {}
