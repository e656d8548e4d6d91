//! Uses a `ping` to check whether the server accepts a client's credentials.
//!
//! A 200 status alone is not conclusive: some servers refuse a client with a JSON-RPC error under that status, and some
//! gateways use it for a login page. The client is only accepted if the server answers this very `ping`, either with a result
//! or with the error "method not found".

use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::BodyExt as _;
use serde::Deserialize;
use tokio::time::timeout;

use super::read::{Read, Reader, data};
use crate::{
    headers::{EVENT_STREAM, JSON, has_content_coding, has_content_type},
    message::{IdKey, Kind, Message},
    refusal::{self, SERVER_ERROR},
};

/// A pending `ping`.
pub(super) struct Ping {
    /// The id, as JSON text. Servers route answers by id, so it must be unique among the session's pings.
    id: String,
}

/// Maximum size of an answer.
const MAX_ANSWER: usize = 64 * 1024;

/// Maximum time to read an answer's body.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// JSON-RPC's code for "method not found".
const METHOD_NOT_FOUND: i64 = -32601;

// === impl Ping ===

impl Ping {
    /// Creates a `ping` with a random id.
    ///
    /// That way, no other proxy for the same server uses the same id.
    pub(super) fn new() -> Self {
        // If the random number generator fails, no stream can be opened, so there is nothing to resume.
        let random = getrandom::u64().unwrap_or_default();
        Self {
            id: format!(r#""mcp-cancel-proxy-{random:016x}""#),
        }
    }

    pub(super) fn message(&self) -> Bytes {
        let id = &self.id;
        format!(r#"{{"jsonrpc":"2.0","id":{id},"method":"ping"}}"#).into()
    }

    /// Returns the response to a refused client, or `None` if the server accepts the client.
    ///
    /// An answer without a success status is returned unchanged. Any other refusal is turned into a 403, as is an answer whose
    /// body takes longer than [`ANSWER_TIMEOUT`] to read.
    pub(super) async fn refusal(&self, answer: Response<Body>) -> Option<Response<Body>> {
        if !answer.status().is_success() {
            return Some(answer);
        }
        let is_accepted = timeout(ANSWER_TIMEOUT, self.is_acceptance(answer)).await;
        if is_accepted == Ok(true) {
            return None;
        }
        let text = "the MCP server refused this client's credentials, so the client cannot resume the call";
        Some(refusal::error(
            StatusCode::FORBIDDEN,
            None,
            SERVER_ERROR,
            text,
        ))
    }

    /// Returns `true` if an answer to the `ping` shows that the server accepts the client.
    ///
    /// In an event stream, the first JSON-RPC response determines the outcome. An answer counts as a refusal if it is
    /// compressed, incomplete, longer than [`MAX_ANSWER`], or neither an event stream nor JSON.
    async fn is_acceptance(&self, answer: Response<Body>) -> bool {
        let (head, mut body) = answer.into_parts();
        let is_stream = has_content_type(&head.headers, EVENT_STREAM);
        if has_content_coding(&head.headers)
            || !(is_stream || has_content_type(&head.headers, JSON))
        {
            return false;
        }
        let (mut reader, mut json_body, mut length) = (Reader::default(), Vec::new(), 0);
        while let Some(frame) = body.frame().await {
            let Ok(frame) = frame else {
                return false;
            };
            let Ok(bytes) = frame.into_data() else {
                continue;
            };
            length += bytes.len();
            if length > MAX_ANSWER {
                return false;
            }
            if !is_stream {
                json_body.extend_from_slice(&bytes);
                continue;
            }
            let mut bytes = &*bytes;
            while reader.read(&mut bytes) == Read::Event {
                let lines = reader.take();
                let data: Vec<&[u8]> = data(&lines).collect();
                if let Some(is_accepted) = self.check_message(&data.join(&b'\n')) {
                    return is_accepted;
                }
            }
        }
        self.check_message(&json_body) == Some(true)
    }

    /// Returns whether a message counts as acceptance, or `None` if it is not a response.
    fn check_message(&self, json: &[u8]) -> Option<bool> {
        #[derive(Deserialize)]
        struct Response {
            error: Option<Error>,
        }
        #[derive(Deserialize)]
        struct Error {
            code: i64,
        }
        let message = Message::read(json).filter(|message| message.kind == Kind::Response)?;
        let answers_ping = IdKey::of(&self.id).is_some_and(|ping| message.answers(&ping));
        let response: Result<Response, _> = serde_json::from_slice(json);
        let is_accepting = response.is_ok_and(|response| {
            let error = response.error;
            error.is_none_or(|error| error.code == METHOD_NOT_FOUND)
        });
        Some(answers_ping && is_accepting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_result_or_the_error_method_not_found_accepts_a_client() {
        let ping = Ping {
            id: r#""ping""#.to_owned(),
        };
        for (json, expected) in [
            (r#"{"jsonrpc":"2.0","id":"ping","result":{}}"#, Some(true)),
            (
                r#"{"id":"ping","error":{"code":-32601,"message":"a"}}"#,
                Some(true),
            ),
            (
                r#"{"id":"ping","error":{"code":-32001,"message":"a"}}"#,
                Some(false),
            ),
            (r#"{"id":"ping","error":"no"}"#, Some(false)),
            (r#"{"id":"ping","result":{},"error":{"code":-32601}}"#, None),
            (r#"{"id":1,"result":{}}"#, Some(false)),
            (
                r#"{"id":null,"error":{"code":-32601,"message":"a"}}"#,
                Some(false),
            ),
            (r#"{"method":"notifications/message"}"#, None),
            (r#"[{"id":"ping","result":{}}]"#, None),
            ("<html>", None),
            ("", None),
        ] {
            assert_eq!(ping.check_message(json.as_bytes()), expected, "{json}");
        }
    }
}
