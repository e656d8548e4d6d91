//! The tap on a response's bytes, for a call that no session manager tracks.
//!
//! A message can be the answer without being recognised, because the body is encoded or the message is a batch. From then on, the end
//! of the call's last stream ends the call as unknown, whatever the cause, and the call is not cancelled.

use bytes::Bytes;

use super::state::Attachment;
use crate::{
    call::{DetachCause, Outcome},
    envelope::Answers,
    observe::Hint,
    registry::{EventIdFormat, POST_GENERATION, numbers},
    sse::Reader,
};

/// Reads a response body for a call that no session manager tracks.
pub(crate) struct Tap {
    format: BodyFormat,
    /// `None` once the answer has passed through.
    call: Option<Attachment>,
    events: u32,
    /// Whether the call ends with the body.
    is_answer: bool,
}

enum BodyFormat {
    Events(Reader),
    /// The answer itself, as JSON.
    Json,
    /// The body cannot be read.
    Opaque,
}

// === impl Tap ===

impl Tap {
    pub(super) fn new(call: Attachment) -> Self {
        Self::with_format(BodyFormat::Events(Reader::default()), call)
    }

    /// Creates a tap for a stream that cannot be read and may contain event ids and the answer.
    pub(super) fn opaque(call: Attachment) -> Self {
        call.exchange.record_stream_meta(true, None);
        call.exchange
            .with_session(|session| session.mark_event_ids_incomplete(call.id));
        Self::with_format(BodyFormat::Opaque, call)
    }

    /// Creates a tap for a body that is the answer itself.
    pub(crate) fn answer(call: Attachment, is_json: bool) -> Self {
        let format = if is_json {
            BodyFormat::Json
        } else {
            BodyFormat::Opaque
        };
        Self {
            is_answer: true,
            ..Self::with_format(format, call)
        }
    }

    /// Creates a tap for an answer that is passed on as an event.
    pub(crate) fn answer_as_event(call: Attachment) -> Self {
        Self {
            is_answer: true,
            ..Self::new(call)
        }
    }

    fn with_format(format: BodyFormat, call: Attachment) -> Self {
        Self {
            format,
            call: Some(call),
            events: 0,
            is_answer: false,
        }
    }

    pub(crate) fn read(&mut self, frame: &Bytes) {
        let Self {
            format,
            call: attachment,
            events,
            ..
        } = self;
        let reader = match format {
            BodyFormat::Events(reader) => reader,
            BodyFormat::Json => {
                if let (Some(call), Some(last)) = (attachment, frame.trim_ascii_end().last()) {
                    // The answer can only be complete after a byte that closes an object or an array.
                    call.exchange
                        .set_maybe_answered(matches!(last, b'}' | b']'));
                }
                return;
            }
            BodyFormat::Opaque => {
                // An unreadable frame counts as an event.
                *events += 1;
                if let Some(call) = attachment {
                    call.exchange.set_maybe_answered(true);
                }
                return;
            }
        };
        reader.read(frame, |event| {
            *events += 1;
            let Some(call) = attachment else {
                return;
            };
            // A client cannot send back white space around the id, because it is not part of a header value.
            let id = event.id.map(<[u8]>::trim_ascii);
            let event_id = id.filter(|id| !id.is_empty());
            call.exchange
                .record_stream_meta(event_id.is_some(), event.retry);
            if let Some(id) = event_id {
                if *events == 1 {
                    emit_session_hint(call, id);
                }
                call.exchange.with_session(|session| {
                    session.record_event_id(call.id, id, EventIdFormat::Any)
                });
            }
            match event.answers {
                Answers::Nothing | Answers::Ambiguous(_) => {
                    if event.is_ambiguous {
                        call.exchange.set_maybe_answered(true);
                    }
                }
                Answers::One(request) => {
                    let info = call.exchange.call(call.id);
                    if info.is_some_and(|info| *info.request_id() == request) {
                        call.exchange.on_answered(call.id, || None);
                        *attachment = None;
                    }
                }
            }
        });
    }

    /// Reports the end of the body, unless the answer has already passed through.
    ///
    /// If the body is the answer itself and was ended by the server, the call completes. Otherwise it has lost a stream.
    pub(super) fn finish(self, cause: DetachCause) {
        let Some(call) = self.call else {
            return;
        };
        if self.is_answer && cause == DetachCause::EndedByServer {
            call.exchange.finish(call.id, Outcome::Completed);
        } else {
            let is_empty_resume = self.events == 0 && call.generation != POST_GENERATION;
            call.detach(cause, is_empty_resume);
        }
    }
}

/// Hints that a session call's events are read from bytes. If the server is rmcp, its session manager may not be wrapped.
fn emit_session_hint(call: &Attachment, event_id: &[u8]) {
    let registry = &call.exchange.shared.registry;
    let info = call.exchange.call(call.id);
    if info.is_some_and(|info| info.session().is_some())
        && numbers(event_id).is_some()
        && !registry.hints.was_emitted(Hint::TwoLayers)
    {
        registry.hints.emit(Hint::NoSessionManager);
    }
}
