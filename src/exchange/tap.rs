//! The tap on a response's bytes, where no session manager watches the call.

use bytes::Bytes;

use super::state::Attachment;
use crate::{
    call::{DetachCause, Outcome},
    envelope::Answers,
    observe::Remark,
    registry::{FIRST, Form, numbers},
    sse::Reader,
};

/// Reads the events of a response body for a call that no session manager watches.
pub(crate) struct Tap {
    reader: Option<Reader>,
    /// Until its answer has passed.
    call: Option<Attachment>,
    events: u32,
    /// A message passed that may have been an answer, nobody can say whose.
    unclear: bool,
}

// === impl Tap ===

impl Tap {
    pub(super) fn new(call: Attachment) -> Self {
        Self {
            reader: Some(Reader::default()),
            call: Some(call),
            events: 0,
            unclear: false,
        }
    }

    /// For a body that cannot be read: it may well have ids, and the answer.
    pub(super) fn blind(call: Attachment) -> Self {
        call.exchange.mark_passed(true, None);
        call.exchange.at_home(|core| core.blur(call.id));
        Self {
            reader: None,
            call: Some(call),
            events: 0,
            unclear: true,
        }
    }

    /// Reads a frame of the body.
    pub(crate) fn read(&mut self, frame: &Bytes) {
        let Self {
            reader,
            call: attached,
            events,
            unclear,
        } = self;
        let Some(reader) = reader else {
            // Whatever it is, it is not nothing.
            *events += 1;
            return;
        };
        reader.read(frame, |event| {
            *events += 1;
            let Some(call) = attached else {
                return;
            };
            let named = event.id.filter(|id| !id.is_empty());
            call.exchange.mark_passed(named.is_some(), event.retry);
            if let Some(id) = named {
                if *events == 1 {
                    remark_on_sessions(call, id);
                }
                call.exchange
                    .at_home(|core| core.name(call.id, id, Form::Any));
            }
            match event.answers {
                Answers::Nothing => {}
                Answers::One(request) => {
                    let info = call.exchange.call(call.id);
                    if info.is_some_and(|info| *info.request_id() == request) {
                        call.exchange.answered(call.id, || None);
                        *attached = None;
                    }
                }
                Answers::Unclear(_) => *unclear = true,
            }
        });
    }

    pub(super) fn gone(self, cause: DetachCause) {
        let Some(call) = self.call else {
            return;
        };
        if self.unclear && cause == DetachCause::EndedByServer {
            // The answer may have been in what could not be read.
            call.exchange.finish(call.id, Outcome::Unknown);
        } else {
            let barren = self.events == 0 && call.generation != FIRST;
            call.detach(cause, barren);
        }
    }
}

/// The events of a session call are read from bytes. That may not be meant if the server is rmcp.
fn remark_on_sessions(call: &Attachment, event_id: &[u8]) {
    let registry = &call.exchange.instance.registry;
    let info = call.exchange.call(call.id);
    if info.is_some_and(|info| info.session().is_some())
        && numbers(event_id).is_some()
        && !registry.remarks.include(Remark::TwoLayers)
    {
        registry.remarks.make(Remark::NoSessionManager);
    }
}
