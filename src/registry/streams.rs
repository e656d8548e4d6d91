//! Open streams that no call keeps: standalone ones, resumed ones, and those of routes without MCP.

use std::{
    mem,
    sync::{Arc, Weak},
};

use bytes::Bytes;

/// How many may be kept before those that ended are looked for: 16. Fewer are not worth a walk.
const MIN_PURGE_LEN: usize = 16;

/// A response body that can be told something.
pub(crate) trait StreamHandle: Send + Sync {
    /// Sends a JSON-RPC message as soon as it can be put in.
    fn send(&self, message: Bytes);

    /// Lets go of the inner body, and ends after what was told.
    fn close(&self);
}

#[derive(Default)]
pub(super) struct OpenStreams {
    open: Vec<Weak<dyn StreamHandle>>,
    /// How many were left when those that ended were taken out last.
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
