//! Answers that are kept for a client to come back for, and what the client then gets.
//!
//! The form matters: with it the TypeScript SDK 1.x neither loses the answer nor asks without end. Of a completed call the
//! client gets an event that repeats the id it named, so that a second cut is no worse than the first, and then the answer
//! without an id. Of a cancelled call it gets the error alone.

use std::{cell::RefCell, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt, stream};
use rmcp::{
    model::{CallToolResult, ContentBlock, NumberOrString, ServerJsonRpcMessage, ServerResult},
    transport::streamable_http_server::session::ServerSseMessage,
};

use super::{answers, error_for, id_hash};
use crate::{
    call::{CancelReason, RequestId},
    registry::{Answer, AnswerContent, End},
    timer::migrating_timeout,
};

mod shelf;

pub(super) use self::shelf::Shelf;

/// How long a client is told to wait before it comes back, where the server did not say: 3 s, rmcp's own
/// default.
const RETRY: Duration = Duration::from_secs(3);

/// How long the replay of a store may take for the next event of an answered call: 1 s. It may wait for more than there
/// will be, and never end.
const NEXT_EVENT: Duration = Duration::from_secs(1);

/// Answers of at most so many bytes are put on their session's shelf, if they are only a text: 1 KiB. A larger one is not
/// copied, because the allocator's share of its cost is small.
const SMALL: usize = 1024;

/// What a store replays of an answered call, up to the answer. If the store does not have the answer, it comes last, or
/// when nothing else has come for a while.
pub(super) struct Completed<S> {
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
            (AnswerContent::Text(id.into(), shelf.put(text)), weight)
        }
        None => (AnswerContent::Message(message.clone()), weigh(message)?),
    };
    let answer = Answer {
        content,
        event: event.event_id.as_deref().map(id_hash::of),
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
    let is_alone = content.text.len() <= SMALL && is_from_text(result, &content.text);
    is_alone.then_some((&response.id, &content.text))
}

/// Whether a result is what [`from_text`] makes of a text. Nothing is allocated to compare them.
fn is_from_text(result: &CallToolResult, text: &str) -> bool {
    thread_local! {
        static LIKE: RefCell<CallToolResult> = RefCell::new(from_text(""));
    }
    let is_like = |like: &RefCell<CallToolResult>| {
        let mut like = like.borrow_mut();
        if let [ContentBlock::Text(content)] = like.content.as_mut_slice() {
            content.text.clear();
            content.text.push_str(text);
        }
        *result == *like
    };
    // While a thread ends there is none any more.
    LIKE.try_with(is_like).unwrap_or(false)
}

/// What a tool that returns a string answers in a session.
fn from_text(text: &str) -> CallToolResult {
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    // Of a revision that has no sessions.
    result.result_type = None;
    result
}

/// Whether the client that names this event has the answer, because the event is the answer's own. EventSource clients open
/// the streams of completed calls again and again, and are not to get every answer twice.
pub(super) fn is_known(end: &End<Answer>, last_event_id: &str) -> bool {
    match end {
        End::Answered(answer) => answer.event == Some(id_hash::of(last_event_id)),
        End::Cancelled(..) => false,
    }
}

/// The stream of an ended call, or an empty one.
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
    answered.message = message_of(answer.content);
    answered
}

/// The answer of an ended call, if that was not cancelled.
pub(super) fn message(end: End<Answer>) -> Option<Arc<ServerJsonRpcMessage>> {
    match end {
        End::Answered(answer) => message_of(answer.content),
        End::Cancelled(..) => None,
    }
}

fn message_of(content: AnswerContent) -> Option<Arc<ServerJsonRpcMessage>> {
    match content {
        AnswerContent::Text(id, text) => {
            let text = str::from_utf8(&text).ok();
            text.map(|text| {
                let result = ServerResult::CallToolResult(from_text(text));
                Arc::new(ServerJsonRpcMessage::response(result, (&id).into()))
            })
        }
        AnswerContent::Message(message) => message.downcast().ok(),
    }
}

fn cancelled(request: &RequestId, reason: CancelReason) -> ServerSseMessage {
    let error = error_for(Some(reason));
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
            if let Some(Some(event)) = migrating_timeout(NEXT_EVENT, replayed.next()).await {
                self.note(&event);
                return Some(event);
            }
            self.replayed = None;
        }
        self.repeated.take().or_else(|| self.answered.take())
    }
}

#[cfg(test)]
mod tests;
