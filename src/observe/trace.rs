//! Events as log lines. A cancel is no error: it is what was asked for.
//!
//! Fields have the names of OpenTelemetry's MCP and JSON-RPC conventions. Values that come from the client
//! are logged with `Debug`, which escapes control characters. Session ids are never logged.

use std::sync::Once;

use tracing::{debug, info, trace, warn};

use super::Event;
use crate::call::{CallInfo, Outcome};

/// What a user may not expect of the configuration. Each is said once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Remark {
    /// A policy supersedes, and no session manager knows what calls are the same.
    SupersedeHasNoEffect,
    /// The sessions have an event store, so detached calls run on.
    StoredCallsRunOn,
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
        Event::Detached { call, grace } => {
            log_call!(debug, call, ?grace, "client gone, call goes on");
        }
        Event::Resumed { call } => log_call!(debug, call, "client is back"),
        Event::Ended {
            call,
            outcome: Outcome::Cancelled(reason),
        } => log_call!(info, call, reason = ?reason.to_string(), "call cancelled"),
        Event::Ended { call, outcome } => log_call!(trace, call, ?outcome, "call ended"),
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
                "sessions have an event store: calls whose clients go away run on, because they may be \
                 resumed on another server; set a grace to cancel them",
            );
        }),
    }
}
