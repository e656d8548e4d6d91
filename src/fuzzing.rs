//! Entry points for the fuzz targets in `fuzz/`.
//!
//! They exist only under `cfg(fuzzing)`, which cargo-fuzz sets.

use crate::{
    call::RequestId,
    envelope::{self, Answers, Message, ParseFailure},
    registry,
    sse::Reader,
};

/// A message read from a request body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ParsedMessage {
    Request {
        id: RequestId,
        method: Box<str>,
        tool: Option<Box<str>>,
        protocol_version: Option<Box<str>>,
        task: bool,
    },
    Notification {
        method: Box<str>,
        cancels: Option<RequestId>,
    },
    Response,
}

/// An event read from a response body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ParsedEvent {
    pub id: Option<Vec<u8>>,
    pub retry_ms: Option<u64>,
    pub answers: Result<Option<RequestId>, ParseFailure>,
}

/// Reads a complete request body.
pub fn read(body: &[u8]) -> Result<ParsedMessage, ParseFailure> {
    envelope::read(body).map(ParsedMessage::from)
}

/// Reads the events in a response body's frames.
pub fn events<'a>(frames: impl IntoIterator<Item = &'a [u8]>) -> Vec<ParsedEvent> {
    let mut reader = Reader::default();
    let mut events = Vec::new();
    for frame in frames {
        reader.read(frame, |event| {
            events.push(ParsedEvent {
                id: event.id.map(<[u8]>::to_vec),
                retry_ms: event.retry.map(|retry| retry.as_millis() as u64),
                answers: match event.answers {
                    Answers::Nothing => Ok(None),
                    Answers::One(id) => Ok(Some(id)),
                    Answers::Ambiguous(reason) => Err(reason),
                },
            });
        });
    }
    events
}

/// Applies encoded operations to the registry's core and to a model. Panics if they differ.
pub fn registry(bytes: &[u8]) {
    registry::check_against_model(bytes);
}

impl From<Message<'_>> for ParsedMessage {
    fn from(message: Message<'_>) -> Self {
        match message {
            Message::Request(request) => Self::Request {
                id: request.id,
                method: request.method.into(),
                tool: request.tool.map(Into::into),
                protocol_version: request.protocol_version.map(Into::into),
                task: request.task,
            },
            Message::Notification(notification) => Self::Notification {
                method: notification.method.into(),
                cancels: notification.cancels,
            },
            Message::Response => Self::Response,
        }
    }
}
