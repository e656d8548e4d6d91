//! One tool call after another, in process, for counting instructions.
//!
//! `cargo bench --bench call` counts them with valgrind, if it is installed, for every set-up and prints the
//! ratio to bare rmcp. A count needs two runs of the same binary that differ only in their number of
//! calls: their difference is free of start-up. It repeats to a few parts in a thousand on any machine.
//!
//! `cargo bench --bench call -- SETUP SIZE CALLS` only makes the calls.

use std::{convert::Infallible, env, error::Error, process::Command, sync::Arc};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use mcp_cancel_on_disconnect::{AbortOnCancel, CancelOnDisconnectLayer, CancellableSessionManager};
use rmcp::{
    ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    schemars, tool, tool_handler, tool_router,
    transport::streamable_http_server::{
        SessionManager, StreamableHttpServerConfig, StreamableHttpService,
        session::local::{LocalSessionManager, SessionConfig},
    },
};
use serde_json::{Value, json};
use tower::{Service, ServiceBuilder, ServiceExt, util::BoxCloneService};

type Failure = Box<dyn Error>;
type Server = BoxCloneService<Request<Full<Bytes>>, Response<Bytes>, Infallible>;

const SETUPS: [&str; 7] = [
    "session bare",
    "session layer",
    "session wrapped",
    "session wrapped, abortable",
    "stateless bare",
    "stateless layer",
    "stateless layer, abortable",
];

/// Bytes of arguments, and how many calls the two counted runs make.
const SIZES: [(usize, u32, u32); 3] = [(100, 200, 1_200), (10_000, 100, 600), (1_000_000, 4, 24)];

/// The router is made once: rmcp asks for a handler with every stateless call.
#[derive(Clone)]
struct Tools {
    tool_router: Arc<ToolRouter<Self>>,
}

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Measure {
    text: String,
}

#[tool_router]
impl Tools {
    /// Tells the length of its argument.
    #[tool]
    async fn measure(&self, Parameters(Measure { text }): Parameters<Measure>) -> String {
        text.len().to_string()
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Tools {}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = env::args().skip(1).filter(|a| a != "--bench").collect();
    match arguments.as_slice() {
        [] => compare(),
        [setup, size, calls] => make_calls(setup, size.parse()?, calls.parse()?),
        _ => Err("usage: call [SETUP SIZE CALLS]".into()),
    }
}

fn compare() -> Result<(), Failure> {
    if Command::new("valgrind").arg("--version").output().is_err() {
        return Err("counting needs valgrind".into());
    }
    println!("| arguments | set-up | instructions a call | ratio to bare |");
    println!("|---:|---|---:|---:|");
    for (size, few, many) in SIZES {
        let mut bare = 0.0;
        for setup in SETUPS {
            let spent = count(setup, size, many)?.saturating_sub(count(setup, size, few)?);
            let per_call = spent as f64 / f64::from(many - few);
            if setup.ends_with("bare") {
                bare = per_call;
            }
            println!(
                "| {size} B | {setup} | {per_call:.0} | {:.3} |",
                per_call / bare
            );
        }
    }
    Ok(())
}

/// The instructions of a whole run.
fn count(setup: &str, size: usize, calls: u32) -> Result<u64, Failure> {
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--callgrind-out-file=/dev/null"])
        .arg(env::current_exe()?)
        .args([setup, &size.to_string(), &calls.to_string()])
        .output()?;
    let report = String::from_utf8(output.stderr)?;
    let collected = report
        .lines()
        .find_map(|line| line.split_once("Collected : "));
    let (_, figure) = collected.ok_or_else(|| format!("no count in:\n{report}"))?;
    Ok(figure.trim().parse()?)
}

fn make_calls(setup: &str, size: usize, calls: u32) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let bare = || Arc::new(LocalSessionManager::default());
        let wrapped = CancellableSessionManager::local(SessionConfig::default());
        let layer = CancelOnDisconnectLayer::new();
        let stack = ServiceBuilder::new().layer(layer);
        let tools = Tools {
            tool_router: Arc::new(Tools::tool_router()),
        };
        let server = match setup {
            "session bare" => boxed(service(bare(), true, tools)),
            "session layer" => boxed(stack.service(service(bare(), true, tools))),
            "session wrapped" => boxed(stack.service(service(Arc::new(wrapped), true, tools))),
            "session wrapped, abortable" => {
                let abortable = AbortOnCancel::new(tools);
                boxed(stack.service(service(Arc::new(wrapped), true, abortable)))
            }
            "stateless bare" => boxed(service(bare(), false, tools)),
            "stateless layer" => boxed(stack.service(service(bare(), false, tools))),
            "stateless layer, abortable" => {
                let abortable = AbortOnCancel::new(tools);
                boxed(stack.service(service(bare(), false, abortable)))
            }
            other => return Err(format!("no set-up {other:?}").into()),
        };
        let mut client = Client {
            server,
            session: None,
        };
        if setup.starts_with("session") {
            client.initialize().await?;
        }
        let text = "x".repeat(size);
        for id in 0..calls {
            let answer = client.call(id, &text).await?;
            if !answer.contains(&format!("\"text\":\"{size}\"")) {
                return Err(format!("wrong answer: {answer}").into());
            }
        }
        Ok(())
    })
}

fn service<H: ServerHandler + Clone, M: SessionManager>(
    sessions: Arc<M>,
    with_sessions: bool,
    handler: H,
) -> StreamableHttpService<H, M> {
    let mut config = StreamableHttpServerConfig::default();
    config.legacy_session_mode = with_sessions;
    StreamableHttpService::new(move || Ok(handler.clone()), sessions, config)
}

fn boxed<S, B>(service: S) -> Server
where
    S: Service<Request<Full<Bytes>>, Response = Response<B>, Error = Infallible>,
    S: Clone + Send + 'static,
    S::Future: Send + 'static,
    B: http_body::Body<Data = Bytes, Error = Infallible> + Send + 'static,
{
    let collected = service.and_then(async |response: Response<B>| {
        let (head, body) = response.into_parts();
        let body = body.collect().await?;
        Ok(Response::from_parts(head, body.to_bytes()))
    });
    BoxCloneService::new(collected)
}

struct Client {
    server: Server,
    session: Option<http::HeaderValue>,
}

impl Client {
    async fn initialize(&mut self) -> Result<(), Failure> {
        let client = json!({ "name": "bench", "version": "1" });
        let params = json!({
            "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client,
        });
        let request =
            json!({ "jsonrpc": "2.0", "id": "i", "method": "initialize", "params": params });
        let response = self.post(request).await?;
        self.session = response.headers().get("mcp-session-id").cloned();
        self.post(json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }))
            .await?;
        Ok(())
    }

    async fn call(&mut self, id: u32, text: &str) -> Result<String, Failure> {
        let params = json!({ "name": "measure", "arguments": { "text": text } });
        let request =
            json!({ "jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params });
        let response = self.post(request).await?;
        Ok(String::from_utf8(response.into_body().into())?)
    }

    async fn post(&mut self, message: Value) -> Result<Response<Bytes>, Failure> {
        let mut request = Request::post("http://localhost/mcp")
            .header("host", "localhost")
            .header("content-type", "application/json")
            .header("accept", "application/json, text/event-stream")
            .header("user-agent", "bench")
            .header("mcp-protocol-version", "2025-06-18");
        if let Some(session) = &self.session {
            request = request.header("mcp-session-id", session);
        }
        let request = request.body(Full::new(Bytes::from(message.to_string())))?;
        Ok(self.server.ready().await?.call(request).await?)
    }
}
