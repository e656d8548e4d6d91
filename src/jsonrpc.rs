//! The JSON-RPC messages that this crate writes itself.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::call::{CancelReason, RequestId};

/// The code for an internal server error (JSON-RPC 2.0, section 5.1).
pub(crate) const INTERNAL_ERROR: i32 = -32603;

/// Returns the code and message of the error that a cancelled call's client gets.
///
/// The message includes the reason if it is known.
pub(crate) fn error_for(reason: Option<CancelReason>) -> (i32, Cow<'static, str>) {
    match reason {
        Some(CancelReason::TimedOut) => (-32001, "Request timed out".into()),
        Some(reason) => (-32800, format!("Request cancelled: {reason}").into()),
        None => (-32800, "Request cancelled".into()),
    }
}

/// Returns a request's error response.
pub(crate) fn error_response(id: Value, error: Value) -> Bytes {
    let message = json!({ "jsonrpc": "2.0", "id": id, "error": error });
    Bytes::from(message.to_string())
}

/// Returns the error response for a cancelled call.
pub(crate) fn cancellation_error(request: &RequestId, reason: CancelReason) -> Bytes {
    let (code, message) = error_for(Some(reason));
    error_response(request.into(), json!({ "code": code, "message": message }))
}

/// Returns the notification that cancels a call on its server.
pub(crate) fn cancel_notification(request: &RequestId, reason: CancelReason) -> Bytes {
    let notification = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": Value::from(request), "reason": reason.to_string() },
    });
    Bytes::from(notification.to_string())
}
