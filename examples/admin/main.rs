//! A server with a page that shows its calls. The page is served on its own port, which only this machine can reach.
//!
//! ```sh
//! cargo run --example admin              # then open http://127.0.0.1:8769/calls
//! cargo run --example admin -- --busy    # with some clients, so that there is something to see
//! curl -s http://127.0.0.1:8769/calls.json
//! curl -s http://127.0.0.1:8769/calls -d call=1 -H 'origin: http://127.0.0.1:8769' -o /dev/null
//! ```
//!
//! The routes are not authenticated, so put your own authentication in front of them if other machines can reach them.
//! To use the page in your server, copy the directory `calls_page`.

use std::{error::Error, sync::Arc, time::Duration};

use axum::{Router, middleware::from_fn};
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager, Policy};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock},
    service::RequestContext,
    transport::streamable_http_server::StreamableHttpService,
};
use tokio::{net::TcpListener, time::sleep};
use tracing::info;
use tracing_subscriber::EnvFilter;

mod busy;
mod calls_page;

const MCP: &str = "127.0.0.1:8768";
const ADMIN: &str = "127.0.0.1:8769";
const LOG: &str = "warn,admin=info,mcp_cancel_on_disconnect=info";

/// A server that works for ten minutes on every call, whatever the tool's name.
#[derive(Clone)]
struct Slow;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(LOG))
        .init();
    let layer = CancelOnDisconnectLayer::new().policy(|call| match call.tool() {
        Some("report") => Policy::new().call_timeout(Duration::from_secs(300)),
        _ => Policy::new(),
    });
    let admin = calls_page::routes(layer.calls()).layer(from_fn(calls_page::local_names_only));
    let sessions = Arc::new(CancellableSessionManager::default());
    let mcp = StreamableHttpService::new(|| Ok(Slow), sessions, Default::default());
    let mcp = Router::new().nest_service("/mcp", mcp).layer(layer);

    let (mcp_listener, admin_listener) = (
        TcpListener::bind(MCP).await?,
        TcpListener::bind(ADMIN).await?,
    );
    info!("MCP on http://{MCP}/mcp, its calls on http://{ADMIN}/calls");
    let clients = async {
        match std::env::args().nth(1).as_deref() {
            None => Ok(()),
            Some("--busy") => busy::run(MCP).await,
            Some(_) => Err("usage: admin [--busy]".into()),
        }
    };
    tokio::try_join!(
        async { Ok(axum::serve(mcp_listener, mcp).await?) },
        async { Ok(axum::serve(admin_listener, admin).await?) },
        clients,
    )?;
    Ok(())
}

// === impl Slow ===

impl ServerHandler for Slow {
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let work = sleep(Duration::from_secs(600));
        let done = context.ct.run_until_cancelled(work).await.is_some();
        info!(done, "{:?} stopped", request.name);
        let answer = if done { "done" } else { "stopped" };
        Ok(CallToolResult::success(vec![ContentBlock::text(answer)]).into())
    }
}
