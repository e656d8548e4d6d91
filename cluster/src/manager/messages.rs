//! Messages that the session manager inspects or creates.

use rmcp::{
    model::{ClientJsonRpcMessage, ClientNotification, ErrorData, ServerJsonRpcMessage},
    transport::streamable_http_server::session::ServerSseMessage,
};
use serde_json::Value;

/// The error message for a call that was not started.
pub(crate) const NOT_STARTED: &str = "the call was not started: the server could not determine whether it still owns the session; try again";

/// Returns the JSON-RPC id of the call that a client's message cancels.
///
/// Returns `None` if the message is not a cancellation, or has no request id.
pub(super) fn cancelled_call(message: &ClientJsonRpcMessage) -> Option<Value> {
    let ClientJsonRpcMessage::Notification(message) = message else {
        return None;
    };
    let ClientNotification::CancelledNotification(cancel) = &message.notification else {
        return None;
    };
    let call = cancel.params.request_id.as_ref()?;
    Some(call.clone().into_json_value())
}

/// Returns the error response to a request that was not started.
///
/// It was not started because its session may now belong to another instance.
pub(super) fn not_started(message: &ClientJsonRpcMessage) -> ServerSseMessage {
    let id = match message {
        ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
        _ => None,
    };
    let error = ErrorData::internal_error(NOT_STARTED, None);
    ServerSseMessage::from_message(ServerJsonRpcMessage::error(error, id))
}
