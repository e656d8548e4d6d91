//! Open streams that a drain may not find by a call in flight.
//!
//! These are standalone and resumed streams, those of ended calls, and those of routes without MCP.

use std::{
    mem,
    sync::{Arc, Weak},
};

use bytes::Bytes;

/// Minimum number of streams before ended ones are removed: 16. Fewer are not worth a scan.
const MIN_PURGE_LEN: usize = 16;

/// A handle to an open response body.
pub(crate) trait StreamHandle: Send + Sync {
    /// Sends a JSON-RPC message as soon as it can be injected.
    fn send(&self, message: Bytes);

    /// Drops the inner body, and ends the stream after the messages that were sent.
    fn close(&self);
}

#[derive(Default)]
pub(super) struct OpenStreams {
    open: Vec<Weak<dyn StreamHandle>>,
    /// Number of streams after the last removal of ended ones.
    len_after_purge: usize,
}

// === impl OpenStreams ===

impl OpenStreams {
    pub(super) fn add(&mut self, stream: Weak<dyn StreamHandle>) {
        if self.open.len() >= MIN_PURGE_LEN.max(2 * self.len_after_purge) {
            self.open.retain(|stream| stream.strong_count() > 0);
            self.len_after_purge = self.open.len();
            self.open.shrink_to(2 * self.len_after_purge);
        }
        self.open.push(stream);
    }

    pub(super) fn take(&mut self) -> Vec<Arc<dyn StreamHandle>> {
        self.len_after_purge = 0;
        let streams = mem::take(&mut self.open);
        streams.iter().filter_map(Weak::upgrade).collect()
    }
}
