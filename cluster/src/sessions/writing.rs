//! What of the sessions is still to be written to the directory.

use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

use tokio::time::Instant;

use super::{
    contested::Unconfirmed,
    here::Here,
    queues::{Batch, Work},
    state::{RESTORED_WITHIN, Sessions, lock},
};
use crate::{
    directory::Registration,
    ids::{Record, SessionHash, Tombstone},
};

/// How many sessions are written or deleted at once: 128, and not many more than 256 KiB.
pub(super) const MAX_BATCH: usize = 128;
const MAX_BATCH_BYTES: usize = 256 * 1024;

/// How long after it was written a session is written again: 1 min. So a record that the engine evicted is missing for 70 s at most.
pub(super) const REFRESHED_AFTER: Duration = Duration::from_secs(60);

// === impl Sessions ===

impl Sessions {
    /// Returns when there may be something to be written.
    pub(crate) async fn until_work(&self) {
        self.wake.notified().await;
    }

    /// Everything is to be written again.
    pub(crate) fn write_all_again(&self) {
        self.work().bury_again();
        let now = Instant::now();
        for shard in &self.shards {
            for here in lock(shard).values_mut() {
                if here.params.is_some() {
                    here.unconfirmed = Some(Unconfirmed::new(now, &self.unconfirmed));
                }
            }
        }
        self.queue_again(|_| true);
    }

    /// Everything is to be written again, each session at a new epoch: others may have seen this instance without a lease.
    pub(crate) fn renew_all(&self) {
        let now = Instant::now();
        for shard in &self.shards {
            for here in lock(shard).values_mut() {
                here.renews = Some(now);
            }
        }
        self.write_all_again();
    }

    /// The directory does not know a session that it should.
    pub(crate) fn write_again(&self, session: SessionHash) {
        let is_to_be_written = self.shard(session).get_mut(&session).is_some_and(|here| {
            here.written = None;
            here.params.is_some() && !std::mem::replace(&mut here.is_queued, true)
        });
        if is_to_be_written {
            self.work().again.push_back(session);
            self.wake.notify_one();
        }
    }

    /// What was written long ago is to be written again. What was to be restored and was not is forgotten.
    pub(crate) fn refresh(&self) {
        let now = Instant::now();
        for shard in &self.shards {
            lock(shard).retain(|_, here| {
                here.loaded
                    .is_none_or(|since| now - since < RESTORED_WITHIN)
            });
        }
        self.queue_again(|here| here.written.is_some_and(|at| now - at >= REFRESHED_AFTER));
    }

    fn queue_again(&self, is_due: impl Fn(&Here) -> bool) {
        for shard in &self.shards {
            let mut due = Vec::new();
            for (session, here) in lock(shard).iter_mut() {
                if here.params.is_some() && is_due(here) && !here.is_queued {
                    here.is_queued = true;
                    due.push(*session);
                }
            }
            self.work().again.extend(due);
        }
    }

    /// Whether something is not written yet that the directory may have lost, or another instance may have claimed.
    pub(crate) fn is_behind(&self) -> bool {
        self.unconfirmed.load(Ordering::Acquire) > 0 || self.work().has_lost_tombstones()
    }

    /// The sessions that are to be written next: new ones, then those that are written again.
    pub(crate) fn next_entries(&self) -> Option<Work> {
        let batch = self.take_batch(false).or_else(|| self.take_batch(true));
        batch.map(Work::Enter)
    }

    /// The deletions that are to be written next.
    pub(crate) fn next_deletions(&self) -> Option<Work> {
        let deleted = self.take_deleted();
        (!deleted.is_empty()).then_some(Work::Delete(deleted))
    }

    fn take_deleted(&self) -> Vec<(SessionHash, Tombstone)> {
        let mut work = self.work();
        let waiting = work.deleted.iter_mut().filter(|of| !of.is_under_way);
        let taken = waiting.take(MAX_BATCH).map(|of| {
            of.is_under_way = true;
            let (by, epoch) = (self.me, of.epoch);
            (of.session, Tombstone { by, epoch })
        });
        taken.collect()
    }

    fn take_batch(&self, is_again: bool) -> Option<Batch> {
        let begun = Instant::now();
        let mut sessions = Vec::new();
        let mut bytes = 0;
        while sessions.len() < MAX_BATCH && bytes < MAX_BATCH_BYTES {
            let Some(session) = self.work().next(is_again) else {
                break;
            };
            if let Some(here) = self.shard(session).get_mut(&session) {
                here.is_queued = false;
                if let Some(params) = &here.params {
                    bytes += params.len();
                    sessions.push(Registration {
                        session,
                        epoch: here.epoch,
                        renewed: here.renews.map(|_| here.epoch.next()),
                        params: params.clone(),
                    });
                    here.is_sent = true;
                }
            }
        }
        if sessions.is_empty() {
            return None;
        }
        Some(Batch {
            sessions,
            begun,
            is_again,
        })
    }

    /// The directory knows these now, but for those whose records it left as they were.
    pub(crate) fn wrote(&self, batch: Batch, left: &[(SessionHash, Record)]) {
        let left: HashMap<SessionHash, Record> = left.iter().copied().collect();
        for Registration {
            session, renewed, ..
        } in &batch.sessions
        {
            match left.get(session) {
                Some(record) => self.found(*session, *record),
                None => {
                    if let Some(here) = self.shard(*session).get_mut(session) {
                        here.was_written(batch.begun, *renewed);
                    }
                }
            }
        }
        self.written.notify_waiters();
    }

    /// Whether the directory knows these now is not known.
    pub(crate) fn put_back(&self, batch: Batch) {
        let mut again = Vec::new();
        for Registration { session, .. } in &batch.sessions {
            if let Some(here) = self.shard(*session).get_mut(session)
                && !here.is_queued
            {
                here.is_queued = true;
                again.push(*session);
            }
        }
        {
            let mut work = self.work();
            let queue = if batch.is_again {
                &mut work.again
            } else {
                &mut work.fresh
            };
            queue.extend(again);
        }
    }

    /// The directory has the tombstone of a session, or did not take it.
    pub(crate) fn deleted_there(&self, session: SessionHash, is_there: bool) {
        {
            let mut work = self.work();
            if is_there {
                work.bury(session);
            } else {
                let mut deleted = work.deleted.iter_mut();
                if let Some(deleted) = deleted.find(|deleted| deleted.session == session) {
                    deleted.is_under_way = false;
                }
            }
        }
        self.written.notify_waiters();
    }
}
