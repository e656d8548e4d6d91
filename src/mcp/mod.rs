//! The rmcp integration: a session manager that binds calls, and abortable handlers.

use rmcp::{
    ErrorData,
    model::{ErrorCode, JsonRpcMessage, NumberOrString},
};

use crate::{
    call::{CancelReason, RequestId},
    jsonrpc,
};

mod abort;
mod bind;
mod create_stream;
mod early_stream_end;
mod event_ids;
mod handler;
mod id_hash;
mod idle;
mod inner;
mod local;
mod replay;
mod requests_to_client;
mod resume;
mod resume_queue;
mod serve_tasks;
mod session;
mod session_manager;
mod session_options;
mod session_use;
mod spawn_on_drop;
mod standalone_ids;
mod stream;
mod suppress;
mod transport;

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

/// Returns the error for a cancelled call, including the reason if known.
fn error_for(reason: Option<CancelReason>) -> ErrorData {
    let (code, message) = jsonrpc::error_for(reason);
    ErrorData::new(ErrorCode(code), message, None)
}

/// Returns the id of the request that a message answers.
fn answered_id<Q, R, N>(message: &JsonRpcMessage<Q, R, N>) -> Option<&NumberOrString> {
    match message {
        JsonRpcMessage::Response(response) => Some(&response.id),
        JsonRpcMessage::Error(error) => error.id.as_ref(),
        JsonRpcMessage::Request(_) | JsonRpcMessage::Notification(_) => None,
    }
}
