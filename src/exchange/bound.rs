//! The session manager's reports: which call a typed message is, and what became of its streams.

use std::{
    mem,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll, Waker},
    time::Duration,
};

use super::{
    identity::SessionHeader,
    request_body::{RequestBody, Settled},
    state::{Attachment, Copied, Core, Exchange, Handover, Locked, Lodging, Passage, Phase},
};
use crate::{
    call::{CallId, CallInfo, CancelReason, DetachCause, Key, SessionKey},
    cancel::Canceller,
    limits::Limit,
    registry::{FIRST, report},
    timer::in_time,
};

/// How long a cancel may take to be accepted by a session that is being closed: 1 s. A session that died takes nothing, and what
/// comes next closes it anyway.
pub(crate) const BEFORE_CLOSE: Duration = Duration::from_secs(1);

/// A task reads a stream of a call on, to see its end, until this is dropped.
pub(crate) struct Reading {
    exchange: Arc<Exchange>,
    call: CallId,
}

// === impl Reading ===

impl Reading {
    pub(crate) fn new(exchange: Arc<Exchange>, call: CallId) -> Self {
        exchange.read_on(call);
        Self { exchange, call }
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        self.exchange.lose_sight(self.call);
    }
}

// === impl Attachment ===

impl Attachment {
    /// Says that nobody reads the stream, because its client has gone or because something inside let
    /// go of it.
    pub(crate) fn drop_stream(&self) {
        let (client_left, going) = {
            let mut state = self.exchange.state();
            let resumed = self.generation != FIRST;
            let going = state.going.take_if(|_| resumed);
            (resumed || state.phase == Phase::Abandoned, going)
        };
        let cause = match client_left {
            true => going.unwrap_or(DetachCause::HungUp),
            // Unwinding comes through here before it comes to the exchange's guard.
            false if std::thread::panicking() => DetachCause::ServicePanicked,
            false => DetachCause::ResponseDropped,
        };
        self.detach(cause, false);
    }
}

// === impl Locked ===

impl Locked {
    /// The session manager has the call. Gives out who would have cancelled it without one.
    fn bind_to(&mut self, canceller: Arc<dyn Canceller>) -> Option<Arc<dyn Canceller>> {
        self.handover = Handover::Opening(None);
        self.request = RequestBody::Settled(Settled::Plain);
        self.canceller.replace(canceller)
    }
}

// === impl Exchange ===

impl Exchange {
    /// Takes a call from the typed message that the session manager was given. `None` if it is not to
    /// be tracked. Calls that it supersedes are cancelled first.
    ///
    /// A cancel waits from here on until the session manager has taken the request, see [`opened`](Self::opened).
    pub(crate) fn bind(
        self: &Arc<Self>,
        mut call: CallInfo,
        canceller: Arc<dyn Canceller>,
        fingerprint: impl FnOnce() -> u64,
    ) -> Option<CallId> {
        if matches!(self.session, SessionHeader::Doubtful) || call.method() == "initialize" {
            return None;
        }
        let key = call.key(canceller.scope())?;
        if self.info().is_none() && !self.instance.registry.has_room() {
            self.state().request = RequestBody::Settled(Settled::Other);
            self.pass_by(&call, &key);
            return None;
        }
        match self.info() {
            Some(known) => call.set_policy(known.policy()),
            None => call.set_policy(self.instance.options.policy_for(&call)),
        }
        if call.policy().supersede {
            call.set_fingerprint(fingerprint());
            self.supersede(&key.session, &call);
        }
        self.take_span();
        let id = call.id();
        let mut state = self.state();
        if self.info().is_some() {
            drop(state);
            return self.rebind(call, key, canceller);
        }
        if state.is_answered {
            state.request = RequestBody::Settled(Settled::Other);
            drop(state);
            self.leave_to(&key);
            self.completed_unseen(&call);
            return None;
        }
        let entered = self.enter(call, Some(key), true);
        let replay = state.bind_to(canceller);
        // The body is not read any more.
        self.body_ended.store(false, Ordering::Relaxed);
        drop(state);
        // It owns a copy of the request's head, and whatever that owns.
        drop(replay);
        self.entered(entered);
        Some(id)
    }

    /// The session manager took the request of a call, or gave it up: what waited for that is done now.
    pub(crate) fn opened(self: &Arc<Self>, id: CallId) {
        let (due, canceller, phase) = {
            let mut state = self.state();
            let Handover::Opening(due) = &mut state.handover else {
                return;
            };
            let due = due.take();
            state.handover = Handover::Open {
                cancelled: due.is_some(),
            };
            (due, state.canceller.clone(), state.phase)
        };
        let Some(call) = self.call(id) else {
            return;
        };
        match due.zip(canceller) {
            Some(((reason, announced), canceller)) => {
                self.inject(id, canceller.cancel(call, reason), self.span());
                drop(announced);
            }
            None if phase == Phase::Abandoned => {
                self.let_go(call, FIRST, DetachCause::HungUp, false)
            }
            None => {}
        }
    }

    /// A call is not tracked, because there is no room for it.
    #[cold]
    fn pass_by(&self, call: &CallInfo, key: &Key) {
        self.leave_to(key);
        self.untracked(call, Limit::Calls);
    }

    /// Of a call that is not tracked, an older one with its id leaves: a cancel of that one would meet this.
    fn leave_to(&self, key: &Key) {
        let older = self.instance.registry.find(key);
        if let Some((older, exchange)) = older
            && let Some(finished) = exchange.at_home(|core| core.finish(older, None)).flatten()
        {
            exchange.left_unseen(older, finished);
        }
    }

    /// The body was read before the session manager got the message: the same call, known better. One that was
    /// cancelled meanwhile is handed over all the same, and its cancel follows it.
    #[cold]
    fn rebind(
        self: &Arc<Self>,
        typed: CallInfo,
        key: Key,
        canceller: Arc<dyn Canceller>,
    ) -> Option<CallId> {
        let Lodging { info: call, home } = self.call.get()?;
        if *call.request_id() != key.request || call.session_id() != Some(&key.session.id) {
            return None;
        }
        call.learn(typed);
        let Key { session, request } = key;
        let mut state = self.state();
        // What cancels it from now on finds the name under which its server knows it.
        let (left, later) = home.begin(|core| core.rename(call.id(), &session.scope, request));
        let replay = state.bind_to(canceller);
        drop(state);
        later.done();
        drop(replay);
        report(left);
        self.tell_decided();
        if !self.is_in_flight(call.id())
            && let Some(reason) = self.signal.reason()
            && let Handover::Opening(due) = &mut self.state().handover
        {
            due.get_or_insert((reason, None));
        }
        Some(call.id())
    }

    /// Cancels a call of a session that is being closed, and waits until the server took it.
    pub(crate) async fn cancel_before_close(self: Arc<Self>, id: CallId) {
        let reason = CancelReason::SessionClosed;
        let Some(cancelled) = self.cancel_any(id, reason, None) else {
            return;
        };
        if self.is_call_over() {
            self.hand_over();
        }
        if let Some(injection) = self.injection(id, reason, cancelled) {
            // A session that died by itself takes no message, and has stopped its handlers. Whatever
            // becomes of this, the session is closed next.
            let _result = in_time(BEFORE_CLOSE, injection).await;
        }
    }

    /// Cancels the detached calls of a session that `call` repeats.
    #[cold]
    pub(super) fn supersede(&self, session: &SessionKey, call: &CallInfo) {
        for (id, exchange) in self.instance.registry.detached_in(session) {
            if exchange
                .call(id)
                .is_some_and(|older| call.supersedes(older))
            {
                exchange.cancel_ahead(id, CancelReason::Superseded);
            }
        }
    }

    /// Cancels a detached call, with its injection under way before this returns: a message that is sent to
    /// the server next comes after it, unless the server has no room for either.
    fn cancel_ahead(self: &Arc<Self>, id: CallId, reason: CancelReason) {
        let span = self.span();
        let finish = |core: &mut Core, ended| core.finish_detached(id, ended);
        let Some(mut injection) = self.cancel_detached(None, id, reason, finish) else {
            return;
        };
        match injection
            .as_mut()
            .poll(&mut Context::from_waker(Waker::noop()))
        {
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(error)) => span.in_scope(|| self.cancel_failed(id, &error)),
            Poll::Pending => self.inject(id, injection, span),
        }
    }

    /// The answer of its call comes by. Given back if no stream will give it out.
    pub(crate) fn pass(&self, answer: Copied) -> Option<Copied> {
        let passage = &mut self.state().passage;
        match passage {
            Passage::Closed => Some(answer),
            Passage::Open | Passage::Passed(_) => {
                *passage = Passage::Passed(answer);
                None
            }
        }
    }

    /// The last stream of its call has ended without the answer, which is given out if it came by before.
    pub(crate) fn close_passage(&self) -> Option<Copied> {
        let former = mem::replace(&mut self.state().passage, Passage::Closed);
        match former {
            Passage::Passed(answer) => Some(answer),
            Passage::Open | Passage::Closed => None,
        }
    }

    /// Its call has a stream again.
    pub(crate) fn open_passage(&self) {
        let passage = &mut self.state().passage;
        if matches!(passage, Passage::Closed) {
            *passage = Passage::Open;
        }
    }

    /// Its call is about to wait for a cancel that means an older one, or has done so.
    pub(crate) fn wait_behind_cancel(&self, waits: bool) {
        self.is_behind_cancel.store(waits, Ordering::Release);
    }

    pub(crate) fn is_behind_cancel(&self) -> bool {
        self.is_behind_cancel.load(Ordering::Acquire)
    }

    /// Lets go of the streams that are open: what lies in them is read on elsewhere.
    pub(crate) fn let_streams_go(&self) {
        let outlets = self.state().last_words.outlets();
        for outlet in outlets {
            outlet.close();
        }
    }
}

#[cfg(test)]
mod tests;
