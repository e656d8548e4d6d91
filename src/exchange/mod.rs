//! One HTTP request and its response, as it passes through the layer.
//!
//! The service, both bodies, the response future and the session manager all hold the same [`Exchange`]
//! and tell it what they saw; it alone decides what that means for its call. Its link in the request's
//! extensions is the [`CallToken`](crate::CallToken), which rmcp carries to the session manager and
//! the handler.
//!
//! The parts that it is made of do not know it. Everything that it does is built on them, one file each:
//!
//! | part | what it is |
//! |---|---|
//! | `state` | all its fields |
//! | `identity` | whose call this is, from the request's headers |
//! | `request_body` | what is known of the body that passes |
//! | `signal` | the token, and what fires with it |
//! | `last_words` | its open streams, and what they were told |
//!
//! | file | what it decides |
//! |---|---|
//! | `receive` | what a request is, from its head |
//! | `start` | which call there is, from the body |
//! | `contest` | what a request beyond the limits does to the call whose id it has |
//! | `bound` | which call there is, and what becomes of its streams, from a session manager |
//! | `resuming` | which calls a GET with `Last-Event-ID` goes on with |
//! | `progress` | how far it came, from the response's head and body |
//! | `tap` | the same, from the bytes of a stream |
//! | `end` | how a call ends: answered, cancelled, let go |
//! | `confirm` | whether an orphan may be cancelled, where the layer has somebody to ask |
//! | `waiting` | who waits for what becomes of a call |
//! | `fire` | what fires with its token |
//! | `inject` | how its server is notified |
//! | `outlet` | how its client is told of a cancel that it did not ask for |
//! | `report` | in which span events are reported |
//! | `guard` | tells of drops and panics |
//!
//! # Contract
//!
//! 1. An exchange is over once: [`complete`](Exchange::complete), [`fail`](Exchange::fail) or
//!    [`abandon`](Exchange::abandon), whichever comes first.
//! 2. It has one call at most, which is set once: by [`bind`](Exchange::bind) from a typed message, or by
//!    [`settle`](Exchange::settle) from the request body.
//! 3. A cancel takes this order: reason, token, inner streams, injection. It is announced before its call leaves the registry,
//!    because closing a session waits for calls in flight and for announced cancels.
//! 4. No lock is held while a token fires, an observer runs, or a hook runs or is dropped. The registry is asked under the
//!    lock of the state only where a call is entered or gets its name: the state, then the shard, then the home.
//! 5. An answer that somebody inside has is the end, whenever that is said ([`answered_elsewhere`](Exchange::answered_elsewhere)).
//!    A call that becomes known only then is never in flight: it is reported as completed, and nobody finds it.
//!    A cancel that was first stays one.

mod attempts;
mod bind;
mod call_streams;
mod classify;
mod confirm;
mod contest;
mod end;
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
    bind::{BackgroundReader, CLOSE_CANCEL_TIMEOUT},
    contest::Contest,
    guard::Guard,
    inject::INJECTION_TIMEOUT,
    response::{BodyPlan, Head},
    state::{Attachment, Exchange, LayerShared, OpaqueMessage, PendingCancel, Registry},
    streams::Delivering,
    tap::Tap,
};
