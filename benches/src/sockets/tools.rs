//! The benches' handler.

use std::time::Duration;

use axum::body::Body;
use mcp_cancel_on_disconnect::CancelOnDisconnectLayer;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock},
    service::RequestContext,
};
use serde::Deserialize;

use crate::{
    client::Transport,
    guard::ClientDisconnected,
    setup::{Mode, Server, Setup},
    sockets::ledger::{CallTimes, Ledger},
};

/// A handler whose tools work for as long as the bench wants.
///
/// `echo` answers at once. Every other tool works until it is released, its time is up, or it is cancelled, and records
/// each of these events.
#[derive(Debug, Clone)]
pub struct Tools(pub Ledger);

/// Arguments for any tool but `echo`.
#[derive(Debug, Deserialize)]
struct Work {
    call: usize,
    #[serde(default)]
    group: usize,
    /// How long to work, in milliseconds. Unlimited if absent.
    lasts: Option<u64>,
}

/// Records when the handler ends, even if it is dropped.
struct Ending<'a>(&'a Ledger, &'a CallTimes);

// === impl Tools ===

impl Tools {
    /// Serves this handler. Defined here so that it is compiled only once for all benches.
    pub fn served(self, setup: Setup, mode: Mode, layer: CancelOnDisconnectLayer) -> Server<Body> {
        setup.serve(mode.config(), self, layer)
    }

    /// Serves this handler in process, for a paused clock. The parts of rmcp that use the real clock are turned off: its
    /// keep-alives would never pause, and completed streams would stay around.
    pub fn in_process(self, setup: Setup, mode: Mode, layer: CancelOnDisconnectLayer) -> Transport {
        let mut config = mode.config();
        config.0.sse_keep_alive = None;
        config.1.completed_cache_ttl = Duration::ZERO;
        Transport::Direct(setup.serve(config, self, layer))
    }

    async fn work(&self, work: Work, context: RequestContext<RoleServer>) -> String {
        let (ledger, times_of) = (&self.0, self.0.times_of(work.call));
        ledger.stamp(&times_of.started);
        let _ending = Ending(ledger, times_of);
        let work_time = async {
            match work.lasts {
                Some(millis) => tokio::time::sleep(Duration::from_millis(millis)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = cancelled(&context) => {
                ledger.stamp(&times_of.token);
                format!("cancelled {}", work.call)
            }
            () = ledger.release(work.group).cancelled() => done(work.call),
            () = work_time => done(work.call),
        }
    }
}

/// Returns the text that answers a call, which includes the call's number.
pub fn done(call: usize) -> String {
    format!("done {call}")
}

/// Waits for this set-up's token.
async fn cancelled(context: &RequestContext<RoleServer>) {
    let parts = context.extensions.get::<http::request::Parts>();
    match parts.and_then(|parts| parts.extensions.get::<ClientDisconnected>()) {
        // Without sessions, rmcp's own token fires too.
        Some(ClientDisconnected(token)) => tokio::select! {
            () = token.cancelled() => {}
            () = context.ct.cancelled() => {}
        },
        None => context.ct.cancelled().await,
    }
}

impl ServerHandler for Tools {
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let text = match &*request.name {
            "echo" => arguments.get("text").map(ToString::to_string),
            _ => {
                let work = serde_json::from_value(arguments.into())
                    .map_err(|error| ErrorData::invalid_params(error.to_string(), None))?;
                Some(self.work(work, context).await)
            }
        };
        let content = vec![ContentBlock::text(text.unwrap_or_default())];
        Ok(CallToolResult::success(content).into())
    }
}

// === impl Ending ===

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.stamp(&self.1.ended);
    }
}
