//! Counts calls by their reports, as a dashboard would. Every count must end up at zero again.

use std::sync::{
    Arc,
    atomic::{AtomicIsize, Ordering},
};

use mcp_cancel_on_disconnect::Event;

/// The counts, which all clones share. Reports can arrive in any order, so only the sums are meaningful.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ledger(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    in_flight: AtomicIsize,
    detached: AtomicIsize,
}

// === impl Ledger ===

impl Ledger {
    /// Returns an observer that counts the reports.
    pub(crate) fn observer(&self) -> impl Fn(&Event<'_>) + Send + Sync + 'static {
        let counts = self.0.clone();
        move |event| {
            let (in_flight, detached) = match event {
                Event::Started { .. } => (1, 0),
                Event::Detached { .. } => (0, 1),
                Event::Resumed { detachment, .. } => (0, -isize::from(detachment.is_some())),
                Event::Ended { detachment, .. } => (-1, -isize::from(detachment.is_some())),
                _ => (0, 0),
            };
            counts.in_flight.fetch_add(in_flight, Ordering::Relaxed);
            counts.detached.fetch_add(detached, Ordering::Relaxed);
        }
    }

    /// Returns the number of calls in flight, and how many of those are detached.
    pub(crate) fn balance(&self) -> (isize, isize) {
        let Counts {
            in_flight,
            detached,
        } = &*self.0;
        let of = |count: &AtomicIsize| count.load(Ordering::Relaxed);
        (of(in_flight), of(detached))
    }
}
