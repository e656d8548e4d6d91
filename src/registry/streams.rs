//! Open streams that no call keeps: standalone ones, resumed ones, and those of routes without MCP.

use std::{
    mem,
    sync::{Arc, Weak},
};

use bytes::Bytes;

/// How many may be kept before those that ended are looked for: 16. Fewer are not worth a walk.
const FEW: usize = 16;

/// A response body that can be told something.
pub(crate) trait Outlet: Send + Sync {
    /// Sends a JSON-RPC message as soon as it can be put in.
    fn tell(&self, message: Bytes);

    /// Lets go of the inner body, and ends after what was told.
    fn close(&self);
}

#[derive(Default)]
pub(super) struct OpenStreams {
    open: Vec<Weak<dyn Outlet>>,
    /// How many were left when those that ended were taken out last.
    left: usize,
}

// === impl OpenStreams ===

impl OpenStreams {
    pub(super) fn add(&mut self, stream: Weak<dyn Outlet>) {
        if self.open.len() >= FEW.max(2 * self.left) {
            self.open.retain(|stream| stream.strong_count() > 0);
            self.left = self.open.len();
            self.open.shrink_to(2 * self.left);
        }
        self.open.push(stream);
    }

    pub(super) fn take(&mut self) -> Vec<Arc<dyn Outlet>> {
        self.left = 0;
        let streams = mem::take(&mut self.open);
        streams.iter().filter_map(Weak::upgrade).collect()
    }
}
