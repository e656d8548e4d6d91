//! An exchange's open streams, and the error that notifies its client of a cancellation.
//!
//! The client receives this error when this server cancels the call. If the response head is not ready yet, the response future resolves to
//! it. Otherwise it is sent on every open stream of the call, whether it was opened by the POST or by a resume. The inner service's body is
//! dropped before the client reads the error, so a client that has stopped reading cannot hold anything up.
//!
//! This is also where streams are registered for a drain. A session manager observes the answer before the layer does, so a drain waits
//! until the stream carrying the answer has ended ([`DeliveryGuard`]).

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

/// Guards an answer on its way from the session manager to the client.
///
/// A drain waits until all of these guards have been dropped.
pub(crate) struct DeliveryGuard(Arc<Exchange>);

// === impl DeliveryGuard ===

impl Drop for DeliveryGuard {
    fn drop(&mut self) {
        self.0.shared.registry.end_delivery();
    }
}

// === impl Exchange ===

impl Exchange {
    /// Adds an open stream to this exchange, or to the exchange whose call this exchange resumes.
    ///
    /// If a drain could not find the stream through an in-flight call, the stream is also registered. Returns the resumed call's
    /// exchange, or `None` if the stream does not resume an in-flight call.
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
                // The call may end concurrently. Adding the stream and ending the call both take the state lock, so either ending the call
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

    /// Returns `true` if the call has ended.
    ///
    /// Streams still open at that point must be registered, so that a drain can find them.
    pub(crate) fn has_call_ended(&self) -> bool {
        self.has_call_ended.load(Ordering::Acquire)
    }

    /// Marks the call as ended. Returns `true` if older streams of the call are still open.
    ///
    /// The older streams could stay open without receiving anything else, because the newest stream has the answer or its client has
    /// disconnected.
    pub(super) fn mark_call_ended(&self, is_delivering: bool) -> bool {
        let mut state = self.state();
        state.is_delivering = is_delivering && state.is_bound();
        // Store this after `is_delivering`, so that a thread that sees the call as ended also sees that flag.
        self.has_call_ended.store(true, Ordering::Release);
        state.streams.has_older()
    }

    /// Returns a guard if the call's answer is on its way to a connected client.
    pub(crate) fn delivery_guard(self: &Arc<Self>) -> Option<DeliveryGuard> {
        if !self.has_call_ended() || !self.state().is_delivering {
            return None;
        }
        self.shared.registry.begin_delivery();
        Some(DeliveryGuard(self.clone()))
    }

    /// Registers the open streams that a drain could not find through a call.
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

    /// Returns `true` if the server has been drained and the call runs as a task.
    ///
    /// A drain does not end tasks.
    fn may_outlive_drain(&self) -> bool {
        let registry = &self.shared.registry;
        registry.is_closed() && self.info().is_some_and(CallInfo::is_task)
    }

    /// Adds a stream. If the error has already been set, sends it on this stream and closes the stream.
    fn add_stream(&self, stream: Weak<dyn StreamHandle>) {
        let error = self.state().streams.add(stream);
        if let Some((message, stream)) = error {
            stream.send(message);
            stream.close();
        }
    }

    /// Sends a cancelled call's error on the open streams.
    #[cold]
    pub(super) fn send_cancel_error(&self, id: CallId, reason: CancelReason) {
        let Some(call) = self.call(id) else {
            return;
        };
        let message = jsonrpc::cancellation_error(call.request_id(), reason);
        let streams = self.state().streams.set_error(message.clone());
        for stream in streams {
            stream.send(message.clone());
            stream.close();
        }
        self.is_cancelled_here.store(true, Ordering::Release);
        self.response_waker.wake();
    }

    /// Sets the response future's waker. It is woken once [`cancellation_error`](Self::cancellation_error) returns the error.
    pub(crate) fn set_response_waker(&self, waker: &Waker) {
        self.response_waker.register(waker);
    }

    /// Returns the JSON-RPC error with which this server has cancelled the call, if any.
    pub(crate) fn cancellation_error(&self) -> Option<Bytes> {
        if !self.is_cancelled_here.load(Ordering::Acquire) {
            return None;
        }
        self.state().streams.error()
    }

    /// Returns this exchange's call, or `None` if it has none or the call is no longer in flight.
    pub(crate) fn call_in_flight(&self) -> Option<&CallInfo> {
        let call = self.info()?;
        self.is_in_flight(call.id()).then_some(call)
    }

    /// Returns the interval at which streams are probed.
    pub(crate) fn keep_alive(&self) -> Option<Duration> {
        self.shared.options.keep_alive
    }

    /// Returns how long a client may leave a stream unread.
    pub(crate) fn stall_timeout(&self) -> Option<Duration> {
        self.shared.options.stall_timeout
    }

    /// Sets a stream's timer, with the first deadline `timeout` from now.
    ///
    /// Returns `None` if the deadline overflows [`Instant`].
    pub(crate) fn set_stream_timer(
        &self,
        stream: Weak<dyn OnDeadline>,
        timeout: Duration,
    ) -> Option<TimerHandle> {
        let at = Instant::now().checked_add(timeout)?;
        Some(self.shared.registry.timer().set(at, stream))
    }
}
