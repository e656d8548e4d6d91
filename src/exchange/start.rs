//! Which calls an exchange carries, from its request body.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
};

use super::{
    identity::{Revision, Session},
    request_body::{RequestBody, Settled},
    state::{Exchange, InFlight, Phase},
};
use crate::{
    call::{CallId, CallInfo, CancelReason, Key, RequestId},
    envelope::{self, Envelope, Frames, Message, Unknown},
    limits::Limit,
    observe::{Event, Remark},
    registry::Started,
};

// === impl Exchange ===

impl Exchange {
    /// The request body has passed: its frames, or why they say nothing.
    pub(crate) fn body_ended(&self, frames: Result<Frames, Unknown>) {
        let mut state = self.state();
        if matches!(state.request, RequestBody::Passing) {
            state.request = RequestBody::Ended(frames);
            self.body_ended.store(true, Ordering::Release);
        }
    }

    /// Reads the calls from the request body, once it has passed and if nobody bound them.
    pub(crate) fn settle(self: &Arc<Self>) {
        if !self.body_ended.load(Ordering::Relaxed)
            || !self.body_ended.swap(false, Ordering::AcqRel)
        {
            return;
        }
        let frames = {
            let mut state = self.state();
            if state.request.is_unread() && state.phase != Phase::Streaming {
                // A refusal need not read what it refuses, see `accepted_unread`.
                return;
            }
            match mem::replace(&mut state.request, RequestBody::Reading) {
                RequestBody::Ended(frames) => frames,
                other => {
                    state.request = other;
                    return;
                }
            }
        };
        let body = frames.map(Frames::into_bytes);
        let envelope = body.as_ref().map_err(|why| *why);
        match envelope.and_then(|body| envelope::read(body)) {
            Ok(envelope) => self.start(envelope),
            Err(why) => {
                self.settled(Settled::Plain);
                self.instance.report(&Event::Unknown { why });
            }
        }
    }

    /// The body was read. `false` if a session manager bound the call meanwhile.
    fn settled(&self, settled: Settled) -> bool {
        let mut state = self.state();
        let is_first = matches!(state.request, RequestBody::Reading);
        if is_first {
            state.request = RequestBody::Settled(settled);
        }
        is_first
    }

    /// The inner service took a request that carries no call. If it left the body unread, that is reported now.
    pub(super) fn accepted_unread(&self) {
        let is_unread = {
            let mut state = self.state();
            if state.phase == Phase::Open {
                state.phase = Phase::Streaming;
            }
            let is_unread = state.request.is_unread();
            if is_unread {
                state.request = RequestBody::Settled(Settled::Plain);
            }
            is_unread
        };
        if is_unread {
            let why = Unknown::NotRead;
            self.instance.report(&Event::Unknown { why });
        }
    }

    fn start(self: &Arc<Self>, envelope: Envelope<'_>) {
        let in_flight = match envelope {
            Envelope::Single(Message::Notification(notification)) => {
                let meant = notification.cancels.and_then(|request| self.meant(request));
                let settled = meant.map(|(key, id)| Settled::Cancel(key, id));
                self.settled(settled.unwrap_or(Settled::Other));
                return;
            }
            Envelope::Single(message) => self.call_of(message).map(InFlight::One),
            Envelope::Batch(messages) => {
                let calls = messages
                    .into_iter()
                    .filter_map(|message| self.call_of(message));
                let calls: Box<[_]> = calls.collect();
                (!calls.is_empty()).then_some(InFlight::Batch(calls))
            }
        };
        // Not `Plain`: that a client leaves means nothing where there is no call, or no room for it.
        let Some(in_flight) = in_flight else {
            self.settled(Settled::Other);
            return;
        };
        let registry = &self.instance.registry;
        if !registry.has_room(in_flight.iter().len()) {
            if self.settled(Settled::Other) {
                let untracked = in_flight.iter();
                untracked.for_each(|call| self.untracked(call, Limit::Calls));
            }
            return;
        }
        self.take_span();
        let canceller = self.state().canceller.clone();
        let scope = canceller.map(|canceller| canceller.scope());
        // First the registry, then the exchange: who finds a call here knows that one not in flight has ended.
        let mut came = Started::InTime;
        for call in in_flight.iter() {
            let key = scope.clone().and_then(|scope| call.key(scope));
            if call.policy().supersede && key.is_some() {
                self.instance.registry.remark(Remark::SupersedeHasNoEffect);
            }
            came = registry.start(call.id(), key, self.clone(), call.deadline());
        }
        if let Some(in_flight) = self.set_calls(in_flight) {
            for call in in_flight.iter() {
                registry.finish(call.id(), None);
            }
            return;
        }
        for call in self.calls() {
            self.started(call, came);
        }
    }

    /// The call that a cancel by its client means, be its request accepted or not.
    fn meant(&self, request: RequestId) -> Option<(Key, CallId)> {
        let canceller = self.state().canceller.clone()?;
        let session = self.session.key(|_| canceller.scope())?;
        let key = Key { session, request };
        let (id, _) = self.instance.registry.find_any(&key)?;
        Some((key, id))
    }

    /// Gives the calls back if a session manager bound the call meanwhile.
    fn set_calls(&self, in_flight: InFlight) -> Option<InFlight> {
        let mut state = self.state();
        if !matches!(state.request, RequestBody::Reading) {
            return Some(in_flight);
        }
        state.request = RequestBody::Settled(Settled::Plain);
        // `get_or_init` is compiled for size: it would move them once more, byte by byte.
        self.calls.set(in_flight).err()
    }

    pub(super) fn started(self: &Arc<Self>, call: &CallInfo, started: Started) {
        self.report(&Event::Started { call });
        if started == Started::TooLate {
            self.end_here(call.id(), CancelReason::ShuttingDown);
        }
    }

    /// The call in a message that was read from the body. `initialize` is none, nor is a request of which
    /// it cannot be said whether it belongs to a session.
    fn call_of(&self, message: Message<'_>) -> Option<CallInfo> {
        let Message::Request(request) = message else {
            return None;
        };
        if &*request.method == "initialize" {
            return None;
        }
        let in_body = request.protocol_version.as_deref();
        let revision = in_body.map_or(self.revision, |version| {
            self.revision.and(Revision::from_version(version))
        });
        let session = match (&self.session, revision) {
            (Session::None, _) | (Session::One(_), Revision::Stateless) => None,
            (Session::One(id), Revision::WithSessions) => Some(Arc::from(id.to_str().ok()?)),
            (Session::One(_), Revision::Doubtful) | (Session::Doubtful, _) => return None,
        };
        let mut call = CallInfo::new(request.id, &request.method);
        call.set_tool(request.tool);
        call.set_session(session);
        call.set_protocol_version(in_body);
        call.set_must_run_on(request.task);
        call.set_ends_with_its_stream(revision == Revision::Stateless);
        call.set_policy(self.instance.options.policy_for(&call));
        Some(call)
    }
}
