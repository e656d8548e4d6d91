//! The interface for injecting cancellations into a server.

use std::{fmt, pin::Pin, sync::Arc};

use http::StatusCode;

use crate::call::{CallInfo, CancelReason, Scope};

/// A cancellation on its way to the server.
pub(crate) type Injection = Pin<Box<dyn Future<Output = Result<(), CancelError>> + Send>>;

/// Keeps a call's session open while a cancellation may be imminent.
pub(crate) type CancelGuard = Box<dyn Send>;

/// Injects a cancellation into the server running a call.
pub(crate) trait Canceller: Send + Sync {
    /// Returns the scope within which this server's session ids are unique.
    fn scope(&self) -> Scope;

    /// Returns `true` if events are stored, so that another server may continue a call's stream.
    fn has_event_store(&self) -> bool {
        false
    }

    /// Returns `true` if the answer to `call` is observed even if none of its streams is being read.
    fn observes_answers(&self, _call: &CallInfo) -> bool {
        false
    }

    /// Announces that `call` may soon be cancelled. Returns `None` if no task would wait for the guard.
    fn announce_cancel(&self, _call: &CallInfo) -> Option<CancelGuard> {
        None
    }

    /// Sends the cancellation for `call` to the server once. `Ok` only means that the server has accepted the message, not that the handler
    /// has ended.
    fn cancel(self: Arc<Self>, call: &CallInfo, reason: CancelReason) -> Injection;
}

/// The error for a cancellation that could not be delivered to the server.
///
/// The call's [`CallToken`](crate::CallToken) has fired regardless.
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
    ServiceFailed,
    TimedOut,
    Undelivered,
    Reused,
}

// === impl CancelError ===

impl CancelError {
    pub(crate) const TIMED_OUT: Self = Self(Kind::TimedOut);
    pub(crate) const UNDELIVERED: Self = Self(Kind::Undelivered);
    /// The inner service returned an error instead of a response. It may be shedding load.
    pub(crate) const SERVICE_FAILED: Self = Self(Kind::ServiceFailed);
    /// Another call has reused the id, and would have been cancelled instead.
    pub(crate) const REUSED: Self = Self(Kind::Reused);

    pub(crate) fn refused(status: StatusCode) -> Self {
        Self(Kind::Refused(status))
    }

    pub(crate) fn failed(cause: impl Into<Box<str>>) -> Self {
        Self(Kind::Failed(cause.into()))
    }

    /// Returns the status with which the inner service refused the replayed cancellation.
    ///
    /// Returns `None` if the cancellation failed for any other reason.
    pub fn status(&self) -> Option<StatusCode> {
        match self.0 {
            Kind::Refused(status) => Some(status),
            _ => None,
        }
    }

    /// Returns `true` if a retry may succeed.
    ///
    /// This is the case if the inner service failed, or responded with 429, 502, 503 or 504.
    pub(crate) fn is_transient(&self) -> bool {
        matches!(
            self.0,
            Kind::ServiceFailed
                | Kind::Refused(
                    StatusCode::TOO_MANY_REQUESTS
                        | StatusCode::BAD_GATEWAY
                        | StatusCode::SERVICE_UNAVAILABLE
                        | StatusCode::GATEWAY_TIMEOUT
                )
        )
    }

    /// Returns `true` if the server did not accept the cancellation in time. The call's session may be blocked.
    pub fn is_timeout(&self) -> bool {
        matches!(self.0, Kind::TimedOut)
    }
}

impl fmt::Display for CancelError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Kind::Refused(status) => {
                write!(f, "the service refused the cancellation with {status}")
            }
            Kind::Failed(cause) => write!(f, "the cancellation could not be delivered: {cause}"),
            Kind::ServiceFailed => f.write_str("the inner service failed"),
            Kind::TimedOut => f.write_str("the service did not accept the cancellation in time"),
            Kind::Undelivered => {
                f.write_str("no runtime polled the cancellation's delivery to completion")
            }
            Kind::Reused => f.write_str("another call has reused the request id"),
        }
    }
}

impl std::error::Error for CancelError {}
