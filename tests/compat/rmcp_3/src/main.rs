//! rmcp 3, both the oldest version that the library supports and the newest.

use std::{net::SocketAddr, sync::Arc};

use compat::{Mode, Setup, Tier};
use mcp_cancel_on_disconnect::CancellableSessionManager;
use rmcp::transport::streamable_http_server::session::local::LocalSessionManager;
use test_support::{Tools, router};

#[tokio::main]
async fn main() {
    let modes = [Mode::Session, Mode::Stateless, Mode::Modern];
    let tiers = [Tier::Manager, Tier::Layer];
    compat::run_cases("rmcp", &tiers, &modes, serve).await;
}

async fn serve(setup: Setup) -> SocketAddr {
    let tools = Tools::new(&setup.witness);
    let mode = match setup.mode {
        Mode::Session => test_support::Mode::Session,
        _ => test_support::Mode::StatelessSse,
    };
    let app = match setup.tier {
        Tier::Manager => {
            router(tools.service(mode, Arc::new(CancellableSessionManager::default())))
        }
        _ => router(tools.service(mode, Arc::new(LocalSessionManager::default()))),
    };
    setup.serve(app).await
}
