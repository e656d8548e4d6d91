//! The events of one stream, for a reader that may disconnect and resume.
//!
//! [`Ring`] does no I/O, and it is up to its callers to wait and to wake tasks. It guarantees the following:
//!
//! 1. **Numbers.** Events, including dropped ones, are numbered from 0.
//! 2. **Once and in order.** A reader receives each event after the one that it specified, once and in order. Dropped events
//!    are replaced by an SSE comment that states how many there were. With [`Start::Unread`], a reader starts at the first
//!    event that no reader has taken.
//! 3. **Drop order.** When there is no room, the oldest droppable event is dropped first. Next are the oldest notifications
//!    that the attached reader has taken, and then the oldest of its other taken events. All other events are kept until the
//!    ring is cleared.
//! 4. **Limits.** `push` only adds an event while the ring is below both limits ([`BufferLimits`]), so the byte limit is
//!    exceeded by at most one event. `push_reserved` ignores both. Every event in the ring is covered by a reservation at
//!    all times, and bytes that a reader has taken are covered until their last holder drops them.
//! 5. **One reader.** Attaching a reader detaches the previous one, whose `take` then returns [`Taken::End`].
//! 6. **The end.** Once the ring has ended, no event can be pushed. Only the error in guarantee 8 can still be appended.
//! 7. **Bypass.** An event that does not fit bypasses the ring in pieces, to a reader that has taken everything before it.
//!    If that reader detaches before the last piece, no reader gets the event.
//! 8. **The answer.** A reader that missed a bypassing event, and finds no answer by the time the ring has ended, gets an
//!    error instead, because that event may have been the answer.

use std::{collections::VecDeque, io::Write as _, time::Duration};

use bytes::Bytes;

use super::{
    budget::{Exhausted, Reservation},
    event::{Event, ID_CAPACITY, Weight},
};

/// Memory overhead of an event, beyond its own bytes.
///
/// This covers its entry in the ring, whose capacity can be twice its length, the owner of its bytes, and the rounding up
/// of both allocations.
pub(crate) const EVENT_OVERHEAD: usize = 192;

/// Maximum number of bytes that a reader takes at a time.
///
/// While an event bypasses the ring, one such piece and whatever hyper has buffered are not covered by a reservation.
pub(crate) const MAX_FRAME: usize = 16 * 1024;

/// Terminates an event that was cut off at an arbitrary byte while its reader was taking it.
///
/// Clients then parse an event of an unknown type or, if no part of it was sent, a comment and an event without data.
const TRUNCATED: &[u8] = b":\nevent: cut\n\n";

mod bypass;
mod dropping;

/// The events of one stream.
#[derive(Debug)]
pub(crate) struct Ring {
    /// The prefix of its event ids.
    prefix: Box<str>,
    events: VecDeque<Entry>,
    /// The total cost of the events.
    cost: usize,
    /// Covers the cost of the stream itself.
    stream_reservation: Reservation,
    /// Always empty. The events' reservations are created as its siblings.
    event_reservation: Reservation,
    limits: BufferLimits,
    /// The number of the next event.
    next: u64,
    answer: Option<u64>,
    reader: Option<Reader>,
    /// How many readers have been attached so far.
    readers: u64,
    /// The first event that no detached reader has taken.
    unread: u64,
    bypass: Bypass,
    /// The last event that bypassed the ring, with the error for a reader that has missed it.
    bypassed: Option<(u64, Event)>,
    gaps: u64,
    has_ended: bool,
    is_cleared: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct BufferLimits {
    pub(crate) events: usize,
    pub(crate) bytes: usize,
    /// The reconnect delay that is sent to clients.
    pub(crate) retry: Duration,
}

#[derive(Debug)]
struct Entry {
    seq: u64,
    bytes: Bytes,
    weight: Weight,
    cost: usize,
}

#[derive(Debug)]
struct Reader {
    id: ReaderId,
    /// The first event that the reader may have missed. Events that bypassed the ring to this reader precede it.
    from: u64,
    /// The event that the reader takes next.
    position: u64,
    /// How many bytes of that event the reader has already taken.
    taken: usize,
}

/// Where a reader starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Start {
    Beginning,
    /// After the event with this number.
    After(u64),
    /// At the first event that no reader has taken.
    Unread,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReaderId(u64);

/// The state of the event that bypasses the ring.
#[derive(Debug, PartialEq, Eq)]
enum Bypass {
    Idle,
    /// The piece that the reader takes next, or `None` if there is none to take.
    Piece(Option<Bytes>),
    /// The reader has detached, there was none, or the ring has ended.
    Aborted,
}

/// The result of a push.
#[derive(Debug)]
pub(crate) enum Pushed {
    /// The event has been added or dropped.
    Done,
    /// There may be room once the reader has taken more.
    Wait(Event),
    /// A budget has no room. The event can only bypass the ring, unless a stream is evicted.
    Exhausted(Event, Exhausted),
    /// There is no room, and no attached reader to free any.
    Full,
    /// The ring has ended.
    Ended,
}

/// The state of a piece that bypasses the ring.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Bypassed {
    /// The reader has taken it.
    Taken,
    Wait,
    /// The reader that was taking the event has detached, there was none, or the ring has ended.
    NoReader,
}

/// The result of a read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Taken {
    Frame(Bytes),
    Wait,
    End,
}

// === impl Ring ===

impl Ring {
    /// Creates an empty ring.
    ///
    /// `stream_reservation` covers the cost of the stream itself, and `event_reservation` is empty.
    pub(crate) fn new(
        prefix: Box<str>,
        limits: BufferLimits,
        stream_reservation: Reservation,
        event_reservation: Reservation,
    ) -> Self {
        Self {
            prefix,
            events: VecDeque::new(),
            cost: 0,
            stream_reservation,
            event_reservation,
            limits,
            next: 0,
            answer: None,
            reader: None,
            readers: 0,
            unread: 0,
            bypass: Bypass::Idle,
            bypassed: None,
            gaps: 0,
            has_ended: false,
            is_cleared: false,
        }
    }

    /// Adds an event. If there is no room for a droppable one, it is counted and dropped.
    pub(crate) fn push(&mut self, mut event: Event) -> Pushed {
        if self.has_ended {
            return Pushed::Ended;
        }
        let cost = event.lines.len() + ID_CAPACITY + EVENT_OVERHEAD;
        loop {
            let exhausted = if self.is_below_limits() {
                // Reuse the reservation under which the event was read, if there is one.
                let reservation = event
                    .reservation
                    .get_or_insert_with(|| self.event_reservation.sibling());
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

    /// Adds an event that the stream's own reservation covers.
    ///
    /// This is either the stream's first event or an error that ends the stream. Does nothing if the ring has ended or
    /// already has an answer.
    pub(crate) fn push_reserved(&mut self, mut event: Event) {
        if self.has_ended || self.answer.is_some() {
            return;
        }
        if let Bypass::Piece(_) = self.bypass {
            event.lines.splice(..0, TRUNCATED.iter().copied());
        }
        self.append(event);
    }

    /// Attaches a reader and detaches the previous one.
    ///
    /// Returns `None`, and keeps the previous reader, if `from` is an event that never existed or the ring has been cleared.
    pub(crate) fn attach(&mut self, from: Start) -> Option<ReaderId> {
        if let Start::After(seq) = from
            && (self.is_cleared || seq >= self.next)
        {
            return None;
        }
        self.detach_reader();
        let position = match from {
            Start::Beginning => 0,
            Start::After(seq) => seq + 1,
            Start::Unread => self.unread,
        };
        self.readers += 1;
        let id = ReaderId(self.readers);
        self.reader = Some(Reader {
            id,
            from: position,
            position,
            taken: 0,
        });
        Some(id)
    }

    /// Returns what the reader gets next: up to [`MAX_FRAME`] bytes, or a comment.
    ///
    /// A detached reader gets [`Taken::End`].
    pub(crate) fn take(&mut self, id: ReaderId) -> Taken {
        self.replace_missed_answer(id);
        let (next, gaps) = (self.next, &mut self.gaps);
        let Some(reader) = self.reader.as_mut().filter(|reader| reader.id == id) else {
            return Taken::End;
        };
        let first = self
            .events
            .partition_point(|entry| entry.seq < reader.position);
        let entry = self.events.get(first);
        let missing = entry.map_or(next, |entry| entry.seq) - reader.position;
        if missing > 0 {
            reader.position += missing;
            *gaps += 1;
            return Taken::Frame(gap_comment(missing));
        }
        if let Some(entry) = entry {
            let rest = entry.bytes.slice(reader.taken..);
            if rest.len() > MAX_FRAME {
                reader.taken += MAX_FRAME;
                return Taken::Frame(rest.slice(..MAX_FRAME));
            }
            (reader.position, reader.taken) = (reader.position + 1, 0);
            return Taken::Frame(rest);
        }
        match &mut self.bypass {
            Bypass::Piece(piece @ Some(_)) => piece.take().map_or(Taken::Wait, Taken::Frame),
            _ if self.has_ended => Taken::End,
            _ => Taken::Wait,
        }
    }

    /// Detaches a reader, unless it has already been replaced.
    pub(crate) fn detach(&mut self, id: ReaderId) {
        if self.reader.as_ref().is_some_and(|reader| reader.id == id) {
            self.detach_reader();
        }
    }

    /// Adds the priming event, which has no message, just an id to resume from.
    pub(crate) fn prime(&mut self) {
        self.push_reserved(Event::priming(self.limits.retry));
    }

    /// Returns an event with no message, just the id of the event before the reader's position.
    ///
    /// Returns `None` if the reader has detached or there is no earlier event.
    pub(crate) fn position_event(&self, id: ReaderId) -> Option<Bytes> {
        let reader = self.reader.as_ref().filter(|reader| reader.id == id)?;
        let last = reader.position.checked_sub(1)?;
        let mut lines = Event::priming(self.limits.retry).lines;
        self.end_event(&mut lines, last);
        Some(lines.into())
    }

    /// Ends the ring, which rejects any further pushes.
    pub(crate) fn end(&mut self) {
        self.has_ended = true;
        self.abort_bypass();
    }

    /// Ends the ring and releases everything that it has reserved.
    pub(crate) fn clear(&mut self) {
        self.end();
        self.is_cleared = true;
        self.reader = None;
        self.events = VecDeque::new();
        self.cost = 0;
        self.bypassed = None;
        self.stream_reservation.shrink(usize::MAX);
    }

    pub(crate) fn is_answered(&self) -> bool {
        self.answer.is_some()
    }

    /// Returns `true` if the answer is pending, or the attached reader still has events to take.
    pub(crate) fn is_in_progress(&self) -> bool {
        let is_unread = |reader: &Reader| reader.position < self.next;
        !(self.has_ended || self.is_answered()) || self.reader.as_ref().is_some_and(is_unread)
    }

    /// Returns `true` if no reader has taken the answer yet, and none is attached.
    pub(crate) fn has_unread_answer(&self) -> bool {
        let is_unread = self.answer.is_some_and(|answer| answer >= self.unread);
        is_unread && self.reader.is_none() && !self.is_cleared
    }

    /// Returns the reconnect delay that is sent to clients.
    pub(crate) fn retry(&self) -> Duration {
        self.limits.retry
    }

    pub(crate) fn has_reader(&self) -> bool {
        self.reader.is_some()
    }

    /// Returns how many readers have detached.
    pub(crate) fn detached_readers(&self) -> u64 {
        self.readers - u64::from(self.reader.is_some())
    }

    /// Returns `true` if the ring has had readers, and all of them have detached.
    pub(crate) fn lost_all_readers(&self) -> bool {
        self.readers > 0 && self.reader.is_none()
    }

    /// Returns `true` if the ring has ended and this reader is attached and has taken all of it.
    pub(crate) fn is_fully_read_by(&self, id: ReaderId) -> bool {
        let reader = self.reader.as_ref().filter(|reader| reader.id == id);
        self.has_ended && reader.is_some_and(|reader| reader.position == self.next)
    }

    /// Returns how many times a reader has been notified of missing events.
    pub(crate) fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Returns `true` if there is a later event, even a dropped one. Always `false` once cleared.
    pub(crate) fn has_more(&self, after: u64) -> bool {
        !self.is_cleared && after < self.next.saturating_sub(1)
    }

    /// Returns `true` if there has ever been an event. Otherwise no client can resume.
    pub(crate) fn has_events(&self) -> bool {
        self.next > 0
    }

    pub(crate) fn detach_reader(&mut self) {
        if let Some(reader) = self.reader.take() {
            self.unread = self.unread.max(reader.position);
            self.abort_bypass();
        }
    }

    fn append(&mut self, mut event: Event) {
        let seq = self.next;
        self.next += 1;
        if event.weight == Weight::Answer {
            self.answer = Some(seq);
        }
        // The buffer may be larger than the event's reservation.
        event.lines.shrink_to(event.lines.len() + ID_CAPACITY);
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

    /// Skips the number of an event that is dropped without having been added.
    fn skip(&mut self) {
        self.next += 1;
    }

    /// Appends an event's `id` line and the blank line that ends the event.
    fn end_event(&self, lines: &mut Vec<u8>, seq: u64) {
        // Writing to a `Vec` cannot fail.
        let _ = write!(lines, "id: {}{seq}\n\n", self.prefix);
    }
}

fn gap_comment(missing: u64) -> Bytes {
    match missing {
        1 => Bytes::from_static(b": an event was dropped here\n\n"),
        more => format!(": {more} events were dropped here\n\n").into(),
    }
}

#[cfg(test)]
mod model;
