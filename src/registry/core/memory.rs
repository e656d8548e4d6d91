//! Calls that have ended, for clients that come back for them.
//!
//! A client that was cut off asks again for a stream whose call has ended meanwhile. What it gets then is
//! remembered here: the answer, or that the call was cancelled. It is asked for as often as the client likes,
//! until its time is over. Bounded twice, by bytes in all and by bytes a session; over that the
//! oldest go first, and their clients get what they would get without this crate.

use std::collections::VecDeque;

use tokio::time::Instant;

use super::{
    entry::Streams,
    index::{ById, SessionKey, Slot, Slots, StreamId},
};
use crate::call::{CallId, RequestId};

/// What a record costs besides its answer, in bytes, about: its maps, its names, its session.
const RECORD: usize = 256;

/// How a remembered call ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum End<A> {
    Answered(A),
    Cancelled(RequestId),
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
    total: usize,
    by_session: Slots<Share>,
}

#[derive(Debug)]
pub(super) struct Kept<A> {
    pub(super) slot: Slot,
    pub(super) streams: Streams,
    pub(super) until: Instant,
    session: SessionKey,
    end: End<A>,
    weight: usize,
}

/// What a session keeps.
#[derive(Debug, Default)]
struct Share {
    oldest: VecDeque<CallId>,
    bytes: usize,
}

// === impl Memory ===

impl<A: Clone> Memory<A> {
    pub(super) fn new() -> Self {
        Self {
            limits: Limits::DEFAULT,
            kept: ById::default(),
            oldest: VecDeque::new(),
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
        let weight = RECORD + ended.weight + streams.len() * size_of::<StreamId>();
        let share = self.by_session.entry(slot).or_default();
        share.bytes += weight;
        share.oldest.push_back(id);
        self.total += weight;
        self.oldest.push_back(id);
        let kept = Kept {
            slot,
            streams,
            until: ended.until,
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
            if share.bytes == 0 {
                self.by_session.remove(&kept.slot);
            } else {
                drop_gone(&mut share.oldest, &self.kept);
            }
        }
        drop_gone(&mut self.oldest, &self.kept);
        Some(kept)
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.kept.is_empty()
            && self.oldest.is_empty()
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

/// Drops what is gone from the head of a queue, so that queues do not grow with what passes through.
fn drop_gone<A>(oldest: &mut VecDeque<CallId>, kept: &ById<Kept<A>>) {
    while oldest.front().is_some_and(|id| !kept.contains_key(id)) {
        oldest.pop_front();
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
