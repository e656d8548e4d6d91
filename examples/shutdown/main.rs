//! A server that shuts down in bounded time, whatever its clients do.
//!
//! ```sh
//! cargo run --example shutdown              # serves until Ctrl-C or SIGTERM
//! cargo run --example shutdown -- --demo    # starts its own clients; exit code 0 if every result is as expected
//! ```
//!
//! While the server is running, use this command to make a call that takes ten minutes. Then press Ctrl-C in either
//! terminal:
//!
//! ```sh
//! curl -sN http://127.0.0.1:8767/mcp -H 'mcp-protocol-version: 2026-07-28' -H 'mcp-method: tools/call' \
//!   -H 'mcp-name: work' -H 'content-type: application/json' -H 'accept: application/json, text/event-stream' \
//!   -d '{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"work","arguments":{"seconds":600},
//!        "_meta":{"io.modelcontextprotocol/protocolVersion":"2026-07-28","io.modelcontextprotocol/clientCapabilities":{}}}}'
//! ```
//!
//! The shutdown has three phases: calls get some time to complete, any remaining calls are cancelled, and then
//! connections get some time to close. To use it in your server, copy [`serve_until`].

use std::{
    error::Error,
    future::pending,
    io::{self, IsTerminal as _},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use mcp_cancel_on_disconnect::{
    CallToken, Calls, CancelOnDisconnectLayer, CancellableSessionManager, DrainReport,
};
use rmcp::{
    RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::StreamableHttpService,
};
use tokio::{
    net::TcpListener,
    signal,
    sync::oneshot,
    time::{sleep, timeout},
};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

mod demo;

/// How long calls may take to complete after the signal.
const CALLS_TIMEOUT: Duration = Duration::from_secs(3);

/// How long connections may take to close after the last call.
///
/// Some connections never close, because their request is incomplete or their client never reads the rest of an answer.
const CONNECTIONS_TIMEOUT: Duration = Duration::from_secs(2);

/// The log filter if `RUST_LOG` is not set.
const LOG: &str = "warn,shutdown=info,mcp_cancel_on_disconnect=info";

#[derive(Clone)]
struct Worker {
    tool_router: ToolRouter<Self>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Job {
    seconds: u64,
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
    let args: Vec<String> = std::env::args().skip(1).collect();
    let address = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => "127.0.0.1:8767",
        ["--demo"] => return demo::run().await,
        [address] if !address.starts_with('-') => address,
        _ => {
            eprintln!("usage: shutdown [<address:port> | --demo]");
            return Ok(ExitCode::from(2));
        }
    };
    let listener = TcpListener::bind(address).await?;
    println!("listening on http://{}/mcp", listener.local_addr()?);
    let (app, calls) = app();
    let report = serve_until(shutdown_signal(), listener, app, calls).await?;
    println!(
        "{} calls ended, {} were cancelled",
        report.ended, report.cancelled
    );
    Ok(ExitCode::SUCCESS)
}

fn app() -> (Router, Calls) {
    let layer = CancelOnDisconnectLayer::new();
    let calls = layer.calls();
    let sessions = Arc::new(CancellableSessionManager::default());
    let mcp = StreamableHttpService::new(|| Ok(Worker::new()), sessions, Default::default());
    let app = Router::new().nest_service("/mcp", mcp).layer(layer);
    (app, calls)
}

/// Serves until `shutdown` completes, then shuts down in bounded time.
async fn serve_until(
    shutdown: impl Future<Output = ()> + Send + 'static,
    listener: TcpListener,
    app: Router,
    calls: Calls,
) -> io::Result<DrainReport> {
    let (start, started) = oneshot::channel();
    let shutdown = async move {
        shutdown.await;
        start.send(()).ok();
    };
    let server = axum::serve(listener, app).with_graceful_shutdown(shutdown);
    #[allow(
        clippy::disallowed_methods,
        reason = "it keeps serving during the drain"
    )]
    let server = tokio::spawn(server.into_future());

    // Fails if the server has already ended, in which case there is nothing to wait for.
    started.await.ok();
    info!("shutting down");
    let report = calls.drain(CALLS_TIMEOUT).await;
    match timeout(CONNECTIONS_TIMEOUT, server).await {
        Ok(served) => served??,
        Err(_) => warn!("some connections have not closed; they will end with the process"),
    }
    Ok(report)
}

/// Completes on Ctrl-C or SIGTERM, which is what init systems and container runtimes send.
async fn shutdown_signal() {
    let interrupt = async {
        if signal::ctrl_c().await.is_err() {
            pending::<()>().await;
        }
    };
    #[cfg(unix)]
    let terminate = async {
        match signal::unix::signal(signal::unix::SignalKind::terminate()) {
            Ok(mut terminate) => drop(terminate.recv().await),
            Err(_) => pending().await,
        }
    };
    #[cfg(not(unix))]
    let terminate = pending();
    tokio::select! {
        () = interrupt => {}
        () = terminate => {}
    }
}

// === impl Worker ===

#[tool_router]
impl Worker {
    fn new() -> Self {
        Self {
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Works for some seconds, unless it is cancelled")]
    async fn work(
        &self,
        Parameters(Job { seconds }): Parameters<Job>,
        context: RequestContext<RoleServer>,
    ) -> String {
        let work = sleep(Duration::from_secs(seconds));
        if context.ct.run_until_cancelled(work).await.is_some() {
            return format!("worked for {seconds} s");
        }
        let reason = CallToken::of(&context).and_then(|call| call.reason());
        info!(?reason, "work of {seconds} s stopped");
        "stopped".to_owned()
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Worker {}
