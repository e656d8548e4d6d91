//! rmcp in poem.

use std::{net::SocketAddr, sync::Arc};

use compat::{Mode, Setup, Tier};
use mcp_cancel_on_disconnect::CancellableSessionManager;
use poem::{
    Route,
    listener::{Acceptor as _, Listener as _, TcpListener},
};
use test_support::Tools;

mod glue;

#[tokio::main]
async fn main() {
    compat::run_cases(
        "poem",
        &[Tier::Probed],
        &[Mode::Session, Mode::Stateless],
        serve,
    )
    .await;
}

async fn serve(setup: Setup) -> SocketAddr {
    let tools = Tools::new(&setup.witness);
    let mode = match setup.mode {
        Mode::Session => test_support::Mode::Session,
        _ => test_support::Mode::StatelessSse,
    };
    let mcp = tools.service(mode, Arc::new(CancellableSessionManager::default()));
    let app = match setup.layer() {
        Some(layer) => glue::route(layer, mcp),
        None => Route::new().at("/mcp", poem::endpoint::TowerCompatExt::compat(mcp)),
    };
    let listener = TcpListener::bind("127.0.0.1:0")
        .into_acceptor()
        .await
        .expect("a port");
    let address = listener.local_addr().remove(0);
    tokio::spawn(poem::Server::new_with_acceptor(listener).run(app));
    *address.as_socket_addr().expect("it listens on TCP")
}
