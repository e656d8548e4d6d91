//! Decides which answers to ended calls to write to the directory, and when.
//!
//! The queue contains both the answers still waiting to be written and those already written. [`AnswerWriter`](super::writer::AnswerWriter)
//! carries out the writes and removals.
//!
//! 1. When a call ends, it is assigned the next place in the queue. Unless the answer is evicted, it keeps that place until [`ANSWER_TTL`]
//!    after the call ended, whether or not it has been written and even if writes fail.
//! 2. Answers that have been written, or may have been, count towards the bounds just like those still waiting. That way, the bounds limit
//!    both the directory and this instance's memory.
//! 3. When a bound is exceeded, the oldest answers are evicted. An evicted answer that may already have been written is also removed from
//!    the directory. Removals are sent before writes, so the directory exceeds the bounds by no more than what is in flight.
//! 4. After a failure, the queue pauses for [`RETRY_DELAY`].
//! 5. A written answer stays in memory so that it can be rewritten if the directory loses data ([`AnswerQueue::write_again`]).

use std::{
    collections::{BTreeMap, BTreeSet, HashMap, hash_map::Entry as Slot},
    fmt,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::{
    directory::ANSWER_TTL,
    ids::{CallNumber, Incarnation, SessionHash},
};

/// Maximum total size of one session's answers, the same as the library's default limit.
pub(super) const MAX_SESSION_SIZE: usize = 1024 * 1024;

/// Maximum total size of an instance's answers.
pub(super) const MAX_INSTANCE_SIZE: usize = 64 * 1024 * 1024;

/// Number of bytes added to each answer's size.
///
/// A key in the directory takes up about this much. Including it also bounds the number of answers.
pub(super) const OVERHEAD: usize = 256;

/// Maximum number of bytes in flight to the directory.
///
/// An instance shutting down may have 64 MiB to write, which then takes only 16 round trips.
pub(super) const MAX_BYTES_IN_FLIGHT: usize = 4 * 1024 * 1024;

/// Maximum number of operations in flight. They are sent over one connection, one after the other.
pub(super) const MAX_IN_FLIGHT: usize = 256;

/// How long to wait after a failure before retrying the directory.
pub(super) const RETRY_DELAY: Duration = Duration::from_millis(500);

/// How long after its call ended an unwritten answer is considered late.
///
/// A write usually takes less time, so answers are rarely late as long as the directory accepts them.
const LATE_THRESHOLD: Duration = Duration::from_secs(1);

/// An instance's answers to ended calls, until they expire or are evicted.
#[derive(Debug, Default)]
pub(super) struct AnswerQueue {
    /// The answers that count towards the bounds, oldest first.
    answers: BTreeMap<u64, QueuedAnswer>,
    /// Evicted answers that may be in the directory and have no operation in flight.
    removals: BTreeMap<u64, Removal>,
    /// The places in `answers` whose answers are neither written nor in flight.
    waiting: BTreeSet<u64>,
    /// Reserved places, and the places in `answers` whose answers have yet to be written.
    unwritten: BTreeSet<u64>,
    /// Each key's place. A key keeps its place while an operation on it is in flight, or while it is in `removals`.
    places: HashMap<AnswerKey, u64>,
    sessions: HashMap<SessionHash, SessionAnswers>,
    /// The total size of `answers`.
    size: usize,
    in_flight: usize,
    bytes_in_flight: usize,
    /// Number of times all answers had to be rewritten.
    losses: u64,
    next_place: u64,
    /// When to retry the directory after a failure.
    paused_until: Option<Instant>,
}

/// An answer's key in the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct AnswerKey {
    pub(super) session: SessionHash,
    pub(super) generation: Incarnation,
    pub(super) call: CallNumber,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    number: u64,
    expires: Instant,
}

/// The bound that caused an eviction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bound {
    /// [`MAX_SESSION_SIZE`].
    Session,
    /// [`MAX_INSTANCE_SIZE`].
    Instance,
    /// [`ANSWER_TTL`], which passed before the answer was written.
    Time,
}

#[derive(Debug)]
pub(super) struct Operation {
    pub(super) key: AnswerKey,
    /// The answer to write, or `None` to remove the answer from the directory.
    pub(super) text: Option<Bytes>,
    /// How much longer the directory should retain the answer.
    pub(super) ttl: Duration,
    place: Place,
    /// The value of `losses` when the operation started.
    losses: u64,
}

#[derive(Debug)]
struct QueuedAnswer {
    key: AnswerKey,
    text: Bytes,
    size: usize,
    expires: Instant,
    state: State,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// No write has started.
    New,
    InFlight,
    /// A write failed but may have been executed, or the directory may have lost the answer.
    Failed,
    Written,
}

#[derive(Debug)]
struct Removal {
    key: AnswerKey,
    expires: Instant,
}

#[derive(Debug, Default)]
struct SessionAnswers {
    size: usize,
    places: BTreeSet<u64>,
}

// === impl AnswerQueue ===

impl AnswerQueue {
    /// Reserves a place for the answer to a call that just ended.
    pub(super) fn reserve(&mut self, now: Instant) -> Place {
        let number = self.next_place;
        self.next_place += 1;
        self.unwritten.insert(number);
        Place {
            number,
            expires: now + ANSWER_TTL,
        }
    }

    /// Frees a place, unless an answer has been put in it.
    pub(super) fn release(&mut self, place: Place) {
        if !self.answers.contains_key(&place.number) {
            self.unwritten.remove(&place.number);
        }
    }

    /// Puts an answer in its place, and returns the bound that this exceeds, if any.
    ///
    /// # Edge cases
    ///
    /// If the key already has a place, nothing changes and `text` is discarded. An answer that, together with its [`OVERHEAD`], is larger
    /// than [`MAX_SESSION_SIZE`] exceeds the bound on its own and is not queued.
    pub(super) fn put(&mut self, place: Place, key: AnswerKey, text: Bytes) -> Option<Bound> {
        let size = text.len() + OVERHEAD;
        if size > MAX_SESSION_SIZE {
            return Some(Bound::Session);
        }
        let Slot::Vacant(free) = self.places.entry(key) else {
            return None;
        };
        free.insert(place.number);
        let session_answers = self.sessions.entry(key.session).or_default();
        session_answers.size += size;
        session_answers.places.insert(place.number);
        self.size += size;
        self.waiting.insert(place.number);
        let queued = QueuedAnswer {
            key,
            text,
            size,
            expires: place.expires,
            state: State::New,
        };
        self.answers.insert(place.number, queued);
        self.enforce_bounds(key.session)
    }

    /// Removes expired answers and removals.
    ///
    /// Returns `true` if any of the answers was not known to be in the directory.
    pub(super) fn expire(&mut self, now: Instant) -> bool {
        let mut has_unwritten = false;
        while let Some((&number, queued)) = self.answers.first_key_value()
            && queued.expires <= now
            && let Some(queued) = self.take_queued(number)
        {
            has_unwritten |= queued.state != State::Written;
            self.free(queued.key, number);
        }
        while let Some(first) = self.removals.first_entry()
            && first.get().expires <= now
        {
            let (number, removal) = first.remove_entry();
            self.free(removal.key, number);
        }
        has_unwritten
    }

    /// Returns the next operation, which counts as in flight until [`complete`](Self::complete).
    ///
    /// Returns `None` if nothing is waiting, the queue is paused, or the in-flight limits have been reached.
    pub(super) fn next_operation(&mut self, now: Instant) -> Option<Operation> {
        self.paused_until = self.paused_until.filter(|until| now < *until);
        if self.paused_until.is_some() || self.in_flight >= MAX_IN_FLIGHT {
            return None;
        }
        let operation = match self.removals.pop_first() {
            Some((number, Removal { key, expires })) => Operation {
                key,
                text: None,
                ttl: expires - now,
                place: Place { number, expires },
                losses: self.losses,
            },
            None => self.next_write(now)?,
        };
        self.in_flight += 1;
        self.bytes_in_flight += operation.bytes();
        Some(operation)
    }

    fn next_write(&mut self, now: Instant) -> Option<Operation> {
        let number = *self.waiting.first()?;
        let queued = self.answers.get_mut(&number)?;
        let text = queued.text.clone();
        if self.bytes_in_flight + text.len() > MAX_BYTES_IN_FLIGHT {
            return None;
        }
        queued.state = State::InFlight;
        self.waiting.remove(&number);
        Some(Operation {
            key: queued.key,
            text: Some(text),
            ttl: queued.expires - now,
            place: Place {
                number,
                expires: queued.expires,
            },
            losses: self.losses,
        })
    }

    /// Requeues all written answers.
    ///
    /// Answers currently being written are requeued when their writes end.
    pub(super) fn write_again(&mut self) {
        self.losses += 1;
        for (number, queued) in &mut self.answers {
            if queued.state == State::Written {
                queued.state = State::Failed;
                self.waiting.insert(*number);
                self.unwritten.insert(*number);
            }
        }
    }

    /// Records that an operation has ended.
    pub(super) fn complete(&mut self, operation: Operation, succeeded: bool, now: Instant) {
        self.in_flight -= 1;
        self.bytes_in_flight -= operation.bytes();
        if !succeeded {
            self.paused_until = Some(now + RETRY_DELAY);
        }
        let Operation {
            key,
            text,
            place,
            losses,
            ..
        } = operation;
        let number = place.number;
        let is_write = text.is_some();
        match self.answers.get_mut(&number).filter(|_| is_write) {
            Some(queued) if succeeded && losses == self.losses => {
                queued.state = State::Written;
                self.unwritten.remove(&number);
            }
            Some(queued) => {
                queued.state = State::Failed;
                self.waiting.insert(number);
            }
            // The answer was evicted while it was being written, or its removal failed.
            _ if (is_write || !succeeded) && place.expires > now => {
                let expires = place.expires;
                self.removals.insert(number, Removal { key, expires });
            }
            _ => self.free(key, number),
        }
    }

    /// Returns when the next answer or removal expires or the pause ends, whichever is first.
    ///
    /// Returns `None` if nothing is queued.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let queued = self
            .answers
            .first_key_value()
            .map(|(_, queued)| queued.expires);
        let removal = self.removals.first_key_value();
        let expires = queued
            .into_iter()
            .chain(removal.map(|(_, removal)| removal.expires));
        expires.chain(self.paused_until).min()
    }

    /// Returns the number of the next place to be reserved.
    pub(super) fn end(&self) -> u64 {
        self.next_place
    }

    /// Returns `true` if no place before `end` is still reserved or has an unwritten answer.
    ///
    /// Evicted and expired answers are ignored.
    pub(super) fn is_written_until(&self, end: u64) -> bool {
        self.unwritten.first().is_none_or(|first| *first >= end)
    }

    /// Returns `true` if any answer is late.
    ///
    /// An answer is late if it is still not known to be in the directory [`LATE_THRESHOLD`] after its call ended.
    pub(super) fn has_late_answers(&self, now: Instant) -> bool {
        let mut unwritten = self.unwritten.iter();
        let first = unwritten.find_map(|number| self.answers.get(number));
        first.is_some_and(|queued| {
            queued.expires.saturating_duration_since(now) < ANSWER_TTL - LATE_THRESHOLD
        })
    }

    fn enforce_bounds(&mut self, session: SessionHash) -> Option<Bound> {
        let mut exceeded = None;
        while let Some(session_answers) = self.sessions.get(&session)
            && session_answers.size > MAX_SESSION_SIZE
            && let Some(&oldest) = session_answers.places.first()
        {
            self.evict(oldest);
            exceeded = Some(Bound::Session);
        }
        while self.size > MAX_INSTANCE_SIZE
            && let Some((&oldest, _)) = self.answers.first_key_value()
        {
            self.evict(oldest);
            exceeded = Some(Bound::Instance);
        }
        exceeded
    }

    fn evict(&mut self, number: u64) {
        let Some(queued) = self.take_queued(number) else {
            return;
        };
        let QueuedAnswer {
            key,
            expires,
            state,
            ..
        } = queued;
        match state {
            State::New => self.free(key, number),
            // Its removal is queued once the write has ended.
            State::InFlight => {}
            State::Failed | State::Written => {
                self.removals.insert(number, Removal { key, expires });
            }
        }
    }

    /// Removes an answer from all totals, and from all collections except `places`.
    ///
    /// The key therefore stays taken.
    fn take_queued(&mut self, number: u64) -> Option<QueuedAnswer> {
        let queued = self.answers.remove(&number)?;
        self.waiting.remove(&number);
        self.unwritten.remove(&number);
        self.size -= queued.size;
        if let Slot::Occupied(mut session_answers) = self.sessions.entry(queued.key.session) {
            session_answers.get_mut().size -= queued.size;
            session_answers.get_mut().places.remove(&number);
            if session_answers.get().places.is_empty() {
                session_answers.remove();
            }
        }
        Some(queued)
    }

    /// Frees a key, unless it has since been assigned another place.
    fn free(&mut self, key: AnswerKey, number: u64) {
        if let Slot::Occupied(place) = self.places.entry(key)
            && *place.get() == number
        {
            place.remove();
        }
    }
}

// === impl Operation ===

impl Operation {
    fn bytes(&self) -> usize {
        self.text.as_ref().map_or(0, Bytes::len)
    }
}

// === impl Bound ===

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Session => f.write_str("1 MiB per session"),
            Self::Instance => f.write_str("64 MiB per instance"),
            Self::Time => f.write_str("ten minutes without the directory"),
        }
    }
}

#[cfg(test)]
mod tests;
