//! One in-flight JSON-RPC request: what it is, how it is named, how it loses its client and how it ends.

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
