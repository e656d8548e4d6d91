//! Calls that have ended, for clients that come back for them.
//!
//! A client that was cut off asks again for a stream whose call has ended meanwhile. What it gets then is
//! remembered here: the answer, or that the call was cancelled. It is asked for as often as the client likes.
//!
//! A record is [owed](Rank::Owed) or [spare](Rank::Spare). The records of a rank are in one queue, in the order in which
//! their calls ended. A record is kept at least until its time: it is forgotten when it is at the head of its queue and
//! its time is over, so it may wait for one before it that stays longer.
//!
//! Bounded twice, by bytes in all and by bytes a session. What cannot fit is not kept, and nothing is forgotten for it:
//! a record that is larger than a bound, or a spare one beside the owed ones. For the others the oldest spare records
//! go, and then the oldest owed ones. Of these the [`Dropped`] tell: their clients get what they would get without this
//! crate.
//!
//! Either way the one that goes is the oldest of its rank in its session. So a session has its records in two queues of
//! its own, and what is common has only turns. No map knows a record: it is looked for among those of its session.

use std::{
    collections::{VecDeque, hash_map::Entry},
    mem,
    sync::Arc,
};

use tokio::time::Instant;

use super::{
    index::{EventId, Slot, Slots, StreamId},
    room::GiveBack,
    sessions::{Session, Sessions},
    streams::Streams,
};
use crate::call::{CallId, CancelReason, Outcome, RequestId};

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

/// The same with what the core knows of it.
#[derive(Debug)]
pub(super) struct Leaving<A> {
    pub(super) call: CallId,
    pub(super) streams: Streams,
    pub(super) had_client: bool,
    pub(super) ended: Ended<A>,
}

/// A record that its client may have come for, and that was let go or never kept because there was no room.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Dropped {
    pub(crate) call: CallId,
    /// The id of its session.
    pub(crate) session: Arc<str>,
    pub(crate) outcome: Outcome,
    /// What it counted.
    pub(crate) bytes: usize,
}

/// How many bytes may be kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Limits {
    pub(crate) total: usize,
    pub(crate) session: usize,
}

/// Whether a client waits for a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rank {
    /// The answer went out to a client that was there. It is kept in case that the link broke just then.
    Spare,
    /// The client was away, or its call was cancelled.
    Owed,
}

/// One for each rank.
#[derive(Debug, Default)]
struct Ranked<T> {
    spare: T,
    owed: T,
}

/// In which order the records of all sessions go.
#[derive(Debug)]
pub(super) struct Memory {
    pub(super) limits: Limits,
    turns: Ranked<Turns>,
    /// The number of the next record.
    next: u64,
    /// What was dropped and not said yet.
    dropped: Vec<Dropped>,
}

/// In which order the records of a rank go.
#[derive(Debug, Default)]
struct Turns {
    /// Oldest first, and some whose record is gone already. The head's is not.
    queue: VecDeque<Turn>,
    records: usize,
    bytes: usize,
}

/// The turn of the oldest record of a session and a rank, if it has this number.
#[derive(Debug)]
struct Turn {
    session: Slot,
    number: u64,
    until: Instant,
}

/// The records of a session. In a box: a session is large enough without any.
#[derive(Debug)]
pub(super) struct Remembered<A>(Option<Box<Ranked<Records<A>>>>);

/// Those of a rank.
#[derive(Debug)]
struct Records<A> {
    /// Oldest first.
    kept: VecDeque<Kept<A>>,
    bytes: usize,
}

/// A record.
#[derive(Debug)]
struct Kept<A> {
    number: u64,
    call: CallId,
    streams: Streams,
    end: End<A>,
    weight: usize,
}

/// Why a record goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Why {
    Over,
    NoRoom,
}

// === impl Memory ===

impl Memory {
    pub(super) fn new() -> Self {
        Self {
            limits: Limits::DEFAULT,
            turns: Ranked::default(),
            next: 0,
            dropped: Vec::new(),
        }
    }

    /// Keeps an ended call if it can, and forgets what is then too much for its session.
    pub(super) fn keep<A>(&mut self, slot: Slot, session: &mut Session<A>, leaving: Leaving<A>) {
        let rank = leaving.rank();
        let Leaving {
            call,
            streams,
            ended,
            ..
        } = leaving;
        let texts = session.key.text_len() + ended.end.text_len();
        let weight = RECORD + ended.weight + texts + streams.len() * size_of::<StreamId>();
        let number = self.next;
        self.next += 1;
        let kept = Kept {
            number,
            call,
            streams,
            end: ended.end,
            weight,
        };
        if weight > self.most(rank, session) {
            return self.note_dropped(rank, session, &kept);
        }
        session.kept.push(rank, kept);
        let turns = self.turns.of_mut(rank);
        turns.records += 1;
        turns.bytes += weight;
        turns.queue.push_back(Turn {
            session: slot,
            number,
            until: ended.until,
        });
        while session.kept.bytes() > self.limits.session {
            let rank = session.kept.goes_first();
            self.forget_oldest_of(session, rank, Why::NoRoom);
        }
    }

    /// How large a record may be to fit in, with whatever may be forgotten for it.
    fn most<A>(&self, rank: Rank, session: &Session<A>) -> usize {
        let Limits {
            total,
            session: share,
        } = self.limits;
        match rank {
            Rank::Owed => share.min(total),
            Rank::Spare => {
                let share = share.saturating_sub(session.kept.bytes_of(Rank::Owed));
                share.min(total.saturating_sub(self.turns.owed.bytes))
            }
        }
    }

    fn forget_oldest_of<A>(&mut self, session: &mut Session<A>, rank: Rank, why: Why) {
        let Some(kept) = session.kept.pop(rank) else {
            return;
        };
        let turns = self.turns.of_mut(rank);
        turns.bytes -= kept.weight;
        turns.records -= 1;
        if why == Why::NoRoom {
            self.note_dropped(rank, session, &kept);
        }
    }

    fn note_dropped<A>(&mut self, rank: Rank, session: &Session<A>, kept: &Kept<A>) {
        if rank == Rank::Owed {
            self.dropped.push(Dropped {
                call: kept.call,
                session: session.key.id.clone(),
                outcome: kept.end.outcome(),
                bytes: kept.weight,
            });
        }
    }

    pub(super) fn has_dropped(&self) -> bool {
        !self.dropped.is_empty()
    }

    pub(super) fn take_dropped(&mut self) -> Vec<Dropped> {
        mem::take(&mut self.dropped)
    }

    /// When the first of the oldest is to be forgotten.
    pub(super) fn next_end(&self) -> Option<Instant> {
        let ends = [self.turns.spare.next_end(), self.turns.owed.next_end()];
        ends.into_iter().flatten().min()
    }

    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        self.turns.spare.queue.capacity() + self.turns.owed.queue.capacity()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        self.turns.spare.records + self.turns.owed.records
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn is_empty(&self) -> bool {
        let is_empty = |turns: &Turns| turns.queue.is_empty() && turns.bytes == 0;
        self.len() == 0 && is_empty(&self.turns.spare) && is_empty(&self.turns.owed)
    }
}

// === impl Sessions ===

impl<A: Clone> Sessions<A> {
    /// Forgets those whose time is over by `now`.
    pub(super) fn forget_due(&mut self, now: Instant) {
        for rank in Rank::ALL {
            let is_due = |at: Instant| at <= now;
            while self.memory.turns.of(rank).next_end().is_some_and(is_due) {
                self.forget_oldest(rank, Why::Over);
                self.drop_gone(rank);
            }
        }
    }

    /// Forgets what is remembered of a session.
    pub(super) fn forget_all_of(&mut self, slot: Slot) {
        for rank in Rank::ALL {
            let has_some = |session: &Session<A>| session.kept.oldest(rank).is_some();
            self.forget_in(slot, rank, Why::Over, has_some);
            self.drop_gone(rank);
        }
    }

    /// Forgets what is too much for all sessions.
    pub(super) fn make_room(&mut self) {
        for rank in Rank::ALL {
            while self.memory.turns.bytes() > self.memory.limits.total
                && self.forget_oldest(rank, Why::NoRoom)
            {}
            self.drop_gone(rank);
        }
    }

    /// `false` if there is none.
    fn forget_oldest(&mut self, rank: Rank, why: Why) -> bool {
        let Some(turn) = self.memory.turns.of_mut(rank).queue.pop_front() else {
            return false;
        };
        self.forget_in(turn.session, rank, why, |session| turn.is_of(session, rank));
        true
    }

    /// Forgets the oldest of a session and a rank as long as it is to go.
    fn forget_in(
        &mut self,
        slot: Slot,
        rank: Rank,
        why: Why,
        is_to_go: impl Fn(&Session<A>) -> bool,
    ) {
        let Entry::Occupied(mut session) = self.by_slot.entry(slot) else {
            return;
        };
        while is_to_go(session.get()) {
            self.memory.forget_oldest_of(session.get_mut(), rank, why);
        }
        if session.get().is_empty() {
            session.remove();
            self.by_slot.give_back();
        }
    }

    /// Drops the turns at the head whose records are gone, and all such when they are more than the others: so they do
    /// not add up behind a record that is kept for long.
    fn drop_gone(&mut self, rank: Rank) {
        let Turns { queue, records, .. } = self.memory.turns.of_mut(rank);
        while queue.len() > *records
            && let Some(turn) = queue.front()
            && !turn.is_kept(&self.by_slot, rank)
        {
            queue.pop_front();
        }
        if queue.len() > 2 * *records {
            queue.retain(|turn| turn.is_kept(&self.by_slot, rank));
        }
        queue.give_back();
    }
}

// === impl Leaving ===

impl<A> Leaving<A> {
    fn rank(&self) -> Rank {
        match self.ended.end {
            End::Answered(_) if self.had_client => Rank::Spare,
            End::Answered(_) | End::Cancelled(..) => Rank::Owed,
        }
    }
}

// === impl Rank ===

impl Rank {
    /// In the order in which their records go.
    const ALL: [Self; 2] = [Self::Spare, Self::Owed];
}

// === impl Ranked ===

impl<T> Ranked<T> {
    fn of(&self, rank: Rank) -> &T {
        match rank {
            Rank::Spare => &self.spare,
            Rank::Owed => &self.owed,
        }
    }

    fn of_mut(&mut self, rank: Rank) -> &mut T {
        match rank {
            Rank::Spare => &mut self.spare,
            Rank::Owed => &mut self.owed,
        }
    }
}

impl Ranked<Turns> {
    fn bytes(&self) -> usize {
        self.spare.bytes + self.owed.bytes
    }
}

// === impl Turns ===

impl Turns {
    fn next_end(&self) -> Option<Instant> {
        self.queue.front().map(|turn| turn.until)
    }
}

// === impl Turn ===

impl Turn {
    /// Whether its record is still kept in this session, which forgets the oldest first.
    fn is_of<A>(&self, session: &Session<A>, rank: Rank) -> bool {
        let oldest = session.kept.oldest(rank);
        oldest.is_some_and(|oldest| oldest.number <= self.number)
    }

    fn is_kept<A>(&self, sessions: &Slots<Session<A>>, rank: Rank) -> bool {
        let session = sessions.get(&self.session);
        session.is_some_and(|session| self.is_of(session, rank))
    }
}

// === impl Remembered ===

impl<A> Remembered<A> {
    pub(super) fn is_empty(&self) -> bool {
        Rank::ALL
            .into_iter()
            .all(|rank| self.oldest(rank).is_none())
    }

    fn of(&self, rank: Rank) -> Option<&Records<A>> {
        Some(self.0.as_ref()?.of(rank))
    }

    fn oldest(&self, rank: Rank) -> Option<&Kept<A>> {
        self.of(rank)?.kept.front()
    }

    fn bytes_of(&self, rank: Rank) -> usize {
        self.of(rank).map_or(0, |records| records.bytes)
    }

    fn bytes(&self) -> usize {
        Rank::ALL.map(|rank| self.bytes_of(rank)).iter().sum()
    }

    /// Whose turn it is if one has to go.
    fn goes_first(&self) -> Rank {
        match self.oldest(Rank::Spare) {
            Some(_) => Rank::Spare,
            None => Rank::Owed,
        }
    }

    /// How the latest of these calls ended that had this event.
    pub(super) fn end_of(&self, event: EventId) -> Option<&End<A>> {
        let latest = Rank::ALL.map(|rank| self.of(rank)?.latest_with(event));
        let latest = latest.into_iter().flatten().max_by_key(|kept| kept.number);
        latest.map(|kept| &kept.end)
    }

    fn push(&mut self, rank: Rank, kept: Kept<A>) {
        self.0.get_or_insert_default().of_mut(rank).push(kept);
    }

    /// Takes the oldest out.
    fn pop(&mut self, rank: Rank) -> Option<Kept<A>> {
        self.0.as_mut()?.of_mut(rank).pop()
    }

    #[cfg(any(test, fuzzing))]
    pub(super) fn len(&self) -> usize {
        let len = |rank| self.of(rank).map_or(0, |records| records.kept.len());
        Rank::ALL.map(len).iter().sum()
    }

    #[cfg(test)]
    pub(super) fn room(&self) -> usize {
        let room = |rank| self.of(rank).map_or(0, |records| records.kept.capacity());
        Rank::ALL.map(room).iter().sum()
    }
}

impl<A> Default for Remembered<A> {
    fn default() -> Self {
        Self(None)
    }
}

// === impl Records ===

impl<A> Records<A> {
    fn push(&mut self, kept: Kept<A>) {
        if self.kept.is_empty() {
            // Most sessions of a flood have no second one.
            self.kept.reserve_exact(1);
        }
        self.bytes += kept.weight;
        self.kept.push_back(kept);
    }

    fn pop(&mut self) -> Option<Kept<A>> {
        let kept = self.kept.pop_front()?;
        self.kept.give_back();
        self.bytes -= kept.weight;
        Some(kept)
    }

    fn latest_with(&self, event: EventId) -> Option<&Kept<A>> {
        let mut kept = self.kept.iter().rev();
        kept.find(|kept| kept.streams.have(event))
    }
}

impl<A> Default for Records<A> {
    fn default() -> Self {
        Self {
            kept: VecDeque::new(),
            bytes: 0,
        }
    }
}

// === impl End ===

impl<A> End<A> {
    fn outcome(&self) -> Outcome {
        match self {
            Self::Answered(_) => Outcome::Completed,
            Self::Cancelled(_, CancelReason::ClientCancelled) => Outcome::ClientCancelled,
            Self::Cancelled(_, reason) => Outcome::Cancelled(*reason),
        }
    }

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
        super::{entry::Place, index::Names},
        *,
    };
    use crate::call::CallId;
    use crate::call::{Scope, SessionKey};

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
            let weight =
                RECORD + ended.weight + texts + usize::from(events) * size_of::<StreamId>();
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
}
