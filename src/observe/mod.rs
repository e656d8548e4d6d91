//! Events: what the layer saw, for the log and for observers.

use std::{fmt, sync::Arc, time::Duration};

use crate::{
    call::{CallId, CallInfo, DetachCause, Detachment, Outcome},
    cancel::CancelError,
    envelope::Unknown,
    limits::Limit,
    quietly::quietly,
};

#[cfg(feature = "metrics")]
mod meter;
mod remarks;
mod trace;

#[cfg(feature = "metrics")]
pub use self::meter::Metrics;
#[cfg(feature = "rmcp")]
pub(crate) use self::trace::HandlerEnd;
pub use self::trace::SessionIds;
pub(crate) use self::{
    remarks::{Remark, Remarks},
    trace::{log_dropped, log_limit},
};

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
    /// There is no room for it among the calls that are tracked: it runs on as without the layer. If it was tracked so
    /// far, it has ended as [`Outcome::Unknown`] for the layer, which is reported next.
    #[non_exhaustive]
    Untracked {
        /// The call.
        call: &'a CallInfo,
        /// What there are too many of.
        limit: Limit,
    },
    /// What was kept of an ended call was dropped, or could not be kept, for want of room. Its client, which was away
    /// when the answer came, or whose call was cancelled, may come for it in vain.
    ///
    /// The call that needed the room, mostly another one, tells its own observers.
    #[non_exhaustive]
    AnswerDropped {
        /// The call.
        call: CallId,
        /// The id of its session.
        session: &'a str,
        /// How it ended.
        outcome: Outcome,
        /// How many bytes were counted for it, see
        /// [`Limits::retained`](crate::Limits::retained).
        bytes: usize,
    },
    /// The body of a POST could not be read as JSON-RPC with certainty. It went to the inner service
    /// untouched, and nothing in it will be cancelled.
    #[non_exhaustive]
    Unknown {
        /// Why.
        why: Unknown,
    },
}

/// Gets every [`Event`] of a layer and its clones. Closures are observers, and so are tuples of up to eight. A closure that
/// does not name the type of its argument goes in by [`observe_fn`](crate::CancelOnDisconnectLayer::observe_fn).
///
/// It is called where the event happens, also inside `Drop`, with no lock held, and before what comes next for the call:
///
/// - It must not block, which would hold up the runtime and the cancel. For what takes time, send to a channel.
/// - It must not call back into what it observes.
/// - It should not panic. If it does, the panic is caught and nothing more comes of it, for the call as for the other
///   observers. (The panic hook still prints it; with `panic = "abort"` the process ends.)
///
/// The current span is that in which the call's request was served, if there was one; of an
/// [`AnswerDropped`](Event::AnswerDropped) it may be any.
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

macro_rules! tuples {
    () => {};
    ($first:ident $($name:ident)*) => {
        tuples!($($name)*);

        impl<$first: Observer, $($name: Observer),*> Observer for ($first, $($name,)*) {
            #[allow(non_snake_case, reason = "the types of a tuple name its fields as well")]
            fn on_event(&self, event: &Event<'_>) {
                let ($first, $($name,)*) = self;
                tell($first, event);
                $(tell($name, event);)*
            }
        }
    };
}

tuples!(A B C D E F G H);

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
