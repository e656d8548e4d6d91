//! The message for clients that are still attached when their call is cancelled here.
//!
//! Before there is a head, the response future answers with it. After the head, every open stream of the call carries it: that
//! of the POST, or of a resume. The inner service's body is dropped first, so that a client that does not read holds nothing up.

use std::{
    sync::{Weak, atomic::Ordering},
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
    timer::{Ticket, Timed},
};

// === impl Exchange ===

impl Exchange {
    /// A stream of its call is open, or of the call that it resumes.
    pub(crate) fn open(&self, outlet: Weak<dyn Outlet>) {
        match &self.kind {
            RequestKind::Resume(resume) => {
                if let Some(exchange) = resume.target(&self.instance) {
                    exchange.add_outlet(outlet.clone());
                }
            }
            _ if self.info().is_some() => {
                self.add_outlet(outlet);
                // One of the two sees the other: who ends its call, and this.
                if self.is_call_over() || self.outlasts_the_server() {
                    self.hand_over();
                }
                return;
            }
            _ => self.add_outlet(outlet.clone()),
        }
        self.instance.registry.open(outlet);
    }

    /// Whether its call has ended. A stream of it that then has nothing to say would be nobody's.
    pub(crate) fn is_call_over(&self) -> bool {
        self.call_over.load(Ordering::Acquire)
    }

    /// Its call has ended. `true` if older streams of it are open, which nothing may come to any more. (The newest
    /// is the one on which the answer came, or the one that its client left.)
    pub(super) fn note_call_over(&self) -> bool {
        self.call_over.store(true, Ordering::Release);
        let state = self.state();
        state.last_words.has_older()
    }

    /// Has the registry keep its open streams as well: a drain would not find them by a call.
    #[cold]
    pub(crate) fn hand_over(&self) {
        let outlets = self.state().last_words.open();
        for outlet in outlets {
            self.instance.registry.open(outlet);
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
    pub(crate) fn watch(&self, stream: Weak<dyn Timed>, timeout: Duration) -> Option<Ticket> {
        let at = Instant::now().checked_add(timeout)?;
        Some(self.instance.registry.timer().set(at, stream))
    }
}
