//! Three MCP servers in a chain: a tool on the first calls the second, and its tool in turn calls the third. When the
//! client disconnects from the first, all three handlers stop.
//!
//! ```sh
//! cargo run --example gateway
//! ```
//!
//! A gateway needs a function like [`call_downstream`], which cancels the request made to the next server if the
//! gateway's own call is cancelled.

use std::{error::Error, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{
    AbortOnCancel, CallToken, CancelOnDisconnectLayer, CancellableSessionManager,
};
use rmcp::{
    ErrorData, RoleClient, RoleServer, ServerHandler, ServiceExt as _,
    model::{
        CallToolRequest, CallToolRequestParams, CallToolResponse, CallToolResult, ClientRequest,
        ErrorCode, ServerResult,
    },
    service::{Peer, PeerRequestOptions, RequestContext, RunningService, ServiceError},
    transport::{StreamableHttpClientTransport, streamable_http_server::StreamableHttpService},
};
use serde_json::json;
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::JoinSet,
    time::{Instant, timeout},
};

#[path = "shared/raw.rs"]
mod raw;
#[path = "shared/serve.rs"]
mod serve;

type Failure = Box<dyn Error>;

/// Timeout for this example, which takes far less.
const LIMIT: Duration = Duration::from_secs(10);

/// One of the servers in the chain. The last server's tools work until they are stopped.
#[derive(Clone)]
struct Server {
    name: &'static str,
    next: Option<Arc<RunningService<RoleClient, ()>>>,
    events: UnboundedSender<Event>,
}

enum Event {
    Started(&'static str),
    Stopped(&'static str),
}

/// When dropped, reports that its handler has stopped.
struct WorkGuard<'a>(&'a Server);

#[tokio::main]
async fn main() -> Result<ExitCode, Failure> {
    let mut servers = JoinSet::new();
    let (events, mut received) = unbounded_channel();
    let mut next = None;
    let mut front = None;
    for name in ["worker", "middle", "front"] {
        let server = Server {
            name,
            next: next.take().map(Arc::new),
            events: events.clone(),
        };
        let addr = server.serve(&mut servers).await?;
        let url = format!("http://{addr}/mcp");
        next = Some(
            ().serve(StreamableHttpClientTransport::from_uri(url))
                .await?,
        );
        front = Some(addr);
    }
    let front = front.ok_or("no servers")?;

    let client = raw::call(front, "work", json!({})).await?;
    for _ in 0..3 {
        if let Event::Started(name) = next_event(&mut received).await? {
            println!("{name} is working");
        }
    }
    println!("the client hangs up");
    let hung_up = Instant::now();
    client.hang_up();
    let mut stopped = Vec::new();
    for _ in 0..3 {
        if let Event::Stopped(name) = next_event(&mut received).await? {
            println!("{name} stopped after {:.1?}", hung_up.elapsed());
            stopped.push(name);
        }
    }
    stopped.sort_unstable();
    let have_all_stopped = stopped == ["front", "middle", "worker"];
    println!(
        "{}",
        if have_all_stopped {
            "All three handlers have stopped."
        } else {
            "A handler is still running!"
        }
    );
    Ok(if have_all_stopped {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn next_event(received: &mut UnboundedReceiver<Event>) -> Result<Event, Failure> {
    Ok(timeout(LIMIT, received.recv())
        .await?
        .ok_or("the servers have ended")?)
}

/// Calls a tool on another server. If the call in `context` is cancelled, the new request is cancelled for the same
/// reason.
///
/// (Inside `AbortOnCancel`, `Peer::call_tool` works too, because rmcp cancels the request when the call's future is
/// dropped. However, it does so only after the time that `AbortOnCancel` gives a handler to finish on its own.)
async fn call_downstream(
    server: &Peer<RoleClient>,
    params: CallToolRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<CallToolResult, ErrorData> {
    let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
    let sent = server.send_cancellable_request(request, PeerRequestOptions::no_options());
    let mut request = sent.await.map_err(internal_error)?;
    tokio::select! {
        answer = &mut request.rx => match answer.map_err(|_| internal_error(ServiceError::TransportClosed))? {
            Ok(ServerResult::CallToolResult(result)) => Ok(result),
            Ok(_) => Err(internal_error(ServiceError::UnexpectedResponse)),
            Err(error) => Err(internal_error(error)),
        },
        () = context.ct.cancelled() => {
            let reason = CallToken::of(context).and_then(|call| call.reason());
            let reason = reason.map(|reason| reason.to_string());
            request.cancel(reason).await.map_err(internal_error)?;
            Err(ErrorData::new(ErrorCode(-32_800), "Request cancelled", None))
        }
    }
}

fn internal_error(error: ServiceError) -> ErrorData {
    ErrorData::internal_error(format!("the downstream server failed: {error}"), None)
}

// === impl Server ===

impl Server {
    async fn serve(self, servers: &mut JoinSet<()>) -> Result<SocketAddr, Failure> {
        let sessions = Arc::new(CancellableSessionManager::default());
        // The worker never checks its token, so it has to be aborted.
        let handler = AbortOnCancel::new(self).after(Duration::from_millis(100));
        let mcp =
            StreamableHttpService::new(move || Ok(handler.clone()), sessions, Default::default());
        let app = Router::new()
            .nest_service("/mcp", mcp)
            .layer(CancelOnDisconnectLayer::new());
        Ok(serve::serve(app, servers).await?)
    }

    fn report(&self, event: Event) {
        // This fails after the last expected event, when the receiver has been dropped.
        let _ = self.events.send(event);
    }
}

impl ServerHandler for Server {
    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        self.report(Event::Started(self.name));
        let _guard = WorkGuard(self);
        match &self.next {
            Some(next) => {
                let result = call_downstream(next.peer(), request, &context).await?;
                Ok(result.into())
            }
            None => std::future::pending().await,
        }
    }
}

// === impl WorkGuard ===

impl Drop for WorkGuard<'_> {
    fn drop(&mut self) {
        self.0.report(Event::Stopped(self.0.name));
    }
}
