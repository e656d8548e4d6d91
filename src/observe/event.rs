//! What observers are told.

use std::time::Duration;

use crate::{
    call::{CallId, CallInfo, DetachCause, Detachment, Outcome},
    cancel::CancelError,
    envelope::Unreadable,
    limits::Limit,
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
    /// What was kept of an ended call had to go, or could not be kept: there is no room. Its client, which was away
    /// when the answer came, or whose call was cancelled, may come for it in vain.
    ///
    /// Told by the call that needed the room, mostly another one, to its observers.
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
    /// untouched, and makes no call.
    #[non_exhaustive]
    Unwatched {
        /// Why.
        why: Unreadable,
    },
}

/// Gets every [`Event`] of a layer and its clones. A layer may have several. Closures are observers; one that does not name
/// the type of its argument goes in by [`observe_fn`](crate::CancelOnDisconnectLayer::observe_fn).
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
