//! JSON-RPC messages created by this crate.

use std::borrow::Cow;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::call::{CancelReason, RequestId};

/// The code for an internal server error (JSON-RPC 2.0, section 5.1).
pub(crate) const INTERNAL_ERROR: i32 = -32603;

/// Returns the code and message of the error that a cancelled call's client receives.
///
/// The message includes the reason, if known.
pub(crate) fn error_for(reason: Option<CancelReason>) -> (i32, Cow<'static, str>) {
    match reason {
        Some(CancelReason::TimedOut) => (-32001, "Request timed out".into()),
        Some(reason) => (-32800, format!("Request cancelled: {reason}").into()),
        None => (-32800, "Request cancelled".into()),
    }
}

/// Creates the error response to a request.
pub(crate) fn error_response(id: Value, error: Value) -> Bytes {
    let message = json!({ "jsonrpc": "2.0", "id": id, "error": error });
    Bytes::from(message.to_string())
}

/// Creates the error response for a cancelled call.
pub(crate) fn cancellation_error(request: &RequestId, reason: CancelReason) -> Bytes {
    let (code, message) = error_for(Some(reason));
    error_response(request.into(), json!({ "code": code, "message": message }))
}

/// Creates the notification that cancels a call on its server.
pub(crate) fn cancel_notification(request: &RequestId, reason: CancelReason) -> Bytes {
    let notification = json!({
        "jsonrpc": "2.0",
        "method": "notifications/cancelled",
        "params": { "requestId": Value::from(request), "reason": reason.to_string() },
    });
    Bytes::from(notification.to_string())
}
