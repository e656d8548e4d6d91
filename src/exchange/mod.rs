//! One HTTP request and its response as they pass through the layer.
//!
//! The service creates an [`Exchange`] for every request. Both bodies, the response future and the session manager hold a reference to the
//! exchange and report what they observe, but only the exchange decides what that means for the request's call. A
//! [`CallToken`](crate::CallToken) in the request's extensions links to it, and rmcp passes this token to the session manager and the
//! handler.
//!
//! The modules in the first table contain the exchange's data. Of these, only `state` refers to [`Exchange`]. The modules in the second
//! table make its decisions:
//!
//! | module | what it contains |
//! |---|---|
//! | `state` | all of the exchange's fields |
//! | `identity` | the session and protocol revision specified by the request's headers |
//! | `request_body` | what is known about the request body |
//! | `signal` | the cancellation token, and the hooks that run when it fires |
//! | `call_streams` | the call's open streams, and the error sent on them |
//!
//! | module | what it decides |
//! |---|---|
//! | `classify` | what kind of request this is, judging by its head |
//! | `start` | which call the request body contains |
//! | `attempts` | what each attempt means for the call if a middleware sends the request more than once |
//! | `contest` | what happens to an in-flight call when a request over the limit has the same id |
//! | `bind` | which call the session manager has received, and what its reports about the call's streams mean |
//! | `resume` | which calls a GET with `Last-Event-ID` resumes |
//! | `response` | what the response head and body mean for the call |
//! | `tap` | what the bytes of a stream mean for the call |
//! | `loss` | what happens to a call whose stream was lost |
//! | `end` | how a call ends when it is not cancelled |
//! | `cancel` | under which conditions a call is cancelled, and which sides are notified |
//! | `expired` | what happens to a call when one of its deadlines expires |
//! | `confirm` | whether an orphan may be cancelled, if the layer has a `confirm` callback |
//! | `waiting` | how long a task waits for a call to be accepted or to end |
//! | `fire` | how the token fires, and on which task each clean-up runs |
//! | `inject` | how the server is notified of a cancellation |
//! | `streams` | how the client is notified of a cancellation that it did not request |
//! | `report` | in which span a call's events are reported |
//! | `guard` | when a drop or a panic ends the exchange |
//!
//! # Contract
//!
//! 1. An exchange ends exactly once, through whichever of [`complete`](Exchange::complete), [`fail`](Exchange::fail) and
//!    [`on_dropped`](Exchange::on_dropped) is called first.
//! 2. It has at most one call, which is set only once: either by [`bind`](Exchange::bind), from a typed message, or by
//!    [`parse_body`](Exchange::parse_body), from the request body.
//! 3. A cancellation takes effect in the order listed in `cancel`. It becomes pending before its call is removed from the registry.
//!    Closing a session waits for in-flight calls and pending cancellations, so it cannot miss a call between the two.
//! 4. No lock is held while a token fires, while an observer runs, or while a hook runs or is dropped. Only three operations call into
//!    the registry under the state lock: registering a call, setting its key, and adding another attempt's stream. Locks are taken in
//!    this order: first the state, then the shard, then the session entry.
//! 5. Once [`on_answered_externally`](Exchange::on_answered_externally) has been called, the request's call has completed, regardless of
//!    the exchange's phase. A call that only becomes known afterwards is never in flight: it is reported as completed and cannot be found.
//!    A call that has already been cancelled stays cancelled.

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
