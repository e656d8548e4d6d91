//! A call as shown on the page and sent as JSON.

use std::time::Duration;

use mcp_cancel_on_disconnect::observe::{CallSnapshot, CallState, SessionIds};
use serde::Serialize;
use serde_json::Value;

/// Maximum number of characters of a name to show. Clients can send names of any length.
const MAX_NAME_LENGTH: usize = 120;

/// A call, with all times in milliseconds, and `null` for absent values.
///
/// The field names and hashes are the same as in the layer's log, so that rows and log lines can be joined.
#[derive(Serialize)]
pub(super) struct Row {
    #[serde(rename = "call")]
    pub(super) id: String,
    /// A keyed hash of the session id.
    #[serde(rename = "mcp.session.id")]
    pub(super) session: Option<String>,
    /// The JSON-RPC id.
    #[serde(rename = "jsonrpc.request.id")]
    pub(super) request: Value,
    #[serde(rename = "mcp.method.name")]
    pub(super) method: String,
    #[serde(rename = "gen_ai.tool.name")]
    pub(super) tool: Option<String>,
    pub(super) state: State,
    pub(super) age_ms: u64,
    /// How long ago the client disconnected.
    pub(super) detached_ms: Option<u64>,
    /// How long until the grace period ends.
    pub(super) grace_left_ms: Option<u64>,
    /// How long until the call's deadline.
    pub(super) time_left_ms: Option<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum State {
    Attached,
    Detached,
}

// === impl Row ===

impl Row {
    pub(super) fn new(call: &CallSnapshot) -> Self {
        let info = call.info();
        let (state, since, grace_left) = match call.state() {
            CallState::Detached {
                since, grace_left, ..
            } => (State::Detached, Some(since), grace_left),
            _ => (State::Attached, None, None),
        };
        Self {
            id: info.id().to_string(),
            session: info.session().and_then(hash),
            request: match Value::from(info.request_id()) {
                Value::String(id) => truncate(&id).into(),
                number => number,
            },
            method: truncate(info.method()),
            tool: info.tool().map(truncate),
            state,
            age_ms: millis(call.age()),
            detached_ms: since.map(millis),
            grace_left_ms: grace_left.map(millis),
            time_left_ms: call.time_left().map(millis),
        }
    }
}

fn hash(session: &str) -> Option<String> {
    SessionIds::Hashed.display(session).map(Into::into)
}

fn truncate(text: &str) -> String {
    match text.char_indices().nth(MAX_NAME_LENGTH) {
        Some(_) => text.chars().take(MAX_NAME_LENGTH).chain(['…']).collect(),
        None => text.to_owned(),
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
