//! A tool that sleeps, and stops when its client hangs up.
use std::{sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::{
    RoleServer, service::RequestContext, tool, tool_router,
    transport::streamable_http_server::StreamableHttpService,
};
use tokio::{net::TcpListener, time::sleep};

#[derive(Clone)]
struct MyServer;

#[tool_router(server_handler)]
impl MyServer {
    #[tool(description = "Sleeps for a minute")]
    async fn long_sleep(&self, context: RequestContext<RoleServer>) -> String {
        println!("long_sleep begins");
        tokio::select! {
            () = context.ct.cancelled() => println!("long_sleep is cancelled"),
            () = sleep(Duration::from_secs(60)) => println!("long_sleep is done"),
        }
        "slept".to_owned()
    }
}

#[tokio::main]
async fn main() -> std::io::Result<()> {
    let sessions = Arc::new(CancellableSessionManager::default());
    let mcp = StreamableHttpService::new(|| Ok(MyServer), sessions, Default::default());
    let app = Router::new()
        .nest_service("/mcp", mcp)
        .layer(CancelOnDisconnectLayer::new());
    let address = std::env::args().nth(1);
    let listener = TcpListener::bind(address.as_deref().unwrap_or("127.0.0.1:8000")).await?;
    println!("listening on http://{}/mcp", listener.local_addr()?);
    axum::serve(listener, app).await
}
