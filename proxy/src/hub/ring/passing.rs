//! Events that go straight through, to a reader that has taken everything before.

use bytes::Bytes;

use super::{Passed, Passing, ReaderName, Ring};
use crate::hub::event::{Event, Weight};

// === impl Ring ===

impl Ring {
    /// Begins an event that goes straight through. `false` if its reader still has to take what is before. `lost` is for
    /// who misses it.
    pub(in crate::hub) fn begin_pass(&mut self, lost: impl FnOnce() -> Event) -> bool {
        let reader = self.reader.as_mut().filter(|_| !self.ended);
        let Some(reader) = reader else {
            self.passing = Passing::Broken;
            if !self.ended {
                self.skip();
            }
            return true;
        };
        if reader.at != self.next {
            return false;
        }
        self.passed = Some((self.next, lost()));
        self.next += 1;
        (reader.from, reader.at) = (self.next, self.next);
        self.passing = Passing::Piece(None);
        true
    }

    /// Adds a piece to the event that goes straight through. Its reader has taken the one before.
    pub(in crate::hub) fn pass(&mut self, piece: Bytes) {
        if let Passing::Piece(place) = &mut self.passing {
            *place = Some(piece);
        }
    }

    /// What became of that piece.
    pub(in crate::hub) fn passed(&self) -> Passed {
        match self.passing {
            Passing::Piece(None) => Passed::Taken,
            Passing::Piece(Some(_)) => Passed::Wait,
            Passing::Nothing | Passing::Broken => Passed::Gone,
        }
    }

    /// Ends the event that goes straight through, if its reader has all of it.
    pub(in crate::hub) fn end_pass(&mut self, weight: Weight) -> Passed {
        let passed = self.passed();
        if passed == Passed::Taken {
            self.passing = Passing::Nothing;
            if weight == Weight::Answer {
                self.answer = self.next.checked_sub(1);
            }
        }
        passed
    }

    /// The line that names the event that goes straight through, and the blank one that ends it.
    pub(in crate::hub) fn id_of_pass(&self) -> Bytes {
        let mut lines = Vec::new();
        self.end_event(&mut lines, self.next.saturating_sub(1));
        lines.into()
    }

    /// Adds the error for a reader that missed what went straight through, if there is no answer for it in the end.
    pub(super) fn replace_lost(&mut self, name: ReaderName) {
        let is_here = |seq| {
            self.events
                .binary_search_by_key(&seq, |entry| entry.seq)
                .is_ok()
        };
        if !self.ended || self.answer.is_some_and(is_here) {
            return;
        }
        let reader = self.reader.as_ref().filter(|reader| reader.name == name);
        let missed = |seq| reader.is_some_and(|reader| reader.from <= seq);
        if let Some((_, lost)) = self.passed.take_if(|(seq, _)| missed(*seq)) {
            self.append(lost);
        }
    }

    pub(super) fn break_pass(&mut self) {
        if let Passing::Piece(_) = self.passing {
            self.passing = Passing::Broken;
        }
    }
}
