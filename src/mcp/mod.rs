//! The part of the crate for rmcp: a session manager that binds calls, and a handler that stops when its call is cancelled.

use rmcp::{
    ErrorData,
    model::{ErrorCode, JsonRpcMessage, NumberOrString},
};

use crate::{
    call::{CancelReason, RequestId},
    jsonrpc,
};

mod abort;
mod asked;
mod bind;
mod event_ids;
mod handler;
mod id_hash;
mod kept;
mod life;
mod mute;
mod opening;
mod passing;
mod resume;
mod serving;
mod session;
mod session_manager;
mod shared;
mod spawn_on_drop;
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

/// The error for a call that was cancelled, with the reason if it is known.
fn error_for(reason: Option<CancelReason>) -> ErrorData {
    let (code, message) = jsonrpc::error_for(reason);
    ErrorData::new(ErrorCode(code), message, None)
}

/// Which request a message answers.
fn answers<Q, R, N>(message: &JsonRpcMessage<Q, R, N>) -> Option<&NumberOrString> {
    match message {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        JsonRpcMessage::Request(_) | JsonRpcMessage::Notification(_) => None,
    }
}
