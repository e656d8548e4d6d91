//! What the layer saw, for logs and for whoever wants to know.

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use crate::{
    call::{CallInfo, Outcome},
    cancel::CancelError,
    detach::{DetachCause, Detachment},
    envelope::Unknown,
};

mod trace;

#[cfg(feature = "rmcp")]
pub(crate) use self::trace::HandlerEnd;
pub(crate) use self::trace::{Remark, say_once};

/// Something that happened to a call, or a request that could not be read as one.
///
/// Every call is started once and ends once. Events of one call that happen on different threads at the same time
/// may come in any order. See [`Observer`] for an example.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// A call is in flight.
    #[non_exhaustive]
    Started {
        /// The call.
        call: &'a CallInfo,
    },
    /// Its client went away.
    #[non_exhaustive]
    Detached {
        /// The call.
        call: &'a CallInfo,
        /// How.
        cause: DetachCause,
        /// How long it may wait for its client: zero if it is cancelled now, `None` if it may run to its end.
        grace: Option<Duration>,
    },
    /// Its client came back for it.
    #[non_exhaustive]
    Resumed {
        /// The call.
        call: &'a CallInfo,
        /// Its time without a client, unless the client was back before it was known to be gone.
        detachment: Option<Detachment>,
    },
    /// It ended. If it was cancelled, its token has fired and the server is being told.
    #[non_exhaustive]
    Ended {
        /// The call.
        call: &'a CallInfo,
        /// How.
        outcome: Outcome,
        /// Its time without a client, if it had none.
        detachment: Option<Detachment>,
    },
    /// It was cancelled, but the server could not be told. Not tried again.
    #[non_exhaustive]
    CancelFailed {
        /// The call.
        call: &'a CallInfo,
        /// Why.
        error: &'a CancelError,
    },
    /// The body of a POST could not be read as JSON-RPC with certainty. It went to the inner service
    /// untouched, and nothing in it will be cancelled.
    #[non_exhaustive]
    Unknown {
        /// Why.
        why: Unknown,
    },
}

/// Gets every [`Event`] of a layer and its clones. Closures are observers.
///
/// It is called where the event happens, also inside `Drop`: it must not block, and must not call back
/// into what it observes. A panic in it is caught and ignored.
///
/// ```
/// use std::sync::{Arc, atomic::{AtomicUsize, Ordering}};
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event, Outcome};
///
/// let cancelled = Arc::new(AtomicUsize::new(0));
/// let count = cancelled.clone();
/// let layer = CancelOnDisconnectLayer::new().observe(move |event: &Event<'_>| {
///     if let Event::Ended { outcome: Outcome::Cancelled(_), .. } = event {
///         count.fetch_add(1, Ordering::Relaxed);
///     }
/// });
/// assert_eq!(cancelled.load(Ordering::Relaxed), 0);
/// # drop(layer);
/// ```
pub trait Observer: Send + Sync + 'static {
    /// Takes note of `event`.
    fn on_event(&self, event: &Event<'_>);
}

impl<F: Fn(&Event<'_>) + Send + Sync + 'static> Observer for F {
    fn on_event(&self, event: &Event<'_>) {
        self(event);
    }
}

/// The log, and the observers that were added.
#[derive(Clone, Default)]
pub(crate) struct Observers(Vec<Arc<dyn Observer>>);

// === impl Observers ===

impl Observers {
    pub(crate) fn add(&mut self, observer: impl Observer) {
        self.0.push(Arc::new(observer));
    }

    pub(crate) fn on_event(&self, event: &Event<'_>) {
        trace::log(event);
        for observer in &self.0 {
            // A broken observer must not take a call down with it.
            let _panic = catch_unwind(AssertUnwindSafe(|| observer.on_event(event)));
        }
    }
}

impl fmt::Debug for Observers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} observers", self.0.len())
    }
}
