//! Queues sessions and tombstones, and selects what to write to the directory next.

use std::{collections::HashMap, sync::atomic::Ordering, time::Duration};

use tokio::time::Instant;

use super::{
    contested::Unconfirmed,
    local_session::{LocalSession, Phase},
    queues::{Batch, Work},
    state::{RESTORE_TIMEOUT, Sessions},
};
use crate::{
    directory::Registration,
    ids::{Record, SessionHash, Tombstone},
    lock::lock,
};

/// Maximum number of sessions in one batch. A batch also ends once it reaches [`MAX_BATCH_BYTES`].
pub(super) const MAX_BATCH: usize = 128;
const MAX_BATCH_BYTES: usize = 256 * 1024;

/// How long after its last write a session is rewritten.
///
/// A record evicted by the backend is therefore missing for at most 70 s.
pub(super) const REFRESH_INTERVAL: Duration = Duration::from_secs(60);

// === impl Sessions ===

impl Sessions {
    /// Waits until something may have been queued.
    pub(crate) async fn wait_for_work(&self) {
        self.wake.notified().await;
    }

    /// Requeues all sessions and tombstones, because the directory may have lost them.
    pub(crate) fn write_all_again(&self) {
        self.queues().requeue_tombstones();
        let now = Instant::now();
        for shard in &self.shards {
            for local in lock(shard).values_mut() {
                if local.params.is_some() {
                    local.unconfirmed = Some(Unconfirmed::new(now, &self.unconfirmed));
                }
            }
        }
        self.requeue_if(|_| true);
    }

    /// Queues every session to be written at a new epoch.
    ///
    /// Needed when other instances may have noticed that this instance had no lease.
    pub(crate) fn renew_all(&self) {
        let now = Instant::now();
        for shard in &self.shards {
            for local in lock(shard).values_mut() {
                local.renewal_due = Some(now);
            }
        }
        self.write_all_again();
    }

    /// Requeues all sessions, because another owner has replaced one of their records.
    pub(crate) fn check_all(&self) {
        self.requeue_if(|_| true);
    }

    /// Requeues a session, for example because its record is missing or has another owner.
    ///
    /// Does nothing if the session is not local or its parameters are not known yet.
    pub(crate) fn write_again(&self, session: SessionHash) {
        let must_queue = self.shard(session).get_mut(&session).is_some_and(|local| {
            local.written_at = None;
            local.params.is_some() && !std::mem::replace(&mut local.is_queued, true)
        });
        if must_queue {
            self.queues().rewrites.push_back(session);
            self.wake.notify_one();
        }
    }

    /// Requeues sessions due to be refreshed, and removes those whose restore has timed out.
    pub(crate) fn refresh(&self) {
        let now = Instant::now();
        for shard in &self.shards {
            lock(shard).retain(|_, local| {
                !matches!(local.phase, Phase::Loaded(loaded_at) if now - loaded_at >= RESTORE_TIMEOUT)
            });
        }
        self.requeue_if(|local| {
            local
                .written_at
                .is_some_and(|written_at| now - written_at >= REFRESH_INTERVAL)
        });
    }

    fn requeue_if(&self, is_due: impl Fn(&LocalSession) -> bool) {
        for shard in &self.shards {
            let mut due = Vec::new();
            for (session, local) in lock(shard).iter_mut() {
                if local.params.is_some() && is_due(local) && !local.is_queued {
                    local.is_queued = true;
                    due.push(*session);
                }
            }
            self.queues().rewrites.extend(due);
        }
    }

    /// Returns `true` if a session or tombstone has yet to be confirmed by another write.
    pub(crate) fn has_unconfirmed(&self) -> bool {
        self.unconfirmed.load(Ordering::Acquire) > 0 || self.queues().has_lost_tombstones()
    }

    /// Returns the next sessions to write, new sessions before rewrites.
    pub(crate) fn next_entries(&self) -> Option<Work> {
        let batch = self.take_batch(false).or_else(|| self.take_batch(true));
        batch.map(Work::Register)
    }

    /// Returns the next deletions to write.
    pub(crate) fn next_deletions(&self) -> Option<Work> {
        let deleted = self.take_deleted();
        (!deleted.is_empty()).then_some(Work::Delete(deleted))
    }

    fn take_deleted(&self) -> Vec<(SessionHash, Tombstone)> {
        let mut queues = self.queues();
        let waiting = queues
            .deleted
            .iter_mut()
            .filter(|deleted| !deleted.is_in_flight);
        let taken = waiting.take(MAX_BATCH).map(|deleted| {
            deleted.is_in_flight = true;
            let (by, epoch) = (self.this_instance, deleted.epoch);
            (deleted.session, Tombstone { by, epoch })
        });
        taken.collect()
    }

    fn take_batch(&self, is_rewrite: bool) -> Option<Batch> {
        let taken_at = Instant::now();
        let mut sessions = Vec::new();
        let mut bytes = 0;
        while sessions.len() < MAX_BATCH && bytes < MAX_BATCH_BYTES {
            let Some(session) = self.queues().next(is_rewrite) else {
                break;
            };
            if let Some(local) = self.shard(session).get_mut(&session) {
                local.is_queued = false;
                if let Some(params) = &local.params {
                    bytes += params.len();
                    sessions.push(Registration {
                        session,
                        epoch: local.epoch,
                        renewed: local.renewal_due.map(|_| local.epoch.next()),
                        params: params.clone(),
                    });
                    local.was_sent = true;
                }
            }
        }
        if sessions.is_empty() {
            return None;
        }
        Some(Batch {
            sessions,
            taken_at,
            is_rewrite,
        })
    }

    /// Records that a batch has been written.
    ///
    /// `differing` lists the records that differ from what the batch was meant to write.
    pub(crate) fn on_written(&self, batch: Batch, differing: &[(SessionHash, Record)]) {
        let differing: HashMap<SessionHash, Record> = differing.iter().copied().collect();
        for Registration {
            session, renewed, ..
        } in &batch.sessions
        {
            match differing.get(session) {
                Some(record) => self.on_found(*session, *record),
                None => {
                    if let Some(local) = self.shard(*session).get_mut(session) {
                        local.on_written(batch.taken_at, *renewed);
                    }
                }
            }
        }
        self.written.notify_waiters();
    }

    /// Requeues a batch whose outcome is unknown.
    pub(crate) fn requeue(&self, batch: Batch) {
        let mut requeued = Vec::new();
        for Registration { session, .. } in &batch.sessions {
            if let Some(local) = self.shard(*session).get_mut(session)
                && !local.is_queued
            {
                local.is_queued = true;
                requeued.push(*session);
            }
        }
        {
            let mut queues = self.queues();
            let queue = if batch.is_rewrite {
                &mut queues.rewrites
            } else {
                &mut queues.fresh
            };
            queue.extend(requeued);
        }
    }

    /// Records whether the directory has accepted a session's tombstone.
    pub(crate) fn on_deletion_result(&self, session: SessionHash, is_accepted: bool) {
        {
            let mut queues = self.queues();
            if is_accepted {
                queues.confirm_tombstone(session);
            } else {
                let mut deleted = queues.deleted.iter_mut();
                if let Some(deleted) = deleted.find(|deleted| deleted.session == session) {
                    deleted.is_in_flight = false;
                }
            }
        }
        self.written.notify_waiters();
    }
}
