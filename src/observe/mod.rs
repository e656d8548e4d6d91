//! Observing a layer's calls: events, snapshots, metrics and the log.
//!
//! An [`Observer`] receives every [`Event`] of a layer. The types in this module describe an event's details, such as why a call was
//! detached, which limit it exceeded, or why its cancellation could not be delivered. [`Calls::snapshot`](crate::Calls::snapshot) returns
//! snapshots of in-flight calls.

use std::{fmt, sync::Arc};

use crate::catch_panic::catch_panic;

pub(crate) mod event;
mod log;
#[cfg(feature = "metrics")]
mod metrics;
#[cfg(feature = "rmcp")]
mod session;
mod setup_hints;
mod snapshot;
#[cfg(feature = "metrics")]
mod tool_names;

#[cfg(feature = "rmcp")]
pub use self::session::{SessionEnd, SessionEvent};
pub(crate) use self::{
    event::{Event, Observer},
    log::{HandlerEnd, log_evicted, log_limit},
    setup_hints::{Hint, SetupHints},
};
pub use self::{
    log::SessionIds,
    snapshot::{CallSnapshot, CallState},
};
#[cfg(feature = "metrics")]
pub use self::{metrics::Metrics, tool_names::ToolNames};
pub use crate::{
    call::{DetachCause, Detachment},
    cancel::CancelError,
    envelope::ParseFailure,
    limits::Limit,
};

/// The log, and the observers added by the application.
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
        // Log even without a subscriber, because `tracing` may forward the lines to a logger of the `log` crate. A panicking subscriber
        // must not affect the call or the observers.
        catch_panic(|| log::log(event, self.session_ids));
        for observer in &self.added {
            // A panic must not affect the call or the other observers.
            catch_panic(|| observer.on_event(event));
        }
    }

    /// Logs that a stream without a call has been closed because its client stopped reading it.
    pub(crate) fn on_stalled_stream(&self, session: Option<&str>) {
        catch_panic(|| log::log_stalled(session, self.session_ids));
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} observers", self.added.len())
    }
}
