//! The events of one stream, for a reader that may leave and come back.
//!
//! Nothing here waits, sleeps or wakes: the callers do. What is promised:
//!
//! 1. **Numbers.** Every event gets the next number, from 0 on, whatever becomes of it.
//! 2. **Once and in order.** A reader gets every event after the one that it named, once and in order. For those that are
//!    not there any more it gets a comment that says how many.
//! 3. **What goes.** Where room is short the oldest droppable event goes first, then, if the reader that is there has taken
//!    them, the oldest kept ones. Nothing else goes before the ring does.
//! 4. **Limits.** A ring has at most so many events and bytes, but for one event alone, which may be larger. All of it is
//!    covered by a grant at any time.
//! 5. **One reader.** The newest. An older one has come to its end.
//! 6. **The end.** Nothing comes after it.
//! 7. **The answer.** A reader that comes from before an answer that is not there any more gets an error in its place.
//! 8. **Straight through.** An event for which there is no room at all goes through in pieces, to a reader that has taken
//!    everything before it. If that one leaves before the last piece, nobody gets the event.

use std::{collections::VecDeque, io::Write as _};

use bytes::Bytes;

use super::{
    budget::{Grant, Short},
    event::{Event, ROOM_FOR_ID, Weight},
};

/// What an event costs besides its bytes: its place in the ring, its allocation and what that rounds up to.
pub(crate) const EVENT_OVERHEAD: usize = 128;

/// The events of one stream.
#[derive(Debug)]
pub(crate) struct Ring {
    /// What the ids of its events begin with.
    prefix: Box<str>,
    events: VecDeque<Entry>,
    /// What the events cost together.
    cost: usize,
    /// Covers the events, and what the stream itself costs.
    grant: Grant,
    most: Most,
    /// The number of the next event.
    next: u64,
    answer: Option<u64>,
    reader: Option<Reader>,
    /// How many readers there were.
    readers: u64,
    passing: Passing,
    gaps: u64,
    ended: bool,
}

/// How much a ring may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Most {
    pub(crate) events: usize,
    pub(crate) bytes: usize,
}

#[derive(Debug)]
struct Entry {
    seq: u64,
    bytes: Bytes,
    droppable: bool,
    cost: usize,
}

/// Who reads, and how far it is.
#[derive(Debug)]
struct Reader {
    name: ReaderName,
    /// The number of the event that it takes next.
    at: u64,
}

/// Which reader of a ring it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReaderName(u64);

/// The event that goes straight through.
#[derive(Debug, PartialEq, Eq)]
enum Passing {
    Nothing,
    /// The reader takes this piece next, if there is one.
    Piece(Option<Bytes>),
    /// Its reader left.
    Broken,
}

/// What became of an event.
#[derive(Debug)]
pub(crate) enum Pushed {
    /// It is there, or was dropped.
    Done,
    /// There is room once the reader takes something.
    Wait(Event),
    /// A budget has no room for it. If nobody makes some, it can only go straight through.
    Short(Event, Short),
    /// There is no room, and nobody to make some.
    Full,
    /// The ring has ended.
    Ended,
}

/// What became of a piece.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Passed {
    Done,
    /// The reader has not taken what is before it.
    Wait(Bytes),
    /// There is no reader, or another one than there was when the event began.
    Gone,
}

/// What a reader gets.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Frame(Bytes),
    Wait,
    End,
}

// === impl Ring ===

impl Ring {
    pub(crate) fn new(prefix: Box<str>, most: Most, grant: Grant) -> Self {
        Self {
            prefix,
            events: VecDeque::new(),
            cost: 0,
            grant,
            most,
            next: 0,
            answer: None,
            reader: None,
            readers: 0,
            passing: Passing::Nothing,
            gaps: 0,
            ended: false,
        }
    }

    /// Adds an event.
    pub(crate) fn push(&mut self, event: Event) -> Pushed {
        if self.ended {
            return Pushed::Ended;
        }
        let cost = event.lines.len() + ROOM_FOR_ID + EVENT_OVERHEAD;
        // What was granted while it was read is a part of that.
        let more = cost.saturating_sub(event.room.as_ref().map_or(0, Grant::bytes));
        loop {
            let short = match self.has_place(cost) {
                true => match self.grant.grow(more) {
                    Ok(()) => {
                        self.append(event, cost);
                        return Pushed::Done;
                    }
                    Err(short) => Some(short),
                },
                false => None,
            };
            if self.drop_droppable() {
                continue;
            }
            if event.weight == Weight::Droppable {
                self.skip();
                return Pushed::Done;
            }
            if self.drop_taken() {
                continue;
            }
            return match (short, &self.reader) {
                (Some(short), _) => Pushed::Short(event, short),
                (None, Some(_)) => Pushed::Wait(event),
                (None, None) => Pushed::Full,
            };
        }
    }

    /// Adds an error as the answer, whatever room there is: the stream has paid for one.
    pub(crate) fn fail(&mut self, error: Event) {
        if !self.ended && self.answer.is_none() {
            self.append(error, 0);
        }
    }

    /// Begins an event that goes straight through. `false` if its reader still has to take what is before.
    pub(crate) fn begin_pass(&mut self) -> bool {
        let Some(reader) = &mut self.reader else {
            self.passing = Passing::Broken;
            return true;
        };
        if reader.at != self.next {
            return false;
        }
        self.next += 1;
        reader.at = self.next;
        self.passing = Passing::Piece(None);
        true
    }

    /// Adds a piece to the event that goes straight through.
    pub(crate) fn pass(&mut self, piece: Bytes) -> Passed {
        match &mut self.passing {
            Passing::Piece(place @ None) => {
                *place = Some(piece);
                Passed::Done
            }
            Passing::Piece(Some(_)) => Passed::Wait(piece),
            Passing::Nothing | Passing::Broken => Passed::Gone,
        }
    }

    /// Ends that event, of which every piece was taken.
    pub(crate) fn end_pass(&mut self, weight: Weight) -> Passed {
        match std::mem::replace(&mut self.passing, Passing::Nothing) {
            Passing::Piece(None) => {
                let seq = self.next - 1;
                if weight == Weight::Answer {
                    self.answer = Some(seq);
                }
                Passed::Done
            }
            Passing::Piece(Some(piece)) => {
                self.passing = Passing::Piece(Some(piece));
                Passed::Wait(Bytes::new())
            }
            Passing::Nothing | Passing::Broken => Passed::Gone,
        }
    }

    /// The line that names the event that goes straight through, and the blank one that ends it.
    pub(crate) fn id_of_pass(&self) -> Bytes {
        let mut lines = Vec::new();
        self.end_event(&mut lines, self.next.saturating_sub(1));
        lines.into()
    }

    /// A reader comes, from after event `after` or from the start. `None` if there is no such event.
    ///
    /// `lost` is what it gets for an answer that is not there any more.
    pub(crate) fn attach(
        &mut self,
        after: Option<u64>,
        lost: impl FnOnce() -> Event,
    ) -> Option<ReaderName> {
        let at = match after {
            None => 0,
            Some(seq) if seq < self.next => seq + 1,
            Some(_) => return None,
        };
        self.break_pass();
        let is_lost = |answer: u64| answer >= at && self.find(answer).is_none();
        if self.answer.is_some_and(is_lost) {
            self.append(lost(), 0);
        }
        self.readers += 1;
        let name = ReaderName(self.readers);
        self.reader = Some(Reader { name, at });
        Some(name)
    }

    /// The reader takes what comes next for it.
    pub(crate) fn take(&mut self, name: ReaderName) -> Taken {
        let (next, gaps) = (self.next, &mut self.gaps);
        let Some(reader) = self.reader.as_mut().filter(|reader| reader.name == name) else {
            return Taken::End;
        };
        let first = self.events.partition_point(|entry| entry.seq < reader.at);
        let entry = self.events.get(first);
        let missing = entry.map_or(next, |entry| entry.seq) - reader.at;
        if missing > 0 {
            reader.at += missing;
            *gaps += 1;
            return Taken::Frame(comment(missing));
        }
        if let Some(entry) = entry {
            reader.at += 1;
            return Taken::Frame(entry.bytes.clone());
        }
        match &mut self.passing {
            Passing::Piece(piece @ Some(_)) => piece.take().map_or(Taken::Wait, Taken::Frame),
            _ if self.ended => Taken::End,
            _ => Taken::Wait,
        }
    }

    /// The reader leaves.
    pub(crate) fn leave(&mut self, name: ReaderName) {
        if self.reads(name) {
            self.reader = None;
            self.break_pass();
        }
    }

    /// Nothing comes any more.
    pub(crate) fn end(&mut self) {
        self.ended = true;
        self.break_pass();
    }

    /// Gives back all room. The ring has ended then, and its reader with it.
    pub(crate) fn clear(&mut self) {
        self.end();
        self.reader = None;
        self.events = VecDeque::new();
        self.cost = 0;
        self.answer = None;
        self.grant.shrink(usize::MAX);
    }

    pub(crate) fn has_ended(&self) -> bool {
        self.ended
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.answer.is_some()
    }

    /// Whether somebody reads.
    pub(crate) fn has_reader(&self) -> bool {
        self.reader.is_some()
    }

    /// Whether this is who reads.
    pub(crate) fn reads(&self, name: ReaderName) -> bool {
        self.reader
            .as_ref()
            .is_some_and(|reader| reader.name == name)
    }

    /// Whether this reader has taken everything, and nothing more comes.
    pub(crate) fn is_over_for(&self, name: ReaderName) -> bool {
        match &self.reader {
            Some(reader) if reader.name == name => self.ended && reader.at == self.next,
            _ => true,
        }
    }

    /// How often a reader was told that events are missing.
    pub(crate) fn gaps(&self) -> u64 {
        self.gaps
    }

    fn has_place(&self, cost: usize) -> bool {
        let fits = self.events.len() < self.most.events && self.cost + cost <= self.most.bytes;
        fits || self.events.is_empty()
    }

    fn append(&mut self, event: Event, cost: usize) {
        let seq = self.next;
        self.next += 1;
        if event.weight == Weight::Answer {
            self.answer = Some(seq);
        }
        if let Some(room) = event.room {
            self.grant.absorb(room, cost);
        }
        let mut bytes = event.lines;
        self.end_event(&mut bytes, seq);
        // What it was read with may be more than what it is.
        bytes.shrink_to_fit();
        self.cost += cost;
        self.events.push_back(Entry {
            seq,
            bytes: bytes.into(),
            droppable: event.weight == Weight::Droppable,
            cost,
        });
    }

    /// The event is dropped before it was there.
    fn skip(&mut self) {
        self.next += 1;
    }

    fn end_event(&self, lines: &mut Vec<u8>, seq: u64) {
        // Nothing fails that writes to a `Vec`.
        let _written = write!(lines, "id: {}{seq}\n\n", self.prefix);
    }

    fn drop_droppable(&mut self) -> bool {
        let oldest = self.events.iter().position(|entry| entry.droppable);
        oldest.is_some_and(|at| self.remove(at))
    }

    fn drop_taken(&mut self) -> bool {
        let at = self.reader.as_ref().map_or(0, |reader| reader.at);
        let taken = self.events.front().is_some_and(|oldest| oldest.seq < at);
        taken && self.remove(0)
    }

    fn remove(&mut self, at: usize) -> bool {
        let Some(entry) = self.events.remove(at) else {
            return false;
        };
        self.cost -= entry.cost;
        self.grant.shrink(entry.cost);
        true
    }

    fn find(&self, seq: u64) -> Option<&Entry> {
        let at = self
            .events
            .binary_search_by_key(&seq, |entry| entry.seq)
            .ok()?;
        self.events.get(at)
    }

    fn break_pass(&mut self) {
        if let Passing::Piece(_) = self.passing {
            self.passing = Passing::Broken;
        }
    }
}

fn comment(missing: u64) -> Bytes {
    match missing {
        1 => Bytes::from_static(b": an event was dropped here\n\n"),
        more => format!(": {more} events were dropped here\n\n").into(),
    }
}
