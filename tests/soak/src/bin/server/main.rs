//! The server under test: every set-up in `soak::setup`, on real sockets.
//!
//!     server LOG
//!
//! Prints its ports, writes its facts to LOG, and exits when its stdin is closed.

use std::{collections::HashMap, error::Error, path::Path, sync::Arc};

use axum::serve::ListenerExt as _;
use mcp_cancel_on_disconnect::socket::{Peer, WatchedListener};
use serde_json::json;
use soak::{
    fact::{Fact, Log},
    pulse,
};
use tokio::{
    io::{AsyncReadExt as _, stdin},
    net::TcpListener,
};

use self::{app::App, fault::Fault};

mod app;
mod drained;
mod events;
mod fault;
mod gauges;
mod worker;

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: server LOG")?;
    let log = Log::append(Path::new(&path))?;
    let fault = Fault::from_env()?;
    if let Some(fault) = fault {
        let name = format!("{fault:?}");
        log.write(Fact::Fault { name });
    }
    pulse::watch(&log);

    let app = App::new(&log, fault, |setup| !setup.is_drained);
    let gauges = Arc::new(gauges::Gauges::default());
    gauges.add(&app);

    let mut ports = HashMap::new();
    let plain = TcpListener::bind("127.0.0.1:0").await?;
    ports.insert("plain", plain.local_addr()?.port());
    let plain = plain.tap_io(|stream| {
        let _result = stream.set_nodelay(true);
    });
    let router = app.router.clone();
    tokio::spawn(async move { axum::serve(plain, router).await });

    let watched = TcpListener::bind("127.0.0.1:0").await?;
    ports.insert("watched", watched.local_addr()?.port());
    let router = app.router.into_make_service_with_connect_info::<Peer>();
    tokio::spawn(async move { axum::serve(WatchedListener::new(watched), router).await });

    let drained = TcpListener::bind("127.0.0.1:0").await?;
    let address = drained.local_addr()?;
    ports.insert("drained", address.port());
    tokio::spawn(drained::serve_repeatedly(
        drained,
        log.clone(),
        fault,
        gauges.clone(),
    ));

    tokio::spawn(gauges::write(gauges, log));
    println!("{}", json!(ports));
    stdin().read_to_end(&mut Vec::new()).await?;
    Ok(())
}
