//! Guards that count contested sessions and sessions that must be rewritten.

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
    _count_guard: CountGuard,
}

/// Counts a session as unconfirmed until dropped.
///
/// The directory may have lost the session's record, or another instance may have claimed the session.
#[derive(Debug)]
pub(super) struct Unconfirmed {
    pub(super) since: Instant,
    _count_guard: CountGuard,
}

#[derive(Debug)]
struct CountGuard(Arc<AtomicUsize>);

// === impl Contested ===

impl Contested {
    pub(super) fn new(by: Ownership, count: &Arc<AtomicUsize>) -> Self {
        let _count_guard = CountGuard::new(count);
        Self { by, _count_guard }
    }
}

// === impl Unconfirmed ===

impl Unconfirmed {
    pub(super) fn new(since: Instant, count: &Arc<AtomicUsize>) -> Self {
        let _count_guard = CountGuard::new(count);
        Self {
            since,
            _count_guard,
        }
    }
}

// === impl CountGuard ===

impl CountGuard {
    fn new(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count.clone())
    }
}

impl Drop for CountGuard {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
