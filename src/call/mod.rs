//! The data of a call: its ids, its description, its detachments and its outcome.

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
