//! rmcp in actix-web.

use std::{net::SocketAddr, sync::Arc, thread};

use actix_web::{App, HttpServer, web};
use compat::{Mode, PATH, Setup, Tier};
use mcp_cancel_on_disconnect::CancellableSessionManager;
use test_support::Tools;
use tokio::sync::oneshot;
use tower::Layer as _;

mod glue;

#[tokio::main]
async fn main() {
    compat::run_cases(
        "actix-web",
        &[Tier::Probed],
        &[Mode::Session, Mode::Stateless],
        serve,
    )
    .await;
}

async fn serve(setup: Setup) -> SocketAddr {
    let (ready, address) = oneshot::channel();
    // actix brings its own runtimes.
    thread::spawn(move || {
        let tools = Tools::new(&setup.witness);
        let mode = match setup.mode {
            Mode::Session => test_support::Mode::Session,
            _ => test_support::Mode::StatelessSse,
        };
        let mcp = tools.service(mode, Arc::new(CancellableSessionManager::default()));
        let layer = setup.layer();
        let app = move || {
            let mcp = mcp.clone();
            let route = match layer.clone().map(|layer| layer.layer(mcp.clone())) {
                Some(mcp) => web::to(move |request, body| glue::pass(mcp.clone(), request, body)),
                None => web::to(move |request, body| glue::pass(mcp.clone(), request, body)),
            };
            App::new().route(PATH, route)
        };
        let server = HttpServer::new(app)
            .workers(1)
            .bind("127.0.0.1:0")
            .expect("a port");
        ready
            .send(server.addrs()[0])
            .expect("the caller is waiting");
        actix_web::rt::System::new()
            .block_on(server.run())
            .expect("it serves");
    });
    address.await.expect("it listens")
}
