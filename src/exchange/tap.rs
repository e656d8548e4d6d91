//! The tap on a response's bytes, where no session manager tracks the call.
//!
//! A message may be the answer although it is not recognised, because the body is encoded or the message is a batch. From then on,
//! the end of the call's last stream ends the call as unknown, whatever the cause. The call is not cancelled.

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
    reads: Reads,
    /// `None` once the answer has passed.
    call: Option<Attachment>,
    events: u32,
    /// The end of the body is the end of the call.
    is_answer: bool,
}

/// What the tap reads.
enum Reads {
    Events(Reader),
    /// The answer itself, as JSON.
    Json,
    /// It cannot be read.
    Opaque,
}

// === impl Tap ===

impl Tap {
    pub(super) fn new(call: Attachment) -> Self {
        Self::of(Reads::Events(Reader::default()), call)
    }

    /// Creates a tap for a stream that cannot be read. The stream may have event ids, and the answer.
    pub(super) fn opaque(call: Attachment) -> Self {
        call.exchange.record_stream_meta(true, None);
        call.exchange
            .with_session(|session| session.mark_event_ids_incomplete(call.id));
        Self::of(Reads::Opaque, call)
    }

    /// Creates a tap for a body that is the answer itself.
    pub(crate) fn answer(call: Attachment, is_json: bool) -> Self {
        let reads = if is_json { Reads::Json } else { Reads::Opaque };
        Self {
            is_answer: true,
            ..Self::of(reads, call)
        }
    }

    /// Creates a tap for an answer that is passed on as an event.
    pub(crate) fn answer_as_event(call: Attachment) -> Self {
        Self {
            is_answer: true,
            ..Self::new(call)
        }
    }

    fn of(reads: Reads, call: Attachment) -> Self {
        Self {
            reads,
            call: Some(call),
            events: 0,
            is_answer: false,
        }
    }

    /// Reads a frame of the body.
    pub(crate) fn read(&mut self, frame: &Bytes) {
        let Self {
            reads,
            call: attachment,
            events,
            ..
        } = self;
        let reader = match reads {
            Reads::Events(reader) => reader,
            Reads::Json => {
                if let (Some(call), Some(last)) = (attachment, frame.trim_ascii_end().last()) {
                    // The answer may be complete only after a byte that closes an object or an array.
                    call.exchange
                        .set_maybe_answered(matches!(last, b'}' | b']'));
                }
                return;
            }
            Reads::Opaque => {
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
            // A client cannot send white space around the id back, because a header value does not include it.
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

    /// Reports the end of the body, unless the answer has passed.
    ///
    /// The call completes if the server has ended a body that is the answer itself. Otherwise it has lost a stream.
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

/// Hints that the events of a session call are read from bytes. If the server is rmcp, its session manager may not be wrapped.
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
