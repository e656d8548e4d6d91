//! A contested session counts for as long as it is one.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
};

use crate::ids::Ownership;

/// A session is contested until this is dropped.
#[derive(Debug)]
pub(super) struct Contested {
    pub(super) by: Ownership,
    count: Arc<AtomicUsize>,
}

// === impl Contested ===

impl Contested {
    pub(super) fn new(by: Ownership, count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        let count = count.clone();
        Self { by, count }
    }
}

impl Drop for Contested {
    fn drop(&mut self) {
        self.count.fetch_sub(1, Ordering::AcqRel);
    }
}
