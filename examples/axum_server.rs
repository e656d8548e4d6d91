//! A server with a tool that sleeps for a minute. Its log shows what happens when curl disconnects.
//!
//! ```sh
//! cargo run --example axum_server -- --grace immediate
//! ```
//!
//! The curl commands are in `examples/README.md`. `RUST_LOG` sets the log filter: `mcp_cancel_on_disconnect=trace` logs
//! everything that the layer does.

use std::{
    error::Error,
    io::{self, IsTerminal as _},
    process::ExitCode,
    sync::Arc,
    time::Duration,
};

use axum::Router;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancellableSessionManager, Grace,
};
use rmcp::{
    RoleServer, ServerHandler,
    handler::server::router::tool::ToolRouter,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService},
};
use tokio::{
    net::TcpListener,
    time::{self, Instant},
};
use tracing::info;
use tracing_subscriber::EnvFilter;

const USAGE: &str = "\
usage: axum_server [--grace immediate|auto|never|<seconds>] [--stateless]

  --grace      how long a call waits for its client to resume (auto)
  --stateless  without sessions
";

const ADDRESS: &str = "127.0.0.1:8765";

/// The log filter if `RUST_LOG` is not set.
const LOG: &str = "warn,axum_server=info,mcp_cancel_on_disconnect=debug";

const STEP: Duration = Duration::from_millis(100);
const STEPS: u32 = 600;

struct Options {
    grace: Grace,
    stateless: bool,
}

#[derive(Clone)]
struct Sleeper {
    tool_router: ToolRouter<Self>,
}

#[tokio::main]
async fn main() -> Result<ExitCode, Box<dyn Error>> {
    let Some(options) = Options::parse(std::env::args().skip(1)) else {
        eprint!("{USAGE}");
        return Ok(ExitCode::from(2));
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(LOG));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_ansi(io::stdout().is_terminal())
        .init();

    let sessions = CancellableSessionManager::default();
    let config = StreamableHttpServerConfig::default().with_legacy_session_mode(!options.stateless);
    let mcp = StreamableHttpService::new(|| Ok(Sleeper::new()), Arc::new(sessions), config);
    let app = Router::new()
        .nest_service("/mcp", mcp)
        .layer(CancelOnDisconnectLayer::new().grace(options.grace));

    let listener = TcpListener::bind(ADDRESS).await?;
    let Options { grace, stateless } = options;
    info!(?grace, stateless, "listening on http://{ADDRESS}/mcp");
    axum::serve(listener, app).await?;
    Ok(ExitCode::SUCCESS)
}

// === impl Options ===

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Option<Self> {
        let mut options = Self {
            grace: Grace::Auto,
            stateless: false,
        };
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--grace" => options.grace = parse_grace(&args.next()?)?,
                "--stateless" => options.stateless = true,
                _ => return None,
            }
        }
        Some(options)
    }
}

fn parse_grace(text: &str) -> Option<Grace> {
    match text {
        "auto" => Some(Grace::Auto),
        "immediate" => Some(Grace::Immediate),
        "never" => Some(Grace::Never),
        seconds => Some(Grace::After(Duration::from_secs(seconds.parse().ok()?))),
    }
}

// === impl Sleeper ===

#[tool_router]
impl Sleeper {
    fn new() -> Self {
        Self {
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Sleeps for 60 s, unless it is cancelled")]
    async fn long_sleep(&self, context: RequestContext<RoleServer>) -> String {
        let mut ticks = time::interval_at(Instant::now() + STEP, STEP);
        for tick in 1..=STEPS {
            if context.ct.run_until_cancelled(ticks.tick()).await.is_none() {
                let reason = CallToken::of(&context).and_then(|token| token.reason());
                info!(cancelled = true, ?reason, "long_sleep stops");
                return "woken up".to_owned();
            }
            info!(cancelled = false, "long_sleep has slept {:?}", STEP * tick);
        }
        "slept well".to_owned()
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Sleeper {}
