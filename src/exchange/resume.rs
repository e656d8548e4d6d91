//! Resumes: the calls that a GET with `Last-Event-ID` goes on with.
//!
//! From its receipt on the GET holds the clocks of these calls, so that no deadline passes while the inner service thinks. Its
//! stream is a call's next generation once the inner service accepted it. Where a session manager watches the call, only the
//! manager says so: rmcp answers 200 to a resume that it refuses.

use std::{
    borrow::Cow,
    mem,
    sync::{Arc, Mutex},
};

use http::HeaderMap;
use tokio::time::Instant;

use super::state::{Attachment, Exchange, LayerShared, Resume};
use crate::{
    call::{CallId, CancelReason, DetachCause, Detachment, RequestId, SessionKey},
    headers::LAST_EVENT_ID,
    lock::lock,
    observe::Event,
    registry::{DetachedState, EventMatch, RetainedOutcome, UNOBSERVED_TTL},
};

/// What an accepted resume is.
pub(super) enum Accepted {
    /// Nobody's, or a session manager's.
    Nothing,
    Attached(Attachment),
    /// The call was cancelled. Its client gets that error, unless the server has the answer all the same.
    Cancelled(RequestId, CancelReason),
}

// === impl Exchange ===

impl Exchange {
    /// The client of a call came back for it: another stream of it lives from now on. `None` if it has ended.
    pub(crate) fn attach(self: &Arc<Self>, id: CallId) -> Option<Attachment> {
        let attached = self.with_session(|core| Some((core.detachment(id), core.attach(id)?)));
        let (detachment, generation) = attached??;
        self.on_resumed(id, detachment);
        Some(Attachment {
            exchange: self.clone(),
            id,
            generation,
        })
    }

    /// Lets a call run on, however long its client stays away: it may have come back where nobody can see it. If the loss of its
    /// present stream is still to be noticed, that means nothing then. Returns `false` if the call has ended.
    pub(crate) fn set_maybe_resumed(&self, id: CallId) -> bool {
        let Some(call) = self.call(id) else {
            return false;
        };
        let now = Instant::now();
        // As if no stream of it were read.
        let going = self.stream_end(true);
        let unseen = DetachedState::ForgetAt {
            until: now + UNOBSERVED_TTL,
            resume_window: going.resume_window(),
        };
        let wait = self.keep_running_state(call, going, now).unwrap_or(unseen);
        let is_spared = self.with_session(|core| core.set_maybe_resumed(id, wait));
        is_spared.unwrap_or(false)
    }

    /// The client of a call came back for it, and was taken.
    pub(crate) fn on_resumed(&self, id: CallId, detachment: Option<Detachment>) {
        self.state().stream_end_cause = None;
        if let Some(call) = self.call(id) {
            self.report(&Event::Resumed { call, detachment });
        }
    }
}

/// An event id as it is in the stream, which is UTF-8. `fetch` sends each of its characters as one byte.
fn as_text(event_id: &[u8]) -> Cow<'_, [u8]> {
    if str::from_utf8(event_id).is_ok() {
        return Cow::Borrowed(event_id);
    }
    let text: String = event_id.iter().map(|byte| char::from(*byte)).collect();
    Cow::Owned(text.into_bytes())
}

// === impl Resume ===

impl Resume {
    /// `None` if the headers do not name one event.
    pub(super) fn begin(
        instance: &LayerShared,
        session: SessionKey,
        headers: &HeaderMap,
    ) -> Option<Self> {
        let mut ids = headers.get_all(LAST_EVENT_ID).iter();
        let (Some(event_id), None) = (ids.next(), ids.next()) else {
            return None;
        };
        let event_id = as_text(event_id.as_bytes().trim_ascii());
        let event_id = &*event_id;
        let holds = instance.registry.with_session(&session.id, |core| {
            let now = Instant::now();
            // In whatever scope: who gave out the id may not be known yet.
            let mut calls = core.candidates_for_event(event_id);
            calls.retain(|(id, _)| core.begin_resume(*id, now));
            calls
        });
        Some(Self {
            event_id: event_id.into(),
            paused_calls: Mutex::new(holds.unwrap_or_default()),
            session,
        })
    }

    /// Whether a session manager says what becomes of it: rmcp answers 200 to a resume that it refuses.
    fn is_managed(&self) -> bool {
        self.session.scope.path().is_none()
    }

    /// The inner service answered it with a stream.
    pub(super) fn accept(&self, instance: &LayerShared) -> Accepted {
        if self.is_managed() {
            self.end();
            return Accepted::Nothing;
        }
        let accepted = match instance.registry.match_event(&self.session, &self.event_id) {
            EventMatch::Call(id, exchange) => {
                let attached = exchange.attach(id);
                attached.map_or(Accepted::Nothing, Accepted::Attached)
            }
            EventMatch::Ended(RetainedOutcome::Cancelled(request, reason)) => {
                Accepted::Cancelled(request, reason)
            }
            EventMatch::Ambiguous(calls) => {
                // Also those that another resume holds: it may be refused.
                for (id, exchange) in calls {
                    exchange.set_maybe_resumed(id);
                }
                Accepted::Nothing
            }
            EventMatch::Nothing | EventMatch::Ended(RetainedOutcome::Answered(_)) => {
                Accepted::Nothing
            }
        };
        self.end();
        accepted
    }

    /// The exchange of the call in flight that it asks for.
    pub(super) fn target(&self, instance: &LayerShared) -> Option<Arc<Exchange>> {
        let sole = instance.registry.with_session(&self.session.id, |core| {
            core.unique_match_for_event(&self.event_id)
        });
        Some(sole??.1)
    }

    /// Says how its stream goes, before it does. A session manager's stream only sees that it is dropped.
    pub(super) fn set_end_cause(&self, instance: &LayerShared, cause: DetachCause) {
        // Which is what it takes a drop for.
        if cause != DetachCause::Disconnected
            && self.is_managed()
            && let Some(exchange) = self.target(instance)
        {
            exchange.state().stream_end_cause = Some(cause);
        }
    }

    /// Lets the clocks go on that it stopped.
    pub(super) fn end(&self) {
        let holds = mem::take(&mut *lock(&self.paused_calls));
        for (id, exchange) in holds {
            exchange.with_session(|core| core.end_resume(id, Instant::now()));
        }
    }
}
