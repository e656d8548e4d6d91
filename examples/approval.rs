//! A tool that waits for a human's approval. Its call survives a lost connection. If a client cannot resume and calls
//! again, the human is not left with two open questions.
//!
//! ```sh
//! cargo run --example approval
//! ```
//!
//! The policy in [`serve`] takes care of both: it gives clients an hour to resume, and enables `supersede`.

use std::{error::Error, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_on_disconnect::{
    AbortOnCancel, CancelOnDisconnectLayer, CancellableSessionManager, Event, Grace, Policy,
};
use rmcp::{
    ErrorData, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars, tool, tool_handler, tool_router,
    transport::streamable_http_server::StreamableHttpService,
};
use serde_json::{Value, json};
use tokio::{
    sync::{
        mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
        oneshot,
    },
    task::JoinSet,
};

use self::raw::Client;

#[path = "shared/raw.rs"]
mod raw;
#[path = "shared/serve.rs"]
mod serve;
#[path = "shared/verdict.rs"]
mod verdict;

type Failure = Box<dyn Error>;

/// Timeout for this example, which takes far less and does not wait for the hour to pass.
const LIMIT: Duration = Duration::from_secs(10);

/// A question waiting for the human's answer.
struct Question {
    document: String,
    reply: oneshot::Sender<&'static str>,
}

#[derive(Clone)]
struct Office {
    questions: UnboundedSender<Question>,
    tool_router: ToolRouter<Self>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Approve {
    document: String,
}

#[tokio::main]
async fn main() -> ExitCode {
    verdict::verdict(LIMIT, run()).await
}

async fn run() -> Result<(), Failure> {
    let mut servers = JoinSet::new();
    let (office, mut questions) = unbounded_channel();
    let (disconnects, mut disconnected) = unbounded_channel();
    let addr = serve(office, disconnects, &mut servers).await?;
    let client = Client::connect(addr).await?;

    let mut call = client
        .call(7, "approve", json!({ "document": "the budget" }))
        .await?;
    let question = next(&mut questions).await?;
    println!(
        "the human reads {:?}; the connection breaks",
        question.document
    );
    call.read_until("id: 0/0").await?;
    call.hang_up();
    next(&mut disconnected).await?;
    let resumed = client.resume("0/0").await?;
    println!("the client is back; the human approves");
    answer(question)?;
    expect(&resumed.read_to_end().await?, "approved")?;
    println!("the client has its answer");

    let mut stale = client.call(8, "approve", contract()).await?;
    let mut first = next(&mut questions).await?;
    println!(
        "the human reads {:?}; the client loses its call",
        first.document
    );
    stale.read_until("id: 0/1").await?;
    stale.hang_up();
    next(&mut disconnected).await?;
    let again = client.call(9, "approve", contract()).await?;
    let second = next(&mut questions).await?;
    first.reply.closed().await;
    println!("it asks again: the first question is withdrawn; the human approves the second");
    answer(second)?;
    expect(&again.read_to_end().await?, "approved")?;
    println!("the client has its answer");
    Ok(())
}

async fn serve(
    questions: UnboundedSender<Question>,
    disconnects: UnboundedSender<()>,
    servers: &mut JoinSet<()>,
) -> Result<SocketAddr, Failure> {
    let sessions = Arc::new(CancellableSessionManager::default());
    let office = Office {
        questions,
        tool_router: Office::tool_router(),
    };
    let handler = AbortOnCancel::new(office).after(Duration::ZERO);
    let mcp = StreamableHttpService::new(move || Ok(handler.clone()), sessions, Default::default());
    let layer = CancelOnDisconnectLayer::new().policy(|call| match call.tool() {
        Some("approve") => {
            let hour = Duration::from_secs(60 * 60);
            Policy::new().grace(Grace::After(hour)).supersede()
        }
        _ => Policy::new(),
    });
    // A call is superseded only once the server has detected its client's disconnect, so the example waits until it
    // has.
    let layer = layer.observe(move |event: &Event<'_>| {
        if let Event::Detached { .. } = event {
            let _ = disconnects.send(());
        }
    });
    let app = Router::new().nest_service("/mcp", mcp).layer(layer);
    Ok(serve::serve(app, servers).await?)
}

fn contract() -> Value {
    json!({ "document": "the contract" })
}

async fn next<T>(receiver: &mut UnboundedReceiver<T>) -> Result<T, Failure> {
    Ok(receiver.recv().await.ok_or("the office is closed")?)
}

fn answer(question: Question) -> Result<(), Failure> {
    let sent = question.reply.send("approved");
    Ok(sent.map_err(|_| "the tool is no longer waiting for the answer")?)
}

fn expect(response: &str, text: &str) -> Result<(), Failure> {
    if response.contains(text) {
        Ok(())
    } else {
        Err(format!("{text:?} is not in {response:?}").into())
    }
}

// === impl Office ===

#[tool_router]
impl Office {
    #[tool(description = "Has a human approve a document")]
    async fn approve(
        &self,
        Parameters(Approve { document }): Parameters<Approve>,
    ) -> Result<String, ErrorData> {
        let (reply, answer) = oneshot::channel();
        let question = Question { document, reply };
        let closed = || ErrorData::internal_error("the office is closed", None);
        self.questions.send(question).map_err(|_| closed())?;
        // Dropping this future also drops `answer`, so the question can no longer be answered.
        let answer = answer.await.map_err(|_| closed())?;
        Ok(answer.to_owned())
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Office {}
