//! What the bytes of a response say of its calls, where no session manager watches them.

use bytes::Bytes;

use super::state::Attachment;
use crate::{
    call::{DetachCause, Outcome, RequestId},
    envelope::Answers,
    registry::{FIRST, Form},
    sse::Reader,
};
#[cfg(feature = "rmcp")]
use crate::{observe::Remark, registry::numbers};

/// Reads the events of a response body for calls that no session manager watches.
pub(crate) struct Tap {
    reader: Option<Reader>,
    calls: Vec<Attachment>,
    events: u32,
    /// A message passed that may have been an answer, nobody can say whose.
    unclear: bool,
}

// === impl Tap ===

impl Tap {
    pub(super) fn new(calls: Vec<Attachment>) -> Self {
        Self {
            reader: Some(Reader::default()),
            calls,
            events: 0,
            unclear: false,
        }
    }

    /// For a body that cannot be read: it may well have ids, and the answer.
    pub(super) fn blind(calls: Vec<Attachment>) -> Self {
        for call in &calls {
            call.exchange.mark_passed(true, None);
            call.exchange.instance.registry.blur(call.id);
        }
        Self {
            reader: None,
            calls,
            events: 0,
            unclear: true,
        }
    }

    /// Reads a frame of the body.
    pub(crate) fn read(&mut self, frame: &Bytes) {
        let Self {
            reader,
            calls,
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
            for call in calls.iter() {
                let named = event.id.filter(|id| !id.is_empty());
                call.exchange.mark_passed(named.is_some(), event.retry);
                if let Some(id) = named {
                    #[cfg(feature = "rmcp")]
                    if *events == 1 {
                        remark_on_sessions(call, id);
                    }
                    call.exchange.instance.registry.name(call.id, id, Form::Any);
                }
            }
            match event.answers {
                Answers::Nothing => {}
                Answers::One(id) => answer(calls, &id),
                Answers::Several(ids) => ids.iter().for_each(|id| answer(calls, id)),
                Answers::Unclear(_) => *unclear = true,
            }
        });
    }

    pub(super) fn gone(self, cause: DetachCause) {
        for call in self.calls {
            if self.unclear && cause == DetachCause::EndedByServer {
                // The answer may have been in what could not be read.
                call.exchange.finish(call.id, Outcome::Unknown);
            } else {
                let barren = self.events == 0 && call.generation != FIRST;
                call.detach(cause, barren);
            }
        }
    }
}

/// The events of a session call are read from bytes. That may not be meant if the server is rmcp.
#[cfg(feature = "rmcp")]
fn remark_on_sessions(call: &Attachment, event_id: &[u8]) {
    let registry = &call.exchange.instance.registry;
    let info = call.exchange.call(call.id);
    if info.is_some_and(|info| info.session().is_some())
        && numbers(event_id).is_some()
        && !registry.has_remarked(Remark::TwoLayers)
    {
        registry.remark(Remark::NoSessionManager);
    }
}

fn answer(calls: &mut Vec<Attachment>, request: &RequestId) {
    calls.retain(|call| {
        let info = call.exchange.call(call.id);
        let is_it = info.is_some_and(|info| info.request_id() == request);
        if is_it {
            call.exchange.answered(call.id, None);
        }
        !is_it
    });
}
