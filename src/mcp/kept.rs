//! Answers that are kept for a client to come back for, and what the client then gets.
//!
//! The form matters: it is what the TypeScript SDK 1.x takes without losing the answer and without asking for
//! ever. A completed call: an event that repeats the id the client named, so that a second cut is no
//! worse than the first, then the answer without an id. A cancelled call: the error, alone.

use std::{
    hash::{DefaultHasher, Hasher as _},
    sync::Arc,
    time::Duration,
};

use futures_util::{Stream, stream};
use rmcp::{
    model::{
        CallToolResult, ContentBlock, ErrorCode, ErrorData, NumberOrString, ServerJsonRpcMessage,
        ServerResult,
    },
    transport::streamable_http_server::session::ServerSseMessage,
};

use super::shelf::Shelf;
use crate::{
    call::{CancelReason, RequestId},
    registry::{Answer, Content, End},
};

/// How long a client is told to wait before it comes back, where the server did not say: 3 s, rmcp's own
/// default.
const RETRY: Duration = Duration::from_secs(3);

/// Answers of at most so many bytes are put on their session's shelf, if they are only a text: 1 KiB. A larger
/// one is not copied: it costs its allocator little beside what it cost itself.
const SMALL: usize = 1024;

/// An answer as the registry keeps it, with its size in bytes: a reference to the message.
pub(super) fn keep(event: &ServerSseMessage, shelf: Option<&Shelf>) -> Option<(Answer, usize)> {
    let message = event.message.as_ref()?;
    let weight = weigh(message)?;
    let shelf = shelf.filter(|_| weight <= SMALL);
    let content = match shelf.and_then(|shelf| Some((shelf, as_text(message)?))) {
        Some((shelf, (id, text))) => Content::Text(id.into(), shelf.put(text)),
        None => Content::Message(message.clone()),
    };
    let answer = Answer {
        content,
        event: event.event_id.as_deref().map(hash),
        retry: None,
    };
    Some((answer, weight))
}

/// The id and the text of an answer that is [made](from_text) of nothing else.
fn as_text(message: &ServerJsonRpcMessage) -> Option<(&NumberOrString, &str)> {
    let ServerJsonRpcMessage::Response(response) = message else {
        return None;
    };
    let ServerResult::CallToolResult(result) = &response.result else {
        return None;
    };
    let [ContentBlock::Text(content)] = result.content.as_slice() else {
        return None;
    };
    (*result == from_text(&content.text)).then_some((&response.id, &content.text))
}

/// What a tool that returns a string answers in a session.
fn from_text(text: &str) -> CallToolResult {
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    // Of a revision that has no sessions.
    result.result_type = None;
    result
}

/// Whether the client that names this event has the answer: it is the answer's own. EventSource clients
/// open the streams of completed calls again and again, and are not to get every answer twice.
pub(super) fn is_known(end: &End<Answer>, last_event_id: &str) -> bool {
    match end {
        End::Answered(answer) => answer.event == Some(hash(last_event_id)),
        End::Cancelled(..) => false,
    }
}

/// Who finds another id with this hash cheats nobody but himself.
fn hash(event_id: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(event_id.as_bytes());
    hasher.finish()
}

/// What a client gets that asks for the stream of an ended call, or of none of its own.
pub(super) fn replay(
    end: Option<End<Answer>>,
    last_event_id: &str,
) -> impl Stream<Item = ServerSseMessage> + Send + Sync + use<> {
    let (first, second) = match end {
        None => (None, None),
        Some(End::Answered(answer)) => {
            // The client keeps the `retry` it saw last for all its streams: it must be the server's own.
            let retry = answer.retry.unwrap_or(RETRY);
            let repeated = ServerSseMessage::priming(last_event_id, retry);
            let mut answered = ServerSseMessage::default();
            answered.message = match answer.content {
                Content::Text(id, text) => {
                    let text = str::from_utf8(&text).ok();
                    text.map(|text| {
                        let result = ServerResult::CallToolResult(from_text(text));
                        Arc::new(ServerJsonRpcMessage::response(result, (&id).into()))
                    })
                }
                Content::Message(message) => message.downcast().ok(),
            };
            (Some(repeated), Some(answered))
        }
        Some(End::Cancelled(request, reason)) => (None, Some(cancelled(&request, reason))),
    };
    stream::iter(first.into_iter().chain(second))
}

fn cancelled(request: &RequestId, reason: CancelReason) -> ServerSseMessage {
    let (code, message) = reason.error();
    let error = ErrorData::new(ErrorCode(code), message, None);
    let id = NumberOrString::from(request);
    ServerSseMessage::from_message(ServerJsonRpcMessage::error(error, Some(id)))
}

/// About how many bytes a message takes. Text content, which is nearly all there is, is not walked.
fn weigh(message: &ServerJsonRpcMessage) -> Option<usize> {
    let ServerJsonRpcMessage::Response(response) = message else {
        return serialized(message);
    };
    match &response.result {
        ServerResult::CallToolResult(result) if result.structured_content.is_none() => {
            let weights = result.content.iter().map(|content| match content {
                ContentBlock::Text(text) => Some(text.text.len()),
                other => serialized(other),
            });
            weights.sum()
        }
        other => serialized(other),
    }
}

/// `None` if it cannot be sent at all.
fn serialized(value: &impl serde::Serialize) -> Option<usize> {
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value).ok()?;
    Some(count.0)
}

struct Count(usize);

impl std::io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 = self.0.saturating_add(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt, StreamExt};
    use serde_json::{Value, json};

    use super::*;

    /// An answer of a call in a session: a result as it is on the wire.
    fn answer(result: Value) -> ServerJsonRpcMessage {
        let message = json!({ "jsonrpc": "2.0", "id": 7, "result": result });
        serde_json::from_value(message).unwrap()
    }

    fn keep_one(message: &ServerJsonRpcMessage) -> Answer {
        let event = ServerSseMessage::from_message(message.clone());
        keep(&event, Some(&Shelf::default())).unwrap().0
    }

    fn results() -> Vec<Value> {
        let text = |text: &str| json!({ "type": "text", "text": text });
        vec![
            json!({ "content": [text("a"), text("b")], "isError": false }),
            json!({ "content": [text("a")], "isError": true }),
            json!({ "content": [text("a")] }),
            json!({ "content": [], "isError": false }),
            json!({ "content": [text("a")], "structuredContent": { "a": 1 }, "isError": false }),
            json!({ "content": [text("a")], "isError": false, "_meta": { "a": 1 } }),
            json!({ "content": [text("a")], "isError": false, "resultType": "complete" }),
            json!({
                "content": [{ "type": "text", "text": "a", "annotations": { "priority": 0.5 } }],
                "isError": false,
            }),
            json!({ "content": [text(&"x".repeat(SMALL + 1))], "isError": false }),
        ]
    }

    #[test]
    fn only_a_small_text_alone_is_put_on_the_shelf() {
        let plain = json!({ "content": [{ "type": "text", "text": "a" }], "isError": false });
        assert!(matches!(
            keep_one(&answer(plain)).content,
            Content::Text(..)
        ));
        for result in results() {
            let kept = keep_one(&answer(result.clone()));
            assert!(matches!(kept.content, Content::Message(_)), "{result}");
        }
    }

    #[test]
    fn an_answer_comes_back_as_it_was() {
        let plain =
            json!({ "content": [{ "type": "text", "text": "\u{e9}\n" }], "isError": false });
        for result in results().into_iter().chain([plain]) {
            let message = answer(result);
            let end = End::Answered(keep_one(&message));
            let events = replay(Some(end), "0/0").collect::<Vec<_>>();
            let events = events.now_or_never().unwrap();
            let [_, answered] = events.as_slice() else {
                panic!("{} events", events.len());
            };
            let answered = serde_json::to_value(answered.message.as_deref()).unwrap();
            assert_eq!(answered, serde_json::to_value(&message).unwrap());
        }
    }
}
