//! Two instances of one server, and clients whose requests reach either instance.
//!
//! ```sh
//! cargo run -p mcp-cancel-cluster --example two_instances
//! cargo run -p mcp-cancel-cluster --example two_instances -- --redis redis://127.0.0.1:6379
//! ```
//!
//! Every session is opened at the first instance. Its client then sends everything to the second, which does not have the session. The
//! example checks itself, and fails if a message is lost.

#![allow(
    deprecated,
    reason = "sampling has no successor in revisions that have sessions"
)]

use std::{env, error::Error, net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use axum::Router;
use mcp_cancel_cluster::{Cluster, ClusterBuilder, MemoryDirectory};
use mcp_cancel_on_disconnect::{
    CancelOnDisconnectLayer, CancelReason, CancellableSessionManager, Event, Grace, Outcome,
    observe::CallState,
};
use rmcp::{
    RoleServer, ServerHandler,
    handler::server::router::tool::ToolRouter,
    model::{CreateMessageRequestParams, SamplingMessage},
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService},
};
use serde_json::{Value, json};
use test_support::Mcp;
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
    time::timeout,
};

/// Timeout of the whole example: 30 s.
const TIMEOUT: Duration = Duration::from_secs(30);

const GRACE: Duration = Duration::from_secs(1);

type Failure = Box<dyn Error>;

/// The tools of both instances.
#[derive(Clone)]
struct Workshop {
    name: &'static str,
    done: Arc<Notify>,
    tool_router: ToolRouter<Self>,
}

/// One instance, as clients and peers reach it.
struct Instance {
    addr: SocketAddr,
    done: Arc<Notify>,
    /// How calls ended here.
    ends: mpsc::UnboundedReceiver<Outcome>,
    layer: CancelOnDisconnectLayer,
    cluster: Cluster,
}

#[tool_router]
impl Workshop {
    #[tool(description = "Works until it is done or cancelled")]
    async fn work(&self, context: RequestContext<RoleServer>) -> String {
        tokio::select! {
            () = self.done.notified() => format!("done by {}", self.name),
            () = context.ct.cancelled() => "cancelled".to_owned(),
        }
    }

    #[tool(description = "Asks the client's model for a word")]
    async fn ask(&self, context: RequestContext<RoleServer>) -> String {
        let question = SamplingMessage::user_text("a word, please");
        let asked = context
            .peer
            .create_message(CreateMessageRequestParams::new(vec![question], 10));
        match asked.await {
            Ok(answer) => format!("{} received {:?}", self.name, answer.model),
            Err(error) => format!("{} received no answer: {error}", self.name),
        }
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Workshop {}

#[tokio::main]
async fn main() -> ExitCode {
    match timeout(TIMEOUT, play()).await {
        Ok(Ok(())) => {
            println!("every message arrived");
            ExitCode::SUCCESS
        }
        Ok(Err(error)) => {
            println!("{error}");
            ExitCode::FAILURE
        }
        Err(_) => {
            println!("the example did not complete within 30 s");
            ExitCode::FAILURE
        }
    }
}

async fn play() -> Result<(), Failure> {
    let mut arguments = env::args().skip(1);
    let redis = match (arguments.next().as_deref(), arguments.next()) {
        (None, _) => None,
        (Some("--redis"), Some(address)) => Some(address),
        _ => return Err("usage: two_instances [--redis redis://HOST:PORT]".into()),
    };
    let directory = MemoryDirectory::default();
    let member = || match &redis {
        Some(address) => Cluster::redis(address),
        None => Cluster::in_memory(&directory),
    };
    let mut first = start("the first", member()).await?;
    let second = start("the second", member()).await?;

    resume(&first, &second).await?;
    expect(&first.ends.recv().await, &Some(Outcome::Completed))?;
    cancel(&first, &second).await?;
    expect(&first.ends.recv().await, &Some(Outcome::ClientCancelled))?;
    answer(&first, &second).await?;
    expect(&first.ends.recv().await, &Some(Outcome::Completed))?;
    disconnect(&first, &second).await?;
    let orphaned = Outcome::Cancelled(CancelReason::Orphaned);
    expect(&first.ends.recv().await, &Some(orphaned))?;
    println!("a client that disconnected from the second: its call is cancelled at the first");
    leave(&first, &second).await
}

/// Starts an instance. This is all that a server has to do.
async fn start(name: &'static str, member: ClusterBuilder) -> Result<Instance, Failure> {
    let (public, peers) = (
        TcpListener::bind("127.0.0.1:0").await?,
        TcpListener::bind("127.0.0.1:0").await?,
    );
    let addr = public.local_addr()?;
    let cluster = member
        .advertise(peers.local_addr()?.to_string())
        .connect()
        .await?;

    let done = Arc::new(Notify::new());
    let workshop = Workshop {
        name,
        done: done.clone(),
        tool_router: Workshop::tool_router(),
    };
    let sessions = Arc::new(cluster.sessions(CancellableSessionManager::default()));
    let mut config = StreamableHttpServerConfig::default();
    config.session_store = Some(Arc::new(cluster.clone()));
    let mcp = StreamableHttpService::new(move || Ok(workshop.clone()), sessions, config);

    let (sender, ends) = mpsc::unbounded_channel();
    let layer = CancelOnDisconnectLayer::new()
        .grace(Grace::After(GRACE))
        .observe_fn(move |event| {
            if let Event::Ended { call, outcome, .. } = event
                && call.tool().is_some()
            {
                let _sent = sender.send(*outcome);
            }
        });
    let layer = cluster.protect(layer);
    let app = Router::new()
        .nest_service("/mcp", mcp)
        .layer(layer.clone())
        .layer(cluster.layer());

    let served = app.clone();
    tokio::spawn(async move { axum::serve(public, served).await });
    let member = cluster.clone();
    tokio::spawn(async move { member.serve_peers(peers, app).await });
    Ok(Instance {
        addr,
        done,
        ends,
        layer,
        cluster,
    })
}

/// A client disconnects during its call and resumes at the other instance.
async fn resume(first: &Instance, second: &Instance) -> Result<(), Failure> {
    let client = Mcp::session(first.addr, "/mcp").await;
    let elsewhere = client_at(&client, second)?;
    let mut call = client.call(7, "work", json!({})).await;
    call.head().await;
    let last_event_id = call
        .event()
        .await
        .and_then(|event| event.id)
        .ok_or("no event")?;
    call.fin();
    let mut resumed = elsewhere.resume(&last_event_id).await;
    resumed.head().await;
    first.attached().await;
    first.done.notify_one();
    let answer = resumed.answer().await.ok_or("no answer")?;
    expect(&text(&answer), &json!("done by the first"))?;
    println!("a client that was cut off at the first: it received its answer from the second");
    Ok(())
}

/// A client cancels its call at the other instance.
async fn cancel(first: &Instance, second: &Instance) -> Result<(), Failure> {
    let client = Mcp::session(first.addr, "/mcp").await;
    let mut call = client.call(7, "work", json!({})).await;
    call.head().await;
    call.event().await.ok_or("no event")?;
    let cancelled = client_at(&client, second)?.cancel(7).await;
    expect(&cancelled, &202)?;
    println!("a client that cancelled at the second: its call ends at the first");
    Ok(())
}

/// A tool sends a request to its client, which answers at the other instance.
async fn answer(first: &Instance, second: &Instance) -> Result<(), Failure> {
    let client = Mcp::session(first.addr, "/mcp").await;
    let mut call = client.call(7, "ask", json!({})).await;
    call.head().await;
    let question = loop {
        let event = call.event().await.ok_or("no question")?;
        if !event.is_priming() {
            break event.json();
        }
    };
    let word = json!({
        "jsonrpc": "2.0",
        "id": question.get("id"),
        "result": {
            "model": "a word",
            "role": "assistant",
            "content": { "type": "text", "text": "plum" },
        },
    });
    let elsewhere = client_at(&client, second)?;
    let mut sent = elsewhere.send(&elsewhere.message_request(&word)).await;
    expect(&sent.head().await.status, &202)?;
    let answer = call.answer().await.ok_or("no answer")?;
    expect(&text(&answer), &json!("the first received \"a word\""))?;
    println!("a client that answered a request at the second: the first received the answer");
    Ok(())
}

/// A client calls a tool of the first instance through the second and disconnects without a resume.
async fn disconnect(first: &Instance, second: &Instance) -> Result<(), Failure> {
    let client = Mcp::session(first.addr, "/mcp").await;
    let mut call = client_at(&client, second)?.call(7, "work", json!({})).await;
    call.head().await;
    call.event().await.ok_or("no event")?;
    call.fin();
    Ok(())
}

/// The first instance shuts down during a call.
async fn leave(first: &Instance, second: &Instance) -> Result<(), Failure> {
    let client = client_at(&Mcp::session(first.addr, "/mcp").await, second)?;
    let mut call = client.call(7, "work", json!({})).await;
    call.head().await;
    let leaving = first.cluster.leave(TIMEOUT);
    let calls = async {
        let mut next = client.call(8, "work", json!({})).await;
        first.done.notify_one();
        second.done.notify_one();
        let answer = call.answer().await.ok_or("no answer")?;
        expect(&text(&answer), &json!("done by the first"))?;
        let answer = next.answer().await.ok_or("no answer")?;
        expect(&text(&answer), &json!("done by the second"))
    };
    let (cancelled, answered) = tokio::join!(leaving, calls);
    answered?;
    expect(&cancelled, &0)?;
    println!(
        "a client of the first, which shut down: its call ended there, and the next one runs at the second"
    );
    Ok(())
}

/// Returns a client of an instance that uses another client's session.
fn client_at(client: &Mcp, instance: &Instance) -> Result<Mcp, Failure> {
    let session = client.session_id().ok_or("no session")?;
    Ok(Mcp::stateless(instance.addr, "/mcp").in_session(session))
}

fn text(answer: &Value) -> Value {
    let text = answer.pointer("/result/content/0/text");
    text.cloned().unwrap_or_default()
}

fn expect<T: PartialEq + std::fmt::Debug>(found: &T, expected: &T) -> Result<(), Failure> {
    if found == expected {
        Ok(())
    } else {
        Err(format!("expected {expected:?}, found {found:?}").into())
    }
}

// === impl Instance ===

impl Instance {
    /// Returns when the client of its only call is attached.
    async fn attached(&self) {
        let is_attached = || {
            let calls = self.layer.calls().snapshot();
            calls.iter().all(|call| call.state() == CallState::Attached)
        };
        while !is_attached() {
            tokio::task::yield_now().await;
        }
    }
}
