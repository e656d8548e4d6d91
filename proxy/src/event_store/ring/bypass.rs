//! Passes an event directly to the reader if there is no room for it in the ring.

use bytes::Bytes;

use super::{Bypass, Bypassed, ReaderId, Ring};
use crate::event_store::event::{Event, Weight};

// === impl Ring ===

impl Ring {
    /// Starts sending an event that bypasses the ring.
    ///
    /// Returns `false` if the reader has to take earlier events first. If there is no reader, or the ring has been closed, the event
    /// is lost right away, and [`bypass_state`](Self::bypass_state) returns [`Bypassed::NoReader`]. `lost` creates the error
    /// for a reader that misses the event.
    pub(in crate::event_store) fn begin_bypass(&mut self, lost: impl FnOnce() -> Event) -> bool {
        let reader = self.reader.as_mut().filter(|_| !self.has_ended);
        let Some(reader) = reader else {
            self.bypass = Bypass::Aborted;
            if !self.has_ended {
                self.skip();
            }
            return true;
        };
        if reader.position != self.next {
            return false;
        }
        self.bypassed = Some((self.next, lost()));
        self.next += 1;
        // This reader gets the event in pieces, so it never has to take it from the ring.
        (reader.from, reader.position) = (self.next, self.next);
        self.bypass = Bypass::Piece(None);
        true
    }

    /// Sets the next piece of the bypassing event, unless the bypass has been aborted.
    ///
    /// The reader must already have taken the previous piece.
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

    /// Ends the bypass if the reader has taken the last piece. Returns that piece's state.
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

    /// Returns the bypassing event's `id` line and the blank line that ends the event.
    pub(in crate::event_store) fn bypass_id_line(&self) -> Bytes {
        let mut lines = Vec::new();
        self.end_event(&mut lines, self.next.saturating_sub(1));
        lines.into()
    }

    /// Appends the error for a reader that missed a bypassing event.
    ///
    /// Does nothing if the ring has not ended yet, or if it still holds the answer.
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

    /// Aborts the current bypass, if any, because the reader has detached or the ring has been closed.
    pub(super) fn abort_bypass(&mut self) {
        if let Bypass::Piece(_) = self.bypass {
            self.bypass = Bypass::Aborted;
        }
    }
}
