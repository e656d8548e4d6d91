//! The rmcp server that the official conformance suite runs against, bare or with the layer. It has the tools, prompts
//! and resources that the suite's server scenarios need, whose descriptions are its specification. `../run` runs it.
//!
//! Its first line on stdout is its URL. On SIGTERM it exits, after writing what the layer has observed ([`tally`]) as a
//! second line. Logs (`RUST_LOG`) are written to stderr.

use std::{error::Error, io, process::ExitCode, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::transport::streamable_http_server::{SessionManager, StreamableHttpService};
use tokio::{
    net::TcpListener,
    select,
    signal::unix::{SignalKind, signal},
};
use tracing_subscriber::EnvFilter;

use self::{handler::Conformance, sessions::Sessions, tally::Tally};

mod ask;
mod handler;
mod prompts;
mod resources;
mod sample;
mod sessions;
mod tally;
mod tools;

const USAGE: &str = "\
usage: conformance-server --tier bare|layer|wrapped [--port <port>] [--call-timeout <ms>]

  --tier          rmcp alone, with the layer, or with the layer and the session manager's wrapper
  --port          of 127.0.0.1; 0, the default, is any that is free
  --call-timeout  cancels calls that last longer
";

struct Options {
    tier: Tier,
    port: u16,
    call_timeout: Option<Duration>,
}

enum Tier {
    Bare,
    Layer,
    Wrapped,
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let Some(options) = Options::parse(std::env::args().skip(1)) else {
        eprint!("{USAGE}");
        return Ok(ExitCode::from(2));
    };
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::from_default_env())
        .with_writer(io::stderr)
        .with_ansi(false)
        .init();

    let tally = Arc::new(Tally::default());
    let mut layer = CancelOnDisconnectLayer::new().observe(tally.clone().observer());
    if let Some(timeout) = options.call_timeout {
        layer = layer.call_timeout(timeout);
    }
    let calls = layer.calls();
    let app = match options.tier {
        Tier::Bare => serving(Sessions::default()),
        Tier::Layer => serving(Sessions::default()).layer(layer),
        Tier::Wrapped => serving(CancellableSessionManager::new(Sessions::default())).layer(layer),
    };
    let listener = TcpListener::bind(("127.0.0.1", options.port)).await?;
    println!("http://{}/mcp", listener.local_addr()?);
    let mut terminated = signal(SignalKind::terminate())?;
    select! {
        served = async { axum::serve(listener, app).await } => served?,
        _ = terminated.recv() => println!("{}", tally.report(calls.len())),
    }
    Ok(ExitCode::SUCCESS)
}

fn serving(sessions: impl SessionManager) -> Router {
    let new_handler = || Ok(Conformance::new());
    let mcp = StreamableHttpService::new(new_handler, Arc::new(sessions), Default::default());
    Router::new().nest_service("/mcp", mcp)
}

// === impl Options ===

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Option<Self> {
        let mut tier = None;
        let mut port = 0;
        let mut call_timeout = None;
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--tier" => tier = Some(Tier::parse(&args.next()?)?),
                "--port" => port = args.next()?.parse().ok()?,
                "--call-timeout" => {
                    let ms = args.next()?.parse().ok()?;
                    call_timeout = Some(Duration::from_millis(ms));
                }
                _ => return None,
            }
        }
        let tier = tier?;
        Some(Self {
            tier,
            port,
            call_timeout,
        })
    }
}

// === impl Tier ===

impl Tier {
    fn parse(text: &str) -> Option<Self> {
        match text {
            "bare" => Some(Self::Bare),
            "layer" => Some(Self::Layer),
            "wrapped" => Some(Self::Wrapped),
            _ => None,
        }
    }
}
