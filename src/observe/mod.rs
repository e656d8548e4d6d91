//! The types of events and snapshots, metrics, and the log.
//!
//! An [`Observer`] gets every [`Event`] of a layer. This module has the types with which an event describes a call that lost
//! its client, was beyond a limit, or could not be cancelled. It also has what [`Calls::snapshot`](crate::Calls::snapshot)
//! shows of the calls in flight.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use axum::{Router, body::{Body, Bytes}, routing::post};
//! use http::Request;
//! use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event, observe::Unreadable};
//! use tower::ServiceExt;
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! let unread = Arc::new(Mutex::new(Vec::new()));
//! let log = unread.clone();
//! let layer = CancelOnDisconnectLayer::new().observe_fn(move |event| {
//!     if let Event::Unwatched { why, .. } = event {
//!         log.lock().unwrap().push(*why);
//!     }
//! });
//! let app: Router = Router::new().route("/mcp", post(async |_: Bytes| "ok")).layer(layer);
//!
//! let request = Request::post("/mcp").header("content-type", "application/json");
//! app.oneshot(request.body(Body::from("[]")).unwrap()).await.unwrap();
//! assert_eq!(*unread.lock().unwrap(), [Unreadable::Batch]);
//! # }
//! ```

use std::{fmt, sync::Arc};

use crate::quietly::quietly;

pub(crate) mod event;
#[cfg(feature = "metrics")]
mod meter;
mod remarks;
#[cfg(feature = "rmcp")]
mod session;
mod snapshot;
mod trace;

#[cfg(feature = "metrics")]
pub use self::meter::Metrics;
#[cfg(feature = "rmcp")]
pub use self::session::SessionEvent;
pub(crate) use self::{
    event::{Event, Observer},
    remarks::{Remark, Remarks},
    trace::{HandlerEnd, log_dropped, log_limit},
};
pub use self::{
    snapshot::{CallSnapshot, CallState},
    trace::SessionIds,
};
pub use crate::{
    call::{DetachCause, Detachment},
    cancel::CancelError,
    envelope::Unreadable,
    limits::Limit,
};

/// The log, and the observers that were added.
#[derive(Clone, Default)]
pub(crate) struct Observers {
    pub(crate) session_ids: SessionIds,
    added: Vec<Arc<dyn Observer>>,
}

// === impl Observers ===

impl Observers {
    pub(crate) fn add(&mut self, observer: impl Observer) {
        self.added.push(Arc::new(observer));
    }

    pub(crate) fn on_event(&self, event: &Event<'_>) {
        // Also where nobody subscribes: `tracing` may hand its lines on to a logger of the `log` crate then.
        trace::log(event, self.session_ids);
        for observer in &self.added {
            tell(&**observer, event);
        }
    }

    /// Logs that a stream of no call was let go, because its client did not read it.
    pub(crate) fn on_stalled_stream(&self, session: Option<&str>) {
        trace::log_stalled(session, self.session_ids);
    }
}

/// Tells an observer. If it panics, neither the call nor another observer is harmed.
fn tell(observer: &(impl Observer + ?Sized), event: &Event<'_>) {
    quietly(|| observer.on_event(event));
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} observers", self.added.len())
    }
}
