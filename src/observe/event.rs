//! Events and the trait for observing them.

use std::{fmt, time::Duration};

use crate::{
    call::{CallId, CallInfo, DetachCause, Detachment, Outcome},
    cancel::CancelError,
    envelope::ParseFailure,
    limits::Limit,
};

/// Something that has happened to a call, or a request body that could not be parsed.
///
/// Every tracked call starts and ends exactly once. Events that happen to a call concurrently may be reported in any order.
///
/// ```
/// use axum::{Router, body::{Body, Bytes, to_bytes}, routing::post};
/// use http::Request;
/// use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, Event};
/// use tower::ServiceExt;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// let (sender, reported) = std::sync::mpsc::channel();
/// let layer = CancelOnDisconnectLayer::new().observe_fn(move |event| {
///     let _ = match event {
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
/// assert_eq!(reported.try_iter().collect::<Vec<_>>(), ["prompts/list starts", "Completed"]);
/// # }
/// ```
///
/// `Debug` omits the session id, because anyone who knows it can act on behalf of the session.
#[non_exhaustive]
pub enum Event<'a> {
    /// A call is now in flight.
    #[non_exhaustive]
    Started {
        /// The call that started.
        call: &'a CallInfo,
    },
    /// A call has been detached.
    ///
    /// Either its client disconnected, or its stream ended before the answer was delivered.
    #[non_exhaustive]
    Detached {
        /// The detached call.
        call: &'a CallInfo,
        /// Why the stream ended.
        cause: DetachCause,
        /// How long the call waits to be resumed, or `None` if it may run to completion.
        ///
        /// Zero if the call is cancelled immediately, or as soon as a pending resume has been refused.
        grace: Option<Duration>,
    },
    /// A client has resumed its call, or middleware has resent a detached call's request.
    #[non_exhaustive]
    Resumed {
        /// The resumed call.
        call: &'a CallInfo,
        /// The detachment, or `None` if the client resumed before its disconnect was detected.
        detachment: Option<Detachment>,
    },
    /// A call has ended. If it was cancelled, its token has fired and the server is being notified.
    #[non_exhaustive]
    Ended {
        /// The call that ended.
        call: &'a CallInfo,
        /// How the call ended.
        outcome: Outcome,
        /// The detachment, or `None` if the call was attached when it ended.
        detachment: Option<Detachment>,
    },
    /// A call was cancelled, but the cancellation could not be delivered to the server.
    ///
    /// The cancellation will not be retried.
    #[non_exhaustive]
    CancelFailed {
        /// The cancelled call.
        call: &'a CallInfo,
        /// Why the cancellation could not be delivered.
        error: &'a CancelError,
    },
    /// A call exceeded a limit, so it keeps running untracked, as it would without the layer.
    ///
    /// If the call was already being tracked, it is then reported as ended, with [`Outcome::Unknown`].
    #[non_exhaustive]
    Untracked {
        /// The call that exceeded the limit.
        call: &'a CallInfo,
        /// The limit that the call exceeded.
        limit: Limit,
    },
    /// An ended call's outcome was evicted, or could not be retained, because of a limit.
    ///
    /// The call was cancelled, or it was detached when it ended. A client that resumes it no longer receives the outcome.
    ///
    /// This event is reported to the observers of the call that needed the space, which is usually a different call.
    #[non_exhaustive]
    AnswerEvicted {
        /// The id of the call that ended.
        call: CallId,
        /// The id of the call's session.
        session: &'a str,
        /// How the call ended.
        outcome: Outcome,
        /// The outcome's size in bytes, as counted for [`Limits::retained`](crate::Limits::retained).
        bytes: usize,
    },
    /// A POST body could not be parsed reliably as JSON-RPC.
    ///
    /// The inner service receives it unchanged, and no call is tracked for it.
    #[non_exhaustive]
    UnparsedBody {
        /// Why the body could not be parsed.
        reason: ParseFailure,
    },
}

impl fmt::Debug for Event<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Started { call } => f.debug_struct("Started").field("call", call).finish(),
            Self::Detached { call, cause, grace } => {
                let mut output = f.debug_struct("Detached");
                output.field("call", call).field("cause", cause);
                output.field("grace", grace).finish()
            }
            Self::Resumed { call, detachment } => {
                let mut output = f.debug_struct("Resumed");
                output.field("call", call);
                output.field("detachment", detachment).finish()
            }
            Self::Ended {
                call,
                outcome,
                detachment,
            } => {
                let mut output = f.debug_struct("Ended");
                output.field("call", call).field("outcome", outcome);
                output.field("detachment", detachment).finish()
            }
            Self::CancelFailed { call, error } => {
                let mut output = f.debug_struct("CancelFailed");
                output.field("call", call).field("error", error).finish()
            }
            Self::Untracked { call, limit } => {
                let mut output = f.debug_struct("Untracked");
                output.field("call", call).field("limit", limit).finish()
            }
            Self::AnswerEvicted {
                call,
                session: _,
                outcome,
                bytes,
            } => {
                let mut output = f.debug_struct("AnswerEvicted");
                output.field("call", call).field("outcome", outcome);
                output.field("bytes", bytes).finish_non_exhaustive()
            }
            Self::UnparsedBody { reason } => f
                .debug_struct("UnparsedBody")
                .field("reason", reason)
                .finish(),
        }
    }
}

/// Receives every [`Event`] from a layer, and from any clones made from it afterwards.
///
/// A layer can have several observers. A closure is an observer, too, and with [`observe_fn`](crate::CancelOnDisconnectLayer::observe_fn),
/// the type of its argument is inferred.
///
/// An observer is called synchronously, possibly from within `Drop`, with no lock held, and before any later event for the same call.
/// Therefore:
///
/// - It must not block, because that would delay the runtime and the cancellation. Hand slow work off through a channel.
/// - It must not call back into the layer or the call.
/// - It should not panic. If it does, the panic is caught and affects neither the call nor the other observers, but the panic hook
///   still prints it, and with `panic = "abort"` it aborts the process.
///
/// An event is reported in the span (if any) in which the call's request was served. The exception is
/// [`AnswerEvicted`](Event::AnswerEvicted), which may be reported in any span.
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
    /// Called for every event.
    fn on_event(&self, event: &Event<'_>);
}

impl<F: Fn(&Event<'_>) + Send + Sync + 'static> Observer for F {
    fn on_event(&self, event: &Event<'_>) {
        self(event);
    }
}
