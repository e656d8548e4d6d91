//! Guards that count the sessions that are contested, or must be written again.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use tokio::time::Instant;

use crate::ids::Ownership;

/// Counts a session as contested until dropped.
#[derive(Debug)]
pub(super) struct Contested {
    pub(super) by: Ownership,
    _counted: Counted,
}

/// Counts a session as unconfirmed until dropped. Its record may be lost, or another instance may have claimed the session.
#[derive(Debug)]
pub(super) struct Unconfirmed {
    pub(super) since: Instant,
    _counted: Counted,
}

#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

// === impl Contested ===

impl Contested {
    pub(super) fn new(by: Ownership, count: &Arc<AtomicUsize>) -> Self {
        let _counted = Counted::new(count);
        Self { by, _counted }
    }
}

// === impl Unconfirmed ===

impl Unconfirmed {
    pub(super) fn new(since: Instant, count: &Arc<AtomicUsize>) -> Self {
        let _counted = Counted::new(count);
        Self { since, _counted }
    }
}

// === impl Counted ===

impl Counted {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
