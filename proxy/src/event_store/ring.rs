//! The events of one stream, for a reader that may leave and come back.
//!
//! Nothing here waits, sleeps or wakes: the callers do. What is promised:
//!
//! 1. **Numbers.** Every event gets the next number, from 0 on, whatever becomes of it.
//! 2. **Once and in order.** A reader gets every event after the one that it named, once and in order. For those that are
//!    not there any more it gets a comment that says how many. One that names none, and is not the first, gets those that
//!    no reader has taken.
//! 3. **What goes.** Where room is short the oldest droppable event goes first, then, if the reader that is there has taken
//!    them, the oldest notifications, and after these the oldest of the others. Nothing else goes before the ring does.
//! 4. **Limits.** A ring has at most so many events. It takes one only while it has less than so many bytes: so it has at
//!    most one event more than that, however large. All of it is covered by a grant at any time, and what a reader took
//!    stays covered until nobody has it any more.
//! 5. **One reader.** The newest. An older one has come to its end.
//! 6. **The end.** Nothing comes after it.
//! 7. **Straight through.** An event for which there is no room at all goes through in pieces, to a reader that has taken
//!    everything before it. If that one leaves before the last piece, nobody gets the event.
//! 8. **The answer.** A reader that missed such an event, and finds no answer at the end, gets an error in its place: the
//!    event may have been the answer.

use std::{collections::VecDeque, io::Write as _, time::Duration};

use bytes::Bytes;

use super::{
    budget::{Exhausted, Reservation},
    event::{Event, ROOM_FOR_ID, Weight},
};

/// What an event costs besides its bytes: its place in the ring, which has up to twice as many, who owns its bytes, and
/// what both allocations round up to.
pub(crate) const EVENT_OVERHEAD: usize = 192;

/// The most that a reader takes at a time: 16 KiB. Of an event that goes straight through this much, and what hyper already
/// had, waits for the network uncounted.
pub(crate) const MAX_FRAME: usize = 16 * 1024;

/// Ends an event of which its reader has a part, wherever it was cut: as one of a type that no client knows. Where none was begun
/// it is a comment, and an event without data.
const TRUNCATED: &[u8] = b":\nevent: cut\n\n";

mod bypass;
mod dropping;

/// The events of one stream.
#[derive(Debug)]
pub(crate) struct Ring {
    /// What the ids of its events begin with.
    prefix: Box<str>,
    events: VecDeque<Entry>,
    /// What the events cost together.
    cost: usize,
    /// Covers what the stream itself costs.
    own: Reservation,
    /// Has nothing. What each event is granted is of the same budget.
    reservation: Reservation,
    limits: BufferLimits,
    /// The number of the next event.
    next: u64,
    answer: Option<u64>,
    reader: Option<Reader>,
    /// How many readers there were.
    readers: u64,
    /// The number of the first event that none of those that left has taken.
    unread: u64,
    bypass: Bypass,
    /// The last event that went straight through, and the error for who missed it.
    bypassed: Option<(u64, Event)>,
    gaps: u64,
    ended: bool,
    cleared: bool,
}

/// How much a ring may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BufferLimits {
    pub(crate) events: usize,
    pub(crate) bytes: usize,
    /// How long its clients are asked to wait before they come back.
    pub(crate) retry: Duration,
}

#[derive(Debug)]
struct Entry {
    seq: u64,
    bytes: Bytes,
    weight: Weight,
    cost: usize,
}

/// Who reads, and how far it is.
#[derive(Debug)]
struct Reader {
    id: ReaderId,
    /// The number of the first event that it did not have when it came.
    from: u64,
    /// The number of the event that it takes next.
    at: u64,
    /// How much of that it has taken.
    taken: usize,
}

/// Where a reader begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Beginning,
    /// After the event of this number.
    After(u64),
    /// At the first event that no reader has taken.
    Unread,
}

/// Which reader of a ring it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReaderId(u64);

/// The event that goes straight through.
#[derive(Debug, PartialEq, Eq)]
enum Bypass {
    Idle,
    /// The reader takes this piece next, if there is one.
    Piece(Option<Bytes>),
    /// Its reader left.
    Aborted,
}

/// What became of an event.
#[derive(Debug)]
pub(crate) enum Pushed {
    /// It is there, or was dropped.
    Done,
    /// There is room once the reader takes something.
    Wait(Event),
    /// A budget has no room for it. If nobody makes some, it can only go straight through.
    Exhausted(Event, Exhausted),
    /// There is no room, and nobody to make some.
    Full,
    /// The ring has ended.
    Ended,
}

/// What became of the piece that goes straight through.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Bypassed {
    /// The reader has taken it.
    Taken,
    Wait,
    /// There is no reader, or another one than there was when the event began.
    NoReader,
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
    /// `own` covers what the stream itself costs, and `reservation` is of the budget that its events have.
    pub(crate) fn new(
        prefix: Box<str>,
        limits: BufferLimits,
        own: Reservation,
        reservation: Reservation,
    ) -> Self {
        Self {
            prefix,
            events: VecDeque::new(),
            cost: 0,
            own,
            reservation,
            limits,
            next: 0,
            answer: None,
            reader: None,
            readers: 0,
            unread: 0,
            bypass: Bypass::Idle,
            bypassed: None,
            gaps: 0,
            ended: false,
            cleared: false,
        }
    }

    /// Adds an event.
    pub(crate) fn push(&mut self, mut event: Event) -> Pushed {
        if self.ended {
            return Pushed::Ended;
        }
        let cost = event.lines.len() + ROOM_FOR_ID + EVENT_OVERHEAD;
        loop {
            let exhausted = if self.has_place() {
                // What was granted while it was read is a part of that.
                let reservation = event
                    .reservation
                    .get_or_insert_with(|| self.reservation.sibling());
                match reservation.resize(cost) {
                    Ok(()) => {
                        self.append(event);
                        return Pushed::Done;
                    }
                    Err(exhausted) => Some(exhausted),
                }
            } else {
                None
            };
            if self.drop_droppable() {
                continue;
            }
            if event.weight == Weight::Droppable {
                self.skip();
                return Pushed::Done;
            }
            if self.drop_delivered() {
                continue;
            }
            return match (exhausted, &self.reader) {
                (Some(exhausted), _) => Pushed::Exhausted(event, exhausted),
                (None, Some(_)) => Pushed::Wait(event),
                (None, None) => Pushed::Full,
            };
        }
    }

    /// Adds an event that the stream has paid for: its first one, or an error as its last.
    pub(crate) fn push_paid(&mut self, mut event: Event) {
        if self.ended || self.answer.is_some() {
            return;
        }
        if let Bypass::Piece(_) = self.bypass {
            event.lines.splice(..0, TRUNCATED.iter().copied());
        }
        self.append(event);
    }

    /// A reader comes. `None` if there was no such event, or nothing is left.
    pub(crate) fn attach(&mut self, from: Start) -> Option<ReaderId> {
        if let Start::After(seq) = from
            && (self.cleared || seq >= self.next)
        {
            return None;
        }
        self.detach_reader();
        let at = match from {
            Start::Beginning => 0,
            Start::After(seq) => seq + 1,
            Start::Unread => self.unread,
        };
        self.readers += 1;
        let id = ReaderId(self.readers);
        self.reader = Some(Reader {
            id,
            from: at,
            at,
            taken: 0,
        });
        Some(id)
    }

    /// The reader takes what comes next for it.
    pub(crate) fn take(&mut self, id: ReaderId) -> Taken {
        self.replace_missed_answer(id);
        let (next, gaps) = (self.next, &mut self.gaps);
        let Some(reader) = self.reader.as_mut().filter(|reader| reader.id == id) else {
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
            let rest = entry.bytes.slice(reader.taken..);
            if rest.len() > MAX_FRAME {
                reader.taken += MAX_FRAME;
                return Taken::Frame(rest.slice(..MAX_FRAME));
            }
            (reader.at, reader.taken) = (reader.at + 1, 0);
            return Taken::Frame(rest);
        }
        match &mut self.bypass {
            Bypass::Piece(piece @ Some(_)) => piece.take().map_or(Taken::Wait, Taken::Frame),
            _ if self.ended => Taken::End,
            _ => Taken::Wait,
        }
    }

    /// The reader leaves.
    pub(crate) fn detach(&mut self, id: ReaderId) {
        if self.reader.as_ref().is_some_and(|reader| reader.id == id) {
            self.detach_reader();
        }
    }

    /// Adds the event that names a place to resume from before there is any message.
    pub(crate) fn prime(&mut self) {
        self.push_paid(Event::priming(self.limits.retry));
    }

    /// An event without a message that names the last one before where this reader is. `None` if there is none.
    pub(crate) fn position_event(&self, id: ReaderId) -> Option<Bytes> {
        let reader = self.reader.as_ref().filter(|reader| reader.id == id)?;
        let last = reader.at.checked_sub(1)?;
        let mut lines = Event::priming(self.limits.retry).lines;
        self.end_event(&mut lines, last);
        Some(lines.into())
    }

    /// Nothing comes any more.
    pub(crate) fn end(&mut self) {
        self.ended = true;
        self.abort_bypass();
    }

    /// Gives back all room. The ring has ended then, and its reader with it.
    pub(crate) fn clear(&mut self) {
        self.end();
        self.cleared = true;
        self.reader = None;
        self.events = VecDeque::new();
        self.cost = 0;
        self.bypassed = None;
        self.own.shrink(usize::MAX);
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.answer.is_some()
    }

    /// Whether its answer is still to come, or to be read by who is there.
    pub(crate) fn is_in_progress(&self) -> bool {
        let is_unread = |reader: &Reader| reader.at < self.next;
        !(self.ended || self.is_answered()) || self.reader.as_ref().is_some_and(is_unread)
    }

    /// Returns `true` if there is an answer that no reader has taken, and no reader.
    pub(crate) fn has_unread_answer(&self) -> bool {
        let is_unread = self.answer.is_some_and(|answer| answer >= self.unread);
        is_unread && self.reader.is_none() && !self.cleared
    }

    /// How long its clients are asked to wait before they resume.
    pub(crate) fn retry(&self) -> Duration {
        self.limits.retry
    }

    /// Whether somebody reads.
    pub(crate) fn has_reader(&self) -> bool {
        self.reader.is_some()
    }

    /// Returns `true` if it had readers, and all of them have left.
    pub(crate) fn lost_all_readers(&self) -> bool {
        self.readers > 0 && self.reader.is_none()
    }

    /// Whether this is who reads, has taken everything, and nothing more comes.
    pub(crate) fn is_over_for(&self, id: ReaderId) -> bool {
        let reader = self.reader.as_ref().filter(|reader| reader.id == id);
        self.ended && reader.is_some_and(|reader| reader.at == self.next)
    }

    /// How often a reader was told that events are missing.
    pub(crate) fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Whether there is an event after this one, or one that is gone.
    pub(crate) fn has_more(&self, after: u64) -> bool {
        !self.cleared && after < self.next.saturating_sub(1)
    }

    /// Whether there ever was an event. Only then a client may resume.
    pub(crate) fn has_events(&self) -> bool {
        self.next > 0
    }

    /// The reader goes, if there is one.
    pub(crate) fn detach_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            self.unread = self.unread.max(reader.at);
            self.abort_bypass();
        }
    }

    fn append(&mut self, mut event: Event) {
        let seq = self.next;
        self.next += 1;
        if event.weight == Weight::Answer {
            self.answer = Some(seq);
        }
        // What it was read with may be more than what it is. What is counted is kept: cut to the byte, places of events that
        // are gone are too small for those that come.
        event.lines.shrink_to(event.lines.len() + ROOM_FOR_ID);
        self.end_event(&mut event.lines, seq);
        let cost = event.reservation.as_ref().map_or(0, Reservation::bytes);
        self.cost += cost;
        self.events.push_back(Entry {
            seq,
            weight: event.weight,
            bytes: event.into_bytes(),
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
}

fn comment(missing: u64) -> Bytes {
    match missing {
        1 => Bytes::from_static(b": an event was dropped here\n\n"),
        more => format!(": {more} events were dropped here\n\n").into(),
    }
}

#[cfg(test)]
mod model;
