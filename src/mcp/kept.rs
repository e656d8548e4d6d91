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

use futures_util::{Stream, StreamExt, stream};
use rmcp::{
    model::{CallToolResult, ContentBlock, NumberOrString, ServerJsonRpcMessage, ServerResult},
    transport::streamable_http_server::session::ServerSseMessage,
};

use super::{error_for, shelf::Shelf};
use crate::{
    call::{CancelReason, RequestId},
    registry::{Answer, Content, End},
    timer::in_time,
};

/// How long a client is told to wait before it comes back, where the server did not say: 3 s, rmcp's own
/// default.
const RETRY: Duration = Duration::from_secs(3);

/// How long the replay of a store may take for the next event of an answered call: 1 s. It may wait for more than there
/// will be, and never end.
const NEXT_EVENT: Duration = Duration::from_secs(1);

/// Answers of at most so many bytes are put on their session's shelf, if they are only a text: 1 KiB. A larger
/// one is not copied: it costs its allocator little beside what it cost itself.
const SMALL: usize = 1024;

/// What a store replays of an answered call, to the answer. If that is not there, it comes after everything else, or
/// when nothing else has come for a while.
pub(super) struct Completed<S> {
    /// To be read on.
    replayed: Option<S>,
    request: Option<NumberOrString>,
    /// What its client gets before the answer, unless it got an id to come back with.
    repeated: Option<ServerSseMessage>,
    /// The answer, unless it was there.
    answered: Option<ServerSseMessage>,
}

/// An answer as the registry keeps it, with its size in bytes: a reference to the message.
pub(super) fn keep(event: &ServerSseMessage, shelf: Option<&Shelf>) -> Option<(Answer, usize)> {
    let message = event.message.as_ref()?;
    let (content, weight) = match shelf.and_then(|shelf| Some((shelf, as_small_text(message)?))) {
        Some((shelf, (id, text))) => {
            let weight = text_of(id) + text.len();
            (Content::Text(id.into(), shelf.put(text)), weight)
        }
        None => (Content::Message(message.clone()), weigh(message)?),
    };
    let answer = Answer {
        content,
        event: event.event_id.as_deref().map(hash),
        retry: None,
    };
    Some((answer, weight))
}

/// The id and the text of a small answer that is [made](from_text) of nothing else.
fn as_small_text(message: &ServerJsonRpcMessage) -> Option<(&NumberOrString, &str)> {
    let ServerJsonRpcMessage::Response(response) = message else {
        return None;
    };
    let ServerResult::CallToolResult(result) = &response.result else {
        return None;
    };
    let [ContentBlock::Text(content)] = result.content.as_slice() else {
        return None;
    };
    let is_alone = content.text.len() <= SMALL && *result == from_text(&content.text);
    is_alone.then_some((&response.id, &content.text))
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
        Some(End::Answered(answer)) => (
            Some(repeated(last_event_id, &answer)),
            Some(answered(answer)),
        ),
        Some(End::Cancelled(request, reason)) => (None, Some(cancelled(&request, reason))),
    };
    stream::iter(first.into_iter().chain(second))
}

/// An event without a message that repeats the id which the client named.
fn repeated(last_event_id: &str, answer: &Answer) -> ServerSseMessage {
    // The client keeps the `retry` it saw last for all its streams: it must be the server's own.
    ServerSseMessage::priming(last_event_id, answer.retry.unwrap_or(RETRY))
}

fn answered(answer: Answer) -> ServerSseMessage {
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
    answered
}

/// Which request a message answers.
pub(super) fn answers(message: &ServerJsonRpcMessage) -> Option<&NumberOrString> {
    match message {
        ServerJsonRpcMessage::Response(response) => Some(&response.id),
        ServerJsonRpcMessage::Error(error) => error.id.as_ref(),
        ServerJsonRpcMessage::Request(_) | ServerJsonRpcMessage::Notification(_) => None,
    }
}

fn cancelled(request: &RequestId, reason: CancelReason) -> ServerSseMessage {
    let error = error_for(reason);
    let id = NumberOrString::from(request);
    ServerSseMessage::from_message(ServerJsonRpcMessage::error(error, Some(id)))
}

/// About how many bytes a message takes. Plain text, which is nearly all there is, is not walked.
fn weigh(message: &ServerJsonRpcMessage) -> Option<usize> {
    let ServerJsonRpcMessage::Response(response) = message else {
        return serialized(message);
    };
    let weight = match &response.result {
        ServerResult::CallToolResult(result) => weigh_result(result)?,
        other => serialized(other)?,
    };
    Some(text_of(&response.id) + weight)
}

fn weigh_result(result: &CallToolResult) -> Option<usize> {
    let CallToolResult {
        result_type,
        content,
        structured_content,
        is_error: _,
        meta,
        ..
    } = result;
    let mut weight = content.capacity() * size_of::<ContentBlock>();
    for block in content {
        weight += match block {
            ContentBlock::Text(block) if block.meta.is_none() && block.annotations.is_none() => {
                block.text.capacity()
            }
            other => serialized(other)?,
        };
    }
    let extras = [
        structured_content.as_ref().map(serialized),
        result_type.as_ref().map(serialized),
        meta.as_ref().map(serialized),
    ];
    for extra in extras.into_iter().flatten() {
        weight += extra?;
    }
    Some(weight)
}

/// How long the text of an id is.
fn text_of(id: &NumberOrString) -> usize {
    match id {
        NumberOrString::String(text) => text.len(),
        NumberOrString::Number(_) => 0,
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

// === impl Completed ===

impl<S> Completed<S> {
    pub(super) fn new(replayed: S, answer: Answer, last_event_id: &str) -> Self {
        let repeated = repeated(last_event_id, &answer);
        let answered = answered(answer);
        let request = answered.message.as_deref().and_then(answers).cloned();
        Self {
            replayed: Some(replayed),
            request,
            repeated: Some(repeated),
            answered: Some(answered),
        }
    }

    fn note(&mut self, event: &ServerSseMessage) {
        let request = event.message.as_deref().and_then(answers);
        let is_answer = request.is_some() && request == self.request.as_ref();
        if is_answer {
            self.answered = None;
            // A store may wait for more. Nothing comes after an answer.
            self.replayed = None;
        }
        if is_answer || event.event_id.is_some() {
            self.repeated = None;
        }
    }
}

impl<S: Stream<Item = ServerSseMessage> + Unpin> Completed<S> {
    pub(super) fn into_stream(self) -> impl Stream<Item = ServerSseMessage> {
        let next = async |mut this: Self| this.next().await.map(|event| (event, this));
        stream::unfold(self, next).fuse()
    }

    async fn next(&mut self) -> Option<ServerSseMessage> {
        if let Some(replayed) = &mut self.replayed {
            if let Some(Some(event)) = in_time(NEXT_EVENT, replayed.next()).await {
                self.note(&event);
                return Some(event);
            }
            self.replayed = None;
        }
        self.repeated.take().or_else(|| self.answered.take())
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;
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

    #[test]
    fn a_replay_is_over_with_the_answer_though_the_store_waits_for_more() {
        let message = answer(json!({ "content": [] }));
        let replayed = [None, Some(Arc::new(message.clone()))].map(|message| {
            let mut event = ServerSseMessage::priming("later", RETRY);
            event.message = message;
            event
        });
        let replayed = stream::iter(replayed).chain(stream::pending());
        let completed = Completed::new(replayed, keep_one(&message), "named");
        let events = completed.into_stream().collect::<Vec<_>>();
        let events = events.now_or_never().unwrap();
        assert_eq!(events.len(), 2, "{events:?}");
        let last = serde_json::to_value(events[1].message.as_deref()).unwrap();
        assert_eq!(last, serde_json::to_value(&message).unwrap());
    }

    /// Answers with this text in each place where one may be.
    fn places(text: &str) -> Vec<Value> {
        let with = |mut of: Value, key: &str, value: Value| {
            of[key] = value;
            of
        };
        let meta = json!({ "of.a/b": text });
        let plain = json!({ "type": "text", "text": "a" });
        let image = json!({ "type": "image", "data": "a", "mimeType": "a/b" });
        let audio = json!({ "type": "audio", "data": "a", "mimeType": "a/b" });
        let link = json!({ "type": "resource_link", "uri": "a:b", "name": "a" });
        let within = json!({ "uri": "a:b", "text": "a" });
        let resource = json!({ "type": "resource", "resource": within });
        let mut blocks = vec![
            with(plain.clone(), "text", json!(text)),
            with(image.clone(), "data", json!(text)),
            with(image.clone(), "mimeType", json!(text)),
            with(audio.clone(), "data", json!(text)),
            with(link.clone(), "description", json!(text)),
        ];
        for (key, value) in [
            ("text", json!(text)),
            ("uri", json!(text)),
            ("_meta", meta.clone()),
        ] {
            let changed = with(within.clone(), key, value);
            blocks.push(with(resource.clone(), "resource", changed));
        }
        let blob = json!({ "uri": "a:b", "blob": text });
        blocks.push(with(resource.clone(), "resource", blob));
        for block in [plain.clone(), image, audio, link, resource] {
            blocks.push(with(block, "_meta", meta.clone()));
        }
        let contents = blocks
            .into_iter()
            .map(|block| json!({ "content": [plain, block] }));
        let results = contents.chain([
            json!({ "content": [], "structuredContent": { "a": text } }),
            json!({ "content": [], "structuredContent": text }),
            json!({ "content": [], "_meta": meta }),
            json!({ "content": [], "resultType": text }),
            json!({ "tools": [{ "name": text, "inputSchema": {} }] }),
            json!({ "of nobody": text }),
        ]);
        let answers = results.map(|result| json!({ "id": 7, "result": result }));
        let others = [
            json!({ "id": text, "result": { "content": [plain] } }),
            json!({ "id": 7, "error": { "code": 1, "message": text } }),
            json!({ "id": 7, "error": { "code": 1, "message": "a", "data": text } }),
        ];
        let answers = answers.chain(others);
        answers
            .map(|answer| with(answer, "jsonrpc", json!("2.0")))
            .collect()
    }

    #[test]
    fn an_answer_weighs_what_it_holds_wherever_that_is() {
        const MUCH: usize = 5_000_000;
        let shown = places("…");
        for (place, shown) in places(&"x".repeat(MUCH)).into_iter().zip(shown) {
            let message = serde_json::from_value(place).unwrap();
            let event = ServerSseMessage::from_message(message);
            let (_, weight) = keep(&event, Some(&Shelf::default())).unwrap();
            assert!(
                (MUCH..MUCH + 10_000).contains(&weight),
                "{weight} for {shown}"
            );
        }
    }

    #[test]
    fn annotations_of_a_text_are_weighed() {
        let annotations = json!({ "audience": vec!["user"; 100_000] });
        let block = json!({ "type": "text", "text": "a", "annotations": annotations });
        let event = ServerSseMessage::from_message(answer(json!({ "content": [block] })));
        let (_, weight) = keep(&event, None).unwrap();
        assert!(weight >= 100_000 * "\"user\"".len(), "{weight}");
    }

    #[test]
    fn blocks_without_text_are_no_free_gift() {
        let block = json!({ "type": "text", "text": "" });
        let message = answer(json!({ "content": vec![block; 10_000] }));
        let event = ServerSseMessage::from_message(message);
        let (_, weight) = keep(&event, None).unwrap();
        assert!(weight >= 10_000 * size_of::<ContentBlock>(), "{weight}");
    }
}
