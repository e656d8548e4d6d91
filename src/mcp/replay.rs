//! Retains answers and replays them to clients that resume an ended call.
//!
//! If the call has completed, the client first receives a priming event, which repeats its last event id, and then the answer
//! without an id, so that the client can resume in the same way if it disconnects again. An error, whether from a completed or a
//! cancelled call, is sent without the priming event, because the TypeScript SDK does not end a call on an error that follows an
//! event id.
//!
//! This format matters: with any other, the TypeScript SDK 1.x would lose the answer or resume forever.

use std::{cell::RefCell, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt, stream};
use rmcp::{
    model::{CallToolResult, ContentBlock, NumberOrString, ServerJsonRpcMessage, ServerResult},
    transport::streamable_http_server::session::ServerSseMessage,
};

use super::{answered_id, error_for, id_hash};
use crate::{
    call::{CancelReason, RequestId},
    registry::{Answer, AnswerContent, RetainedOutcome},
    timer::migrating_timeout,
};

mod text_arena;

pub(super) use self::text_arena::TextArena;

/// The reconnect delay (`retry`) if the server has not sent one. Same as rmcp's default.
const DEFAULT_RETRY: Duration = Duration::from_secs(3);

/// Maximum time to wait for the next event of an event store's replay.
///
/// The store might be waiting for events that will never be stored.
const REPLAY_EVENT_TIMEOUT: Duration = Duration::from_secs(1);

/// Maximum size of a text copied into its session's arena.
///
/// For larger texts, the allocation is only a small part of the cost.
const MAX_ARENA_TEXT: usize = 1024;

/// An event store's replay of an answered call, up to the answer.
///
/// If the store does not have the answer, the retained answer follows once the replay has ended or has yielded no event for
/// [`REPLAY_EVENT_TIMEOUT`].
pub(super) struct ReplayedAnswer<S> {
    replay: Option<S>,
    request: Option<NumberOrString>,
    /// The priming event to send before the answer. `None` if the answer is an error, or once the replay has yielded an event id
    /// or the answer.
    priming_event: Option<ServerSseMessage>,
    /// `None` once the replay has yielded the answer.
    retained_answer: Option<ServerSseMessage>,
}

/// Returns an answer for the registry to retain, with its size in bytes.
///
/// Returns `None` if the event has no message, or if its message cannot be serialized.
pub(super) fn retain(
    event: &ServerSseMessage,
    arena: Option<&TextArena>,
) -> Option<(Answer, usize)> {
    let message = event.message.as_ref()?;
    let (content, size) = match arena.and_then(|arena| Some((arena, as_small_text(message)?))) {
        Some((arena, (id, text))) => {
            let size = text_len(id) + text.len();
            (AnswerContent::Text(id.into(), arena.push(text)), size)
        }
        None => (
            AnswerContent::Message(message.clone()),
            retained_size(message)?,
        ),
    };
    let answer = Answer {
        content,
        event_id_hash: event.event_id.as_deref().map(id_hash::hash),
        retry: None,
    };
    Some((answer, size))
}

/// Returns the id and text of an answer consisting only of a small text (see [`text_result`]).
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
    let is_only_text =
        content.text.len() <= MAX_ARENA_TEXT && is_text_result(result, &content.text);
    is_only_text.then_some((&response.id, &content.text))
}

/// Returns `true` if a result equals [`text_result`] for its text. Reuses one template per thread.
fn is_text_result(result: &CallToolResult, text: &str) -> bool {
    thread_local! {
        static TEMPLATE: RefCell<CallToolResult> = RefCell::new(text_result(""));
    }
    let is_equal = |template: &RefCell<CallToolResult>| {
        let mut template = template.borrow_mut();
        if let [ContentBlock::Text(content)] = template.content.as_mut_slice() {
            content.text.clear();
            content.text.push_str(text);
        }
        *result == *template
    };
    // Fails while the thread is exiting, once the template has been destroyed.
    TEMPLATE.try_with(is_equal).unwrap_or(false)
}

/// Returns the result of a session's call to a tool that returns a string.
fn text_result(text: &str) -> CallToolResult {
    let mut result = CallToolResult::success(vec![ContentBlock::text(text)]);
    // Only protocol revisions without sessions have this field.
    result.result_type = None;
    result
}

/// Returns `true` if the client already has the answer, because that was its last event.
///
/// EventSource clients reconnect even after a call has completed, and must not receive every answer twice.
pub(super) fn has_answer(end: &RetainedOutcome<Answer>, last_event_id: &str) -> bool {
    match end {
        RetainedOutcome::Answered(answer) => {
            answer.event_id_hash == Some(id_hash::hash(last_event_id))
        }
        RetainedOutcome::Cancelled(..) => false,
    }
}

/// Returns the stream for a client that resumes an ended call.
///
/// The stream is empty if nothing is retained.
pub(super) fn replay(
    end: Option<RetainedOutcome<Answer>>,
    last_event_id: &str,
) -> impl Stream<Item = ServerSseMessage> + Send + Sync + use<> {
    let (first, second) = match end {
        None => (None, None),
        Some(RetainedOutcome::Answered(answer)) => {
            let (priming_event, answer) = answer_events(last_event_id, answer);
            (priming_event, Some(answer))
        }
        Some(RetainedOutcome::Cancelled(request, reason)) => (
            None,
            Some(ServerSseMessage::from_message(cancellation_error(
                &request, reason,
            ))),
        ),
    };
    stream::iter(first.into_iter().chain(second))
}

/// Returns an event that carries no message and repeats the client's last event id.
pub(super) fn priming_event(last_event_id: &str, retry: Option<Duration>) -> ServerSseMessage {
    // A client applies the last `retry` it received to all its streams, so this must be the server's own value.
    ServerSseMessage::priming(last_event_id, retry.unwrap_or(DEFAULT_RETRY))
}

/// Returns the priming event and the answer, or only the answer if it is an error.
fn answer_events(
    last_event_id: &str,
    answer: Answer,
) -> (Option<ServerSseMessage>, ServerSseMessage) {
    let priming_event = priming_event(last_event_id, answer.retry);
    let mut answer_event = ServerSseMessage::default();
    answer_event.message = answer_message(answer.content);
    let is_error = matches!(
        answer_event.message.as_deref(),
        Some(ServerJsonRpcMessage::Error(_))
    );
    ((!is_error).then_some(priming_event), answer_event)
}

/// Returns the answer to an ended call, or its error if it has been cancelled.
pub(super) fn message(end: RetainedOutcome<Answer>) -> Option<Arc<ServerJsonRpcMessage>> {
    match end {
        RetainedOutcome::Answered(answer) => answer_message(answer.content),
        RetainedOutcome::Cancelled(request, reason) => {
            Some(Arc::new(cancellation_error(&request, reason)))
        }
    }
}

fn answer_message(content: AnswerContent) -> Option<Arc<ServerJsonRpcMessage>> {
    match content {
        AnswerContent::Text(id, text) => {
            let text = str::from_utf8(&text).ok();
            text.map(|text| {
                let result = ServerResult::CallToolResult(text_result(text));
                Arc::new(ServerJsonRpcMessage::response(result, (&id).into()))
            })
        }
        AnswerContent::Message(message) => message.downcast().ok(),
    }
}

/// Returns the error for a cancelled call.
fn cancellation_error(request: &RequestId, reason: CancelReason) -> ServerJsonRpcMessage {
    let id = NumberOrString::from(request);
    ServerJsonRpcMessage::error(error_for(Some(reason)), Some(id))
}

/// Returns the approximate size of a message in bytes, without serializing plain text.
fn retained_size(message: &ServerJsonRpcMessage) -> Option<usize> {
    let ServerJsonRpcMessage::Response(response) = message else {
        return serialized_size(message);
    };
    let size = match &response.result {
        ServerResult::CallToolResult(result) => retained_result_size(result)?,
        other => serialized_size(other)?,
    };
    Some(text_len(&response.id) + size)
}

fn retained_result_size(result: &CallToolResult) -> Option<usize> {
    let CallToolResult {
        result_type,
        content,
        structured_content,
        is_error: _,
        meta,
        ..
    } = result;
    let mut size = content.capacity() * size_of::<ContentBlock>();
    for block in content {
        size += match block {
            ContentBlock::Text(block) if block.meta.is_none() && block.annotations.is_none() => {
                block.text.capacity()
            }
            other => serialized_size(other)?,
        };
    }
    let extras = [
        structured_content.as_ref().map(serialized_size),
        result_type.as_ref().map(serialized_size),
        meta.as_ref().map(serialized_size),
    ];
    for extra in extras.into_iter().flatten() {
        size += extra?;
    }
    Some(size)
}

/// Returns a string id's length, or 0 for a number.
fn text_len(id: &NumberOrString) -> usize {
    match id {
        NumberOrString::String(text) => text.len(),
        NumberOrString::Number(_) => 0,
    }
}

/// Returns `None` if the value cannot be serialized.
fn serialized_size(value: &impl serde::Serialize) -> Option<usize> {
    let mut count = ByteCount(0);
    serde_json::to_writer(&mut count, value).ok()?;
    Some(count.0)
}

struct ByteCount(usize);

impl std::io::Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 = self.0.saturating_add(bytes.len());
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

// === impl ReplayedAnswer ===

impl<S> ReplayedAnswer<S> {
    pub(super) fn new(replay: S, answer: Answer, last_event_id: &str) -> Self {
        let (priming_event, retained_answer) = answer_events(last_event_id, answer);
        let request = retained_answer
            .message
            .as_deref()
            .and_then(answered_id)
            .cloned();
        Self {
            replay: Some(replay),
            request,
            priming_event,
            retained_answer: Some(retained_answer),
        }
    }

    /// Discards whatever no longer has to be sent, now that the replay has yielded `event`.
    fn record(&mut self, event: &ServerSseMessage) {
        let request = event.message.as_deref().and_then(answered_id);
        let is_answer = request.is_some() && request == self.request.as_ref();
        if is_answer {
            self.retained_answer = None;
            // The store might wait for more events, but none can follow the answer.
            self.replay = None;
        }
        if is_answer || event.event_id.is_some() {
            self.priming_event = None;
        }
    }
}

impl<S: Stream<Item = ServerSseMessage> + Unpin> ReplayedAnswer<S> {
    pub(super) fn into_stream(self) -> impl Stream<Item = ServerSseMessage> {
        let next = async |mut this: Self| this.next().await.map(|event| (event, this));
        stream::unfold(self, next).fuse()
    }

    async fn next(&mut self) -> Option<ServerSseMessage> {
        if let Some(replay) = &mut self.replay {
            if let Some(Some(event)) = migrating_timeout(REPLAY_EVENT_TIMEOUT, replay.next()).await
            {
                self.record(&event);
                return Some(event);
            }
            self.replay = None;
        }
        self.priming_event
            .take()
            .or_else(|| self.retained_answer.take())
    }
}

#[cfg(test)]
mod tests;
