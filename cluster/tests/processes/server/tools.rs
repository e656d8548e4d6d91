//! The tools, each of which reports its outcome.
//!
//! | tool | arguments | what it does |
//! |---|---|---|
//! | `work` | `tag`, `events`, `bytes`, `seconds` | sends `events` progress notifications, waits until it is released or cancelled or `seconds` have passed, and answers `tag`, padded to `bytes` |
//! | `ask` | `tag`, `what`: `sampling` or `elicitation` | sends a request to its client and answers the word in the response |
//! | `whoami` | | answers the instance's name |

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rmcp::{
    ErrorData, RoleServer, ServerHandler,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, ErrorCode,
        ProgressNotificationParam, ServerConfig, ServerRequest,
    },
    service::RequestContext,
};
use serde_json::{Map, Value, json};
use tokio::{sync::oneshot, time::sleep};

use crate::facts::{self, record};

/// How long a call without `seconds` waits to be released.
const DEFAULT_SECONDS: f64 = 120.0;

#[derive(Clone)]
pub(crate) struct Tools {
    name: Arc<str>,
    waiting: Arc<Mutex<HashMap<String, oneshot::Sender<()>>>>,
}

/// Reports on drop that a handler was dropped before it completed.
struct WorkGuard {
    tag: String,
    has_ended: bool,
}

// === impl Tools ===

impl Tools {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            waiting: Arc::default(),
        }
    }

    /// Lets the call with this tag answer, and records whether it was waiting.
    pub(crate) fn release(&self, tag: &str) {
        let sender = self.waiting().remove(tag);
        let was_waiting = sender.is_some_and(|sender| sender.send(()).is_ok());
        record(
            "released",
            json!({ "tag": tag, "was_waiting": was_waiting }),
        );
    }

    async fn work(
        &self,
        arguments: &Map<String, Value>,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let number = |name: &str| arguments.get(name).and_then(Value::as_f64);
        let tag = text(arguments, "tag");
        let (release, released) = oneshot::channel();
        self.waiting().insert(tag.clone(), release);
        let working = WorkGuard::begin(tag.clone(), context);
        if let Some(token) = context.meta.get_progress_token() {
            for event in 1..=number("events").unwrap_or_default() as u32 {
                let mut progress = ProgressNotificationParam::new(token.clone(), f64::from(event));
                progress.message = Some(tag.clone());
                // While the client is disconnected, the notification is retained for a resume.
                let _ = context.peer.notify_progress(progress).await;
            }
        }
        let time = Duration::from_secs_f64(number("seconds").unwrap_or(DEFAULT_SECONDS).max(0.0));
        tokio::select! {
            biased;
            () = context.ct.cancelled() => {
                self.waiting().remove(&tag);
                working.end("cancelled");
                return Err(ErrorData::new(ErrorCode(-32_099), format!("cancelled: {tag}"), None));
            }
            _ = released => {}
            () = sleep(time) => {}
        }
        self.waiting().remove(&tag);
        working.end("completed");
        let bytes = number("bytes").unwrap_or_default() as usize;
        Ok(text_result(format!("{tag:.<bytes$}")))
    }

    async fn ask(
        &self,
        arguments: &Map<String, Value>,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        let tag = text(arguments, "tag");
        let working = WorkGuard::begin(tag.clone(), context);
        let question = question(&text(arguments, "what"), &tag)
            .map_err(|error| ErrorData::internal_error(error.to_string(), None))?;
        let reply = tokio::select! {
            biased;
            () = context.ct.cancelled() => {
                working.end("cancelled");
                return Err(ErrorData::new(ErrorCode(-32_099), format!("cancelled: {tag}"), None));
            }
            reply = context.peer.send_request(question) => reply,
        };
        let reply = match reply.map(serde_json::to_value) {
            Ok(Ok(answer)) => word(&answer).to_owned(),
            other => format!("{other:?}"),
        };
        record("received", json!({ "tag": tag, "word": reply }));
        working.end("completed");
        Ok(text_result(reply))
    }

    fn waiting(&self) -> MutexGuard<'_, HashMap<String, oneshot::Sender<()>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ServerHandler for Tools {
    fn get_info(&self) -> ServerConfig {
        let mut info = ServerConfig::default();
        info.capabilities.tools = Some(Default::default());
        info
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let arguments = request.arguments.unwrap_or_default();
        let result = match &*request.name {
            "work" => self.work(&arguments, &context).await?,
            "ask" => self.ask(&arguments, &context).await?,
            "whoami" => text_result(self.name.to_string()),
            _ => return Err(ErrorData::invalid_params("no such tool", None)),
        };
        Ok(result.into())
    }
}

/// Returns the request to the client: sampling or elicitation.
fn question(what: &str, tag: &str) -> Result<ServerRequest, serde_json::Error> {
    let question = match what {
        "sampling" => json!({
            "method": "sampling/createMessage",
            "params": {
                "messages": [{ "role": "user", "content": { "type": "text", "text": tag } }],
                "maxTokens": 10,
            },
        }),
        _ => json!({
            "method": "elicitation/create",
            "params": {
                "mode": "form",
                "message": tag,
                "requestedSchema": { "type": "object", "properties": { "word": { "type": "string" } } },
            },
        }),
    };
    serde_json::from_value(question)
}

/// Returns the word in the client's answer.
fn word(answer: &Value) -> &str {
    let word = answer.pointer("/content/word").or(answer.get("model"));
    word.and_then(Value::as_str).unwrap_or_default()
}

fn text(arguments: &Map<String, Value>, name: &str) -> String {
    arguments
        .get(name)
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_owned()
}

fn text_result(text: String) -> CallToolResult {
    CallToolResult::success(vec![ContentBlock::text(text)])
}

// === impl WorkGuard ===

impl WorkGuard {
    fn begin(tag: String, context: &RequestContext<RoleServer>) -> Self {
        let parts: Option<&http::request::Parts> = context.extensions.get();
        let session = parts.and_then(|parts| parts.headers.get("mcp-session-id")?.to_str().ok());
        record(
            "started",
            json!({ "tag": tag, "session": session, "id": facts::short(&context.id) }),
        );
        Self {
            tag,
            has_ended: false,
        }
    }

    fn end(mut self, how: &str) {
        self.has_ended = true;
        record("ended", json!({ "tag": self.tag, "how": how }));
    }
}

impl Drop for WorkGuard {
    fn drop(&mut self) {
        if !self.has_ended {
            record("ended", json!({ "tag": self.tag, "how": "dropped" }));
        }
    }
}
