//! The last message to the clients of an exchange, and the open streams that carry it.

use std::sync::{Arc, Weak};

use bytes::Bytes;

use crate::registry::Outlet;

/// What was said, and to whom.
#[derive(Default)]
pub(super) struct LastWords {
    /// Nearly always the only one. It needs no allocation.
    newest: Option<Weak<dyn Outlet>>,
    /// Of exchanges that were resumed, or whose call was cancelled here.
    more: Option<Box<MoreOutlets>>,
}

#[derive(Default)]
struct MoreOutlets {
    older: Vec<Weak<dyn Outlet>>,
    message: Option<Bytes>,
}

// === impl LastWords ===

impl LastWords {
    /// Adds one. What it is to be told, if that was said already.
    pub(super) fn add(&mut self, outlet: Weak<dyn Outlet>) -> Option<(Bytes, Arc<dyn Outlet>)> {
        let former = self.newest.take().filter(is_open);
        let more = match (&mut self.more, former) {
            (None, None) => None,
            (more, former) => {
                let more = more.get_or_insert_default();
                more.older.retain(is_open);
                more.older.extend(former);
                Some(more)
            }
        };
        let said = more.and_then(|more| more.message.clone());
        let said = said.zip(outlet.upgrade());
        self.newest = Some(outlet);
        said
    }

    pub(super) fn open(&self) -> Vec<Weak<dyn Outlet>> {
        let older = self.more.iter().flat_map(|more| &more.older);
        let outlets = older.chain(&self.newest);
        outlets.filter(|outlet| is_open(outlet)).cloned().collect()
    }

    /// Whether older streams than the newest are open.
    pub(super) fn has_older(&self) -> bool {
        let more = self.more.as_ref();
        more.is_some_and(|more| more.older.iter().any(is_open))
    }

    /// Says the last that is to be said. Who is to be told.
    pub(super) fn say(&mut self, message: Bytes) -> Vec<Arc<dyn Outlet>> {
        self.more.get_or_insert_default().message = Some(message);
        self.outlets()
    }

    pub(super) fn outlets(&self) -> Vec<Arc<dyn Outlet>> {
        let older = self.more.iter().flat_map(|more| &more.older);
        let outlets = older.chain(&self.newest);
        outlets.filter_map(Weak::upgrade).collect()
    }

    pub(super) fn message(&self) -> Option<Bytes> {
        self.more.as_ref()?.message.clone()
    }
}

fn is_open(outlet: &Weak<dyn Outlet>) -> bool {
    outlet.strong_count() > 0
}
