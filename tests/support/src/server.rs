//! An rmcp server whose tools write to a [`Witness`], and its modes.
//!
//! | tool | arguments | what it does |
//! |---|---|---|
//! | `hold` | `label`, `padding` (0) | waits for its token or its release; answers `done:<label>` and `padding` more bytes |
//! | `stubborn` | `label` | records that its token has fired, but waits for its release |
//! | `chatty` | `label`, `events` | sends `events` progress notifications, then holds |
//! | `echo` | `text` | answers `text` at once |
//! | `boom` | | panics, under the label `boom` |
//!
//! A held tool answers with the error [`CANCELLED`] if its token fires. Progress is sent with the call's own progress
//! token, which [`Mcp::call`](super::Mcp::call) always sends. Without one it is sent with the label, which selects the
//! standalone stream in session mode.

use std::{fmt, sync::Arc};

use axum::Router;
use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    handler::server::{router::tool::ToolRouter, wrapper::Parameters},
    model::{
        CallToolResult, ContentBlock, ErrorCode, NumberOrString, ProgressNotificationParam,
        ProgressToken,
    },
    schemars,
    service::RequestContext,
    tool, tool_handler, tool_router,
    transport::streamable_http_server::{
        StreamableHttpServerConfig, StreamableHttpService, session::SessionManager,
    },
};
use serde::Deserialize;

use super::witness::{Held, Running, Witness};

/// The path at which [`router`] serves.
pub const PATH: &str = "/mcp";

/// The error code with which a held tool answers if its token fires.
pub const CANCELLED: i32 = -32_099;

/// The server. All clones share the same witness.
#[derive(Clone)]
pub struct Tools {
    witness: Witness,
    on_start: Option<Arc<OnStart>>,
    tool_router: ToolRouter<Self>,
}

/// One of rmcp's modes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Sessions, which are rmcp's default.
    Session,
    /// No sessions, and every response is a stream.
    StatelessSse,
    /// No sessions, and a response is a stream only if another message precedes the answer.
    StatelessJson,
}

type OnStart = dyn Fn(&str, &RequestContext<RoleServer>) + Send + Sync;

#[derive(Deserialize, schemars::JsonSchema)]
struct Hold {
    label: String,
    #[serde(default)]
    padding: usize,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Chatty {
    label: String,
    events: u32,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Label {
    label: String,
}

#[derive(Deserialize, schemars::JsonSchema)]
struct Echo {
    text: String,
}

/// Puts `service` at [`PATH`] in an otherwise empty router.
pub fn router<M: SessionManager>(service: StreamableHttpService<Tools, M>) -> Router {
    Router::new().nest_service(PATH, service)
}

// === impl Tools ===

impl Tools {
    /// Returns a server that writes to `witness`.
    pub fn new(witness: &Witness) -> Self {
        Self {
            witness: witness.clone(),
            on_start: None,
            tool_router: Self::tool_router(),
        }
    }

    /// Makes every labelled handler call `callback` as soon as its start has been recorded.
    ///
    /// The context gives tests access to what a layer has put into the request's extensions.
    pub fn on_start(
        mut self,
        callback: impl Fn(&str, &RequestContext<RoleServer>) + Send + Sync + 'static,
    ) -> Self {
        self.on_start = Some(Arc::new(callback));
        self
    }

    /// Returns the service in one of the modes, with any session manager.
    pub fn service<M: SessionManager>(
        &self,
        mode: Mode,
        sessions: Arc<M>,
    ) -> StreamableHttpService<Self, M> {
        self.service_with(mode.config(), sessions)
    }

    /// Returns the service with another configuration, such as a different keep-alive.
    pub fn service_with<M: SessionManager>(
        &self,
        config: StreamableHttpServerConfig,
        sessions: Arc<M>,
    ) -> StreamableHttpService<Self, M> {
        let tools = self.clone();
        StreamableHttpService::new(move || Ok(tools.clone()), sessions, config)
    }

    /// Records that a handler has started, then runs the [`on_start`](Self::on_start) callback.
    fn begin(&self, label: &str, context: &RequestContext<RoleServer>) -> Running {
        let running = self.witness.begin(label);
        if let Some(callback) = &self.on_start {
            callback(label, context);
        }
        running
    }
}

#[tool_router]
impl Tools {
    #[tool(description = "Waits for its token or its release")]
    async fn hold(
        &self,
        Parameters(Hold { label, padding }): Parameters<Hold>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let running = self.begin(&label, &context);
        let held = running.held(context.ct.cancelled()).await;
        conclude(running, held, &label, padding)
    }

    #[tool(description = "Waits for its release and ignores its token")]
    async fn stubborn(
        &self,
        Parameters(Label { label }): Parameters<Label>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let running = self.begin(&label, &context);
        running.held_regardless(context.ct.cancelled()).await;
        conclude(running, Held::Released, &label, 0)
    }

    #[tool(description = "Reports progress, then waits for its token or its release")]
    async fn chatty(
        &self,
        Parameters(Chatty { label, events }): Parameters<Chatty>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let running = self.begin(&label, &context);
        // Sending blocks if the client does not read, so race it with the token.
        context
            .ct
            .run_until_cancelled(report(&context, &label, events))
            .await;
        let held = running.held(context.ct.cancelled()).await;
        conclude(running, held, &label, 0)
    }

    #[tool(description = "Answers at once")]
    async fn echo(&self, Parameters(Echo { text }): Parameters<Echo>) -> String {
        text
    }

    #[tool(description = "Panics")]
    async fn boom(&self, context: RequestContext<RoleServer>) -> String {
        let _running = self.begin("boom", &context);
        panic!("the tool `boom` panics on purpose");
    }
}

#[tool_handler(router = self.tool_router)]
impl ServerHandler for Tools {}

impl fmt::Debug for Tools {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tools")
            .field("witness", &self.witness)
            .finish_non_exhaustive()
    }
}

/// Sends `events` progress notifications, numbered from 1.
///
/// If the call has no progress token, `label` is used as the token.
pub async fn report(context: &RequestContext<RoleServer>, label: &str, events: u32) {
    let call_token = context.meta.get_progress_token();
    let token = call_token.unwrap_or_else(|| ProgressToken(NumberOrString::String(label.into())));
    for event in 1..=events {
        let progress = ProgressNotificationParam::new(token.clone(), f64::from(event));
        // Fails if the client has disconnected, but it is up to the test whether that must end the call.
        let _ = context.peer.notify_progress(progress).await;
    }
}

/// Records how a held handler ended and returns its answer.
fn conclude(
    running: Running,
    held: Held,
    label: &str,
    padding: usize,
) -> Result<CallToolResult, ErrorData> {
    match held {
        Held::Released => {
            running.complete();
            let text = format!("done:{label}{}", "x".repeat(padding));
            Ok(CallToolResult::success(vec![ContentBlock::text(text)]))
        }
        Held::Cancelled => {
            running.cancel();
            let text = format!("cancelled:{label}");
            Err(ErrorData::new(ErrorCode(CANCELLED), text, None))
        }
    }
}

// === impl Mode ===

impl Mode {
    /// Returns rmcp's default configuration for the mode.
    ///
    /// That is a keep-alive of 15 s, a retry of 3 s, and loopback hosts only.
    pub fn config(self) -> StreamableHttpServerConfig {
        StreamableHttpServerConfig::default()
            .with_legacy_session_mode(self == Self::Session)
            .with_json_response(self == Self::StatelessJson)
    }
}
