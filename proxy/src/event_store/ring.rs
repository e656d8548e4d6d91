//! Buffers one stream's events for a reader that may disconnect and resume.
//!
//! [`Ring`] does no I/O. Its callers are responsible for waiting and for waking tasks. The ring guarantees the following:
//!
//! 1. **Numbers.** Events are numbered from 0, including dropped ones.
//! 2. **Once and in order.** A reader gets every event after its starting point, once and in order. In place of dropped events,
//!    it gets an SSE comment stating how many were dropped. With [`Start::Unread`], a reader starts at the first event that no
//!    reader has taken.
//! 3. **Drop order.** When there is no room, the oldest droppable event is dropped first. If there is none, the oldest
//!    notification that the attached reader has already taken is dropped, or else the oldest other event that it has taken. All
//!    other events stay until the ring is cleared.
//! 4. **Limits.** `push` only adds an event while the ring is below both of its limits ([`BufferLimits`]), so it exceeds the
//!    byte limit by at most one event. `push_reserved` ignores both limits. Every event in the ring is always covered by a
//!    reservation. Bytes that a reader has taken stay covered until their last holder drops them.
//! 5. **One reader.** Attaching a reader detaches the previous one, whose `take` returns [`Taken::End`] after that.
//! 6. **The end.** Once the ring has ended, it accepts no more events, except for the error in guarantee 8.
//! 7. **Bypass.** An event that does not fit bypasses the ring in pieces, as soon as the reader has taken everything before
//!    it. If the reader detaches before it has taken the last piece, no other reader ever gets the event.
//! 8. **The answer.** An event that bypassed the ring may have been the answer. So if the ring has ended without an answer left
//!    in it, a reader that missed one of these events gets an error instead.

use std::{collections::VecDeque, io::Write as _, time::Duration};

use bytes::Bytes;

use super::{
    budget::{Exhausted, Reservation},
    event::{Event, ID_CAPACITY, Weight},
};

/// Memory overhead of an event, beyond its own bytes.
///
/// This covers the event's entry in the ring (whose capacity can be twice its length), the owner of its bytes, and the
/// rounding of both allocations.
pub(crate) const EVENT_OVERHEAD: usize = 192;

/// Maximum number of bytes that a reader takes at a time.
///
/// While an event bypasses the ring, one piece of this size and whatever hyper has buffered are not covered by a reservation.
pub(crate) const MAX_FRAME: usize = 16 * 1024;

/// Terminates an event that was cut off at an arbitrary byte while its reader was taking it.
///
/// A client then sees an event of an unknown type or, if none of it was sent, a comment and an event without data.
const TRUNCATED: &[u8] = b":\nevent: cut\n\n";

mod bypass;
mod dropping;

/// A single stream's events.
#[derive(Debug)]
pub(crate) struct Ring {
    /// The prefix of the stream's event ids.
    prefix: Box<str>,
    events: VecDeque<Entry>,
    /// The total cost of the events.
    cost: usize,
    /// Covers the stream itself.
    stream_reservation: Reservation,
    /// Always empty. Used only to create reservations for events.
    event_reservation: Reservation,
    limits: BufferLimits,
    /// The number of the next event.
    next: u64,
    answer: Option<u64>,
    reader: Option<Reader>,
    /// How many readers have ever been attached.
    readers: u64,
    /// The first event that no detached reader has taken.
    unread: u64,
    bypass: Bypass,
    /// The last event that bypassed the ring, along with the error for a reader that missed it.
    bypassed: Option<(u64, Event)>,
    gaps: u64,
    has_ended: bool,
    is_cleared: bool,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct BufferLimits {
    pub(crate) events: usize,
    pub(crate) bytes: usize,
    /// The reconnect delay sent to clients.
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
    /// The first event that the reader may have missed. This is after any event that bypassed the ring to this reader.
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

/// The state of an event bypassing the ring.
#[derive(Debug, PartialEq, Eq)]
enum Bypass {
    Idle,
    /// The piece that the reader takes next, or `None` if it has taken every piece so far.
    Piece(Option<Bytes>),
    /// The reader has detached, there was no reader, or the ring has ended.
    Aborted,
}

/// The result of a push.
#[derive(Debug)]
pub(crate) enum Pushed {
    /// The event has been added or dropped.
    Done,
    /// There may be room once the reader has taken more.
    Wait(Event),
    /// A budget has no room. Unless a stream can be evicted, the event has to bypass the ring.
    Exhausted(Event, Exhausted),
    /// There is no room, and no attached reader that could free any.
    Full,
    /// The ring has ended.
    Ended,
}

/// The state of a piece bypassing the ring.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Bypassed {
    /// The reader has taken it.
    Taken,
    Wait,
    /// The event's reader has detached, there was no reader, or the ring has ended.
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
    /// `stream_reservation` covers the stream itself. `event_reservation` must be empty.
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

    /// Adds an event. If there is no room for a droppable event, it is counted and dropped.
    pub(crate) fn push(&mut self, mut event: Event) -> Pushed {
        if self.has_ended {
            return Pushed::Ended;
        }
        let cost = event.lines.len() + ID_CAPACITY + EVENT_OVERHEAD;
        loop {
            let exhausted = if self.is_below_limits() {
                // Reuse the reservation that the event was read under, if there is one.
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

    /// Adds an event covered by the stream's own reservation.
    ///
    /// This is the first event, or the error that ends the stream. Does nothing if the ring has ended or has an answer.
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
    /// If `from` is [`Start::After`], returns `None` if the event never existed or the ring has been cleared. The previous
    /// reader then stays attached.
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

    /// Returns what the reader gets next: up to [`MAX_FRAME`] bytes of an event, or a comment.
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

    /// Adds the priming event, which carries no message, just an id to resume from.
    pub(crate) fn prime(&mut self) {
        self.push_reserved(Event::priming(self.limits.retry));
    }

    /// Returns an event carrying just the id of the event before the reader's position.
    ///
    /// Returns `None` if the reader has detached, or if there is no earlier event.
    pub(crate) fn position_event(&self, id: ReaderId) -> Option<Bytes> {
        let reader = self.reader.as_ref().filter(|reader| reader.id == id)?;
        let last = reader.position.checked_sub(1)?;
        let mut lines = Event::priming(self.limits.retry).lines;
        self.end_event(&mut lines, last);
        Some(lines.into())
    }

    /// Ends the ring. Any further push is rejected.
    pub(crate) fn end(&mut self) {
        self.has_ended = true;
        self.abort_bypass();
    }

    /// Ends the ring, drops its events, and releases its reservations.
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

    /// Returns `true` if the answer is pending, or if the attached reader has events to take.
    pub(crate) fn is_in_progress(&self) -> bool {
        let is_unread = |reader: &Reader| reader.position < self.next;
        !(self.has_ended || self.is_answered()) || self.reader.as_ref().is_some_and(is_unread)
    }

    /// Returns `true` if no reader has taken the answer yet, and none is attached.
    pub(crate) fn has_unread_answer(&self) -> bool {
        let is_unread = self.answer.is_some_and(|answer| answer >= self.unread);
        is_unread && self.reader.is_none() && !self.is_cleared
    }

    /// Returns the reconnect delay sent to clients.
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

    /// Returns `true` if the ring has ended and this reader, still attached, has taken all of it.
    pub(crate) fn is_fully_read_by(&self, id: ReaderId) -> bool {
        let reader = self.reader.as_ref().filter(|reader| reader.id == id);
        self.has_ended && reader.is_some_and(|reader| reader.position == self.next)
    }

    /// Returns how many times a reader has been notified of missing events.
    pub(crate) fn gaps(&self) -> u64 {
        self.gaps
    }

    /// Returns `true` if any event follows this one, dropped or not. Always `false` once the ring has been cleared.
    pub(crate) fn has_more(&self, after: u64) -> bool {
        !self.is_cleared && after < self.next.saturating_sub(1)
    }

    /// Returns `true` if there has ever been an event. Without one, a client has no id to resume from.
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

    /// Skips a number, for an event dropped instead of being added.
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
        _ => format!(": {missing} events were dropped here\n\n").into(),
    }
}

#[cfg(test)]
mod model;
