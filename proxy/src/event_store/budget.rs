//! Byte budgets and the reservations made from them.
//!
//! 1. The total reserved from a budget never exceeds its limit or its parent's limit. A request that would exceed one of these
//!    limits is refused, and reserves nothing.
//! 2. Dropping a [`Reservation`] returns its bytes to every budget they came from.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// An event store's limits.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Maximum number of known sessions. The default is 4,096.
    ///
    /// When this limit is reached or [`bytes`](Self::bytes) is exhausted, at least half of the idle sessions (no stream, no
    /// request) are removed, least recently used first. The store then no longer knows whether their clients support priming
    /// events.
    pub sessions: usize,
    /// Maximum number of streams per session, including ended ones still retained. The default is 2,048.
    ///
    /// That is twice the number of calls that can be open in a command's session. A stream's own overhead counts towards
    /// [`bytes`](Self::bytes), but not towards [`session_bytes`](Self::session_bytes).
    pub streams: usize,
    /// Maximum number of events per stream. The default is 256.
    pub events: usize,
    /// Once a stream holds this many bytes, it accepts no more events. The default is 1 MiB.
    ///
    /// The stream's last event may exceed the limit.
    pub stream_bytes: usize,
    /// Maximum number of event bytes per session. The default is 4 MiB.
    pub session_bytes: usize,
    /// Maximum number of bytes across all sessions. The default is 64 MiB.
    pub bytes: usize,
    /// How long a stream is retained after it ends. The default is 60 s.
    pub retention: Duration,
    /// The reconnect delay sent to clients. The default is 3 s.
    pub retry: Duration,
}

/// A byte budget, which may be part of a parent budget.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: AtomicUsize,
    parent: Option<Arc<Self>>,
}

/// Bytes reserved from a budget. Dropping this releases them.
#[derive(Debug)]
pub(crate) struct Reservation {
    budget: Arc<Budget>,
    bytes: usize,
}

/// Which budget has no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exhausted {
    /// The session's budget.
    Session,
    /// The budget shared by all sessions.
    Global,
}

// === impl Limits ===

impl Default for Limits {
    fn default() -> Self {
        Self {
            sessions: 4 * 1024,
            streams: 2 * 1024,
            events: 256,
            stream_bytes: 1024 * 1024,
            session_bytes: 4 * 1024 * 1024,
            bytes: 64 * 1024 * 1024,
            retention: Duration::from_secs(60),
            retry: Duration::from_secs(3),
        }
    }
}

// === impl Budget ===

impl Budget {
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicUsize::new(0),
            parent: None,
        })
    }

    /// Creates a session's budget within this one.
    pub(crate) fn child(self: &Arc<Self>, limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicUsize::new(0),
            parent: Some(self.clone()),
        })
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Returns an empty reservation from this budget.
    pub(crate) fn reservation(self: &Arc<Self>) -> Reservation {
        Reservation {
            budget: self.clone(),
            bytes: 0,
        }
    }

    /// Returns an empty reservation from the budget shared by all sessions.
    pub(crate) fn global_reservation(self: &Arc<Self>) -> Reservation {
        match &self.parent {
            Some(parent) => parent.global_reservation(),
            None => self.reservation(),
        }
    }

    fn try_reserve(&self, bytes: usize) -> Result<(), Exhausted> {
        let with_bytes = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.limit);
        let reserved = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_bytes);
        let Some(parent) = &self.parent else {
            return reserved.map(|_| ()).map_err(|_| Exhausted::Global);
        };
        reserved.map_err(|_| Exhausted::Session)?;
        parent.try_reserve(bytes).inspect_err(|_| {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        })
    }

    fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(parent) = &self.parent {
            parent.release(bytes);
        }
    }
}

// === impl Reservation ===

impl Reservation {
    /// Reserves `additional` bytes, or none if a budget does not have room for all of them.
    pub(crate) fn grow(&mut self, additional: usize) -> Result<(), Exhausted> {
        self.budget.try_reserve(additional)?;
        self.bytes += additional;
        Ok(())
    }

    /// Releases `bytes` bytes, or all of them if fewer are reserved.
    pub(crate) fn shrink(&mut self, bytes: usize) {
        let bytes = bytes.min(self.bytes);
        self.bytes -= bytes;
        self.budget.release(bytes);
    }

    /// Grows or shrinks to `bytes`. If a budget has no room to grow, nothing changes.
    pub(crate) fn resize(&mut self, bytes: usize) -> Result<(), Exhausted> {
        self.shrink(self.bytes.saturating_sub(bytes));
        self.grow(bytes - self.bytes)
    }

    /// Returns an empty reservation from the same budget.
    pub(crate) fn sibling(&self) -> Self {
        self.budget.reservation()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_session_has_a_limit_and_all_sessions_share_one() {
        let total = Budget::new(100);
        let (session, other) = (total.child(60), total.child(60));
        let (mut a, mut b) = (session.reservation(), other.reservation());
        assert_eq!(a.grow(60), Ok(()));
        assert_eq!(a.grow(1), Err(Exhausted::Session));
        assert_eq!(b.grow(41), Err(Exhausted::Global));
        assert_eq!((session.used(), other.used(), total.used()), (60, 0, 60));
        assert_eq!(b.grow(40), Ok(()));
        drop(a);
        assert_eq!((session.used(), other.used(), total.used()), (0, 40, 40));
        b.shrink(usize::MAX);
        assert_eq!((b.bytes(), total.used()), (0, 0));
    }

    #[test]
    fn a_sum_that_overflows_is_refused() {
        let total = Budget::new(usize::MAX);
        let mut reservation = total.child(usize::MAX).reservation();
        assert_eq!(reservation.grow(usize::MAX), Ok(()));
        assert_eq!(reservation.grow(1), Err(Exhausted::Session));
        assert_eq!(total.used(), usize::MAX);
    }
}
