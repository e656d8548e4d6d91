//! Events that bypass the ring, to a reader that has taken everything before them.

use bytes::Bytes;

use super::{Bypass, Bypassed, ReaderId, Ring};
use crate::event_store::event::{Event, Weight};

// === impl Ring ===

impl Ring {
    /// Starts an event that bypasses the ring.
    ///
    /// Returns `false` if the reader still has to take earlier events. If there is no reader, or the ring has ended, the event is
    /// lost at once, and [`bypass_state`](Self::bypass_state) returns [`Bypassed::NoReader`]. `lost` is the error for a reader that
    /// misses the event.
    pub(in crate::event_store) fn begin_bypass(&mut self, lost: impl FnOnce() -> Event) -> bool {
        let reader = self.reader.as_mut().filter(|_| !self.has_ended);
        let Some(reader) = reader else {
            self.bypass = Bypass::Aborted;
            if !self.has_ended {
                self.skip();
            }
            return true;
        };
        if reader.at != self.next {
            return false;
        }
        self.bypassed = Some((self.next, lost()));
        self.next += 1;
        (reader.from, reader.at) = (self.next, self.next);
        self.bypass = Bypass::Piece(None);
        true
    }

    /// Adds a piece of the bypassing event. Does nothing if the bypass was aborted.
    ///
    /// The reader must have taken the previous piece.
    pub(in crate::event_store) fn set_bypass_piece(&mut self, piece: Bytes) {
        if let Bypass::Piece(current) = &mut self.bypass {
            *current = Some(piece);
        }
    }

    /// Returns the state of the current piece.
    pub(in crate::event_store) fn bypass_state(&self) -> Bypassed {
        match self.bypass {
            Bypass::Piece(None) => Bypassed::Taken,
            Bypass::Piece(Some(_)) => Bypassed::Wait,
            Bypass::Idle | Bypass::Aborted => Bypassed::NoReader,
        }
    }

    /// Ends the bypassing event if its reader has taken all of it. Returns the state of the last piece.
    pub(in crate::event_store) fn end_bypass(&mut self, weight: Weight) -> Bypassed {
        let state = self.bypass_state();
        if state == Bypassed::Taken {
            self.bypass = Bypass::Idle;
            if weight == Weight::Answer {
                self.answer = self.next.checked_sub(1);
            }
        }
        state
    }

    /// Returns the `id` line of the bypassing event and the blank line that ends it.
    pub(in crate::event_store) fn bypass_id_line(&self) -> Bytes {
        let mut lines = Vec::new();
        self.end_event(&mut lines, self.next.saturating_sub(1));
        lines.into()
    }

    /// Adds the error for a reader that missed a bypassing event.
    ///
    /// Does nothing before the end of the ring, or if the ring still has the answer.
    pub(super) fn replace_missed_answer(&mut self, id: ReaderId) {
        let is_in_ring = |seq| {
            self.events
                .binary_search_by_key(&seq, |entry| entry.seq)
                .is_ok()
        };
        if !self.has_ended || self.answer.is_some_and(is_in_ring) {
            return;
        }
        let reader = self.reader.as_ref().filter(|reader| reader.id == id);
        let missed = |seq| reader.is_some_and(|reader| reader.from <= seq);
        if let Some((_, lost)) = self.bypassed.take_if(|(seq, _)| missed(*seq)) {
            self.append(lost);
        }
    }

    /// Aborts the bypassing event, if any. Its reader has detached, or the ring has ended.
    pub(super) fn abort_bypass(&mut self) {
        if let Bypass::Piece(_) = self.bypass {
            self.bypass = Bypass::Aborted;
        }
    }
}
