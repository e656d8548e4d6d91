//! Events, and the trait of their observers.

use std::{fmt, time::Duration};

use crate::{
    call::{CallId, CallInfo, DetachCause, Detachment, Outcome},
    cancel::CancelError,
    envelope::ParseFailure,
    limits::Limit,
};

/// Something that happened to a call, or a request that could not be read as one.
///
/// Every call starts once and ends once. Events of one call that happen on different threads at the same time may come in any
/// order.
///
/// ```
/// use axum::{Router, body::{Body, Bytes, to_bytes}, routing::post};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let (sender, said) = std::sync::mpsc::channel();
/// let layer = CancelOnDisconnectLayer::new().observe_fn(move |event| {
///     let _sent = match event {
///         Event::Started { call, .. } => sender.send(format!("{} starts", call.method())),
///         Event::Ended { outcome, .. } => sender.send(format!("{outcome:?}")),
///         _ => Ok(()),
///     };
/// });
/// let app: Router = Router::new().route("/mcp", post(async |_: Bytes| "{}")).layer(layer);
/// let call = r#"{"jsonrpc":"2.0","id":7,"method":"prompts/list"}"#;
/// let request = Request::post("/mcp").header("content-type", "application/json");
/// let response = app.oneshot(request.body(Body::from(call)).unwrap()).await.unwrap();
/// // The call ends with the last byte of its answer.
/// to_bytes(response.into_body(), 1024).await.unwrap();
/// assert_eq!(said.try_iter().collect::<Vec<_>>(), ["prompts/list starts", "Completed"]);
/// # }
/// ```
///
/// `Debug` leaves out the session id, because a client that knows it can speak for the session.
#[non_exhaustive]
pub enum Event<'a> {
    /// A call is in flight.
    #[non_exhaustive]
    Started {
        /// The call.
        call: &'a CallInfo,
    },
    /// The client of a call went away.
    #[non_exhaustive]
    Detached {
        /// The call.
        call: &'a CallInfo,
        /// Why its stream ended.
        cause: DetachCause,
        /// How long the call may wait for its client. Zero: it is cancelled now, or when a resume that was received before is refused.
        /// `None`: it may run to its end.
        grace: Option<Duration>,
    },
    /// The client of a call came back for it.
    #[non_exhaustive]
    Resumed {
        /// The call.
        call: &'a CallInfo,
        /// The time without a client, unless the client was back before its loss was noticed.
        detachment: Option<Detachment>,
    },
    /// A call ended. If it was cancelled, its token has fired and the server is being notified.
    #[non_exhaustive]
    Ended {
        /// The call.
        call: &'a CallInfo,
        /// How it ended.
        outcome: Outcome,
        /// The time without a client, if the call had none at its end.
        detachment: Option<Detachment>,
    },
    /// A call was cancelled, but the server could not be notified. This is not tried again.
    #[non_exhaustive]
    CancelFailed {
        /// The call.
        call: &'a CallInfo,
        /// Why the server could not be notified.
        error: &'a CancelError,
    },
    /// There is no room for a call among those that are tracked, so it runs on as without the layer. If it was tracked so far,
    /// it has ended as [`Outcome::Unknown`] for the layer, which is reported next.
    #[non_exhaustive]
    Untracked {
        /// The call.
        call: &'a CallInfo,
        /// The limit that the call met.
        limit: Limit,
    },
    /// The record of an ended call had to go, or could not be kept, because there is no room. Its client was away when the
    /// answer came, or had its call cancelled, and may now resume in vain.
    ///
    /// This is reported to the observers of the call that needed the room, which is mostly another call.
    #[non_exhaustive]
    AnswerEvicted {
        /// The call.
        call: CallId,
        /// The id of its session.
        session: &'a str,
        /// How it ended.
        outcome: Outcome,
        /// How many bytes were counted for the record, see [`Limits::retained`](crate::Limits::retained).
        bytes: usize,
    },
    /// The body of a POST could not be read as JSON-RPC with certainty. It went to the inner service untouched, and makes no
    /// call.
    #[non_exhaustive]
    UnparsedBody {
        /// Why the body could not be read.
        why: ParseFailure,
    },
}

impl fmt::Debug for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started { call } => f.debug_struct("Started").field("call", call).finish(),
            Self::Detached { call, cause, grace } => {
                let mut shown = f.debug_struct("Detached");
                shown.field("call", call).field("cause", cause);
                shown.field("grace", grace).finish()
            }
            Self::Resumed { call, detachment } => {
                let mut shown = f.debug_struct("Resumed");
                shown.field("call", call);
                shown.field("detachment", detachment).finish()
            }
            Self::Ended {
                call,
                outcome,
                detachment,
            } => {
                let mut shown = f.debug_struct("Ended");
                shown.field("call", call).field("outcome", outcome);
                shown.field("detachment", detachment).finish()
            }
            Self::CancelFailed { call, error } => {
                let mut shown = f.debug_struct("CancelFailed");
                shown.field("call", call).field("error", error).finish()
            }
            Self::Untracked { call, limit } => {
                let mut shown = f.debug_struct("Untracked");
                shown.field("call", call).field("limit", limit).finish()
            }
            Self::AnswerEvicted {
                call,
                session: _,
                outcome,
                bytes,
            } => {
                let mut shown = f.debug_struct("AnswerEvicted");
                shown.field("call", call).field("outcome", outcome);
                shown.field("bytes", bytes).finish_non_exhaustive()
            }
            Self::UnparsedBody { why } => f.debug_struct("UnparsedBody").field("why", why).finish(),
        }
    }
}

/// Gets every [`Event`] of a layer, and of the clones that are made of it afterwards. A layer may have several observers. Closures are observers;
/// [`observe_fn`](crate::CancelOnDisconnectLayer::observe_fn) takes those that do not name the type of their argument.
///
/// An observer is called where the event happens, even inside `Drop`, with no lock held, and before anything else happens to
/// the call:
///
/// - It must not block, because that would hold up the runtime and the cancel. Work that takes time belongs behind a channel.
/// - It must not call back into what it observes.
/// - It should not panic. If it does, the panic is caught and affects neither the call nor the other observers. (The panic hook
///   still prints it, and with `panic = "abort"` the process ends.)
///
/// The current span is the one in which the call's request was served, if there was one. For an
/// [`AnswerEvicted`](Event::AnswerEvicted) it may be any span.
///
/// ```
/// use std::sync::{Arc, atomic::{AtomicUsize, Ordering}};
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event, Observer, Outcome};
///
/// #[derive(Clone, Default)]
/// struct Cancelled(Arc<AtomicUsize>);
/// impl Observer for Cancelled {
///     fn on_event(&self, event: &Event<'_>) {
///         if let Event::Ended { outcome: Outcome::Cancelled(_), .. } = event {
///             self.0.fetch_add(1, Ordering::Relaxed);
///         }
///     }
/// }
///
/// let cancelled = Cancelled::default();
/// let layer = CancelOnDisconnectLayer::new().observe(cancelled.clone());
/// assert_eq!(cancelled.0.load(Ordering::Relaxed), 0);
/// # drop(layer);
/// ```
pub trait Observer: Send + Sync + 'static {
    /// Is called with every event.
    fn on_event(&self, event: &Event<'_>);
}

impl<F: Fn(&Event<'_>) + Send + Sync + 'static> Observer for F {
    fn on_event(&self, event: &Event<'_>) {
        self(event);
    }
}
