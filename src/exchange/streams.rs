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
    registry::StreamHandle,
    timer::{OnDeadline, TimerHandle},
};

/// The answer of a call on its way from its session manager to its client. A drain waits as long as one lives.
pub(crate) struct Delivering(Arc<Exchange>);

// === impl Delivering ===

impl Drop for Delivering {
    fn drop(&mut self) {
        self.0.shared.registry.end_delivery();
    }
}

// === impl Exchange ===

impl Exchange {
    /// A stream of its call is open, or of the call that it resumes. Returns the exchange of the latter, if there is one.
    pub(crate) fn on_stream_opened(&self, outlet: Weak<dyn StreamHandle>) -> Option<Arc<Exchange>> {
        let mut resumed = None;
        match &self.kind {
            RequestKind::Resume(resume) => {
                resumed = resume.target(&self.shared);
                if let Some(exchange) = &resumed {
                    exchange.add_stream(outlet.clone());
                }
            }
            _ if self.info().is_some() => {
                if self.has_call_ended()
                    && let Some(next) = self.next_call()
                {
                    return next.on_stream_opened(outlet);
                }
                self.add_stream(outlet);
                // One of the two sees the other: who ends its call, and this.
                if self.has_call_ended() || self.may_outlive_drain() {
                    self.register_orphaned_streams();
                }
                return None;
            }
            _ => self.add_stream(outlet.clone()),
        }
        self.shared.registry.register_stream(outlet);
        resumed
    }

    /// Whether its call has ended. A stream of it that then has nothing to say would be nobody's.
    pub(crate) fn has_call_ended(&self) -> bool {
        self.has_call_ended.load(Ordering::Acquire)
    }

    /// Its call has ended. `true` if older streams of it are open, which nothing may come to any more. (The newest
    /// is the one on which the answer came, or the one that its client left.)
    pub(super) fn mark_call_ended(&self, is_delivering: bool) -> bool {
        let mut state = self.state();
        state.is_delivering = is_delivering && state.is_bound();
        // After that: who sees that it is over sees how.
        self.has_call_ended.store(true, Ordering::Release);
        state.streams.has_older()
    }

    /// The answer of its call, if that is on its way to a client that is there.
    pub(crate) fn delivering(self: &Arc<Self>) -> Option<Delivering> {
        if !self.has_call_ended() || !self.state().is_delivering {
            return None;
        }
        self.shared.registry.begin_delivery();
        Some(Delivering(self.clone()))
    }

    /// Has the registry keep its open streams as well: a drain would not find them by a call.
    #[cold]
    pub(crate) fn register_orphaned_streams(&self) {
        let (mut outlets, is_delivering) = {
            let state = self.state();
            (state.streams.open(), state.is_delivering)
        };
        let registry = &self.shared.registry;
        // The newest stream carries the answer, and ends with it.
        if let Some(newest) = outlets.pop_if(|_| is_delivering) {
            registry.register_ending_stream(newest);
        }
        for outlet in outlets {
            registry.register_stream(outlet);
        }
    }

    /// Whether the server has come to its end, and its call goes on all the same.
    fn may_outlive_drain(&self) -> bool {
        let registry = &self.shared.registry;
        registry.is_closed() && self.info().is_some_and(CallInfo::is_task)
    }

    fn add_stream(&self, outlet: Weak<dyn StreamHandle>) {
        let said = self.state().streams.add(outlet);
        if let Some((message, outlet)) = said {
            outlet.send(message);
            outlet.close();
        }
    }

    /// Tells whoever is attached that its call was cancelled.
    #[cold]
    pub(super) fn send_cancel_error(&self, id: CallId, reason: CancelReason) {
        let Some(call) = self.call(id) else {
            return;
        };
        let message = jsonrpc::cancelled(call.request_id(), reason);
        let outlets = self.state().streams.set_error(message.clone());
        for outlet in outlets {
            outlet.send(message.clone());
            outlet.close();
        }
        self.is_cancelled_here.store(true, Ordering::Release);
        self.response_waker.wake();
    }

    /// Has the response future woken for what [`last_words`](Self::last_words) has then.
    pub(crate) fn set_response_waker(&self, waker: &Waker) {
        self.response_waker.register(waker);
    }

    /// The JSON-RPC answer to its call, once that was cancelled here.
    pub(crate) fn cancel_response(&self) -> Option<Bytes> {
        if !self.is_cancelled_here.load(Ordering::Acquire) {
            return None;
        }
        self.state().streams.error()
    }

    /// Its call, if it has not ended.
    pub(crate) fn call_in_flight(&self) -> Option<&CallInfo> {
        let call = self.info()?;
        self.is_in_flight(call.id()).then_some(call)
    }

    /// How often its streams are probed.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        self.shared.options.keep_alive
    }

    /// How long its client may leave a stream unread.
    pub(crate) fn stall_timeout(&self) -> Option<Duration> {
        self.shared.options.stall_timeout
    }

    /// Has a stream of it looked at, after `timeout` for the first time.
    pub(crate) fn set_stream_timer(
        &self,
        stream: Weak<dyn OnDeadline>,
        timeout: Duration,
    ) -> Option<TimerHandle> {
        let at = Instant::now().checked_add(timeout)?;
        Some(self.shared.registry.timer().set(at, stream))
    }
}
