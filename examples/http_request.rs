//! A tool that fetches a page with reqwest. When its client disconnects, the tool's connection to the web server is
//! closed.
//!
//! ```sh
//! cargo run --example http_request
//! ```
//!
//! The tool is cancelled twice: once while it is waiting for the response head, and once while it is reading the body.

use std::{error::Error, io, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{
    CallToken, CancelOnDisconnectLayer, CancelReason, CancellableSessionManager,
};
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::StreamableHttpService,
};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinSet,
};

#[path = "shared/raw.rs"]
mod raw;
#[path = "shared/serve.rs"]
mod serve;
#[path = "shared/verdict.rs"]
mod verdict;

type Failure = Box<dyn Error>;

/// Timeout for this example, which takes far less.
const LIMIT: Duration = Duration::from_secs(10);

/// Part of a response: the head, and the first of the body's ten bytes.
const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n1";

/// What has happened on either side.
#[derive(Debug, PartialEq, Eq)]
enum Happened {
    /// The slow server has received a request, and has sent its part of a response.
    Requested,
    /// The slow server has found its connection closed.
    Closed,
    /// The tool has ended.
    ToolEnded(Result<(), CancelReason>),
}

/// The server with the tool.
#[derive(Clone)]
struct Fetcher {
    http: reqwest::Client,
    happened: UnboundedSender<Happened>,
    tool_router: ToolRouter<Self>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Fetch {
    url: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    verdict::verdict(LIMIT, play()).await
}

async fn play() -> Result<(), Failure> {
    let (happened, mut events) = unbounded_channel();
    let mut servers = JoinSet::new();
    let addr = serve(Fetcher::new(happened.clone()), &mut servers).await?;

    for (sent, state) in [("", "nothing"), (HEAD, "a part of the body")] {
        let slow = slow_server(sent, happened.clone(), &mut servers).await?;
        let url = format!("http://{slow}/");
        let client = raw::call(addr, "fetch", json!({ "url": url })).await?;
        expect(&mut events, &[Happened::Requested]).await?;
        println!("the web server has sent {state}; the client hangs up");
        client.hang_up();
        let cancelled = Err(CancelReason::ClientDisconnected);
        expect(
            &mut events,
            &[Happened::ToolEnded(cancelled), Happened::Closed],
        )
        .await?;
        println!("the tool has ended, and its connection to the web server is closed");
    }
    Ok(())
}

/// Waits until all of these have happened, in any order.
async fn expect(
    events: &mut UnboundedReceiver<Happened>,
    expected: &[Happened],
) -> Result<(), Failure> {
    let mut missing: Vec<_> = expected.iter().collect();
    while !missing.is_empty() {
        let event = events.recv().await.ok_or("the servers have ended")?;
        let Some(found) = missing.iter().position(|expected| **expected == event) else {
            return Err(format!("{event:?} instead of {missing:?}").into());
        };
        missing.swap_remove(found);
    }
    Ok(())
}

async fn serve(fetcher: Fetcher, servers: &mut JoinSet<()>) -> io::Result<SocketAddr> {
    let mcp = StreamableHttpService::new(
        move || Ok(fetcher.clone()),
        Arc::new(CancellableSessionManager::default()),
        Default::default(),
    );
    let app = Router::new()
        .nest_service("/mcp", mcp)
        .layer(CancelOnDisconnectLayer::new());
    serve::serve(app, servers).await
}

/// Starts a server that sends part of a response, and then waits for its connection to end.
async fn slow_server(
    sent: &'static str,
    happened: UnboundedSender<Happened>,
    servers: &mut JoinSet<()>,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    servers.spawn(async move {
        if let Err(error) = answer_slowly(&listener, sent, &happened).await {
            eprintln!("{error}");
        }
    });
    Ok(addr)
}

async fn answer_slowly(
    listener: &TcpListener,
    sent: &str,
    happened: &UnboundedSender<Happened>,
) -> io::Result<()> {
    let (mut connection, _) = listener.accept().await?;
    read_head(&mut connection).await?;
    connection.write_all(sent.as_bytes()).await?;
    let _ = happened.send(Happened::Requested);
    // Until the connection is closed or reset.
    while connection.read_u8().await.is_ok() {}
    let _ = happened.send(Happened::Closed);
    Ok(())
}

async fn read_head(connection: &mut TcpStream) -> io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(connection.read_u8().await?);
    }
    Ok(())
}

// === impl Fetcher ===

#[tool_router]
impl Fetcher {
    fn new(happened: UnboundedSender<Happened>) -> Self {
        Self {
            http: reqwest::Client::new(),
            happened,
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Fetches a page")]
    async fn fetch(
        &self,
        Parameters(Fetch { url }): Parameters<Fetch>,
        context: RequestContext<RoleServer>,
    ) -> Result<String, ErrorData> {
        let internal = |error: String| ErrorData::internal_error(error, None);
        let token = CallToken::of(&context)
            .ok_or_else(|| internal("the request did not pass through the layer".to_owned()))?;
        // Reads the head and the body. Dropping this future closes the connection in either phase.
        let page = async { self.http.get(url).send().await?.text().await };
        let page = token.run_until_cancelled(page).await;
        let ended = page.as_ref().map(|_| ()).map_err(|reason| *reason);
        let _ = self.happened.send(Happened::ToolEnded(ended));
        match page {
            Ok(page) => page.map_err(|error| internal(error.to_string())),
            Err(reason) => Err(internal(reason.to_string())),
        }
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Fetcher {}
