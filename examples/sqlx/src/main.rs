//! Tools that query a database with sqlx. When their client disconnects, the database stops working on the query.
//!
//! ```sh
//! cargo run --manifest-path examples/sqlx/Cargo.toml
//! cargo run --manifest-path examples/sqlx/Cargo.toml -- postgres://user@localhost/database
//! ```
//!
//! Dropping a query does not stop it, because sqlx runs SQLite's queries on a thread, and PostgreSQL keeps working until it has something
//! to send. The two modules show how to stop a query.

use std::{error::Error, io, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{CallToken, CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::StreamableHttpService,
};
use sqlx::{PgPool, SqlitePool};
use tokio::task::JoinSet;

#[path = "../../shared/raw.rs"]
mod raw;
#[path = "../../shared/serve.rs"]
mod serve;
#[path = "../../shared/verdict.rs"]
mod verdict;

mod postgres;
mod sqlite;

type Failure = Box<dyn Error + Send + Sync>;

/// Timeout for this example, which takes far less.
const LIMIT: Duration = Duration::from_secs(20);

/// The server with the tools.
#[derive(Clone)]
struct Databases {
    sqlite: SqlitePool,
    postgres: Option<PgPool>,
    tool_router: ToolRouter<Self>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Count {
    up_to: i64,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Sleep {
    seconds: f64,
}

#[tokio::main]
async fn main() -> ExitCode {
    verdict::verdict(LIMIT, run()).await
}

async fn run() -> Result<(), Failure> {
    let sqlite = sqlite::pool().await?;
    let postgres = match std::env::args().nth(1) {
        Some(url) => Some(postgres::pool(&url).await?),
        None => None,
    };
    let mut servers = JoinSet::new();
    let addr = serve(Databases::new(sqlite, postgres.clone()), &mut servers).await?;
    sqlite::run(addr).await?;
    match postgres {
        Some(pool) => postgres::run(addr, &pool).await,
        None => Ok(()),
    }
}

async fn serve(databases: Databases, servers: &mut JoinSet<()>) -> io::Result<SocketAddr> {
    let mcp = StreamableHttpService::new(
        move || Ok(databases.clone()),
        Arc::new(CancellableSessionManager::default()),
        Default::default(),
    );
    let app = Router::new()
        .nest_service("/mcp", mcp)
        .layer(CancelOnDisconnectLayer::new());
    serve::serve(app, servers).await
}

// === impl Databases ===

#[tool_router]
impl Databases {
    fn new(sqlite: SqlitePool, postgres: Option<PgPool>) -> Self {
        Self {
            sqlite,
            postgres,
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Counts in SQLite")]
    async fn count(
        &self,
        Parameters(Count { up_to }): Parameters<Count>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let count = async { sqlite::count(&self.sqlite, up_to, &token(&context)?).await };
        answer(count.await)
    }

    #[tool(description = "Sleeps in PostgreSQL")]
    async fn sleep(
        &self,
        Parameters(Sleep { seconds }): Parameters<Sleep>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let sleep = async {
            let pool = self
                .postgres
                .as_ref()
                .ok_or("the server has no PostgreSQL database")?;
            postgres::sleep(pool, seconds, &token(&context)?).await
        };
        answer(sleep.await)
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Databases {}

fn token(context: &RequestContext<RoleServer>) -> Result<CallToken, Failure> {
    Ok(CallToken::of(context).ok_or("the request did not pass through the layer")?)
}

fn answer(result: Result<String, Failure>) -> Result<String, ErrorData> {
    result.map_err(|error| ErrorData::internal_error(error.to_string(), None))
}
