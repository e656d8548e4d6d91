//! Answers on their way from a session's transport to the stream of their call.
//!
//! A server may end a stream whose call goes on (SEP-1699), and rmcp ends one for a resume that it refuses, and for an answer
//! that its event store does not take. The answer of such a call is then dropped. The end of a stream is seen when the stream is
//! polled, before or after the answer comes by. So where streams can end early, each answer is shown to its exchange at the session's transport: if the last stream
//! has ended, the answer is kept for its client. Otherwise a copy stays until the answer or the end is seen in a stream.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use rmcp::{
    model::ServerJsonRpcMessage, transport::streamable_http_server::session::ServerSseMessage,
};

use super::kept;
use crate::{
    call::CallId,
    exchange::{Copied, Exchange},
};

/// Whether the streams of a session can end before their calls are answered. Once they can, they always can.
#[derive(Debug, Default)]
pub(super) struct EarlyEnds {
    /// Of all sessions of the manager, because it has an event store or other code can reach it.
    of_all: Arc<AtomicBool>,
    /// Of this session, because a client came back.
    of_one: AtomicBool,
}

// === impl EarlyEnds ===

impl EarlyEnds {
    pub(super) fn new(of_all: Arc<AtomicBool>) -> Self {
        Self {
            of_all,
            of_one: AtomicBool::new(false),
        }
    }

    pub(super) fn allow(&self) {
        self.of_one.store(true, Ordering::Relaxed);
    }

    pub(super) fn are_possible(&self) -> bool {
        self.of_all.load(Ordering::Relaxed) || self.of_one.load(Ordering::Relaxed)
    }
}

// === impl Exchange ===

impl Exchange {
    /// Notes that the answer of its call comes by at the transport.
    pub(super) fn answer_passes(&self, id: CallId, answer: &ServerJsonRpcMessage) {
        if let Some(answer) = self.pass(Arc::new(answer.clone())) {
            self.answered_in_passing(id, answer);
        }
    }

    /// Notes that the last stream of its call has ended without the answer.
    pub(super) fn has_no_stream(&self, id: CallId) {
        if let Some(answer) = self.close_passage() {
            self.answered_in_passing(id, answer);
        }
    }

    fn answered_in_passing(&self, id: CallId, answer: Copied) {
        let mut event = ServerSseMessage::default();
        event.message = answer.downcast().ok();
        self.answered(id, || kept::keep(&event, None));
    }
}
