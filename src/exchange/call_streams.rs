//! An exchange's open streams, and the error sent on each of them before it is closed.

use std::sync::{Arc, Weak};

use bytes::Bytes;

use crate::registry::StreamHandle;

/// A call's open streams.
#[derive(Default)]
pub(super) struct CallStreams {
    /// Nearly always the only stream, so it is stored inline.
    newest: Option<Weak<dyn StreamHandle>>,
    /// `Some` once two streams have been open at the same time, or once the error has been set.
    overflow: Option<Box<OverflowStreams>>,
}

#[derive(Default)]
struct OverflowStreams {
    older: Vec<Weak<dyn StreamHandle>>,
    error: Option<Bytes>,
}

// === impl CallStreams ===

impl CallStreams {
    /// Adds a stream. If an error has already been set, returns it along with the stream to send it on.
    pub(super) fn add(
        &mut self,
        stream: Weak<dyn StreamHandle>,
    ) -> Option<(Bytes, Arc<dyn StreamHandle>)> {
        let previous = self.newest.take().filter(is_open);
        let overflow = match (&mut self.overflow, previous) {
            (None, None) => None,
            (overflow, previous) => {
                let overflow = overflow.get_or_insert_default();
                overflow.older.retain(is_open);
                overflow.older.extend(previous);
                Some(overflow)
            }
        };
        let error = overflow.and_then(|overflow| overflow.error.clone());
        let error = error.zip(stream.upgrade());
        self.newest = Some(stream);
        error
    }

    pub(super) fn open(&self) -> Vec<Weak<dyn StreamHandle>> {
        let older = self.overflow.iter().flat_map(|overflow| &overflow.older);
        let streams = older.chain(&self.newest);
        streams.filter(|stream| is_open(stream)).cloned().collect()
    }

    /// Returns `true` if any stream other than the newest is open.
    pub(super) fn has_older(&self) -> bool {
        let overflow = self.overflow.as_ref();
        overflow.is_some_and(|overflow| overflow.older.iter().any(is_open))
    }

    /// Sets the error and returns the streams the caller must send it on.
    pub(super) fn set_error(&mut self, message: Bytes) -> Vec<Arc<dyn StreamHandle>> {
        self.overflow.get_or_insert_default().error = Some(message);
        self.upgrade_all()
    }

    pub(super) fn upgrade_all(&self) -> Vec<Arc<dyn StreamHandle>> {
        let older = self.overflow.iter().flat_map(|overflow| &overflow.older);
        let streams = older.chain(&self.newest);
        streams.filter_map(Weak::upgrade).collect()
    }

    pub(super) fn error(&self) -> Option<Bytes> {
        self.overflow.as_ref()?.error.clone()
    }
}

fn is_open(stream: &Weak<dyn StreamHandle>) -> bool {
    stream.strong_count() > 0
}
