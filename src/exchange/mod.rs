//! One HTTP request and its response, as they pass through the layer.
//!
//! The service creates an [`Exchange`] for each request. Both bodies, the response future and the session manager hold it and report to
//! it what they see, but the exchange alone decides what that means for its call. It is linked from the request's extensions by the
//! [`CallToken`](crate::CallToken), which rmcp passes to the session manager and the handler.
//!
//! The modules in the first table hold its data, and only `state` among them refers to [`Exchange`]. Those in the second table
//! implement its decisions:
//!
//! | module | what it is |
//! |---|---|
//! | `state` | all its fields |
//! | `identity` | the session and the protocol revision, from the request's headers |
//! | `request_body` | what is known about the request body |
//! | `signal` | the token, and the hooks that fire with it |
//! | `call_streams` | its open streams, and the error sent on them |
//!
//! | module | what it decides |
//! |---|---|
//! | `classify` | what a request is, from its head |
//! | `start` | which call the request carries, from its body |
//! | `attempts` | what each attempt means when a middleware sends a request more than once |
//! | `contest` | what a request over a limit means for the in-flight call with the same id |
//! | `bind` | which call the request carries, and what happens to its streams, as the session manager reports it |
//! | `resume` | which calls a GET with `Last-Event-ID` resumes |
//! | `response` | what the response's head and body mean for the call |
//! | `tap` | what a stream's bytes mean for the call |
//! | `loss` | what losing a stream means for the call |
//! | `end` | how a call ends if it is not cancelled |
//! | `cancel` | how a call is cancelled: under which condition, and which sides are notified |
//! | `expired` | what an expired deadline means for the call |
//! | `confirm` | whether an orphan may be cancelled, if the layer has a `confirm` |
//! | `waiting` | when a call is accepted or has ended, for the tasks that wait for it |
//! | `fire` | how the token fires, and where the clean-ups run |
//! | `inject` | how the server is notified of a cancellation |
//! | `streams` | how the client is notified of a cancellation that it did not request |
//! | `report` | in which span events are reported |
//! | `guard` | when a drop or a panic counts as the end of the response |
//!
//! # Contract
//!
//! 1. An exchange ends once, through whichever of [`complete`](Exchange::complete), [`fail`](Exchange::fail) and
//!    [`on_dropped`](Exchange::on_dropped) is first.
//! 2. It has at most one call, which is set once: by [`bind`](Exchange::bind) from a typed message, or by
//!    [`parse_body`](Exchange::parse_body) from the request body.
//! 3. A cancellation takes effect in the order listed in `cancel`. It becomes pending before its call is removed from the registry,
//!    because closing a session waits for in-flight calls and pending cancellations.
//! 4. No lock is held while a token fires, an observer runs, or a hook runs or is dropped. Only three operations call into the
//!    registry under the state lock: registering a call, setting its key, and adding another attempt's stream. Locks are taken in
//!    this order: the state, the shard, the session entry.
//! 5. Once [`on_answered_externally`](Exchange::on_answered_externally) has been called, the call has completed, whatever its phase.
//!    A call that only becomes known afterwards is never in flight: it is reported as completed and cannot be found. A call that
//!    had already been cancelled stays cancelled.

mod attempts;
mod bind;
mod call_streams;
mod cancel;
mod classify;
mod confirm;
mod contest;
mod end;
mod expired;
mod fire;
mod guard;
mod identity;
mod inject;
mod loss;
mod report;
mod request_body;
mod response;
mod resume;
mod signal;
mod start;
mod state;
mod streams;
mod tap;
mod waiting;

pub(crate) use self::{
    bind::BackgroundReader,
    cancel::{CLOSE_CANCEL_TIMEOUT, Cancel},
    contest::Contest,
    guard::Guard,
    inject::INJECTION_TIMEOUT,
    response::{BodyPlan, Head},
    state::{Attachment, Exchange, LayerShared, OpaqueMessage, PendingCancel, Registry},
    streams::DeliveryGuard,
    tap::Tap,
};
