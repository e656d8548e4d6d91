//! A server with three tools.
//!
//! `echo` returns its text, `hold` never answers, and `flood` sends progress before its answer.

use serde::Deserialize;
use serde_json::{json, value::RawValue};

pub(crate) mod http;
pub(crate) mod stdio;

/// The response to a message.
pub(crate) enum Answer {
    /// The message is not a request.
    None,
    /// The request is never answered.
    Never,
    /// One line, without its line break.
    Line(String),
    /// Several lines, the last of which is the answer.
    Lines(Flood),
}

/// Progress, and then the answer.
pub(crate) struct Flood {
    id: String,
    token: String,
    events: usize,
    sent: usize,
    padding: String,
    is_over: bool,
}

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(borrow)]
    id: Option<&'a RawValue>,
    method: Option<&'a str>,
    #[serde(default, borrow)]
    params: Params<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Params<'a> {
    name: &'a str,
    #[serde(borrow)]
    arguments: Arguments<'a>,
    #[serde(rename = "protocolVersion")]
    revision: &'a str,
    #[serde(borrow, rename = "_meta")]
    meta: Meta<'a>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct Arguments<'a> {
    text: &'a str,
    events: usize,
    bytes: usize,
}

#[derive(Default, Deserialize)]
struct Meta<'a> {
    #[serde(borrow, rename = "progressToken")]
    token: Option<&'a RawValue>,
}

// === impl Answer ===

impl Answer {
    /// Returns the answer to a message, which may be any bytes.
    pub(crate) fn to(message: &[u8]) -> Self {
        let Ok(message) = serde_json::from_slice::<Message<'_>>(message) else {
            return Self::None;
        };
        let (Some(id), Some(method)) = (message.id, message.method) else {
            return Self::None;
        };
        let (id, params) = (id.get(), message.params);
        let line = match (method, params.name) {
            ("initialize", _) => {
                let info = json!({ "name": "proxy-load", "version": "0" });
                let result = json!({ "protocolVersion": params.revision, "capabilities": { "tools": {} }, "serverInfo": info });
                result_line(id, &result.to_string())
            }
            ("tools/list", _) => {
                let tool = |name| json!({ "name": name, "inputSchema": { "type": "object" } });
                let tools = ["echo", "hold", "flood"].map(tool);
                result_line(id, &json!({ "tools": tools }).to_string())
            }
            ("ping", _) => result_line(id, "{}"),
            ("tools/call", "hold") => return Self::Never,
            ("tools/call", "flood") => {
                return Self::Lines(Flood {
                    id: id.to_owned(),
                    token: params.meta.token.map_or("0", RawValue::get).to_owned(),
                    events: params.arguments.events,
                    sent: 0,
                    padding: "x".repeat(params.arguments.bytes),
                    is_over: false,
                });
            }
            ("tools/call", _) => text_line(id, params.arguments.text),
            _ => format!(
                r#"{{"jsonrpc":"2.0","id":{id},"error":{{"code":-32601,"message":"Method not found"}}}}"#
            ),
        };
        Self::Line(line)
    }
}

fn text_line(id: &str, text: &str) -> String {
    let text = format!(r#"{{"content":[{{"type":"text","text":"{text}"}}]}}"#);
    result_line(id, &text)
}

fn result_line(id: &str, result: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)
}

// === impl Flood ===

impl Iterator for Flood {
    type Item = String;

    fn next(&mut self) -> Option<String> {
        if self.sent == self.events {
            let answer = (!self.is_over).then(|| text_line(&self.id, "flooded"));
            self.is_over = true;
            return answer;
        }
        self.sent += 1;
        let Self {
            token,
            sent,
            padding,
            ..
        } = self;
        Some(format!(
            r#"{{"jsonrpc":"2.0","method":"notifications/progress","params":{{"progressToken":{token},"progress":{sent},"message":"{padding}"}}}}"#
        ))
    }
}
