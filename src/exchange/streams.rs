//! The message for clients that are still connected when their call is cancelled here.
//!
//! Before the response head, the response future answers with this message. After the head, the message is sent on every open stream
//! of the call: those of the POST and of resumes. The inner service's body is dropped before the client reads the message. So a
//! client that is not reading delays nothing.
//!
//! A session manager observes the answer before the layer does. Until the stream that carries it has ended, a drain waits for it
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

/// The answer of a call on its way from its session manager to its client. A drain waits until all are dropped.
pub(crate) struct Delivering(Arc<Exchange>);

// === impl Delivering ===

impl Drop for Delivering {
    fn drop(&mut self) {
        self.0.shared.registry.end_delivery();
    }
}

// === impl Exchange ===

impl Exchange {
    /// Adds an open stream of its call, or of the call that it resumes.
    ///
    /// A stream that a drain would not find through a call in flight is also registered. Returns the exchange of the resumed call, or
    /// `None` if the stream does not resume a call in flight.
    pub(crate) fn on_stream_opened(&self, stream: Weak<dyn StreamHandle>) -> Option<Arc<Exchange>> {
        let mut resumed = None;
        match &self.kind {
            RequestKind::Resume(resume) => {
                resumed = resume.target(&self.shared);
                if let Some(exchange) = &resumed {
                    exchange.add_stream(stream.clone());
                }
            }
            _ if self.info().is_some() => {
                if self.has_call_ended()
                    && let Some(next) = self.next_call()
                {
                    return next.on_stream_opened(stream);
                }
                self.add_stream(stream);
                // The call may end concurrently. Adding the stream and ending the call both take the state lock. So either the end
                // finds the stream, or this code finds that the call has ended.
                if self.has_call_ended() || self.may_outlive_drain() {
                    self.register_orphaned_streams();
                }
                return None;
            }
            _ => self.add_stream(stream.clone()),
        }
        self.shared.registry.register_stream(stream);
        resumed
    }

    /// Returns `true` if its call has ended. A stream of the call that is then still open must be registered, so that a drain
    /// finds it.
    pub(crate) fn has_call_ended(&self) -> bool {
        self.has_call_ended.load(Ordering::Acquire)
    }

    /// Marks its call as ended. Returns `true` if older streams of the call are open.
    ///
    /// These may receive nothing more, because the newest stream has the answer or has lost its client.
    pub(super) fn mark_call_ended(&self, is_delivering: bool) -> bool {
        let mut state = self.state();
        state.is_delivering = is_delivering && state.is_bound();
        // Stored after `is_delivering`, so that a thread that finds the call ended finds that flag as well.
        self.has_call_ended.store(true, Ordering::Release);
        state.streams.has_older()
    }

    /// Returns a guard if its call's answer is on its way to a connected client.
    pub(crate) fn delivering(self: &Arc<Self>) -> Option<Delivering> {
        if !self.has_call_ended() || !self.state().is_delivering {
            return None;
        }
        self.shared.registry.begin_delivery();
        Some(Delivering(self.clone()))
    }

    /// Registers its open streams, because a drain would not find them through a call.
    #[cold]
    pub(crate) fn register_orphaned_streams(&self) {
        let (mut streams, is_delivering) = {
            let state = self.state();
            (state.streams.open(), state.is_delivering)
        };
        let registry = &self.shared.registry;
        // The newest stream carries the answer and ends with it.
        if let Some(newest) = streams.pop_if(|_| is_delivering) {
            registry.register_ending_stream(newest);
        }
        for stream in streams {
            registry.register_stream(stream);
        }
    }

    /// Returns `true` if its call, as a task, may still run after the server has been drained.
    fn may_outlive_drain(&self) -> bool {
        let registry = &self.shared.registry;
        registry.is_closed() && self.info().is_some_and(CallInfo::is_task)
    }

    /// Adds a stream. If the call was cancelled here, sends the error on the stream and closes it.
    fn add_stream(&self, stream: Weak<dyn StreamHandle>) {
        let error = self.state().streams.add(stream);
        if let Some((message, stream)) = error {
            stream.send(message);
            stream.close();
        }
    }

    /// Sends the error of a cancelled call on its open streams.
    #[cold]
    pub(super) fn send_cancel_error(&self, id: CallId, reason: CancelReason) {
        let Some(call) = self.call(id) else {
            return;
        };
        let message = jsonrpc::cancelled(call.request_id(), reason);
        let streams = self.state().streams.set_error(message.clone());
        for stream in streams {
            stream.send(message.clone());
            stream.close();
        }
        self.is_cancelled_here.store(true, Ordering::Release);
        self.response_waker.wake();
    }

    /// Sets the waker of the response future. It is woken once [`cancel_response`](Self::cancel_response) returns the error.
    pub(crate) fn set_response_waker(&self, waker: &Waker) {
        self.response_waker.register(waker);
    }

    /// Returns the JSON-RPC error of its call, once the call was cancelled here.
    pub(crate) fn cancel_response(&self) -> Option<Bytes> {
        if !self.is_cancelled_here.load(Ordering::Acquire) {
            return None;
        }
        self.state().streams.error()
    }

    /// Returns its call if the call is in flight, and `None` otherwise.
    pub(crate) fn call_in_flight(&self) -> Option<&CallInfo> {
        let call = self.info()?;
        self.is_in_flight(call.id()).then_some(call)
    }

    /// Returns the interval at which its streams are probed.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        self.shared.options.keep_alive
    }

    /// Returns how long its client may leave a stream unread.
    pub(crate) fn stall_timeout(&self) -> Option<Duration> {
        self.shared.options.stall_timeout
    }

    /// Sets the timer of a stream. Its first deadline is `timeout` from now.
    ///
    /// Returns `None` if the deadline is too far in the future for the clock.
    pub(crate) fn set_stream_timer(
        &self,
        stream: Weak<dyn OnDeadline>,
        timeout: Duration,
    ) -> Option<TimerHandle> {
        let at = Instant::now().checked_add(timeout)?;
        Some(self.shared.registry.timer().set(at, stream))
    }
}
