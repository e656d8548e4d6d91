//! The room for events: its limit, and the streams that have a share of it.
//!
//! 1. What is granted is never more than the limit of the budget, nor of the one around it: a grant that would be is
//!    refused, and takes nothing.
//! 2. A [`Grant`] gives back what it has when it is dropped, to every budget it was taken from.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// How much a hub keeps, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How many sessions are known: 4,096. Past that, of those without a stream the half that was not used for longest is
    /// forgotten: their streams are no longer primed.
    pub sessions: usize,
    /// How many streams a session has, with those that have ended and are kept: 2,048, twice as many as a command may have
    /// calls. What a stream itself costs counts for [`bytes`](Self::bytes) only.
    pub streams: usize,
    /// How many events a stream keeps: 256.
    pub events: usize,
    /// How many bytes a stream keeps before it takes no more: 1 MiB. Its last event may go beyond.
    pub stream_bytes: usize,
    /// How many bytes the events of a session take: 4 MiB.
    pub session_bytes: usize,
    /// How many bytes are kept in all: 64 MiB.
    pub bytes: usize,
    /// How long a stream is kept after its end: 60 s.
    pub kept_for: Duration,
    /// How long a client is asked to wait before it comes back: 3 s.
    pub retry: Duration,
}

/// So many bytes may be kept.
#[derive(Debug)]
pub(crate) struct Budget {
    limit: usize,
    used: AtomicUsize,
    around: Option<Arc<Self>>,
}

/// Bytes of a budget, until it is dropped.
#[derive(Debug)]
pub(crate) struct Grant {
    budget: Arc<Budget>,
    bytes: usize,
}

/// Which budget had no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Short {
    /// That of the session.
    Session,
    /// The one around all sessions.
    All,
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
            kept_for: Duration::from_secs(60),
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
            around: None,
        })
    }

    /// A part of this one, for one session.
    pub(crate) fn part(self: &Arc<Self>, limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicUsize::new(0),
            around: Some(self.clone()),
        })
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    pub(crate) fn grant(self: &Arc<Self>) -> Grant {
        Grant {
            budget: self.clone(),
            bytes: 0,
        }
    }

    /// One of the budget around this one.
    pub(crate) fn grant_of_all(self: &Arc<Self>) -> Grant {
        match &self.around {
            Some(around) => around.grant_of_all(),
            None => self.grant(),
        }
    }

    fn take(&self, bytes: usize) -> Result<(), Short> {
        let more = |used: usize| used.checked_add(bytes).filter(|used| *used <= self.limit);
        let taken = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        let Some(around) = &self.around else {
            return taken.map(|_| ()).map_err(|_| Short::All);
        };
        taken.map_err(|_| Short::Session)?;
        around.take(bytes).inspect_err(|_| {
            self.used.fetch_sub(bytes, Ordering::Relaxed);
        })
    }

    fn give_back(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
        if let Some(around) = &self.around {
            around.give_back(bytes);
        }
    }
}

// === impl Grant ===

impl Grant {
    pub(crate) fn grow(&mut self, by: usize) -> Result<(), Short> {
        self.budget.take(by)?;
        self.bytes += by;
        Ok(())
    }

    /// Gives back `by` of them, or all if these are fewer.
    pub(crate) fn shrink(&mut self, by: usize) {
        let by = by.min(self.bytes);
        self.bytes -= by;
        self.budget.give_back(by);
    }

    /// Grows or shrinks to `bytes`.
    pub(crate) fn fit(&mut self, bytes: usize) -> Result<(), Short> {
        self.shrink(self.bytes.saturating_sub(bytes));
        self.grow(bytes - self.bytes)
    }

    /// Another one of the same budget, which has nothing yet.
    pub(crate) fn another(&self) -> Self {
        self.budget.grant()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Grant {
    fn drop(&mut self) {
        self.shrink(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_session_may_not_take_another_still_may() {
        let all = Budget::new(100);
        let (one, other) = (all.part(60), all.part(60));
        let (mut a, mut b) = (one.grant(), other.grant());
        assert_eq!(a.grow(60), Ok(()));
        assert_eq!(a.grow(1), Err(Short::Session));
        assert_eq!(b.grow(41), Err(Short::All));
        assert_eq!((one.used(), other.used(), all.used()), (60, 0, 60));
        assert_eq!(b.grow(40), Ok(()));
        drop(a);
        assert_eq!((one.used(), other.used(), all.used()), (0, 40, 40));
        b.shrink(usize::MAX);
        assert_eq!((b.bytes(), all.used()), (0, 0));
    }

    #[test]
    fn a_sum_that_no_number_holds_is_refused() {
        let all = Budget::new(usize::MAX);
        let mut grant = all.part(usize::MAX).grant();
        assert_eq!(grant.grow(usize::MAX), Ok(()));
        assert_eq!(grant.grow(1), Err(Short::Session));
        assert_eq!(all.used(), usize::MAX);
    }
}
