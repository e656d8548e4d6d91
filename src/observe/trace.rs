//! Events as log lines. A cancel is no error: it is what was asked for.
//!
//! Fields have the names of OpenTelemetry's MCP and JSON-RPC conventions. Values that come from the client
//! are logged with `Debug`, which escapes control characters. Session ids are never logged.

use std::sync::Once;

#[cfg(feature = "rmcp")]
use tracing::error;
use tracing::{debug, info, trace, warn};

use super::Event;
#[cfg(feature = "rmcp")]
use crate::call::{CallId, RequestId};
use crate::call::{CallInfo, Outcome};

/// What a user may not expect of the configuration. Each is said once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remark {
    /// A policy supersedes, and no session manager knows what calls are the same.
    SupersedeHasNoEffect,
    /// The events of calls are stored, so detached calls run on.
    StoredCallsRunOn,
}

/// How a handler ended that did not end by itself.
#[cfg(feature = "rmcp")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HandlerEnd {
    /// It did not heed the cancel of its call, and was dropped.
    Stopped,
    Panicked,
}

/// One `macro` instead of a function, because `tracing` wants its level at compile time.
macro_rules! log_call {
    ($level:ident, $call:expr, $($rest:tt)+) => {{
        let call: &CallInfo = $call;
        $level!(
            target: "mcp_cancel_on_disconnect",
            call = %call.id(),
            jsonrpc.request.id = ?call.request_id().to_string(),
            mcp.method.name = ?call.method(),
            gen_ai.tool.name = call.tool().map(tracing::field::debug),
            $($rest)+
        )
    }};
}

pub(super) fn log(event: &Event<'_>) {
    match event {
        Event::Started { call } => log_call!(trace, call, "call started"),
        Event::Detached { call, grace, .. } => {
            log_call!(debug, call, ?grace, "client gone, call goes on");
        }
        Event::Resumed { call, .. } => log_call!(debug, call, "client is back"),
        Event::Ended {
            call,
            outcome: Outcome::Cancelled(reason),
            ..
        } => log_call!(info, call, reason = ?reason.to_string(), "call cancelled"),
        Event::Ended { call, outcome, .. } => log_call!(trace, call, ?outcome, "call ended"),
        Event::CancelFailed { call, error } => {
            log_call!(warn, call, %error, "server could not be told of the cancel");
        }
        Event::Unknown { why } => {
            debug!(target: "mcp_cancel_on_disconnect", %why, "request body is not watched");
        }
    }
}

pub(crate) fn say_once(remark: Remark) {
    static SUPERSEDE: Once = Once::new();
    static STORED: Once = Once::new();
    match remark {
        Remark::SupersedeHasNoEffect => SUPERSEDE.call_once(|| {
            warn!(
                target: "mcp_cancel_on_disconnect",
                "Policy::supersede has no effect without CancellableSessionManager",
            );
        }),
        Remark::StoredCallsRunOn => STORED.call_once(|| {
            info!(
                target: "mcp_cancel_on_disconnect",
                "events are in a store: calls whose clients go away run on, because they may be resumed \
                 on another server; set a grace to cancel them",
            );
        }),
    }
}

// === impl HandlerEnd ===

#[cfg(feature = "rmcp")]
impl HandlerEnd {
    /// `call` is not known of a handler that is not served through the layer.
    pub(crate) fn log(
        self,
        call: Option<CallId>,
        request: &RequestId,
        method: &str,
        tool: Option<&str>,
    ) {
        macro_rules! log_handler {
            ($level:ident, $message:literal) => {
                $level!(
                    target: "mcp_cancel_on_disconnect",
                    call = call.map(tracing::field::display),
                    jsonrpc.request.id = ?request.to_string(),
                    mcp.method.name = ?method,
                    gen_ai.tool.name = tool.map(tracing::field::debug),
                    $message
                )
            };
        }
        match self {
            Self::Stopped => log_handler!(info, "handler did not stop by itself and was dropped"),
            Self::Panicked => log_handler!(error, "handler panicked"),
        }
    }
}
