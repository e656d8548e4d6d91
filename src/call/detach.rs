//! Why a call was detached, and for how long.

use std::{fmt, time::Duration};

use tokio::time::Instant;

use crate::call::CancelReason;

/// Why a call's stream ended before the answer was delivered.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event, observe::DetachCause};
///
/// let layer = CancelOnDisconnectLayer::new().observe(|event: &Event<'_>| {
///     if let Event::Detached { call, cause: DetachCause::Stalled, .. } = event {
///         eprintln!("the client of {} is not reading", call.request_id());
///     }
/// });
/// assert_eq!(DetachCause::Disconnected.to_string(), "disconnected");
/// # drop(layer);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DetachCause {
    /// The client closed its connection or reset its stream.
    ///
    /// hyper either dropped the response or failed to read the request. It looks the same if a service outside the layer dropped the
    /// response.
    Disconnected,
    /// The kernel reported that the connection was closed while hyper was not reading from it.
    ///
    /// See `WatchedListener` (feature `socket`).
    PeerClosed,
    /// The client is still connected, but has not read anything for the [`stall_timeout`](crate::CancelOnDisconnectLayer::stall_timeout).
    Stalled,
    /// The server ended the stream before sending the answer. It usually expects the client to resume (SEP-1699).
    ///
    /// rmcp also ends a stream just before it accepts another resume from the client.
    EndedByServer,
    /// A service between the layer and the handler dropped the stream, or the body failed.
    ResponseDropped,
    /// The inner service panicked.
    ServicePanicked,
}

/// A period during which a call was detached.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event};
///
/// let layer = CancelOnDisconnectLayer::new().observe_fn(|event| {
///     if let Event::Resumed { detachment: Some(detachment), .. } = event {
///         println!("resumed after {:?} ({})", detachment.lasted(), detachment.cause());
///     }
/// });
/// assert!(layer.calls().is_empty());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Detachment {
    cause: DetachCause,
    detached_at: Instant,
}

// === impl DetachCause ===

impl DetachCause {
    /// Returns the reason for a cancellation that does not wait for the client to resume.
    pub(crate) fn reason(self) -> CancelReason {
        match self {
            Self::Disconnected | Self::PeerClosed | Self::Stalled => {
                CancelReason::ClientDisconnected
            }
            Self::EndedByServer => CancelReason::Orphaned,
            Self::ResponseDropped => CancelReason::ResponseDropped,
            Self::ServicePanicked => CancelReason::ServicePanicked,
        }
    }

    /// Returns the name used in metrics and serialized data.
    #[cfg(any(feature = "metrics", feature = "serde"))]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::PeerClosed => "peer_closed",
            Self::Stalled => "stalled",
            Self::EndedByServer => "ended_by_server",
            Self::ResponseDropped => "response_dropped",
            Self::ServicePanicked => "service_panicked",
        }
    }

    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Disconnected => "disconnected",
            Self::PeerClosed => "connection closed",
            Self::Stalled => "client stopped reading",
            Self::EndedByServer => "stream ended by the server",
            Self::ResponseDropped => "response dropped by the server",
            Self::ServicePanicked => "service panicked",
        }
    }
}

impl fmt::Display for DetachCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

// === impl Detachment ===

impl Detachment {
    pub(crate) fn new(cause: DetachCause, detached_at: Instant) -> Self {
        Self { cause, detached_at }
    }

    /// Returns why the call was detached.
    pub fn cause(&self) -> DetachCause {
        self.cause
    }

    /// Returns how long ago the call was detached.
    ///
    /// The duration keeps growing even after the call has been resumed, so read it while the event is being reported.
    pub fn lasted(&self) -> Duration {
        self.detached_at.elapsed()
    }

    pub(crate) fn detached_at(&self) -> Instant {
        self.detached_at
    }
}
