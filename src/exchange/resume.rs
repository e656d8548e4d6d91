//! Handles resumes: GETs with `Last-Event-ID`, which can resume a call's stream.
//!
//! While the inner service is handling a resume, the grace periods of the calls it may match do not expire. However, a pending resume can
//! extend a grace period by at most `MAX_RESUME_WAIT` (5 s). Once the inner service has accepted the resume, the response stream becomes
//! the call's next generation. If a session manager tracks the call, only the manager can accept a resume, because rmcp responds with 200
//! even to a resume it refuses.

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

/// The effect of an accepted resume.
pub(super) enum Accepted {
    /// This exchange attaches no stream.
    ///
    /// Either no call matches, several calls match, the call has ended, or a session manager attaches the stream.
    Nothing,
    Attached(Attachment),
    /// The resumed call was cancelled. Its client receives the error, unless the server sends the answer after all.
    Cancelled(RequestId, CancelReason),
}

// === impl Exchange ===

impl Exchange {
    /// Attaches an accepted resume's stream to the call, as the next generation. Returns `None` if the call has ended.
    pub(crate) fn attach(self: &Arc<Self>, id: CallId) -> Option<Attachment> {
        let attached =
            self.with_session(|session| Some((session.detachment(id), session.attach(id)?)));
        let (detachment, generation) = attached??;
        self.on_resumed(id, detachment);
        Some(Attachment {
            exchange: self.clone(),
            id,
            generation,
        })
    }

    /// Lets a call keep running, because its client may have resumed it unobserved.
    ///
    /// The call is not cancelled even if the loss of its current stream is only detected later. Returns `false` if the call has ended.
    pub(crate) fn mark_maybe_resumed(&self, id: CallId) -> bool {
        let Some(call) = self.call(id) else {
            return false;
        };
        let now = Instant::now();
        // Treat the stream as ended by the server, because no task on this server reads the rest of it.
        let stream_end = self.stream_end(true);
        let forget_at = DetachedState::ForgetAt {
            until: now + UNOBSERVED_TTL,
            resume_window: stream_end.resume_window(),
        };
        let state = self
            .keep_running_state(call, stream_end, now)
            .unwrap_or(forget_at);
        let is_marked = self.with_session(|session| session.mark_maybe_resumed(id, state));
        is_marked.unwrap_or(false)
    }

    /// Reports that a client's attempt to resume a call has been accepted.
    pub(crate) fn on_resumed(&self, id: CallId, detachment: Option<Detachment>) {
        self.state().stream_end_cause = None;
        if let Some(call) = self.call(id) {
            self.report(&Event::Resumed { call, detachment });
        }
    }
}

/// Returns an event id as it appears in the stream, which is UTF-8.
///
/// A browser's `fetch` sends header values as Latin-1, with a single byte for each character.
fn as_utf8(event_id: &[u8]) -> Cow<'_, [u8]> {
    if str::from_utf8(event_id).is_ok() {
        return Cow::Borrowed(event_id);
    }
    let text: String = event_id.iter().map(|byte| char::from(*byte)).collect();
    Cow::Owned(text.into_bytes())
}

// === impl Resume ===

impl Resume {
    /// Starts a resume, which keeps its calls' grace periods from expiring.
    ///
    /// Returns `None` unless the headers specify exactly one event. The field may be repeated with the same value, because servers read
    /// only one of the copies.
    pub(super) fn begin(
        shared: &LayerShared,
        session: SessionKey,
        headers: &HeaderMap,
    ) -> Option<Self> {
        let mut ids = headers.get_all(LAST_EVENT_ID).iter();
        let event_id = ids.next()?;
        if ids.any(|other| other != event_id) {
            return None;
        }
        let event_id = as_utf8(event_id.as_bytes().trim_ascii());
        let event_id = &*event_id;
        let held_calls = shared.registry.with_session(&session.id, |session| {
            let now = Instant::now();
            // Search every scope, because it may not be known yet which scope issued the session id.
            let mut calls = session.candidates_for_event(event_id);
            calls.retain(|(id, _)| session.begin_resume(*id, now));
            calls
        });
        Some(Self {
            event_id: event_id.into(),
            held_calls: Mutex::new(held_calls.unwrap_or_default()),
            session,
        })
    }

    /// Returns `true` if a session manager decides whether the resume is accepted.
    fn is_managed(&self) -> bool {
        self.session.scope.path().is_none()
    }

    /// Handles and ends a resume that the inner service has answered with a stream.
    ///
    /// If several calls match, each is marked as maybe resumed.
    pub(super) fn accept(&self, shared: &LayerShared) -> Accepted {
        if self.is_managed() {
            self.end();
            return Accepted::Nothing;
        }
        let accepted = match shared.registry.match_event(&self.session, &self.event_id) {
            EventMatch::Call(id, exchange) => {
                let attached = exchange.attach(id);
                attached.map_or(Accepted::Nothing, Accepted::Attached)
            }
            EventMatch::Ended(RetainedOutcome::Cancelled(request, reason)) => {
                Accepted::Cancelled(request, reason)
            }
            EventMatch::Ambiguous(calls) => {
                // This includes calls with another pending resume, because that resume may be refused.
                for (id, exchange) in calls {
                    exchange.mark_maybe_resumed(id);
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

    /// Returns the exchange of the in-flight call that this resume refers to.
    ///
    /// Returns `None` unless exactly one call matches.
    pub(super) fn target(&self, shared: &LayerShared) -> Option<Arc<Exchange>> {
        let call = shared.registry.with_session(&self.session.id, |session| {
            session.unique_match_for_event(&self.event_id)
        });
        Some(call??.1)
    }

    /// Records why the resumed stream is about to end.
    ///
    /// A session manager's stream cannot determine this itself, because it is simply dropped.
    pub(super) fn set_end_cause(&self, shared: &LayerShared, cause: DetachCause) {
        // A plain drop already means `Disconnected`.
        if cause != DetachCause::Disconnected
            && self.is_managed()
            && let Some(exchange) = self.target(shared)
        {
            exchange.state().stream_end_cause = Some(cause);
        }
    }

    /// Restarts the calls' grace periods, because the client has been asked to retry later.
    #[cold]
    pub(super) fn renew_grace_periods(&self) {
        let held_calls = lock(&self.held_calls).clone();
        for (id, exchange) in held_calls {
            exchange.with_session(|session| session.renew_grace(id, Instant::now()));
        }
    }

    /// Ends the resume. Its calls' grace periods can expire again, unless another resume of the same call is pending.
    ///
    /// This can be called more than once.
    pub(super) fn end(&self) {
        let held_calls = mem::take(&mut *lock(&self.held_calls));
        for (id, exchange) in held_calls {
            exchange.with_session(|session| session.end_resume(id, Instant::now()));
        }
    }
}
