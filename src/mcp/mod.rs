//! rmcp: the session manager that binds calls, the handler that stops, and what a handler asks for.

use rmcp::{
    ErrorData,
    model::{ErrorCode, NumberOrString},
};

use crate::{
    call::{CancelReason, RequestId},
    jsonrpc,
};

mod abort;
mod asked;
mod going_on;
mod handler;
mod kept;
mod late;
mod life;
mod owned;
mod passing;
mod resuming;
mod session;
mod session_manager;
mod shared;
mod shelf;
mod stream;
mod transport;
mod turns;

pub use self::{
    abort::AbortOnCancel,
    session_manager::CancellableSessionManager,
    transport::{CancellableTransport, TransportError},
};

impl From<&NumberOrString> for RequestId {
    fn from(id: &NumberOrString) -> Self {
        match id {
            NumberOrString::Number(number) => Self::Number(*number),
            NumberOrString::String(string) => Self::String(string.clone()),
        }
    }
}

impl From<&RequestId> for NumberOrString {
    fn from(id: &RequestId) -> Self {
        match id {
            RequestId::Number(number) => Self::Number(*number),
            RequestId::String(string) => Self::String(string.clone()),
        }
    }
}

/// The error for a call that was cancelled.
fn error_for(reason: CancelReason) -> ErrorData {
    let (code, message) = jsonrpc::error_for(reason);
    ErrorData::new(ErrorCode(code), message, None)
}
