//! Ends a stream, with or without an error.

use std::{mem, sync::atomic::Ordering};

use mcp_cancel_on_disconnect::CallToken;
use tokio::time::Instant;

use super::Stream;
use crate::event_store::event::{Event, error, error_from_json};

/// Marks the call as being ended by its client until the guard is dropped.
pub(in crate::event_store) struct PendingEndGuard(Stream);

// === impl Stream ===

impl Stream {
    /// Ends the stream, with an error from the proxy unless the call has already been answered.
    ///
    /// There is always room for the error. Since the server may still be working on the call, the token is not notified of an
    /// answer. As far as the layer is concerned, the call ends when its client has read the error.
    pub fn end_with_error(&self, code: i32, message: &str) {
        let call = self.0.call.as_ref();
        self.finish(call.map(|(id, _)| error(id, code, message)));
    }

    /// Like [`end_with_error`](Self::end_with_error), but also cancels the call.
    ///
    /// Use this when the answer is lost, but the server may still be working on the call.
    pub(in crate::event_store) fn end_without_answer(&self, code: i32, message: &str) {
        self.lose_answer();
        self.end_with_error(code, message);
    }

    /// Reports to the layer that the answer is lost, so that it cancels the call.
    ///
    /// Does nothing if the call has been cancelled already, or if its client is ending it. Call this before sending the client
    /// an error, because the layer would mistake the error for the answer.
    pub(in crate::event_store) fn lose_answer(&self) {
        if self.0.pending_ends.load(Ordering::Relaxed) > 0 {
            return;
        }
        let token = {
            let mut state = self.state();
            if state.is_cancelled {
                return;
            }
            // Take the token. Otherwise, its cancellation would make the stream evictable before the client gets the error.
            state.token.take()
        };
        if let Some(token) = token {
            token.answer_lost();
        }
    }

    /// Marks a client's request to end the call as pending until the returned guard is dropped.
    ///
    /// The request is either the client's own cancellation or a DELETE. Many servers close the call's stream before they
    /// respond to it, so a stream that ends in the meantime does not mean that the answer is lost.
    pub(in crate::event_store) fn begin_end(&self) -> PendingEndGuard {
        self.0.pending_ends.fetch_add(1, Ordering::Relaxed);
        PendingEndGuard(self.clone())
    }

    /// Ends the stream with an error in place of an answer that can't be forwarded.
    ///
    /// The token is notified that the call has been answered.
    pub(crate) fn replace_answer(&self, code: i32, message: &str) {
        if let Some((id, _)) = &self.0.call
            && self.push_now(error(id, code, message)).is_ok()
        {
            self.end();
        }
    }

    /// Answers the call with the server's own error, given as JSON text, and ends the stream.
    pub(in crate::event_store) fn end_with_server_error(&self, error: &str) {
        if let Some((id, _)) = &self.0.call
            && self.push_now(error_from_json(id, error)).is_ok()
        {
            self.end();
        }
    }

    /// Ends the stream, retaining its events for a client that resumes.
    pub fn end(&self) {
        self.finish(None);
    }

    /// Ends a cancelled call's stream.
    ///
    /// Unless the call has been answered, the stream may now be evicted, because no client is waiting for it any more.
    pub(crate) fn end_cancelled(&self) {
        self.state().is_cancelled = true;
        self.end();
    }

    fn finish(&self, error: Option<Event>) {
        let until = Instant::now() + self.0.retention;
        let (reader, token, is_first, is_evictable) = {
            let mut state = self.state();
            let is_cancelled =
                state.is_cancelled || state.token.as_ref().is_some_and(CallToken::is_cancelled);
            // No client is waiting for a cancelled call's answer.
            let is_evictable = is_cancelled && !state.ring.is_answered();
            if let Some(error) = error {
                state.ring.push_reserved(error);
            }
            state.ring.end();
            let is_first = state.until.is_none();
            state.until.get_or_insert(until);
            let is_evictable = is_evictable && !mem::replace(&mut state.is_evictable, is_evictable);
            let reader = state.reader.take();
            (reader, state.token.take(), is_first, is_evictable)
        };
        drop(token);
        self.0.reader_progress.notify_waiters();
        if let Some(reader) = reader {
            reader.wake();
        }
        if is_first {
            self.expire_at(until);
            if is_evictable {
                self.mark_evictable(until);
            }
        }
    }
}

// === impl PendingEndGuard ===

impl Drop for PendingEndGuard {
    fn drop(&mut self) {
        self.0.0.pending_ends.fetch_sub(1, Ordering::Relaxed);
    }
}
