//! A server that exports metrics for Prometheus and the Grafana dashboard next to this file.
//!
//! ```sh
//! cargo run --features metrics --example prometheus
//! curl -s http://127.0.0.1:8765/metrics
//! ```
//!
//! Configure Prometheus to scrape that URL, and import `grafana.json` into Grafana. The tool `work` sleeps for the
//! given number of seconds. `examples/README.md` lists curl commands that call a tool and disconnect.

use std::{error::Error, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancellableSessionManager, observe::Metrics,
};
use rmcp::{
    RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService},
};
use tokio::net::TcpListener;

mod endpoint;

const ADDRESS: &str = "127.0.0.1:8765";

#[derive(Clone)]
struct Worker {
    tool_router: ToolRouter<Self>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Work {
    seconds: f32,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let prometheus = endpoint::install()?;
    let sessions = CancellableSessionManager::default();
    let config = StreamableHttpServerConfig::default();
    let mcp = StreamableHttpService::new(|| Ok(Worker::new()), Arc::new(sessions), config);
    let layer = CancelOnDisconnectLayer::new().observe(Metrics::new().tools(["work"]));
    let app = Router::new()
        .nest_service("/mcp", mcp)
        .layer(layer)
        // Keep this outside the layer, because a scrape is not a call.
        .merge(endpoint::router(prometheus.clone()));

    let listener = TcpListener::bind(ADDRESS).await?;
    println!("serving http://{ADDRESS}/mcp and http://{ADDRESS}/metrics");
    tokio::select! {
        served = axum::serve(listener, app) => served?,
        () = endpoint::run_upkeep(prometheus) => {}
    }
    Ok(())
}

// === impl Worker ===

#[tool_router]
impl Worker {
    fn new() -> Self {
        Self {
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Works for the given number of seconds, unless it is cancelled")]
    async fn work(
        &self,
        Parameters(Work { seconds }): Parameters<Work>,
        context: RequestContext<RoleServer>,
    ) -> String {
        let time = Duration::try_from_secs_f32(seconds).unwrap_or_default();
        let work = context.ct.run_until_cancelled(tokio::time::sleep(time));
        match work.await {
            Some(()) => format!("worked for {time:?}"),
            None => "stopped".to_owned(),
        }
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Worker {}
