use std::time::Duration;

use proptest::{collection::vec, prelude::*};

use super::{
    super::{
        entry::Place,
        index::{Names, StreamId},
        memory::{Limits, RECORD},
        remembered::{End, Ended},
        streams::Streams,
    },
    *,
};
use crate::call::{CancelReason, RequestId, Scope};

const LIMITS: Limits = Limits {
    total: 8_000,
    session: 3_000,
};

/// A memory, and what should be in it, oldest first.
struct Both {
    sessions: Sessions<()>,
    expected: Vec<Expected>,
    dropped: Vec<CallId>,
    kept: u64,
    names: Names,
    now: Instant,
}

#[derive(Debug, Clone)]
struct Expected {
    number: u64,
    call: CallId,
    rank: Rank,
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
            dropped: Vec::new(),
            kept: 0,
            names: Names::default(),
            now: Instant::now(),
        }
    }

    /// Keeps an answer of so many bytes for so many seconds.
    fn keep(&mut self, rank: Rank, session: &str, answer: usize, events: u8, seconds: u64) {
        let ended = Ended {
            end: End::Answered(()),
            weight: answer,
            until: self.now + Duration::from_secs(seconds),
        };
        self.keep_this(rank, session, events, ended);
    }

    fn keep_this(&mut self, rank: Rank, session: &str, events: u8, ended: Ended<()>) {
        let (slot, key) = self.session(session);
        let mut streams = Streams::default();
        for event in 0..events {
            streams.add(StreamId::Numbered(event.into()));
        }
        let texts = key.text_len() + ended.end.text_len();
        let weight = RECORD + ended.weight + texts + usize::from(events) * size_of::<StreamId>();
        let call = CallId::next();
        let new = Expected {
            number: self.kept,
            call,
            rank,
            session: slot,
            weight,
            until: ended.until,
        };
        self.kept += 1;
        let place = Place {
            session: slot,
            request: RequestId::Number(1),
            seat: self.sessions.enter(slot, key, call).unwrap(),
            owns_key: true,
        };
        let leaving = Leaving {
            call,
            streams,
            had_client: rank == Rank::Spare,
            ended,
        };
        let follows = self.sessions.leave(&place, Some(leaving));
        assert_eq!(follows, None);
        self.expect(new);
        self.compare();
    }

    fn session(&self, id: &str) -> (Slot, SessionKey) {
        let key = SessionKey {
            scope: Scope::Path("/".into()),
            id: id.into(),
        };
        (self.names.session(&key), key)
    }

    /// What cannot fit is not kept. Else the oldest of the session have to go, then the oldest of all; in both
    /// the spare ones before those that are owed.
    fn expect(&mut self, new: Expected) {
        let bounds = [(Some(new.session), LIMITS.session), (None, LIMITS.total)];
        for (session, limit) in bounds {
            let stays = match new.rank {
                Rank::Spare => self.sum(session, &[Rank::Owed]),
                Rank::Owed => 0,
            };
            if new.weight + stays > limit {
                return self.drops(&new);
            }
        }
        self.expected.push(new);
        for (session, limit) in bounds {
            while self.sum(session, &Rank::ALL) > limit {
                let oldest = |rank: Rank| {
                    let mut kept = self.expected.iter();
                    kept.position(|kept| kept.rank == rank && kept.is_of(session))
                };
                let goes = oldest(Rank::Spare).or_else(|| oldest(Rank::Owed));
                let gone = self.expected.remove(goes.unwrap());
                self.drops(&gone);
            }
        }
    }

    fn sum(&self, session: Option<Slot>, ranks: &[Rank]) -> usize {
        let kept = self.expected.iter();
        let counted = kept.filter(|kept| ranks.contains(&kept.rank) && kept.is_of(session));
        counted.map(|kept| kept.weight).sum()
    }

    fn drops(&mut self, gone: &Expected) {
        if gone.rank == Rank::Owed {
            self.dropped.push(gone.call);
        }
    }

    fn pass(&mut self, seconds: u64) {
        self.now += Duration::from_secs(seconds);
        self.sessions.forget_due(self.now);
        for rank in Rank::ALL {
            let mut stays = false;
            self.expected.retain(|kept| {
                stays |= kept.rank == rank && kept.until > self.now;
                kept.rank != rank || stays
            });
        }
        self.compare();
    }

    fn forget_all_of(&mut self, session: &str) {
        let (slot, _) = self.session(session);
        self.sessions.forget_all_of(slot);
        self.expected.retain(|kept| kept.session != slot);
        self.compare();
    }

    fn compare(&mut self) {
        let dropped = self.sessions.memory.take_dropped();
        let dropped = dropped.into_iter().map(|dropped| dropped.call);
        assert_eq!(
            dropped.collect::<Vec<_>>(),
            std::mem::take(&mut self.dropped)
        );
        for rank in Rank::ALL {
            self.compare_rank(rank);
        }
        let memory = &self.sessions.memory;
        assert!(memory.turns.bytes() <= LIMITS.total);
        for session in self.sessions.by_slot.values() {
            assert!(!session.kept.is_empty());
            assert!(session.kept.bytes() <= LIMITS.session);
        }
    }

    fn compare_rank(&self, rank: Rank) {
        let expected = self.expected.iter().filter(|kept| kept.rank == rank);
        let expected: Vec<_> = expected.collect();
        let turns = self.sessions.memory.turns.of(rank);
        assert_eq!(turns.records, expected.len());
        let bytes: usize = expected.iter().map(|kept| kept.weight).sum();
        assert_eq!(turns.bytes, bytes);
        assert_eq!(turns.next_end(), expected.first().map(|kept| kept.until));
        assert!(turns.queue.len() <= 2 * expected.len());

        let mut records = 0;
        for (slot, session) in &self.sessions.by_slot {
            let mine = expected.iter().filter(|kept| kept.session == *slot);
            let kept = session.kept.of(rank).into_iter();
            let kept: Vec<_> = kept.flat_map(|records| &records.kept).collect();
            let numbers = kept.iter().map(|kept| kept.number);
            assert!(numbers.eq(mine.clone().map(|kept| kept.number)));
            let bytes: usize = mine.map(|kept| kept.weight).sum();
            assert_eq!(session.kept.bytes_of(rank), bytes);
            records += kept.len();
        }
        assert_eq!(records, expected.len());
    }
}

impl Expected {
    /// Of this session, or of any.
    fn is_of(&self, session: Option<Slot>) -> bool {
        session.is_none_or(|session| self.session == session)
    }
}

#[test]
fn an_answer_that_is_kept_for_long_does_not_make_the_queue_grow() {
    let mut both = Both::new();
    for rank in Rank::ALL {
        both.keep(rank, "a", 0, 1, 3_600);
        for _ in 0..1_000 {
            both.keep(rank, "b", 0, 1, 1);
        }
    }
}

/// They are the client's: as long as a request may be.
#[test]
fn a_record_counts_the_ids_that_it_keeps() {
    let id = "x".repeat(LIMITS.session);
    let mut both = Both::new();
    both.keep(Rank::Spare, "a", 0, 1, 60);
    let request = RequestId::String(id.as_str().into());
    let of_request = Ended {
        end: End::Cancelled(request, CancelReason::Orphaned),
        weight: 0,
        until: both.now,
    };
    both.keep_this(Rank::Owed, "b", 1, of_request);
    assert_eq!(
        both.expected.len(),
        1,
        "it is more than its session may keep"
    );
    both.keep(Rank::Spare, &id, 0, 1, 60);
    assert_eq!(both.expected.len(), 1, "so is its session's");
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
        ops in vec((0..16_u8, 0..4_u8, 0..3_500_usize, 0..8_u8, 1..9_u64), 1..60),
    ) {
        let mut both = Both::new();
        for (op, session, answer, events, seconds) in ops {
            let session = session.to_string();
            let rank = match op {
                0 => {
                    both.forget_all_of(&session);
                    continue;
                }
                1 => {
                    both.pass(seconds / 2);
                    continue;
                }
                2..9 => Rank::Spare,
                _ => Rank::Owed,
            };
            // Mostly small.
            both.keep(rank, &session, answer * answer / 3_500, events, seconds);
        }
        both.pass(9);
        assert!(both.sessions.memory.is_empty());
        assert!(both.sessions.by_slot.is_empty());
    }
}
