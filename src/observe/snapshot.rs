//! Snapshots of in-flight calls.

use std::time::Duration;

use crate::call::{CallId, CallInfo};

/// An in-flight call, as it was when [`Calls::snapshot`](crate::Calls::snapshot) was called.
///
/// ```
/// use axum::{Router, body::{Body, Bytes}, routing::post};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, observe::CallState};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let layer = CancelOnDisconnectLayer::new();
/// let calls = layer.calls();
/// let app: Router = Router::new()
///     .route("/mcp", post(async |_: Bytes| std::future::pending::<()>().await))
///     .layer(layer);
/// let call = r#"{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"upload"}}"#;
/// let request = Request::post("/mcp").header("content-type", "application/json");
/// let mut response = Box::pin(app.oneshot(request.body(Body::from(call)).unwrap()));
/// assert!(futures_util::poll!(&mut response).is_pending());
///
/// let [call] = &calls.snapshot()[..] else { panic!("one call") };
/// assert_eq!(call.state(), CallState::Attached);
/// assert_eq!((call.id(), call.time_left()), (call.info().id(), None));
/// assert!(call.age() <= call.info().age(), "the snapshot's age does not advance");
/// # }
/// ```
#[derive(Debug, Clone)]
pub struct CallSnapshot {
    pub(crate) info: CallInfo,
    pub(crate) age: Duration,
    pub(crate) state: CallState,
    pub(crate) time_left: Option<Duration>,
}

/// Whether a call is attached or detached.
///
/// ```
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, observe::CallState};
///
/// let calls = CancelOnDisconnectLayer::new().calls().snapshot();
/// let detached = calls.iter().filter(|call| call.state() != CallState::Attached);
/// assert_eq!(detached.count(), 0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum CallState {
    /// One of the call's streams is open, or its client is waiting for the response head.
    Attached,
    /// None of the call's streams is open, and no client is waiting for its response head.
    #[non_exhaustive]
    Detached {
        /// How long the call has been detached.
        since: Duration,
        /// How much longer the call waits to be resumed, or `None` if it runs to completion.
        grace_left: Option<Duration>,
    },
}

// === impl CallSnapshot ===

impl CallSnapshot {
    /// Returns the call's id within this process, which [`Calls::cancel`](crate::Calls::cancel) takes.
    pub fn id(&self) -> CallId {
        self.info.id()
    }

    /// Returns the call's description.
    pub fn info(&self) -> &CallInfo {
        &self.info
    }

    /// Returns how long the layer has tracked the call.
    pub fn age(&self) -> Duration {
        self.age
    }

    /// Returns whether the call is attached or detached.
    pub fn state(&self) -> CallState {
        self.state
    }

    /// Returns how much longer the call may last, or `None` without a [`call_timeout`](crate::Policy::call_timeout).
    pub fn time_left(&self) -> Option<Duration> {
        self.time_left
    }
}
