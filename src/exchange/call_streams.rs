//! The last message to the clients of an exchange, and the open streams that carry it.

use std::sync::{Arc, Weak};

use bytes::Bytes;

use crate::registry::StreamHandle;

/// What was said, and to whom.
#[derive(Default)]
pub(super) struct CallStreams {
    /// Nearly always the only one. It needs no allocation.
    newest: Option<Weak<dyn StreamHandle>>,
    /// Of exchanges that were resumed, or whose call was cancelled here.
    overflow: Option<Box<OverflowStreams>>,
}

#[derive(Default)]
struct OverflowStreams {
    older: Vec<Weak<dyn StreamHandle>>,
    error: Option<Bytes>,
}

// === impl CallStreams ===

impl CallStreams {
    /// Adds one. What it is to be told, if that was said already.
    pub(super) fn add(
        &mut self,
        outlet: Weak<dyn StreamHandle>,
    ) -> Option<(Bytes, Arc<dyn StreamHandle>)> {
        let former = self.newest.take().filter(is_open);
        let more = match (&mut self.overflow, former) {
            (None, None) => None,
            (more, former) => {
                let more = more.get_or_insert_default();
                more.older.retain(is_open);
                more.older.extend(former);
                Some(more)
            }
        };
        let said = more.and_then(|more| more.error.clone());
        let said = said.zip(outlet.upgrade());
        self.newest = Some(outlet);
        said
    }

    pub(super) fn open(&self) -> Vec<Weak<dyn StreamHandle>> {
        let older = self.overflow.iter().flat_map(|more| &more.older);
        let outlets = older.chain(&self.newest);
        outlets.filter(|outlet| is_open(outlet)).cloned().collect()
    }

    /// Whether older streams than the newest are open.
    pub(super) fn has_older(&self) -> bool {
        let more = self.overflow.as_ref();
        more.is_some_and(|more| more.older.iter().any(is_open))
    }

    /// Says the last that is to be said. Who is to be told.
    pub(super) fn set_error(&mut self, message: Bytes) -> Vec<Arc<dyn StreamHandle>> {
        self.overflow.get_or_insert_default().error = Some(message);
        self.upgraded()
    }

    pub(super) fn upgraded(&self) -> Vec<Arc<dyn StreamHandle>> {
        let older = self.overflow.iter().flat_map(|more| &more.older);
        let outlets = older.chain(&self.newest);
        outlets.filter_map(Weak::upgrade).collect()
    }

    pub(super) fn error(&self) -> Option<Bytes> {
        self.overflow.as_ref()?.error.clone()
    }
}

fn is_open(outlet: &Weak<dyn StreamHandle>) -> bool {
    outlet.strong_count() > 0
}
