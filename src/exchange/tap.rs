//! Reads a call's streams as bytes if no session manager tracks the call.
//!
//! Sometimes the layer cannot tell whether a message is the answer, because the body is encoded or the message is a batch. Once this has
//! happened, losing a stream no longer cancels the call. Instead, when the call's last stream ends, for whatever reason, the call is
//! recorded with an unknown outcome.

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
    attachment: Option<Attachment>,
    events: u32,
    /// Whether the body is itself the answer, so that the call ends with it.
    is_answer: bool,
}

enum BodyFormat {
    Events(Reader),
    /// The answer itself, as JSON.
    Json,
    /// An unparsable body.
    Opaque,
}

// === impl Tap ===

impl Tap {
    pub(super) fn new(attachment: Attachment) -> Self {
        Self::with_format(BodyFormat::Events(Reader::default()), attachment)
    }

    /// Creates a tap for an unparsable stream, which may contain event ids and the answer.
    pub(super) fn opaque(attachment: Attachment) -> Self {
        let exchange = &attachment.exchange;
        exchange.record_stream_meta(true, None);
        exchange.with_session(|session| session.mark_event_ids_incomplete(attachment.id));
        Self::with_format(BodyFormat::Opaque, attachment)
    }

    /// Creates a tap for a body that is the answer itself.
    pub(crate) fn answer(attachment: Attachment, is_json: bool) -> Self {
        let format = if is_json {
            BodyFormat::Json
        } else {
            BodyFormat::Opaque
        };
        Self {
            is_answer: true,
            ..Self::with_format(format, attachment)
        }
    }

    /// Creates a tap for an answer passed on as an event.
    pub(crate) fn answer_as_event(attachment: Attachment) -> Self {
        Self {
            is_answer: true,
            ..Self::new(attachment)
        }
    }

    fn with_format(format: BodyFormat, attachment: Attachment) -> Self {
        Self {
            format,
            attachment: Some(attachment),
            events: 0,
            is_answer: false,
        }
    }

    pub(crate) fn read(&mut self, frame: &Bytes) {
        let Self {
            format,
            attachment,
            events,
            ..
        } = self;
        let reader = match format {
            BodyFormat::Events(reader) => reader,
            BodyFormat::Json => {
                if let (Some(call), Some(last)) = (attachment, frame.trim_ascii_end().last()) {
                    // The answer can only be complete after a closing brace or bracket.
                    call.exchange
                        .set_may_have_been_answered(matches!(last, b'}' | b']'));
                }
                return;
            }
            BodyFormat::Opaque => {
                // Count each frame as an event, because it may contain one.
                *events += 1;
                if let Some(call) = attachment {
                    call.exchange.set_may_have_been_answered(true);
                }
                return;
            }
        };
        reader.read(frame, |event| {
            *events += 1;
            let Some(call) = attachment else {
                return;
            };
            // A client cannot send back the whitespace around an id, because it would not be part of the header value.
            let id = event.id.map(<[u8]>::trim_ascii);
            let event_id = id.filter(|id| !id.is_empty());
            call.exchange
                .record_stream_meta(event_id.is_some(), event.retry);
            if let Some(id) = event_id {
                if *events == 1 {
                    emit_session_hint(call, id);
                }
                call.exchange.with_session(|session| {
                    session.record_event_id(call.id, id, EventIdFormat::Other)
                });
            }
            match event.answers {
                Answers::Nothing | Answers::Ambiguous(_) => {
                    if event.is_ambiguous {
                        call.exchange.set_may_have_been_answered(true);
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
    /// If the body is itself the answer and the server has ended it, the call completes. Otherwise the stream is reported as lost.
    pub(super) fn finish(self, cause: DetachCause) {
        let Some(attachment) = self.attachment else {
            return;
        };
        if self.is_answer && cause == DetachCause::EndedByServer {
            attachment
                .exchange
                .finish(attachment.id, Outcome::Completed);
        } else {
            let resumed_without_events =
                self.events == 0 && attachment.generation != POST_GENERATION;
            attachment.detach(cause, resumed_without_events);
        }
    }
}

/// If an event id looks like rmcp's own, hints that the session manager may not be wrapped.
fn emit_session_hint(attachment: &Attachment, event_id: &[u8]) {
    let registry = &attachment.exchange.shared.registry;
    let info = attachment.exchange.call(attachment.id);
    if info.is_some_and(|info| info.session().is_some())
        && numbers(event_id).is_some()
        && !registry.hints.was_emitted(Hint::TwoLayers)
    {
        registry.hints.emit(Hint::NoSessionManager);
    }
}
