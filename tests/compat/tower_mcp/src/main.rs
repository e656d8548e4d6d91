//! tower-mcp, whose router is an axum router.

use std::{future::pending, net::SocketAddr};

use compat::{Mode, PATH, Setup, Tier};
use serde_json::Value;
use tower_mcp::{CallToolResult, HttpTransport, McpRouter, ToolBuilder};

#[tokio::main]
async fn main() {
    compat::run_cases(
        "tower-mcp",
        &[Tier::Layer],
        &[Mode::Session, Mode::Stateless],
        serve,
    )
    .await;
}

async fn serve(setup: Setup) -> SocketAddr {
    let witness = setup.witness.clone();
    let hold = ToolBuilder::new("hold")
        .description("Works until it is released")
        .handler(move |arguments: Value| {
            let witness = witness.clone();
            async move {
                compat::work(&witness, compat::label(&arguments), pending(), None).await;
                Ok(CallToolResult::text("done"))
            }
        })
        .build();
    let router = McpRouter::new().server_info("compat", "0").tool(hold);
    let transport = HttpTransport::new(router).disable_origin_validation();
    setup.serve(transport.into_router_at(PATH)).await
}
