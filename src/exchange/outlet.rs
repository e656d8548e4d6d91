//! The message for clients that are still attached when their call is cancelled here.
//!
//! Before there is a head, the response future answers with it. After the head, every open stream of the call carries it: that
//! of the POST, or of a resume. The inner service's body is dropped first, so that a client that does not read holds nothing up.
//!
//! A session manager sees the answer before the layer does. Until the stream that carries it has ended, a drain waits for it
//! ([`Delivering`]).

use std::{
    sync::{Arc, Weak, atomic::Ordering},
    task::Waker,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use super::state::{Exchange, RequestKind};
use crate::{
    call::{CallId, CallInfo, CancelReason},
    jsonrpc,
    registry::Outlet,
    timer::{OnDeadline, TimerHandle},
};

/// The answer of a call on its way from its session manager to its client. A drain waits as long as one lives.
pub(crate) struct Delivering(Arc<Exchange>);

// === impl Delivering ===

impl Drop for Delivering {
    fn drop(&mut self) {
        self.0.instance.registry.end_delivery();
    }
}

// === impl Exchange ===

impl Exchange {
    /// A stream of its call is open, or of the call that it resumes. Returns the exchange of the latter, if there is one.
    pub(crate) fn open(&self, outlet: Weak<dyn Outlet>) -> Option<Arc<Exchange>> {
        let mut resumed = None;
        match &self.kind {
            RequestKind::Resume(resume) => {
                resumed = resume.target(&self.instance);
                if let Some(exchange) = &resumed {
                    exchange.add_outlet(outlet.clone());
                }
            }
            _ if self.info().is_some() => {
                if self.is_call_over()
                    && let Some(next) = self.next_call()
                {
                    return next.open(outlet);
                }
                self.add_outlet(outlet);
                // One of the two sees the other: who ends its call, and this.
                if self.is_call_over() || self.outlasts_the_server() {
                    self.hand_over();
                }
                return None;
            }
            _ => self.add_outlet(outlet.clone()),
        }
        self.instance.registry.open(outlet);
        resumed
    }

    /// Whether its call has ended. A stream of it that then has nothing to say would be nobody's.
    pub(crate) fn is_call_over(&self) -> bool {
        self.call_over.load(Ordering::Acquire)
    }

    /// Its call has ended. `true` if older streams of it are open, which nothing may come to any more. (The newest
    /// is the one on which the answer came, or the one that its client left.)
    pub(super) fn note_call_over(&self, is_delivering: bool) -> bool {
        let mut state = self.state();
        state.is_delivering = is_delivering && state.is_bound();
        // After that: who sees that it is over sees how.
        self.call_over.store(true, Ordering::Release);
        state.last_words.has_older()
    }

    /// The answer of its call, if that is on its way to a client that is there.
    pub(crate) fn delivering(self: &Arc<Self>) -> Option<Delivering> {
        if !self.is_call_over() || !self.state().is_delivering {
            return None;
        }
        self.instance.registry.begin_delivery();
        Some(Delivering(self.clone()))
    }

    /// Has the registry keep its open streams as well: a drain would not find them by a call.
    #[cold]
    pub(crate) fn hand_over(&self) {
        let (mut outlets, is_delivering) = {
            let state = self.state();
            (state.last_words.open(), state.is_delivering)
        };
        let registry = &self.instance.registry;
        // The newest stream carries the answer, and ends with it.
        if let Some(newest) = outlets.pop_if(|_| is_delivering) {
            registry.keep(newest);
        }
        for outlet in outlets {
            registry.open(outlet);
        }
    }

    /// Whether the server has come to its end, and its call goes on all the same.
    fn outlasts_the_server(&self) -> bool {
        let registry = &self.instance.registry;
        registry.is_closed() && self.info().is_some_and(CallInfo::must_run_on)
    }

    fn add_outlet(&self, outlet: Weak<dyn Outlet>) {
        let said = self.state().last_words.add(outlet);
        if let Some((message, outlet)) = said {
            outlet.tell(message);
            outlet.close();
        }
    }

    /// Tells whoever is attached that its call was cancelled.
    #[cold]
    pub(super) fn tell_client(&self, id: CallId, reason: CancelReason) {
        let Some(call) = self.call(id) else {
            return;
        };
        let message = jsonrpc::cancelled(call.request_id(), reason);
        let outlets = self.state().last_words.say(message.clone());
        for outlet in outlets {
            outlet.tell(message.clone());
            outlet.close();
        }
        self.closed.store(true, Ordering::Release);
        self.answerer.wake();
    }

    /// Has the response future woken for what [`last_words`](Self::last_words) has then.
    pub(crate) fn notify(&self, waker: &Waker) {
        self.answerer.register(waker);
    }

    /// The JSON-RPC answer to its call, once that was cancelled here.
    pub(crate) fn last_words(&self) -> Option<Bytes> {
        if !self.closed.load(Ordering::Acquire) {
            return None;
        }
        self.state().last_words.message()
    }

    /// Its call, if it has not ended.
    pub(crate) fn call_in_flight(&self) -> Option<&CallInfo> {
        let call = self.info()?;
        self.is_in_flight(call.id()).then_some(call)
    }

    /// How often its streams are probed.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        self.instance.options.keep_alive
    }

    /// How long its client may leave a stream unread.
    pub(crate) fn stall_timeout(&self) -> Option<Duration> {
        self.instance.options.stall_timeout
    }

    /// Has a stream of it looked at, after `timeout` for the first time.
    pub(crate) fn watch(
        &self,
        stream: Weak<dyn OnDeadline>,
        timeout: Duration,
    ) -> Option<TimerHandle> {
        let at = Instant::now().checked_add(timeout)?;
        Some(self.instance.registry.timer().set(at, stream))
    }
}
