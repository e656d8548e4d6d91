//! Events, snapshots, metrics and the log.
//!
//! An [`Observer`] receives every [`Event`] of a layer. This module contains the types with which an event describes a call that has
//! been detached, has exceeded a limit, or could not be cancelled. It also contains the snapshots of in-flight calls that
//! [`Calls::snapshot`](crate::Calls::snapshot) returns.

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

/// The log, plus the observers that have been added.
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
        // Logged even without a subscriber, because `tracing` may forward its lines to a logger of the `log` crate. A panicking
        // subscriber affects neither the call nor an observer.
        catch_panic(|| log::log(event, self.session_ids));
        for observer in &self.added {
            // A panic affects neither the call nor the other observers.
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
