//! A call's data: its ids, description, detachments and outcome.

mod detach;
mod info;
mod key;
mod outcome;

pub use self::{
    detach::{DetachCause, Detachment},
    info::CallInfo,
    key::{CallId, ParseCallIdError, RequestId},
    outcome::{CancelReason, Outcome},
};
pub(crate) use self::{
    info::LISTEN,
    key::{Key, Scope, SessionKey},
};
