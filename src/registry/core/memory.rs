//! Calls that have ended, for clients that come back for them.
//!
//! A client that was cut off asks again for a stream whose call has ended meanwhile. What it gets then is
//! remembered here: the answer, or that the call was cancelled. It is asked for as often as the client likes,
//! until its time is over. Bounded twice, by bytes in all and by bytes a session; over that the
//! oldest go first, and their clients get what they would get without this crate.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use tokio::time::Instant;

use super::{
    entry::Streams,
    index::{ById, SessionKey, Slot, Slots, StreamId},
};
use crate::call::{CallId, CancelReason, RequestId};

/// What a record costs besides its answer and the texts in it, in bytes, about: its maps and its session's.
const RECORD: usize = 768;

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

#[derive(Debug)]
pub(super) struct Memory<A> {
    pub(super) limits: Limits,
    kept: ById<Kept<A>>,
    oldest: VecDeque<CallId>,
    /// When each is to be forgotten, and some that are gone already.
    ends: BinaryHeap<Reverse<(Instant, CallId)>>,
    total: usize,
    by_session: Slots<Share>,
}

#[derive(Debug)]
pub(super) struct Kept<A> {
    pub(super) slot: Slot,
    pub(super) streams: Streams,
    session: SessionKey,
    end: End<A>,
    weight: usize,
}

/// What a session keeps.
#[derive(Debug, Default)]
struct Share {
    oldest: VecDeque<CallId>,
    bytes: usize,
    count: usize,
}

// === impl Memory ===

impl<A: Clone> Memory<A> {
    pub(super) fn new() -> Self {
        Self {
            limits: Limits::DEFAULT,
            kept: ById::default(),
            oldest: VecDeque::new(),
            ends: BinaryHeap::new(),
            total: 0,
            by_session: Slots::default(),
        }
    }

    /// Keeps an ended call. Returns those that have to go for it, perhaps itself.
    pub(super) fn keep(
        &mut self,
        id: CallId,
        slot: Slot,
        session: SessionKey,
        streams: Streams,
        ended: Ended<A>,
    ) -> Vec<CallId> {
        let texts = session.text_len() + ended.end.text_len();
        let weight = RECORD + ended.weight + texts + streams.len() * size_of::<StreamId>();
        let share = self.by_session.entry(slot).or_default();
        share.bytes += weight;
        share.count += 1;
        share.oldest.push_back(id);
        self.total += weight;
        self.oldest.push_back(id);
        self.ends.push(Reverse((ended.until, id)));
        let kept = Kept {
            slot,
            streams,
            session,
            end: ended.end,
            weight,
        };
        self.kept.insert(id, kept);
        self.excess(slot)
    }

    /// Who has to go, oldest first.
    fn excess(&mut self, slot: Slot) -> Vec<CallId> {
        let mut gone = Vec::new();
        let mut in_session = self.by_session.get(&slot).map_or(0, |share| share.bytes);
        let mut total = self.total;
        while in_session > self.limits.session
            && let Some(share) = self.by_session.get_mut(&slot)
            && let Some(oldest) = share.oldest.pop_front()
        {
            if let Some(kept) = self.kept.get(&oldest) {
                in_session -= kept.weight;
                total -= kept.weight;
                gone.push(oldest);
            }
        }
        while total > self.limits.total
            && let Some(oldest) = self.oldest.pop_front()
        {
            if let Some(kept) = self.kept.get(&oldest).filter(|_| !gone.contains(&oldest)) {
                total -= kept.weight;
                gone.push(oldest);
            }
        }
        gone
    }

    pub(super) fn take(&mut self, id: CallId) -> Option<Kept<A>> {
        let kept = self.kept.remove(&id)?;
        self.total -= kept.weight;
        if let Some(share) = self.by_session.get_mut(&kept.slot) {
            share.bytes -= kept.weight;
            share.count -= 1;
            if share.count == 0 {
                self.by_session.remove(&kept.slot);
            } else {
                drop_gone(&mut share.oldest, share.count, &self.kept);
            }
        }
        drop_gone(&mut self.oldest, self.kept.len(), &self.kept);
        self.drop_gone_ends();
        Some(kept)
    }

    /// The same for the heap: its head is always of one that is kept.
    fn drop_gone_ends(&mut self) {
        let Self { ends, kept, .. } = self;
        while ends
            .peek()
            .is_some_and(|Reverse((_, id))| !kept.contains_key(id))
        {
            ends.pop();
        }
        if ends.len() > 2 * kept.len() {
            ends.retain(|Reverse((_, id))| kept.contains_key(id));
        }
    }

    /// When the next one is to be forgotten.
    pub(super) fn next_end(&self) -> Option<Instant> {
        self.ends.peek().map(|Reverse((at, _))| *at)
    }

    /// One whose time is over by `now`.
    pub(super) fn ended(&self, now: Instant) -> Option<CallId> {
        let Reverse((at, id)) = self.ends.peek()?;
        (*at <= now).then_some(*id)
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.kept.len()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
            && self.oldest.is_empty()
            && self.ends.is_empty()
            && self.by_session.is_empty()
            && self.total == 0
    }

    pub(super) fn end_of(
        &self,
        id: CallId,
        session: &SessionKey,
        stream: StreamId,
    ) -> Option<End<A>> {
        let kept = self.kept.get(&id)?;
        let is_it = kept.session == *session && kept.streams.contains(stream);
        is_it.then(|| kept.end.clone())
    }

    pub(super) fn is_of(&self, id: CallId, session: &SessionKey) -> bool {
        self.kept
            .get(&id)
            .is_some_and(|kept| kept.session == *session)
    }
}

/// Drops what is gone from the head of a queue, and from all of it when that is more than what is left:
/// so queues do not grow with what passes through behind an answer that is kept for long.
fn drop_gone<A>(oldest: &mut VecDeque<CallId>, left: usize, kept: &ById<Kept<A>>) {
    while oldest.front().is_some_and(|id| !kept.contains_key(id)) {
        oldest.pop_front();
    }
    if oldest.len() > 2 * left {
        oldest.retain(|id| kept.contains_key(id));
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
        super::index::{Names, Scope},
        *,
    };

    const LIMITS: Limits = Limits {
        total: 8_000,
        session: 3_000,
    };

    /// A memory, and what should be in it: who, whose and how much, oldest first.
    struct Both {
        memory: Memory<()>,
        expected: Vec<(CallId, u8, usize)>,
        names: Names,
        until: Instant,
    }

    impl Both {
        fn new() -> Self {
            let mut memory = Memory::new();
            memory.limits = LIMITS;
            Self {
                memory,
                expected: Vec::new(),
                names: Names::default(),
                until: Instant::now() + Duration::from_secs(60),
            }
        }

        fn keep(&mut self, session: u8, answer: usize, events: u8) -> CallId {
            let id = CallId::next();
            let key = SessionKey {
                scope: Scope::Path("/".into()),
                id: session.to_string().into(),
            };
            let mut streams = Streams::default();
            for event in 0..events {
                streams.add(StreamId::Numbered(event.into()));
            }
            let ended = Ended {
                end: End::Answered(()),
                weight: answer,
                until: self.until,
            };
            let slot = self.names.session(&key);
            let texts = key.text_len();
            let gone = self.memory.keep(id, slot, key, streams, ended);
            let weight = RECORD + answer + texts + usize::from(events) * size_of::<StreamId>();
            self.expected.push((id, session, weight));
            assert_eq!(gone, self.make_room(session));
            for id in gone {
                assert!(self.memory.take(id).is_some());
            }
            self.compare();
            id
        }

        /// Who has to go: the oldest of the session, then the oldest of all.
        fn make_room(&mut self, session: u8) -> Vec<CallId> {
            let mut gone = Vec::new();
            let sum = |of: &[(CallId, u8, usize)], session: Option<u8>| -> usize {
                let mine = of.iter().filter(|kept| session.is_none_or(|s| kept.1 == s));
                mine.map(|kept| kept.2).sum()
            };
            while sum(&self.expected, Some(session)) > LIMITS.session {
                let oldest = self.expected.iter().position(|kept| kept.1 == session);
                gone.push(self.expected.remove(oldest.unwrap()).0);
            }
            while sum(&self.expected, None) > LIMITS.total {
                gone.push(self.expected.remove(0).0);
            }
            gone
        }

        fn take(&mut self, id: CallId) {
            let expected = self.expected.iter().position(|kept| kept.0 == id);
            let weight = expected.map(|at| self.expected.remove(at).2);
            let taken = self.memory.take(id);
            assert_eq!(taken.map(|kept| kept.weight), weight);
            self.compare();
        }

        fn compare(&self) {
            let Self {
                memory, expected, ..
            } = self;
            assert_eq!(memory.kept.len(), expected.len());
            let total: usize = expected.iter().map(|kept| kept.2).sum();
            assert_eq!(memory.total, total);
            assert!(total <= LIMITS.total);
            assert!(memory.oldest.len() <= 2 * expected.len());
            assert!(memory.ends.len() <= 2 * expected.len());

            let mut shares = 0;
            for session in 0..=u8::MAX {
                let mine = expected.iter().filter(|kept| kept.1 == session);
                let Some((id, _, _)) = mine.clone().next() else {
                    continue;
                };
                shares += 1;
                let share = &memory.by_session[&memory.kept[id].slot];
                let bytes: usize = mine.clone().map(|kept| kept.2).sum();
                assert_eq!(share.bytes, bytes);
                assert!(bytes <= LIMITS.session);
                assert!(share.oldest.len() <= 2 * mine.count());
            }
            assert_eq!(memory.by_session.len(), shares);
        }
    }

    #[test]
    fn an_answer_that_is_kept_for_long_does_not_make_the_queues_grow() {
        let mut both = Both::new();
        both.keep(0, 0, 1);
        for _ in 0..1_000 {
            let id = both.keep(0, 0, 1);
            both.take(id);
        }
    }

    /// They are the client's: as long as a request may be.
    #[test]
    fn a_record_counts_the_ids_that_it_keeps() {
        let id = "x".repeat(LIMITS.session);
        let mut both = Both::new();
        let kept = both.keep(0, 0, 1);
        let key = |session: &str| SessionKey {
            scope: Scope::Path("/".into()),
            id: session.into(),
        };
        let cancelled = |request: &str| Ended {
            end: End::Cancelled(RequestId::String(request.into()), CancelReason::Orphaned),
            weight: 0,
            until: both.until,
        };
        let slots = ["a", &id].map(|session| both.names.session(&key(session)));
        let of_request = (slots[0], key("a"), cancelled(&id));
        let of_session = (slots[1], key(&id), cancelled("1"));
        for (slot, key, ended) in [of_request, of_session] {
            let id = CallId::next();
            let gone = both.memory.keep(id, slot, key, Streams::default(), ended);
            assert_eq!(gone, [id], "it is more than its session may keep");
            assert!(both.memory.take(id).is_some());
        }
        both.take(kept);
        assert!(both.memory.is_empty());
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            cases: 500,
            failure_persistence: None,
            ..ProptestConfig::default()
        })]

        #[test]
        fn the_totals_are_the_sums_of_what_is_kept(
            ops in vec((any::<bool>(), 0..4_u8, 0..3_500_usize, 0..8_u8), 1..60),
        ) {
            let mut both = Both::new();
            let mut ids = Vec::new();
            for (keep, session, answer, events) in ops {
                match ids.len() {
                    count if count > 0 && !keep => both.take(ids[answer % count]),
                    // Mostly small.
                    _ => ids.push(both.keep(session, answer * answer / 3_500, events)),
                }
            }
            for id in ids {
                both.take(id);
            }
            assert!(both.memory.is_empty());
        }
    }
}
