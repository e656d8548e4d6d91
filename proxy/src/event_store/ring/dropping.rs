//! Decides which events are dropped when there is no room.

use super::{Entry, Ring};
use crate::event_store::event::Weight;

// === impl Ring ===

impl Ring {
    /// Returns `true` if the ring is below both of its limits, and so can take another event.
    pub(super) fn is_below_limits(&self) -> bool {
        self.events.len() < self.limits.events && self.cost < self.limits.bytes
    }

    /// Drops the oldest droppable event. Returns `false` if there is none.
    pub(in crate::event_store) fn drop_droppable(&mut self) -> bool {
        // Never drop an event that the reader has already begun to take.
        let started = self.reader.as_ref().filter(|reader| reader.taken > 0);
        let started = started.map(|reader| reader.position);
        let may_drop =
            |entry: &Entry| entry.weight == Weight::Droppable && Some(entry.seq) != started;
        let oldest = self.events.iter().position(may_drop);
        oldest.is_some_and(|index| self.remove(index))
    }

    /// Drops the oldest notification that the reader has taken, or else its oldest taken event.
    ///
    /// Requests are kept longer than notifications, because a server does not repeat a request lost along with the client's
    /// connection. Returns `false` if no reader is attached, or if it has taken none of the events still in the ring.
    pub(super) fn drop_delivered(&mut self) -> bool {
        let position = self.reader.as_ref().map_or(0, |reader| reader.position);
        let taken = self.events.partition_point(|entry| entry.seq < position);
        let mut entries = self.events.iter().take(taken);
        let oldest = entries.position(|entry| entry.weight == Weight::Kept);
        taken > 0 && self.remove(oldest.unwrap_or(0))
    }

    fn remove(&mut self, index: usize) -> bool {
        let Some(entry) = self.events.remove(index) else {
            return false;
        };
        // The reservation itself is only released once the last holder drops the bytes.
        self.cost -= entry.cost;
        true
    }
}
