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

/// An event in the tool or in the slow server.
#[derive(Debug, PartialEq, Eq)]
enum Event {
    /// The slow server has received a request, and has sent its part of a response.
    Requested,
    /// The slow server has noticed that its connection is closed.
    Closed,
    /// The tool has ended.
    ToolEnded(Result<(), CancelReason>),
}

/// The server with the tool.
#[derive(Clone)]
struct Fetcher {
    http: reqwest::Client,
    events: UnboundedSender<Event>,
    tool_router: ToolRouter<Self>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Fetch {
    url: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    verdict::verdict(LIMIT, run()).await
}

async fn run() -> Result<(), Failure> {
    let (events, mut received) = unbounded_channel();
    let mut servers = JoinSet::new();
    let addr = serve(Fetcher::new(events.clone()), &mut servers).await?;

    for (sent, state) in [("", "nothing"), (HEAD, "part of the body")] {
        let slow = slow_server(sent, events.clone(), &mut servers).await?;
        let url = format!("http://{slow}/");
        let client = raw::call(addr, "fetch", json!({ "url": url })).await?;
        expect(&mut received, &[Event::Requested]).await?;
        println!("the web server has sent {state}; the client hangs up");
        client.hang_up();
        let cancelled = Err(CancelReason::ClientDisconnected);
        expect(&mut received, &[Event::ToolEnded(cancelled), Event::Closed]).await?;
        println!("the tool has ended, and its connection to the web server is closed");
    }
    Ok(())
}

/// Waits for all of the expected events, in any order.
async fn expect(
    received: &mut UnboundedReceiver<Event>,
    expected: &[Event],
) -> Result<(), Failure> {
    let mut missing: Vec<_> = expected.iter().collect();
    while !missing.is_empty() {
        let event = received.recv().await.ok_or("the servers have ended")?;
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

/// Starts a server that sends part of a response and then waits for its connection to close.
async fn slow_server(
    sent: &'static str,
    events: UnboundedSender<Event>,
    servers: &mut JoinSet<()>,
) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    servers.spawn(async move {
        if let Err(error) = answer_slowly(&listener, sent, &events).await {
            eprintln!("{error}");
        }
    });
    Ok(addr)
}

async fn answer_slowly(
    listener: &TcpListener,
    sent: &str,
    events: &UnboundedSender<Event>,
) -> io::Result<()> {
    let (mut connection, _) = listener.accept().await?;
    read_head(&mut connection).await?;
    connection.write_all(sent.as_bytes()).await?;
    let _ = events.send(Event::Requested);
    // Read until the connection is closed or reset.
    while connection.read_u8().await.is_ok() {}
    let _ = events.send(Event::Closed);
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
    fn new(events: UnboundedSender<Event>) -> Self {
        Self {
            http: reqwest::Client::new(),
            events,
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
        // This future reads both the head and the body. Dropping it closes the connection, whichever it is waiting for.
        let page = async { self.http.get(url).send().await?.text().await };
        let page = token.run_until_cancelled(page).await;
        let ended = page.as_ref().map(|_| ()).map_err(|reason| *reason);
        let _ = self.events.send(Event::ToolEnded(ended));
        match page {
            Ok(page) => page.map_err(|error| internal(error.to_string())),
            Err(reason) => Err(internal(reason.to_string())),
        }
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Fetcher {}
