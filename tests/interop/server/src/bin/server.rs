//! The server under test. Its tool works until it is ordered to finish, and reports how it ended.

use std::{
    collections::HashMap,
    error::Error,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use axum::Router;
use interop::{Orders, emit};
use mcp_cancel_on_disconnect::{
    CallInfo, CallToken, Calls, CancelOnDisconnectLayer, CancellableSessionManager, Event, Grace,
    MIN_GRACE, Outcome, Policy,
};
use rmcp::{
    RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    model::ProgressNotificationParam,
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{
        SessionManager, StreamableHttpServerConfig, StreamableHttpService,
        session::{
            EventId, EventStore, EventStoreError, EventStream, ServerSseMessage,
            local::LocalSessionManager,
        },
    },
};
use serde::Deserialize;
use serde_json::json;
use tokio::{
    net::TcpListener,
    sync::mpsc,
    time::{Instant, sleep},
};
use tracing_subscriber::EnvFilter;

const USAGE: &str =
    "usage: server --tier bare|layer|wrapped --store yes|no --retry-ms <n> --grace auto|<ms>";

include!("../../../../upstream/store.rs");

struct Options {
    tier: Tier,
    /// Whether the sessions have an event store.
    store: bool,
    retry: Duration,
    /// For session calls; `None` is `Grace::Auto`.
    grace: Option<Duration>,
}

#[derive(Clone, Copy)]
enum Tier {
    Bare,
    Layer,
    Wrapped,
}

/// The next step for a cell's handler: `{"progress": "<cell>"}`, `{"finish": "<cell>"}`.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Step {
    Progress,
    Finish,
}

#[derive(Clone)]
struct Worker {
    queues: Arc<StepQueues>,
    tool_router: ToolRouter<Self>,
}

/// The handlers' pending steps. A step may be stored before its call starts.
#[derive(Default)]
struct StepQueues(Mutex<HashMap<String, Steps>>);

type Steps = (
    mpsc::UnboundedSender<Step>,
    Option<mpsc::UnboundedReceiver<Step>>,
);

#[derive(Deserialize, schemars::JsonSchema)]
struct Job {
    /// The cell of the matrix that makes the call.
    cell: String,
    /// Length of the answer.
    bytes: usize,
}

/// The layer's counts, to compare with the handlers'.
#[derive(Default)]
struct Tally {
    cancelled: AtomicUsize,
    cancelled_by_client: AtomicUsize,
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let options = Options::parse(std::env::args().skip(1)).ok_or(USAGE)?;
    tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::try_from_default_env().unwrap_or_default())
        .with_writer(std::io::stderr)
        .with_ansi(false)
        .init();

    let queues = Arc::new(StepQueues::default());
    let tally = Arc::new(Tally::default());
    let layer = layer(options.grace, tally.clone());
    let calls = layer.calls();
    let sessions = local(&options);
    let app = match options.tier {
        Tier::Bare => app(sessions, options.retry, &queues),
        Tier::Layer => app(sessions, options.retry, &queues).layer(layer),
        Tier::Wrapped => app(
            CancellableSessionManager::new(sessions),
            options.retry,
            &queues,
        )
        .layer(layer),
    };

    let listener = TcpListener::bind("127.0.0.1:0").await?;
    emit(
        "listening",
        json!({ "port": listener.local_addr()?.port() }),
    );
    tokio::spawn(async move { axum::serve(listener, app).await });

    let mut orders = Orders::stdin();
    while let Some(order) = orders.next::<HashMap<Step, String>>().await {
        for (step, cell) in order {
            queues.put(&cell, step);
        }
    }
    settle(&calls, options.grace).await;
    emit(
        "end",
        json!({
            "in flight": calls.len(),
            "cancelled": tally.cancelled.load(Ordering::Relaxed),
            "cancelled by the client": tally.cancelled_by_client.load(Ordering::Relaxed),
        }),
    );
    Ok(())
}

/// Waits until no call is in flight, but at most 2 s longer than the grace period. The last clients may have left orphans.
async fn settle(calls: &Calls, grace: Option<Duration>) {
    let end = Instant::now() + grace.unwrap_or(MIN_GRACE) + Duration::from_secs(2);
    while !calls.is_empty() && Instant::now() < end {
        sleep(Duration::from_millis(50)).await;
    }
}

fn layer(grace: Option<Duration>, tally: Arc<Tally>) -> CancelOnDisconnectLayer {
    CancelOnDisconnectLayer::new()
        // An explicit grace period would also apply to stateless calls, which are to behave as the specification requires.
        .policy(move |call: &CallInfo| match (grace, call.session()) {
            (Some(grace), Some(_)) => Policy::new().grace(Grace::After(grace)),
            _ => Policy::new(),
        })
        .observe(move |event: &Event<'_>| tally.count(event))
}

fn local(options: &Options) -> LocalSessionManager {
    let mut manager = LocalSessionManager::default();
    manager.session_config.sse_retry = Some(options.retry);
    if options.store {
        manager = manager.with_event_store(Arc::new(Store::default()));
    }
    manager
}

fn app(sessions: impl SessionManager, retry: Duration, queues: &Arc<StepQueues>) -> Router {
    let queues = queues.clone();
    let config = StreamableHttpServerConfig::default().with_sse_retry(Some(retry));
    let service =
        StreamableHttpService::new(move || Ok(Worker::new(&queues)), Arc::new(sessions), config);
    Router::new().nest_service("/mcp", service)
}

// === impl Options ===

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Option<Self> {
        let (mut tier, mut store, mut retry, mut grace) = (None, None, None, None);
        while let Some(arg) = args.next() {
            let value = args.next()?;
            match arg.as_str() {
                "--tier" => tier = Some(Tier::parse(&value)?),
                "--store" => store = Some(value == "yes"),
                "--retry-ms" => retry = Some(millis(&value)?),
                "--grace" if value == "auto" => grace = None,
                "--grace" => grace = Some(millis(&value)?),
                _ => return None,
            }
        }
        Some(Self {
            tier: tier?,
            store: store?,
            retry: retry?,
            grace,
        })
    }
}

fn millis(text: &str) -> Option<Duration> {
    Some(Duration::from_millis(text.parse().ok()?))
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

// === impl Worker ===

#[tool_router]
impl Worker {
    fn new(queues: &Arc<StepQueues>) -> Self {
        Self {
            queues: queues.clone(),
            tool_router: Self::tool_router(),
        }
    }

    #[tool(description = "Works until it is released or cancelled")]
    async fn work(
        &self,
        Parameters(Job { cell, bytes }): Parameters<Job>,
        context: RequestContext<RoleServer>,
    ) -> String {
        emit("started", json!({ "cell": cell }));
        let mut steps = self.queues.steps(&cell).expect("a cell calls once");
        let mut progress = 0;
        while let Some(step) = context.ct.run_until_cancelled(steps.recv()).await {
            match step.expect("the queues outlive the calls") {
                Step::Progress => {
                    progress += 1;
                    report(progress, &context).await;
                    emit("progressed", json!({ "cell": cell }));
                }
                Step::Finish => {
                    emit("finished", json!({ "cell": cell }));
                    return answer(&cell, bytes);
                }
            }
        }
        let reason = CallToken::of(&context).and_then(|token| token.reason());
        let reason = reason.map(|reason| reason.to_string());
        emit("cancelled", json!({ "cell": cell, "reason": reason }));
        answer(&cell, bytes)
    }
}

async fn report(progress: u32, context: &RequestContext<RoleServer>) {
    if let Some(token) = context.meta.get_progress_token() {
        let progress = ProgressNotificationParam::new(token, progress.into());
        let _sent = context.peer.notify_progress(progress).await;
    }
}

/// The cell's name, padded with dots to this length.
fn answer(cell: &str, bytes: usize) -> String {
    let dots = bytes.saturating_sub(cell.len());
    cell.to_owned() + &".".repeat(dots)
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Worker {}

// === impl StepQueues ===

impl StepQueues {
    /// Stores a step for a cell's handler, unless the handler has already ended.
    fn put(&self, cell: &str, step: Step) {
        let _ended = self.of(cell, |(steps, _)| steps.send(step));
    }

    /// Returns a cell's steps, or `None` if they have already been taken.
    fn steps(&self, cell: &str) -> Option<mpsc::UnboundedReceiver<Step>> {
        self.of(cell, |(_, steps)| steps.take())
    }

    fn of<R>(&self, cell: &str, act: impl FnOnce(&mut Steps) -> R) -> R {
        let mut queues = self.0.lock().expect("no panic holds it");
        let new = || {
            let (sender, receiver) = mpsc::unbounded_channel();
            (sender, Some(receiver))
        };
        act(queues.entry(cell.to_owned()).or_insert_with(new))
    }
}

// === impl Tally ===

impl Tally {
    fn count(&self, event: &Event<'_>) {
        let Event::Ended { outcome, .. } = event else {
            return;
        };
        let counter = match outcome {
            Outcome::Cancelled(_) => &self.cancelled,
            Outcome::ClientCancelled => &self.cancelled_by_client,
            _ => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}
