//! Open streams that a drain might not find through an in-flight call.
//!
//! These include standalone and resumed streams, and streams whose call has ended or whose request has no call.

use std::{
    mem,
    sync::{Arc, Weak},
};

use bytes::Bytes;

/// Minimum number of streams before ended streams are purged. With fewer streams, a scan is not worthwhile.
const MIN_PURGE_LEN: usize = 16;

/// A handle to an open response body.
pub(crate) trait StreamHandle: Send + Sync {
    /// Sends a JSON-RPC message as soon as it can be injected.
    fn send(&self, message: Bytes);

    /// Drops the inner body and ends the stream after any messages queued by [`send`](Self::send).
    fn close(&self);
}

#[derive(Default)]
pub(super) struct OpenStreams {
    open: Vec<Weak<dyn StreamHandle>>,
    /// Number of streams that remained after the last purge.
    len_after_purge: usize,
}

// === impl OpenStreams ===

impl OpenStreams {
    /// Adds a stream. If the number of streams has doubled, ended streams are purged first.
    pub(super) fn add(&mut self, stream: Weak<dyn StreamHandle>) {
        if self.open.len() >= MIN_PURGE_LEN.max(2 * self.len_after_purge) {
            self.open.retain(|stream| stream.strong_count() > 0);
            self.len_after_purge = self.open.len();
            self.open.shrink_to(2 * self.len_after_purge);
        }
        self.open.push(stream);
    }

    /// Removes and returns the streams still open.
    pub(super) fn take(&mut self) -> Vec<Arc<dyn StreamHandle>> {
        self.len_after_purge = 0;
        let streams = mem::take(&mut self.open);
        streams.iter().filter_map(Weak::upgrade).collect()
    }
}
