//! Answers on their way from a session's transport to the stream of their call.
//!
//! A server may end a stream whose call goes on (SEP-1699), and rmcp ends one for a resume that it refuses; the answer
//! of such a call is then dropped. The end of a stream is seen when it is polled, which may be after the answer came
//! by. So where streams can end early, the exchange of a call keeps a copy of its answer from the
//! transport until the answer, or the end, is seen in the stream.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use rmcp::{
    model::ServerJsonRpcMessage, transport::streamable_http_server::session::ServerSseMessage,
};

use super::kept;
use crate::{call::CallId, exchange::Exchange};

/// Whether the streams of a session can end before their calls are answered. Once they can, they always can.
#[derive(Debug, Default)]
pub(super) struct EarlyEnds {
    /// Those of all sessions of its manager: somebody else can reach that.
    of_all: Arc<AtomicBool>,
    /// Its own: a client came back.
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
    /// Keeps a copy of the answer of its call.
    pub(super) fn pass(&self, answer: &ServerJsonRpcMessage) {
        self.keep_in_passing(Some(Arc::new(answer.clone())));
    }

    /// The end of a call's stream was seen: if the answer came by before, the call has completed.
    pub(super) fn passed(&self, id: CallId) {
        let answer = self.keep_in_passing(None);
        if let Some(answer) = answer.and_then(|answer| answer.downcast().ok()) {
            let mut event = ServerSseMessage::default();
            event.message = Some(answer);
            self.answered(id, kept::keep(&event, None));
        }
    }
}
