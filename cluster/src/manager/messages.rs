//! The messages that the session manager reads, and the one that it sends.

use rmcp::{
    model::{ClientJsonRpcMessage, ClientNotification, ErrorData, ServerJsonRpcMessage},
    transport::streamable_http_server::session::ServerSseMessage,
};
use serde_json::Value;

/// The error of a call that does not begin.
pub(crate) const NOT_BEGUN: &str =
    "the call has not begun: the server does not know whether it still has the session; try again";

/// Returns the JSON-RPC id of the call that a message cancels. Returns `None` if it cancels none.
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

/// Returns the answer to a request that does not begin. Another instance may have its session.
pub(super) fn not_begun(message: &ClientJsonRpcMessage) -> ServerSseMessage {
    let id = match message {
        ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
        _ => None,
    };
    let error = ErrorData::internal_error(NOT_BEGUN, None);
    ServerSseMessage::from_message(ServerJsonRpcMessage::error(error, id))
}
