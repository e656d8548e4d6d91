//! rmcp's own client, for several concurrent cells.

use std::{
    collections::HashMap,
    error::Error,
    sync::{Arc, Mutex},
    time::Duration,
};

use interop::{Orders, emit};
use rmcp::{
    ClientHandler, RoleClient, ServiceError,
    model::{
        CallToolRequest, CallToolRequestParams, CallToolResult, ClientRequest, ContentBlock,
        JsonObject, ProgressNotificationParam, ProtocolVersion, ServerResult,
    },
    service::{
        ClientLifecycleMode, ClientServiceExt as _, NotificationContext, Peer, PeerRequestOptions,
        RunningService,
    },
    transport::StreamableHttpClientTransport,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tracing_subscriber::EnvFilter;

#[derive(Deserialize)]
#[serde(untagged)]
enum Order {
    Open(Call),
    Close { close: String },
}

/// `{"open": "<cell>", "url": …, "arguments": …, "timeout": …}`: connect and call the tool.
#[derive(Deserialize)]
struct Call {
    #[serde(rename = "open")]
    cell: String,
    url: String,
    arguments: JsonObject,
    /// In seconds.
    timeout: f64,
}

/// The progress that the handler has reported.
#[derive(Clone, Default)]
struct Progress(Arc<Mutex<Vec<f64>>>);

/// Longer than notification handlers need.
const NOTIFICATIONS: Duration = Duration::from_millis(50);

#[tokio::main]
async fn main() {
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_default())
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();
    let modern = std::env::args().any(|arg| arg == "--2026");
    let mut cells = HashMap::new();
    emit("ready", json!({}));
    let mut orders = Orders::stdin();
    while let Some(order) = orders.next().await {
        match order {
            Order::Open(call) => {
                let close = Arc::new(Notify::new());
                cells.insert(call.cell.clone(), close.clone());
                tokio::spawn(serve(call, close, modern));
            }
            Order::Close { close } => {
                if let Some(cell) = cells.remove(&close) {
                    cell.notify_one();
                }
            }
        }
    }
}

/// Connects, calls the tool, and stays connected until `close` is notified. Reports the outcome, unless `close` is
/// notified first, and then that it has closed. If it cannot connect, it only reports that.
async fn serve(call: Call, close: Arc<Notify>, modern: bool) {
    let lifecycle = if modern {
        ClientLifecycleMode::Discover {
            preferred_versions: vec![ProtocolVersion::V_2026_07_28],
        }
    } else {
        ClientLifecycleMode::Initialize
    };
    let progress = Progress::default();
    let client = match connect(&call, lifecycle, progress.clone()).await {
        Ok(client) => client,
        Err(error) => return report(&call, Err(error.to_string()), &progress),
    };
    tokio::select! {
        outcome = ask(client.peer(), &call) => {
            // rmcp runs a task per notification, so the answer may arrive before them.
            tokio::time::sleep(NOTIFICATIONS).await;
            report(&call, outcome.map_err(|error| error.to_string()), &progress);
            close.notified().await;
        }
        () = close.notified() => {}
    }
    let _quit = client.cancel().await;
    emit("closed", json!({ "cell": call.cell }));
}

async fn connect(
    call: &Call,
    lifecycle: ClientLifecycleMode,
    progress: Progress,
) -> Result<RunningService<RoleClient, Progress>, Box<dyn Error + Send + Sync>> {
    let transport = StreamableHttpClientTransport::from_uri(call.url.clone());
    Ok(progress.serve_with_lifecycle(transport, lifecycle).await?)
}

async fn ask(peer: &Peer<RoleClient>, call: &Call) -> Result<CallToolResult, ServiceError> {
    let request = ClientRequest::CallToolRequest(CallToolRequest::new(
        CallToolRequestParams::new("work").with_arguments(call.arguments.clone()),
    ));
    let options = PeerRequestOptions::with_timeout(Duration::from_secs_f64(call.timeout));
    let handle = peer.send_request_with_option(request, options).await?;
    match handle.await_response().await? {
        ServerResult::CallToolResult(result) => Ok(result),
        _ => Err(ServiceError::UnexpectedResponse),
    }
}

fn report(call: &Call, outcome: Result<CallToolResult, String>, progress: &Progress) {
    let progress = progress.0.lock().expect("no panic holds it").clone();
    let fields = match outcome {
        Ok(result) => json!({ "cell": call.cell, "text": text(&result), "progress": progress }),
        Err(error) => json!({ "cell": call.cell, "error": error }),
    };
    emit("outcome", fields);
}

fn text(result: &CallToolResult) -> Value {
    match result.content.first() {
        Some(ContentBlock::Text(text)) => text.text.clone().into(),
        _ => Value::Null,
    }
}

impl ClientHandler for Progress {
    async fn on_progress(
        &self,
        progress: ProgressNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let mut seen = self.0.lock().expect("no panic holds it");
        seen.push(progress.progress);
    }
}
