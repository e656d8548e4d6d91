//! Every instance's server. Its only tool, `work`, takes a given time, and reports when each call starts and ends.

use std::sync::Arc;

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorCode,
        InitializeRequestParams, InitializeResult, ServerCapabilities, ServerConfig,
    },
    service::RequestContext,
};
use serde_json::Value;
use tokio::{
    select,
    time::{Duration, sleep},
};

use super::{
    time::{HostId, Ms},
    watcher::{End, Watcher},
};

/// The server for one session on an instance.
pub(super) struct Server {
    pub(super) host: HostId,
    pub(super) watcher: Watcher,
}

/// Reports that a call has been dropped, unless its end has already been reported.
struct RunningGuard {
    watcher: Watcher,
    host: HostId,
    label: Arc<str>,
    has_ended: bool,
}

// === impl Server ===

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
    }

    async fn initialize(
        &self,
        request: InitializeRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<InitializeResult, ErrorData> {
        // At this point only a restored session has its id.
        if let Some(session) = session(&context) {
            self.watcher.restored(self.host, &session);
        }
        context.peer.set_peer_info(request.clone());
        self.negotiate_initialize(&request)
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let label: Arc<str> = arguments
            .get("label")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .into();
        let time: Ms = arguments.get("ms").and_then(Value::as_u64).unwrap_or(0);
        self.watcher
            .call_started(self.host, session(&context).as_deref(), &label);
        let mut running = RunningGuard {
            watcher: self.watcher.clone(),
            host: self.host,
            label: label.clone(),
            has_ended: false,
        };
        select! {
            biased;
            () = sleep(Duration::from_millis(time)) => {}
            () = context.ct.cancelled() => {
                running.end(End::Cancelled);
                return Err(ErrorData::new(ErrorCode(-32_099), "cancelled", None));
            }
        }
        running.end(End::Done);
        let text = format!("done:{label}");
        Ok(CallToolResult::success(vec![ContentBlock::text(text)]).into())
    }
}

/// Returns the session id from a request's headers.
fn session(context: &RequestContext<RoleServer>) -> Option<String> {
    let parts: &http::request::Parts = context.extensions.get()?;
    let id = parts.headers.get("mcp-session-id")?;
    id.to_str().ok().map(str::to_owned)
}

// === impl RunningGuard ===

impl RunningGuard {
    fn end(&mut self, end: End) {
        self.has_ended = true;
        self.watcher.ended(self.host, &self.label, end);
    }
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        if !self.has_ended {
            self.end(End::Dropped);
        }
    }
}
