//! Calls that have ended, for clients that come back for them.
//!
//! A client that was cut off asks again for a stream whose call has ended meanwhile. What it gets then is
//! remembered here: the answer, or that the call was cancelled. It is asked for as often as the client likes.
//!
//! All records are in one queue, in the order in which their calls ended. A record is kept at least until its time: it
//! is forgotten when it is at the head and its time is over, so it may wait for one before it that stays longer. Bounded
//! twice, by bytes in all and by bytes a session; over that the oldest go first, and their clients get what they would
//! get without this crate.
//!
//! Either way the one that goes is the oldest of its session. So a session has its records in a queue of its own, and
//! what is common has only turns. No map knows a record: it is looked for among those of its session.

use std::collections::{VecDeque, hash_map::Entry};

use tokio::time::Instant;

use super::{
    index::{Slot, Slots, StreamId},
    room::GiveBack,
    sessions::{Session, Sessions},
    streams::Streams,
};
use crate::call::{CancelReason, RequestId};

/// What a record costs besides its answer and the texts in it, in bytes, about: its queues and its session.
const RECORD: usize = 512;

/// How a remembered call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End<A> {
    Answered(A),
    Cancelled(RequestId, CancelReason),
}

/// A call that ends and is to be remembered.
#[derive(Debug)]
pub(crate) struct Ended<A> {
    pub(crate) end: End<A>,
    /// The size of the answer in bytes.
    pub(crate) weight: usize,
    pub(crate) until: Instant,
}

/// How many bytes may be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) total: usize,
    pub(crate) session: usize,
}

/// In which order the records of all sessions go.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) limits: Limits,
    /// Oldest first, and some whose record is gone already. The head's is not.
    turns: VecDeque<Turn>,
    records: usize,
    bytes: usize,
    /// The number of the next record.
    next: u64,
}

/// The turn of a session's oldest record, if it has this number.
#[derive(Debug)]
struct Turn {
    session: Slot,
    number: u64,
    until: Instant,
}

/// A record.
#[derive(Debug)]
pub(super) struct Kept<A> {
    number: u64,
    pub(super) streams: Streams,
    pub(super) end: End<A>,
    weight: usize,
}

// === impl Memory ===

impl Memory {
    pub(super) fn new() -> Self {
        Self {
            limits: Limits::DEFAULT,
            turns: VecDeque::new(),
            records: 0,
            bytes: 0,
            next: 0,
        }
    }

    /// Keeps an ended call, and forgets what is too much for its session: perhaps that same call.
    pub(super) fn keep<A>(
        &mut self,
        slot: Slot,
        session: &mut Session<A>,
        streams: Streams,
        ended: Ended<A>,
    ) {
        let texts = session.key.text_len() + ended.end.text_len();
        let weight = RECORD + ended.weight + texts + streams.len() * size_of::<StreamId>();
        let number = self.next;
        self.next += 1;
        if session.kept.is_empty() {
            // Most sessions of a flood have no second one.
            session.kept.reserve_exact(1);
        }
        session.kept.push_back(Kept {
            number,
            streams,
            end: ended.end,
            weight,
        });
        self.turns.push_back(Turn {
            session: slot,
            number,
            until: ended.until,
        });
        self.records += 1;
        self.bytes += weight;
        session.bytes += weight;
        while session.bytes > self.limits.session {
            self.forget_oldest_of(session);
        }
    }

    fn forget_oldest_of<A>(&mut self, session: &mut Session<A>) {
        if let Some(kept) = session.kept.pop_front() {
            session.kept.give_back();
            session.bytes -= kept.weight;
            self.bytes -= kept.weight;
            self.records -= 1;
        }
    }

    /// When the oldest is to be forgotten.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.turns.front().map(|turn| turn.until)
    }

    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.turns.capacity()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.records
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn is_empty(&self) -> bool {
        self.turns.is_empty() && self.records == 0 && self.bytes == 0
    }
}

// === impl Sessions ===

impl<A: Clone> Sessions<A> {
    /// Forgets those whose time is over by `now`.
    pub(super) fn forget_due(&mut self, now: Instant) {
        while self.memory.next_end().is_some_and(|at| at <= now) && self.forget_oldest() {
            self.drop_gone();
        }
    }

    /// Forgets what is remembered of a session.
    pub(super) fn forget_all_of(&mut self, slot: Slot) {
        self.forget_in(slot, |session| !session.kept.is_empty());
        self.drop_gone();
    }

    /// Forgets what is too much for all sessions.
    pub(super) fn make_room(&mut self) {
        while self.memory.bytes > self.memory.limits.total && self.forget_oldest() {}
        self.drop_gone();
    }

    /// `false` if there is none.
    fn forget_oldest(&mut self) -> bool {
        let Some(turn) = self.memory.turns.pop_front() else {
            return false;
        };
        self.forget_in(turn.session, |session| turn.is_of(session));
        true
    }

    /// Forgets the oldest of a session as long as it is to go.
    fn forget_in(&mut self, slot: Slot, is_to_go: impl Fn(&Session<A>) -> bool) {
        let Entry::Occupied(mut session) = self.by_slot.entry(slot) else {
            return;
        };
        while is_to_go(session.get()) {
            self.memory.forget_oldest_of(session.get_mut());
        }
        if session.get().is_empty() {
            session.remove();
            self.by_slot.give_back();
        }
    }

    /// Drops the turns at the head whose records are gone, and all such when they are more than the others: so they do
    /// not add up behind a record that is kept for long.
    fn drop_gone(&mut self) {
        let Memory { turns, records, .. } = &mut self.memory;
        while turns.len() > *records
            && let Some(turn) = turns.front()
            && !turn.is_kept(&self.by_slot)
        {
            turns.pop_front();
        }
        if turns.len() > 2 * *records {
            turns.retain(|turn| turn.is_kept(&self.by_slot));
        }
        turns.give_back();
    }
}

// === impl Turn ===

impl Turn {
    /// Whether its record is still kept in this session, which forgets the oldest first.
    fn is_of<A>(&self, session: &Session<A>) -> bool {
        let oldest = session.kept.front();
        oldest.is_some_and(|oldest| oldest.number <= self.number)
    }

    fn is_kept<A>(&self, sessions: &Slots<Session<A>>) -> bool {
        let session = sessions.get(&self.session);
        session.is_some_and(|session| self.is_of(session))
    }
}

// === impl End ===

impl<A> End<A> {
    /// How long the texts in it are that a client chose.
    fn text_len(&self) -> usize {
        match self {
            Self::Cancelled(RequestId::String(id), _) => id.len(),
            Self::Cancelled(RequestId::Number(_), _) | Self::Answered(_) => 0,
        }
    }
}

// === impl Limits ===

impl Limits {
    /// 16 MiB in all, 1 MiB a session: what a busy server can spare, and no session can take it all.
    pub(crate) const DEFAULT: Self = Self {
        total: 16 * 1024 * 1024,
        session: 1024 * 1024,
    };
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::{collection::vec, prelude::*};

    use super::{
        super::{
            entry::Place,
            index::{Names, Scope, SessionKey},
        },
        *,
    };
    use crate::call::CallId;

    const LIMITS: Limits = Limits {
        total: 8_000,
        session: 3_000,
    };

    /// A memory, and what should be in it, oldest first.
    struct Both {
        sessions: Sessions<()>,
        expected: Vec<Expected>,
        kept: u64,
        names: Names,
        now: Instant,
    }

    #[derive(Debug, Clone)]
    struct Expected {
        number: u64,
        session: Slot,
        weight: usize,
        until: Instant,
    }

    impl Both {
        fn new() -> Self {
            let mut sessions = Sessions::new();
            sessions.memory.limits = LIMITS;
            Self {
                sessions,
                expected: Vec::new(),
                kept: 0,
                names: Names::default(),
                now: Instant::now(),
            }
        }

        /// Keeps an answer of so many bytes for so many seconds.
        fn keep(&mut self, session: &str, answer: usize, events: u8, seconds: u64) {
            let ended = Ended {
                end: End::Answered(()),
                weight: answer,
                until: self.now + Duration::from_secs(seconds),
            };
            self.keep_this(session, events, ended);
        }

        fn keep_this(&mut self, session: &str, events: u8, ended: Ended<()>) {
            let (slot, key) = self.session(session);
            let mut streams = Streams::default();
            for event in 0..events {
                streams.add(StreamId::Numbered(event.into()));
            }
            let texts = key.text_len() + ended.end.text_len();
            let weight =
                RECORD + ended.weight + texts + usize::from(events) * size_of::<StreamId>();
            self.expected.push(Expected {
                number: self.kept,
                session: slot,
                weight,
                until: ended.until,
            });
            self.kept += 1;
            let place = Place {
                session: slot,
                request: RequestId::Number(1),
                seat: self.sessions.enter(slot, key, CallId::next()).unwrap(),
                owns_key: true,
            };
            let follows = self.sessions.leave(&place, Some((streams, ended)));
            assert_eq!(follows, None);
            self.make_room(slot);
            self.compare();
        }

        fn session(&self, id: &str) -> (Slot, SessionKey) {
            let key = SessionKey {
                scope: Scope::Path("/".into()),
                id: id.into(),
            };
            (self.names.session(&key), key)
        }

        /// The oldest of the session have to go, then the oldest of all.
        fn make_room(&mut self, session: Slot) {
            let sum = |of: &[Expected], session: Option<Slot>| -> usize {
                let mine = of
                    .iter()
                    .filter(|kept| session.is_none_or(|s| kept.session == s));
                mine.map(|kept| kept.weight).sum()
            };
            while sum(&self.expected, Some(session)) > LIMITS.session {
                let oldest = self
                    .expected
                    .iter()
                    .position(|kept| kept.session == session);
                self.expected.remove(oldest.unwrap());
            }
            while sum(&self.expected, None) > LIMITS.total {
                self.expected.remove(0);
            }
        }

        fn pass(&mut self, seconds: u64) {
            self.now += Duration::from_secs(seconds);
            self.sessions.forget_due(self.now);
            let stays = self.expected.iter().position(|kept| kept.until > self.now);
            self.expected.drain(..stays.unwrap_or(self.expected.len()));
            self.compare();
        }

        fn forget_all_of(&mut self, session: &str) {
            let (slot, _) = self.session(session);
            self.sessions.forget_all_of(slot);
            self.expected.retain(|kept| kept.session != slot);
            self.compare();
        }

        fn compare(&self) {
            let Self {
                sessions, expected, ..
            } = self;
            let memory = &sessions.memory;
            assert_eq!(memory.records, expected.len());
            let bytes: usize = expected.iter().map(|kept| kept.weight).sum();
            assert_eq!(memory.bytes, bytes);
            assert!(bytes <= LIMITS.total);
            assert_eq!(memory.next_end(), expected.first().map(|kept| kept.until));
            assert!(memory.turns.len() <= 2 * expected.len());

            let mut records = 0;
            for (slot, session) in &sessions.by_slot {
                let mine = expected.iter().filter(|kept| kept.session == *slot);
                let numbers = session.kept.iter().map(|kept| kept.number);
                assert!(numbers.eq(mine.clone().map(|kept| kept.number)));
                assert!(!session.kept.is_empty());
                assert_eq!(session.bytes, mine.map(|kept| kept.weight).sum::<usize>());
                assert!(session.bytes <= LIMITS.session);
                records += session.kept.len();
            }
            assert_eq!(records, expected.len());
        }
    }

    #[test]
    fn an_answer_that_is_kept_for_long_does_not_make_the_queue_grow() {
        let mut both = Both::new();
        both.keep("a", 0, 1, 3_600);
        for _ in 0..1_000 {
            both.keep("b", 0, 1, 1);
        }
    }

    /// They are the client's: as long as a request may be.
    #[test]
    fn a_record_counts_the_ids_that_it_keeps() {
        let id = "x".repeat(LIMITS.session);
        let mut both = Both::new();
        both.keep("a", 0, 1, 60);
        let request = RequestId::String(id.as_str().into());
        let of_request = Ended {
            end: End::Cancelled(request, CancelReason::Orphaned),
            weight: 0,
            until: both.now,
        };
        both.keep_this("b", 1, of_request);
        assert_eq!(
            both.expected.len(),
            1,
            "it is more than its session may keep"
        );
        both.keep(&id, 0, 1, 60);
        assert_eq!(both.expected.len(), 1, "likewise");
        both.pass(60);
        assert!(both.sessions.memory.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn the_totals_are_the_sums_of_what_is_kept(
            ops in vec((0..10_u8, 0..4_u8, 0..3_500_usize, 0..8_u8, 1..9_u64), 1..60),
        ) {
            let mut both = Both::new();
            for (op, session, answer, events, seconds) in ops {
                let session = session.to_string();
                match op {
                    0 => both.forget_all_of(&session),
                    1 => both.pass(seconds / 2),
                    // Mostly small.
                    _ => both.keep(&session, answer * answer / 3_500, events, seconds),
                }
            }
            both.pass(9);
            assert!(both.sessions.memory.is_empty());
            assert!(both.sessions.by_slot.is_empty());
        }
    }
}
