//! Retains answers to calls whose streams ended early.
//!
//! A server may end a stream while its call keeps running (SEP-1699). rmcp also ends a stream when it refuses a resume, or when
//! its event store refuses the answer. In all three cases, rmcp drops the answer (`late_answer` in ARCHITECTURE.md, Workarounds).
//!
//! A stream's end is noticed only when the stream is polled, which can be before or after the answer passes through the
//! transport. Where streams can end early, the transport therefore offers each answer to its exchange. If the call's last stream
//! has already ended, the answer is retained for the client. Otherwise the exchange holds on to a copy until a stream yields the
//! answer or the last stream ends.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use rmcp::{
    model::ServerJsonRpcMessage, transport::streamable_http_server::session::ServerSseMessage,
};

use super::replay;
use crate::{
    call::CallId,
    exchange::{Exchange, OpaqueMessage},
};

/// Tracks whether a session's streams can end before their calls are answered. Never reset.
#[derive(Debug, Default)]
pub(super) struct EarlyStreamEnds {
    /// Whether streams can end early in any of the manager's sessions.
    ///
    /// True if the manager is not rmcp's own, has an event store, or can be reached by other code.
    in_manager: Arc<AtomicBool>,
    /// Whether this session's streams can end early.
    ///
    /// True once its client has resumed a call, or one of its streams has ended before the answer was delivered.
    in_session: AtomicBool,
}

// === impl EarlyStreamEnds ===

impl EarlyStreamEnds {
    pub(super) fn new(in_manager: Arc<AtomicBool>) -> Self {
        Self {
            in_manager,
            in_session: AtomicBool::new(false),
        }
    }

    pub(super) fn mark_possible(&self) {
        self.in_session.store(true, Ordering::Relaxed);
    }

    pub(super) fn are_possible(&self) -> bool {
        self.in_manager.load(Ordering::Relaxed) || self.in_session.load(Ordering::Relaxed)
    }
}

// === impl Exchange ===

impl Exchange {
    /// Offers the call's answer as it passes through the transport.
    pub(super) fn offer_answer(&self, id: CallId, answer: &ServerJsonRpcMessage) {
        if let Some(answer) = self.offer_late_answer(Arc::new(answer.clone())) {
            self.complete_with_late_answer(id, answer);
        }
    }

    /// Records that the call's last stream ended before the answer was delivered.
    pub(super) fn on_last_stream_end(&self, id: CallId) {
        if let Some(answer) = self.close_late_answer() {
            self.complete_with_late_answer(id, answer);
        }
    }

    fn complete_with_late_answer(&self, id: CallId, answer: OpaqueMessage) {
        let mut event = ServerSseMessage::default();
        event.message = answer.downcast().ok();
        self.on_answered(id, || replay::retain(&event, None));
    }
}
