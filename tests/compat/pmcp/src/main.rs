//! pmcp, whose router is an axum router.

use std::{future::pending, net::SocketAddr, sync::Arc};

use axum::Router;
use compat::{Mode, PATH, Setup, Tier};
use pmcp::{
    RequestHandlerExtra, Server, SimpleTool,
    axum::{RouterConfig, router_with_config},
    server::streamable_http_server::StreamableHttpServerConfig,
};
use serde_json::Value;
use tokio::sync::Mutex;

#[tokio::main]
async fn main() {
    compat::run_cases(
        "pmcp",
        &[Tier::Layer],
        &[Mode::Session, Mode::Stateless],
        serve,
    )
    .await;
}

async fn serve(setup: Setup) -> SocketAddr {
    let witness = setup.witness.clone();
    let hold = SimpleTool::new("hold", move |arguments: Value, _: RequestHandlerExtra| {
        let witness = witness.clone();
        Box::pin(async move {
            compat::work(&witness, compat::label(&arguments), pending(), None).await;
            Ok("done".into())
        })
    });
    let server = Server::builder()
        .name("compat")
        .version("0")
        .tool("hold", hold);
    let server = server.build().expect("a server");
    let config = RouterConfig {
        server_config: match setup.mode {
            Mode::Session => StreamableHttpServerConfig::default(),
            _ => StreamableHttpServerConfig::stateless(),
        },
        ..RouterConfig::default()
    };
    let mcp = router_with_config(Arc::new(Mutex::new(server)), config);
    setup.serve(Router::new().nest_service(PATH, mcp)).await
}
