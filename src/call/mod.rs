//! The data of a call: its names, what is known of it, how it loses its client and how it ends.

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
